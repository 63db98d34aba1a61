"""Operators on quantized tensors: products on integers, everything else by way of the numbers that they stand for.

Those of domain ``com.microsoft`` are what ONNX Runtime's quantizer writes. A requantization multiplies the integer sum
by one factor, ``(x_scale * w_scale) / y_scale`` in single precision, and rounds half to even, as ONNX Runtime does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto

from souffle.frontend.attributes import attribute, attributes
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.refusal import Obstacle
from souffle.frontend.values import Known, Scope, Value

__all__ = [
    "CONTRIB",
    "conv_integer",
    "matmul_integer",
    "quantized_product",
    "quantized_sum",
    "requantized",
    "shifted",
    "with_channels_first",
]

CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

_BYTES = ("int8", "uint8")
Quantized = tuple[Value, Value, Value]
"""Integers, their scale, and their zero point or ``None``."""


def _present(zero: Value) -> Value:
    """A zero point; ``None`` where it is known to be zero."""
    return None if isinstance(zero, Known) and not zero.array.any() else zero


def _size(value: Value) -> int:
    return math.prod(value.shape)


def _weights(w: Value, zero: Value, shape: Sequence[int]) -> tuple[Value, Value]:
    """Weights and their zero point, in `shape`; without one where the difference is 8-bit integers itself."""
    zero = _present(zero)
    if isinstance(w, Known) and isinstance(zero, Known):
        beside = zero.array.reshape(shape if zero.array.size > 1 else ())
        difference = w.array.astype("int32") - beside.astype("int32")
        for dtype in _BYTES:
            bounds = np.iinfo(dtype)
            if difference.size and bounds.min <= difference.min() and difference.max() <= bounds.max:
                return Known(difference.astype(dtype), w.name), None
    return w, zero


def conv_integer(write: NodeWriter, x: Value, x_zero: Value, w: Value, w_zero: Value, attributes: dict) -> Value:
    """The int32 convolution of 8-bit integers, each less its zero point.

    Parameters
    ----------
    write : NodeWriter
    x, w : value
        Of int8 or uint8; (N, C, ...) and (M, C / group, ...).
    x_zero, w_zero : value
        One number, or one for each of the M channels of `w`; ``None`` for zero.
    attributes : dict
        Of ONNX's ConvInteger.
    """
    w, w_zero = _weights(w, w_zero, (-1, *[1] * (len(w.shape) - 1)))
    x_zero = _present(x_zero)
    if x_zero is not None:
        x_zero = _scalar(write, x_zero)
    if w_zero is not None and _size(w_zero) > 1 and len(w_zero.shape) != 1:
        w_zero = write("Reshape", w_zero, constant([-1], "int64"))
    return write("ConvInteger", x, w, x_zero, w_zero, **attributes)


def matmul_integer(write: NodeWriter, a: Value, a_zero: Value, b: Value, b_zero: Value) -> Value:
    """The int32 product of matrices of 8-bit integers, each less its zero point.

    Parameters
    ----------
    write : NodeWriter
    a, b : value
        Of int8 or uint8, shaped as for MatMul.
    a_zero, b_zero : value
        One number, or one for each row of `a` and each column of `b`; ``None`` for zero.
    """
    b, b_zero = _weights(b, b_zero, b_zero.shape if b_zero is not None else ())
    a_zero = _present(a_zero)
    if a_zero is not None:
        a_zero = _rows(write, a_zero) if _size(a_zero) > 1 else _scalar(write, a_zero)
    if b_zero is not None and _size(b_zero) == 1:
        b_zero = _scalar(write, b_zero)
    vectors = len(a.shape) == 1, len(b.shape) == 1
    if not any(vectors):
        return _matrices(write, a, a_zero, b, b_zero)
    if vectors[0]:
        a = write("Reshape", a, constant([1, -1], "int64"))
    if vectors[1]:
        b = write("Reshape", b, constant([-1, 1], "int64"))
    product = _matrices(write, a, a_zero, b, b_zero)
    batch = product.shape[:-2]
    kept = [extent for extent, dropped in zip(product.shape[-2:], vectors, strict=True) if not dropped]
    return write("Reshape", product, constant([*batch, *kept], "int64"))


def _matrices(write: NodeWriter, a: Value, a_zero: Value, b: Value, b_zero: Value) -> Value:
    if not a.shape[-1] and a.shape[-1] == b.shape[-2]:
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        return Known(np.zeros(shape, "int32"), f"{write.name}_empty")
    return write("MatMulInteger", a, b, a_zero, b_zero)


def _scalar(write: NodeWriter, value: Value) -> Value:
    return write("Reshape", value, constant(np.zeros(0), "int64")) if value.shape else value


def _rows(write: NodeWriter, value: Value) -> Value:
    """One number for each row, as a column."""
    return write("Reshape", value, constant([-1, 1], "int64")) if len(value.shape) == 1 and _size(value) > 1 else value


def requantized(write: NodeWriter, products: Value, factor: Value, zero: Value) -> Value:
    """``saturate(round(products * factor) + zero)``.

    Parameters
    ----------
    write : NodeWriter
    products : value
        Sums in int32.
    factor : value
        In float32; broadcasts to `products`.
    zero : value
        One number; its type is the result's.
    """
    real = write("Mul", write("Cast", products, to=TensorProto.FLOAT), factor)
    return write("QuantizeLinear", real, constant(1, "float32"), zero)


def _without(node: onnx.NodeProto, *without: str) -> dict:
    return {name: value for name, value in attributes(node).items() if name not in without}


@special("ConvInteger")
def _conv_integer(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    x, w, x_zero, w_zero = [*inputs, None, None][:4]
    plain = _is_plain(x_zero, ()) and (_is_plain(w_zero, ()) or len(w_zero.shape) == 1)
    if plain and _weights(w, w_zero, (-1, *[1] * (len(w.shape) - 1)))[0] is w:
        return None
    return [conv_integer(NodeWriter(interpreter, node), x, x_zero, w, w_zero, _without(node))]


def _is_plain(zero: Value, shape: tuple[int, ...]) -> bool:
    return zero is None or (_present(zero) is not None and zero.shape == shape)


@special("MatMulInteger")
def _matmul_integer(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    a, b, a_zero, b_zero = [*inputs, None, None][:4]
    ready = _is_plain(a_zero, ()) or (_present(a_zero) is not None and len(a_zero.shape) > 1)
    ready = ready and (_is_plain(b_zero, ()) or (_present(b_zero) is not None and _size(b_zero) > 1))
    matrices = min(len(a.shape), len(b.shape)) > 1 and a.shape[-1]
    if ready and matrices and _weights(b, b_zero, () if b_zero is None else b_zero.shape)[0] is b:
        return None
    return [matmul_integer(NodeWriter(interpreter, node), a, a_zero, b, b_zero)]


@special("QLinearConv")
@special("QLinearConv", domain=CONTRIB)
def _q_linear_conv(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = [*inputs, None][:9]
    write, rank = NodeWriter(interpreter, node), len(x.shape)
    last = bool(attribute(node, "channels_last", 0))
    if last:
        x = write("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)])
    products = conv_integer(write, x, x_zero, w, w_zero, _without(node, "channels_last"))
    channels = constant([-1, *[1] * (rank - 2)], "int64")
    if bias is not None:
        products = write("Add", products, write("Reshape", bias, channels))
    factor = write("Div", write("Mul", x_scale, w_scale), y_scale)
    if _size(factor) > 1:
        factor = write("Reshape", factor, channels)
    result = requantized(write, products, factor, y_zero)
    return [write("Transpose", result, perm=[0, *range(2, rank), 1]) if last else result]


@special("QLinearMatMul")
def _q_linear_matmul(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = inputs
    write = NodeWriter(interpreter, node)
    if a.dtype not in _BYTES or b.dtype not in _BYTES:
        # Other types than ONNX Runtime's: their definition is in real numbers.
        real = [write("DequantizeLinear", *given) for given in ((a, a_scale, a_zero), (b, b_scale, b_zero))]
        return [write("QuantizeLinear", write("MatMul", *real), y_scale, y_zero)]
    a_scale, b_scale, y_scale = (write.cast(scale, "float32") for scale in (a_scale, b_scale, y_scale))
    products = matmul_integer(write, a, a_zero, b, b_zero)
    factor = write("Div", write("Mul", _rows(write, a_scale), b_scale), _rows(write, y_scale))
    if _size(y_zero) == 1:
        return [requantized(write, products, factor, _scalar(write, y_zero))]
    axis = len(products.shape) - 2
    real = write("Mul", write("Cast", products, to=TensorProto.FLOAT), factor)
    ones = constant(np.ones(_size(y_zero)), "float32")
    return [write("QuantizeLinear", real, ones, write("Reshape", y_zero, constant([-1], "int64")), axis=axis)]


@special("QGemm", domain=CONTRIB)
def _q_gemm(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    a, a_scale, a_zero, b, b_scale, b_zero, bias, y_scale, y_zero = [*inputs, None, None, None][:9]
    write = NodeWriter(interpreter, node)
    if attribute(node, "transA", 0):
        a = write("Transpose", a, perm=[1, 0])
    if attribute(node, "transB", 0):
        b = write("Transpose", b, perm=[1, 0])
    products = matmul_integer(write, a, a_zero, b, b_zero)
    if bias is not None:
        products = write("Add", products, bias)
    alpha = constant(attribute(node, "alpha", 1.0), "float32")
    factor = write("Mul", write("Mul", alpha, a_scale), b_scale)
    if y_scale is None:
        return [write("Mul", write("Cast", products, to=TensorProto.FLOAT), factor)]
    zero = constant(0, a.dtype) if y_zero is None else _scalar(write, y_zero)
    return [requantized(write, products, write("Div", factor, y_scale), zero)]


def _scaled_product(
    write: NodeWriter, a: Value, a_zero: Value, b: Value, b_zero: Value, factor: Value, bias: Value
) -> Value:
    products = matmul_integer(write, a, a_zero, b, b_zero)
    real = write("Mul", write("Cast", products, to=TensorProto.FLOAT), factor)
    return real if bias is None else write("Add", real, bias)


@special("MatMulIntegerToFloat", domain=CONTRIB)
def _matmul_integer_to_float(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    a, b, a_scale, b_scale, a_zero, b_zero, bias = [*inputs, None, None, None][:7]
    write = NodeWriter(interpreter, node)
    kind = a_scale.dtype
    a_scale, b_scale = (write.cast(scale, "float32") for scale in (a_scale, b_scale))
    wide = None if bias is None else write.cast(bias, "float32")
    factor = write("Mul", _rows(write, a_scale), b_scale)
    result = _scaled_product(write, a, a_zero, b, b_zero, factor, wide)
    return [write.cast(result, kind)]


@special("DynamicQuantizeMatMul", domain=CONTRIB)
def _dynamic_quantize_matmul(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    a, b, b_scale, b_zero, bias = [*inputs, None, None][:5]
    write = NodeWriter(interpreter, node)
    quantized, scale, zero = interpreter.emit("DynamicQuantizeLinear", [a], f"{node.name}/quantize", outputs=3)
    return [_scaled_product(write, quantized, zero, b, b_zero, write("Mul", scale, b_scale), bias)]


def _real(write: NodeWriter, x: Value, scale: Value, zero: Value) -> Value:
    zero = None if zero is None else _scalar(write, zero)
    return write("DequantizeLinear", x, _scalar(write, scale), zero)


def _rounded(write: NodeWriter, x: Value, scale: Value, zero: Value, dtype: str) -> Value:
    zero = constant(0, dtype) if zero is None else _scalar(write, zero)
    return write("QuantizeLinear", x, _scalar(write, scale), zero)


@special("QLinearAdd", "QLinearMul", domain=CONTRIB)
def _q_linear_binary(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    a, a_scale, a_zero, b, b_scale, b_zero, c_scale, c_zero = [*inputs, None][:8]
    write = NodeWriter(interpreter, node)
    combined = quantized_sum if node.op_type == "QLinearAdd" else quantized_product
    zero = constant(0, a.dtype) if c_zero is None else c_zero
    return [combined(write, (a, a_scale, a_zero), (b, b_scale, b_zero), c_scale, zero)]


def quantized_sum(write: NodeWriter, a: Quantized, b: Quantized, scale: Value, zero: Value) -> Value:
    """``a + b``, quantized by `scale` and `zero`.

    In ONNX Runtime's order: ``round(a * ra + (b * rb + (zero - (ra * za + rb * zb))))`` with the ratios ``ra`` and
    ``rb`` of scales, and one rounding for a product and the addition behind it. Where a sum is halfway between two
    integers another order gives the other one.
    """
    (x, x_scale, x_zero), (y, y_scale, y_zero) = a, b
    scale, point = _scalar(write, scale), _scalar(write, zero)
    x_ratio, y_ratio = (write("Div", _scalar(write, own), scale) for own in (x_scale, y_scale))
    x_zero, y_zero = (constant(0, "int32") if own is None else _scalar(write, own) for own in (x_zero, y_zero))
    shares = _multiply_add(write, x_zero, x_ratio, write("Mul", y_ratio, write.cast(y_zero, "float32")))
    shift = write("Sub", write.cast(point, "float32"), shares)
    behind = _multiply_add(write, y, y_ratio, shift)
    return _saturated(write, _multiply_add(write, x, x_ratio, behind), zero.dtype)


def _multiply_add(write: NodeWriter, integers: Value, factor: Value, term: Value) -> Value:
    """``integers * factor + term`` in single precision, rounded once: in double precision the product of a byte and a
    number of single precision is exact."""
    wide = [write("Cast", value, to=TensorProto.DOUBLE) for value in (integers, factor, term)]
    return write.cast(write("Add", write("Mul", *wide[:2]), wide[2]), "float32")


def quantized_product(write: NodeWriter, a: Quantized, b: Quantized, scale: Value, zero: Value) -> Value:
    """``a * b``, quantized by `scale` and `zero`: the product of the integers is exact."""
    integers = []
    for x, _, own in (a, b):
        wide = write("Cast", x, to=TensorProto.INT32)
        own = None if own is None else write("Cast", _scalar(write, own), to=TensorProto.INT32)
        integers.append(wide if own is None else write("Sub", wide, own))
    scales = [_scalar(write, value) for value in (a[1], b[1], scale)]
    factor = write("Div", write("Mul", *scales[:2]), scales[2])
    real = write("Mul", write.cast(write("Mul", *integers), "float32"), factor)
    return _saturated(write, write("Add", real, write.cast(_scalar(write, zero), "float32")), zero.dtype)


def shifted(write: NodeWriter, x: Value, scale: Value, zero: Value) -> Value:
    """``saturate(round(x / scale + zero))``, which is another integer than a rounded quotient and `zero` where the
    quotient is halfway between two and `zero` is odd: ONNX Runtime's average pooling has it so."""
    point = _scalar(write, zero)
    real = write("Add", write("Div", x, _scalar(write, scale)), write.cast(point, "float32"))
    return _saturated(write, real, zero.dtype)


def _saturated(write: NodeWriter, real: Value, dtype: str) -> Value:
    """The nearest integer of a type, the even one of two."""
    return write("QuantizeLinear", real, constant(1, "float32"), constant(0, dtype))


@special(
    *("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearReduceMean"),
    "QLinearAveragePool",
    domain=CONTRIB,
)
def _q_linear_unary(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    x, x_scale, x_zero, y_scale, y_zero = [*inputs, None][:5]
    write, operator = NodeWriter(interpreter, node), node.op_type.removeprefix("QLinear")
    attributes = _without(node, "channels_last", "opset")
    if operator == "Softmax":
        attributes.setdefault("axis", -1)

    def computed(image: Value) -> Value:
        if operator == "Softmax" and attribute(node, "opset") < 13:
            return _softmax_of_rest(write, image, attributes["axis"])
        return write(operator, image, **attributes)

    real = _real(write, x, x_scale, x_zero)
    if attribute(node, "channels_last", 0):
        result = with_channels_first(write, real, computed)
    else:
        result = computed(real)
    if operator == "AveragePool":
        return [shifted(write, result, y_scale, constant(0, x.dtype) if y_zero is None else y_zero)]
    return [_rounded(write, result, y_scale, y_zero, x.dtype)]


@special("QLinearGlobalAveragePool", domain=CONTRIB)
def _q_linear_global_average_pool(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    x, x_scale, x_zero, y_scale, y_zero = inputs
    write, rank = NodeWriter(interpreter, node), len(x.shape)
    last = bool(attribute(node, "channels_last", 0))
    axes = list(range(1, rank - 1) if last else range(2, rank))
    count = math.prod(x.shape[axis] for axis in axes)
    # The sum is one of integers, and exact; as in ONNX Runtime the count is part of the factor.
    wide = write("Sub", *(write("Cast", value, to=TensorProto.INT32) for value in (x, _scalar(write, x_zero))))
    total = write("ReduceSum", wide, constant(axes, "int64"), keepdims=1)
    factor = write("Div", x_scale, write("Mul", y_scale, constant(count, "float32")))
    return [requantized(write, total, _scalar(write, factor), _scalar(write, y_zero))]


def _softmax_of_rest(write: NodeWriter, x: Value, axis: int) -> Value:
    """Softmax as before operator set 13: over all elements from `axis` on."""
    axis = axis + len(x.shape) if axis < 0 else axis
    rows = write("Reshape", x, constant([math.prod(x.shape[:axis]), -1], "int64"))
    return write("Reshape", write("Softmax", rows, axis=-1), constant(list(x.shape), "int64"))


def with_channels_first(write: NodeWriter, x: Value, operator) -> Value:
    """An operator on images, of an image with its channels last."""
    rank = len(x.shape)
    result = operator(write("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)]))
    return write("Transpose", result, perm=[0, *range(2, rank), 1])


@special("QLinearConcat", domain=CONTRIB)
def _q_linear_concat(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    y_scale, y_zero, *rest = inputs
    if len(rest) % 3:
        raise Obstacle("its inputs are not a tensor, a scale and a zero point each", "give three for each part")
    write = NodeWriter(interpreter, node)
    parts = [
        _moved(write, x, scale, zero, y_scale, y_zero)
        for x, scale, zero in (rest[k : k + 3] for k in range(0, len(rest), 3))
    ]
    return [write("Concat", *parts, axis=attribute(node, "axis"))]


def _equal(one: Value, other: Value) -> bool:
    known = isinstance(one, Known) and isinstance(other, Known)
    return known and one.array.size == other.array.size == 1 and one.array.item() == other.array.item()


def _moved(write: NodeWriter, x: Value, scale: Value, zero: Value, y_scale: Value, y_zero: Value) -> Value:
    """`x` in the quantization of the result."""
    pairs = ((scale, y_scale), (zero, y_zero))
    if x.dtype == y_zero.dtype and all(_equal(*pair) for pair in pairs):
        return x
    return _rounded(write, _real(write, x, scale, zero), y_scale, y_zero, x.dtype)


@special("QLinearWhere", domain=CONTRIB)
def _q_linear_where(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    condition, x, x_scale, x_zero, y, y_scale, y_zero, z_scale, z_zero = inputs
    write = NodeWriter(interpreter, node)
    parts = (
        _moved(write, value, scale, zero, z_scale, z_zero)
        for value, scale, zero in ((x, x_scale, x_zero), (y, y_scale, y_zero))
    )
    return [write("Where", condition, *parts)]


@special("QuantizeLinear", "DequantizeLinear", domain=CONTRIB)
def _of_domain(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    # ONNX's own operator of operator set 21 has the types that these two were made for.
    x, scale, zero = [*inputs, None][:3]
    write, axis = NodeWriter(interpreter, node), attribute(node, "axis", 1)
    if _size(scale) == 1:
        scale, zero = _scalar(write, scale), None if zero is None else _scalar(write, zero)
    return interpreter.emit(node.op_type, [x, scale, zero], f"{node.name}/{node.op_type}", axis=axis)


@special("DynamicQuantizeLSTM", domain=CONTRIB)
def _dynamic_quantize_lstm(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    raise Obstacle(
        "it quantizes the state of every step anew, which has no tensor expression here",
        "leave LSTM out of the operators to quantize (quantize_dynamic's op_types_to_quantize or nodes_to_exclude)",
    )
