"""The rule for sums of products on CUDA cores: a tiled matrix product in registers, with its neighbours inside.

Each block computes one tile of the canonical form (see ``canonical.py``). For each step along the inner axis its
threads read a tile of either operand from global memory, applying what comes before the reduction (padding, casts, the
image-to-column indices of a convolution), put it in shared memory, and add the products of the two tiles to totals in
registers. The next step's reads are issued before the present step's arithmetic, which hides their latency. What
comes after the reduction is applied to the totals as they are written.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import ceil, prod

from tvm import tirx

from souffle.schedule.gpu.canonical import Contraction, canonical_contraction
from souffle.schedule.gpu.expressions import NotAContraction, cast, substitute_axes
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Refusal
from souffle.schedule.gpu.sketch import Knob, Sketch, Values
from souffle.schedule.gpu.staging import bits_of, choose_fetch
from souffle.schedule.gpu.statements import guarded, kernel_func, local_buffer, loop, sequence, shared_buffer
from souffle.schedule.gpu.writeback import result_lanes, write_results
from souffle.tvm_compat import PrimExpr

__all__ = ["contraction", "refusal_of"]

RULE = "contraction"

_MIN_SIDE = 4
"""Fewest rows and columns: a staged element is used that often, below it staging costs what it saves."""

_ALIKE = 1.05
"""Estimates of time closer than this factor are not told apart."""

_STEPS = (8, 16, 32)
"""Extents of a tile along the inner axis."""

_EACH = (1, 2, 4, 8)
"""Rows or columns of a thread."""

_MOST_THREADS_ALONG = 64
"""Threads along rows, or along columns."""

_MIN_INNER = 4
"""Shortest inner axis: below it the stage moves its output and does no arithmetic to speak of."""


@dataclass(frozen=True)
class _Tiling:
    """One way to share a problem among blocks and threads.

    Attributes
    ----------
    across : tuple of int
        Threads along batch, rows, columns; their product is the block's.
    each : tuple of int
        Rows and columns of one thread.
    step : int
        Extent of a tile along the inner axis.
    """

    across: tuple[int, int, int]
    each: tuple[int, int]
    step: int

    @property
    def tile(self) -> tuple[int, int, int]:
        """Extents of a block's tile: batch, rows, columns."""
        return (self.across[0], self.across[1] * self.each[0], self.across[2] * self.each[1])

    @property
    def values(self) -> Values:
        """As the knobs of the sketch say it."""
        return {
            "threads_along_rows": self.across[1],
            "threads_along_columns": self.across[2],
            "rows_each": self.each[0],
            "columns_each": self.each[1],
            "step": self.step,
        }

    @classmethod
    def of(cls, values: Values, threads: int) -> _Tiling | None:
        """The tiling of these values; the threads that they leave lie along the batch."""
        along = values["threads_along_rows"] * values["threads_along_columns"]
        if threads % along:
            return None
        across = (threads // along, values["threads_along_rows"], values["threads_along_columns"])
        return cls(across, (values["rows_each"], values["columns_each"]), values["step"])

    def counts(self, extents: tuple[int, int, int, int]) -> tuple[int, int, int]:
        """Tiles along batch, rows, columns."""
        return tuple(ceil(extent / size) for extent, size in zip(extents, self.tile, strict=False))


def contraction(func: tirx.PrimFunc, request: GpuRequest) -> Sketch | Refusal:
    """Schedule a matrix product or convolution with its injective neighbours, on CUDA cores and in any type.

    Parameters
    ----------
    func : PrimFunc
        One reduction block of products (batched, transposed, grouped, strided in any way) and injective blocks before
        and after it.
    request : GpuRequest

    Returns
    -------
    Sketch or Refusal
        A refusal names what is missing of the form, or why a reduction rule is the better one: fewer than
        4 rows or columns, or fewer than 4 products a sum.
    """
    try:
        problem = canonical_contraction(func)
    except NotAContraction as reason:
        return Refusal(RULE, str(reason))
    refusal = refusal_of(problem, request)
    if refusal is not None:
        return Refusal(RULE, f"block {problem.name}: {refusal}")
    unfit = Refusal(
        RULE,
        f"block {problem.name}: no tile of {problem.left.dtype} and {problem.right.dtype} operands fits "
        f"{request.threads} threads and {request.max_shared_bytes} bytes of shared memory",
    )

    def choose() -> Values | Refusal:
        tiling = _choose_tiling(problem, request)
        return unfit if tiling is None else tiling.values

    def make(values: Values) -> GpuSchedule | Refusal:
        tiling = _Tiling.of(values, request.threads)
        if tiling is None or not _fits(problem, tiling, request):
            return unfit
        kernel, tiles = _emit(func, problem, tiling, request.threads)
        return GpuSchedule(kernel, RULE, tiles, request.threads)

    return Sketch(RULE, _knobs(problem, request), choose, make)


def _knobs(problem: Contraction, request: GpuRequest) -> tuple[Knob, ...]:
    threads = tuple(d for d in _divisors(request.threads) if d <= _MOST_THREADS_ALONG)
    # Totals of 64 bits take two registers each.
    each = _EACH if bits_of(problem.dtype) <= 32 else _EACH[:-1]
    steps = tuple(sorted({min(step, problem.extents[3]) for step in _STEPS}))
    return (
        Knob("threads_along_rows", threads),
        Knob("threads_along_columns", threads),
        Knob("rows_each", each),
        Knob("columns_each", each),
        Knob("step", steps),
    )


def refusal_of(problem: Contraction, request: GpuRequest) -> str | None:
    """Why staging tiles would not pay, or ``None``."""
    _, rows, columns, inner = problem.extents
    if min(rows, columns) < _MIN_SIDE:
        return (
            f"{rows} x {columns} results use an operand fewer than {_MIN_SIDE} times; a reduction rule splits the sum"
        )
    if inner < _MIN_INNER:
        return f"sums of {inner} products are too short to stage operands for"
    if request.threads % 32:
        return f"{request.threads} threads are not whole warps"
    return None


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _choose_tiling(problem: Contraction, request: GpuRequest) -> _Tiling | None:
    """The tiling of least estimated time: work of one block, times how many blocks a multiprocessor runs in turn.

    Of those that are about as fast, it is one with the fewest tiles: a grid that fits one wave ends no kernel (§5.4).
    """
    found: list[tuple[float, int, _Tiling]] = []
    rows, columns, rows_each, columns_each, _ = (knob.values for knob in _knobs(problem, request))
    for along_rows, along_columns in itertools.product(rows, columns):
        if request.threads % (along_rows * along_columns):
            continue
        along_batch = request.threads // (along_rows * along_columns)
        if along_batch > problem.extents[0]:
            continue
        for each in itertools.product(rows_each, columns_each):
            tiling = _with_step(problem, (along_batch, along_rows, along_columns), each, request)
            if tiling is not None:
                found.append((_cost(problem, tiling, request), prod(tiling.counts(problem.extents)), tiling))
    least = min((cost for cost, _, _ in found), default=0.0)
    alike = [one for one in found if one[0] <= _ALIKE * least]
    return min(alike, key=lambda one: (one[1], one[0]))[2] if alike else None


def _with_step(
    problem: Contraction, across: tuple[int, int, int], each: tuple[int, int], request: GpuRequest
) -> _Tiling | None:
    """The shortest step that gives every thread something to read and fits shared memory."""
    inner = problem.extents[3]
    chosen = None
    for step in _STEPS:
        tiling = _Tiling(across, each, min(step, inner))
        batch, rows, columns = tiling.tile
        reads = batch * tiling.step * (rows + columns) / request.threads
        if not _fits(problem, tiling, request) or (chosen is not None and reads > 16):
            break
        chosen = tiling
        if batch * tiling.step * min(rows, columns) >= 4 * request.threads:
            break
    return chosen


def _fits(problem: Contraction, tiling: _Tiling, request: GpuRequest) -> bool:
    batch, rows, columns = tiling.tile
    bits = (rows + 4) * bits_of(problem.left.dtype) + (columns + 4) * bits_of(problem.right.dtype)
    return tiling.across[0] <= problem.extents[0] and batch * tiling.step * bits <= 8 * request.max_shared_bytes


def _cost(problem: Contraction, tiling: _Tiling, request: GpuRequest) -> float:
    """Estimated time in instruction issues of one thread.

    A total costs one fused multiply-add a product; its operands come from shared memory at about half an instruction
    an element (reads take four elements, but two reads a cycle at best), and from global memory, with their index
    arithmetic, at about 8 instructions an element. Each step has two barriers; each total an index and a store.
    """
    batch, rows, columns = tiling.tile
    across_rows, across_columns = tiling.each
    inner = problem.extents[3]
    steps = ceil(inner / tiling.step)
    arithmetic = across_rows * across_columns + 0.5 * (across_rows + across_columns) + 1.0
    fetched = batch * (rows + columns) * tiling.step / request.threads
    block = steps * (tiling.step * arithmetic + 8.0 * fetched + 40.0) + 20.0 * across_rows * across_columns
    tiles = prod(tiling.counts(problem.extents))
    # Two blocks on a multiprocessor hide each other's latency, but share its arithmetic units.
    return ceil(tiles / request.sm_count) * block


def _emit(func: tirx.PrimFunc, problem: Contraction, tiling: _Tiling, threads: int) -> tuple[tirx.PrimFunc, int]:
    tile_batch, tile_rows, tile_columns = tiling.tile
    each_row, each_column = tiling.each
    _, along_rows, along_columns = tiling.across
    row_lanes, column_lanes = min(each_row, 4), min(each_column, 4)
    step, inner = tiling.step, problem.extents[3]
    steps = ceil(inner / step)

    def padding(crossing: bool) -> int:
        # Rows one vector longer put a column's elements in different banks, and keep vectors aligned.
        return 4 if crossing else 0

    left = choose_fetch(problem, "left", (tile_batch, tile_rows, step), threads, False, padding)
    right = choose_fetch(problem, "right", (tile_batch, tile_columns, step), threads, False, padding)
    left_shared = shared_buffer("left_tile", left.shared_elements, problem.left.dtype)
    right_shared = shared_buffer("right_tile", right.shared_elements, problem.right.dtype)
    left_next = local_buffer("left_next", left.register_elements, problem.left.dtype)
    right_next = local_buffer("right_next", right.register_elements, problem.right.dtype)
    left_part = local_buffer("left_part", each_row, problem.left.dtype)
    right_part = local_buffer("right_part", each_column, problem.right.dtype)
    totals = local_buffer("totals", each_row * each_column, problem.dtype)
    counts = tiling.counts(problem.extents)

    def body(block: PrimExpr, thread: PrimExpr) -> tirx.Stmt:
        column_tile = tirx.floormod(block, counts[2])
        row_tile = tirx.floormod(tirx.floordiv(block, counts[2]), counts[1])
        batch_tile = tirx.floordiv(block, counts[1] * counts[2])
        thread_column = tirx.floormod(thread, along_columns)
        thread_row = tirx.floormod(tirx.floordiv(thread, along_columns), along_rows)
        thread_batch = tirx.floordiv(thread, along_columns * along_rows)

        def fetch(turn: PrimExpr) -> tirx.Stmt:
            return sequence(
                left.fetch(left_next, thread, (batch_tile, row_tile, turn)),
                right.fetch(right_next, thread, (batch_tile, column_tile, turn)),
            )

        def part(registers, shared, source, lanes: int, count: int, threads_along: int, at: PrimExpr, k: PrimExpr):
            def group(j: PrimExpr) -> tirx.Stmt:
                def lane(i: PrimExpr) -> tirx.Stmt:
                    x = (j * threads_along + at) * lanes + i
                    return tirx.BufferStore(registers, shared[source.place(thread_batch, x, k)], [j * lanes + i])

                return loop("lane", lanes, lane, "vectorized")

            return loop("group", count // lanes, group, "unrolled")

        def product(turn: PrimExpr, k: PrimExpr) -> tirx.Stmt:
            def one(i: PrimExpr, j: PrimExpr) -> tirx.Stmt:
                at = i * each_column + j
                values = {
                    problem.total: totals[at],
                    problem.left.leaf: left_part[i],
                    problem.right.leaf: right_part[j],
                }
                return tirx.BufferStore(totals, substitute_axes(problem.update, values), [at])

            products = sequence(
                part(left_part, left_shared, left, row_lanes, each_row, along_rows, thread_row, k),
                part(right_part, right_shared, right, column_lanes, each_column, along_columns, thread_column, k),
                loop("i", each_row, lambda i: loop("j", each_column, lambda j: one(i, j), "unrolled"), "unrolled"),
            )
            # Zeros beyond the end of the sum change a sum of products; any other total they must not reach.
            ragged = inner % step and not problem.product_sum
            return guarded([tirx.LT(turn * step + k, inner)] if ragged else [], products)

        def advance(turn: PrimExpr) -> tirx.Stmt:
            following = guarded([tirx.LT(turn + 1, steps)], fetch(turn + 1)) if steps > 1 else None
            return sequence(
                left.put(left_next, left_shared, thread),
                right.put(right_next, right_shared, thread),
                following,
                loop("k", step, lambda k: product(turn, k)),
            )

        def write(i: PrimExpr, j: PrimExpr) -> tirx.Stmt:
            # Rows and columns of a thread come in vectors, `along` vectors apart.
            row = row_tile * tile_rows + (tirx.floordiv(i, row_lanes) * along_rows + thread_row) * row_lanes
            row = row + tirx.floormod(i, row_lanes)
            vectors = column_lanes // lanes
            group = tirx.floordiv(j, vectors) * along_columns + thread_column
            column = column_tile * (tile_columns // lanes) + group * vectors + tirx.floormod(j, vectors)
            return write_results(
                problem,
                batch_tile * tile_batch + thread_batch,
                row,
                column,
                lanes,
                lambda lane: totals[i * each_column + j * lanes + lane],
                tiling.tile,
            )

        lanes = result_lanes(problem, column_lanes)
        clear = loop(
            "i",
            each_row * each_column,
            lambda i: tirx.BufferStore(totals, cast(problem.initial, problem.dtype), [i]),
            "unrolled",
        )
        results = loop(
            "i", each_row, lambda i: loop("j", each_column // lanes, lambda j: write(i, j), "unrolled"), "unrolled"
        )
        return sequence(clear, fetch(tirx.IntImm("int32", 0)), loop("turn", steps, advance), results)

    tiles = counts[0] * counts[1] * counts[2]
    buffers = (left_shared, right_shared, left_next, right_next, left_part, right_part, totals)
    return kernel_func(func, tiles, threads, buffers, body), tiles
