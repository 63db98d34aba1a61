"""What expressions of neighbouring elements read from neighbours in memory, read together.

::

    for i in unrolled(4):                            for i in vectorized(4):
      y[i] = f(total[i], x[a + i], w[i])       →       x0[i] = x[a + i]; w0[i] = w[i]
                                                     for i in unrolled(4):
                                                       y[i] = f(total[i], x0[i], w0[i])

Where a function stands in the way of vectors, a compiler that does not know how addresses are aligned reads four times
as often, and of four neighbours of each thread each read touches as many lines as all of them. Legal for reads at
places that do not depend on what is not known yet, and that stand under no condition of the expression's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad

from souffle.schedule.gpu.emit.contraction_statements import local_buffer, loop
from souffle.schedule.gpu.forms.contraction_expressions import Axis
from souffle.schedule.gpu.forms.memory_access import lanes_along, memory_step
from souffle.tvm_calls import structural_mutate
from souffle.tvm_compat import PrimExpr, collect, dtype_of, is_branch, sequence, substitute

__all__ = ["WideReads"]


class WideReads:
    """Parts some expressions of `lanes` neighbours along an axis.

    Parameters
    ----------
    values : sequence of PrimExpr
    axis : Axis
        Which the expressions are at a multiple of `lanes` of, and at those behind it.
    lanes : int
    later : collection of Var
        What is not known yet where reads stand.

    Attributes
    ----------
    registers : list of Buffer
        One for each read.
    """

    def __init__(self, values: Sequence[PrimExpr], axis: Axis, lanes: int, later: Collection[tirx.Var] = ()) -> None:
        self._axis, self._lanes, self._later = axis, lanes, tuple(later)
        # Stands for which of the neighbours an expression is of.
        self._lane = tirx.Var("lane", "int32")
        self._reads: list[tuple[TensorLoad, tirx.Buffer, int]] = []
        self._values = [self._parted(value) for value in values]

    @property
    def registers(self) -> list[tirx.Buffer]:
        """One array for each read."""
        return [register for _, register, _ in self._reads]

    def value(self, number: int, lane: PrimExpr) -> PrimExpr:
        """Expression `number` with registers for what it reads, of neighbour `lane`."""
        return substitute(self._values[number], {self._lane: lane})

    def statement(self, here: Callable[[PrimExpr, PrimExpr], PrimExpr]) -> tirx.Stmt | None:
        """All reads; `here` gives an expression as it is for a neighbour. ``None`` where there are none."""
        return sequence(*(self._read(one, here) for one in self._reads)) if self._reads else None

    def _read(
        self, read: tuple[TensorLoad, tirx.Buffer, int], here: Callable[[PrimExpr, PrimExpr], PrimExpr]
    ) -> tirx.Stmt:
        load, register, width = read

        def together(number: PrimExpr) -> tirx.Stmt:
            def one(lane: PrimExpr) -> tirx.Stmt:
                place = number * width + lane
                return tirx.BufferStore(register, here(load, place), [place])

            return loop("lane", width, one, "vectorized")

        return loop("n", self._lanes // width, together, "unrolled")

    def _parted(self, value: PrimExpr) -> PrimExpr:
        def load(node: TensorLoad, mutator: Any) -> PrimExpr:
            width = self._width(node)
            return node if width == 1 else self._taken(node, width)[self._lane]

        def call(node: Call, mutator: Any) -> PrimExpr:
            return node if is_branch(node) else mutator.default_mutate(node)

        return structural_mutate(value, [(TensorLoad, load), (Call, call)])

    def _width(self, load: TensorLoad) -> int:
        """Neighbours that one instruction reads; 1 where they are none."""
        dtype = dtype_of(load)
        if any(collect(index, TensorLoad) for index in load.indices):
            return 1
        names = [var for index in load.indices for var in collect(index, tirx.Var)]
        if any(var.same_as(one) for var in names for one in self._later) or memory_step(load, self._axis) != 1:
            return 1
        return min(self._lanes, lanes_along(load, self._axis, dtype))

    def _taken(self, load: TensorLoad, width: int) -> tirx.Buffer:
        for known, register, _ in self._reads:
            if known.source.same_as(load.source) and tvm_ffi.structural_equal(known, load):
                return register
        register = local_buffer(f"wide{len(self._reads)}", self._lanes, dtype_of(load))
        self._reads.append((load, register, width))
        return register
