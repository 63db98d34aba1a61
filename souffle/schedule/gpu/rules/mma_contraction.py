"""The rule for sums of products on tensor cores by ``mma.sync``, for sm_80 and newer: operands of fp16, or of fp32 that
may be multiplied in TF32, and fp32 totals; or 8-bit integers, four in a word, and totals in 32 bits.

A block's tile of results is shared among its warps, each of which holds the totals of its part in registers. Tiles of
the operands come through shared memory, several steps ahead by asynchronous copies where an operand is plain memory of
its type, else by way of registers, where it may be cast, padded or computed. Zeros stand for what lies beyond the ends,
so that no extent has to be a multiple of anything. Where rows and columns are few, warps share the inner axis too.
"""

from __future__ import annotations

from functools import partial
from math import prod

from souffle.decision import Refused
from souffle.schedule.gpu.emit.mma_emission import emit_mma
from souffle.schedule.gpu.emit.mma_fragments import HALVES
from souffle.schedule.gpu.forms.matrix_product import Contraction, read_contraction
from souffle.schedule.gpu.forms.packed_bytes import packed_bytes
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Rule, Sketch, Values
from souffle.schedule.gpu.tiling.mma_tiling import (
    MmaTiling,
    assumed_operands,
    choose_tiling,
    knobs_of,
    tile_operands,
    tiling_refusal,
)
from souffle.schedule.gpu.tiling.tensor_cores import mma_fragments

__all__ = ["MMA_CONTRACTION"]


def _apply(problem: Contraction, request: GpuRequest) -> Sketch | Refused:
    """A matrix product or convolution with fp32 totals, by ``mma.sync``.

    The summed term is ``cast(float32, a) * cast(float32, b)`` with ``a`` and ``b`` in fp16 (read so, or cast before),
    or ``a * b`` in fp32 where the stage says that it may be computed in TF32, or ``cast(int32, a) * cast(int32, b)`` of
    8-bit integers. A refusal names the architecture or type that does not fit, or one of the reasons of the other rules
    for contractions.
    """
    words = packed_bytes(problem)
    problem = problem if isinstance(words, Refused) else words
    fragments = mma_fragments(problem, request)
    if isinstance(fragments, Refused):
        return fragments
    assumed = assumed_operands(problem, request, fragments)
    unfit = problem.refused(f"no tile fits {request.max_shared_bytes} bytes of shared memory")

    def make(values: Values) -> GpuSchedule | Refused:
        tiling = MmaTiling.of(values, request.threads, fragments)
        if tiling is None:
            return problem.refused(f"{request.threads // 32} warps cannot be shared so")
        operands = tile_operands(problem, tiling, request)
        refusal = tiling_refusal(problem, tiling, operands, request)
        if refusal is not None:
            return problem.refused(refusal.reason)
        kernel, tiles = emit_mma(problem, tiling, operands, request.threads), prod(tiling.counts(problem.extents))
        way = "" if fragments is HALVES else f"in {fragments.name}"
        return GpuSchedule(kernel, MMA_CONTRACTION.name, tiles, request.threads, tensor_cores=True, way=way)

    best = partial(choose_tiling, problem, assumed, request)
    return Sketch.of_least(MMA_CONTRACTION.name, knobs_of(problem, assumed, request.threads), best, unfit, make)


MMA_CONTRACTION = Rule("mma_contraction", read_contraction, _apply, normalizes=True)
