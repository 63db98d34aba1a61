"""Products of numbers that were quantized, on the integers that they were computed from.

Quantized networks write ``DequantizeLinear`` before an operator and ``QuantizeLinear`` behind it. Here

::

    sum((x - zx) * sx * ((w - zw) * sw))   →   sum((x - zx) * (w - zw)) * (sx * sw)

where the scales are constants, that of the image one number and that of the weights one for each output at most. In
real numbers both are equal; the right one is rounded once, and the left one with every term. What follows reads it as
before: a bias, an activation and the quantization of the result become the end of the same tensor expression later. A
quantization right behind it rounds ``sum * ((sx * sw) / sy)``, which is how ONNX Runtime computes the same three nodes.

Operators that only move elements do so with the integers, and so does a maximum: ``max(x) * s = max(x * s)`` for s > 0.
Then ``Q(DQ(x)) = x`` where both have one scale and one zero point: a quotient ``(x - z) * s / s`` is an integer but for
two roundings, which are far smaller than a half for the integers of 8 bits.

A value is known by what it was computed from (:class:`souffle.frontend.values.QuantizedValues`), and no pattern of
nodes is looked for. A ``DequantizeLinear`` that nothing else reads is left out of the program in the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from souffle.frontend.attributes import attribute, attributes
from souffle.frontend.interpreter import Interpreter, on_integers
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.quantized import (
    conv_integer,
    matmul_integer,
    quantized_product,
    quantized_sum,
    requantized,
    shifted,
)
from souffle.frontend.values import Dequantized, IntegerSum, Known, Scope, Value
from souffle.program import Tensor

__all__: list[str] = []

_BYTES = ("int8", "uint8")
# Scales whose products and quotients are neither zero nor infinite nor less exact than others.
_SMALLEST, _LARGEST = 1e-18, 1e18
_Results = Sequence[Value] | None


@on_integers("DequantizeLinear")
def _dequantize(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    x, scale, zero = [*inputs, None][:3]
    results = interpreter.standard(node, inputs, scope)
    origin = _origin(node, x, scale, zero)
    if origin is not None and results[0].dtype == "float32":
        interpreter.quantized.dequantized[results[0]] = origin
    return results


def _origin(node: onnx.NodeProto, x: Value, scale: Value, zero: Value) -> Dequantized | None:
    if not isinstance(x, (Known, Tensor)) or x.dtype not in (*_BYTES, "int32") or attribute(node, "block_size", 0):
        return None
    if not isinstance(scale, Known) or scale.dtype != "float32" or not (zero is None or isinstance(zero, Known)):
        return None
    if not ((scale.array > _SMALLEST) & (scale.array < _LARGEST)).all() or not scale.array.size:
        return None
    zero = zero if zero is not None and zero.array.any() else None
    if scale.array.size == 1 and (zero is None or zero.array.size == 1):
        flat = Known(scale.array.reshape(()), scale.name)
        return Dequantized(x, flat, None if zero is None else Known(zero.array.reshape(()), zero.name))
    axis, rank = attribute(node, "axis", 1), len(x.shape)
    axis = axis + rank if axis < 0 else axis
    if len(scale.shape) != 1 or axis >= rank or scale.shape[0] != x.shape[axis]:
        return None
    return Dequantized(x, scale, zero, axis)


def _integers(interpreter: Interpreter, value: Value, axes: Sequence[int | None] = (None,)) -> Dequantized | None:
    """What `value` was computed from, where that is 8-bit integers with scales on one of `axes`."""
    origin = interpreter.quantized.dequantized.get(value) if isinstance(value, (Known, Tensor)) else None
    return origin if origin is not None and origin.integers.dtype in _BYTES and origin.axis in axes else None


def _product(
    interpreter: Interpreter, write: NodeWriter, sums: Value, scale: np.ndarray, bias: Value, axis: int
) -> list[Value]:
    """``sums * scale + bias``, where scales and bias are of the positions on `axis`, counted from the end."""
    extent = sums.shape[axis] if sums.shape else 1
    along = (extent, *[1] * (-axis - 1))
    if scale.size > 1:
        scale = scale.reshape(along)
    known = Known(scale, f"{write.name}_scale")
    if bias is not None:
        origin = interpreter.quantized.dequantized.get(bias)
        if origin is not None and _of_sums(origin, scale.reshape(-1)):
            sums, bias = write("Add", sums, _along(write, origin.integers, along)), None
    result = write("Mul", write("Cast", sums, to=TensorProto.FLOAT), known)
    if bias is None:
        interpreter.quantized.sums[result] = IntegerSum(sums, known)
        return [result]
    return [write("Add", result, _along(write, bias, along))]


def _along(write: NodeWriter, bias: Value, shape: Sequence[int]) -> Value:
    return write("Reshape", bias, constant(list(shape), "int64")) if len(bias.shape) == 1 else bias


def _of_sums(origin: Dequantized, scale: np.ndarray) -> bool:
    """Whether a bias counts in units of the sums themselves."""
    integers = origin.integers
    if integers.dtype != "int32" or origin.zero is not None or len(integers.shape) != 1:
        return False
    return bool(np.allclose(origin.scale.array.reshape(-1), scale, rtol=1e-5, atol=0))


@on_integers("Conv")
def _conv(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    x, w = _integers(interpreter, inputs[0]), _integers(interpreter, inputs[1], (None, 0))
    if x is None or w is None:
        return None
    write, bias = NodeWriter(interpreter, node), inputs[2] if len(inputs) > 2 else None
    sums = conv_integer(write, x.integers, x.zero, w.integers, w.zero, attributes(node))
    scale = x.scale.array * w.scale.array
    return _product(interpreter, write, sums, scale, bias, 1 - len(x.integers.shape))


@on_integers("MatMul")
def _matmul(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    if min(len(value.shape) for value in inputs) < 1:
        return None
    rank = len(inputs[1].shape)
    a, b = _integers(interpreter, inputs[0]), _integers(interpreter, inputs[1], (None, rank - 1 if rank > 1 else None))
    if a is None or b is None:
        return None
    write = NodeWriter(interpreter, node)
    sums = matmul_integer(write, a.integers, a.zero, b.integers, b.zero)
    return _product(interpreter, write, sums, a.scale.array * b.scale.array, None, -1)


@on_integers("Gemm")
def _gemm(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    transposed = attribute(node, "transB", 0)
    a, b = _integers(interpreter, inputs[0]), _integers(interpreter, inputs[1], (None, 0 if transposed else 1))
    if a is None or b is None or min(len(value.shape) for value in inputs[:2]) < 2:
        return None
    write, bias = NodeWriter(interpreter, node), inputs[2] if len(inputs) > 2 else None
    left, right = a.integers, b.integers
    if attribute(node, "transA", 0):
        left = write("Transpose", left, perm=[1, 0])
    if transposed:
        right = write("Transpose", right, perm=[1, 0])
    beta = attribute(node, "beta", 1.0)
    if bias is not None and beta != 1.0:
        bias = write("Mul", bias, constant(beta, bias.dtype))
    sums = matmul_integer(write, left, a.zero, right, b.zero)
    scale = np.float32(attribute(node, "alpha", 1.0)) * a.scale.array * b.scale.array
    return _product(interpreter, write, sums, scale, bias, -1)


@on_integers("Add", "Mul")
def _binary(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    a, b = (_integers(interpreter, value) for value in inputs)
    if a is None or b is None:
        return None
    results = interpreter.standard(node, inputs, scope)
    interpreter.quantized.pairs[results[0]] = (node.op_type, a, b)
    return results


@on_integers("AveragePool")
def _average_pool(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    if _integers(interpreter, inputs[0]) is None:
        return None
    results = interpreter.standard(node, inputs, scope)
    interpreter.quantized.averages.add(results[0])
    return results


@on_integers("GlobalAveragePool")
def _global_average(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    x = _integers(interpreter, inputs[0])
    count = math.prod(inputs[0].shape[2:])
    if x is None or len(inputs[0].shape) < 3 or count * 255 >= 2**31:
        return None
    write, axes = NodeWriter(interpreter, node), list(range(2, len(inputs[0].shape)))
    wide = write("Cast", x.integers, to=TensorProto.INT32)
    if x.zero is not None:
        wide = write("Sub", wide, write("Cast", x.zero, to=TensorProto.INT32))
    total = write("ReduceSum", wide, constant(axes, "int64"), keepdims=1)
    return _product(interpreter, write, total, x.scale.array / np.float32(count), None, -1)


@on_integers("Relu")
def _relu(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    origin = interpreter.quantized.sums.get(inputs[0]) if isinstance(inputs[0], (Known, Tensor)) else None
    if origin is None:
        return None
    results = interpreter.standard(node, inputs, scope)
    interpreter.quantized.sums[results[0]] = replace(origin, rectified=True)
    return results


@on_integers("QuantizeLinear")
def _quantize(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    x, scale, zero = [*inputs, None][:3]
    if not isinstance(x, (Known, Tensor)) or not isinstance(scale, Known) or scale.array.size != 1:
        return None
    dtype = _target_type(node, zero)
    if not (zero is None or (isinstance(zero, Known) and zero.array.size == 1)) or dtype not in _BYTES:
        return None
    point = constant(0, dtype) if zero is None else Known(zero.array.reshape(()), zero.name)
    origin = interpreter.quantized.dequantized.get(x)
    if origin is not None and _same_quantization(origin, scale, point):
        return [origin.integers]
    write = NodeWriter(interpreter, node)
    pair = interpreter.quantized.pairs.get(x)
    if pair is not None and scale.dtype == "float32" and all(side.integers.dtype == dtype for side in pair[1:]):
        operator, *sides = pair
        combined = quantized_sum if operator == "Add" else quantized_product
        return [combined(write, *((side.integers, side.scale, side.zero) for side in sides), scale, point)]
    if x in interpreter.quantized.averages and scale.dtype == "float32":
        return [shifted(write, x, scale, point)]
    sums = interpreter.quantized.sums.get(x)
    if sums is None or scale.dtype != "float32" or not _SMALLEST < scale.array.item() < _LARGEST:
        return None
    if sums.rectified and point.array.item() != np.iinfo(dtype).min:
        return None
    factor = Known(sums.scale.array / scale.array.reshape(()), f"{node.name}_factor")
    return [requantized(write, sums.sums, factor, point)]


def _target_type(node: onnx.NodeProto, zero: Value) -> str:
    if zero is not None:
        return zero.dtype
    element = attribute(node, "output_dtype", 0)
    return str(helper.tensor_dtype_to_np_dtype(element)) if element else "uint8"


def _same_quantization(origin: Dequantized, scale: Known, zero: Known) -> bool:
    if origin.axis is not None or origin.integers.dtype != zero.dtype:
        return False
    own = 0 if origin.zero is None else origin.zero.array.item()
    return own == zero.array.item() and origin.scale.array.item() == scale.array.item()


@on_integers(
    *("Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
    *("DepthToSpace", "MaxPool", "SpaceToDepth", "Split"),
)
def _moved(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    origin = _integers(interpreter, inputs[0])
    if origin is None or (node.op_type == "MaxPool" and any(list(node.output)[1:])):
        if node.op_type == "Transpose":
            return _transposed_weights(interpreter, node, inputs, scope)
        return None
    return _again(interpreter, node, origin, interpreter.standard(node, [origin.integers, *inputs[1:]], scope))


def _transposed_weights(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> _Results:
    value = inputs[0]
    origin = interpreter.quantized.dequantized.get(value) if isinstance(value, (Known, Tensor)) else None
    if origin is None or origin.axis is None:
        return None
    order = list(attribute(node, "perm", range(len(value.shape))[::-1]))
    origin = replace(origin, axis=order.index(origin.axis))
    moved = interpreter.standard(node, [interpreter.quantized.dequantized[value].integers], scope)
    return _again(interpreter, node, origin, moved)


@on_integers("Concat")
def _concat(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    origins = [_integers(interpreter, value) for value in inputs]
    first = origins[0]
    if first is None or any(origin is None for origin in origins):
        return None
    zero = constant(0, first.integers.dtype) if first.zero is None else first.zero
    if not all(_same_quantization(origin, first.scale, zero) for origin in origins):
        return None
    return _again(interpreter, node, first, interpreter.standard(node, [o.integers for o in origins], scope))


def _again(interpreter: Interpreter, node: onnx.NodeProto, origin: Dequantized, moved: Sequence[Value]) -> list[Value]:
    """The numbers that integers stand for, once they have been moved."""
    write = NodeWriter(interpreter, node)
    options = {} if origin.axis is None else {"axis": origin.axis}
    results: list[Value] = []
    for integers in moved:
        value = write("DequantizeLinear", integers, origin.scale, origin.zero, **options)
        interpreter.quantized.dequantized[value] = replace(origin, integers=integers)
        results.append(value)
    return results
