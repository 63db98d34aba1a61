"""Operators that draw random numbers: drawn once, when the network is compiled, so that it computes a function.

With a ``seed`` the numbers are those of ``numpy.random.RandomState(int(seed))``, whose streams NumPy has promised never
to change, and which ONNX's reference implementation draws from, too. Without one the seed is made of the node's name.
Within a loop, a branch or a function, the name counts beside the seed, so that iterations draw other numbers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from souffle.frontend.attributes import attribute
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.refusal import Obstacle
from souffle.frontend.values import Known, Scope, Value

__all__: list[str] = []

_MOST_DRAWS = 1 << 26


def _source(node: onnx.NodeProto, scope: Scope, shape: Sequence[int]) -> np.random.RandomState:
    """Where the numbers of a node come from.

    Raises
    ------
    Obstacle
        If there are too many of them to be kept.
    """
    count = math.prod(shape)
    if count > _MOST_DRAWS:
        raise Obstacle(
            f"it draws {count} numbers, and they are kept with the weights of the network; at most {_MOST_DRAWS} are",
            "make the random numbers outside and give them as an input",
        )
    seed = attribute(node, "seed")
    name = zlib.crc32(node.name.encode())
    if seed is None or not math.isfinite(seed):
        return np.random.RandomState(name)
    number = int(seed) % 2**32
    return np.random.RandomState([number, name] if scope.prefix else number)


def _uniform(node: onnx.NodeProto, scope: Scope, shape: Sequence[int], dtype: str) -> Known:
    """Numbers from 0 up to 1, which rounding does not make one of them."""
    drawn = _source(node, scope, shape).uniform(0.0, 1.0, tuple(shape)).astype(dtype)
    below = np.nextafter(np.array(1, dtype), np.array(0, dtype))
    return Known(np.minimum(drawn, below), f"{node.name}_drawn")


def _element(node: onnx.NodeProto, default: str) -> np.dtype:
    number = attribute(node, "dtype", 0)
    return helper.tensor_dtype_to_np_dtype(number) if number else np.dtype(default)


def _shape(node: onnx.NodeProto, inputs: Sequence[Value]) -> tuple[int, ...]:
    return tuple(inputs[0].shape) if node.op_type.endswith("Like") else tuple(attribute(node, "shape"))


def _numbers(node: onnx.NodeProto, inputs: Sequence[Value]) -> np.dtype:
    """The element type of what is drawn.

    Raises
    ------
    Obstacle
        If it is not floating-point.
    """
    dtype = _element(node, inputs[0].dtype if inputs else "float32")
    if np.dtype(dtype).kind in "biuOUS":
        raise Obstacle(f"it draws numbers of type {dtype}", "give it a floating-point dtype")
    return dtype


@special("RandomNormal", "RandomNormalLike")
def _random_normal(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    shape, dtype = _shape(node, inputs), _numbers(node, inputs)
    mean, scale = (np.array(attribute(node, *default), dtype) for default in (("mean", 0.0), ("scale", 1.0)))
    drawn = _source(node, scope, shape).standard_normal(shape)
    return [Known(np.asarray(np.asarray(drawn, dtype) * scale + mean, dtype), f"{node.name}_drawn")]


@special("RandomUniform", "RandomUniformLike")
def _random_uniform(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    shape, dtype = _shape(node, inputs), _numbers(node, inputs)
    low, high = (np.array(attribute(node, *default), dtype) for default in (("low", 0.0), ("high", 1.0)))
    width = np.array(attribute(node, "high", 1.0) - attribute(node, "low", 0.0), dtype)
    drawn = np.asarray(_source(node, scope, shape).uniform(0.0, 1.0, shape), dtype) * width + low
    # The upper end is not among them.
    below = np.nextafter(high, low) if high > low else high
    return [Known(np.asarray(np.where(drawn >= high, below, drawn), dtype), f"{node.name}_drawn")]


@special("Bernoulli")
def _bernoulli(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    chance = interpreter.whole(inputs[0])
    write, wide = NodeWriter(interpreter, node), "float64" if chance.dtype == "float64" else "float32"
    happens = write("Less", _uniform(node, scope, chance.shape, wide), write.cast(chance, wide))
    return [write.cast(happens, str(_element(node, chance.dtype)))]


@special("Multinomial")
def _multinomial(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    logits, samples = interpreter.whole(inputs[0]), attribute(node, "sample_size", 1)
    batch, classes = logits.shape
    write, wide = NodeWriter(interpreter, node), "float64" if logits.dtype == "float64" else "float32"
    rows = write.cast(logits, wide)
    weights = write("Exp", write("Sub", rows, write("ReduceMax", rows, axes=[1], keepdims=1)))
    reached = write("CumSum", weights, constant(1, "int64"))
    whole = write("Slice", reached, *(constant([bound], "int64") for bound in (classes - 1, classes, 1)))
    place = write("Mul", _uniform(node, scope, (batch, samples), wide), whole)
    # A sample is of the first class that reaches its place: so many classes stay at or below it.
    place = write("Reshape", place, constant([batch, samples, 1], "int64"))
    reached = write("Reshape", reached, constant([batch, 1, classes], "int64"))
    below = write("Cast", write("LessOrEqual", reached, place), to=TensorProto.INT32)
    index = write("ReduceSum", below, constant([2], "int64"), keepdims=0)
    index = write("Min", index, constant(classes - 1, "int32"))
    return [write.cast(index, str(_element(node, "int32")))]


@special("Dropout")
def _dropout(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    x, ratio, training = [*map(interpreter.whole, inputs), None, None][:3]
    named = len(node.output) > 1 and node.output[1]
    drops = ratio is None or not isinstance(ratio, Known) or bool(ratio.array.any())
    if training is None or not drops or (isinstance(training, Known) and not training.array.any()):
        return [x, Known(np.ones(x.shape, dtype=bool), f"{node.name}_mask")] if named else [x]
    write, wide = NodeWriter(interpreter, node), "float64" if x.dtype == "float64" else "float32"
    share = constant(0.5, wide) if ratio is None else write("Reshape", ratio, constant([], "int64"))
    share = write.cast(share, "float64")
    drawn = _uniform(node, scope, x.shape, "float64")
    kept = write("GreaterOrEqual", drawn, share)
    scale = write("Reciprocal", write("Sub", constant(1.0, "float64"), share))
    factor = write("Mul", write.cast(kept, wide), write.cast(scale, wide))
    result = write.cast(write("Mul", write.cast(x, wide), factor), x.dtype)
    if not isinstance(training, Known):
        training = write("Reshape", training, constant([], "int64"))
        result = write("Where", training, result, x)
        kept = write("Or", kept, write("Not", training))
    return [result, kept] if named else [result]
