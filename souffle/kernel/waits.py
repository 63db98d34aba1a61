"""Where the blocks of a kernel wait for each other, and where the threads of a block do: the fewest places.

A dependence that stays on one block, whatever the grid, needs a block barrier; any other one needs a grid barrier. A
stage runs in the epoch of its latest producer where it can be on one block with it, else in the next: there are as many
grid barriers as the longest path of dependent stages has edges that leave their block, and no order has fewer. Where a
dependence leaves its block because of how tiles are numbered, or because a consumer tile needs several producer tiles,
tiles are put into slots (:mod:`souffle.kernel.assignment`) if that costs nothing: no block computes more tiles than
before, or what it computes more takes less time than the grid barrier that it saves.

Block barriers are placed as late as possible, so that one covers as many dependences as can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from souffle.decision import Barrier
from souffle.kernel.assignment import Assignment, fit, turns
from souffle.kernel.dependences import TileDependence, TileDependences
from souffle.kernel.edges import Edge, edges_between_steps, edges_of_stages
from souffle.kernel.tile_waits import Crossing, WaitPrices, crossed_sites
from souffle.program import Tensor
from souffle.schedule.stage import LoopStage, Stage, Unit

__all__ = ["Expected", "Sequenced", "Waits"]


@dataclass(frozen=True, eq=False)
class Sequenced:
    """Units in the order to run.

    Attributes
    ----------
    units : tuple of Stage or LoopStage
        By epoch; otherwise in the order given.
    epochs : tuple of int
        How many grid barriers stand before each, loops counted as one epoch.
    barriers : mapping of Unit to Barrier
        Those that stand before a unit, the first of an epoch or one with a block barrier before it.
    """

    units: tuple[Unit, ...]
    epochs: tuple[int, ...]
    barriers: Mapping[Unit, Barrier]


@dataclass(frozen=True)
class Expected:
    """What a kernel is expected to find on the device: what is decided is right for any grid, this says what it costs.

    Attributes
    ----------
    blocks : int
        Blocks of the kernel that the device holds at once; by default as many as there are tiles.
    sync_seconds : float
        What a grid barrier may cost at least, 0 where no cost model knows the device.
    seconds : callable
        The time of one run of a stage in the kernel.
    flags : str
        One of :data:`souffle.options.WAITS`: where tiles may wait for tiles.
    grid : int
        Blocks that it is launched with: as many, and no more than have work.
    barrier, awaited, look : callable, callable and float
        Seconds of a grid barrier of so many blocks, of a wait for the flags of so many of so many, and of a look at a
        flag; nothing where no model knows the device.
    """

    blocks: int = 2**31 - 1
    sync_seconds: float = 0.0
    seconds: Callable[[Stage], float] = lambda stage: 1.0
    flags: str = "barriers"
    grid: int = 2**31 - 1
    barrier: Callable[[int], float] = lambda blocks: 0.0
    awaited: Callable[[int, int], float] = lambda others, blocks: 0.0
    look: float = 0.0

    @property
    def prices(self) -> WaitPrices:
        """What waits cost in the kernel."""
        return WaitPrices(
            self.grid,
            self.barrier,
            self.awaited,
            self.look,
            lambda stage: turns(stage.schedule.tiles, 1, self.grid),
        )

    def turns_of(self, stage: Stage) -> int:
        """How many tiles of a stage the busiest block computes where each is a slot."""
        return turns(stage.schedule.tiles, 1, self.blocks)

    def extra_seconds(self, stage: Stage, turns_: int) -> float:
        """What a run of a stage takes longer where the busiest block computes so many tiles, by the time of a turn."""
        alone = self.turns_of(stage)
        return self.seconds(stage) * (turns_ / alone - 1) if turns_ > alone else 0.0


class Waits:
    """Decides for the stages of one kernel.

    Parameters
    ----------
    dependences : TileDependences
    expected : Expected
    delayed : mapping of Stage to int, optional
        The epochs of stages that run later than they could, with others that are there.
    """

    def __init__(
        self, dependences: TileDependences, expected: Expected, delayed: Mapping[Stage, int] | None = None
    ) -> None:
        self.dependences = dependences
        self.expected = expected
        self.delayed = delayed or {}
        self.assignments: dict[Stage, Assignment] = {}
        self._slots: dict[Stage, np.ndarray] = {}
        self._bound: set[Stage] = set()

    def sequence(self, units: Sequence[Unit]) -> Sequenced:
        """The order of units, and where they wait.

        Parameters
        ----------
        units : sequence of Stage or LoopStage
            In topological order.
        """
        writer: dict[Tensor, Unit] = {}
        epoch_of: dict[Unit, int] = {}
        demanded: dict[int, Barrier] = {}
        local: dict[Unit, list[Edge]] = {}
        for unit in units:
            edges = [Edge(writer[t], unit, t, t) for t in dict.fromkeys(unit.inputs) if t in writer]
            latest = max((epoch_of[edge.producer] for edge in edges), default=0)
            near = [edge for edge in edges if epoch_of[edge.producer] == latest]
            far = self._leaves_its_block(near)
            if far is None:
                epoch_of[unit] = latest
                local[unit] = near
            else:
                epoch_of[unit] = latest + 1
                demanded.setdefault(latest + 1, self._barrier("grid", far))
            epoch_of[unit] = max(epoch_of[unit], self.delayed.get(unit, 0))
            writer.update(dict.fromkeys(unit.outputs, unit))
        ordered = tuple(sorted(units, key=lambda unit: epoch_of[unit]))
        epochs = tuple(epoch_of[unit] for unit in ordered)
        return Sequenced(ordered, epochs, self._placed(ordered, epochs, demanded, local))

    def between_steps(self, unit: LoopStage, body: Sequenced) -> Barrier:
        """What stands between two steps of a loop: a block barrier if that is enough, else a grid barrier.

        Parameters
        ----------
        unit : LoopStage
        body : Sequenced
            Its stages, from :meth:`sequence`.
        """
        epoch_of = dict(zip(body.units, body.epochs, strict=True))
        last = max(body.epochs)
        for edge, distance, reads_first in edges_between_steps(unit):
            earlier, later = (edge.consumer, edge.producer) if reads_first else (edge.producer, edge.consumer)
            # Barriers inside the steps may stand between already.
            passed = last - epoch_of[earlier] + (distance - 1) * last + epoch_of[later]
            if passed == 0 and not self._on_one_block(edge):
                barrier = self._barrier("grid", edge)
                if reads_first:
                    reason = f"the next step overwrites what it reads: {barrier.reason}"
                    return Barrier("grid", later.name, earlier.name, edge.read.name, reason)
                return barrier
        reason = "what its steps need of each other stays on one block, or a grid barrier inside them stands between"
        return Barrier("block", body.units[0].name, body.units[-1].name, unit.name, reason)

    # What lies across barriers

    def crossings(self, order: Sequenced) -> list[Crossing]:
        """The dependences between units that leave their blocks, and the grid barriers that they cross."""
        epoch_of = dict(zip(order.units, order.epochs, strict=True))
        writer: dict[Tensor, Unit] = {}
        found: list[Crossing] = []
        last = max(order.epochs)
        for unit in order.units:
            for tensor in dict.fromkeys(unit.inputs):
                if tensor in writer:
                    edge = Edge(writer[tensor], unit, tensor, tensor)
                    sites = crossed_sites(epoch_of[edge.producer], epoch_of[unit], 0, last, between=False)
                    found += self._crossing(edge, sites)
            writer.update(dict.fromkeys(unit.outputs, unit))
        return found

    def crossings_of_steps(self, unit: LoopStage, body: Sequenced, *, between: bool) -> list[Crossing]:
        """The same of the stages of a loop, in one step and from step to step.

        Parameters
        ----------
        unit : LoopStage
        body : Sequenced
            Its stages, from :meth:`sequence`.
        between : bool
            Whether a grid barrier stands between two steps.
        """
        epoch_of = dict(zip(body.units, body.epochs, strict=True))
        found = self.crossings(body)
        for edge, distance, reads_first in edges_between_steps(unit):
            earlier, later = (edge.consumer, edge.producer) if reads_first else (edge.producer, edge.consumer)
            epochs = epoch_of[earlier], epoch_of[later]
            sites = crossed_sites(*epochs, distance, max(body.epochs), between=between)
            found += self._crossing(edge, sites, reads_first=reads_first)
        return found

    def _crossing(
        self, edge: Edge, sites: tuple[tuple[int, int], ...], *, reads_first: bool = False
    ) -> Iterator[Crossing]:
        if not sites:
            return
        if edge.of_loops:
            yield Crossing(edge.producer, edge.consumer, sites, None)
        elif not self._on_one_block(edge):
            earlier, later = (edge.consumer, edge.producer) if reads_first else (edge.producer, edge.consumer)
            dependence = self._dependence(edge)
            slots = int(self._slots_of(earlier).max(initial=0)) + 1
            if len(earlier.functions) == len(later.functions) == 1:
                ends = self._in_slots(dependence.needing if reads_first else dependence.needed, earlier, later)
            else:
                # Of what several functions compute nobody says here which tile is whose.
                slots = max(slots, *(function.tiles for function in earlier.functions))
                own = max(function.tiles for function in later.functions)
                ends = np.zeros(own, np.int64), np.full(own, slots - 1)
            yield Crossing(earlier, later, sites, ends, slots)

    def _in_slots(
        self, tiles: tuple[np.ndarray, np.ndarray], earlier: Stage, later: Stage
    ) -> tuple[np.ndarray, np.ndarray]:
        """First and last tile of one stage for each tile of another, as slots of the two."""
        own, other = self._slots_of(later), self._slots_of(earlier)
        first, last = np.full(own.max(initial=0) + 1, 2**31), np.full(own.max(initial=0) + 1, -1)
        low, high = tiles
        some = low <= high
        if some.any():
            # Of slots between a first and a last tile: reduceat looks from each index to the next, every other counts.
            ranges = np.stack([low[some], high[some] + 1], axis=1).ravel()
            slots = np.append(other, other[-1])
            np.minimum.at(first, own[some], np.minimum.reduceat(slots, ranges)[::2])
            np.maximum.at(last, own[some], np.maximum.reduceat(slots, ranges)[::2])
        return first, last

    # Whether dependences stay on one block

    def _leaves_its_block(self, edges: Sequence[Edge]) -> Edge | None:
        """The first of a unit's dependences that leaves its block whatever we do, or ``None``."""
        if any(edge.of_loops for edge in edges):
            return self._leaves_a_loop(edges)
        known = [(edge, self._dependence(edge)) for edge in edges]
        if all(d.same and edge.producer not in self._slots for edge, d in known):
            self._bound.update(stage for edge in edges for stage in (edge.producer, edge.consumer))
            return None
        hopeless = next((edge for edge, d in known if not self._may_share_slots(edge, d)), None)
        if hopeless is not None:
            return hopeless
        if self._follow(known) or self._regroup(known):
            self._bound.update(stage for edge in edges for stage in (edge.producer, edge.consumer))
            return None
        return next((edge for edge, d in known if not d.same), edges[0])

    def _leaves_a_loop(self, edges: Sequence[Edge]) -> Edge | None:
        """The same where a loop depends, or is depended on: between its stages and those around it, in all steps."""
        inside = [(edge, edges_of_stages(edge)) for edge in edges]
        for edge, found in inside:
            if found is None or not all(map(self._on_one_block, found)):
                return edge
        self._bound.update(stage for _, found in inside for one in found for stage in (one.producer, one.consumer))
        return None

    def _dependence(self, edge: Edge) -> TileDependence:
        return self.dependences.between(edge.producer, edge.written, edge.consumer, edge.read)

    def _on_one_block(self, edge: Edge) -> bool:
        """Whether two stages are on one block wherever one needs the other, as tiles are assigned by now."""
        dependence = self._dependence(edge)
        if edge.producer not in self._slots and edge.consumer not in self._slots:
            return dependence.same
        consumer, producer = self._slots_of(edge.consumer), self._slots_of(edge.producer)
        # One tile shows it of most that leave their block, whose pairs isl would count for long.
        if not self._slots_read(edge) <= {int(consumer[dependence.tile])}:
            return False
        pairs = dependence.pairs
        return pairs is not None and bool((consumer[pairs[:, 0]] == producer[pairs[:, 1]]).all())

    def _slots_of(self, stage: Stage) -> np.ndarray:
        return self._slots.get(stage, np.arange(stage.schedule.tiles))

    def _slots_read(self, edge: Edge) -> set[int]:
        """Slots of the first and the last producer tile that one tile of the consumer reads from, as far as known."""
        dependence, slots = self._dependence(edge), self._slots_of(edge.producer)
        return set() if dependence.sources is None else {int(slots[tile]) for tile in dependence.sources[:2]}

    def _may_share_slots(self, edge: Edge, dependence: TileDependence) -> bool:
        """Whether one tile of the consumer needs no more tiles of the producer than a block may take."""
        if dependence.sources is None:
            return False
        wanted = dependence.sources[2]
        held = self.assignments[edge.producer].per_slot if edge.producer in self.assignments else 1
        if wanted <= held:
            return True
        return self.expected.extra_seconds(edge.producer, wanted) <= self.expected.sync_seconds

    def _follow(self, known: Sequence[tuple[Edge, TileDependence]]) -> bool:
        """Put each tile of the consumer into the slot of all producer tiles that it reads from, if that is one."""
        consumer = known[0][0].consumer
        if any(len(self._slots_read(edge)) > 1 for edge, _ in known):
            return False
        slots = np.full(consumer.schedule.tiles, -1, np.int64)
        for edge, dependence in known:
            pairs = dependence.pairs
            if pairs is None:
                return False
            wanted = self._slots_of(edge.producer)[pairs[:, 1]]
            slots[pairs[:, 0]] = wanted
            if not np.array_equal(slots[pairs[:, 0]], wanted):
                return False
        for edge, dependence in known:
            pairs = dependence.pairs
            if not np.array_equal(slots[pairs[:, 0]], self._slots_of(edge.producer)[pairs[:, 1]]):
                return False
        return self._assign({consumer: slots})

    def _regroup(self, known: Sequence[tuple[Edge, TileDependence]]) -> bool:
        """Put tiles of one producer, which no other stage is bound to, and of the consumer together as they meet."""
        if len({edge.producer for edge, _ in known}) != 1 or known[0][0].producer in self._bound:
            return False
        producer, consumer = known[0][0].producer, known[0][0].consumer
        parts = [dependence.pairs for _, dependence in known]
        if any(pairs is None for pairs in parts):
            return False
        found = _components(np.concatenate(parts), consumer.schedule.tiles, producer.schedule.tiles)
        return self._assign({consumer: found[0], producer: found[1]})

    def _assign(self, slots: Mapping[Stage, np.ndarray]) -> bool:
        """Assign tiles to slots, if digits say it and it costs no more than a grid barrier."""
        chosen: dict[Stage, Assignment] = {}
        extra = 0.0
        for stage, own in slots.items():
            # What has constants in registers has them of one tile, the one of its block's number.
            table = None if stage.kept else _table(own)
            assignment = None if table is None else fit(table)
            if assignment is None:
                return False
            extra += self.expected.extra_seconds(stage, turns(*table.shape, self.expected.blocks))
            chosen[stage] = assignment
        if extra > self.expected.sync_seconds:
            return False
        self.assignments.update(chosen)
        self._slots.update(slots)
        return True

    # Where barriers stand

    def _barrier(self, scope: str, edge: Edge) -> Barrier:
        if not edge.of_loops:
            dependence = self._dependence(edge)
            together = scope == "block" and not dependence.same
            reason = f"{dependence}, which the same block computes" if together else str(dependence)
        elif scope == "block":
            reason = "what a loop and what stands around it need of each other stays on one block"
        else:
            reason = "all blocks finish a loop before what follows it, and what it reads before it begins"
        return Barrier(scope, edge.consumer.name, edge.producer.name, edge.read.name, reason)

    def _placed(
        self,
        units: Sequence[Unit],
        epochs: Sequence[int],
        demanded: Mapping[int, Barrier],
        local: Mapping[Unit, Sequence[Edge]],
    ) -> dict[Unit, Barrier]:
        barriers: dict[Unit, Barrier] = {}
        open_: set[Unit] = set()
        before = 0
        for unit, epoch in zip(units, epochs, strict=True):
            if epoch > before:
                barriers[unit] = demanded[epoch]
                open_.clear()
            waiting = next((edge for edge in local.get(unit, ()) if edge.producer in open_), None)
            if waiting is not None:
                barriers[unit] = self._barrier("block", waiting)
                open_.clear()
            open_.add(unit)
            before = epoch
        return barriers


def _table(slots: np.ndarray) -> np.ndarray | None:
    """The tiles of each slot, ``None`` unless all slots from 0 on hold equally many."""
    if slots.min(initial=0) < 0:
        return None
    held = np.bincount(slots)
    if (held != held[0]).any():
        return None
    return np.argsort(slots, kind="stable").reshape(len(held), held[0])


def _components(pairs: np.ndarray, consumers: int, producers: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots of consumer and producer tiles: connected ones share one; -1 for a tile that is in no pair.

    Slots are numbered by their first producer tile.
    """
    slot = np.arange(producers)
    while True:
        # Each consumer takes the least slot of its producers, each producer the least of its consumers.
        least = np.full(consumers, producers, np.int64)
        np.minimum.at(least, pairs[:, 0], slot[pairs[:, 1]])
        after = slot.copy()
        np.minimum.at(after, pairs[:, 1], least[pairs[:, 0]])
        if np.array_equal(after, slot):
            break
        slot = after
    _, numbered = np.unique(slot, return_inverse=True)
    consumer = np.full(consumers, -1, np.int64)
    consumer[pairs[:, 0]] = numbered[pairs[:, 1]]
    return consumer, numbered
