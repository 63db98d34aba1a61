"""Finishing an operand that was copied, as a thread takes its part of fragments.

Of a 16 x 16 part of the left operand a thread has two neighbours along the inner axis in each of four registers: of row
``t / 4`` in the first and third, of the row 8 further in the others (:mod:`.mma_instructions`).
So it needs scale and shift of two rows for each of its fragments, which it takes from shared memory when their chunk
begins.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.contraction_statements import local_buffer, loop
from souffle.schedule.gpu.emit.mma_instructions import scale_part
from souffle.schedule.gpu.emit.row_statements import RowStatements
from souffle.tvm_compat import PrimExpr

__all__ = ["FinishedFragments"]

_REGISTERS = 4
"""Of a fragment, in a thread."""


class FinishedFragments:
    """Finishes the left operand of a contraction.

    Parameters
    ----------
    rows : RowStatements
        Where the factors of the tile's rows are.
    registers : buffer
        The thread's parts of fragments.
    fragments, apart : int
        Fragments of 16 rows of a warp, and rows from one to the next.
    """

    def __init__(self, rows: RowStatements, registers: Any, fragments: int, apart: int) -> None:
        self.rows, self.registers = rows, registers
        self.fragments, self.apart = fragments, apart
        self.factors = local_buffer("factors", 4 * fragments, "float16")

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Registers that it needs."""
        return (self.factors,)

    def take_rows(self, position: PrimExpr, first_row: PrimExpr, lane: PrimExpr) -> tirx.Stmt:
        """Take scale and shift of the thread's rows for the chunk at a position along the inner axis."""

        def row(place: PrimExpr) -> tirx.Stmt:
            fragment, half = tirx.floordiv(place, 2), tirx.floormod(place, 2)
            at = fragment * self.apart + first_row + half * 8 + tirx.floordiv(lane, 4)
            start = self.rows.factor_place(at, position)

            def take(e: PrimExpr) -> tirx.Stmt:
                return tirx.BufferStore(self.factors, self.rows.factors[start + e], [place * 2 + e])

            return loop("e", 2, take, "vectorized")

        return loop("place", 2 * self.fragments, row, "unrolled")

    def finish(self) -> tirx.Stmt:
        """Finish the thread's parts of fragments of the chunk whose scale and shift were taken last."""

        def fragment(number: PrimExpr) -> tirx.Stmt:
            return scale_part(self.registers, number * _REGISTERS, self.factors, number * 4)

        return loop("i", self.fragments, fragment, "unrolled")
