"""The rule for sums of products on CUDA cores: a tiled matrix product in registers, with its neighbours inside.

Each block computes one tile of the canonical form (see ``matrix_product.py``). For each step along the inner axis its
threads read a tile of either operand from global memory, applying what comes before the reduction (padding, casts, the
image-to-column indices of a convolution), put it in shared memory, and add the products of the two tiles to totals in
registers. The next step's reads are issued before the present step's arithmetic, which hides their latency. What
comes after the reduction is applied to the totals as they are written. Products of 8-bit integers are added four at a
time (``dp4a``), of words that hold as many.
"""

from __future__ import annotations

from functools import partial

from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.gpu.emit.async_copy import compute_capability
from souffle.schedule.gpu.emit.contraction_emission import emit_contraction
from souffle.schedule.gpu.emit.mma_instructions import byte_dot
from souffle.schedule.gpu.forms.matrix_product import Contraction, read_contraction
from souffle.schedule.gpu.forms.packed_bytes import PACKED, byte_types, packed_bytes
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Rule, Sketch, Values
from souffle.schedule.gpu.tiling.contraction_cost import least_clocks
from souffle.schedule.gpu.tiling.contraction_tiling import (
    ContractionTiling,
    choose_tiling,
    knobs_of,
    staging_refusal,
    tiling_refusal,
)

__all__ = ["CONTRACTION", "tile_of"]


def _apply(problem: Contraction, request: GpuRequest) -> Sketch | Refused:
    """A matrix product or convolution with its injective neighbours, on CUDA cores and in any type.

    Refused is what a reduction rule computes better: fewer than 4 rows or columns, or fewer than 4 products a sum.
    """
    problem = _with_dots(problem, request)
    refusal = staging_refusal(problem, request)
    if refusal is not None:
        return refusal
    if problem.finished or problem.row_values.chunks is not None:
        return problem.refused("copies about the means of chunks are for fragments of tensor cores")
    unfit = problem.refused(
        f"no tile of {problem.left.dtype} and {problem.right.dtype} operands fits {request.threads} threads and "
        f"{request.max_shared_bytes} bytes of shared memory"
    )

    def make(values: Values) -> GpuSchedule | Refused:
        tiling = ContractionTiling.of(values, request.threads)
        refusal = unfit if tiling is None else tiling_refusal(problem, tiling, request)
        if refusal is not None:
            return refusal
        kernel, tiles = emit_contraction(problem, tiling, request)
        return GpuSchedule(kernel, CONTRACTION.name, tiles, request.threads)

    best = partial(choose_tiling, problem, request)
    knobs, least = knobs_of(problem, request), least_clocks(problem, request)
    return Sketch.of_least(CONTRACTION.name, knobs, best, unfit, make, least)


def _with_dots(problem: Contraction, request: GpuRequest) -> Contraction:
    """A sum of products of 8-bit integers by ``dp4a``, where the device has it; any other as it is."""
    types = byte_types(problem)
    if types is None or compute_capability(request.arch) < _FIRST_DP4A or problem.extents[3] < _LEAST_DOTS * PACKED:
        return problem
    packed = packed_bytes(problem, partial(byte_dot, types))
    return problem if isinstance(packed, Refused) else packed


_FIRST_DP4A = 61
_LEAST_DOTS = 4
"""Words of a sum: fewer are padding for the most part."""

CONTRACTION = Rule("contraction", read_contraction, _apply, starts_reductions=True, normalizes=True)


def tile_of(func: tirx.PrimFunc, request: GpuRequest) -> tuple[int, int] | None:
    """Rows and columns of the tile that this rule itself chooses; ``None`` if it does not apply."""
    problem = StageForms(func).read(read_contraction)
    problem = problem if isinstance(problem, Refused) else _with_dots(problem, request)
    if isinstance(problem, Refused) or staging_refusal(problem, request) is not None:
        return None
    timed = choose_tiling(problem, request)
    return None if timed is None else timed[1].tile[1:]
