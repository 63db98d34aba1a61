"""The rule for sums of products on tensor cores by ``mma.sync``, for sm_80 and newer: fp16 operands, fp32 totals.

A block's tile of results is shared among its warps, each of which holds the totals of its part in registers. Tiles of
the operands come through shared memory, several steps ahead by asynchronous copies where an operand is plain fp16
memory, else by way of registers, where it may be cast, padded or computed. Zeros stand for what lies beyond the ends,
so that no extent has to be a multiple of anything. Where rows and columns are few, warps share the inner axis too.
"""

from __future__ import annotations

from functools import cache
from math import inf, prod

from souffle.decision import Refused
from souffle.schedule.gpu.emit.async_copy import compute_capability
from souffle.schedule.gpu.emit.mma_emission import emit_mma
from souffle.schedule.gpu.forms.matrix_product import Contraction, read_contraction
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Rule, Sketch, Values
from souffle.schedule.gpu.tiling.contraction_tiling import refusal_of
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling, choose_tiling, knobs_of, problem_of, tile_operands
from souffle.schedule.gpu.tiling.tensor_cores import type_refusal, waste_refusal

__all__ = ["MMA_CONTRACTION"]

_FIRST_CAPABILITY = 80
"""mma.m16n8k16 and asynchronous copies begin here."""


def _apply(problem: Contraction, request: GpuRequest) -> Sketch | Refused:
    """A matrix product or convolution of fp16 operands with fp32 totals, by ``mma.sync``.

    The summed term is ``cast(float32, a) * cast(float32, b)`` with ``a`` and ``b`` in fp16 (read so, or cast before).
    A refusal names the architecture or type that does not fit, or one of the reasons of the other rules for
    contractions.
    """
    reason = _refusal(problem, request)
    if reason is not None:
        return Refused(f"block {problem.name}: {reason}")
    operands = problem_of(problem, request)

    @cache
    def best() -> tuple[float, MmaTiling] | None:
        return choose_tiling(problem, operands, request)

    def choose() -> Values | Refused:
        found = best()
        if found is None:
            return Refused(f"block {problem.name}: no tile fits {request.max_shared_bytes} bytes of shared memory")
        return found[1].values

    def clocks() -> float:
        found = best()
        return inf if found is None else found[0]

    def make(values: Values) -> GpuSchedule | Refused:
        tiling = MmaTiling.of(values, request.threads)
        if tiling is None:
            return Refused(f"block {problem.name}: {request.threads // 32} warps cannot be shared so")
        own = tile_operands(problem, tiling, request)
        unfit = tiling.refusal(own, request)
        if unfit is not None:
            return Refused(f"block {problem.name}: {unfit}")
        kernel, tiles = emit_mma(problem, tiling, own, request.threads), prod(tiling.counts(problem.extents))
        return GpuSchedule(kernel, MMA_CONTRACTION.name, tiles, request.threads, tensor_cores=True)

    return Sketch(MMA_CONTRACTION.name, knobs_of(problem, operands, request.threads), choose, make, clocks)


MMA_CONTRACTION = Rule("mma_contraction", read_contraction, _apply)


def _refusal(problem: Contraction, request: GpuRequest) -> str | None:
    if compute_capability(request.arch) < _FIRST_CAPABILITY:
        return f"{request.arch} has no mma.m16n8k16"
    return type_refusal(problem, request) or refusal_of(problem, request) or waste_refusal(problem)
