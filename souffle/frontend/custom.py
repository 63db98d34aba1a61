"""ONNX operators that get a TE of our own, where TVM has none, an extern function, or several TEs for one.

Sorting, scanning and scattering are written as reductions over the positions that may contribute. That is quadratic in
the length of one axis, but every element is computed on its own, as the rest of the compiler wants it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import helper
from tvm import te, tirx

from souffle.errors import UnsupportedOperatorError
from souffle.frontend.attributes import attribute
from souffle.frontend.lowering import NodeInput, Step, Template
from souffle.frontend.resize import AxisResize, ResizePlan, interpolation_table, resize_plan
from souffle.tvm_compat import PrimExpr, primfunc_from_tensors

__all__ = ["custom_template"]

_Definition = Callable[[onnx.NodeProto, "_Operands"], Sequence[te.Tensor] | None]
_DEFINITIONS: dict[str, _Definition] = {}
# Beyond this a quadratic formulation costs more than it is worth.
_LONGEST_AXIS = 65536


class _Operands:
    """The inputs of a node as placeholders; constants stay known."""

    def __init__(self, inputs: Sequence[NodeInput | None]):
        self.inputs = list(inputs)
        self.placeholders = [
            None if form is None else te.placeholder(form.shape, form.dtype, name=f"i{k}")
            for k, form in enumerate(inputs)
        ]

        self.tables: list[tuple[te.Tensor, np.ndarray]] = []

    def table(self, array: np.ndarray) -> te.Tensor:
        """A placeholder for a constant that the definition itself makes."""
        placeholder = te.placeholder(array.shape, str(array.dtype), name=f"table{len(self.tables)}")
        self.tables.append((placeholder, array))
        return placeholder

    def tensor(self, position: int) -> te.Tensor | None:
        """The placeholder of an input; ``None`` for an absent one."""
        return self.placeholders[position] if position < len(self.placeholders) else None

    def shape(self, position: int) -> tuple[int, ...]:
        """The shape of an input."""
        return self.inputs[position].shape

    def dtype(self, position: int) -> str:
        """The element type of an input."""
        return self.inputs[position].dtype

    def constant(self, position: int) -> np.ndarray | None:
        """The value of an input, if it is known."""
        form = self.inputs[position] if position < len(self.inputs) else None
        return None if form is None else form.value

    def present(self, position: int) -> bool:
        """Whether an optional input is there."""
        return self.tensor(position) is not None


def custom_template(node: onnx.NodeProto, inputs: Sequence[NodeInput | None]) -> Template | None:
    """The template of a node that is defined here; ``None`` for all others."""
    definition = _DEFINITIONS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if definition is None:
        return None
    operands = _Operands(inputs)
    tensors = definition(node, operands)
    if tensors is None:
        return None
    slots = [k for k, form in enumerate(inputs) if form is not None and form.value is None]
    slots += [k for k, form in enumerate(inputs) if form is not None and form.value is not None]
    placeholders = (*(operands.placeholders[k] for k in slots), *(table for table, _ in operands.tables))
    constants = {place: inputs[k].value for place, k in enumerate(slots) if inputs[k].value is not None}
    constants.update({len(slots) + k: array for k, (_, array) in enumerate(operands.tables)})
    types = [(tuple(int(extent) for extent in t.shape), str(t.dtype)) for t in (*placeholders, *tensors)]
    results = tuple(range(len(placeholders), len(types)))
    func = primfunc_from_tensors([*placeholders, *tensors], node.op_type.lower())
    read = tuple(range(len(placeholders)))
    step = Step(node.op_type.lower(), func, read, results, placeholders, tuple(tensors))
    return Template(tuple(types), constants, (step,), results)


def _defines(*operators: str) -> Callable[[_Definition], _Definition]:
    def register(function: _Definition) -> _Definition:
        for operator in operators:
            _DEFINITIONS[operator] = function
        return function

    return register


def _int(value: int, dtype: str = "int32") -> PrimExpr:
    return tirx.IntImm(dtype, value)


def _position(index: PrimExpr, extent: int) -> PrimExpr:
    """An index of ONNX as a position on an axis: negative ones count from the end, none leaves the axis."""
    if isinstance(index, tirx.IntImm):
        value = int(index.value)
        return _int(min(max(value + extent if value < 0 else value, 0), extent - 1))
    index = index.astype("int32") if str(index.ty.dtype) != "int32" else index
    counted = tirx.Select(index < 0, index + extent, index)
    return tirx.max(tirx.min(counted, _int(extent - 1)), _int(0))


def _check_length(node: onnx.NodeProto, extent: int) -> None:
    if extent > _LONGEST_AXIS:
        raise UnsupportedOperatorError(
            f"operator {node.op_type} of node {node.name!r} works along an axis of {extent} elements; at most "
            f"{_LONGEST_AXIS} are supported"
        )


@_defines("Gather")
def _gather(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor]:
    data, indices = operands.tensor(0), operands.tensor(1)
    shape, index_shape = operands.shape(0), operands.shape(1)
    axis = attribute(node, "axis", 0) % len(shape)
    rank = len(index_shape)

    def element(*at):
        index = indices(*at[axis : axis + rank])
        return data(*at[:axis], _position(index, shape[axis]), *at[axis + rank :])

    return [te.compute((*shape[:axis], *index_shape, *shape[axis + 1 :]), element, name="gather")]


@_defines("GatherElements")
def _gather_elements(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor]:
    data, indices = operands.tensor(0), operands.tensor(1)
    shape = operands.shape(0)
    axis = attribute(node, "axis", 0) % len(shape)

    def element(*at):
        return data(*at[:axis], _position(indices(*at), shape[axis]), *at[axis + 1 :])

    return [te.compute(operands.shape(1), element, name="gather_elements")]


@_defines("GatherND")
def _gather_nd(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor]:
    data, indices = operands.tensor(0), operands.tensor(1)
    shape, index_shape = operands.shape(0), operands.shape(1)
    batch = attribute(node, "batch_dims", 0)
    depth = index_shape[-1]

    def element(*at):
        outer, inner = at[: len(index_shape) - 1], at[len(index_shape) - 1 :]
        chosen = [_position(indices(*outer, k), shape[batch + k]) for k in range(depth)]
        return data(*at[:batch], *chosen, *inner)

    return [te.compute((*index_shape[:-1], *shape[batch + depth :]), element, name="gather_nd")]


@_defines("ArgMax", "ArgMin")
def _arg_reduce(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor]:
    data, shape = operands.tensor(0), operands.shape(0)
    axis = attribute(node, "axis", 0) % len(shape)
    extent, last = shape[axis], bool(attribute(node, "select_last_index", 0))
    outer = (*shape[:axis], *shape[axis + 1 :])
    best_of, first_of = (te.max if node.op_type == "ArgMax" else te.min), (te.max if last else te.min)

    def best(*at):
        r = te.reduce_axis((0, extent), name="r")
        return best_of(data(*at[:axis], r, *at[axis:]), axis=r)

    peak = te.compute(outer, best, name="peak")
    nowhere = _int(-1 if last else extent - 1)

    def position(*at):
        r = te.reduce_axis((0, extent), name="r")
        here = data(*at[:axis], r, *at[axis:]) == peak(*at)
        return first_of(tirx.Select(here, r.var, nowhere), axis=r)

    where = te.compute(outer, position, name="position")
    keep = attribute(node, "keepdims", 1)

    def result(*at):
        kept = (*at[:axis], *at[axis + 1 :]) if keep else at
        return where(*kept).astype("int64")

    return [te.compute((*shape[:axis], 1, *shape[axis + 1 :]) if keep else outer, result, name="index")]


@_defines("CumSum", "CumProd")
def _cumulate(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor] | None:
    along = operands.constant(1)
    if along is None:
        return None
    data, shape, dtype = operands.tensor(0), operands.shape(0), operands.dtype(0)
    axis = int(along.reshape(-1)[0]) % len(shape)
    extent = shape[axis]
    _check_length(node, extent)
    exclusive, reverse = attribute(node, "exclusive", 0), attribute(node, "reverse", 0)
    neutral = tirx.const(0 if node.op_type == "CumSum" else 1, dtype)
    combine = te.sum if node.op_type == "CumSum" else te.comm_reducer(lambda a, b: a * b, lambda t: tirx.const(1, t))

    def element(*at):
        r = te.reduce_axis((0, extent), name="r")
        here = at[axis]
        if reverse:
            covered = r > here if exclusive else r >= here
        else:
            covered = r < here if exclusive else r <= here
        return combine(tirx.Select(covered, data(*at[:axis], r, *at[axis + 1 :]), neutral), axis=r)

    return [te.compute(shape, element, name="cumulate")]


@_defines("TopK")
def _top_k(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor] | None:
    count = operands.constant(1) if operands.present(1) else np.array(attribute(node, "k", 1))
    if count is None:
        return None
    data, shape = operands.tensor(0), operands.shape(0)
    axis = attribute(node, "axis", -1) % len(shape)
    extent, k = shape[axis], int(count.reshape(-1)[0])
    _check_length(node, extent)
    largest = attribute(node, "largest", 1)

    def rank(*at):
        r = te.reduce_axis((0, extent), name="r")
        other, mine = data(*at[:axis], r, *at[axis + 1 :]), data(*at)
        ahead = other > mine if largest else other < mine
        tied = tirx.And(other == mine, r < at[axis])
        return te.sum(tirx.Select(tirx.Or(ahead, tied), _int(1), _int(0)), axis=r)

    ranks = te.compute(shape, rank, name="rank")
    result_shape = (*shape[:axis], k, *shape[axis + 1 :])

    def chosen(value, zero):
        def element(*at):
            r = te.reduce_axis((0, extent), name="r")
            there = (*at[:axis], r, *at[axis + 1 :])
            return te.sum(tirx.Select(ranks(*there) == at[axis], value(there, r), zero), axis=r)

        return element

    index = te.compute(result_shape, chosen(lambda there, r: r.var, _int(0)), name="place")
    indices = te.compute(result_shape, lambda *at: index(*at).astype("int64"), name="indices")
    values = te.compute(
        result_shape,
        lambda *at: data(*at[:axis], tirx.max(_int(0), tirx.min(index(*at), _int(extent - 1))), *at[axis + 1 :]),
        name="values",
    )
    return [values, indices]


@_defines("ScatterElements", "Scatter")
def _scatter_elements(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor] | None:
    shape, index_shape = operands.shape(0), operands.shape(1)
    data, indices, updates = (operands.tensor(k) for k in range(3))
    axis = attribute(node, "axis", 0) % len(shape)
    extent = index_shape[axis]
    _check_length(node, extent)

    def at_update(at, r):
        return (*at[:axis], r, *at[axis + 1 :])

    def inside(at):
        tests = [at[k] < index_shape[k] for k in range(len(shape)) if k != axis and index_shape[k] < shape[k]]
        return tests

    def clipped(at):
        return tuple(
            at[k] if k == axis or index_shape[k] == shape[k] else tirx.min(at[k], _int(index_shape[k] - 1))
            for k in range(len(shape))
        )

    def hits(at, r):
        test = _position(indices(*at_update(clipped(at), r)), shape[axis]) == at[axis]
        for bound in inside(at):
            test = tirx.And(bound, test)
        return test

    return _scattered(
        node, operands, (extent,), hits, lambda at, r: updates(*at_update(clipped(at), r[0])), lambda at: data(*at)
    )


@_defines("ScatterND")
def _scatter_nd(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor] | None:
    shape, index_shape = operands.shape(0), operands.shape(1)
    data, indices, updates = (operands.tensor(k) for k in range(3))
    depth, places = index_shape[-1], index_shape[:-1]
    _check_length(node, math.prod(places))

    def hits(at, *r):
        test: PrimExpr = tirx.const(True, "bool")
        for k in range(depth):
            same = _position(indices(*r, k), shape[k]) == at[k]
            test = same if k == 0 else tirx.And(test, same)
        return test

    return _scattered(node, operands, places, hits, lambda at, r: updates(*r, *at[depth:]), lambda at: data(*at))


def _scattered(node: onnx.NodeProto, operands: _Operands, places, hits, update, old) -> list[te.Tensor] | None:
    """Scatter as a gather: every element looks for the updates that hit it."""
    shape, dtype = operands.shape(0), operands.dtype(0)
    reduction = attribute(node, "reduction", b"none").decode()
    rank = len(places)

    def axes():
        return [te.reduce_axis((0, extent), name=f"r{k}") for k, extent in enumerate(places)]

    if reduction == "none":

        def last_hit(*at):
            r = axes()
            flat: PrimExpr = _int(0)
            for axis, extent in zip(r, places, strict=True):
                flat = flat * extent + axis
            return te.max(tirx.Select(hits(at, *r), flat, _int(-1)), axis=r)

        found = te.compute(shape, last_hit, name="last_hit")

        def element(*at):
            flat = tirx.max(found(*at), _int(0))
            place: list[PrimExpr] = []
            for extent in reversed(places):
                place.insert(0, tirx.floormod(flat, extent))
                flat = tirx.floordiv(flat, extent)
            return tirx.Select(found(*at) >= 0, update(at, place), old(at))

        return [te.compute(shape, element, name="scatter")]
    reducers: dict[str, tuple[Callable, PrimExpr, Callable]] = {
        "add": (te.sum, tirx.const(0, dtype), lambda a, b: a + b),
        "mul": (
            te.comm_reducer(lambda a, b: a * b, lambda t: tirx.const(1, t)),
            tirx.const(1, dtype),
            lambda a, b: a * b,
        ),
        "max": (te.max, tirx.min_value(dtype), tirx.max),
        "min": (te.min, tirx.max_value(dtype), tirx.min),
    }
    if reduction not in reducers or rank == 0:
        return None
    combine, neutral, join = reducers[reduction]

    def total(*at):
        r = axes()
        return combine(tirx.Select(hits(at, *r), update(at, r), neutral), axis=r)

    sums = te.compute(shape, total, name="hits")
    return [te.compute(shape, lambda *at: join(old(at), sums(*at)), name="scatter")]


@_defines("Pad")
def _pad(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor] | None:
    if len(operands.inputs) > 1 and operands.constant(1) is None:
        return None
    data, shape, dtype = operands.tensor(0), operands.shape(0), operands.dtype(0)
    pads = operands.constant(1).reshape(-1).tolist() if len(operands.inputs) > 1 else attribute(node, "pads")
    if operands.present(3):
        if operands.constant(3) is None:
            return None
        axes = [int(axis) % len(shape) for axis in operands.constant(3).reshape(-1)]
    else:
        axes = list(range(len(shape)))
    before, after = [0] * len(shape), [0] * len(shape)
    for k, axis in enumerate(axes):
        before[axis], after[axis] = int(pads[k]), int(pads[k + len(axes)])
    mode = attribute(node, "mode", b"constant").decode()
    value = tirx.const(attribute(node, "value", 0.0), dtype)
    if operands.present(2):
        value = operands.tensor(2)(*([0] * len(operands.shape(2))))
    padded = [k for k in range(len(shape)) if before[k] or after[k]]
    result_shape = [extent + b + a for extent, b, a in zip(shape, before, after, strict=True)]
    if min(result_shape, default=1) < 1:
        return None

    def source(index: PrimExpr, k: int) -> PrimExpr:
        place, extent = index - before[k], shape[k]
        if mode == "edge":
            return tirx.max(tirx.min(place, _int(extent - 1)), _int(0))
        if mode == "wrap":
            return tirx.floormod(place, _int(extent))
        if mode == "reflect":
            mirrored = tirx.Select(place < 0, -place, place)
            return tirx.Select(mirrored >= extent, 2 * (extent - 1) - mirrored, mirrored)
        return place

    def element(*at):
        if mode != "constant":
            return data(*(source(index, k) if k in padded else index for k, index in enumerate(at)))
        tests = [at[k] >= before[k] for k in padded if before[k] > 0]
        tests += [at[k] < before[k] + shape[k] for k in padded if after[k] > 0]
        inside = data(*(index - before[k] if k in padded else index for k, index in enumerate(at)))
        if not tests:
            return inside
        return tirx.if_then_else(tirx.all(*tests), inside, value)

    return [te.compute(result_shape, element, name="pad")]


@_defines("Hardmax")
def _hardmax(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor]:
    data, shape, dtype = operands.tensor(0), operands.shape(0), operands.dtype(0)
    axis = attribute(node, "axis", -1) % len(shape)
    extent = shape[axis]
    outer = (*shape[:axis], *shape[axis + 1 :])

    def best(*at):
        r = te.reduce_axis((0, extent), name="r")
        return te.max(data(*at[:axis], r, *at[axis:]), axis=r)

    peak = te.compute(outer, best, name="peak")

    def first(*at):
        r = te.reduce_axis((0, extent), name="r")
        here = data(*at[:axis], r, *at[axis:]) == peak(*at)
        return te.min(tirx.Select(here, r.var, _int(extent - 1)), axis=r)

    where = te.compute(outer, first, name="position")

    def element(*at):
        return tirx.Select(where(*at[:axis], *at[axis + 1 :]) == at[axis], tirx.const(1, dtype), tirx.const(0, dtype))

    return [te.compute(shape, element, name="hardmax")]


@_defines("OneHot")
def _one_hot(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor] | None:
    if operands.constant(1) is None:
        return None
    depth = int(operands.constant(1).reshape(-1)[0])
    indices, values, shape = operands.tensor(0), operands.tensor(2), operands.shape(0)
    axis = attribute(node, "axis", -1) % (len(shape) + 1)

    def element(*at):
        index = indices(*at[:axis], *at[axis + 1 :])
        index = index if operands.dtype(0) == "int64" else index.astype("int64")
        place = at[axis].astype("int64")
        here = tirx.Or(index == place, index + depth == place)
        return tirx.Select(here, values(1), values(0))

    return [te.compute((*shape[:axis], depth, *shape[axis:]), element, name="one_hot")]


@_defines("ReverseSequence")
def _reverse_sequence(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor]:
    data, lengths, shape = operands.tensor(0), operands.tensor(1), operands.shape(0)
    batch, time = attribute(node, "batch_axis", 1), attribute(node, "time_axis", 0)

    def element(*at):
        length = lengths(at[batch]).astype("int32")
        place = tirx.Select(at[time] < length, tirx.max(length - 1 - at[time], _int(0)), at[time])
        return data(*at[:time], place, *at[time + 1 :])

    return [te.compute(shape, element, name="reverse_sequence")]


@_defines("BitCast")
def _bit_cast(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor] | None:
    target = helper.tensor_dtype_to_np_dtype(attribute(node, "to"))
    if target.itemsize != np.dtype(operands.dtype(0)).itemsize or "bool" in (str(target), operands.dtype(0)):
        return None
    data = operands.tensor(0)
    return [te.compute(operands.shape(0), lambda *at: tirx.reinterpret(str(target), data(*at)), name="bit_cast")]


@_defines("Resize")
def _resize(node: onnx.NodeProto, operands: _Operands) -> list[te.Tensor] | None:
    roi, scales, sizes = (operands.constant(k) for k in (1, 2, 3))
    shape = operands.shape(0)
    plan = resize_plan(node, shape, roi, scales, sizes)
    if plan.mode != "nearest" and _tvm_resizes(plan, len(shape)) and not attribute(node, "axes"):
        return None
    result = operands.tensor(0)
    if plan.mode == "nearest":
        return [_resized_nearest(plan, operands, result)]
    for axis in plan.axes:
        result = _resized_axis(plan, axis, operands, result)
    return [result]


def _tvm_resizes(plan: ResizePlan, rank: int) -> bool:
    """Whether TVM's own formulation, which computes positions instead of reading them, gives ONNX's result."""
    plain = not plan.antialias and not plan.exclude_outside and plan.exact and rank == 4
    inner = all(axis.axis >= 2 and axis.after > 1 for axis in plan.axes)
    known = plan.coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
    return plain and inner and known and bool(plan.axes)


def _resized_nearest(plan: ResizePlan, operands: _Operands, data: te.Tensor) -> te.Tensor:
    shape = [int(extent) for extent in data.shape]
    resized = {axis.axis: axis for axis in plan.axes}
    tables = {k: interpolation_table(plan, axis) for k, axis in resized.items()}
    indices = {k: _nearest_index(operands, resized[k], table[0][:, 0]) for k, table in tables.items()}
    outside = {k: operands.table(t[2].astype("int32")) for k, t in tables.items() if t[2].any()}
    result_shape = [resized[k].after if k in resized else extent for k, extent in enumerate(shape)]

    def element(*at):
        value = data(*(indices[k](index) if k in indices else index for k, index in enumerate(at)))
        for k, table in outside.items():
            value = tirx.Select(table(at[k]) != 0, tirx.const(plan.extrapolation_value, str(data.dtype)), value)
        return value

    return te.compute(result_shape, element, name="resize")


def _nearest_index(operands: _Operands, axis: AxisResize, table: np.ndarray) -> Callable[[PrimExpr], PrimExpr]:
    """Arithmetic that gives the table, so that what is read stays visible to the analysis; else the table."""
    i = np.arange(axis.after, dtype="int64")
    before, after = axis.before // math.gcd(axis.before, axis.after), axis.after // math.gcd(axis.before, axis.after)
    # position = (slope * i + shift) // divisor
    for slope, shift, divisor in (
        (before, 0, after),
        (2 * before, before, 2 * after),
        (2 * before, before - 1, 2 * after),
    ):
        if np.array_equal((slope * i + shift) // divisor, table):
            return lambda at: tirx.floordiv(at * slope + shift, _int(divisor)) if divisor > 1 else at * slope + shift
    positions = operands.table(table)
    return lambda at: _position(positions(at), axis.before)


def _resized_axis(plan: ResizePlan, axis: AxisResize, operands: _Operands, data: te.Tensor) -> te.Tensor:
    shape, dtype = [int(extent) for extent in data.shape], str(data.dtype)
    k = axis.axis
    indices, weights, outside = interpolation_table(plan, axis)
    positions, factors = operands.table(indices), operands.table(weights.astype(dtype))
    taps = indices.shape[1]

    def mixed(*at):
        r = te.reduce_axis((0, taps), name="tap")
        return te.sum(
            data(*at[:k], _position(positions(at[k], r), axis.before), *at[k + 1 :]) * factors(at[k], r), axis=r
        )

    result_shape = [*shape[:k], axis.after, *shape[k + 1 :]]
    result = te.compute(result_shape, mixed, name=f"resize_axis{k}")
    if not outside.any():
        return result
    table = operands.table(outside.astype("int32"))
    beyond = tirx.const(plan.extrapolation_value, dtype)
    return te.compute(result_shape, lambda *at: tirx.Select(table(at[k]) != 0, beyond, result(*at)), name="extrapolate")
