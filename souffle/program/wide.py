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
from typing import Any, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.tvm_compat import PrimExpr, collect, const_int, dtype_of, is_load, load_tensor, reduce_node

__all__ = ["wide_bodies", "with_long_shapes", "with_wide_indices"]

_GROWING = (tirx.Add, tirx.Sub, tirx.Mul, tirx.LShift)
_BITS = (tirx.BitwiseAnd, tirx.BitwiseOr, tirx.BitwiseXor)
_OTHERS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max, tirx.RShift, *_BITS)
_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
_TRUTHS = (*_COMPARISONS, tirx.And, tirx.Or, tirx.Not)
_CHOICE = "prim.if_then_else"


class _Bounds(NamedTuple):
    """The least and the greatest value, and whether data decides among them."""

    low: int
    high: int
    data: bool


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
        if not tirx.is_buffer_var(var) or prod(const_int(extent) for extent in var.shape) <= _limits("int32")[1]:
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
    body = tvm_ffi.structural_map(function.body, (tirx.Var, long))
    return tirx.PrimFunc(params, body, function.ret_type, function.attrs, function.span)


class _Wide:
    """Bounds expressions, and writes those in 64 bits that may leave 32.

    Parameters
    ----------
    ranges : mapping of Var to pairs of expressions
        The least value and the extent of each loop over a variable.
    values : mapping of Var to expressions
        What each name stands for.
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
        self.ranges = ranges
        self.values = values
        self.data = data
        self.known: dict[Any, _Bounds] = {}
        self.depth = 0
        self.renamed: dict[tirx.Var, tirx.Var] = {}

    def is_needed(self, roots: Sequence[Any]) -> bool:
        """Whether anything may leave its type."""
        found = False

        def see(node: Any) -> None:
            nonlocal found
            found = found or self.leaves(node)

        for root in roots:
            tvm_ffi.structural_walk(root, ((*_GROWING, tirx.Ramp), see))
        return found

    def of(self, node: Any) -> Any:
        """An expression, in its own type, or a statement."""
        for var in self.values:
            if dtype_of(var) == "int32" and self.leaves(var):
                self.renamed[var] = tirx.Var(str(var.name), "int64")
        rules = [
            (tirx.Var, lambda var, _: self.renamed.get(var, var)),
            ((*_GROWING, *_OTHERS, *_COMPARISONS), self.binary),
            (tirx.Ramp, self.ramp),
            (tirx.Broadcast, self.broadcast),
            (tirx.Select, self.select),
            (tirx.Cast, self.cast),
            (TensorLoad, self.load),
            (Call, self.call),
            (tirx.BufferStore, self.store),
            (tirx.Bind, self.bind),
            (tirx.Let, self.let),
        ]
        result = tvm_ffi.structural_mutate(node, rules)
        return result if isinstance(node, tirx.Stmt) else _cast(result, dtype_of(node))

    # What is in 64 bits

    def leaves(self, node: Any) -> bool:
        """Whether a number of 32 bits may leave them, and is to be calculated in 64."""
        if tvm.DataType(dtype_of(node)).with_lanes(1) != "int32":
            return False
        low, high, data = self.bounds(node)
        return not _within(low, high, "int32") and (self.data or not data)

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
        if wanted or len({_scalar(part) for part in parts}) > 1:
            parts = [_cast(part, _like("int64", part)) for part in parts]
        if not changed and all(new.same_as(old) for new, old in zip(parts, operands, strict=True)):
            return node
        result = make(*parts)
        own = dtype_of(node)
        low, high, _ = self.bounds(node) if own.startswith("int") else (0, 0, False)
        return _cast(result, own) if _within(low, high, _scalar(node)) else result

    def cast(self, node: tirx.Cast, mutator: Any) -> PrimExpr:
        value = mutator.mutate(node.value)
        return node if value.same_as(node.value) else _cast(value, dtype_of(node))

    def call(self, node: Call, mutator: Any) -> PrimExpr:
        name = getattr(node.op, "name", "")
        if is_load(node):
            return load_tensor(node)(*self.indices(node.args[1:], mutator))
        if name == _CHOICE and _is_number(node):  # and no pointer
            condition = mutator.mutate(node.args[0])
            make = partial(tirx.if_then_else, condition)
            return self.joined(node, make, node.args[1:], mutator, condition is not node.args[0])
        arguments = [mutator.mutate(argument) for argument in node.args]
        if all(new.same_as(old) for new, old in zip(arguments, node.args, strict=True)):
            return node
        typed = [_cast(new, dtype_of(old)) if _is_number(old) else new for new, old in zip(arguments, node.args)]
        return Call(node.op, typed, node.attrs, node.ty_args, node.span, node.ty)

    def load(self, node: TensorLoad, mutator: Any) -> PrimExpr:
        return tirx.BufferLoad(node.source, self.indices(node.indices, mutator))

    def indices(self, indices: Sequence[PrimExpr], mutator: Any) -> list[PrimExpr]:
        self.depth += 1
        found = [mutator.mutate(index) for index in indices]
        self.depth -= 1
        return found

    def store(self, node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        value = _cast(mutator.mutate(node.value), dtype_of(node.value))
        return tirx.BufferStore(node.buffer, value, self.indices(node.indices, mutator))

    def bind(self, node: tirx.Bind, mutator: Any) -> tirx.Stmt:
        return tirx.Bind(*self.named(node, mutator))

    def let(self, node: tirx.Let, mutator: Any) -> PrimExpr:
        return self.joined(node, partial(tirx.Let, *self.named(node, mutator)), [node.body], mutator, changed=True)

    def named(self, node: tirx.Bind | tirx.Let, mutator: Any) -> tuple[tirx.Var, PrimExpr]:
        """A name and its value; names stand in indices."""
        (value,) = self.indices([node.value], mutator)
        var = self.renamed.get(node.var, node.var)
        return var, _cast(value, dtype_of(var)) if _is_number(var) else value

    # Bounds

    def bounds(self, node: Any) -> _Bounds:
        """What a number, or each of a vector, may be as a whole number."""
        if isinstance(node, tirx.IntImm):
            return _Bounds(int(node.value), int(node.value), False)
        if node not in self.known:
            self.known[node] = self._bounds(node)
        return self.known[node]

    def _bounds(self, node: Any) -> _Bounds:
        if isinstance(node, tirx.Var):
            parts = [self._loop(*pair) for pair in self.ranges.get(node, ())]
            parts += [self.bounds(value) for value in self.values.get(node, ())]
            return _union(parts) if parts and _is_integer(node) else _any(node)
        if isinstance(node, _TRUTHS):
            return _Bounds(0, 1, True)
        if not _is_integer(node):
            return _any(node)
        if isinstance(node, (*_GROWING, *_OTHERS)):
            return _of_operation(type(node), self.bounds(node.a), self.bounds(node.b), node)
        if isinstance(node, tirx.Select):
            return _union([self.bounds(node.true_value), self.bounds(node.false_value)])
        if isinstance(node, tirx.Cast) and _is_integer(node.value):
            inner = self.bounds(node.value)
            return inner if _within(inner.low, inner.high, _scalar(node)) else _any(node)._replace(data=inner.data)
        if isinstance(node, tirx.Broadcast):
            return self.bounds(node.value)
        if isinstance(node, tirx.Ramp):
            base, stride, last = self.bounds(node.base), self.bounds(node.stride), int(node.lanes) - 1
            steps = [0, stride.low * last, stride.high * last]
            return _Bounds(base.low + min(steps), base.high + max(steps), base.data or stride.data)
        if isinstance(node, tirx.Let):
            return self.bounds(node.body)
        if isinstance(node, Call):
            return self._of_call(node, getattr(node.op, "name", ""))
        return _any(node)

    def _loop(self, low: PrimExpr, extent: PrimExpr) -> _Bounds:
        first, count = self.bounds(low), self.bounds(extent)
        return _Bounds(first.low, max(first.low, first.high + count.high - 1), first.data or count.data)

    def _of_call(self, node: Call, name: str) -> _Bounds:
        if name == _CHOICE:
            return _union([self.bounds(value) for value in node.args[1:]])
        if name == "prim.likely":
            return self.bounds(node.args[0])
        return _any(node)


_SHIFTED = {tirx.LShift: tirx.Mul, tirx.RShift: tirx.FloorDiv}


def _of_operation(kind: type, a: _Bounds, b: _Bounds, node: Any) -> _Bounds:
    data = a.data or b.data
    if kind in _SHIFTED:
        if not 0 <= b.low <= b.high < 63:
            return _any(node)
        kind, b = _SHIFTED[kind], _Bounds(1 << b.low, 1 << b.high, b.data)
    if kind in _BITS:
        positive = [side.high for side in (a, b) if side.low >= 0]
        if kind is tirx.BitwiseAnd and positive:
            return _Bounds(0, min(positive), data)
        return _Bounds(0, (1 << max(positive).bit_length()) - 1, data) if len(positive) == 2 else _any(node)
    if kind is tirx.Min or kind is tirx.Max:
        choose = min if kind is tirx.Min else max
        return _Bounds(choose(a.low, b.low), choose(a.high, b.high), data)
    if kind in (tirx.FloorMod, tirx.Mod):
        if a.low >= 0 and a.high < b.low:
            return _Bounds(a.low, a.high, data)
        most = max(abs(b.low), abs(b.high)) - 1
        return _Bounds(0 if b.low > 0 and (kind is tirx.FloorMod or a.low >= 0) else -most, most, data)
    if kind in (tirx.FloorDiv, tirx.Div):
        # Truncation is the floor, or the next number towards zero.
        if b.low <= 0:
            most = max(abs(a.low), abs(a.high))
            return _Bounds(-most, most, data)
        ends = [x // y for x in (a.low, a.high) for y in (b.low, b.high)]
        return _Bounds(min(ends), max(ends), data)
    if kind is tirx.Add:
        low, high = a.low + b.low, a.high + b.high
    elif kind is tirx.Sub:
        low, high = a.low - b.high, a.high - b.low
    else:
        ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        low, high = min(ends), max(ends)
    type_ = _scalar(node)
    # Of integers that nothing bounds, or that wrap around.
    free = any(side.data and not _limits(type_)[0] < side.low <= side.high < _limits(type_)[1] for side in (a, b))
    if (free or type_.startswith("u")) and not _within(low, high, type_):
        return _Bounds(*_limits(type_), data)
    return _Bounds(low, high, data)


def _union(parts: Sequence[_Bounds]) -> _Bounds:
    return _Bounds(min(p.low for p in parts), max(p.high for p in parts), any(p.data for p in parts))


def _scalar(node: Any) -> str:
    return str(tvm.DataType(dtype_of(node)).with_lanes(1))


def _limits(dtype: str) -> tuple[int, int]:
    if dtype.startswith("bool"):
        return 0, 1
    bits = tvm.DataType(dtype).bits
    return (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _within(low: int, high: int, dtype: str) -> bool:
    least, most = _limits(dtype)
    return least <= low and high <= most


def _any(node: Any) -> _Bounds:
    return _Bounds(*(_limits(_scalar(node)) if _is_integer(node) else (0, 0)), True)


def _is_number(node: Any) -> bool:
    return isinstance(getattr(node, "ty", None), tvm.ir.PrimType)


def _is_integer(node: Any) -> bool:
    return _is_number(node) and dtype_of(node).startswith(("int", "uint", "bool"))


def _like(dtype: str, node: PrimExpr) -> str:
    lanes = tvm.DataType(dtype_of(node)).lanes
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def _cast(value: PrimExpr, dtype: str) -> PrimExpr:
    if dtype_of(value) == dtype:
        return value
    if isinstance(value, tirx.IntImm):
        return tirx.IntImm(dtype, int(value.value))
    return tirx.Cast(dtype, value)
