"""The rule for sums of products on tensor cores: fp16 operands, fp32 totals, 16 x 16 x 16 fragments.

The tile of a block is shared among its warps; each holds the totals of its part in fragments. Operands pass through
shared memory as in ``contraction.py``, with zeros beyond their ends, so that no extent has to be a multiple of 16. At
the end totals go through shared memory, a strip of rows at a time, since the place of an element in a fragment is not
defined, and what comes after the reduction is applied there in fp32.
"""

from __future__ import annotations

from functools import cache
from math import inf

from souffle.decision import Refused
from souffle.schedule.gpu.emit.wmma_emission import emit_wmma
from souffle.schedule.gpu.forms.matrix_product import Contraction, read_contraction
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Rule, Sketch, Values
from souffle.schedule.gpu.tiling.contraction_tiling import refusal_of
from souffle.schedule.gpu.tiling.tensor_cores import type_refusal, waste_refusal
from souffle.schedule.gpu.tiling.wmma_tiling import WmmaTiling, choose_tiling, knobs_of

__all__ = ["TENSOR_CORE_CONTRACTION"]


def _apply(problem: Contraction, request: GpuRequest) -> Sketch | Refused:
    """A matrix product or convolution of fp16 operands with fp32 totals, on tensor cores of any architecture.

    The summed term is as for ``mma_contraction.py``. A refusal names the type that does not fit, the extents that
    padding to 16 would enlarge more than 8 times, or one of the reasons of the rule for CUDA cores.
    """
    reason = type_refusal(problem, request) or refusal_of(problem, request) or waste_refusal(problem)
    if reason is not None:
        return Refused(f"block {problem.name}: {reason}")
    unfit = Refused(f"block {problem.name}: no tile fits {request.max_shared_bytes} bytes of shared memory")

    @cache
    def best() -> tuple[float, WmmaTiling] | None:
        return choose_tiling(problem, request)

    def choose() -> Values | Refused:
        found = best()
        return unfit if found is None else found[1].values

    def clocks() -> float:
        found = best()
        return inf if found is None else found[0]

    def make(values: Values) -> GpuSchedule | Refused:
        tiling = WmmaTiling.of(values, request.threads)
        if tiling.shared_bytes > request.max_shared_bytes or not tiling.fits_registers:
            return unfit
        kernel, tiles = emit_wmma(problem, tiling, request.threads)
        return GpuSchedule(kernel, TENSOR_CORE_CONTRACTION.name, tiles, request.threads, tensor_cores=True)

    return Sketch(TENSOR_CORE_CONTRACTION.name, knobs_of(problem, request), choose, make, clocks)


TENSOR_CORE_CONTRACTION = Rule("tensor_core_contraction", read_contraction, _apply)
