"""Products, normalizations and reductions of values of which data decides the extent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from souffle.frontend.accumulation import NARROW
from souffle.frontend.attributes import attribute
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.through_counts import (
    AxisCounts,
    Reading,
    carries,
    reads_counts,
    room_of,
    with_counts,
    without_end,
)
from souffle.frontend.values import Count, Value

__all__: list[str] = []


@carries("LayerNormalization", "RMSNormalization")
def _normalization(reading: Reading) -> AxisCounts:
    if any(axis >= reading.axis(-1) for axis in reading.counts(0)) or any(map(reading.counts, (1, 2))):
        raise reading.refused("it normalizes along this axis")
    return reading.counts(0)


@carries("MatMul")
def _matmul(reading: Reading) -> AxisCounts:
    a, b = reading.shape(0), reading.shape(1)
    if len(a) - 1 in reading.counts(0) or max(0, len(b) - 2) in reading.counts(1):
        raise reading.refused("it sums along this axis")
    rank = max(len(a), len(b))
    batch = [(shape[:-2], counts) for shape, counts in ((a, reading.counts(0)), (b, reading.counts(1)))]
    found: dict[int, Count] = {}
    for shape, counts in batch:
        for axis, count in counts.items():
            if axis < len(shape) and found.setdefault(axis + rank - 2 - len(shape), count) is not count:
                raise reading.refused("two extents that data decides meet, which may differ")
    for shape, counts in batch:
        for axis, extent in enumerate(shape):
            if axis + rank - 2 - len(shape) in found and axis not in counts and extent != 1:
                raise reading.refused(f"it meets a fixed extent of {extent}")
    if len(a) > 1 and len(a) - 2 in reading.counts(0):
        # Without the columns of a vector there is one axis less.
        found[rank - 2] = reading.counts(0)[len(a) - 2]
    if len(b) > 1 and len(b) - 1 in reading.counts(1):
        found[rank - 1 - (len(a) == 1)] = reading.counts(1)[len(b) - 1]
    return found


@carries("Gemm")
def _gemm(reading: Reading) -> AxisCounts:
    turned = [attribute(reading.node, name, 0) for name in ("transA", "transB")]
    rows, columns = (1 if turned[0] else 0), (0 if turned[1] else 1)
    if 1 - rows in reading.counts(0) or 1 - columns in reading.counts(1):
        raise reading.refused("it sums along this axis")
    found = {0: reading.counts(0)[rows]} if rows in reading.counts(0) else {}
    if columns in reading.counts(1):
        found[1] = reading.counts(1)[columns]
    if len(reading.inputs) > 2 and reading.inputs[2] is not None:
        shape, counts = reading.shape(2), reading.counts(2)
        for axis, extent in enumerate(shape):
            place = axis + 2 - len(shape)
            if counts.get(axis) is not found.get(place) and not (axis not in counts and extent == 1):
                raise reading.refused("what it adds may have another extent")
    return found


_NEUTRAL = {
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum"), 0),
    "ReduceProd": 1,
}
_LEAST, _LARGEST = ("ReduceMax", "ArgMax"), ("ReduceMin", "ArgMin")


def _neutral(reading: Reading, dtype: str) -> float | int | bool:
    """What changes nothing of a reduction."""
    operator, kind = reading.node.op_type, np.dtype(dtype).kind
    if operator not in (*_LEAST, *_LARGEST):
        return _NEUTRAL[operator]
    if kind == "b":
        return operator in _LARGEST
    if kind in "iu":
        return int(np.iinfo(dtype).min if operator in _LEAST else np.iinfo(dtype).max)
    return -math.inf if operator in _LEAST else math.inf


@reads_counts(*_NEUTRAL, "ReduceMax", "ReduceMin")
def _reduce(reading: Reading) -> Sequence[Value]:
    value, operator = reading.inputs[0], reading.node.op_type
    rank = len(reading.shape(0))
    axes = reading.axes()
    if not axes:
        axes = [] if attribute(reading.node, "noop_with_empty_axes", 0) else list(range(rank))
    over = [axis for axis in axes if axis in value.counts]
    keep = attribute(reading.node, "keepdims", 1)
    left = {axis: count for axis, count in value.counts.items() if axis not in over}
    counts = left if keep else {axis - sum(k < axis for k in axes): count for axis, count in left.items()}
    dtype = value.tensor.dtype
    if not over:
        return [with_counts(result, counts) for result in reading.results()]
    given = without_end(reading, value, _neutral(reading, dtype), over)
    if operator != "ReduceMean":
        return [with_counts(result, counts) for result in reading.results([given, *reading.inputs[1:]])]
    if np.dtype(dtype).kind in "iu":
        raise reading.refused("it divides integers by how many there are")
    write = NodeWriter(reading.interpreter, reading.node)
    # A sum may leave the range of a 16-bit type where the mean does not, and a count have no place in it.
    wide = "float32" if dtype in NARROW else dtype
    total = write("ReduceSum", write.cast(room_of(given), wide), constant(axes, "int64"), keepdims=keep)
    number: Value = constant(math.prod(value.tensor.shape[axis] for axis in axes if axis not in over), "int64")
    for axis in over:
        number = write("Mul", number, value.counts[axis].tensor)
    return [with_counts(write.cast(write("Div", total, write.cast(number, wide)), dtype), counts)]


@reads_counts("ArgMax", "ArgMin")
def _arg_reduce(reading: Reading) -> Sequence[Value]:
    value, axis = reading.inputs[0], reading.axis(0)
    keep = attribute(reading.node, "keepdims", 1)
    counts = {k - (k > axis and not keep): count for k, count in value.counts.items() if k != axis}
    if axis in value.counts:
        if attribute(reading.node, "select_last_index", 0):
            raise reading.refused("the last of equal elements may be behind the end")
        # Of equal elements the first is taken, which is one that is there.
        value = without_end(reading, value, _neutral(reading, value.tensor.dtype), [axis])
    return [with_counts(result, counts) for result in reading.results([value])]
