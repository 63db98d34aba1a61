"""The rule for sums of products on tensor cores: fp16 operands, fp32 totals, 16 x 16 x 16 fragments.

The tile of a block is shared among its warps; each holds the totals of its part in fragments. Operands pass through
shared memory as in ``contraction.py``, with zeros beyond their ends, so that no extent has to be a multiple of 16. At
the end totals go through shared memory, a strip of rows at a time, since the place of an element in a fragment is not
defined, and what comes after the reduction is applied there in fp32.
"""

from __future__ import annotations

from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.gpu.emit.wmma_emission import emit_wmma
from souffle.schedule.gpu.forms.expressions import NotAContraction
from souffle.schedule.gpu.forms.matrix_product import canonical_contraction
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule
from souffle.schedule.gpu.sketch import Sketch, Values
from souffle.schedule.gpu.tiling.contraction_tiling import refusal_of
from souffle.schedule.gpu.tiling.tensor_cores import type_refusal, waste_refusal
from souffle.schedule.gpu.tiling.wmma_tiling import WmmaTiling, choose_tiling, knobs_of

__all__ = ["tensor_core_contraction"]

RULE = "tensor_core_contraction"


def tensor_core_contraction(func: tirx.PrimFunc, request: GpuRequest) -> Sketch | Refused:
    """Schedule a matrix product or convolution of fp16 operands with fp32 totals on tensor cores.

    Parameters
    ----------
    func : PrimFunc
        As for :func:`souffle.schedule.gpu.rules.contraction.contraction`; the summed term is
        ``cast(float32, a) * cast(float32, b)`` with ``a`` and ``b`` in fp16 (read so, or cast to fp16 before).
    request : GpuRequest

    Returns
    -------
    Sketch or Refused
        A refusal names the type that does not fit, the extents that padding to 16 would enlarge more than
        8 times, or one of the reasons of the rule for CUDA cores.
    """
    try:
        problem = canonical_contraction(func)
    except NotAContraction as reason:
        return Refused(str(reason))
    reason = type_refusal(problem, request) or refusal_of(problem, request) or waste_refusal(problem)
    if reason is not None:
        return Refused(f"block {problem.name}: {reason}")
    unfit = Refused(f"block {problem.name}: no tile fits {request.max_shared_bytes} bytes of shared memory")

    def choose() -> Values | Refused:
        tiling = choose_tiling(problem, request)
        return unfit if tiling is None else tiling.values

    def make(values: Values) -> GpuSchedule | Refused:
        tiling = WmmaTiling.of(values, request.threads)
        if tiling.shared_bytes > request.max_shared_bytes or not tiling.fits_registers:
            return unfit
        kernel, tiles = emit_wmma(func, problem, tiling, request.threads)
        return GpuSchedule(kernel, RULE, tiles, request.threads, tensor_cores=True)

    return Sketch(RULE, knobs_of(problem, request), choose, make)
