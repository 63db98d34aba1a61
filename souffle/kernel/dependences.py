"""Which tiles of a producer a consumer's tiles read from: what decides whether blocks must wait for each other.

The map from consumer tile to producer tiles is that of what the consumer reads, followed by the inverse of what the
producer writes (:mod:`souffle.kernel.tile_maps`). Within the identity, a tile needs only what the same block made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from souffle.index import isl
from souffle.kernel.tile_maps import TileMaps, tile_maps
from souffle.program import Tensor
from souffle.schedule.gpu.rule import GpuSchedule
from souffle.schedule.stage import Stage

__all__ = ["TileDependence", "TileDependences"]

_MOST_PAIRS = 1 << 14
"""Pairs of tiles that are looked at one by one; beyond, blocks wait."""

_MOST_UNKNOWNS = 4
"""Existential variables in a set of tiles that are counted: isl's budget does not bound the time of counting."""

_MOST = 0.75
"""Of a stage's tiles: a tile that needs more may as well wait for all."""

_BUDGET = isl.BUDGET // 10
"""Of a question here: a dependence that stays on one block is a simple map, and there are many that do not."""


@dataclass(frozen=True, eq=False)
class TileDependence:
    """What the tiles of one stage read of what those of another write.

    Attributes
    ----------
    producer, consumer : TileMaps
    written, read : int
        The parameters of the two that are the tensor.
    """

    producer: TileMaps
    written: int
    consumer: TileMaps
    read: int

    @property
    def tile(self) -> int:
        """A tile of the consumer, in the middle: it shows at once that most dependences are not within the identity."""
        return self.consumer.tiles // 2

    @cached_property
    def sources(self) -> tuple[int, int, int] | None:
        """First and last producer tile that :attr:`tile` reads from, and how many; ``None`` if isl has no answer."""
        writes, read = self.producer.writes(self.written), self.consumer.read_by(self.read, self.tile)
        if writes is None or read is None:
            return None

        def query() -> list[tuple[int, ...]] | None:
            producers = writes.intersect_range(read).domain().coalesce()
            if isl.unknowns(producers) > _MOST_UNKNOWNS:
                return None
            return isl.points(producers) if isl.count_points(producers) <= _MOST_PAIRS else None

        known = isl.within_budget(query, _BUDGET)
        return (known[0][0], known[-1][0], len(known)) if known else None

    @cached_property
    def relation(self) -> isl.Map | None:
        """``[consumer tile] -> [producer tile]``, ``None`` where isl has no answer."""
        writes, reads = self.producer.writes(self.written), self.consumer.reads(self.read)
        if writes is None or reads is None:
            return None
        return isl.within_budget(lambda: reads.apply_range(writes.reverse()).coalesce(), _BUDGET)

    @cached_property
    def same(self) -> bool:
        """Whether each tile reads what the tile of equal number writes, and nothing else."""
        if self.sources != (self.tile, self.tile, 1) or self.relation is None:
            return False
        return isl.is_within_identity(self.relation)

    @cached_property
    def pairs(self) -> np.ndarray | None:
        """All pairs of (consumer tile, producer tile); ``None`` where there are too many or isl has no answer.

        Where isl has none for one tile, it is not asked for all: it would count for long.
        """
        relation = None if self.sources is None else self.relation
        if relation is None:
            return None
        few = isl.within_budget(lambda: isl.count_points(relation.wrap().flatten()) <= _MOST_PAIRS, _BUDGET)
        found = isl.within_budget(lambda: isl.pairs(relation), _BUDGET) if few else None
        return None if found is None else np.array(sorted((c[0], p[0]) for c, p in found), np.int64).reshape(-1, 2)

    @cached_property
    def needed(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last producer tile that each consumer tile reads from, -1 as the last where there is none.

        All of them where isl has no answer, or where :attr:`tile` needs most of them.
        """
        return self._ends(needing=False)

    @cached_property
    def needing(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last consumer tile that reads from each producer tile, in the same way."""
        return self._ends(needing=True)

    def _ends(self, *, needing: bool) -> tuple[np.ndarray, np.ndarray]:
        sides = (self.producer, self.consumer) if needing else (self.consumer, self.producer)
        tiles, others = (side.tiles for side in sides)
        every = np.zeros(tiles, np.int64), np.full(tiles, others - 1, np.int64)
        few = self.sources is not None and self.sources[1] - self.sources[0] < _MOST * self.producer.tiles
        relation = self.relation if few and tiles <= _MOST_PAIRS else None
        if relation is None or isl.unknowns(relation.wrap()) > _MOST_UNKNOWNS:
            return every
        if self.pairs is not None:
            # Where there are few, to look at all of them takes isl a sixth of what it does to find their ends.
            own, other = self.pairs.T[::-1] if needing else self.pairs.T
            first, last = np.full(tiles, others, np.int64), np.full(tiles, -1, np.int64)
            np.minimum.at(first, own, other)
            np.maximum.at(last, own, other)
            return np.where(last < 0, 0, first), last
        asked = relation.reverse() if needing else relation
        found = isl.within_budget(lambda: isl.first_and_last(asked), _BUDGET)
        if found is None:
            return every
        first, last = np.zeros(tiles, np.int64), np.full(tiles, -1, np.int64)
        for tile, ends in found.items():
            first[tile], last[tile] = ends
        return first, last

    def __str__(self) -> str:
        """In words."""
        if self.same:
            return "each tile reads what the tile of equal number wrote"
        if self.sources is None:
            return "any tile may read what any tile wrote"
        first, last, count = self.sources
        where = f"tile {first}" if count == 1 else f"{count} tiles, {first} to {last},"
        return f"tile {self.tile} reads what {where} wrote"


class TileDependences:
    """The dependences between stages, each worked out once for equal schedules."""

    def __init__(self) -> None:
        self._known: dict[tuple[GpuSchedule, int, GpuSchedule, int], TileDependence] = {}

    def between(self, producer: Stage, written: Tensor, consumer: Stage, read: Tensor) -> TileDependence:
        """How `consumer`, which reads `read`, depends on `producer`, which writes `written`.

        Parameters
        ----------
        producer, consumer : Stage
        written, read : Tensor
            One tensor, or two of one shape where the second is what an earlier step of a loop left of the first.
        """
        out = len(producer.inputs) + producer.outputs.index(written)
        into = consumer.inputs.index(read)
        key = (producer.schedule, out, consumer.schedule, into)
        if key not in self._known:
            self._known[key] = TileDependence(tile_maps(producer.schedule), out, tile_maps(consumer.schedule), into)
        return self._known[key]
