"""Joining the totals of neighbouring lanes of a warp, each total on all of them or each lane some of the totals.

::

    for d in 8, 4, 2, 1:                          lane & 8: gives 4 of its 8 totals, and gets the others' parts
      for i in 0..8:                              lane & 4: gives 2 of its 4 totals, and gets the others' parts
        t[i] += t[i] of lane ^ d             →    lane & 2: gives 1 of its 2 totals, and gets the other's part
                                                  t[0] += t[0] of lane ^ 1

Eight totals of 16 lanes take 32 shuffles so, or 8. Legal since reductions are associative and commutative: a total is
joined from the same pairs, in an order that is the same in every run. Where a lane's totals are odd in number along
every axis, both lanes go on with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.contraction_statements import loop
from souffle.schedule.gpu.forms.memory_access import bits_of
from souffle.schedule.gpu.tiling.direct_tiling import WARP
from souffle.tvm_compat import PrimExpr, cast

__all__ = ["LaneShare", "LaneTotals"]

_ALL_LANES = 0xFFFFFFFF


@dataclass(frozen=True)
class LaneShare:
    """What a lane has of joined totals: in the places of the first ones along each axis, those that begin elsewhere.

    Attributes
    ----------
    first : mapping of Var to expression
        By axis, which one a lane's first total is; the first where it is missing.
    widths : mapping of Var to int
        How many it has along each axis.
    one_of_alike : list of expression
        Which one it is of the lanes that have the same.
    """

    first: Mapping[tirx.Var, PrimExpr]
    widths: Mapping[tirx.Var, int]
    one_of_alike: list[PrimExpr]


@dataclass(frozen=True, eq=False)
class LaneTotals:
    """The totals of a thread.

    Attributes
    ----------
    totals : buffer
        In registers.
    widths : mapping of Var to int
        The axes along which it has several, as these lie there, the last one fastest, and how many.
    dtype : str
    combine : callable
        One of two.
    """

    totals: Any
    widths: Mapping[tirx.Var, int]
    dtype: str
    combine: Callable[[PrimExpr, PrimExpr], PrimExpr]

    def each(
        self, body: Callable[[dict, PrimExpr], tirx.Stmt], widths: Mapping[tirx.Var, int] | None = None
    ) -> tirx.Stmt:
        """`body` for each total, or the first ones along each axis: its place along each, and among all."""
        axes, widths = [*self.widths], self.widths if widths is None else widths

        def nest(position: int, places: dict, linear: PrimExpr) -> tirx.Stmt:
            if position == len(axes):
                return body(places, linear)
            axis = axes[position]

            def one(n: PrimExpr) -> tirx.Stmt:
                return nest(position + 1, {**places, axis: n}, linear * self.widths[axis] + n)

            return loop("i", widths[axis], one, "unrolled")

        return nest(0, {}, tirx.IntImm("int32", 0))

    def place(self, places: Mapping[tirx.Var, PrimExpr]) -> PrimExpr:
        """Among all totals, of one by its place along each axis, 0 where it is missing."""
        linear: PrimExpr = tirx.IntImm("int32", 0)
        for axis, width in self.widths.items():
            linear = linear * width + places.get(axis, 0)
        return linear

    def joined(self, distances: Sequence[int]) -> list[tirx.Stmt]:
        """All lanes have all totals joined over those at some distances."""
        return [self._exchange(self.widths, self._same, distance) for distance in distances]

    def shared_out(self, thread: PrimExpr, distances: Sequence[int]) -> tuple[list[tirx.Stmt], LaneShare]:
        """Each lane has its share of the totals joined over the lanes at some distances.

        Parameters
        ----------
        thread : expression
            Of the block.
        distances : sequence of int
            Powers of two, each once.
        """
        statements: list[tirx.Stmt] = []
        widths, first, alike = dict(self.widths), {}, 0
        for distance in reversed(distances):
            axis = next((axis for axis, width in widths.items() if width % 2 == 0), None)
            if axis is None:
                alike |= distance
                statements.append(self._exchange(widths, self._same, distance))
                continue
            widths[axis] //= 2
            upper = tirx.NE(tirx.bitwise_and(thread, distance), 0)
            statements.append(self._exchange(widths, self._halves(upper, widths[axis] * self._stride(axis)), distance))
            start = tirx.Select(upper, tirx.IntImm("int32", widths[axis]), tirx.IntImm("int32", 0))
            first[axis] = first[axis] + start if axis in first else start
        one = [tirx.EQ(tirx.bitwise_and(thread, alike), 0)] if alike else []
        return statements, LaneShare(first, widths, one)

    def _stride(self, axis: tirx.Var) -> int:
        """From one total to the next along an axis."""
        after = [*self.widths][[one.same_as(axis) for one in self.widths].index(True) + 1 :]
        return prod(self.widths[one] for one in after)

    def _same(self, i: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
        """What a lane keeps of a total, and gives."""
        return self.totals[i], self.totals[i]

    def _halves(self, upper: PrimExpr, step: int) -> Callable[[PrimExpr], tuple[PrimExpr, PrimExpr]]:
        """What it keeps and gives of two totals so far apart, the second where it goes on with the upper half."""

        def kept_and_given(i: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
            low, high = self.totals[i], self.totals[i + step]
            return tirx.Select(upper, high, low), tirx.Select(upper, low, high)

        return kept_and_given

    def _exchange(
        self,
        widths: Mapping[tirx.Var, int],
        kept_and_given: Callable[[PrimExpr], tuple[PrimExpr, PrimExpr]],
        distance: int,
    ) -> tirx.Stmt:
        """Combine what a lane keeps with what the lane at a distance gives; no shuffle of these waits for another."""
        # Shuffles move 32 or 64 bits.
        wide = self.dtype if bits_of(self.dtype) >= 32 else "float32" if "float" in self.dtype else "int32"
        mask = tirx.const(_ALL_LANES, "uint32")

        def one(_: dict, i: PrimExpr) -> tirx.Stmt:
            kept, given = kept_and_given(i)
            other = tirx.call_intrin(wide, "tirx.tvm_warp_shuffle_xor", mask, cast(given, wide), distance, WARP, WARP)
            return tirx.BufferStore(self.totals, cast(self.combine(cast(kept, wide), other), self.dtype), [i])

        return self.each(one, widths)
