"""The rule for sums of products on tensor cores: fp16 operands, fp32 totals, 16 x 16 x 16 fragments.

The tile of a block is shared among its warps; each holds the totals of its part in fragments. Operands pass through
shared memory as in ``contraction.py``, with zeros beyond their ends, so that no extent has to be a multiple of 16. At
the end totals go through shared memory, a strip of rows at a time, since the place of an element in a fragment is not
defined, and what comes after the reduction is applied there in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from tvm import tirx

from souffle.schedule.gpu.emit.staging import TileFetch, choose_fetch
from souffle.schedule.gpu.emit.statements import guarded, kernel_func, local_buffer, loop, sequence, shared_buffer
from souffle.schedule.gpu.emit.writeback import result_lanes, write_results
from souffle.schedule.gpu.forms.expressions import NotAContraction
from souffle.schedule.gpu.forms.matrix_product import Contraction, canonical_contraction
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Refusal
from souffle.schedule.gpu.sketch import Knob, Sketch, Values
from souffle.schedule.gpu.tiling.contraction_tiling import refusal_of
from souffle.tvm_compat import PrimExpr

__all__ = ["tensor_core_contraction", "type_refusal", "waste_refusal"]

RULE = "tensor_core_contraction"

_SIDE = 16
"""Rows, columns and products of one fragment."""

_FRAGMENT = _SIDE * _SIDE

_MAX_WASTE = 8
"""Tensor cores are 8 to 16 times as fast as CUDA cores here, so more padding than this leaves no gain."""

_MAX_TOTALS = 8
"""Fragments of totals of a warp: 8 registers of each thread for one, and the operands' beside them."""

_FRAGMENTS = (1, 2, 4)
"""Fragments of a warp along rows, or along columns."""

_PADDING_BYTES = 16
"""Between rows of shared memory; rows of a power of two would put a fragment's column into one bank."""


@dataclass(frozen=True)
class _Tiling:
    """Warps along rows and columns, fragments of each along rows and columns, and the step along the inner axis."""

    warps: tuple[int, int]
    fragments: tuple[int, int]
    step: int

    @property
    def tile(self) -> tuple[int, int, int]:
        """Extents of a block's tile: batch, rows, columns."""
        return (1, *(w * f * _SIDE for w, f in zip(self.warps, self.fragments, strict=True)))

    @property
    def values(self) -> Values:
        """As the knobs of the sketch say it."""
        return {
            "warps_along_rows": self.warps[0],
            "fragments_down": self.fragments[0],
            "fragments_across": self.fragments[1],
            "step": self.step,
        }

    @classmethod
    def of(cls, values: Values, threads: int) -> _Tiling:
        """The tiling of these values."""
        down = values["warps_along_rows"]
        fragments = (values["fragments_down"], values["fragments_across"])
        return cls((down, threads // 32 // down), fragments, values["step"])

    @property
    def strip(self) -> tuple[int, int]:
        """Rows and columns of the strip of totals that is written at a time."""
        return self.warps[0] * _SIDE, self.tile[2]

    @property
    def strip_pitch(self) -> int:
        """Elements from one row of the strip to the next."""
        return self.strip[1] + _PADDING_BYTES // 4

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, at most."""
        _, rows, columns = self.tile
        padding = _PADDING_BYTES // 2
        operands = max((rows + columns) * (self.step + padding), (rows + columns + 2 * padding) * self.step)
        return 2 * operands + 4 * self.strip[0] * self.strip_pitch

    def counts(self, extents: tuple[int, int, int, int]) -> tuple[int, int, int]:
        """Tiles along batch, rows, columns."""
        return tuple(ceil(extent / size) for extent, size in zip(extents, self.tile, strict=False))


def tensor_core_contraction(func: tirx.PrimFunc, request: GpuRequest) -> Sketch | Refusal:
    """Schedule a matrix product or convolution of fp16 operands with fp32 totals on tensor cores.

    Parameters
    ----------
    func : PrimFunc
        As for :func:`souffle.schedule.gpu.rules.contraction.contraction`; the summed term is
        ``cast(float32, a) * cast(float32, b)`` with ``a`` and ``b`` in fp16 (read so, or cast to fp16 before).
    request : GpuRequest

    Returns
    -------
    Sketch or Refusal
        A refusal names the type that does not fit, the extents that padding to 16 would enlarge more than
        8 times, or one of the reasons of the rule for CUDA cores.
    """
    try:
        problem = canonical_contraction(func)
    except NotAContraction as reason:
        return Refusal(RULE, str(reason))
    reason = type_refusal(problem, request) or refusal_of(problem, request) or waste_refusal(problem)
    if reason is not None:
        return Refusal(RULE, f"block {problem.name}: {reason}")
    unfit = Refusal(RULE, f"block {problem.name}: no tile fits {request.max_shared_bytes} bytes of shared memory")

    def choose() -> Values | Refusal:
        tiling = _choose_tiling(problem, request)
        return unfit if tiling is None else tiling.values

    def make(values: Values) -> GpuSchedule | Refusal:
        tiling = _Tiling.of(values, request.threads)
        if tiling.shared_bytes > request.max_shared_bytes or prod(tiling.fragments) > _MAX_TOTALS:
            return unfit
        kernel, tiles = _emit(func, problem, tiling, request.threads)
        return GpuSchedule(kernel, RULE, tiles, request.threads, tensor_cores=True)

    return Sketch(RULE, _knobs(problem, request), choose, make)


def _knobs(problem: Contraction, request: GpuRequest) -> tuple[Knob, ...]:
    warps = request.threads // 32
    return (
        Knob("warps_along_rows", tuple(d for d in range(1, warps + 1) if warps % d == 0)),
        Knob("fragments_down", _FRAGMENTS),
        Knob("fragments_across", _FRAGMENTS),
        Knob("step", (16,) if problem.extents[3] <= 16 else (16, 32)),
    )


def type_refusal(problem: Contraction, request: GpuRequest) -> str | None:
    """Why a problem's types, or what it does with them, are not those of tensor cores; or ``None``."""
    digits = "".join(c for c in request.arch if c.isdigit())
    if not digits or int(digits) < 70:
        return f"{request.arch} has no tensor cores for fp16"
    types = (problem.left.dtype, problem.right.dtype, problem.dtype)
    if types != ("float16", "float16", "float32"):
        return f"operands and total are {', '.join(types)}; fp16, fp16 and fp32 are needed"
    if not _multiplies_in_fp32(problem):
        return f"the total is updated by {problem.update}, not by a product in fp32"
    if not isinstance(problem.initial, tirx.FloatImm) or float(problem.initial.value) != 0.0:
        return "the total does not begin at 0"
    return None


def _multiplies_in_fp32(problem: Contraction) -> bool:
    """Whether the update is ``total + cast(left) * cast(right)``, the factors in either order."""
    update = problem.update
    product = update.b if isinstance(update, tirx.Add) and update.a.same_as(problem.total) else None
    if not isinstance(product, tirx.Mul) or not all(isinstance(f, tirx.Cast) for f in (product.a, product.b)):
        return False
    factors, leaves = (product.a.value, product.b.value), (problem.left.leaf, problem.right.leaf)
    return any(all(f.same_as(x) for f, x in zip(factors, order, strict=True)) for order in (leaves, leaves[::-1]))


def waste_refusal(problem: Contraction) -> str | None:
    """Why filling fragments up would be too much of the work, or ``None``."""
    extents = problem.extents[1:]
    waste = prod(-(-e // _SIDE) * _SIDE for e in extents) / prod(extents)
    if waste > _MAX_WASTE:
        rows, columns, inner = extents
        return f"{rows} x {columns} results of {inner} products, padded to 16, are {waste:.1f} times the work"
    return None


def _choose_tiling(problem: Contraction, request: GpuRequest) -> _Tiling | None:
    best: tuple[float, _Tiling] | None = None
    warps = request.threads // 32
    along_rows, down, across, steps = (knob.values for knob in _knobs(problem, request))
    for rows in along_rows:
        for fragments in ((i, j) for i in down for j in across if i * j <= _MAX_TOTALS):
            for step in reversed(steps):
                tiling = _Tiling((rows, warps // rows), fragments, step)
                if tiling.shared_bytes > request.max_shared_bytes:
                    continue
                cost = _cost(problem, tiling, request)
                if best is None or cost < best[0]:
                    best = (cost, tiling)
                break
    return None if best is None else best[1]


def _cost(problem: Contraction, tiling: _Tiling, request: GpuRequest) -> float:
    """Estimated cycles of a multiprocessor for the tiles that it runs.

    A fragment product takes 8 cycles of the multiprocessor's four tensor cores (half of what the newest could do, which
    wmma does not reach), a fragment's load from shared memory 4 (512 bytes, 128 a cycle), an element fetched 4
    instructions and an element written 20, of 128 a cycle. A step costs two barriers.
    """
    _, rows, columns = tiling.tile
    down, across = tiling.fragments
    warps = tiling.warps[0] * tiling.warps[1]
    steps = ceil(problem.extents[3] / tiling.step)
    products = warps * tiling.step / _SIDE * (8.0 * down * across + 4.0 * (down + across))
    fetched = (rows + columns) * tiling.step * 4 / 128
    block = steps * (products + fetched + 100.0) + rows * columns * 20 / 128 + 500.0
    return ceil(prod(tiling.counts(problem.extents)) / request.sm_count) * block


def _emit(func: tirx.PrimFunc, problem: Contraction, tiling: _Tiling, threads: int) -> tuple[tirx.PrimFunc, int]:
    _, tile_rows, tile_columns = tiling.tile
    down, across = tiling.fragments
    step = tiling.step
    steps = ceil(problem.extents[3] / step)
    pitch = tiling.strip_pitch

    def padding(_: bool) -> int:
        return _PADDING_BYTES // 2

    left = choose_fetch(problem, "left", (1, tile_rows, step), threads, None, padding)
    right = choose_fetch(problem, "right", (1, tile_columns, step), threads, None, padding)
    left_shared = shared_buffer("left_tile", left.shared_elements, "float16")
    right_shared = shared_buffer("right_tile", right.shared_elements, "float16")
    strip = shared_buffer("strip", tiling.strip[0] * pitch, "float32")
    left_next = local_buffer("left_next", left.register_elements, "float16")
    right_next = local_buffer("right_next", right.register_elements, "float16")
    left_part = tirx.decl_buffer((down * _FRAGMENT,), "float16", "left_part", scope="wmma.matrix_a")
    right_part = tirx.decl_buffer((across * _FRAGMENT,), "float16", "right_part", scope="wmma.matrix_b")
    totals = tirx.decl_buffer((down * across * _FRAGMENT,), "float32", "totals", scope="wmma.accumulator")
    counts = tiling.counts(problem.extents)
    lanes = result_lanes(problem, 4)

    def body(block: PrimExpr, thread: PrimExpr) -> tirx.Stmt:
        column_tile = tirx.floormod(block, counts[2])
        row_tile = tirx.floormod(tirx.floordiv(block, counts[2]), counts[1])
        batch_tile = tirx.floordiv(block, counts[1] * counts[2])
        warp = tirx.floordiv(thread, 32)
        warp_column = tirx.floormod(warp, tiling.warps[1])
        warp_row = tirx.floordiv(warp, tiling.warps[1])

        def fetch(turn: PrimExpr) -> tirx.Stmt:
            return sequence(
                left.fetch(left_next, thread, (batch_tile, row_tile, turn)),
                right.fetch(right_next, thread, (batch_tile, column_tile, turn)),
            )

        def clear(i: PrimExpr) -> tirx.Stmt:
            value = tirx.const(0.0, "float32")
            return tirx.Evaluate(tirx.tvm_fill_fragment(totals.data, _SIDE, _SIDE, _SIDE, i, value))

        def part(registers, shared, source: TileFetch, first: PrimExpr, count: int, k: PrimExpr, row_major: bool):
            def load(i: PrimExpr) -> tirx.Stmt:
                at = source.place(tirx.IntImm("int32", 0), (first + i) * _SIDE, k * _SIDE)
                extent = (_SIDE - 1) * source.pitch + _SIDE
                pointer = shared.access_ptr("r", ptr_type="float16", offset=at, extent=extent)
                layout = "row_major" if row_major else "col_major"
                return tirx.Evaluate(
                    tirx.tvm_load_matrix_sync(registers.data, _SIDE, _SIDE, _SIDE, i, pointer, source.pitch, layout)
                )

            return loop("i", count, load, "unrolled")

        def products(k: PrimExpr) -> tirx.Stmt:
            def one(i: PrimExpr, j: PrimExpr) -> tirx.Stmt:
                at = i * across + j
                operands = (left_part.data, i, right_part.data, j)
                return tirx.Evaluate(tirx.tvm_mma_sync(totals.data, at, *operands, totals.data, at))

            # matrix_a is rows x inner, matrix_b is inner x columns.
            return sequence(
                part(left_part, left_shared, left, warp_row * down, down, k, left.inner_last),
                part(right_part, right_shared, right, warp_column * across, across, k, not right.inner_last),
                loop("i", down, lambda i: loop("j", across, lambda j: one(i, j), "unrolled"), "unrolled"),
            )

        def advance(turn: PrimExpr) -> tirx.Stmt:
            following = guarded([tirx.LT(turn + 1, steps)], fetch(turn + 1)) if steps > 1 else None
            return sequence(
                left.put(left_next, left_shared, thread),
                right.put(right_next, right_shared, thread),
                following,
                loop("k", step // _SIDE, products, "unrolled"),
            )

        def write_strip(i: PrimExpr) -> tirx.Stmt:
            """The i-th fragment row of every warp: to shared memory, and from there to the outputs."""

            def store(j: PrimExpr) -> tirx.Stmt:
                at = warp_row * _SIDE * pitch + (warp_column * across + j) * _SIDE
                extent = (_SIDE - 1) * pitch + _SIDE
                pointer = strip.access_ptr("w", ptr_type="float32", offset=at, extent=extent)
                return tirx.Evaluate(
                    tirx.tvm_store_matrix_sync(
                        totals.data, _SIDE, _SIDE, _SIDE, i * across + j, pointer, pitch, "row_major"
                    )
                )

            vectors = tile_columns // lanes
            units = tiling.strip[0] * vectors

            def write(turn: PrimExpr) -> tirx.Stmt:
                unit = turn * threads + thread
                row, column = tirx.floordiv(unit, vectors), tirx.floormod(unit, vectors)
                # A strip holds the i-th 16 rows of each warp row.
                own = (tirx.floordiv(row, _SIDE) * down + i) * _SIDE + tirx.floormod(row, _SIDE)
                results = write_results(
                    problem,
                    batch_tile,
                    row_tile * tile_rows + own,
                    column_tile * vectors + column,
                    lanes,
                    lambda lane: strip[row * pitch + column * lanes + lane],
                    tiling.tile,
                )
                return guarded([tirx.LT(unit, units)] if units % threads else [], results)

            return sequence(loop("j", across, store, "unrolled"), loop("turn", ceil(units / threads), write))

        return sequence(
            loop("i", down * across, clear, "unrolled"),
            fetch(tirx.IntImm("int32", 0)),
            loop("turn", steps, advance),
            loop("i", down, write_strip, "unrolled"),
        )

    buffers = (left_shared, right_shared, strip, left_next, right_next, left_part, right_part, totals)
    return kernel_func(func, prod(counts), threads, buffers, body), prod(counts)
