"""What tensor cores take: the types of operands and totals, and extents that are not mostly padding."""

from __future__ import annotations

from math import prod

from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.gpu.emit.async_copy import compute_capability
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.tiling.contraction_tiling import staging_refusal

__all__ = ["mma_refusal", "mma_type_refusal", "multiplies_fragments", "tensor_core_refusal", "type_refusal"]

_SIDE = 16
"""Rows, columns and products of one fragment."""

_FIRST_WMMA = 70

_FIRST_MMA = 80
"""mma.m16n8k16 and asynchronous copies begin here."""

_MAX_WASTE = 8
"""Tensor cores are 8 to 16 times as fast as CUDA cores here, so more padding than this leaves no gain."""


def mma_refusal(problem: Contraction, request: GpuRequest) -> Refused | None:
    """Why a problem is none for ``mma.sync``: its extents, or its types; or ``None``."""
    return mma_type_refusal(problem, request) or tensor_core_refusal(problem, request)


def mma_type_refusal(problem: Contraction, request: GpuRequest) -> Refused | None:
    """Why ``mma.sync`` cannot compute a problem: the architecture, or as for all tensor cores; or ``None``."""
    if not multiplies_fragments(request):
        return problem.refused(f"{request.arch} has no mma.m16n8k16")
    return type_refusal(problem, request)


def multiplies_fragments(request: GpuRequest) -> bool:
    """Whether the architecture has ``mma.m16n8k16``."""
    return compute_capability(request.arch) >= _FIRST_MMA


def tensor_core_refusal(problem: Contraction, request: GpuRequest) -> Refused | None:
    """Why a problem is none for tensor cores: its types, what it does with them, or its extents; or ``None``."""
    return type_refusal(problem, request) or staging_refusal(problem, request) or _waste_refusal(problem)


def type_refusal(problem: Contraction, request: GpuRequest) -> Refused | None:
    """Why a problem's types, or what it does with them, are not those of tensor cores; or ``None``."""
    if problem.folds and not problem.normalizes:
        return problem.refused(f"it has {1 + len(problem.folds)} reduction blocks, one is needed")
    if compute_capability(request.arch) < _FIRST_WMMA:
        return problem.refused(f"{request.arch} has no tensor cores for fp16")
    types = (problem.left.dtype, problem.right.dtype, problem.dtype)
    if types != ("float16", "float16", "float32"):
        return problem.refused(f"operands and total are {', '.join(types)}; fp16, fp16 and fp32 are needed")
    if not _multiplies_in_fp32(problem):
        return problem.refused(f"the total is updated by {problem.update}, not by a product in fp32")
    if not isinstance(problem.initial, tirx.FloatImm) or float(problem.initial.value) != 0.0:
        return problem.refused("the total does not begin at 0")
    return None


def _waste_refusal(problem: Contraction) -> Refused | None:
    """Why filling fragments up would be too much of the work, or ``None``."""
    extents = problem.extents[1:]
    waste = prod(-(-e // _SIDE) * _SIDE for e in extents) / prod(extents)
    if waste > _MAX_WASTE:
        rows, columns, inner = extents
        return problem.refused(
            f"{rows} x {columns} results of {inner} products, padded to 16, are {waste:.1f} times the work"
        )
    return None


def _multiplies_in_fp32(problem: Contraction) -> bool:
    """Whether the update is ``total + cast(left) * cast(right)``, the factors in either order."""
    update = problem.update
    product = update.b if isinstance(update, tirx.Add) and update.a.same_as(problem.total) else None
    if not isinstance(product, tirx.Mul) or not all(isinstance(f, tirx.Cast) for f in (product.a, product.b)):
        return False
    factors, leaves = (product.a.value, product.b.value), (problem.left.leaf, problem.right.leaf)
    return any(all(f.same_as(x) for f, x in zip(factors, order, strict=True)) for order in (leaves, leaves[::-1]))
