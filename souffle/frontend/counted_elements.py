"""Operators that work element by element, and that tell extents, on values of which data decides the extent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

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
from souffle.frontend.values import Count, Counted, Known, Stacked, Value

__all__: list[str] = []


def _broadcast(reading: Reading, positions: Sequence[int], more: Sequence[tuple[int, ...]] = ()) -> dict[int, Count]:
    """The counts of a result that inputs are broadcast to; static shapes beside them are `more`."""
    operands = [(reading.shape(k), reading.counts(k)) for k in positions] + [(shape, {}) for shape in more]
    rank = max(len(shape) for shape, _ in operands)
    found: dict[int, Count] = {}
    for shape, counts in operands:
        for axis, count in counts.items():
            place = axis + rank - len(shape)
            if found.setdefault(place, count) is not count:
                raise reading.refused(f"two extents that data decides meet along axis {place}, which may differ")
    for shape, counts in operands:
        for axis, extent in enumerate(shape):
            place = axis + rank - len(shape)
            if place in found and axis not in counts and extent != 1:
                raise reading.refused(f"along axis {place} it meets a fixed extent of {extent}")
    return found


_ELEMENTWISE_NAMES = """
Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil Celu Clip Cos
Cosh Dropout Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less
LessOrEqual Log Max Mean Min Mish Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh
Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor
"""


@carries(*_ELEMENTWISE_NAMES.split())
def _elementwise(reading: Reading) -> AxisCounts:
    if attribute(reading.node, "broadcast") or attribute(reading.node, "axis") is not None:
        raise reading.refused("the broadcasting of operator sets before 7 is not known here")
    return _broadcast(reading, [k for k, value in enumerate(reading.inputs) if value is not None])


@reads_counts("Div", "Mod")
def _quotient(reading: Reading) -> Sequence[Value]:
    counts, inputs = _elementwise(reading), list(reading.inputs)
    if np.dtype(room_of(inputs[0]).dtype).kind in "iu":
        # What stands behind the end may be zero, by which a processor does not divide integers.
        inputs = [without_end(reading, value, 1) if isinstance(value, Counted) else value for value in inputs]
    return [with_counts(value, counts) for value in reading.results(inputs)]


@carries("CastLike")
def _cast_like(reading: Reading) -> AxisCounts:
    return reading.counts(0)


@reads_counts("Identity")
def _identity(reading: Reading) -> Sequence[Value]:
    return [reading.inputs[0]]


@carries("Expand")
def _expand(reading: Reading) -> AxisCounts:
    return _broadcast(reading, [0], [tuple(int(extent) for extent in reading.known(1, "shape"))])


@reads_counts("Shape")
def _shape(reading: Reading) -> Sequence[Value]:
    value = reading.inputs[0]
    shape, name = value.tensor.shape, reading.node.name
    chosen = range(len(shape))[slice(attribute(reading.node, "start", 0), attribute(reading.node, "end", len(shape)))]
    pieces = [value.counts[k].tensor if k in value.counts else constant(shape[k], "int64") for k in chosen]
    if not any(k in value.counts for k in chosen):
        return [Known(np.array([shape[k] for k in chosen], dtype="int64"), name)]
    # Piece by piece, so that the extents that are fixed stay known.
    return [Stacked(tuple(pieces), 0, name)]


@reads_counts("Size")
def _size(reading: Reading) -> Sequence[Value]:
    value, write = reading.inputs[0], NodeWriter(reading.interpreter, reading.node)
    fixed = math.prod(extent for k, extent in enumerate(value.tensor.shape) if k not in value.counts)
    size: Value = constant(fixed, "int64")
    for count in value.counts.values():
        size = write("Mul", size, count.tensor)
    return [size]
