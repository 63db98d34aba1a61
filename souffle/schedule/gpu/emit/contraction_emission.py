"""The kernel of the rule for CUDA cores: a pipeline of tiles, products in registers, results written from there.

A thread's parts of the operands are read one place of the inner axis ahead, into registers that take turns::

    for k:  part = tile[k]                  part[0] = tile[0]
            totals += products of part  →   for k:  part[(k + 1) % 2] = tile[k + 1]
                                                    totals += products of part[k % 2]

Legal, as what is read lies in a tile that is complete, and no sum's order changes. nvcc does not move reads of shared
memory across the multiply-adds before them by itself, and a few warps cannot hide what each of them waits.

Where a tile has several slices, the threads of each multiply another part of every step, and their totals are parts of
the sums. These pass through shared memory once, behind the last step: each thread puts all of its own there, and adds
up, in the order of the slices, those that it is to write, one in as many::

    for t:  totals[0:n] += products of part s of step t
    sums[s] = totals[0:n];  barrier;  totals[0:n / slices] = sums[0][own] + sums[1][own] + ...
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.async_copy import AsyncCopy, async_copy, barrier, commit, wait
from souffle.schedule.gpu.emit.contraction_statements import guarded, kernel_func, local_buffer, loop, shared_buffer
from souffle.schedule.gpu.emit.folding import ThreadShare, fold_buffers, fold_results
from souffle.schedule.gpu.emit.normalized_fetch import NormalizedFetch
from souffle.schedule.gpu.emit.row_statements import RowStatements
from souffle.schedule.gpu.emit.staging import TileFetch, choose_fetch
from souffle.schedule.gpu.emit.thread_vectors import ThreadVectors
from souffle.schedule.gpu.emit.writeback import write_results
from souffle.schedule.gpu.forms.contraction_expressions import substitute_axes
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.tiling.contraction_cost import UNROLLED, result_lanes_of
from souffle.schedule.gpu.tiling.contraction_tiling import PADDING, PART_SETS, VECTOR, ContractionTiling
from souffle.tvm_compat import PrimExpr, cast, sequence

__all__ = ["ContractionKernel", "emit_contraction"]


def emit_contraction(problem: Contraction, tiling: ContractionTiling, request: GpuRequest) -> tuple[tirx.PrimFunc, int]:
    """The stage with its body replaced by the kernel, and the kernel's tiles.

    Parameters
    ----------
    problem : Contraction
    tiling : ContractionTiling
    request : GpuRequest
    """
    kernel = ContractionKernel(problem, tiling, request)
    return kernel.func(), kernel.tiles


class _Side:
    """One operand: how its tiles come, where they are, and the part of them that a thread multiplies."""

    def __init__(self, name: str, fetch: TileFetch, arch: str, stages: int, vectors: ThreadVectors) -> None:
        copy = async_copy(fetch, arch) if stages > 1 else None
        self.name = name
        self.copy = copy if isinstance(copy, AsyncCopy) else None
        self.fetch = fetch if self.copy is None else self.copy.fetch
        self.source: TileFetch | NormalizedFetch = self.fetch
        # What comes by way of registers is stored just before it is read, so that two of its tiles are enough.
        self.buffers = min(stages, 2) if self.copy is None else stages
        self.vectors = vectors
        dtype = fetch.operand.dtype
        self.held = local_buffer(f"{name}_next", self.fetch.register_elements, dtype)
        self.part = local_buffer(f"{name}_part", PART_SETS * vectors.count, dtype)
        self.shared: Any = None
        self.base = 0

    @property
    def elements(self) -> int:
        """Of shared memory, with all of its tiles."""
        return self.buffers * self.fetch.shared_elements

    def start(self, turn: PrimExpr) -> PrimExpr | int:
        """The element of shared memory at which the tile of a step begins."""
        tile = tirx.floormod(turn, self.buffers) * self.fetch.shared_elements if self.buffers > 1 else 0
        return tile + self.base if self.base else tile


class ContractionKernel:
    """A sum of products' kernel: what one block does, with the buffers that it needs.

    Parameters
    ----------
    problem : Contraction
    tiling : ContractionTiling
    request : GpuRequest
    """

    def __init__(self, problem: Contraction, tiling: ContractionTiling, request: GpuRequest) -> None:
        self.problem, self.tiling, self.threads = problem, tiling, request.threads
        self.counts = tiling.counts(problem.extents)
        self.step = tiling.deep
        self.steps = ceil(problem.extents[3] / self.step)
        batch, rows, columns = tiling.tile
        lanes = (tiling.row_lanes, tiling.together)
        self.left, self.right = self.sides = tuple(
            _Side(
                name,
                choose_fetch(problem, name, (batch, extent, self.step), request.threads, False, _padding),
                request.arch,
                tiling.stages,
                ThreadVectors(each, own, threads),
            )
            for name, extent, each, own, threads in zip(
                ("left", "right"), (rows, columns), tiling.each, lanes, tiling.across[1:], strict=True
            )
        )
        self.rows = RowStatements(problem, batch, rows, request.threads)
        self.normalized = None
        if self.rows.held is not None and self.left.copy is None:
            self.left.source = self.normalized = NormalizedFetch(self.left.fetch, problem.row_values)
        self.totals = local_buffer("totals", prod(tiling.each), problem.dtype)
        # What a thread writes, where several have totals of the same elements.
        self.own_rows = self.left.vectors.shared_by(tiling.slices)
        self.lanes = result_lanes_of(problem, tiling.together)
        stores = problem.stores if self.lanes > 1 else ()
        self.values = [local_buffer(f"result{n}", self.lanes, str(s.buffer.dtype)) for n, s in enumerate(stores)]
        self.folded = fold_buffers(problem, *tiling.shares)
        self.shared, self.sums = self._shared_memory()

    def _shared_memory(self) -> tuple[list[Any], Any]:
        """Buffers for the tiles, and the one of parts of sums: in the place of the tiles, where types allow it."""
        sums = prod(self.tiling.tile) * self.tiling.slices if self.tiling.slices > 1 else 0
        dtypes = {side.fetch.operand.dtype for side in self.sides} | {self.problem.dtype}
        if sums and len(dtypes) == 1:
            self.right.base = -(-self.left.elements // VECTOR) * VECTOR
            whole = shared_buffer("tiles", max(self.right.base + self.right.elements, sums), self.problem.dtype)
            self.left.shared = self.right.shared = whole
            return [whole], whole
        for side in self.sides:
            side.shared = shared_buffer(f"{side.name}_tile", side.elements, side.fetch.operand.dtype)
        shared = [side.shared for side in self.sides]
        apart = shared_buffer("sums", sums, self.problem.dtype) if sums else None
        return [*shared, *([] if apart is None else [apart])], apart

    @property
    def tiles(self) -> int:
        """Blocks of the grid."""
        return prod(self.counts)

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Registers and shared memory."""
        waiting = [side.held for side in self.sides if side.copy is None]
        parts = [side.part for side in self.sides]
        held = [buffer for pair in self.folded for buffer in pair]
        normalizing = (*self.rows.buffers, *(() if self.normalized is None else self.normalized.buffers))
        return (*self.shared, *waiting, *parts, self.totals, *self.values, *held, *normalizing)

    def func(self) -> tirx.PrimFunc:
        """The stage with this body."""
        return kernel_func(self.problem.func, self.tiles, self.threads, self.buffers, self.body)

    def body(self, block: PrimExpr, thread: PrimExpr) -> tirx.Stmt:
        """What a thread of a block does."""
        counts, (_, along_rows, along_columns) = self.counts, self.tiling.across
        column_tile = tirx.floormod(block, counts[2])
        row_tile = tirx.floormod(tirx.floordiv(block, counts[2]), counts[1])
        self.tile = (tirx.floordiv(block, counts[1] * counts[2]), row_tile, column_tile)
        self.thread = thread
        thread_column = tirx.floormod(thread, along_columns)
        line, writers = tirx.floordiv(thread, along_columns), along_rows * self.tiling.slices
        # Where it writes; what it multiplies is the same rows for the threads of all slices.
        self.writes = (tirx.floordiv(thread, along_columns * writers), tirx.floormod(line, writers), thread_column)
        self.slice = tirx.floordiv(self.writes[1], along_rows)
        self.place = (self.writes[0], tirx.floormod(line, along_rows), thread_column)
        pipeline = self._single() if self.tiling.stages == 1 else self._pipeline()
        return sequence(self._clear(), *pipeline, self._joined(), self._results())

    # Bringing tiles

    def _corner(self, side: _Side, turn: PrimExpr) -> tuple[PrimExpr, PrimExpr, PrimExpr]:
        return self.tile[0], self.tile[1 if side is self.left else 2], turn

    def _fetches(self, turn: PrimExpr) -> tirx.Stmt | None:
        """Reads, into registers, of what copies do not bring."""
        reads = [
            side.source.fetch(side.held, self.thread, self._corner(side, turn))
            for side in self.sides
            if side.copy is None
        ]
        return sequence(*reads) if reads else None

    def _puts(self, turn: PrimExpr) -> tirx.Stmt | None:
        """What was read, to shared memory."""
        puts = [
            side.fetch.put(side.held, side.shared, self.thread, side.start(turn))
            for side in self.sides
            if side.copy is None
        ]
        return sequence(*puts) if puts else None

    def _copies(self, turn: PrimExpr) -> tirx.Stmt:
        return sequence(
            *(
                side.copy.copies(side.shared, side.start(turn), self.thread, self._corner(side, turn))
                for side in self.sides
                if side.copy is not None
            )
        )

    def _next_fetches(self, turn: PrimExpr) -> tirx.Stmt | None:
        """The reads of the next step, if there is one."""
        reads = self._fetches(turn + 1) if self.steps > 1 else None
        return None if reads is None else guarded([tirx.LT(turn + 1, self.steps)], reads)

    def _single(self) -> list[tirx.Stmt]:
        """One tile of each operand in shared memory, the next one in registers."""

        def advance(turn: PrimExpr) -> tirx.Stmt:
            return sequence(self._puts(turn), self._next_fetches(turn), self._products(turn))

        return [*self._row_values(), self._fetches(tirx.IntImm("int32", 0)), loop("turn", self.steps, advance)]

    def _pipeline(self) -> list[tirx.Stmt | None]:
        """Several, brought by copies; see :mod:`souffle.schedule.gpu.emit.async_copy`."""
        stages = self.tiling.stages

        def advance(turn: PrimExpr) -> tirx.Stmt:
            ahead = turn + (stages - 1)
            more = guarded([tirx.LT(ahead, self.steps)], self._copies(ahead))
            following = self._next_fetches(turn)
            return sequence(
                self._puts(turn), wait(stages - 2), barrier(), more, commit(), following, self._products(turn)
            )

        first = [sequence(self._copies(tirx.IntImm("int32", turn)), commit()) for turn in range(stages - 1)]
        fetches = self._fetches(tirx.IntImm("int32", 0))
        return [*first, *self._row_values(), fetches, loop("turn", self.steps, advance)]

    def _row_values(self) -> list[tirx.Stmt | None]:
        """What is worked out for the rows of the tile, and a barrier after it."""
        statements = self.rows.work_out(self.tile[:2], self.thread)
        if statements is None:
            return []
        taken = None if self.normalized is None else self.normalized.take(self.rows.values, self.thread)
        return [statements, barrier(), taken]

    # Arithmetic

    def _clear(self) -> tirx.Stmt:
        initial = cast(self.problem.initial, self.problem.dtype)
        return loop("i", prod(self.tiling.each), lambda i: tirx.BufferStore(self.totals, initial, [i]), "unrolled")

    def _products(self, turn: PrimExpr) -> tirx.Stmt:
        """All products of a step, as many as may be without a loop between them."""
        step, totals = self.tiling.step, prod(self.tiling.each)
        together = max(u for u in range(1, step + 1) if step % u == 0 and (u == 1 or u * totals <= UNROLLED))

        def some(group: PrimExpr) -> tirx.Stmt:
            first, zero = group * together, tirx.IntImm("int32", 0)

            def one(k: PrimExpr) -> tirx.Stmt:
                following = self._loads(turn, first + k + 1, tirx.floormod(k + 1, PART_SETS)) if together > 1 else None
                ahead = None if following is None else guarded([tirx.LT(k + 1, together)], following)
                return sequence(ahead, self._outer_product(turn, first + k, tirx.floormod(k, PART_SETS)))

            # The loop that numbers the sets is unrolled, and so they become registers.
            return sequence(self._loads(turn, first, zero), loop("k", together, one, "unrolled"))

        return loop("group", step // together, some)

    def _outer_product(self, turn: PrimExpr, k: PrimExpr, own: PrimExpr) -> tirx.Stmt:
        """A thread's rows by its columns, at one place of the inner axis, whose parts are in a set of registers."""
        problem, (rows, columns) = self.problem, self.tiling.each

        def one(i: PrimExpr, j: PrimExpr) -> tirx.Stmt:
            at = i * columns + j
            values = {
                problem.total: self.totals[at],
                problem.left.leaf: self.left.part[own * rows + i],
                problem.right.leaf: self.right.part[own * columns + j],
            }
            return tirx.BufferStore(self.totals, substitute_axes(problem.update, values), [at])

        products = _unrolled(rows, columns, one)
        # Zeros beyond the end of the sum change a sum of products; any other total they must not reach.
        inner = problem.extents[3]
        ragged = inner % self.tiling.step and not problem.product_sum
        return guarded([tirx.LT(turn * self.tiling.step + k, inner)] if ragged else [], products)

    def _loads(self, turn: PrimExpr, k: PrimExpr, own: PrimExpr) -> tirx.Stmt:
        """A thread's parts of both operands' tiles, at one place of the inner axis, to a set of their registers."""
        return sequence(
            *(self._load(side, thread, turn, k, own) for side, thread in zip(self.sides, self.place[1:], strict=True))
        )

    def _load(self, side: _Side, thread: PrimExpr, turn: PrimExpr, k: PrimExpr, own: PrimExpr) -> tirx.Stmt:
        start, lanes = side.start(turn), side.vectors.lanes

        def group(j: PrimExpr) -> tirx.Stmt:
            def lane(i: PrimExpr) -> tirx.Stmt:
                inner = self.slice * self.tiling.step + k if self.tiling.slices > 1 else k
                place = side.fetch.place(self.place[0], side.vectors.place(j, thread) + i, inner)
                register = own * side.vectors.count + j * lanes + i
                return tirx.BufferStore(side.part, side.shared[start + place], [register])

            return loop("lane", lanes, lane, "vectorized")

        return loop("group", side.vectors.count // lanes, group, "unrolled")

    # Results

    def _joined(self) -> tirx.Stmt | None:
        """The parts of sums added up, where there are several slices: what a thread writes is in its first totals."""
        if self.sums is None:
            return None
        (batch, rows, columns), (each_row, each_column) = self.tiling.tile, self.tiling.each
        thread_batch, thread_row, thread_column = self.place
        own, across = self.left.vectors, self.right.vectors
        elements = batch * rows * columns

        def at(row: PrimExpr, column: PrimExpr) -> PrimExpr:
            return (thread_batch * rows + row) * columns + column

        def put(i: PrimExpr, group: PrimExpr) -> tirx.Stmt:
            first = self.slice * elements + at(own.position(i, thread_row), across.place(group, thread_column))

            def one(lane: PrimExpr) -> tirx.Stmt:
                total = self.totals[i * each_column + group * across.lanes + lane]
                return tirx.BufferStore(self.sums, total, [first + lane])

            return loop("lane", across.lanes, one, "vectorized")

        def take(i: PrimExpr, group: PrimExpr) -> tirx.Stmt:
            first = at(self.own_rows.position(i, self.writes[1]), across.place(group, thread_column))
            place = i * across.count + group * across.lanes

            def add(number: PrimExpr) -> tirx.Stmt:
                def one(lane: PrimExpr) -> tirx.Stmt:
                    part = self.sums[(number + 1) * elements + first + lane]
                    return tirx.BufferStore(self.totals, self.totals[place + lane] + part, [place + lane])

                return loop("lane", across.lanes, one, "vectorized")

            def start(lane: PrimExpr) -> tirx.Stmt:
                return tirx.BufferStore(self.totals, self.sums[first + lane], [place + lane])

            begun = loop("lane", across.lanes, start, "vectorized")
            return sequence(begun, loop("slice", self.tiling.slices - 1, add, "unrolled"))

        groups = across.count // across.lanes
        puts, takes = _unrolled(each_row, groups, put), _unrolled(self.own_rows.count, groups, take)
        # The tiles lie where the sums go.
        return sequence(barrier(), puts, barrier(), takes)

    def _results(self) -> tirx.Stmt | None:
        rows, columns = self.own_rows, self.right.vectors
        written = None
        if self.problem.stores:
            written = _unrolled(rows.count, columns.count // self.lanes, self._write)
        part = ThreadShare(
            *self.tiling.shares,
            self.tile,
            self.writes,
            lambda i: rows.position(i, self.writes[1]),
            lambda j: columns.position(j, self.writes[2]),
            lambda i, j: self.totals[i * columns.count + j],
            self.rows.values,
        )
        return sequence(written, fold_results(self.problem, part, self.folded, self.thread, self.threads))

    def _write(self, i: PrimExpr, j: PrimExpr) -> tirx.Stmt:
        """The i-th row's j-th vector of results."""
        lanes, (batch, rows, columns) = self.lanes, self.tiling.tile
        thread_batch, thread_row, thread_column = self.writes
        own, across = self.own_rows, self.right.vectors
        in_tile = own.place(tirx.floordiv(i, own.lanes), thread_row) + tirx.floormod(i, own.lanes)
        row = self.tile[1] * rows + in_tile
        # Vectors of results are parts of those that a thread has in a row.
        vectors = across.lanes // lanes
        group = tirx.floordiv(j, vectors) * across.threads + thread_column
        column = self.tile[2] * (columns // lanes) + group * vectors + tirx.floormod(j, vectors)
        return write_results(
            self.problem,
            self.tile[0] * batch + thread_batch,
            row,
            column,
            lanes,
            lambda lane: self.totals[i * across.count + j * lanes + lane],
            self.tiling.tile,
            apart=self.values,
            of_row=self.rows.values(thread_batch, in_tile),
        )


def _unrolled(rows: int, columns: int, body: Callable[[PrimExpr, PrimExpr], tirx.Stmt]) -> tirx.Stmt:
    """`body` for each of a thread's rows and each of its columns or vectors, without a loop between them."""
    return loop("i", rows, lambda i: loop("j", columns, lambda j: body(i, j), "unrolled"), "unrolled")


def _padding(crossing: bool) -> int:
    """Rows one vector longer put a column's elements in different banks, and keep vectors aligned."""
    return PADDING if crossing else 0
