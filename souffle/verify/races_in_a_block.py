"""Races and divergent barriers within one block, by running all its threads at once over the accesses only.

Between two block barriers the accesses of different threads come in any order, so that what matters is who touches
which bytes in that span, not when. Conditions on the tile are taken to hold; only if that makes a conflict are tiles
looked at one by one, one of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from souffle.verify.accesses import MemoryAccess, WarpMeeting, leaves
from souffle.verify.accesses_in_order import MOST_POINTS, FunctionInSpan, walked
from souffle.verify.expressions import Expr, Undecided
from souffle.verify.races_in_a_span import Found, NeedsTile, Wrong
from souffle.verify.ranges import kinds

__all__ = ["BlockReport", "check_block"]

_MOST_TILES = 512


@dataclass(frozen=True)
class BlockReport:
    """What was found in one block.

    Attributes
    ----------
    found : Wrong or None
    epochs : int
        Spans between barriers that were looked at.
    """

    found: Wrong | None
    epochs: int


def check_block(
    parts: Sequence[FunctionInSpan],
    tiles: tuple[int, ...] | Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> BlockReport:
    """Whether threads of one block that runs `parts` in turn, for one tile each, conflict.

    Parameters
    ----------
    parts : sequence of FunctionInSpan
    tiles : tuple of int or callable, optional
        The tile of each part; or of two parts, whether a tile of one may come before a tile of the other, given arrays
        of them. By default all parts have the same tile, whichever.

    Raises
    ------
    Undecided
        If there are more tiles to look at one by one than is feasible, or an address depends on data.
    """
    undecided: Undecided | None = None
    if not isinstance(tiles, tuple) and not any(part.globals_ for part in parts):
        try:
            walk = walked(parts, (None,) * len(parts))
            return BlockReport(None, walk.span.epochs)
        except (NeedsTile, Found):
            pass
        except Undecided as reason:
            undecided = reason
    chosen = [tiles] if isinstance(tiles, tuple) else _different_tiles(parts, tiles)
    if len(chosen) > _MOST_TILES:
        raise undecided or Undecided(f"{len(chosen)} tiles whose threads differ in what they do")
    epochs = 0
    for each in chosen:
        try:
            walk = walked(parts, each)
        except Found as found:
            return BlockReport(found.what, epochs)
        epochs += walk.span.epochs
    return BlockReport(None, epochs)


def _different_tiles(
    parts: Sequence[FunctionInSpan], follows: Callable[[np.ndarray, np.ndarray], np.ndarray] | None
) -> list[tuple[int, ...]]:
    """Tiles of each kind, of each part: between tiles of one kind nothing that is looked at differs."""
    different = [_kinds(part) for part in parts]
    if follows is None:
        # Equal ones: a kind is what is of one kind in each part.
        count = min(kind.size for kind in different)
        together = np.unique(np.stack([kind[:count] for kind in different]), axis=1, return_index=True)[1]
        return [(int(tile),) * len(parts) for tile in np.sort(together)]
    ours, theirs = ([np.flatnonzero(kind == number) for number in range(kind.max() + 1)] for kind in different)
    if len(ours) * len(theirs) > _MOST_TILES:
        raise Undecided(f"{len(ours)} and {len(theirs)} tiles whose threads differ in what they do")
    pairs = (_pair(one, other, follows) for one in ours for other in theirs)
    return [pair for pair in pairs if pair is not None]


def _pair(
    ours: np.ndarray, theirs: np.ndarray, follows: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[int, int] | None:
    """A tile of one kind that may come before a tile of another; None if none does."""
    rows = max(1, MOST_POINTS // 16 // theirs.size)
    for start in range(0, ours.size, rows):
        found = np.argwhere(follows(ours[start : start + rows, None], theirs[None, :]))
        if found.size:
            return int(ours[start + found[0, 0]]), int(theirs[found[0, 1]])
    return None


def _kinds(part: FunctionInSpan) -> np.ndarray:
    wanted = {parameter for parameter, _, _ in part.globals_}
    nodes: dict[Expr, None] = {}
    for item, conditions, _ in leaves(part.function.body):
        own: tuple[Expr, ...] = item.conditions if isinstance(item, WarpMeeting) else ()
        if isinstance(item, MemoryAccess):
            memory = item.place.memory
            if memory.kind != "shared" and memory.parameter not in wanted:
                continue
            own = (item.place.offset, *item.conditions)
        nodes.update(dict.fromkeys((*conditions, *own)))
    # Conditions on data are taken to hold in every tile.
    return kinds(part.function.tile, [node for node in nodes if not node.opaque])
