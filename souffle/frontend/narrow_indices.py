"""Index arithmetic in 32 bits.

Relax writes shapes and indices as int64. GPU code wants int32 indices, and the other stages build their own axes as
int32, so every expression is rewritten once, here. Data of type int64 stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import te, tirx
from tvm.ir import Call
from tvm.sym import Analyzer

from souffle.frontend.inside import kept_inside
from souffle.index.operations import ARITHMETIC, COMPARISONS
from souffle.program.extrema import with_infinite_identity
from souffle.tvm_compat import (
    PrimExpr,
    cast,
    const_int,
    dtype_of,
    fresh_axis,
    is_choice,
    is_load,
    load_indices,
    load_tensor,
    loads,
    map_loads,
    simplified_index,
    substitute,
)

__all__ = ["TEBody", "narrowed"]

_LIMIT = 2**31


@dataclass(frozen=True, eq=False)
class TEBody:
    """Axes, reduction axes and bodies of a TE."""

    axes: tuple[tirx.IterVar, ...]
    reduce_axes: tuple[tirx.IterVar, ...]
    bodies: tuple[PrimExpr, ...]


def narrowed(op: te.ComputeOp, scalars: Mapping[te.Operation, PrimExpr]) -> TEBody:
    """The expression of `op` with int32 indices.

    An expression over a tensor of 2**31 elements or more keeps its int64 indices.

    Parameters
    ----------
    op : te.ComputeOp
    scalars : mapping of te.Operation to expression
        Placeholders of one element whose value is known; their loads are replaced by it.
    """
    narrow = all(_elements(tensor.shape) < _LIMIT for tensor in [*op.input_tensors, op.output(0)])
    types = [str(op.output(k).dtype) for k in range(op.num_outputs)]

    def rewrite(expression: PrimExpr, dtype: str, mapping: Mapping, axes: Sequence[tirx.IterVar]) -> PrimExpr:
        expression = _with_scalars(expression, scalars)
        if not narrow:
            return kept_inside(substitute(expression, mapping), axes)
        return cast(kept_inside(_simplified(_retyped(expression, mapping), axes), axes), dtype)

    return _rebuilt(tuple(op.axis), tuple(op.reduce_axis), tuple(op.body), types, rewrite, narrow)


def _rebuilt(axes, reduce_axes, bodies, types: Sequence[str], rewrite: Callable, narrow: bool) -> TEBody:
    new_axes = tuple(_fresh(axis, f"i{k}", narrow, reduction=False) for k, axis in enumerate(axes))
    new_reduce = tuple(_fresh(axis, f"r{k}", narrow, reduction=True) for k, axis in enumerate(reduce_axes))
    every = (*new_axes, *new_reduce)
    mapping = {old.var: new.var for old, new in zip((*axes, *reduce_axes), every, strict=True)}
    first = bodies[0]
    if not isinstance(first, tirx.Reduce):
        parts = (rewrite(body, dtype, mapping, every) for body, dtype in zip(bodies, types, strict=True))
        return TEBody(new_axes, new_reduce, tuple(parts))
    types = [dtype_of(identity) for identity in first.combiner.identity_element]
    sources = [rewrite(part, dtype, mapping, every) for part, dtype in zip(first.source, types, strict=True)]
    condition = rewrite(first.condition, "bool", mapping, every)
    inits = [rewrite(part, dtype, mapping, every) for part, dtype in zip(first.init, types, strict=False)]
    combiner = with_infinite_identity(first.combiner)
    reduction = tirx.Reduce(combiner, sources, new_reduce, condition, 0, inits or None)
    # The outputs of one reduction of tuples must share its sources.
    others = (
        tirx.Reduce(reduction.combiner, reduction.source, reduction.axis, reduction.condition, k, reduction.init)
        for k in range(1, len(bodies))
    )
    return TEBody(new_axes, new_reduce, (reduction, *others))


def _with_scalars(expression: PrimExpr, scalars: Mapping[te.Operation, PrimExpr]) -> PrimExpr:
    if not any(load_tensor(load).op in scalars for load in loads(expression)):
        return expression
    known = map_loads(expression, lambda load: scalars.get(load_tensor(load).op, load))
    analyzer = Analyzer()
    return map_loads(known, lambda load: _with_simple_indices(load, analyzer))


def _simplified(expression: PrimExpr, axes: Sequence[tirx.IterVar]) -> PrimExpr:
    """`expression` with simpler indices; those of a reshape divide what they multiplied before."""
    divisions: list[PrimExpr] = []
    tvm_ffi.structural_walk(expression, ((tirx.FloorDiv, tirx.FloorMod), divisions.append))
    if not divisions:
        return expression
    analyzer = Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, axis.dom)
    return map_loads(expression, lambda load: _with_simple_indices(load, analyzer))


def _with_simple_indices(load: Call, analyzer: Analyzer) -> PrimExpr:
    return load_tensor(load)(*(simplified_index(index, analyzer) for index in load_indices(load)))


def _elements(shape: Sequence) -> int:
    count = 1
    for extent in shape:
        count *= const_int(extent)
    return count


def _fresh(axis: tirx.IterVar, name: str, narrow: bool, *, reduction: bool) -> tirx.IterVar:
    if narrow:
        return fresh_axis(const_int(axis.dom.extent), name, reduction=reduction)
    return tirx.IterVar(axis.dom, tirx.Var(name, dtype_of(axis.var)), axis.iter_type)


def _retyped(expression: PrimExpr, mapping: Mapping[tirx.Var, PrimExpr]) -> PrimExpr:
    """`expression` over int32 axes: int64 only where data is."""

    def variable(node: tirx.Var) -> PrimExpr:
        return next((new for old, new in mapping.items() if node.same_as(old)), node)

    def binary(node):
        left, right = _unified(node.a, node.b)
        return type(node)(left, right)

    def select(node: tirx.Select):
        left, right = _unified(node.true_value, node.false_value)
        return tirx.Select(node.condition, left, right)

    def call(node: Call):
        if is_load(node):
            indices = [cast(index, "int32") for index in node.args[1:]]
            return load_tensor(node)(*indices)
        if is_choice(node):
            left, right = _unified(node.args[1], node.args[2])
            return tirx.if_then_else(node.args[0], left, right)
        if dtype_of(node) == "int64":
            arguments = [cast(a, "int64") if dtype_of(a) == "int32" else a for a in node.args]
            return Call(node.op, arguments, node.attrs, node.ty_args, node.span, node.ty)
        return node

    rules = [(tirx.Var, variable), (Call, call), (tirx.Select, select), ((*ARITHMETIC, *COMPARISONS), binary)]
    return tvm_ffi.structural_map(expression, rules)


def _unified(left: PrimExpr, right: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
    """Two operands of one type: int64 where one of them holds int64 data."""
    if dtype_of(left) == dtype_of(right):
        return left, right
    if dtype_of(left) == "int32" and isinstance(right, tirx.IntImm) and abs(int(right.value)) < _LIMIT:
        return left, tirx.IntImm("int32", int(right.value))
    if dtype_of(right) == "int32" and isinstance(left, tirx.IntImm) and abs(int(left.value)) < _LIMIT:
        return tirx.IntImm("int32", int(left.value)), right
    if {dtype_of(left), dtype_of(right)} == {"int32", "int64"}:
        return cast(left, "int64"), cast(right, "int64")
    return left, right
