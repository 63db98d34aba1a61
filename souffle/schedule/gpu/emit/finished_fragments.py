"""Finishing an operand that was copied, as a thread takes its part of fragments.

Of a 16 x 16 part of the left operand a thread has two neighbours along the inner axis in each of four registers: of row
``t / 4`` in the first and third, of the row 8 further in the others (:mod:`.mma_instructions`).
So it needs scale and shift of two rows for each of its fragments, which lie together in shared memory. It takes them
in each step: to keep them in registers from one step to the next is worth less than what else these hold.
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

_WIDEST = 8
"""Factors of fp16 that a thread takes at once."""


class FinishedFragments:
    """Finishes the left operand of a contraction.

    Parameters
    ----------
    rows : RowStatements
        Where the factors of the tile's rows are.
    registers : buffer
        The thread's parts of fragments.
    fragments : int
        Fragments of 16 rows of a warp.
    """

    def __init__(self, rows: RowStatements, registers: Any, fragments: int) -> None:
        self.rows, self.registers, self.fragments = rows, registers, fragments
        self.factors = local_buffer("factors", 4 * fragments, "float16")

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Registers that it needs."""
        return (self.factors,)

    def take_rows(self, position: PrimExpr, first_row: PrimExpr, lane: PrimExpr) -> tirx.Stmt:
        """Take scale and shift of the thread's rows for the chunk at a position along the inner axis."""
        start = self.rows.factors_from(first_row + tirx.floordiv(lane, 4), position)
        lanes = _WIDEST if 4 * self.fragments % _WIDEST == 0 else _WIDEST // 2

        def take(turn: PrimExpr) -> tirx.Stmt:
            def one(e: PrimExpr) -> tirx.Stmt:
                return tirx.BufferStore(self.factors, self.rows.factors[start + turn * lanes + e], [turn * lanes + e])

            return loop("e", lanes, one, "vectorized")

        return loop("place", 4 * self.fragments // lanes, take, "unrolled")

    def finish(self) -> tirx.Stmt:
        """Finish the thread's parts of fragments of the chunk whose scale and shift were taken last."""

        def fragment(number: PrimExpr) -> tirx.Stmt:
            return scale_part(self.registers, number * _REGISTERS, self.factors, number * 4)

        return loop("i", self.fragments, fragment, "unrolled")
