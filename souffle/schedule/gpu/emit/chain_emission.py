"""The kernel of two chained products: fragments of whole rows stay in registers from the first to the second.

A block computes some rows of the first product, all columns of them, in chunks that follow each other through the
tensor cores while the tiles of the next come. In a fragment a thread holds two neighbours of each of two rows (see
:mod:`souffle.schedule.gpu.emit.mma_instructions`), so that a value of a row is combined in three steps, each in a
fixed order: by a thread over its elements, by shuffles among the four threads that have parts of the row, and by way of
shared memory among the warps that share its columns. What rows become is stored as fp16 to shared memory, where the
second product takes its left operand from.
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
from souffle.schedule.gpu.emit.mma_instructions import COLUMNS, ROWS
from souffle.schedule.gpu.emit.mma_pieces import FragmentSource, TileRing, add_products, first_place, warp_place
from souffle.schedule.gpu.emit.mma_pipeline import Pipeline
from souffle.schedule.gpu.emit.row_quotients import row_quotients
from souffle.schedule.gpu.forms.chained_products import ChainedProducts, RowReduction, RowStep
from souffle.schedule.gpu.forms.contraction_expressions import Axis, substitute_axes
from souffle.schedule.gpu.tiling.chain_tiling import ChainSources, ChainTiling
from souffle.tvm_compat import PrimExpr, cast, dtype_of, sequence, variables

__all__ = ["emit_chain"]

_SHUFFLE = "tirx.cuda.__shfl_xor_sync"
_ALL_LANES = 2**32 - 1
_SHARING = (1, 2)
"""By how much the lanes differ that have parts of the same rows of a fragment."""

_NONE = tirx.IntImm("int32", 0)


def emit_chain(form: ChainedProducts, tiling: ChainTiling, sources: ChainSources, threads: int) -> tirx.PrimFunc:
    """The stage with its body replaced by the kernel.

    Parameters
    ----------
    form : ChainedProducts
    tiling : ChainTiling
    sources : ChainSources
        Of the tiling's tiles.
    threads : int
        Of a block.
    """
    return _Kernel(form, tiling, sources, threads).func()


@dataclass(frozen=True)
class _Rows:
    """The rows of the second product's left operand in shared memory, where they begin at the element `first`."""

    first: int
    pitch: int
    inner_last: bool = True

    def place(self, batch: PrimExpr, own: PrimExpr, inner: PrimExpr) -> PrimExpr:
        return own * self.pitch + inner


class _Kernel:
    def __init__(self, form: ChainedProducts, tiling: ChainTiling, sources: ChainSources, threads: int) -> None:
        self.form, self.tiling, self.sources, self.threads = form, tiling, sources, threads
        self.counts = tiling.counts(form)
        self.steps = tiling.inner_steps(form)
        self.right, self.other = (
            TileRing(name, source.fetch, source.copy, source.buffers(tiling.stages), 0)
            for name, source in (("right", sources.right), ("other", sources.other))
        )
        ring = tiling.ring_elements(sources)
        self.left = TileRing("left", sources.left.fetch, sources.left.copy, self.steps[0], ring)
        self.rows = _Rows(ring + self.left.elements, tiling.row_pitch)
        self.shared = shared_buffer("tiles", tiling.shared_elements(form, sources), "float16")
        parts = tiling.part_elements(form)
        self.parts = shared_buffer("row_parts", parts, "float32") if parts else None
        first, second = tiling.first.parts, tiling.second.parts
        # What the first product has in registers is done with when the second begins.
        most = max(tiling.chunks * prod(first), prod(second)) * 4
        self.totals = local_buffer("totals", most, "float32")
        self.left_part = local_buffer("left_part", max(first[0], second[0]) * 4, "uint32")
        self.right_part = local_buffer("right_part", max(first[1], second[1]) * 2, "uint32")
        rows = {r.result: local_buffer(str(r.result.name), first[0] * 2, "float32") for r in form.reductions}
        self.results = rows
        self.pair = local_buffer("pair", 2, "float16")
        # fp32 that one instruction reads of shared memory.
        across = tiling.first.warps[1]
        self._taken = next(width for width in (4, 2, 1) if across % width == 0)
        self.taken = local_buffer("taken", self._taken, "float32")
        strips = tiling.strip_parts(form, sources)
        self.strips = Strips(form.second, tiling.second, strips, self.shared, self.totals, threads)

    def func(self) -> tirx.PrimFunc:
        held = tuple(ring.held for ring in (self.left, self.right, self.other) if ring.held is not None)
        buffers = (self.shared, *([] if self.parts is None else [self.parts]), *held, self.left_part, self.right_part)
        buffers = (*buffers, self.totals, *self.results.values(), self.pair, self.taken, *self.strips.buffers)
        return kernel_func(self.form.first.func, self.counts[0] * self.counts[1], self.threads, buffers, self.body)

    def body(self, block: PrimExpr, thread: PrimExpr) -> tirx.Stmt:
        binder = Binder()
        self.thread = thread
        self.lane = binder.name("lane", tirx.floormod(thread, 32))
        self.row_tile = binder.name("row_tile", tirx.floormod(block, self.counts[1]))
        self.batch_tile = binder.name("batch_tile", tirx.floordiv(block, self.counts[1]))
        located = binder.locate(self.form.first.batch, self.batch_tile, lambda axis: True)
        self.batch = located
        first = self._first()
        # The second product's tiles are on their way while the rows are worked on.
        opening, products = self._second()
        return sequence(*binder.statements, *first, *opening, *self._between(), *products)

    # The first product

    def _first(self) -> list[tirx.Stmt]:
        tiling, steps = self.tiling.first, self.steps[0]
        binder = Binder()
        self.warp = warp_place(binder, self.thread, tiling.warps)
        left_place = binder.name("left_place", self._place(self.left.fetch, self.warp[0] * ROWS, rows=True))
        across = tiling.parts[1] * COLUMNS
        right_place = binder.name("right_place", self._place(self.right.fetch, self.warp[1] * across, rows=False))

        def corner(turn: PrimExpr) -> tuple[PrimExpr, PrimExpr, PrimExpr]:
            return self.batch_tile, tirx.floordiv(turn, steps), tirx.floormod(turn, steps)

        turns = self.tiling.chunks * steps
        pipeline = Pipeline(self.shared, [(self.right, corner)], turns, tiling.stages, self.thread)
        count = tiling.parts[0] * tiling.parts[1] * 4

        def chunk(number: PrimExpr) -> tirx.Stmt:
            def step(inner: PrimExpr) -> tirx.Stmt:
                turn = number * steps + inner
                left = FragmentSource(self.left.fetch, self.left.start(inner) + left_place, self.left_part)
                right = FragmentSource(self.right.fetch, self.right.start(turn) + right_place, self.right_part)
                first = number * count
                products = add_products(tiling, tiling.step, self.shared, self.totals, left, right, first)
                return pipeline.turn(turn, products)

            return loop("inner", steps, step, "rolled")

        chunks = loop("chunk", self.tiling.chunks, chunk, "unrolled")
        clear = self._cleared(self.tiling.chunks * count)
        return [*binder.statements, clear, *self._left(), *pipeline.opening, chunks, *pipeline.closing]

    def _left(self) -> list[tirx.Stmt]:
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
        alone = ring.asynchronous and not self.right.asynchronous
        return [*tiles, commit(), wait(0)] if alone else tiles

    def _place(self, placed: Any, start: PrimExpr, *, rows: bool) -> PrimExpr:
        return first_place(placed, self.lane, start, _NONE, rows=rows)

    def _cleared(self, count: int) -> tirx.Stmt:
        zero = tirx.const(0, "float32")
        return loop("i", count, lambda i: tirx.BufferStore(self.totals, zero, [i]), "unrolled")

    # The rows

    def _between(self) -> list[tirx.Stmt]:
        statements: list[tirx.Stmt] = []
        reduced = 0
        for step in self.form.steps:
            statements += self._step(reduced, step)
            reduced += bool(step.reductions)
        return [*statements, self._store()]

    def _step(self, number: int, step: RowStep) -> list[tirx.Stmt]:
        begin = [
            loop("own", 2 * self.tiling.first.parts[0], lambda own, r=r: self._keep(r, own, _initial(r)), "unrolled")
            for r in step.reductions
        ]

        updates = [] if step.update is None else [step.update]

        def element(own: PrimExpr, at: PrimExpr, e: PrimExpr, values: Sequence[PrimExpr]) -> tirx.Stmt:
            stores = [tirx.BufferStore(self.totals, values[0], [at])] if updates else []
            terms = zip(step.reductions, values[len(updates) :], strict=True)
            folds = [self._keep(r, own, r.combine(self.results[r.result][own], term)) for r, term in terms]
            return sequence(*stores, *folds)

        through = self._elements([*updates, *(r.term for r in step.reductions)], element)
        return [*begin, through, *self._among_lanes(step), *self._among_warps(number, step)]

    def _keep(self, reduction: RowReduction, own: PrimExpr, value: PrimExpr) -> tirx.Stmt:
        return tirx.BufferStore(self.results[reduction.result], value, [own])

    def _elements(
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
                    column = inner.name("column", first + e)
                    at = ((chunk * down + part) * across + j) * 4 + half * 2 + e
                    whole = mapping | inner.locate(form.columns, column, used) | {form.total: self.totals[at]}
                    inside = [*ends, *([tirx.LT(column, columns)] if columns % self.tiling.width else [])]
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

    def _among_lanes(self, step: RowStep) -> list[tirx.Stmt]:
        """Combine what the lanes have of a row; all of them get the same bits, since each combines two at a time."""

        def combined(reduction: RowReduction, distance: int, own: PrimExpr) -> tirx.Stmt:
            held = self.results[reduction.result][own]
            mask = tirx.const(_ALL_LANES, "uint32")
            other = tirx.call_intrin("float32", _SHUFFLE, mask, held, tirx.IntImm("int32", distance), 32)
            return self._keep(reduction, own, reduction.combine(held, other))

        count = 2 * self.tiling.first.parts[0]
        return [
            loop("own", count, lambda own, r=r, d=distance: combined(r, d, own), "unrolled")
            for distance in _SHARING
            for r in step.reductions
        ]

    def _among_warps(self, number: int, step: RowStep) -> list[tirx.Stmt]:
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
                        return self._keep(r, own, r.combine(self.results[r.result][own], self.taken[which]))

                    return sequence(loop("which", width, read, "vectorized"), loop("which", width, add, "unrolled"))

                begin = self._keep(r, own, _initial(r))
                return sequence(begin, loop("group", warps[1] // width, several, "unrolled"))

            puts.append(loop("own", count, put, "unrolled"))
            takes.append(loop("own", count, take, "unrolled"))
        # One lane of each row speaks for the four that have its value.
        one = tirx.EQ(tirx.floormod(self.lane, 4), 0)
        return [guarded([one], sequence(*puts)), barrier(), *takes]

    def _store(self) -> tirx.Stmt:
        """The rows as the second product reads them; zeros beyond their end."""
        value = self.form.second.left.value

        def element(own: PrimExpr, at: PrimExpr, e: PrimExpr, values: Sequence[PrimExpr]) -> tirx.Stmt:
            return tirx.BufferStore(self.pair, cast(values[0], "float16"), [e])

        def outside(e: PrimExpr) -> tirx.Stmt:
            return tirx.BufferStore(self.pair, tirx.const(0, "float16"), [e])

        def finish(row: PrimExpr, column: PrimExpr) -> tirx.Stmt:
            start = self.rows.first + self.rows.place(_NONE, row, column)
            return loop("e", 2, lambda e: tirx.BufferStore(self.shared, self.pair[e], [start + e]), "vectorized")

        return self._elements([value], element, outside, finish)

    # The second product

    def _second(self) -> tuple[list[tirx.Stmt], list[tirx.Stmt]]:
        """What is on its way before its first step, and all else."""
        tiling, steps = self.tiling.second, self.steps[1]
        binder = Binder()
        warp = warp_place(binder, self.thread, tiling.warps)
        per = tiling.step // tiling.warps[2]
        across = tiling.parts[1] * COLUMNS
        rows = first_place(self.rows, self.lane, warp[0] * ROWS, warp[2] * per, rows=True)
        columns = first_place(self.other.fetch, self.lane, warp[1] * across, warp[2] * per, rows=False)
        rows_place, other_place = binder.name("rows_place", rows), binder.name("other_place", columns)

        def corner(turn: PrimExpr) -> tuple[PrimExpr, PrimExpr, PrimExpr]:
            return self.batch_tile, _NONE, turn

        pipeline = Pipeline(self.shared, [(self.other, corner)], steps, tiling.stages, self.thread)

        def step(turn: PrimExpr) -> tirx.Stmt:
            left = FragmentSource(self.rows, self.rows.first + rows_place + turn * tiling.step, self.left_part)
            right = FragmentSource(self.other.fetch, self.other.start(turn) + other_place, self.right_part)
            products = add_products(tiling, tiling.step, self.shared, self.totals, left, right)
            return pipeline.turn(turn, products)

        results = self.strips.write((self.batch_tile, self.row_tile, _NONE), warp, self.lane, self.thread)
        turns = loop("turn", steps, step, "rolled")
        clear = self._cleared(prod(tiling.parts) * 4)
        return pipeline.opening, [*binder.statements, clear, turns, *pipeline.closing, results]


def _initial(reduction: RowReduction) -> PrimExpr:
    return cast(reduction.initial, dtype_of(reduction.result))
