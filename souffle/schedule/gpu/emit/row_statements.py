"""What is worked out for each row of a tile ahead of its contraction, and where that is kept.

A thread takes a row of the tile: it combines the terms of each reduction in order, so that the result has the same bits
in every run, and puts what is made of them into shared memory. Rows beyond the last are worked out as the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.contraction_statements import Binder, guarded, local_buffer, loop, shared_buffer
from souffle.schedule.gpu.forms.contraction_expressions import substitute_axes
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.forms.row_values import RowReduction
from souffle.tvm_compat import PrimExpr, cast, dtype_of, sequence, variables

__all__ = ["RowStatements", "row_bytes"]


def row_bytes(problem: Contraction, rows: int) -> int:
    """Bytes of shared memory for the values of so many rows."""
    return 4 * rows * len(problem.row_values.values)


class RowStatements:
    """Works out the values of a tile's rows.

    Parameters
    ----------
    problem : Contraction
    batch, rows : int
        Extents of a tile.
    threads : int
    """

    def __init__(self, problem: Contraction, batch: int, rows: int, threads: int) -> None:
        self.problem, self.batch, self.rows, self.threads = problem, batch, rows, threads
        known = problem.row_values
        self.totals = [local_buffer(f"row_total_{n}", 1, dtype_of(r.total)) for n, r in enumerate(known.reductions)]
        count = batch * rows * len(known.values)
        self.held = shared_buffer("row_values", count, "float32") if count else None

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Registers and shared memory that it needs."""
        return () if self.held is None else (self.held, *self.totals)

    def values(self, batch: PrimExpr, row: PrimExpr) -> Mapping[tirx.Var, PrimExpr]:
        """The values of a row of the tile, when they are there."""
        return {
            value.var: cast(self.held[self._place(number, batch * self.rows + row)], dtype_of(value.var))
            for number, value in enumerate(self.problem.row_values.values)
        }

    def work_out(self, corner: tuple[PrimExpr, PrimExpr], thread: PrimExpr) -> tirx.Stmt | None:
        """The statements, for the tile at `corner` along batch and rows; they are there after a barrier."""
        if self.held is None:
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
            for place, value in enumerate(known.values):
                result = cast(substitute_axes(value.value, mapping), "float32")
                statements.append(tirx.BufferStore(self.held, result, [self._place(place, at)]))
            inside = [tirx.LT(at, count)] if count % self.threads else []
            return sequence(*binder.statements, guarded(inside, sequence(*statements)))

        return loop("turn", ceil(count / self.threads), turn)

    def _place(self, number: int, row: PrimExpr) -> PrimExpr:
        return number * (self.batch * self.rows) + row


def _reduced(reduction: RowReduction, held: Any, mapping: Mapping[tirx.Var, PrimExpr]) -> tirx.Stmt:
    """A reduction of a row, its terms in order."""

    def nest(position: int, places: Mapping[tirx.Var, PrimExpr]) -> tirx.Stmt:
        if position < len(reduction.axes):
            axis = reduction.axes[position]
            return loop("term", axis.extent, lambda n: nest(position + 1, {**places, axis.var: n}), "unrolled")
        return tirx.BufferStore(held, reduction.combine(held[0], substitute_axes(reduction.value, places)), [0])

    initial = cast(reduction.initial, dtype_of(reduction.total))
    return sequence(tirx.BufferStore(held, initial, [0]), nest(0, mapping))
