"""What tensor cores take: the types of operands and totals, and extents that are not mostly padding."""

from __future__ import annotations

from math import prod

from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.gpu.emit.async_copy import compute_capability
from souffle.schedule.gpu.emit.mma_fragments import HALVES, WORDS, Fragments, byte_fragments
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.rule import MULTIPLIES, GpuRequest
from souffle.schedule.gpu.tiling.contraction_tiling import staging_refusal
from souffle.tvm_compat import PrimExpr

__all__ = ["fragments_of", "halves_refusal", "mma_fragments", "multiplies_fragments", "tensor_core_refusal"]

_SIDE = 16
"""Rows, columns and products of one fragment."""

_FIRST_WMMA = 70

_FIRST_MMA = 80
"""mma.m16n8k16 and asynchronous copies begin here."""

_MAX_WASTE = 8
"""Tensor cores are 8 to 16 times as fast as CUDA cores here, so more padding than this leaves no gain."""


def mma_fragments(problem: Contraction, request: GpuRequest) -> Fragments | Refused:
    """What ``mma.sync`` multiplies a problem's operands in; or why it is none for it: its extents, or its types."""
    fragments = fragments_of(problem, request)
    if isinstance(fragments, Refused):
        return fragments
    return staging_refusal(problem, request) or _waste_refusal(problem, fragments) or fragments


def fragments_of(problem: Contraction, request: GpuRequest) -> Fragments | Refused:
    """What ``mma.sync`` multiplies operands of a problem's types in; or why it cannot: the architecture, its types, or
    what it does with them."""
    if not multiplies_fragments(request):
        return problem.refused(f"{request.arch} has no mma.m16n8k16")
    if problem.packed:
        return _packed_refusal(problem) or byte_fragments(*problem.packed)
    words = WORDS.get(str(problem.func.attrs[MULTIPLIES])) if MULTIPLIES in problem.func.attrs else None
    if words is None or "float32" not in _types(problem)[:2]:
        return halves_refusal(problem, request) or HALVES
    return _sum_refusal(problem, words) or words


def _packed_refusal(problem: Contraction) -> Refused | None:
    """Why a sum of products of 8-bit integers is none for tensor cores, or ``None``."""
    if problem.folds or problem.finished or problem.row_values.chunks is not None:
        return problem.refused("reductions of sums of integers do not start in tiles of tensor cores")
    return None


def multiplies_fragments(request: GpuRequest) -> bool:
    """Whether the architecture has ``mma.m16n8k16``, and that of TF32."""
    return compute_capability(request.arch) >= _FIRST_MMA


def tensor_core_refusal(problem: Contraction, request: GpuRequest) -> Refused | None:
    """Why a problem is none for fp16 tensor cores: its types, what it does with them, or its extents; or ``None``."""
    return halves_refusal(problem, request) or staging_refusal(problem, request) or _waste_refusal(problem, HALVES)


def halves_refusal(problem: Contraction, request: GpuRequest) -> Refused | None:
    """Why a problem's types, or what it does with them, are not those of fp16 tensor cores; or ``None``."""
    if compute_capability(request.arch) < _FIRST_WMMA:
        return problem.refused(f"{request.arch} has no tensor cores for fp16")
    return _sum_refusal(problem, HALVES)


def _sum_refusal(problem: Contraction, fragments: Fragments) -> Refused | None:
    """Why a sum is not one of products of such fragments from 0 on, with totals in fp32; or ``None``."""
    if problem.folds and not problem.normalizes:
        return problem.refused(f"it has {1 + len(problem.folds)} reduction blocks, one is needed")
    if _types(problem) != (fragments.dtype, fragments.dtype, "float32"):
        wanted = f"{_SHORT[fragments.dtype]}, {_SHORT[fragments.dtype]} and fp32"
        return problem.refused(f"operands and total are {', '.join(_types(problem))}; {wanted} are needed")
    if not _multiplies_in_fp32(problem):
        return problem.refused(f"the total is updated by {problem.update}, not by a product in fp32")
    if not isinstance(problem.initial, tirx.FloatImm) or float(problem.initial.value) != 0.0:
        return problem.refused("the total does not begin at 0")
    return None


_SHORT = {"float16": "fp16", "float32": "fp32"}


def _types(problem: Contraction) -> tuple[str, str, str]:
    """Of the operands and the total."""
    return problem.left.dtype, problem.right.dtype, problem.dtype


def _waste_refusal(problem: Contraction, fragments: Fragments) -> Refused | None:
    """Why filling fragments up would be too much of the work, or ``None``."""
    sides = (_SIDE, _SIDE, fragments.inner)
    extents = problem.extents[1:]
    waste = prod(-(-e // side) * side for e, side in zip(extents, sides, strict=True)) / prod(extents)
    if waste > _MAX_WASTE:
        rows, columns, inner = extents
        to = " x ".join(str(side) for side in dict.fromkeys(sides))
        return problem.refused(
            f"{rows} x {columns} results of {inner} products, padded to {to}, are {waste:.1f} times the work"
        )
    return None


def _multiplies_in_fp32(problem: Contraction) -> bool:
    """Whether the update is ``total + left * right`` in fp32, the factors in either order, cast to it if need be."""
    update = problem.update
    product = update.b if isinstance(update, tirx.Add) and update.a.same_as(problem.total) else None
    if not isinstance(product, tirx.Mul):
        return False
    leaves = (problem.left.leaf, problem.right.leaf)
    factors = tuple(_factor(factor, problem) for factor in (product.a, product.b))
    return any(all(f.same_as(x) for f, x in zip(factors, order, strict=True)) for order in (leaves, leaves[::-1]))


def _factor(factor: PrimExpr, problem: Contraction) -> PrimExpr:
    """A factor of fp32, or what is cast to be one."""
    narrow = "float32" not in (problem.left.dtype, problem.right.dtype)
    return factor.value if narrow and isinstance(factor, tirx.Cast) else factor
