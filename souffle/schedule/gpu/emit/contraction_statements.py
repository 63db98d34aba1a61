"""Statements that the contraction kernels are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx

from souffle.schedule.gpu.forms.contraction_expressions import Axis
from souffle.tvm_compat import PrimExpr, sequence

__all__ = [
    "Binder",
    "all_of",
    "guarded",
    "kernel_func",
    "local_buffer",
    "loop",
    "shared_buffer",
]


def loop(name: str, extent: int, body: Callable[[PrimExpr], tirx.Stmt], kind: str = "serial") -> tirx.Stmt:
    """A loop over ``[0, extent)``; a single turn needs none.

    Parameters
    ----------
    kind : str
        ``"serial"``, ``"vectorized"``, or ``"unrolled"``: by the CUDA compiler (``#pragma unroll``), which keeps the
        emitted text short while arrays that are indexed by the loop still become registers. ``"rolled"`` keeps the
        CUDA compiler from unrolling: a long body many times over leaves the instruction cache.
    """
    if extent == 1:
        return body(tirx.IntImm("int32", 0))
    var = tirx.Var(name, "int32")
    kinds = tirx.ForKind
    chosen = {"vectorized": kinds.VECTORIZED, "unrolled": kinds.UNROLLED}.get(kind, kinds.SERIAL)
    annotations = {"disable_unroll": True} if kind == "rolled" else None
    start, end = tirx.IntImm("int32", 0), tirx.IntImm("int32", extent)
    return tirx.For(var, start, end, chosen, body(var), annotations=annotations)


def guarded(conditions: Sequence[PrimExpr], body: tirx.Stmt) -> tirx.Stmt:
    """`body` where all `conditions` hold."""
    return tirx.IfThenElse(all_of(conditions), body, None) if conditions else body


def all_of(conditions: Sequence[PrimExpr]) -> PrimExpr:
    """The conjunction of one condition or more."""
    result = conditions[0]
    for condition in conditions[1:]:
        result = tirx.And(result, condition)
    return result


def shared_buffer(name: str, elements: int, dtype: str) -> Any:
    """Static shared memory, one-dimensional so that no pass can take the padding out of its rows."""
    return tirx.decl_buffer((elements,), dtype, name, scope="shared")


def local_buffer(name: str, elements: int, dtype: str) -> Any:
    """Registers of a thread."""
    return tirx.decl_buffer((elements,), dtype, name, scope="local")


class Binder:
    """Collects scalar bindings, so that an index that is used many times is computed once."""

    def __init__(self) -> None:
        self.statements: list[tirx.Stmt] = []

    def name(self, name: str, value: PrimExpr) -> PrimExpr:
        """A variable for `value`, or the value itself if it is trivial."""
        if isinstance(value, tirx.IntImm | tirx.Var):
            return value
        var = tirx.Var(name, "int32")
        self.statements.append(tirx.Bind(var, value))
        return var

    def locate(
        self, axes: Sequence[Axis], linear: PrimExpr, used: Callable[[Axis], bool], lanes: int = 1, lane: Any = 0
    ) -> dict[tirx.Var, PrimExpr]:
        """The axes of a row-major group from its linear index, which counts vectors of `lanes` of the last axis.

        The first axis is not reduced, so an index beyond the group gives a value out of its range: guard its use.
        """
        found: dict[tirx.Var, PrimExpr] = {}
        rest = linear
        for position in reversed(range(len(axes))):
            axis = axes[position]
            width = lanes if position == len(axes) - 1 else 1
            extent = axis.extent // width
            part = rest if position == 0 else tirx.floormod(rest, extent)
            rest = tirx.floordiv(rest, extent)
            if used(axis):
                part = self.name(str(axis.var.name), part)
                found[axis.var] = part * width + lane if width > 1 else part
        return found


def kernel_func(
    func: tirx.PrimFunc,
    tiles: int,
    threads: int,
    buffers: Sequence[Any],
    body: Callable[[PrimExpr, PrimExpr], tirx.Stmt],
) -> tirx.PrimFunc:
    """`func` with its body replaced by ``body(blockIdx.x, threadIdx.x)``, and `buffers` allocated for it."""
    block, thread = tirx.Var("tile", "int32"), tirx.Var("thread", "int32")

    def bind(var: tirx.Var, extent: int, tag: str, inner: tirx.Stmt) -> tirx.Stmt:
        axis = tirx.IterVar((0, extent), tirx.Var(tag.replace(".", "_"), "int32"), tirx.IterVar.ThreadIndex, tag)
        zero, size = tirx.IntImm("int32", 0), tirx.IntImm("int32", extent)
        return tirx.For(var, zero, size, tirx.ForKind.THREAD_BINDING, inner, axis)

    # Unrolling is the CUDA compiler's: the text stays short, and arrays indexed by such a loop still become registers.
    zero = tirx.IntImm("int32", 0)
    inside = tirx.AttrStmt(zero, "pragma_unroll_explicit", zero, body(block, thread))
    # All buffers are allocated, and touched, in one scope. Otherwise TVM's StorageRewrite gives the memory of fp16
    # tiles to fp32 results, and then rejects pointers into it for their type.
    inside = tirx.AttrStmt(zero, "extern_scope", zero, inside)
    inside = sequence(*(tirx.AllocBuffer(buffer) for buffer in buffers), inside)
    nest = bind(block, tiles, "blockIdx.x", bind(thread, threads, "threadIdx.x", inside))
    root = func.body.block
    new_root = tvm.s_tir.SBlock([], [], [], root.name_hint, nest)
    return func.with_body(tvm.s_tir.SBlockRealize([], True, new_root))
