"""Two chained products whose rows are reduced panel by panel along with the second one (softmax over long rows).

See :mod:`souffle.schedule.gpu.forms.running_rows` for what is computed. Each panel of columns passes through once: its
elements, the greatest of the row so far, exponentials less that, the second product of the panel. What is there of the
row's sum and of the second product's totals is multiplied with ``exp(before - greatest)``, `before` being the greatest
before the panel. Each thread keeps its own part of the sum, since its parts are all less the same greatest; they are
put together after the last panel.

A row may be minus infinity as far as it was seen. Its exponentials are then less 0, and not less minus infinity, so
that they are 0 and not NaN; if the row ends so, it is 0 divided by 0, which is NaN as the softmax of such a row is. Any
other row that has an element which is infinite or NaN becomes NaN with that element, as there.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.async_copy import barrier
from souffle.schedule.gpu.emit.chain_emission import ChainKernel
from souffle.schedule.gpu.emit.contraction_statements import Binder, guarded, local_buffer, loop, shared_buffer
from souffle.schedule.gpu.emit.mma_instructions import ROWS
from souffle.schedule.gpu.forms.chained_products import ChainedProducts
from souffle.schedule.gpu.forms.contraction_expressions import substitute_axes
from souffle.schedule.gpu.forms.row_steps import RowStep
from souffle.schedule.gpu.tiling.chain_tiling import ChainSources, ChainTiling
from souffle.tvm_compat import PrimExpr, sequence

__all__ = ["RunningKernel"]


class RunningKernel(ChainKernel):
    """The kernel; its parameters are those of :class:`ChainKernel`, of a form with running rows."""

    def __init__(self, form: ChainedProducts, tiling: ChainTiling, sources: ChainSources, threads: int) -> None:
        super().__init__(form, tiling, sources, threads)
        self.running = form.running
        count = self.count = 2 * tiling.first.parts[0]
        self.greatest = self.results[self.running.greatest.result]
        self.total = self.results[self.running.total.result]
        self.before, self.less, self.factor = (
            local_buffer(name, count, "float32") for name in ("before", "less", "factor")
        )
        self.folding = self.results
        # What exponentials are less.
        self.expressing = {**self.results, self.running.greatest.result: self.less}
        several = tiling.factor_elements
        self.factors = shared_buffer("row_factors", several, "float32") if several else None

    def needed(self, panel: PrimExpr) -> list[PrimExpr]:
        """Where a mask leaves something of the panel for the tile."""
        seen, tiling = self.running.seen, self.tiling
        if seen is None:
            return []
        first, last = seen.of_tile(self.row_tile * tiling.rows, tiling.rows)
        conditions = []
        if (tiling.panels - 1) * tiling.width > seen.of_tile(0, tiling.rows)[1]:
            conditions.append(tirx.LE(panel * tiling.width, last))
        if tiling.width <= seen.of_tile((self.counts[1] - 1) * tiling.rows, tiling.rows)[0]:
            conditions.append(tirx.GT((panel + 1) * tiling.width, first))
        return conditions

    def further_buffers(self) -> tuple[Any, ...]:
        """Of rows, beside what is reduced of them."""
        return (self.before, self.less, self.factor, *([] if self.factors is None else [self.factors]))

    def rows_and_products(self) -> list[tirx.Stmt]:
        """Panel after panel."""
        steps = self.form.steps
        (first,) = (n for n, step in enumerate(steps) if self.running.greatest in step.reductions)
        (last,) = (step for step in steps if self.running.total in step.reductions)
        begun = self.begun(last)
        start = self.running.greatest.initial
        nothing = loop("own", self.count, lambda own: self._set(self.before, own, start), "unrolled")
        clear = self.cleared(self.second_totals, self._totals)
        panels = self.each_panel(lambda: self._panel(steps[: first + 1], steps[first + 1 :]))
        self.results = self.folding
        combined = [*self.among_lanes(last), *self.among_warps(1, last)]
        reciprocal = self._each_row(lambda own: _number(1.0) / self.total[own])
        return [*self.load_left(), *begun, nothing, clear, panels, *combined, reciprocal, *self._multiplied()]

    @property
    def _totals(self) -> int:
        down, across = self.tiling.second.parts
        return down * across * 4

    def _panel(self, until: tuple[RowStep, ...], behind: tuple[RowStep, ...]) -> list[tirx.Stmt]:
        """One panel; the last step of `until` finds the greatest."""
        opening, products = self.second_products()
        self.results = self.folding
        compared = self.begun(until[-1])
        compared += [statement for step in until for statement in self.through(step)]
        compared += [*self.among_lanes(until[-1]), *self.among_warps(0, until[-1])]
        self.results = self.expressing
        added = [statement for step in behind for statement in self.through(step)]
        stored = self.store_rows(self.running.numerator)
        return [
            *self.first_products(),
            *opening,
            *compared,
            *self._rescaled(),
            *added,
            stored,
            *self._multiplied(),
            *products,
        ]

    def _rescaled(self) -> list[tirx.Stmt]:
        """What rows' values are less from now on, and by what it changes those of the columns before."""

        def less(own: PrimExpr) -> tirx.Stmt:
            # Each of the threads of a row has what was before, which has to count once.
            greatest = self.running.greatest.combine(self.before[own], self.greatest[own])
            nothing = tirx.EQ(self.greatest[own], _number(-math.inf))
            shift = tirx.Select(nothing, _number(0.0), self.greatest[own])
            return sequence(self._set(self.greatest, own, greatest), self._set(self.less, own, shift))

        def total(own: PrimExpr) -> tirx.Stmt:
            change = tirx.exp(self.before[own] - self.less[own])
            return sequence(
                self._set(self.factor, own, change),
                self._set(self.before, own, self.greatest[own]),
                self._set(self.total, own, self.total[own] * self.factor[own]),
            )

        statements = [loop("own", self.count, one, "unrolled") for one in (less, total)]
        return (
            statements if self.running.excepted is None else [*statements, self._each_row(lambda own: self.factor[own])]
        )

    def _each_row(self, value: Any) -> tirx.Stmt:
        """Make the factor of each of a thread's rows a value, or 1 for rows that are excepted."""
        excepted = self.running.excepted

        def row(own: PrimExpr) -> tirx.Stmt:
            if excepted is None:
                return self._set(self.factor, own, value(own))
            binder = Binder()
            at_row = binder.name("at_row", self.row_tile * self.tiling.rows + self._row(own))
            located = self.batch | binder.locate(self.form.first.rows, at_row, lambda axis: True)
            condition = substitute_axes(excepted, located)
            rows = self.form.first.extents[1]
            if rows % self.tiling.rows:
                condition = tirx.And(tirx.LT(at_row, rows), condition)
            factor = tirx.if_then_else(condition, _number(1.0), value(own))
            return sequence(*binder.statements, self._set(self.factor, own, factor))

        return loop("own", self.count, row, "unrolled")

    def _row(self, own: PrimExpr) -> PrimExpr:
        """The tile's row that is a thread's."""
        part, half = tirx.floordiv(own, 2), tirx.floormod(own, 2)
        return (part * self.tiling.first.warps[0] + self.warp[0]) * ROWS + half * 8 + tirx.floordiv(self.lane, 4)

    def _multiplied(self) -> list[tirx.Stmt]:
        """Multiply the second product's totals with the factors of their rows; all threads have stored theirs after."""
        down, across = self.tiling.second.parts

        def scaled(own: PrimExpr) -> tirx.Stmt:
            part, half = tirx.floordiv(own, 2), tirx.floormod(own, 2)
            factor, held = self.factor[own], None
            if self.factors is not None:
                row = (part * self.tiling.second.warps[0] + self.second_warp[0]) * ROWS + half * 8
                held = self._set(self.taken, 0, self.factors[row + tirx.floordiv(self.lane, 4)])
                factor = self.taken[0]

            def one(j: PrimExpr, e: PrimExpr) -> tirx.Stmt:
                at = (part * across + j) * 4 + half * 2 + e
                return self._set(self.second_totals, at, self.second_totals[at] * factor)

            each = loop("j", across, lambda j: loop("e", 2, lambda e: one(j, e), "unrolled"), "unrolled")
            return sequence(held, each)

        totals = loop("own", 2 * down, scaled, "unrolled")
        if self.factors is None:
            return [totals]
        put = loop("own", self.count, lambda own: self._set(self.factors, self._row(own), self.factor[own]), "unrolled")
        # One lane of each row speaks for all that have its value.
        one = [tirx.EQ(tirx.floormod(self.lane, 4), 0)]
        one += [tirx.EQ(self.warp[1], 0)] if self.tiling.first.warps[1] > 1 else []
        return [guarded(one, put), barrier(), totals]

    @staticmethod
    def _set(buffer: Any, at: PrimExpr | int, value: PrimExpr) -> tirx.Stmt:
        return tirx.BufferStore(buffer, value, [at])


def _number(value: float) -> PrimExpr:
    return tirx.const(value, "float32")
