"""Operators that put elements elsewhere, on values of which data decides the extent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from souffle.frontend.attributes import attribute
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.refusal import version_of
from souffle.frontend.through_counts import AxisCounts, Reading, carries, reads_counts, with_counts
from souffle.frontend.values import Count, Value

__all__: list[str] = []

_SLICE_INPUTS = ("starts", "ends", "axes", "steps")


@carries("Transpose")
def _transpose(reading: Reading) -> AxisCounts:
    rank = len(reading.shape(0))
    order = list(attribute(reading.node, "perm", range(rank)[::-1]))
    return {order.index(axis): count for axis, count in reading.counts(0).items()}


@carries("Squeeze")
def _squeeze(reading: Reading) -> AxisCounts:
    shape, counts = reading.shape(0), reading.counts(0)
    axes = reading.axes()
    dropped = {axis for axis, extent in enumerate(shape) if extent == 1} if axes is None else set(axes)
    if dropped & set(counts):
        raise reading.refused("it drops this axis, which is right only where its extent is one")
    return {axis - sum(k < axis for k in dropped): count for axis, count in counts.items()}


@carries("Unsqueeze")
def _unsqueeze(reading: Reading) -> AxisCounts:
    given = attribute(reading.node, "axes")
    axes = np.reshape(reading.known(1, "axes") if given is None else given, -1)
    rank = len(reading.shape(0)) + len(axes)
    added = {int(axis) % rank for axis in axes}
    old = [axis for axis in range(rank) if axis not in added]
    return {old[axis]: count for axis, count in reading.counts(0).items()}


@carries("Reshape")
def _reshape(reading: Reading) -> AxisCounts:
    given = attribute(reading.node, "shape")
    wanted = [int(extent) for extent in np.reshape(reading.known(1, "shape") if given is None else given, -1)]
    zero_copies = not attribute(reading.node, "allowzero", 0)
    return _reshaped(reading, wanted, zero_copies)


@carries("Flatten")
def _flatten(reading: Reading) -> AxisCounts:
    shape = reading.shape(0)
    axis = attribute(reading.node, "axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    before = any(k < axis for k in reading.counts(0))
    wanted = [-1, math.prod(shape[axis:])] if before else [math.prod(shape[:axis]), -1]
    return _reshaped(reading, wanted, False)


def _reshaped(reading: Reading, wanted: Sequence[int], zero_copies: bool) -> AxisCounts:
    """The counts of a reshaped value: of one axis, that comes out as the axis that is told by -1, or by 0.

    What is there comes first along the axis for each position of the axes before it. It does so in the result where the
    positions before are as many, and those behind are the same or a part of them::

        [3, <=12, 4]  ->  [3, -1, 4]: the count        ->  [3, -1]: four times the count        ->  [-1, 4]: not first
    """
    shape, counts = reading.shape(0), reading.counts(0)
    copied = {k for k, extent in enumerate(wanted) if extent == 0 and zero_copies}
    if -1 not in wanted and set(counts) <= copied:
        return dict(counts)
    if len(counts) > 1:
        raise reading.refused("it reshapes several such axes")
    ((axis, count),) = counts.items()
    extents = [shape[k] if k in copied else extent for k, extent in enumerate(wanted)]
    rest = math.prod(extent for extent in extents if extent != -1)
    if -1 in wanted and axis in copied:
        # The one that is told by -1 is of fixed extents only where those on this side make it.
        place, other = axis, wanted.index(-1)
        span = slice(0, axis) if other < axis else slice(axis + 1, None)
        here = math.prod(extent for k, extent in enumerate(extents[span], span.start) if k != other)
        fixed = math.prod(shape[span])
        extents[other] = fixed // here if here and not fixed % here else -1
    elif -1 in wanted:
        place = wanted.index(-1)
        extents[place] = math.prod(shape) // rest if rest else -1
    else:
        raise reading.refused("its shape does not tell the axis by -1 or 0")
    behind, was_behind = math.prod(extents[place + 1 :]), math.prod(shape[axis + 1 :])
    before = math.prod(extents[:place]) == math.prod(shape[:axis])
    if -1 in extents or not before or not behind or was_behind % behind:
        raise reading.refused("it does not keep what is there in front along one axis")
    times = was_behind // behind
    if times == 1:
        return {place: count}
    factor = constant(times, "int64")
    return {place: reading.derived(("times", count, times), lambda write: write("Mul", count.tensor, factor), count)}


@carries("Gather")
def _gather(reading: Reading) -> AxisCounts:
    axis, rank = reading.axis(0), len(reading.shape(1))
    counts = reading.counts(0)
    if axis in counts:
        raise reading.refused("it takes elements along this axis, where an index may be behind the end")
    kept = {k + (rank - 1 if k > axis else 0): count for k, count in counts.items()}
    return kept | {axis + k: count for k, count in reading.counts(1).items()}


@carries("GatherElements")
def _gather_elements(reading: Reading) -> AxisCounts:
    axis, data, indices = reading.axis(0), reading.counts(0), reading.counts(1)
    if axis in data:
        raise reading.refused("it takes elements along this axis, where an index may be behind the end")
    for k in {*data, *indices} - {axis}:
        if data.get(k) is not indices.get(k):
            raise reading.refused(f"its data and its indices have different extents along axis {k}")
    return indices


@carries("GatherND")
def _gather_nd(reading: Reading) -> AxisCounts:
    data, indices, batch = reading.counts(0), reading.counts(1), attribute(reading.node, "batch_dims", 0)
    places, depth = len(reading.shape(1)) - 1, reading.shape(1)[-1]
    if places in indices or any(batch <= axis < batch + depth for axis in data):
        raise reading.refused("it takes elements along this axis, where an index may be behind the end")
    for k in range(batch):
        if data.get(k) is not indices.get(k):
            raise reading.refused(f"its data and its indices have different extents along axis {k}")
    inner = {axis - batch - depth + places: count for axis, count in data.items() if axis >= batch + depth}
    return indices | inner


@reads_counts("Slice")
def _slice(reading: Reading) -> Sequence[Value]:
    shape, counts = reading.shape(0), dict(reading.counts(0))
    if version_of("", reading.scope.opsets) < 10:
        starts, ends = attribute(reading.node, "starts"), attribute(reading.node, "ends")
        axes, steps = attribute(reading.node, "axes"), None
    else:
        starts, ends, axes, steps = (reading.known(k, name) for k, name in enumerate(_SLICE_INPUTS, 1))
    axes = range(len(starts)) if axes is None else axes
    for k, axis in enumerate(int(axis) % len(shape) for axis in axes):
        if axis not in counts:
            continue
        start, end, step = int(starts[k]), int(ends[k]), 1 if steps is None else int(steps[k])
        if start < 0 or step != 1:
            raise reading.refused("it slices this axis by a step other than one, or from its end")
        if start or end < shape[axis]:
            counts[axis] = _sliced(reading, counts[axis], start, end)
    return [with_counts(value, counts) for value in reading.results()]


def _sliced(reading: Reading, count: Count, start: int, end: int) -> Count:
    """How many are left from `start` to `end`."""

    def make(write: NodeWriter) -> Value:
        last = write("Add" if end < 0 else "Min", count.tensor, constant(end, "int64"))
        return write("Max", write("Sub", last, constant(start, "int64")), constant(0, "int64"))

    return reading.derived(("slice", count, start, end), make, count)


@carries("Concat")
def _concat(reading: Reading) -> AxisCounts:
    axis, found = reading.axis(0), reading.counts(0)
    for k in range(len(reading.inputs)):
        counts = reading.counts(k)
        if axis in counts:
            raise reading.refused("it puts values one behind the other along this axis")
        if {k: id(count) for k, count in counts.items()} != {k: id(count) for k, count in found.items()}:
            raise reading.refused("its inputs may have different extents along an axis that it does not join")
    return found


@carries("BatchNormalization", "Hardmax", "LogSoftmax", "Softmax")
@carries("CumProd", "CumSum", "OneHot", "Split", "Tile", "TopK")
def _along_another_axis(reading: Reading) -> AxisCounts:
    operator, counts, rank = reading.node.op_type, reading.counts(0), len(reading.shape(0))
    if any(reading.counts(k) for k in range(1, len(reading.inputs))):
        raise reading.refused("only its first input may have such an extent")
    if operator == "Tile":
        repeats = reading.known(1, "repeats")
        read = {axis for axis in range(rank) if repeats[axis] != 1}
    elif operator == "OneHot":
        axis = reading.axis(-1, rank + 1)
        return {k + (k >= axis): count for k, count in counts.items()}
    elif operator in ("CumSum", "CumProd"):
        # From the front, an element reads those before it.
        along = int(np.reshape(reading.known(1, "axis"), -1)[0]) % rank
        read = {along} if attribute(reading.node, "reverse", 0) else set()
    elif operator == "BatchNormalization":
        read = {1} if not attribute(reading.node, "training_mode", 0) else set(range(rank))
    elif operator in ("Softmax", "LogSoftmax", "Hardmax") and version_of("", reading.scope.opsets) < 13:
        read = set(range(reading.axis(1), rank))
    else:
        read = {reading.axis(0 if operator == "Split" else -1)}
    if read & set(counts):
        raise reading.refused("it reads or writes along this axis what is behind the end")
    return counts
