"""Operators of training: batch statistics, and steps of optimizers (domain ``ai.onnx.preview.training``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx

from souffle.frontend.accumulation import NARROW
from souffle.frontend.attributes import attribute
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.refusal import Obstacle, version_of
from souffle.frontend.values import Known, Scope, Value

__all__: list[str] = []

_OPTIMIZERS = "ai.onnx.preview.training"


@special("BatchNormalization")
def _batch_normalization(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    if attribute(node, "training_mode", 0):
        return _batch_statistics(interpreter, node, [interpreter.whole(value) for value in inputs])
    if version_of("", scope.opsets) < 14 and any(list(node.output)[1:]) and not attribute(node, "is_test", 0):
        raise Obstacle(
            "it makes more outputs than the first, by which operator sets before 14 mean training",
            "export the model for inference (in PyTorch after model.eval()), or with operator set 14 or newer",
        )
    x, *statistics = inputs
    if len(x.shape) < 2:
        return None
    if not all(isinstance(value, Known) for value in statistics):
        # A distance from the mean may be beyond half precision where the result is not.
        narrow = x.dtype in NARROW
        return interpreter.in_single_precision(node, inputs, scope) if narrow else None
    gain, bias, mean, variance = (value.array.astype("float64") for value in statistics)
    factor = gain / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
    shape = (-1, *[1] * (len(x.shape) - 2))
    scale, shift = (
        Known(array.astype(x.dtype).reshape(shape), f"{node.name}_{what}")
        for array, what in ((factor, "scale"), (bias - mean * factor, "shift"))
    )
    write = NodeWriter(interpreter, node)
    return [write("Add", write("Mul", x, scale), shift)]


def _batch_statistics(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value]) -> list[Value]:
    """Normalized by the mean and variance of the batch itself, of which the running ones take their part."""
    x, scale, bias, *running = inputs
    write, momentum = NodeWriter(interpreter, node), attribute(node, "momentum", 0.9)
    wide = "float64" if x.dtype == "float64" else "float32"
    # A vector is of one channel.
    axes = [axis for axis in range(len(x.shape)) if axis != 1]
    shape = constant([-1, *[1] * (len(x.shape) - 2)], "int64")
    if not math.prod(x.shape[axis] for axis in axes):
        raise Obstacle("a channel has no elements, so that it has no mean", "give it a batch of at least one")

    def as_wide(value: Value) -> Value:
        return write.cast(value, wide)

    def along_channels(value: Value) -> Value:
        return write("Reshape", as_wide(value), shape)

    def mean_of(value: Value) -> Value:
        return write("ReduceMean", value, axes=axes, keepdims=1)

    rows = as_wide(x)
    mean = mean_of(rows)
    distance = write("Sub", rows, mean)
    variance = mean_of(write("Mul", distance, distance))
    deviation = write("Sqrt", write("Add", variance, constant(attribute(node, "epsilon", 1e-5), wide)))
    result = write("Mul", write("Div", distance, deviation), along_channels(scale))
    results = [write.cast(write("Add", result, along_channels(bias)), x.dtype)]
    for old, new in zip(running, (mean, variance), strict=True):
        kept = write("Mul", as_wide(old), constant(momentum, wide))
        fresh = write("Mul", write("Reshape", new, constant(list(old.shape), "int64")), constant(1 - momentum, wide))
        results.append(write.cast(write("Add", kept, fresh), old.dtype))
    return results


def _tensors_of(interpreter: Interpreter, inputs: Sequence[Value], kinds: int) -> list[tuple[Value, ...]]:
    """For each optimized tensor its value, its gradient, and what the optimizer keeps of it: `kinds` in all."""
    values = [interpreter.whole(value) for value in inputs]
    if not values or len(values) % kinds:
        raise Obstacle(
            f"it has {len(values)} tensors beside rate and count, of which each optimized one takes {kinds}",
            "give all values, then all gradients, then all of each thing that is kept",
        )
    count = len(values) // kinds
    return [tuple(values[k + part * count] for part in range(kinds)) for k in range(count)]


def _in_order(steps: Sequence[tuple[Value, ...]]) -> list[Value]:
    """All values, then all of what is kept."""
    return [value for part in zip(*steps, strict=True) for value in part]


def _regularized(write: NodeWriter, node: onnx.NodeProto, x: Value, gradient: Value) -> Value:
    factor = attribute(node, "norm_coefficient", 0.0)
    return write("Add", write("Mul", constant(factor, x.dtype), x), gradient) if factor else gradient


@special(f"{_OPTIMIZERS}::Adagrad")
def _adagrad(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    rate, count, *tensors = inputs
    write = NodeWriter(interpreter, node)

    def step(x: Value, gradient: Value, squares: Value) -> tuple[Value, Value]:
        one, decay, epsilon = (
            constant(value, x.dtype)
            for value in (1, attribute(node, "decay_factor", 0.0), attribute(node, "epsilon", 1e-6))
        )
        slower = write("Add", one, write("Mul", write.cast(count, x.dtype), decay))
        slope = _regularized(write, node, x, gradient)
        squares = write("Add", squares, write("Mul", slope, slope))
        width = write("Add", write("Sqrt", squares), epsilon)
        pace = write("Div", write.cast(rate, x.dtype), slower)
        return write("Sub", x, write("Div", write("Mul", pace, slope), width)), squares

    return _in_order([step(*group) for group in _tensors_of(interpreter, tensors, 3)])


@special(f"{_OPTIMIZERS}::Adam")
def _adam(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    rate, count, *tensors = inputs
    write = NodeWriter(interpreter, node)
    alpha, beta = attribute(node, "alpha", 0.9), attribute(node, "beta", 0.999)
    after = attribute(node, "norm_coefficient_post", 0.0)

    def moving(old: Value, new: Value, part: float) -> Value:
        kept, taken = constant(part, old.dtype), constant(1 - part, old.dtype)
        return write("Add", write("Mul", kept, old), write("Mul", taken, new))

    def step(x: Value, gradient: Value, mean: Value, squares: Value) -> tuple[Value, Value, Value]:
        one, zero, epsilon = (constant(value, x.dtype) for value in (1, 0, attribute(node, "epsilon", 1e-6)))
        slope = _regularized(write, node, x, gradient)
        mean, squares = moving(mean, slope, alpha), moving(squares, write("Mul", slope, slope), beta)
        # Both averages began with zero, which the rate makes good from the first counted step on.
        steps = write.cast(count, x.dtype)
        short = [write("Sub", one, write("Pow", constant(part, x.dtype), steps)) for part in (beta, alpha)]
        pace = write.cast(rate, x.dtype)
        longer = write("Div", write("Mul", pace, write("Sqrt", short[0])), short[1])
        pace = write("Where", write("Greater", steps, zero), longer, pace)
        width = write("Add", write("Sqrt", squares), epsilon)
        moved = write("Sub", x, write("Mul", pace, write("Div", mean, width)))
        return (write("Mul", constant(1 - after, x.dtype), moved) if after else moved), mean, squares

    return _in_order([step(*group) for group in _tensors_of(interpreter, tensors, 4)])


@special(f"{_OPTIMIZERS}::Momentum")
def _momentum(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    rate, count, *tensors = inputs
    write = NodeWriter(interpreter, node)
    alpha, beta, mode = (attribute(node, name) for name in ("alpha", "beta", "mode"))
    if mode not in (b"standard", b"nesterov"):
        raise Obstacle(f"its attribute mode is {mode!r}", "the modes are standard and nesterov")

    def step(x: Value, gradient: Value, momentum: Value) -> tuple[Value, Value]:
        first = write("Greater", write.cast(count, "int64"), constant(0, "int64"))
        share = write("Where", first, constant(beta, x.dtype), constant(1, x.dtype))
        slope = _regularized(write, node, x, gradient)
        kept = constant(alpha, x.dtype)
        momentum = write("Add", write("Mul", kept, momentum), write("Mul", share, slope))
        way = write("Add", slope, write("Mul", kept, momentum)) if mode == b"nesterov" else momentum
        return write("Sub", x, write("Mul", write.cast(rate, x.dtype), way)), momentum

    return _in_order([step(*group) for group in _tensors_of(interpreter, tensors, 3)])


@special(f"{_OPTIMIZERS}::Gradient")
def _gradient(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    raise Obstacle(
        "it stands for the derivative of other nodes, which is not worked out here",
        "write the derivative with operators (exporters of training graphs do), and take its values as an input",
    )
