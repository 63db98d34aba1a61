"""The kernel of the rule for CUDA cores: a pipeline of tiles, products in registers, results written from there.

A thread's parts of the operands are read one place of the inner axis ahead, into registers that take turns::

    for k:  part = tile[k]                  part[0] = tile[0]
            totals += products of part  →   for k:  part[(k + 1) % 2] = tile[k + 1]
                                                    totals += products of part[k % 2]

Legal, as what is read lies in a tile that is complete, and no sum's order changes. nvcc does not move reads of shared
memory across the multiply-adds before them by itself, and a few warps cannot hide what each of them waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.async_copy import AsyncCopy, async_copy, barrier, commit, wait
from souffle.schedule.gpu.emit.contraction_statements import guarded, kernel_func, local_buffer, loop, shared_buffer
from souffle.schedule.gpu.emit.folding import ThreadShare, fold_buffers, fold_results
from souffle.schedule.gpu.emit.normalized_fetch import NormalizedFetch
from souffle.schedule.gpu.emit.row_statements import RowStatements
from souffle.schedule.gpu.emit.staging import TileFetch, choose_fetch
from souffle.schedule.gpu.emit.writeback import write_results
from souffle.schedule.gpu.forms.contraction_expressions import substitute_axes
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.tiling.contraction_cost import result_lanes_of
from souffle.schedule.gpu.tiling.contraction_tiling import PADDING, PART_SETS, VECTOR, ContractionTiling
from souffle.tvm_compat import PrimExpr, cast, sequence

__all__ = ["ContractionKernel", "emit_contraction"]

_UNROLLED = 512
"""Multiply-adds in a row, between which shared memory's latency and its indices disappear; 64 totals, 8 deep."""


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


@dataclass(frozen=True)
class _Vectors:
    """How a thread's rows lie in a tile, or its columns: in vectors of `lanes`, `threads` vectors apart."""

    count: int
    lanes: int
    threads: int

    def place(self, vector: PrimExpr, thread: PrimExpr) -> PrimExpr:
        """Where in the tile a vector begins."""
        return (vector * self.threads + thread) * self.lanes

    def position(self, number: PrimExpr, thread: PrimExpr) -> PrimExpr:
        """Where in the tile a thread's row or column is, by its number."""
        return self.place(tirx.floordiv(number, self.lanes), thread) + tirx.floormod(number, self.lanes)


class _Side:
    """One operand: how its tiles come, where they are, and the part of them that a thread multiplies."""

    def __init__(self, name: str, fetch: TileFetch, arch: str, stages: int, vectors: _Vectors) -> None:
        copy = async_copy(fetch, arch) if stages > 1 else None
        self.copy = copy if isinstance(copy, AsyncCopy) else None
        self.fetch = fetch if self.copy is None else self.copy.fetch
        self.source: TileFetch | NormalizedFetch = self.fetch
        # What comes by way of registers is stored just before it is read, so that two of its tiles are enough.
        self.buffers = min(stages, 2) if self.copy is None else stages
        self.vectors = vectors
        dtype = fetch.operand.dtype
        self.shared = shared_buffer(f"{name}_tile", self.buffers * self.fetch.shared_elements, dtype)
        self.held = local_buffer(f"{name}_next", self.fetch.register_elements, dtype)
        self.part = local_buffer(f"{name}_part", PART_SETS * vectors.count, dtype)

    def start(self, turn: PrimExpr) -> PrimExpr | int:
        """The element of shared memory at which the tile of a step begins."""
        return tirx.floormod(turn, self.buffers) * self.fetch.shared_elements if self.buffers > 1 else 0


class ContractionKernel:
    """A sum of products' kernel: what one block does, with the buffers that it needs.

    Parameters
    ----------
    problem : Contraction
    tiling : ContractionTiling
    request : GpuRequest
    slices : int
        Parts of a sum, of which threads that lie along the batch elsewhere have one each. Then there is no batch,
        `step` is that of each part, and zeros change nothing.
    """

    def __init__(self, problem: Contraction, tiling: ContractionTiling, request: GpuRequest, slices: int = 1) -> None:
        self.problem, self.tiling, self.threads, self.slices = problem, tiling, request.threads, slices
        self.step = tiling.step * slices
        batch, rows, columns = self.shape = (tiling.tile[0] // slices, *tiling.tile[1:])
        self.counts = tuple(-(-extent // size) for extent, size in zip(problem.extents, self.shape, strict=False))
        self.steps = ceil(problem.extents[3] / self.step)
        row_lanes = min(tiling.each[0], VECTOR)
        lanes = (row_lanes, tiling.together)
        self.left, self.right = self.sides = tuple(
            _Side(
                name,
                choose_fetch(problem, name, (batch, extent, self.step), request.threads, False, _padding),
                request.arch,
                tiling.stages,
                _Vectors(each, own, threads),
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
        self.lanes = result_lanes_of(problem, tiling.together)
        stores = problem.stores if self.lanes > 1 else ()
        self.values = [local_buffer(f"result{n}", self.lanes, str(s.buffer.dtype)) for n, s in enumerate(stores)]
        self.folded = fold_buffers(problem, tiling.across, tiling.each)
        self.sums = [shared_buffer("sums", slices * rows * columns, problem.dtype)] if slices > 1 else []
        self.joined = [local_buffer("joined", 1, problem.dtype)] if slices > 1 else []

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
        shared = [side.shared for side in self.sides]
        normalizing = (*self.rows.buffers, *(() if self.normalized is None else self.normalized.buffers))
        own = (*self.values, *held, *self.sums, *self.joined, *normalizing)
        return (*shared, *waiting, *parts, self.totals, *own)

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
        thread_row = tirx.floormod(tirx.floordiv(thread, along_columns), along_rows)
        self.place = (tirx.floordiv(thread, along_columns * along_rows), thread_row, thread_column)
        pipeline = self._single() if self.tiling.stages == 1 else self._pipeline()
        return sequence(self._clear(), *pipeline, self._results() if self.slices == 1 else self._joined_results())

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
        together = max(u for u in range(1, step + 1) if step % u == 0 and (u == 1 or u * totals <= _UNROLLED))

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

        products = loop("i", rows, lambda i: loop("j", columns, lambda j: one(i, j), "unrolled"), "unrolled")
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
        start, lanes, zero = side.start(turn), side.vectors.lanes, tirx.IntImm("int32", 0)

        def group(j: PrimExpr) -> tirx.Stmt:
            def lane(i: PrimExpr) -> tirx.Stmt:
                batch, inner = (self.place[0], k) if self.slices == 1 else (zero, self.place[0] * self.tiling.step + k)
                place = side.fetch.place(batch, side.vectors.place(j, thread) + i, inner)
                register = own * side.vectors.count + j * lanes + i
                return tirx.BufferStore(side.part, side.shared[start + place], [register])

            return loop("lane", lanes, lane, "vectorized")

        return loop("group", side.vectors.count // lanes, group, "unrolled")

    # Results

    def _results(self) -> tirx.Stmt | None:
        rows, columns = self.tiling.each
        written = None
        if self.problem.stores:
            vectors = columns // self.lanes
            written = loop("i", rows, lambda i: loop("j", vectors, lambda j: self._write(i, j), "unrolled"), "unrolled")
        part = ThreadShare(
            self.tiling.across,
            self.tiling.each,
            self.tile,
            self.place,
            lambda i: self.left.vectors.position(i, self.place[1]),
            lambda j: self.right.vectors.position(j, self.place[2]),
            lambda i, j: self.totals[i * columns + j],
            self.rows.values,
        )
        return sequence(written, fold_results(self.problem, part, self.folded, self.thread, self.threads))

    def _joined_results(self) -> tirx.Stmt:
        """The parts of the sums put together, and written by all threads."""
        (sums,), (joined,), (_, rows, columns) = self.sums, self.joined, self.shape
        own, across = self.left.vectors, self.right.vectors

        def part(i: PrimExpr, group: PrimExpr) -> tirx.Stmt:
            row = self.place[0] * rows + own.position(i, self.place[1])

            def one(lane: PrimExpr) -> tirx.Stmt:
                place = row * columns + across.place(group, self.place[2]) + lane
                return tirx.BufferStore(sums, self.totals[i * across.count + group * across.lanes + lane], [place])

            return loop("lane", across.lanes, one, "vectorized")

        def result(turn: PrimExpr) -> tirx.Stmt:
            place = turn * self.threads + self.thread
            inside = [tirx.LT(place, rows * columns)] if rows * columns % self.threads else []

            def add(number: PrimExpr) -> tirx.Stmt:
                total = joined[0] + sums[(number + 1) * (rows * columns) + place]
                return tirx.BufferStore(joined, total, [0])

            written = write_results(
                self.problem,
                self.tile[0],
                self.tile[1] * rows + tirx.floordiv(place, columns),
                self.tile[2] * columns + tirx.floormod(place, columns),
                1,
                lambda lane: joined[0],
                self.shape,
            )
            first = tirx.BufferStore(joined, sums[place], [0])
            return guarded(inside, sequence(first, loop("part", self.slices - 1, add, "unrolled"), written))

        groups = across.count // across.lanes
        put = loop("i", own.count, lambda i: loop("group", groups, lambda g: part(i, g), "unrolled"), "unrolled")
        return sequence(put, barrier(), loop("turn", ceil(rows * columns / self.threads), result, "unrolled"))

    def _write(self, i: PrimExpr, j: PrimExpr) -> tirx.Stmt:
        """The i-th row's j-th vector of results."""
        lanes, (batch, rows, columns) = self.lanes, self.tiling.tile
        thread_batch, thread_row, thread_column = self.place
        own, across = self.left.vectors, self.right.vectors
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
            lambda lane: self.totals[i * self.tiling.each[1] + j * lanes + lane],
            self.tiling.tile,
            apart=self.values,
            of_row=self.rows.values(thread_batch, in_tile),
        )


def _padding(crossing: bool) -> int:
    """Rows one vector longer put a column's elements in different banks, and keep vectors aligned."""
    return PADDING if crossing else 0
