"""The rule for sums of products on CUDA cores: a tiled matrix product in registers, with its neighbours inside.

Each block computes one tile of the canonical form (see ``matrix_product.py``). For each step along the inner axis its
threads read a tile of either operand from global memory, applying what comes before the reduction (padding, casts, the
image-to-column indices of a convolution), put it in shared memory, and add the products of the two tiles to totals in
registers. The next step's reads are issued before the present step's arithmetic, which hides their latency. What
comes after the reduction is applied to the totals as they are written.
"""

from __future__ import annotations

from functools import lru_cache

from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.gpu.emit.contraction_emission import emit_contraction
from souffle.schedule.gpu.forms.expressions import NotAContraction
from souffle.schedule.gpu.forms.matrix_product import Contraction, canonical_contraction
from souffle.schedule.gpu.rule import STARTS_IN_TILES, GpuRequest, GpuSchedule
from souffle.schedule.gpu.sketch import Sketch, Values
from souffle.schedule.gpu.tiling.contraction_tiling import Tiling, choose_tiling, knobs_of, problem_of, refusal_of

__all__ = ["contraction", "estimated_clocks", "tile_of"]

RULE = "contraction"


def contraction(func: tirx.PrimFunc, request: GpuRequest) -> Sketch | Refused:
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
    Sketch or Refused
        A refusal names what is missing of the form, or why a reduction rule is the better one: fewer than
        4 rows or columns, or fewer than 4 products a sum.
    """
    problem = _read(func)
    if isinstance(problem, Refused):
        return problem
    refusal = refusal_of(problem, request)
    if refusal is not None:
        return Refused(f"block {problem.name}: {refusal}")

    def choose() -> Values | Refused:
        found = choose_tiling(problem, request)
        if found is None:
            return Refused(f"block {problem.name}: {_unfit(problem, request)}")
        return found[1].values

    def make(values: Values) -> GpuSchedule | Refused:
        tiling = Tiling.of(values, request.threads)
        reason = _unfit(problem, request) if tiling is None else problem_of(problem, tiling, request)
        if tiling is None or reason is not None:
            return Refused(f"block {problem.name}: {reason}")
        kernel, tiles = emit_contraction(func, problem, tiling, request)
        return GpuSchedule(kernel, RULE, tiles, request.threads)

    return Sketch(RULE, knobs_of(problem, request), choose, make)


def estimated_clocks(func: tirx.PrimFunc, request: GpuRequest) -> float | None:
    """The estimate of this rule's own choice, to compare another rule's with; ``None`` if it does not apply."""
    problem = _read(func)
    if isinstance(problem, Refused):
        return None
    found = None if refusal_of(problem, request) is not None else choose_tiling(problem, request)
    return None if found is None else found[0]


def tile_of(func: tirx.PrimFunc, request: GpuRequest) -> tuple[int, int] | None:
    """Rows and columns of the tile that this rule itself chooses; ``None`` if it does not apply."""
    problem = _read(func)
    if isinstance(problem, Refused) or refusal_of(problem, request) is not None:
        return None
    found = choose_tiling(problem, request)
    return None if found is None else found[1].tile[1:]


@lru_cache(maxsize=2)
def _read(func: tirx.PrimFunc) -> Contraction | Refused:
    """The canonical form, or why there is none: the window rule asks for it before this one does."""
    try:
        return canonical_contraction(func, folds=STARTS_IN_TILES in func.attrs)
    except NotAContraction as reason:
        return Refused(str(reason))


def _unfit(problem: Contraction, request: GpuRequest) -> str:
    return (
        f"no tile of {problem.left.dtype} and {problem.right.dtype} operands fits {request.threads} threads and "
        f"{request.max_shared_bytes} bytes of shared memory"
    )
