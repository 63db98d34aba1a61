"""NonZero, Compress and Unique: what data selects, in as much room as there may be of it, and how many that are.

An element's place among those that are selected is how many of them stand up to it. Whoever is at a place of the result
counts how many elements stand before the one that belongs there::

    chosen    0 1 0 1 1        x[i] != 0
    upto      0 1 1 2 3        Σ r <= i: chosen[r]
    place     1 3 4 5 5        Σ i: upto[i] <= j        five, which is the number of all, where nobody is left
    count     3                upto[4]

So every element is computed on its own, as the rest of the compiler wants it. Behind the end results are those of the
first element, or zero: indices there may be read by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx
from tvm import te, tirx

from souffle.frontend.attributes import attribute
from souffle.frontend.custom import NodeOperands, check_length, int_imm
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.moved_bytes import has_small_elements
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.refusal import Obstacle, operator_name
from souffle.frontend.through_counts import Reading, reads_counts, with_counts, without_end
from souffle.frontend.values import Count, Counted, Known, Scope, Value
from souffle.program.extrema import is_floating
from souffle.tvm_compat import PrimExpr

__all__ = ["compressed", "count_of", "unravelled"]


def unravelled(flat: PrimExpr, shape: Sequence[int]) -> list[PrimExpr]:
    """The indices of an element by its number, where those of a tensor are counted through."""
    indices: list[PrimExpr] = []
    for extent in reversed(shape):
        indices.insert(0, int_imm(0) if extent == 1 else tirx.floormod(flat, int_imm(extent)))
        flat = tirx.floordiv(flat, int_imm(extent))
    return indices


def count_of(interpreter: Interpreter, node: onnx.NodeProto, tensor: Value, key: tuple) -> Count:
    """The count that a node made; an earlier one of the same `key`, which says what is counted, is the same."""
    if key not in interpreter.counts:
        source = f"{operator_name(node)} of node {node.name!r}"
        interpreter.counts[key] = Count(interpreter.tensor_of(tensor), source)
    return interpreter.counts[key]


def _is_chosen(value: PrimExpr, dtype: str) -> PrimExpr:
    """Whether an element counts as one that is not zero, as NaN does."""
    if dtype == "bool":
        return value
    zero = value == tirx.const(0, dtype)
    return tirx.Select(zero, tirx.const(False, "bool"), tirx.const(True, "bool"))


def _ones(test: PrimExpr) -> PrimExpr:
    return tirx.Select(test, int_imm(1), int_imm(0))


def _placed(chosen: Callable[[PrimExpr], PrimExpr], length: int) -> tuple[te.Tensor, te.Tensor]:
    """Which element stands at each place of a selection, the first one behind its end; and how many are selected."""
    check_length(length)

    def up_to(i):
        r = te.reduce_axis((0, length), name="r")
        return te.sum(tirx.Select(r <= i, _ones(chosen(r)), int_imm(0)), axis=r)

    upto = te.compute((length,), up_to, name="upto")

    def before(j):
        r = te.reduce_axis((0, length), name="r")
        return te.sum(_ones(upto(r) <= j), axis=r)

    place = te.compute((length,), before, name="place")
    inside = te.compute((length,), lambda j: tirx.Select(place(j) < length, place(j), int_imm(0)), name="chosen")
    return inside, te.compute((), lambda: upto(int_imm(length - 1)).astype("int64"), name="count")


def _non_zero(operands: NodeOperands) -> list[te.Tensor]:
    data, shape, dtype = operands.tensor(0), operands.shape(0), operands.dtype(0)
    length = math.prod(shape)
    flags = te.compute((length,), lambda i: _ones(_is_chosen(data(*unravelled(i, shape)), dtype)), name="flag")
    place, count = _placed(lambda i: flags(i) > 0, length)

    def index(k, j):
        # A scalar is taken for one element on one axis.
        parts = unravelled(place(j), shape or (1,))
        found = parts[-1]
        for axis in reversed(range(len(parts) - 1)):
            found = tirx.Select(k == axis, parts[axis], found)
        return found.astype("int64")

    return [te.compute((max(1, len(shape)), length), index, name="non_zero"), count]


@special("NonZero")
def _non_zero_node(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    value = interpreter.whole(inputs[0])
    if isinstance(value, Known):
        return None
    result, count = interpreter.defined(_non_zero, node, [value], ())
    return [with_counts(result, {1: count_of(interpreter, node, count, ("chosen", value, math.prod(value.shape)))})]


@reads_counts("NonZero")
def _non_zero_of_counted(reading: Reading) -> Sequence[Value]:
    # What is behind the end is not selected, and those before it have the same order with and without it.
    return reading.results([_nothing_behind(reading, 0)])


def _nothing_behind(reading: Reading, position: int) -> Value:
    """An input with zeros behind its end."""
    value = reading.inputs[position]
    return without_end(reading, value, 0) if isinstance(value, Counted) else value


def _compress(operands: NodeOperands, axis: int, length: int) -> list[te.Tensor]:
    data, condition, shape = operands.tensor(0), operands.tensor(1), operands.shape(0)
    dtype = operands.dtype(1)
    place, count = _placed(lambda i: _is_chosen(condition(i), dtype), length)

    def element(*at):
        return data(*at[:axis], place(at[axis]), *at[axis + 1 :])

    return [te.compute((*shape[:axis], length, *shape[axis + 1 :]), element, name="compress"), count]


def compressed(
    interpreter: Interpreter, node: onnx.NodeProto, value: Value, condition: Value, counts: dict[int, Count]
) -> Sequence[Value]:
    """The result of Compress where the condition is computed."""
    if has_small_elements(value):
        words = f"it selects elements of type {value.dtype} by a condition that is computed at run time"
        raise Obstacle(words, "put a Cast to float32 or int32 before the node")
    axis = attribute(node, "axis")
    if axis is None:
        value, axis = NodeWriter(interpreter, node)("Reshape", value, constant([-1], "int64")), 0
    axis %= len(value.shape)
    # Of a condition that is longer than the axis the rest is left out.
    length = min(condition.shape[0], value.shape[axis])
    result, number = interpreter.defined(_compress, node, [value, condition], (axis, length))
    count = count_of(interpreter, node, number, ("chosen", condition, length))
    return [with_counts(result, counts | {axis: count})]


@reads_counts("Compress")
def _compress_of_counted(reading: Reading) -> Sequence[Value]:
    value = reading.inputs[0]
    counts = dict(reading.counts(0))
    axis = attribute(reading.node, "axis")
    if axis is None and counts and len(value.tensor.shape) > 1:
        raise reading.refused("without an axis it reads all elements in a row")
    along = 0 if axis is None else axis % len(reading.shape(0))
    own, of_condition = counts.pop(along, None), reading.counts(1).get(0)
    if own is not None and own is not of_condition:
        raise reading.refused("its condition may be longer or shorter than the axis")
    if of_condition is not None and own is None and reading.shape(1)[0] > reading.shape(0)[along]:
        raise reading.refused("its condition may be longer than the axis")
    tensor = value.tensor if isinstance(value, Counted) else value
    chosen = _nothing_behind(reading, 1)
    return compressed(reading.interpreter, reading.node, tensor, chosen, counts)


def _is_nan(value: PrimExpr, dtype: str) -> PrimExpr:
    # Comparisons with NaN do not hold.
    return tirx.Select(value >= tirx.const(-math.inf, dtype), tirx.const(False, "bool"), tirx.const(True, "bool"))


def _less(a: PrimExpr, b: PrimExpr, dtype: str) -> PrimExpr:
    """Whether `a` is sorted before `b`: NaN comes last, as NumPy has it."""
    if dtype == "bool":
        return tirx.And(tirx.Not(a), b)
    if not is_floating(dtype):
        return a < b
    return tirx.Or(a < b, tirx.And(_is_nan(b, dtype), tirx.Not(_is_nan(a, dtype))))


def _same(a: PrimExpr, b: PrimExpr, dtype: str) -> PrimExpr:
    if dtype == "bool":
        return tirx.Or(tirx.And(a, b), tirx.And(tirx.Not(a), tirx.Not(b)))
    if not is_floating(dtype):
        return a == b
    return tirx.Or(a == b, tirx.And(_is_nan(a, dtype), _is_nan(b, dtype)))


class _Rows:
    """The subtensors along an axis, or single elements, and how two of them compare."""

    def __init__(self, operands: NodeOperands, axis: int | None) -> None:
        shape, self.dtype = operands.shape(0), operands.dtype(0)
        self.data, self.axis = operands.tensor(0), axis
        self.number = math.prod(shape) if axis is None else shape[axis]
        self.rest = () if axis is None else (*shape[:axis], *shape[axis + 1 :])
        self.width = math.prod(self.rest)
        check_length(self.number)
        self.difference: te.Tensor | None = None
        if axis is None:
            self.data = te.compute((self.number,), lambda i: operands.tensor(0)(*unravelled(i, shape)), name="flat")
        elif self.width > 1:
            # Where two rows differ first is kept for each pair of them.
            check_length(self.number, _MOST_ROWS)
            self.difference = te.compute((self.number, self.number), self._first_difference, name="difference")

    def element(self, i: PrimExpr, k: PrimExpr) -> PrimExpr:
        """Element `k` of row `i`."""
        if self.axis is None:
            return self.data(i)
        rest = unravelled(k, self.rest)
        return self.data(*rest[: self.axis], i, *rest[self.axis :])

    def _first_difference(self, i: PrimExpr, j: PrimExpr) -> PrimExpr:
        k = te.reduce_axis((0, self.width), name="k")
        same = _same(self.element(i, k), self.element(j, k), self.dtype)
        return te.min(tirx.Select(same, int_imm(self.width), k.var), axis=k)

    def same(self, i: PrimExpr, j: PrimExpr) -> PrimExpr:
        """Whether two rows are equal."""
        if self.difference is not None:
            return self.difference(i, j) == self.width
        return _same(self.element(i, int_imm(0)), self.element(j, int_imm(0)), self.dtype)

    def before(self, i: PrimExpr, j: PrimExpr) -> PrimExpr:
        """Whether row `i` is sorted before row `j`."""
        if self.difference is None:
            return _less(self.element(i, int_imm(0)), self.element(j, int_imm(0)), self.dtype)
        at = self.difference(i, j)
        inside = tirx.min(at, int_imm(self.width - 1))
        return tirx.And(at < self.width, _less(self.element(i, inside), self.element(j, inside), self.dtype))


_MOST_ROWS = 8192


def _unique(operands: NodeOperands, axis: int | None, in_order: bool) -> list[te.Tensor]:
    """What :func:`_unique_node` gives, and the count; the second operand, if any, says how many rows are there."""
    rows, shape = _Rows(operands, axis), operands.shape(0)
    number, limit = rows.number, operands.tensor(1)

    def there(i):
        return tirx.const(True, "bool") if limit is None else i.astype("int64") < limit()

    def first_equal(i):
        r = te.reduce_axis((0, number), name="r")
        return te.min(tirx.Select(rows.same(r, i), r.var, int_imm(number - 1)), axis=r)

    first = te.compute((number,), first_equal, name="first")
    kept = te.compute((number,), lambda i: _ones(tirx.And(there(i), first(i) == i)), name="kept")

    def ranked(i):
        r = te.reduce_axis((0, number), name="r")
        ahead = rows.before(r, i) if in_order else r < first(i)
        return te.sum(tirx.Select(ahead, kept(r), int_imm(0)), axis=r)

    rank = te.compute((number,), ranked, name="rank")

    def chosen(j):
        r = te.reduce_axis((0, number), name="r")
        return te.sum(tirx.Select(tirx.And(kept(r) > 0, rank(r) == j), r.var, int_imm(0)), axis=r)

    index = te.compute((number,), chosen, name="index")

    def amount(j):
        r = te.reduce_axis((0, number), name="r")
        return te.sum(_ones(tirx.And(there(r), rank(r) == j)), axis=r)

    amounts = te.compute((number,), amount, name="amount")

    def total():
        r = te.reduce_axis((0, number), name="r")
        return te.sum(kept(r), axis=r)

    size = te.compute((), total, name="size")
    if axis is None:
        values = te.compute((number,), lambda j: rows.data(index(j)), name="unique")
    else:
        values = te.compute(shape, lambda *at: rows.data(*at[:axis], index(at[axis]), *at[axis + 1 :]), name="unique")
    results = {"indices": index, "inverse": rank, "counts": amounts, "count": size}
    return [values, *(_in_64_bits(tensor, name) for name, tensor in results.items())]


def _in_64_bits(tensor: te.Tensor, name: str) -> te.Tensor:
    return te.compute(tensor.shape, lambda *at: tensor(*at).astype("int64"), name=name)


@special("Unique")
def _unique_node(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    value = interpreter.whole(inputs[0])
    return None if isinstance(value, Known) else _uniques(interpreter, node, value, None)


@reads_counts("Unique")
def _unique_of_counted(reading: Reading) -> Sequence[Value]:
    value, axis = reading.inputs[0], attribute(reading.node, "axis")
    rank = len(value.tensor.shape)
    along = (0 if rank == 1 else None) if axis is None else axis % rank
    if set(value.counts) != {along}:
        raise reading.refused("it compares along this axis, or reads all elements in a row")
    return _uniques(reading.interpreter, reading.node, value.tensor, value.counts[along])


def _uniques(interpreter: Interpreter, node: onnx.NodeProto, value: Value, limit: Count | None) -> Sequence[Value]:
    axis = attribute(node, "axis")
    axis = None if axis is None else axis % len(value.shape)
    operands = [value] if limit is None else [value, limit.tensor]
    values, indices, inverse, amounts, number = interpreter.defined(
        _unique, node, operands, (axis, bool(attribute(node, "sorted", 1)))
    )
    count = count_of(interpreter, node, number, ("unique", value, axis))
    return [
        with_counts(values, {axis or 0: count}),
        with_counts(indices, {0: count}),
        inverse if limit is None else with_counts(inverse, {0: limit}),
        with_counts(amounts, {0: count}),
    ]
