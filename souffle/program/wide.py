"""Index arithmetic in 64 bits where 32 do not hold it.

To the compiler and to TVM's simplifier the numbers of an index are whole numbers; the text calculates in their types::

    x[i * 12405735 // 233]    →    x[int32(int64(i) * 12405735 // 233)]        i < 233

What an expression may be is bounded by the ranges of its variables. What data decides is left alone where nothing
bounds it: integers of tensors wrap around, as they do in ONNX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.index.bounds import Bounder, fits, is_number, limits, scalar_type
from souffle.index.operations import ARITHMETIC, BITWISE, COMPARISONS
from souffle.tvm_calls import structural_map, structural_mutate, structural_walk
from souffle.tvm_compat import (
    PrimExpr,
    cast,
    collect,
    const_int,
    dtype_of,
    is_branch,
    is_load,
    load_indices,
    load_tensor,
    reduce_node,
)

__all__ = ["wide_bodies", "with_long_shapes", "with_wide_indices"]

_GROWING = (tirx.Add, tirx.Sub, tirx.Mul, tirx.LShift)


def wide_bodies(axes: Iterable[tirx.IterVar], bodies: Sequence[PrimExpr]) -> list[PrimExpr]:
    """The bodies of a TE over some axes; what an element decides in an index is left as it is."""
    first = reduce_node(bodies[0])
    every = [*axes, *(first.axis if first is not None else ())]
    wide = _Wide({axis.var: [(axis.dom.min, axis.dom.extent)] for axis in every}, {}, data=False)
    if not wide.is_needed(bodies):
        return list(bodies)
    if first is None:
        return [wide.of(body) for body in bodies]
    sources, init = [wide.of(s) for s in first.source], [wide.of(i) for i in first.init]
    condition = wide.of(first.condition)
    whole = tirx.Reduce(first.combiner, sources, first.axis, condition, first.value_index, init)
    # The outputs of one reduction of tuples must share its sources.
    rest = [tirx.Reduce(whole.combiner, whole.source, whole.axis, whole.condition, k, whole.init)
            for k in range(1, len(bodies))]  # fmt: skip
    return [whole, *rest]


def with_wide_indices(statement: tirx.Stmt, extents: Mapping[tirx.Var, int]) -> tirx.Stmt:
    """A statement whose index arithmetic leaves no type.

    Parameters
    ----------
    statement : Stmt
        With one index for each access.
    extents : mapping of Var to int
        Of the variables that nothing in it defines, which begin with 0.
    """
    ranges: dict[tirx.Var, list] = {
        var: [(tirx.IntImm("int32", 0), tirx.IntImm("int64", n))] for var, n in extents.items()
    }
    for loop in collect(statement, tirx.For):
        ranges.setdefault(loop.loop_var, []).append((loop.min, loop.extent))
    values: dict[tirx.Var, list[PrimExpr]] = {}
    for kind in (tirx.Bind, tirx.Let):
        for bind in collect(statement, kind):
            if isinstance(bind.var.ty, tvm.ir.PrimType):  # and no pointer
                values.setdefault(bind.var, []).append(bind.value)
    wide = _Wide(ranges, values, data=True)
    return wide.of(statement) if wide.is_needed([statement]) else statement


def with_long_shapes(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function whose buffers of more elements than 32 bits count have extents of 64, for what is made of them."""
    known: list[tuple[tirx.Var, tirx.Var]] = []

    def long(var: tirx.Var) -> tirx.Var:
        if not tirx.is_buffer_var(var) or prod(const_int(extent) for extent in var.shape) <= limits("int32")[1]:
            return var
        for old, new in known:
            if old.same_as(var):
                return new
        shape = [tirx.IntImm("int64", const_int(extent)) for extent in var.shape]
        own = {"strides": var.strides or None, "elem_offset": var.elem_offset, "data_alignment": var.data_alignment}
        new = tirx.decl_buffer(shape, var.dtype, var.name, scope=var.scope(), offset_factor=var.offset_factor, **own)
        known.append((var, new))
        return new

    params = [long(param) for param in function.params]
    if not known:
        return function
    body = structural_map(function.body, (tirx.Var, long))
    return tirx.PrimFunc(params, body, function.ret_type, function.attrs, function.span)


class _Wide:
    """Writes expressions in 64 bits that may leave 32 by their bounds.

    Parameters
    ----------
    ranges, values
        See :class:`souffle.index.bounds.Bounder`.
    data : bool
        Whether to look at what an element decides in an index too.
    """

    def __init__(
        self,
        ranges: Mapping[tirx.Var, Sequence[tuple[PrimExpr, PrimExpr]]],
        values: Mapping[tirx.Var, Sequence[PrimExpr]],
        *,
        data: bool,
    ) -> None:
        self.values = values
        self.data = data
        self.bounds = Bounder(ranges, values)
        self.depth = 0
        self.renamed: dict[tirx.Var, tirx.Var] = {}

    def is_needed(self, roots: Sequence[Any]) -> bool:
        """Whether anything may leave its type."""
        found = False

        def see(node: Any) -> None:
            nonlocal found
            found = found or self.leaves(node)

        for root in roots:
            structural_walk(root, ((*_GROWING, tirx.Ramp), see))
        return found

    def of(self, node: Any) -> Any:
        """An expression, in its own type, or a statement."""
        for var in self.values:
            if dtype_of(var) == "int32" and self.leaves(var):
                self.renamed[var] = tirx.Var(str(var.name), "int64")
        rules = [
            (tirx.Var, lambda var, _: self.renamed.get(var, var)),
            ((*ARITHMETIC, *BITWISE, *COMPARISONS), self.binary),
            (tirx.Ramp, self.ramp),
            (tirx.Broadcast, self.broadcast),
            (tirx.Select, self.select),
            (tirx.Cast, self.converted),
            (TensorLoad, self.load),
            (Call, self.call),
            (tirx.BufferStore, self.store),
            (tirx.Bind, self.bind),
            (tirx.Let, self.let),
        ]
        result = structural_mutate(node, rules)
        return result if isinstance(node, tirx.Stmt) else cast(result, dtype_of(node))

    # What is in 64 bits

    def leaves(self, node: Any) -> bool:
        """Whether a number of 32 bits may leave them, and is to be calculated in 64."""
        if scalar_type(node) != "int32":
            return False
        bounds = self.bounds(node)
        return not fits(bounds, "int32") and (self.data or not bounds.data)

    def binary(self, node: Any, mutator: Any) -> PrimExpr:
        return self.joined(node, type(node), [node.a, node.b], mutator)

    def ramp(self, node: tirx.Ramp, mutator: Any) -> PrimExpr:
        return self.joined(node, lambda a, b: tirx.Ramp(a, b, node.lanes), [node.base, node.stride], mutator)

    def broadcast(self, node: tirx.Broadcast, mutator: Any) -> PrimExpr:
        return self.joined(node, lambda value: tirx.Broadcast(value, node.lanes), [node.value], mutator)

    def select(self, node: tirx.Select, mutator: Any) -> PrimExpr:
        condition = mutator.mutate(node.condition)
        make = partial(tirx.Select, condition)
        return self.joined(node, make, [node.true_value, node.false_value], mutator, condition is not node.condition)

    def joined(
        self, node: Any, make: Callable, operands: Sequence[PrimExpr], mutator: Any, changed: bool = False
    ) -> PrimExpr:
        """An operation on operands of one type, the wider one; in its own type again where that holds the result."""
        parts = [mutator.mutate(operand) for operand in operands]
        wanted = self.leaves(node) and (self.depth > 0 or not self.bounds(node).data)
        if wanted or len({scalar_type(part) for part in parts}) > 1:
            parts = [cast(part, _like("int64", part)) for part in parts]
        if not changed and all(new.same_as(old) for new, old in zip(parts, operands, strict=True)):
            return node
        result = make(*parts)
        own = dtype_of(node)
        return cast(result, own) if not own.startswith("int") or fits(self.bounds(node), scalar_type(node)) else result

    def converted(self, node: tirx.Cast, mutator: Any) -> PrimExpr:
        value = mutator.mutate(node.value)
        return node if value.same_as(node.value) else cast(value, dtype_of(node))

    def call(self, node: Call, mutator: Any) -> PrimExpr:
        if is_load(node):
            return load_tensor(node)(*self.indices(load_indices(node), mutator))
        if is_branch(node) and is_number(node):  # and no pointer
            condition = mutator.mutate(node.args[0])
            make = partial(tirx.if_then_else, condition)
            return self.joined(node, make, node.args[1:], mutator, condition is not node.args[0])
        arguments = [mutator.mutate(argument) for argument in node.args]
        if all(new.same_as(old) for new, old in zip(arguments, node.args, strict=True)):
            return node
        typed = [cast(new, dtype_of(old)) if is_number(old) else new for new, old in zip(arguments, node.args)]
        return Call(node.op, typed, node.attrs, node.ty_args, node.span, node.ty)

    def load(self, node: TensorLoad, mutator: Any) -> PrimExpr:
        return tirx.BufferLoad(node.source, self.indices(node.indices, mutator))

    def indices(self, indices: Sequence[PrimExpr], mutator: Any) -> list[PrimExpr]:
        self.depth += 1
        found = [mutator.mutate(index) for index in indices]
        self.depth -= 1
        return found

    def store(self, node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        value = cast(mutator.mutate(node.value), dtype_of(node.value))
        return tirx.BufferStore(node.buffer, value, self.indices(node.indices, mutator))

    def bind(self, node: tirx.Bind, mutator: Any) -> tirx.Stmt:
        return tirx.Bind(*self.named(node, mutator))

    def let(self, node: tirx.Let, mutator: Any) -> PrimExpr:
        return self.joined(node, partial(tirx.Let, *self.named(node, mutator)), [node.body], mutator, changed=True)

    def named(self, node: tirx.Bind | tirx.Let, mutator: Any) -> tuple[tirx.Var, PrimExpr]:
        """A name and its value; names stand in indices."""
        (value,) = self.indices([node.value], mutator)
        var = self.renamed.get(node.var, node.var)
        return var, cast(value, dtype_of(var)) if is_number(var) else value


def _like(dtype: str, node: PrimExpr) -> str:
    lanes = tvm.DataType(dtype_of(node)).lanes
    return dtype if lanes == 1 else f"{dtype}x{lanes}"
