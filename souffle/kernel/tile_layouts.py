"""Where the part of a tensor that a tile makes lies, if the parts of all tiles lie one behind the other.

::

    t[64, 96], tiles of 32 x 32, by rows:           parts[6, 1024], in the shape parts[2, 3, 32, 32]:
    tile 1 makes t[0:32, 32:64]               →     t[i, j] is parts[i // 32, j // 32, i % 32, j % 32]

Found from the exact map of what tiles write, and taken only where the maps of those that write and read the tensor are
contained in it: tile ``t`` then touches nothing but part ``t``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

from souffle.index import isl

__all__ = ["TileLayout", "flat", "layout_of"]


@dataclass(frozen=True)
class TileLayout:
    """A tensor as parts of equal shape.

    Attributes
    ----------
    shape, part : tuple of int
        Of the tensor and of a part, which divides it.
    order : tuple of int
        The dimensions that parts are counted along, the slowest first; those with one part only are left out.
    """

    shape: tuple[int, ...]
    part: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Parts along each dimension."""
        return tuple(extent // own for extent, own in zip(self.shape, self.part, strict=True))

    @property
    def parts(self) -> int:
        """How many there are."""
        return prod(self.counts)

    @property
    def relaid(self) -> tuple[int, ...]:
        """The shape that the tensor has part by part: parts along each dimension of the order, then a part."""
        return (*(self.counts[d] for d in self.order), *self.part)

    @property
    def plain(self) -> bool:
        """Whether the tensor lies part by part as it is, in row-major order."""
        counts, first = self.counts, next((d for d, own in enumerate(self.part) if own > 1), len(self.part))
        return self.order == tuple(sorted(self.order)) and all(count == 1 for count in counts[first + 1 :])

    def holds(self, touched: isl.Map) -> bool:
        """Whether ``[part] -> [index]`` is of elements of each part alone; ``False`` too where isl has no answer."""
        inside = isl.within_budget(lambda: touched.is_subset(self._elements()))
        return bool(inside)

    def _elements(self) -> isl.Map:
        """``[part] -> [index]``, all elements of each."""
        number, below = isl.constant(len(self.shape), 0), 1
        for dimension in reversed(self.order):
            along = isl.divide_floor(isl.axis(len(self.shape), dimension), self.part[dimension])
            number = number.add(along.mul(isl.constant(len(self.shape), below)))
            below *= self.counts[dimension]
        return isl.map_to(isl.box([(0, extent) for extent in self.shape]), [number], (self.parts,)).reverse()


def layout_of(shape: Sequence[int], tiles: int, writes: isl.Map) -> TileLayout | None:
    """The layout whose parts the tiles of a stage make, ``None`` if there is none or isl does not find out.

    Parameters
    ----------
    shape : sequence of int
    tiles : int
    writes : Map
        ``[tile] -> [index]``.
    """
    if not shape:
        return None
    first = isl.within_budget(lambda: isl.bounds(writes.intersect_domain(isl.box([(0, 1)])).range()))
    if not first or any(low for low, _ in first):
        return None
    part = tuple(high + 1 for _, high in first)
    if any(extent % own for extent, own in zip(shape, part, strict=True)) or prod(shape) != tiles * prod(part):
        return None
    several = [d for d, own in enumerate(part) if own < shape[d]]
    for order in permutations(several) if len(several) <= _MOST_ORDERED else ():
        layout = TileLayout(tuple(shape), part, order)
        if layout.holds(writes):
            return layout
    return None


def flat(shape: Sequence[int], touched: Sequence[isl.Map]) -> tuple[tuple[int, ...], tuple[isl.Map, ...]]:
    """The shape of a tensor as a row of its elements, and what is touched of it so."""
    number = isl.constant(len(shape), 0)
    for dimension, extent in enumerate(shape):
        number = number.mul(isl.constant(len(shape), extent)).add(isl.axis(len(shape), dimension))
    row = isl.map_to(isl.box([(0, extent) for extent in shape]), [number], (prod(shape),))
    return (prod(shape),), tuple(one.apply_range(row) for one in touched)


_MOST_ORDERED = 3
"""Dimensions that parts are counted along, whose orders are tried."""
