"""The rule for sums of products on tensor cores: fp16 operands, fp32 totals, 16 x 16 x 16 fragments.

The tile of a block is shared among its warps; each holds the totals of its part in fragments. Operands pass through
shared memory as in ``contraction.py``, with zeros beyond their ends, so that no extent has to be a multiple of 16. At
the end totals go through shared memory, a strip of rows at a time, since the place of an element in a fragment is not
defined, and what comes after the reduction is applied there in fp32.
"""

from __future__ import annotations

from functools import partial

from souffle.decision import Refused
from souffle.schedule.gpu.emit.wmma_emission import emit_wmma
from souffle.schedule.gpu.forms.matrix_product import Contraction, read_contraction
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Rule, Sketch, Values
from souffle.schedule.gpu.tiling.tensor_cores import tensor_core_refusal
from souffle.schedule.gpu.tiling.wmma_tiling import WmmaTiling, choose_tiling, knobs_of

__all__ = ["TENSOR_CORE_CONTRACTION"]


def _apply(problem: Contraction, request: GpuRequest) -> Sketch | Refused:
    """A matrix product or convolution of fp16 operands with fp32 totals, on tensor cores of any architecture.

    The summed term is as for ``mma_contraction.py``. A refusal names the type that does not fit, the extents that
    padding to 16 would enlarge more than 8 times, or one of the reasons of the rule for CUDA cores.
    """
    if problem.normalizes:
        return problem.refused("wmma fragments have no rows to normalize")
    refusal = tensor_core_refusal(problem, request)
    if refusal is not None:
        return refusal
    unfit = problem.refused(f"no tile fits {request.max_shared_bytes} bytes of shared memory")

    def make(values: Values) -> GpuSchedule | Refused:
        tiling = WmmaTiling.of(values, request.threads)
        if tiling.shared_bytes > request.max_shared_bytes or not tiling.fits_registers:
            return unfit
        kernel, tiles = emit_wmma(problem, tiling, request.threads)
        return GpuSchedule(kernel, TENSOR_CORE_CONTRACTION.name, tiles, request.threads, tensor_cores=True)

    best = partial(choose_tiling, problem, request)
    return Sketch.of_least(TENSOR_CORE_CONTRACTION.name, knobs_of(problem, request), best, unfit, make)


TENSOR_CORE_CONTRACTION = Rule("tensor_core_contraction", read_contraction, _apply)
