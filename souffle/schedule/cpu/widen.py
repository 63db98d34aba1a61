"""Sums of half precision in single: few processors add in half precision, and none rounds as often as that would.

Before: ``y[i] += a[i, k] * b[k]`` of float16; after: ``s[i] += float(a[i, k]) * float(b[k])`` of float32, and
``y[i] = half(s[i])``, which becomes the end of the sum. So each element is converted once where it is packed, and the
result is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import tirx
from tvm.tirx import Add, Mul

from souffle.schedule.cpu.contraction_form import combiner_of
from souffle.schedule.cpu.nest import Axis, Nest, replace_variables
from souffle.tvm_compat import PrimExpr, dtype_of

__all__ = ["with_wide_sums"]

_HALF = ("float16", "bfloat16")


def with_wide_sums(items: Sequence[Nest | tirx.Stmt]) -> list[Nest | tirx.Stmt]:
    """Add in float32 what is added in half precision."""
    return [part for item in items for part in (_widened(item) if isinstance(item, Nest) else (item,))]


def _widened(nest: Nest) -> tuple[Nest, ...]:
    combiner = combiner_of(nest) if nest.reduce and nest.epilogue is None else None
    if combiner is None or combiner.operation is not Add or dtype_of(combiner.value) not in _HALF:
        return (nest,)
    narrow, indices = nest.body.buffer, list(nest.body.indices)
    total = tirx.decl_buffer(list(narrow.shape), "float32", f"{nest.name}_sum")
    value = combiner.value
    term = Mul(_wide(value.a), _wide(value.b)) if isinstance(value, Mul) else _wide(value)
    body = tirx.BufferStore(total, Add(tirx.BufferLoad(total, indices), term), indices)
    init = tirx.BufferStore(total, _wide(combiner.identity), list(nest.init.indices))
    axes = tuple(Axis(tirx.Var(axis.var.name, axis.dtype), axis.extent) for axis in nest.spatial)
    values: dict[tirx.Var, PrimExpr] = {old.var: new.var for old, new in zip(nest.spatial, axes, strict=True)}
    at = [replace_variables(index, values) for index in indices]
    rounded = tirx.BufferStore(narrow, tirx.Cast(dtype_of(value), tirx.BufferLoad(total, at)), at)
    return replace(nest, init=init, body=body), Nest(f"{nest.name}_half", axes, (), None, rounded)


def _wide(value: PrimExpr) -> PrimExpr:
    if isinstance(value, tirx.FloatImm):
        return tirx.const(float(value.value), "float32")
    return tirx.Cast("float32", value)
