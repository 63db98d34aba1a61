"""What is worked out for each row of a tile ahead of its contraction, and where that is kept.

A thread takes a row of the tile: it combines the terms of each reduction in order, so that the result has the same bits
in every run, and puts what is made of them into shared memory. Rows beyond the last are worked out as the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from math import ceil
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.contraction_statements import Binder, guarded, local_buffer, loop, shared_buffer
from souffle.schedule.gpu.emit.mma_instructions import ROWS
from souffle.schedule.gpu.forms.contraction_expressions import substitute_axes
from souffle.schedule.gpu.forms.finished_operand import FinishedOperand
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.forms.row_values import RowTotal, RowValue
from souffle.tvm_compat import PrimExpr, cast, dtype_of, sequence, variables

__all__ = ["RowStatements", "row_bytes"]


def row_bytes(problem: Contraction, rows: int, finished: FinishedOperand | None = None) -> int:
    """Bytes of shared memory for the values of so many rows."""
    single = problem.row_values.count
    if finished is not None:
        # A pair takes the place of one value.
        single -= 0 if finished.shift is None else finished.shift.count
    return 4 * rows * single


class RowStatements:
    """Works out the values of a tile's rows.

    Parameters
    ----------
    problem : Contraction
    batch, rows : int
        Extents of a tile.
    threads : int
    finished : FinishedOperand, optional
        Whose scale and shift are kept as pairs of fp16.
    fragments : int
        Fragments of 16 rows of a warp: pairs that one thread needs lie together.
    """

    def __init__(
        self,
        problem: Contraction,
        batch: int,
        rows: int,
        threads: int,
        finished: FinishedOperand | None = None,
        fragments: int = 1,
    ) -> None:
        self.problem, self.batch, self.rows, self.threads = problem, batch, rows, threads
        known = problem.row_values
        pair = () if finished is None else (finished.scale, finished.shift)
        self._pair, self._fragments = pair, fragments
        self._single = tuple(value for value in known.values if value not in pair)
        self.totals = [local_buffer(f"row_total_{n}", 1, dtype_of(r.total)) for n, r in enumerate(known.reductions)]
        *first, count = accumulate((value.count for value in self._single), initial=0)
        self._first = dict(zip((value.var for value in self._single), first, strict=True))
        count *= batch * rows
        self.held = shared_buffer("row_values", count, "float32") if count else None
        pairs = 2 * rows * pair[0].count if pair else 0
        self.factors = shared_buffer("row_factors", pairs, "float16") if pairs else None

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Registers and shared memory that it needs."""
        held = [buffer for buffer in (self.held, self.factors) if buffer is not None]
        return (*held, *self.totals) if held else ()

    def values(self, batch: PrimExpr, row: PrimExpr) -> Mapping[tirx.Var, PrimExpr]:
        """The values of a row of the tile that are for all of it, when they are there."""
        return {
            value.var: cast(self.held[self._place(value, batch * self.rows + row)], dtype_of(value.var))
            for value in self._single
            if value.chunks is None
        }

    def factors_from(self, row: PrimExpr, position: PrimExpr) -> PrimExpr:
        """Where pairs of factors begin of a row of a warp's first fragment, of the row 8 further, and of those in the
        same place of its other fragments, for the chunk at a position along the inner axis."""
        chunks = self._pair[0].chunks
        return self._pair_place(0 if chunks is None else tirx.floordiv(position, chunks.size), row)

    def _pair_place(self, chunk: PrimExpr | int, row: PrimExpr) -> PrimExpr:
        """The pair of a row of the tile: rows that a thread has in fragments (:mod:`.finished_fragments`) lie together.

        Fragment, warp, half and thread are its digits, the halves of 8 rows.
        """
        apart = self.rows // self._fragments
        fragment, within = tirx.floordiv(row, apart), tirx.floormod(row, apart)
        thread = tirx.floordiv(within, ROWS) * (ROWS // 2) + tirx.floormod(within, ROWS // 2)
        half = tirx.floordiv(tirx.floormod(within, ROWS), ROWS // 2)
        return 2 * (chunk * self.rows + (thread * self._fragments + fragment) * 2 + half)

    def work_out(self, corner: tuple[PrimExpr, PrimExpr], thread: PrimExpr) -> tirx.Stmt | None:
        """The statements, for the tile at `corner` along batch and rows; they are there after a barrier."""
        if not self.buffers:
            return None
        known, problem = self.problem.row_values, self.problem
        names = [v for part in (*known.reductions, *known.values) for v in variables(part.value)]
        count = self.batch * self.rows

        def turn(number: PrimExpr) -> tirx.Stmt:
            binder = Binder()
            at = binder.name("row", number * self.threads + thread)
            mapping: dict[tirx.Var, PrimExpr] = {}
            parts = (tirx.floordiv(at, self.rows), tirx.floormod(at, self.rows)) if self.batch > 1 else (None, at)
            for group, tile, size, part, extent in zip(
                (problem.batch, problem.rows), corner, (self.batch, self.rows), parts, problem.extents, strict=False
            ):
                linear = tile if part is None else tile * size + part
                linear = tirx.min(linear, extent - 1) if extent % size else linear
                position = binder.name("at", linear)
                mapping |= binder.locate(group, position, lambda axis: any(axis.var.same_as(v) for v in names))
            statements = []
            for reduction, held in zip(known.reductions, self.totals, strict=True):
                statements.append(_reduced(reduction, held, mapping))
                mapping[reduction.total] = held[0]
            for value in self._single:
                statements.append(self._stored(value, mapping, at))
            statements += [self._stored_factors(mapping, at)] if self._pair else []
            inside = [tirx.LT(at, count)] if count % self.threads else []
            return sequence(*binder.statements, guarded(inside, sequence(*statements)))

        return loop("turn", ceil(count / self.threads), turn)

    def _stored(self, value: RowValue, mapping: Mapping[tirx.Var, PrimExpr], row: PrimExpr) -> tirx.Stmt:
        def one(chunk: PrimExpr) -> tirx.Stmt:
            result = cast(_of_chunk(value, mapping, chunk), "float32")
            return tirx.BufferStore(self.held, result, [self._place(value, row, chunk)])

        return loop("chunk", value.count, one, "unrolled")

    def _stored_factors(self, mapping: Mapping[tirx.Var, PrimExpr], row: PrimExpr) -> tirx.Stmt:
        def one(chunk: PrimExpr) -> tirx.Stmt:
            stores = []
            for number, value in enumerate(self._pair):
                at = self._pair_place(chunk, row) + number
                factor = tirx.const(0, "float16") if value is None else _of_chunk(value, mapping, chunk)
                stores.append(tirx.BufferStore(self.factors, factor, [at]))
            return sequence(*stores)

        return loop("chunk", self._pair[0].count, one, "unrolled")

    def _place(self, value: RowValue, row: PrimExpr, chunk: PrimExpr | int = 0) -> PrimExpr:
        return (self._first[value.var] + chunk) * (self.batch * self.rows) + row


def _of_chunk(value: RowValue, mapping: Mapping[tirx.Var, PrimExpr], chunk: PrimExpr) -> PrimExpr:
    """A value of a row whose axes and totals are given, for one of its chunks."""
    return substitute_axes(value.value, mapping if value.chunks is None else {**mapping, value.chunks.axis.var: chunk})


def _reduced(reduction: RowTotal, held: Any, mapping: Mapping[tirx.Var, PrimExpr]) -> tirx.Stmt:
    """A reduction of a row, its terms in order."""

    def nest(position: int, places: Mapping[tirx.Var, PrimExpr]) -> tirx.Stmt:
        if position < len(reduction.axes):
            axis = reduction.axes[position]
            return loop("term", axis.extent, lambda n: nest(position + 1, {**places, axis.var: n}), "unrolled")
        return tirx.BufferStore(held, reduction.combine(held[0], substitute_axes(reduction.value, places)), [0])

    initial = cast(reduction.initial, dtype_of(reduction.total))
    return sequence(tirx.BufferStore(held, initial, [0]), nest(0, mapping))
