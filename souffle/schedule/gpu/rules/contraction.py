"""The rule for sums of products on CUDA cores: a tiled matrix product in registers, with its neighbours inside.

Each block computes one tile of the canonical form (see ``matrix_product.py``). For each step along the inner axis its
threads read a tile of either operand from global memory, applying what comes before the reduction (padding, casts, the
image-to-column indices of a convolution), put it in shared memory, and add the products of the two tiles to totals in
registers. The next step's reads are issued before the present step's arithmetic, which hides their latency. What
comes after the reduction is applied to the totals as they are written.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from tvm import tirx

from souffle.schedule.gpu.emit.async_copy import AsyncCopy, async_copy, barrier, commit, wait
from souffle.schedule.gpu.emit.folding import Part, fold_buffers, fold_results
from souffle.schedule.gpu.emit.staging import choose_fetch
from souffle.schedule.gpu.emit.statements import guarded, kernel_func, local_buffer, loop, sequence, shared_buffer
from souffle.schedule.gpu.emit.writeback import write_results
from souffle.schedule.gpu.forms.expressions import NotAContraction, cast, substitute_axes
from souffle.schedule.gpu.forms.matrix_product import Contraction, canonical_contraction
from souffle.schedule.gpu.rule import STARTS_IN_TILES, GpuRequest, GpuSchedule, Refusal
from souffle.schedule.gpu.sketch import Sketch, Values
from souffle.schedule.gpu.tiling.contraction_cost import result_lanes_of
from souffle.schedule.gpu.tiling.contraction_tiling import (
    PADDING,
    VECTOR,
    Tiling,
    choose_tiling,
    knobs_of,
    problem_of,
    refusal_of,
)
from souffle.tvm_compat import PrimExpr

__all__ = ["contraction", "estimated_clocks", "tile_of"]

RULE = "contraction"

_UNROLLED = 512
"""Multiply-adds in a row, between which shared memory's latency and its indices disappear; 64 totals, 8 deep."""


def contraction(func: tirx.PrimFunc, request: GpuRequest) -> Sketch | Refusal:
    """Schedule a matrix product or convolution with its injective neighbours, on CUDA cores and in any type.

    Parameters
    ----------
    func : PrimFunc
        One reduction block of products (batched, transposed, grouped, strided in any way) and injective blocks before
        and after it; where it has the attribute ``STARTS_IN_TILES``, behind it reductions over its elements too, of
        which a tile has what it combines (``behind_contraction.py``).
    request : GpuRequest

    Returns
    -------
    Sketch or Refusal
        A refusal names what is missing of the form, or why a reduction rule is the better one: fewer than
        4 rows or columns, or fewer than 4 products a sum.
    """
    problem = _read(func)
    if isinstance(problem, str):
        return Refusal(RULE, problem)
    refusal = refusal_of(problem, request)
    if refusal is not None:
        return Refusal(RULE, f"block {problem.name}: {refusal}")

    def choose() -> Values | Refusal:
        found = choose_tiling(problem, request)
        if found is None:
            return Refusal(RULE, f"block {problem.name}: {_unfit(problem, request)}")
        return found[1].values

    def make(values: Values) -> GpuSchedule | Refusal:
        tiling = Tiling.of(values, request.threads)
        reason = _unfit(problem, request) if tiling is None else problem_of(problem, tiling, request)
        if tiling is None or reason is not None:
            return Refusal(RULE, f"block {problem.name}: {reason}")
        kernel, tiles = _emit(func, problem, tiling, request)
        return GpuSchedule(kernel, RULE, tiles, request.threads)

    return Sketch(RULE, knobs_of(problem, request), choose, make)


def estimated_clocks(func: tirx.PrimFunc, request: GpuRequest) -> float | None:
    """The estimate of this rule's own choice, to compare another rule's with; ``None`` if it does not apply."""
    problem = _read(func)
    if isinstance(problem, str):
        return None
    found = None if refusal_of(problem, request) is not None else choose_tiling(problem, request)
    return None if found is None else found[0]


def tile_of(func: tirx.PrimFunc, request: GpuRequest) -> tuple[int, int] | None:
    """Rows and columns of the tile that this rule itself chooses; ``None`` if it does not apply."""
    problem = _read(func)
    if isinstance(problem, str) or refusal_of(problem, request) is not None:
        return None
    found = choose_tiling(problem, request)
    return None if found is None else found[1].tile[1:]


@lru_cache(maxsize=2)
def _read(func: tirx.PrimFunc) -> Contraction | str:
    """The canonical form, or why there is none: the window rule asks for it before this one does."""
    try:
        return canonical_contraction(func, folds=STARTS_IN_TILES in func.attrs)
    except NotAContraction as reason:
        return str(reason)


def _unfit(problem: Contraction, request: GpuRequest) -> str:
    return (
        f"no tile of {problem.left.dtype} and {problem.right.dtype} operands fits {request.threads} threads and "
        f"{request.max_shared_bytes} bytes of shared memory"
    )


def _emit(
    func: tirx.PrimFunc, problem: Contraction, tiling: Tiling, request: GpuRequest
) -> tuple[tirx.PrimFunc, int]:
    threads, stages = request.threads, tiling.stages
    tile_batch, tile_rows, tile_columns = tiling.tile
    each_row, each_column = tiling.each
    _, along_rows, along_columns = tiling.across
    row_lanes, column_lanes = min(each_row, VECTOR), tiling.together
    step, inner = tiling.step, problem.extents[3]
    steps = ceil(inner / step)

    def padding(crossing: bool) -> int:
        # Rows one vector longer put a column's elements in different banks, and keep vectors aligned.
        return PADDING if crossing else 0

    left = choose_fetch(problem, "left", (tile_batch, tile_rows, step), threads, False, padding)
    right = choose_fetch(problem, "right", (tile_batch, tile_columns, step), threads, False, padding)
    copies = [async_copy(one, request.arch) if stages > 1 else None for one in (left, right)]
    left_copy, right_copy = (one if isinstance(one, AsyncCopy) else None for one in copies)
    left = left if left_copy is None else left_copy.fetch
    right = right if right_copy is None else right_copy.fetch
    # What comes by way of registers is stored just before it is read, so that two of its tiles are enough.
    left_tiles, right_tiles = (stages if one is not None else min(stages, 2) for one in (left_copy, right_copy))
    left_shared = shared_buffer("left_tile", left_tiles * left.shared_elements, problem.left.dtype)
    right_shared = shared_buffer("right_tile", right_tiles * right.shared_elements, problem.right.dtype)
    left_next = local_buffer("left_next", left.register_elements, problem.left.dtype)
    right_next = local_buffer("right_next", right.register_elements, problem.right.dtype)
    left_part = local_buffer("left_part", each_row, problem.left.dtype)
    right_part = local_buffer("right_part", each_column, problem.right.dtype)
    totals = local_buffer("totals", each_row * each_column, problem.dtype)
    counts = tiling.counts(problem.extents)
    unrolled = max(u for u in (1, 2, 4, 8) if step % u == 0 and (u == 1 or u * each_row * each_column <= _UNROLLED))
    lanes = result_lanes_of(problem, column_lanes)
    stores = problem.stores if lanes > 1 else ()
    apart = [local_buffer(f"result{n}", lanes, str(one.buffer.dtype)) for n, one in enumerate(stores)]
    folded = fold_buffers(problem, tiling.across, tiling.each)

    def body(block: PrimExpr, thread: PrimExpr) -> tirx.Stmt:
        column_tile = tirx.floormod(block, counts[2])
        row_tile = tirx.floormod(tirx.floordiv(block, counts[2]), counts[1])
        batch_tile = tirx.floordiv(block, counts[1] * counts[2])
        thread_column = tirx.floormod(thread, along_columns)
        thread_row = tirx.floormod(tirx.floordiv(thread, along_columns), along_rows)
        thread_batch = tirx.floordiv(thread, along_columns * along_rows)

        left_side = (left, left_copy, left_next, left_shared, left_tiles, row_tile)
        right_side = (right, right_copy, right_next, right_shared, right_tiles, column_tile)

        def start(side, turn: PrimExpr) -> PrimExpr:
            source, tiles_kept = side[0], side[4]
            return tirx.floormod(turn, tiles_kept) * source.shared_elements if tiles_kept > 1 else 0

        def fetch(turn: PrimExpr) -> tirx.Stmt | None:
            found = [
                source.fetch(registers, thread, (batch_tile, own_tile, turn))
                for source, copy, registers, _, _, own_tile in (left_side, right_side)
                if copy is None
            ]
            return sequence(*found) if found else None

        def copied(turn: PrimExpr) -> tirx.Stmt:
            return sequence(
                *(
                    side[1].copies(side[3], start(side, turn), thread, (batch_tile, side[5], turn))
                    for side in (left_side, right_side)
                    if side[1] is not None
                )
            )

        def put(turn: PrimExpr) -> tirx.Stmt | None:
            found = [
                source.put(registers, shared, thread, start((source, copy, registers, shared, kept, own), turn))
                for source, copy, registers, shared, kept, own in (left_side, right_side)
                if copy is None
            ]
            return sequence(*found) if found else None

        def part(
            side, turn: PrimExpr, registers, lanes: int, count: int, threads_along: int, at: PrimExpr, k: PrimExpr
        ) -> tirx.Stmt:
            source, shared, base = side[0], side[3], start(side, turn)

            def group(j: PrimExpr) -> tirx.Stmt:
                def lane(i: PrimExpr) -> tirx.Stmt:
                    x = (j * threads_along + at) * lanes + i
                    return tirx.BufferStore(registers, shared[base + source.place(thread_batch, x, k)], [j * lanes + i])

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
                part(left_side, turn, left_part, row_lanes, each_row, along_rows, thread_row, k),
                part(right_side, turn, right_part, column_lanes, each_column, along_columns, thread_column, k),
                loop("i", each_row, lambda i: loop("j", each_column, lambda j: one(i, j), "unrolled"), "unrolled"),
            )
            # Zeros beyond the end of the sum change a sum of products; any other total they must not reach.
            ragged = inner % step and not problem.product_sum
            return guarded([tirx.LT(turn * step + k, inner)] if ragged else [], products)

        def multiply(turn: PrimExpr) -> tirx.Stmt:
            def some(group: PrimExpr) -> tirx.Stmt:
                return loop("k", unrolled, lambda k: product(turn, group * unrolled + k), "unrolled")

            return loop("group", step // unrolled, some)

        def advance(turn: PrimExpr) -> tirx.Stmt:
            following = guarded([tirx.LT(turn + 1, steps)], fetch(turn + 1)) if steps > 1 else None
            return sequence(put(turn), following, multiply(turn))

        def advance_copied(turn: PrimExpr) -> tirx.Stmt:
            waiting = fetch(turn + 1)
            following = None if waiting is None or steps == 1 else guarded([tirx.LT(turn + 1, steps)], waiting)
            ahead = turn + (stages - 1)
            more = guarded([tirx.LT(ahead, steps)], copied(ahead))
            return sequence(put(turn), wait(stages - 2), barrier(), more, commit(), following, multiply(turn))

        def first(turn: PrimExpr) -> tirx.Stmt:
            return sequence(copied(turn), commit())

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
                apart=apart,
            )

        clear = loop(
            "i",
            each_row * each_column,
            lambda i: tirx.BufferStore(totals, cast(problem.initial, problem.dtype), [i]),
            "unrolled",
        )
        results = None
        if problem.stores:
            results = loop(
                "i", each_row, lambda i: loop("j", each_column // lanes, lambda j: write(i, j), "unrolled"), "unrolled"
            )

        def within(number: PrimExpr, wide: int, along: int, own: PrimExpr) -> PrimExpr:
            return (tirx.floordiv(number, wide) * along + own) * wide + tirx.floormod(number, wide)

        part_of_tile = Part(
            tiling.across,
            tiling.each,
            (batch_tile, row_tile, column_tile),
            (thread_batch, thread_row, thread_column),
            lambda i: within(i, row_lanes, along_rows, thread_row),
            lambda j: within(j, column_lanes, along_columns, thread_column),
            lambda i, j: totals[i * each_column + j],
        )
        results = sequence(results, fold_results(problem, part_of_tile, folded, thread, threads))
        zero = tirx.IntImm("int32", 0)
        if stages == 1:
            return sequence(clear, fetch(zero), loop("turn", steps, advance), results)
        ahead = [first(tirx.IntImm("int32", turn)) for turn in range(stages - 1)]
        return sequence(clear, *ahead, fetch(zero), loop("turn", steps, advance_copied), results)

    tiles = counts[0] * counts[1] * counts[2]
    waiting = [one for one, copy in ((left_next, left_copy), (right_next, right_copy)) if copy is None]
    held = [one for pair in folded for one in pair]
    buffers = (left_shared, right_shared, *waiting, left_part, right_part, totals, *apart, *held)
    return kernel_func(func, tiles, threads, buffers, body), tiles
