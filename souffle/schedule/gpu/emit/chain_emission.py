"""The kernel of two chained products: fragments of whole rows stay in registers from the first to the second.

A block computes some rows of the first product, all columns of them, in chunks that follow each other through the
tensor cores while the tiles of the next come. Where all columns do not fit its registers, they are computed a panel at
a time: once for each step of the rows that reduces them, and once more for the second product, which adds up over the
panels. In a fragment a thread holds two neighbours of each of two rows (see
:mod:`souffle.schedule.gpu.emit.mma_instructions`), so that a value of a row is combined in three steps, each in a
fixed order: by a thread over its elements, by shuffles among the four threads that have parts of the row, and by way of
shared memory among the warps that share its columns. What rows become is stored to shared memory in the operands' type;
there the second product takes its left operand from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.async_copy import barrier, commit, wait
from souffle.schedule.gpu.emit.contraction_statements import (
    Binder,
    guarded,
    kernel_func,
    local_buffer,
    loop,
    shared_buffer,
)
from souffle.schedule.gpu.emit.mma_epilogue import Strips
from souffle.schedule.gpu.emit.mma_fragments import Placed
from souffle.schedule.gpu.emit.mma_instructions import COLUMNS, ROWS
from souffle.schedule.gpu.emit.mma_pieces import (
    FragmentPlace,
    FragmentSource,
    TileRing,
    add_products,
    first_place,
    rest_buffers,
    warp_place,
)
from souffle.schedule.gpu.emit.mma_pipeline import Pipeline
from souffle.schedule.gpu.emit.row_quotients import row_quotients
from souffle.schedule.gpu.forms.chained_products import ChainedProducts
from souffle.schedule.gpu.forms.contraction_expressions import Axis, substitute_axes
from souffle.schedule.gpu.forms.row_steps import RowReduction, RowStep
from souffle.schedule.gpu.tiling.chain_tiling import ChainSources, ChainTiling
from souffle.tvm_compat import PrimExpr, cast, dtype_of, sequence, variables

__all__ = ["ChainKernel"]

_SHUFFLE = "tirx.cuda.__shfl_xor_sync"
_ALL_LANES = 2**32 - 1
_SHARING = (1, 2)
"""By how much the lanes differ that have parts of the same rows of a fragment."""

_NONE = tirx.IntImm("int32", 0)


@dataclass(frozen=True)
class _Rows:
    """The rows of the second product's left operand in shared memory, where they begin at the element `first`."""

    first: int
    pitch: int
    inner_last: bool = True
    crossed: int = 0

    def place(self, batch: PrimExpr, own: PrimExpr, inner: PrimExpr) -> PrimExpr:
        return own * self.pitch + inner

    def crossing(self, row: PrimExpr) -> PrimExpr:
        return _NONE


class ChainKernel:
    """The kernel.

    Parameters
    ----------
    form : ChainedProducts
    tiling : ChainTiling
    sources : ChainSources
        Of the tiling's tiles.
    threads : int
        Of a block.
    """

    def __init__(self, form: ChainedProducts, tiling: ChainTiling, sources: ChainSources, threads: int) -> None:
        self.form, self.tiling, self.sources, self.threads = form, tiling, sources, threads
        self.counts = tiling.counts(form)
        self.steps = tiling.inner_steps(form)
        self.right, self.other = (
            TileRing(name, source, source.buffers(tiling.stages), 0)
            for name, source in (("right", sources.right), ("other", sources.other))
        )
        ring = tiling.ring_elements(sources)
        self.left = TileRing("left", sources.left, self.steps[0], ring)
        self.rows = _Rows(ring + self.left.elements, tiling.row_pitch)
        fragments = self.fragments = tiling.fragments
        self.shared = shared_buffer("tiles", tiling.shared_elements(form, sources), fragments.dtype)
        parts = tiling.part_elements(form)
        self.parts = shared_buffer("row_parts", parts, "float32") if parts else None
        first, second = tiling.first.parts, tiling.second.parts
        # What the first product has in registers is done with when the second begins, unless there are more panels.
        sizes = (tiling.chunks * prod(first) * 4, prod(second) * 4)
        self.totals = local_buffer("totals", max(sizes) if tiling.panels == 1 else sizes[0], "float32")
        several = tiling.panels > 1
        self.second_totals = local_buffer("second_totals", sizes[1], "float32") if several else self.totals
        down, across = (max(sizes) for sizes in zip(first, second, strict=True))
        self.left_part = local_buffer("left_part", down * 4, fragments.register_dtype)
        self.right_part = local_buffer("right_part", across * 2, fragments.register_dtype)
        self.left_rest, self.right_rest, self.sums = rest_buffers(fragments, (down, across))
        rows = {r.result: local_buffer(str(r.result.name), first[0] * 2, "float32") for r in form.reductions}
        self.results = rows
        self.pair = local_buffer("pair", 2, fragments.dtype)
        # fp32 that one instruction reads of shared memory.
        across = tiling.first.warps[1]
        self._taken = next(width for width in (4, 2, 1) if across % width == 0)
        self.taken = local_buffer("taken", self._taken, "float32")
        strips = tiling.strip_parts(form, sources)
        self.strips = Strips(form.second, tiling.second, strips, self.shared, self.second_totals, threads)

    def func(self) -> tirx.PrimFunc:
        """The stage with its body replaced by the kernel."""
        held = tuple(ring.held for ring in (self.left, self.right, self.other) if ring.held is not None)
        held += tuple(own for own in (self.left_rest, self.right_rest, self.sums) if own is not None)
        buffers = (self.shared, *([] if self.parts is None else [self.parts]), *held, self.left_part, self.right_part)
        buffers += () if self.second_totals is self.totals else (self.second_totals,)
        buffers = (*buffers, self.totals, *self.results.values(), self.pair, self.taken, *self.strips.buffers)
        buffers += self.further_buffers()
        return kernel_func(self.form.first.func, self.counts[0] * self.counts[1], self.threads, buffers, self.body)

    def further_buffers(self) -> tuple[Any, ...]:
        """What else it needs."""
        return ()

    def body(self, block: PrimExpr, thread: PrimExpr) -> tirx.Stmt:
        binder = Binder()
        self.thread = thread
        self.lane = binder.name("lane", tirx.floormod(thread, 32))
        self.row_tile = binder.name("row_tile", tirx.floormod(block, self.counts[1]))
        self.batch_tile = binder.name("batch_tile", tirx.floordiv(block, self.counts[1]))
        located = binder.locate(self.form.first.batch, self.batch_tile, lambda axis: True)
        self.batch = located
        first, second = Binder(), Binder()
        self._places(first, second)
        self.panel: PrimExpr = _NONE
        work = self.rows_and_products()
        return sequence(*binder.statements, *first.statements, *second.statements, *work, self._results())

    def rows_and_products(self) -> list[tirx.Stmt]:
        """Both products and the rows between, with the totals of the second in their registers in the end."""
        return self._panels() if self.tiling.panels > 1 else self._at_once()

    def _at_once(self) -> list[tirx.Stmt]:
        """All columns in registers."""
        statements: list[tirx.Stmt] = []
        reduced = 0
        for step in self.form.steps:
            statements += [*self.begun(step), *self.through(step), *self.among_lanes(step)]
            statements += self.among_warps(reduced, step)
            reduced += bool(step.reductions)
        # The second product's tiles are on their way while the rows are worked on.
        opening, products = self.second_products()
        clear = self.cleared(self.second_totals, prod(self.tiling.second.parts) * 4)
        return [
            *self.load_left(),
            *self.first_products(),
            *opening,
            *statements,
            self.store_rows(self.form.second.left.value),
            clear,
            *products,
        ]

    def _panels(self) -> list[tirx.Stmt]:
        """A panel of columns at a time, again for each reduction of rows."""
        steps = self.form.steps
        statements = [*self.load_left()]
        reduced = 0
        for number, step in enumerate(steps):
            if step.reductions:
                before = steps[:number]
                statements += [*self.begun(step), self.each_panel(lambda b=before, s=step: self._reducing(b, s))]
                statements += [*self.among_lanes(step), *self.among_warps(reduced, step)]
                reduced += 1
        clear = self.cleared(self.second_totals, prod(self.tiling.second.parts) * 4)
        return [*statements, clear, self.each_panel(self._multiplying)]

    def needed(self, panel: PrimExpr) -> list[PrimExpr]:
        """Conditions, the same for all threads, under which a panel has to be computed."""
        return []

    def each_panel(self, work: Callable[[], list[tirx.Stmt]]) -> tirx.Stmt:
        def panel(number: PrimExpr) -> tirx.Stmt:
            self.panel = number
            return guarded(self.needed(number), sequence(*work()))

        return loop("panel", self.tiling.panels, panel, "rolled")

    def _reducing(self, before: Sequence[RowStep], step: RowStep) -> list[tirx.Stmt]:
        updates = [statement for one in before for statement in self.through(RowStep(one.update, ()))]
        return [*self.first_products(), *updates, *self.through(step)]

    def _multiplying(self) -> list[tirx.Stmt]:
        updates = [statement for one in self.form.steps for statement in self.through(RowStep(one.update, ()))]
        opening, products = self.second_products()
        return [*self.first_products(), *opening, *updates, self.store_rows(self.form.second.left.value), *products]

    def _places(self, first: Binder, second: Binder) -> None:
        """Where the thread's pointers into tiles of either product go."""
        tiling = self.tiling.first
        self.warp = warp_place(first, self.thread, tiling.warps)

        def place(
            binder: Binder, name: str, placed: Placed, start: PrimExpr, inner: PrimExpr, *, rows: bool
        ) -> FragmentPlace:
            return first_place(binder, name, self.fragments, placed, self.lane, start, inner, rows=rows)

        self.left_place = place(first, "left_place", self.left.fetch, self.warp[0] * ROWS, _NONE, rows=True)
        columns = self.warp[1] * (tiling.parts[1] * COLUMNS)
        self.right_place = place(first, "right_place", self.right.fetch, columns, _NONE, rows=False)
        tiling = self.tiling.second
        self.second_warp = warp = warp_place(second, self.thread, tiling.warps)
        per = tiling.step // tiling.warps[2]
        self.rows_place = place(second, "rows_place", self.rows, warp[0] * ROWS, warp[2] * per, rows=True)
        columns = warp[1] * (tiling.parts[1] * COLUMNS)
        self.other_place = place(second, "other_place", self.other.fetch, columns, warp[2] * per, rows=False)

    # The first product

    def first_products(self) -> list[tirx.Stmt]:
        """The elements of the panel."""
        tiling, steps = self.tiling.first, self.steps[0]

        def corner(turn: PrimExpr) -> tuple[PrimExpr, PrimExpr, PrimExpr]:
            chunk = self.panel * self.tiling.chunks + tirx.floordiv(turn, steps)
            return self.batch_tile, chunk, tirx.floormod(turn, steps)

        turns = self.tiling.chunks * steps
        pipeline = Pipeline(self.shared, [(self.right, corner)], turns, tiling.stages, self.thread)
        count = prod(tiling.parts) * 4

        def chunk(number: PrimExpr) -> tirx.Stmt:
            def step(inner: PrimExpr) -> tirx.Stmt:
                turn = number * steps + inner
                left = self._rows_from(self.left_place.moved(self.left.start(inner)))
                right = self._columns_from(self.right_place.moved(self.right.start(turn)))
                first, sums = number * count, self.sums
                products = add_products(tiling, tiling.step, self.shared, self.totals, left, right, first, sums)
                return pipeline.turn(turn, products)

            return loop("inner", steps, step, "rolled")

        chunks = loop("chunk", self.tiling.chunks, chunk, "unrolled")
        clear = self.cleared(self.totals, self.tiling.chunks * count)
        return [clear, *pipeline.opening, chunks, *pipeline.closing]

    def load_left(self) -> list[tirx.Stmt]:
        """All tiles of the rows' operand; they are there behind the barrier of the first step."""
        ring = self.left

        def tile(inner: PrimExpr) -> tirx.Stmt:
            corner = (self.batch_tile, self.row_tile, inner)
            if ring.asynchronous:
                return ring.copy.copies(self.shared, ring.start(inner), self.thread, corner)
            return sequence(
                ring.fetch.fetch(ring.held, self.thread, corner),
                ring.fetch.put(ring.held, self.shared, self.thread, ring.start(inner)),
            )

        tiles = [loop("inner", self.steps[0], tile, "rolled")]
        # Else they belong to the first group of the other operand's tiles.
        alone = ring.asynchronous and (self.tiling.panels > 1 or not self.right.asynchronous)
        return [*tiles, commit(), wait(0)] if alone else tiles

    def cleared(self, buffer: Any, count: int) -> tirx.Stmt:
        zero = tirx.const(0, "float32")
        return loop("i", count, lambda i: tirx.BufferStore(buffer, zero, [i]), "unrolled")

    def _rows_from(self, place: FragmentPlace) -> FragmentSource:
        return FragmentSource(place, self.left_part, self.left_rest)

    def _columns_from(self, place: FragmentPlace) -> FragmentSource:
        return FragmentSource(place, self.right_part, self.right_rest)

    # The rows

    def begun(self, step: RowStep) -> list[tirx.Stmt]:
        """Reductions of rows before their first element."""
        count = 2 * self.tiling.first.parts[0]
        return [
            loop("own", count, lambda own, r=r: self.keep(r, own, _initial(r)), "unrolled") for r in step.reductions
        ]

    def through(self, step: RowStep) -> list[tirx.Stmt]:
        """A step over the elements that the thread has."""
        updates = [] if step.update is None else [step.update]

        def element(own: PrimExpr, at: PrimExpr, e: PrimExpr, values: Sequence[PrimExpr]) -> tirx.Stmt:
            stores = [tirx.BufferStore(self.totals, values[0], [at])] if updates else []
            terms = zip(step.reductions, values[len(updates) :], strict=True)
            folds = [self.keep(r, own, r.combine(self.results[r.result][own], term)) for r, term in terms]
            return sequence(*stores, *folds)

        values = [*updates, *(r.term for r in step.reductions)]
        return [self.each_element(values, element)] if values else []

    def keep(self, reduction: RowReduction, own: PrimExpr, value: PrimExpr) -> tirx.Stmt:
        return tirx.BufferStore(self.results[reduction.result], value, [own])

    def each_element(
        self,
        values: list[PrimExpr],
        element: Callable[[PrimExpr, PrimExpr, PrimExpr, Sequence[PrimExpr]], tirx.Stmt],
        outside: Callable[[PrimExpr], tirx.Stmt] | None = None,
        finish: Callable[[PrimExpr, PrimExpr], tirx.Stmt] | None = None,
    ) -> tirx.Stmt:
        """Statements for each element that a thread has.

        Parameters
        ----------
        values : list of expression
            Over the axes, the element and results of rows.
        element : callable
            From the number of the thread's row, the element's place in ``totals``, which neighbour it is, and the
            values for it.
        outside : callable, optional
            From the number of a neighbour to what is done where there is no such element.
        finish : callable, optional
            From row and column in the tile to what is done behind two neighbours.
        """
        tiling, form = self.tiling.first, self.form.first
        down, across = tiling.parts
        quotients = row_quotients(values, list(self.results))
        names = [v for value in values for v in variables(value)]
        _, rows, columns, _ = form.extents

        def used(axis: Axis) -> bool:
            return any(axis.var.same_as(v) for v in names)

        def row(own: PrimExpr) -> tirx.Stmt:
            part, half = tirx.floordiv(own, 2), tirx.floormod(own, 2)
            binder = Binder()
            place = (part * tiling.warps[0] + self.warp[0]) * ROWS + half * 8 + tirx.floordiv(self.lane, 4)
            place = binder.name("row", place)
            at_row = binder.name("at_row", self.row_tile * self.tiling.rows + place)
            mapping: dict[tirx.Var, PrimExpr] = self.batch | binder.locate(form.rows, at_row, used)
            mapping |= {result: buffer[own] for result, buffer in self.results.items()}
            reciprocals = quotients.bound(lambda value: substitute_axes(value, mapping))
            ends = [tirx.LT(at_row, rows)] if rows % self.tiling.rows else []

            def fragment(chunk: PrimExpr, j: PrimExpr) -> tirx.Stmt:
                start = (chunk * tiling.warps[1] + self.warp[1]) * (across * COLUMNS) + j * COLUMNS
                first = start + tirx.floormod(self.lane, 4) * 2

                def one(e: PrimExpr) -> tirx.Stmt:
                    inner = Binder()
                    column = inner.name("column", self.panel * self.tiling.width + first + e)
                    at = ((chunk * down + part) * across + j) * 4 + half * 2 + e
                    whole = mapping | inner.locate(form.columns, column, used) | {form.total: self.totals[at]}
                    every = self.tiling.panels * self.tiling.width
                    inside = [*ends, *([tirx.LT(column, columns)] if columns < every else [])]
                    here = [substitute_axes(value, whole) for value in quotients.values]
                    own_statement = element(own, at, e, here)
                    if outside is not None and inside:
                        other = outside(e)
                        condition = inside[0] if len(inside) == 1 else tirx.And(*inside)
                        return sequence(*inner.statements, tirx.IfThenElse(condition, own_statement, other))
                    return sequence(*inner.statements, guarded(inside, own_statement))

                pair = loop("e", 2, one, "unrolled")
                return pair if finish is None else sequence(pair, finish(place, first))

            def chunks(chunk: PrimExpr) -> tirx.Stmt:
                return loop("j", across, lambda j: fragment(chunk, j), "unrolled")

            every = loop("chunk", self.tiling.chunks, chunks, "unrolled")
            return sequence(*binder.statements, *reciprocals, every)

        return loop("own", 2 * down, row, "unrolled")

    def among_lanes(self, step: RowStep) -> list[tirx.Stmt]:
        """Combine what the lanes have of a row; all of them get the same bits, since each combines two at a time."""

        def combined(reduction: RowReduction, distance: int, own: PrimExpr) -> tirx.Stmt:
            held = self.results[reduction.result][own]
            mask = tirx.const(_ALL_LANES, "uint32")
            other = tirx.call_intrin("float32", _SHUFFLE, mask, held, tirx.IntImm("int32", distance), 32)
            return self.keep(reduction, own, reduction.combine(held, other))

        count = 2 * self.tiling.first.parts[0]
        return [
            loop("own", count, lambda own, r=r, d=distance: combined(r, d, own), "unrolled")
            for distance in _SHARING
            for r in step.reductions
        ]

    def among_warps(self, number: int, step: RowStep) -> list[tirx.Stmt]:
        """Combine what the warps have of a row, from the first to the last."""
        warps = self.tiling.first.warps
        if warps[1] == 1 or not step.reductions:
            return []
        count = 2 * self.tiling.first.parts[0]
        plane, width = self.tiling.rows * warps[1], self._taken
        # Others may still read what the reductions before have put there.
        start = (number % 2) * (self.parts.shape[0] // 2)

        def place(own: PrimExpr) -> PrimExpr:
            part, half = tirx.floordiv(own, 2), tirx.floormod(own, 2)
            row = (part * warps[0] + self.warp[0]) * ROWS + half * 8 + tirx.floordiv(self.lane, 4)
            return row * warps[1]

        puts, takes = [], []
        for index, reduction in enumerate(step.reductions):
            first = start + index * plane

            def put(own: PrimExpr, r: RowReduction = reduction, at: Any = first) -> tirx.Stmt:
                return tirx.BufferStore(self.parts, self.results[r.result][own], [at + place(own) + self.warp[1]])

            def take(own: PrimExpr, r: RowReduction = reduction, at: Any = first) -> tirx.Stmt:
                def several(group: PrimExpr) -> tirx.Stmt:
                    first = at + place(own) + group * width

                    def read(which: PrimExpr) -> tirx.Stmt:
                        return tirx.BufferStore(self.taken, self.parts[first + which], [which])

                    def add(which: PrimExpr) -> tirx.Stmt:
                        return self.keep(r, own, r.combine(self.results[r.result][own], self.taken[which]))

                    return sequence(loop("which", width, read, "vectorized"), loop("which", width, add, "unrolled"))

                begin = self.keep(r, own, _initial(r))
                return sequence(begin, loop("group", warps[1] // width, several, "unrolled"))

            puts.append(loop("own", count, put, "unrolled"))
            takes.append(loop("own", count, take, "unrolled"))
        # One lane of each row speaks for the four that have its value.
        one = tirx.EQ(tirx.floormod(self.lane, 4), 0)
        return [guarded([one], sequence(*puts)), barrier(), *takes]

    def store_rows(self, value: PrimExpr) -> tirx.Stmt:
        """The rows as the second product reads them, a value for each element; zeros beyond their end."""

        def element(own: PrimExpr, at: PrimExpr, e: PrimExpr, values: Sequence[PrimExpr]) -> tirx.Stmt:
            return tirx.BufferStore(self.pair, cast(values[0], self.fragments.dtype), [e])

        def outside(e: PrimExpr) -> tirx.Stmt:
            return tirx.BufferStore(self.pair, tirx.const(0, self.fragments.dtype), [e])

        def finish(row: PrimExpr, column: PrimExpr) -> tirx.Stmt:
            start = self.rows.first + self.rows.place(_NONE, row, column)
            return loop("e", 2, lambda e: tirx.BufferStore(self.shared, self.pair[e], [start + e]), "vectorized")

        return self.each_element([value], element, outside, finish)

    # The second product

    def second_products(self) -> tuple[list[tirx.Stmt], list[tirx.Stmt]]:
        """The products of the panel: what is on its way before their first step, and all else."""
        tiling, steps = self.tiling.second, self.steps[1]

        def corner(turn: PrimExpr) -> tuple[PrimExpr, PrimExpr, PrimExpr]:
            return self.batch_tile, _NONE, self.panel * steps + turn

        pipeline = Pipeline(self.shared, [(self.other, corner)], steps, tiling.stages, self.thread)

        def step(turn: PrimExpr) -> tirx.Stmt:
            left = self._rows_from(self.rows_place.moved(self.rows.first + turn * tiling.step))
            right = self._columns_from(self.other_place.moved(self.other.start(turn)))
            totals, sums = self.second_totals, self.sums
            products = add_products(tiling, tiling.step, self.shared, totals, left, right, sums=sums)
            return pipeline.turn(turn, products)

        return pipeline.opening, [loop("turn", steps, step, "rolled"), *pipeline.closing]

    def _results(self) -> tirx.Stmt:
        corner = (self.batch_tile, self.row_tile, _NONE)
        return self.strips.write(corner, self.second_warp, self.lane, self.thread)


def _initial(reduction: RowReduction) -> PrimExpr:
    return cast(reduction.initial, dtype_of(reduction.result))
