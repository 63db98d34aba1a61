"""Operators of domain ``com.microsoft`` that ONNX Runtime's optimizer writes, by ONNX's own operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx

from souffle.frontend.accumulation import NARROW
from souffle.frontend.attributes import attribute, attributes
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.normalization import normalized_rows
from souffle.frontend.quantized import CONTRIB, with_channels_first
from souffle.frontend.refusal import Obstacle
from souffle.frontend.values import Known, Scope, Value

__all__ = ["in_single_precision"]

_Results = Sequence[Value] | None


def in_single_precision(write: NodeWriter, values: Sequence[Value]) -> list[Value]:
    """`values` with those of 16-bit floating-point numbers converted to 32 bits."""
    return [write.cast(v, "float32") if v is not None and v.dtype in NARROW else v for v in values]


def _only(node: onnx.NodeProto, *names: str) -> dict:
    return {name: value for name, value in attributes(node).items() if name in names}


# Products


@special("FusedMatMul", "TransposeMatMul", domain=CONTRIB)
def _fused_matmul(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    return [_transposed_product(NodeWriter(interpreter, node), node, inputs)]


@special("FusedMatMulActivation", domain=CONTRIB)
def _fused_matmul_activation(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> _Results:
    write = NodeWriter(interpreter, node)
    parameters = [attribute(node, f"activation_{name}") for name in ("alpha", "beta", "gamma")]
    return [_activated(write, node, _transposed_product(write, node, inputs), parameters)]


def _transposed_product(write: NodeWriter, node: onnx.NodeProto, inputs: Sequence[Value]) -> Value:
    sides = []
    for value, name in zip(inputs[:2], "AB", strict=True):
        rank = len(value.shape)
        order = list(range(rank))
        if attribute(node, f"transBatch{name}", 0) and rank > 2:
            # The first axis stands behind those of the batch.
            order = [*order[1:-1], order[0], order[-1]]
        if attribute(node, f"trans{name}", 0) and rank > 1:
            order[-2:] = order[:-3:-1]
        sides.append(value if order == sorted(order) else write("Transpose", value, perm=order))
    product, alpha = write("MatMul", *sides), attribute(node, "alpha", 1.0)
    return product if alpha == 1.0 else write("Mul", product, constant(alpha, product.dtype))


_PARAMETERS = {
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "Softplus": (),
    "LeakyRelu": ("alpha",),
    "Elu": ("alpha",),
    "ThresholdedRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Selu": ("alpha", "gamma"),
    "HardSwish": (),
    "Softmax": (),
    "Gelu": (),
}


def _activated(write: NodeWriter, node: onnx.NodeProto, value: Value, parameters: Sequence[float | None]) -> Value:
    """`value` through the activation that `node` names; its parameters are in the order alpha, beta, gamma."""
    name = attribute(node, "activation", b"").decode()
    given = [number for number in parameters if number is not None]
    if name in ("", "Identity"):
        return value
    if name == "Clip" and len(given) == 2:
        return write("Clip", value, *(constant(number, value.dtype) for number in given))
    if name == "QuickGelu":
        return _quick_gelu(write, value, given[0] if given else 1.702)
    if name not in _PARAMETERS:
        raise Obstacle(f"its activation {name} is not known", f"those known are {', '.join(sorted(_PARAMETERS))}")
    if name == "Gelu":
        return _gelu(write, value)
    return write(name, value, **dict(zip(_PARAMETERS[name], given, strict=False)))


@special("FusedGemm", domain=CONTRIB)
def _fused_gemm(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    write = NodeWriter(interpreter, node)
    product = write("Gemm", *inputs, **_only(node, "alpha", "beta", "transA", "transB"))
    parameters = [attribute(node, f"activation_{name}") for name in ("alpha", "beta", "gamma")]
    return [_activated(write, node, product, parameters)]


_CONVOLUTION = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


@special("FusedConv", "NhwcFusedConv", "NhwcConv", domain=CONTRIB)
def _fused_conv(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    x, w, bias, added = [*inputs, None, None][:4]
    write = NodeWriter(interpreter, node)
    last = node.op_type.startswith("Nhwc")

    def convolved(image: Value) -> Value:
        filters = with_channels_first_alone(write, w) if node.op_type == "NhwcConv" else w
        return write("Conv", image, filters, bias, **_only(node, *_CONVOLUTION))

    result = with_channels_first(write, x, convolved) if last else convolved(x)
    if added is not None:
        result = write("Add", result, added)
    return [_activated(write, node, result, attribute(node, "activation_params", []))]


def with_channels_first_alone(write: NodeWriter, w: Value) -> Value:
    """Filters with their channels second, of such with them last."""
    rank = len(w.shape)
    return write("Transpose", w, perm=[0, rank - 1, *range(1, rank - 1)])


@special("NhwcMaxPool", domain=CONTRIB)
def _nhwc_max_pool(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    write = NodeWriter(interpreter, node)
    own = _only(node, "auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
    return [with_channels_first(write, inputs[0], lambda image: write("MaxPool", image, **own))]


@special("MatMulNBits", domain=CONTRIB)
def _matmul_n_bits(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    a, b, scales, zeros, groups, bias = [*inputs, None, None, None][:6]
    bits, size = attribute(node, "bits", 4), attribute(node, "block_size")
    inner, columns = attribute(node, "K"), attribute(node, "N")
    if attribute(node, "weight_prepacked", 0):
        raise Obstacle("its weights are packed for one GPU", "give the weights as the quantizer writes them")
    if bits not in (2, 4, 8):
        raise Obstacle(f"its weights have {bits} bits", "2, 4 and 8 are supported")
    write, blocks = NodeWriter(interpreter, node), -(-inner // size)
    weights = _unpacked(write, write("Reshape", b, constant([columns, -1], "int64")), bits, blocks * size)
    scales = write("Reshape", scales, constant([columns, blocks], "int64"))
    if zeros is None:
        offsets: Value = constant(1 << (bits - 1), a.dtype)
    elif zeros.dtype == "uint8":
        packed = write("Reshape", zeros, constant([columns, -1], "int64"))
        offsets = write.cast(_unpacked(write, packed, bits, blocks), a.dtype)
    else:
        offsets = write("Reshape", zeros, constant([columns, blocks], "int64"))
    real = write.cast(weights, a.dtype)
    if groups is not None:
        # Which block a row of weights belongs to is given.
        if math.prod(groups.shape) not in (inner, blocks * size):
            raise Obstacle(f"its input g_idx has {math.prod(groups.shape)} elements", f"give it {inner}")
        real = write("Slice", real, *(constant([k], "int64") for k in (0, inner, 1)))
        chosen = [write("Gather", scales, groups, axis=1)]
        chosen.append(write("Gather", offsets, groups, axis=1) if offsets.shape else offsets)
        real = write("Mul", write("Sub", real, chosen[1]), chosen[0])
    else:
        real = write("Reshape", real, constant([columns, blocks, size], "int64"))
        along = constant([columns, blocks, 1], "int64")
        offsets = write("Reshape", offsets, along) if offsets.shape else offsets
        real = write("Mul", write("Sub", real, offsets), write("Reshape", scales, along))
        real = write("Reshape", real, constant([columns, blocks * size], "int64"))
        if blocks * size != inner:
            real = write("Slice", real, *(constant([k], "int64") for k in (0, inner, 1)))
    product = write("MatMul", a, write("Transpose", real, perm=[1, 0]))
    return [product if bias is None else write("Add", product, bias)]


def _unpacked(write: NodeWriter, packed: Value, bits: int, count: int) -> Value:
    """The first `count` numbers of each row of bytes, which hold their numbers from the lowest bits on."""
    if bits == 8:
        return packed if packed.shape[1] == count else write("Slice", packed, *_first(count))
    rows, each = packed.shape[0], 8 // bits
    shifts = constant(np.arange(each) * bits, "uint8")
    apart = write("Unsqueeze", packed, constant([2], "int64"))
    # By division: a byte's parts are below 2**bits then.
    parts = write("BitShift", apart, shifts, direction="RIGHT")
    parts = write("Mod", parts, constant(1 << bits, "uint8"))
    flat = write("Reshape", parts, constant([rows, packed.shape[1] * each], "int64"))
    return flat if packed.shape[1] * each == count else write("Slice", flat, *_first(count))


def _first(count: int) -> list[Known]:
    return [constant([k], "int64") for k in (0, count, 1)]


# Normalizations


def _layer_normalized(
    write: NodeWriter, x: Value, scale: Value, bias: Value, epsilon: float, *, centred: bool = True, axis: int = -1
) -> tuple[Value, Value | None, Value]:
    """As :func:`normalized_rows`, scaled and with a bias where there is one."""
    rows, mean, inverse = normalized_rows(write, x, epsilon, centred=centred, axis=axis)
    result = write("Mul", rows, write.cast(scale, rows.dtype))
    if bias is not None:
        result = write("Add", result, write.cast(bias, rows.dtype))
    return result, mean, inverse


@special("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=CONTRIB)
def _skip_layer_normalization(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> _Results:
    centred = node.op_type == "SkipLayerNormalization"
    write, dtype = NodeWriter(interpreter, node), inputs[0].dtype
    x, skip, gamma, *rest = in_single_precision(write, inputs)
    beta, bias = [*rest, None, None][:2] if centred else (None, rest[0] if rest else None)
    if len(skip.shape) < len(x.shape) or skip.shape[0] != x.shape[0]:
        skip = write("Reshape", skip, constant([1, *skip.shape[-2:]], "int64"))
    total = write("Add", x, skip)
    total = total if bias is None else write("Add", total, bias)
    epsilon = attribute(node, "epsilon", 1e-12 if centred else 1e-5)
    result, mean, inverse = _layer_normalized(write, total, gamma, beta, epsilon, centred=centred)
    return [write.cast(result, dtype), mean, inverse, write.cast(total, dtype)]


@special("SimplifiedLayerNormalization")
@special("SimplifiedLayerNormalization", domain=CONTRIB)
def _simplified_layer_normalization(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> _Results:
    write, (x, scale) = NodeWriter(interpreter, node), inputs
    epsilon, axis = attribute(node, "epsilon", 1e-5), attribute(node, "axis", -1)
    result, _, inverse = _layer_normalized(write, x, scale, None, epsilon, centred=False, axis=axis)
    return [write.cast(result, scale.dtype), inverse]


@special("LayerNormalization", domain=CONTRIB)
def _layer_normalization(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> _Results:
    own = _only(node, "axis", "epsilon", "stash_type")
    outputs = len(node.output)
    return interpreter.emit(
        "LayerNormalization", list(inputs), f"{node.name}/LayerNormalization", outputs=outputs, **own
    )


@special("GroupNorm", "SkipGroupNorm", domain=CONTRIB)
def _group_norm(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    x, gamma, beta, skip, bias = [*inputs, None, None][:5]
    write, dtype, rank = NodeWriter(interpreter, node), x.dtype, len(x.shape)
    last = bool(attribute(node, "channels_last", 1))
    x, gamma, beta, skip, bias = in_single_precision(write, (x, gamma, beta, skip, bias))
    first = [0, rank - 1, *range(1, rank - 1)]
    channels = x.shape[-1 if last else 1]
    along = [channels] if last else [channels, *[1] * (rank - 2)]
    if skip is not None:
        if len(skip.shape) == 2:
            skip = write("Reshape", skip, constant([skip.shape[0], *([1] * (rank - 2)), channels], "int64"))
        x = write("Add", x, skip)
    if bias is not None:
        x = write("Add", x, write("Reshape", bias, constant(along, "int64")))
    image = write("Transpose", x, perm=first) if last else x
    settings = {"num_groups": attribute(node, "groups"), "epsilon": attribute(node, "epsilon", 1e-5)}
    result = write("GroupNormalization", image, gamma, beta, **settings)
    if attribute(node, "activation"):
        result = write("Mul", result, write("Sigmoid", result))
    result = write("Transpose", result, perm=[0, *range(2, rank), 1]) if last else result
    return [write.cast(result, dtype), write.cast(x, dtype)]


@special("EmbedLayerNormalization", domain=CONTRIB)
def _embed_layer_normalization(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> _Results:
    ids, segments, words, places, segment_table, gamma, beta, mask, positions = [*inputs, None, None][:9]
    write, dtype = NodeWriter(interpreter, node), words.dtype
    length = ids.shape[1]
    words, places, segment_table = in_single_precision(write, (words, places, segment_table))
    total = write("Gather", words, ids)
    rows = write("Slice", places, *_rows(length)) if positions is None else write("Gather", places, positions)
    total = write("Add", total, rows)
    if segments is not None and segment_table is not None:
        total = write("Add", total, write("Gather", segment_table, segments))
    result, _, _ = _layer_normalized(write, total, gamma, beta, attribute(node, "epsilon", 1e-12))
    counted: Value = None
    if len(node.output) > 1 and node.output[1]:
        if mask is None or attribute(node, "mask_index_type", 1) == 0:
            counted = Known(np.zeros(ids.shape[0], "int32"), f"{node.name}_mask_index")
        else:
            counted = write("ReduceSum", write.cast(mask, "int32"), constant([1], "int64"), keepdims=0)
    return [write.cast(result, dtype), counted, write.cast(total, dtype)]


def _rows(count: int) -> list[Known]:
    return [constant([k], "int64") for k in (0, count, 0)]


# Activations


def _gelu(write: NodeWriter, x: Value) -> Value:
    (wide,) = in_single_precision(write, [x])
    half, one, root = (constant(value, wide.dtype) for value in (0.5, 1.0, math.sqrt(0.5)))
    gate = write("Add", write("Erf", write("Mul", wide, root)), one)
    return write.cast(write("Mul", write("Mul", wide, half), gate), x.dtype)


def _quick_gelu(write: NodeWriter, x: Value, alpha: float) -> Value:
    scaled = x if alpha == 1.0 else write("Mul", x, constant(alpha, x.dtype))
    return write("Mul", x, write("Sigmoid", scaled))


@special("Gelu", domain=CONTRIB)
def _contrib_gelu(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    return [_gelu(NodeWriter(interpreter, node), inputs[0])]


@special("BiasGelu", domain=CONTRIB)
def _bias_gelu(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    write = NodeWriter(interpreter, node)
    return [_gelu(write, write("Add", *inputs[:2]))]


@special("FastGelu", domain=CONTRIB)
def _fast_gelu(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    write, dtype = NodeWriter(interpreter, node), inputs[0].dtype
    x, bias = in_single_precision(write, [*inputs, None][:2])
    x = x if bias is None else write("Add", x, bias)
    half, one, root, cubic = (constant(v, x.dtype) for v in (0.5, 1.0, math.sqrt(2 / math.pi), 0.044715))
    cube = write("Mul", write("Mul", x, x), x)
    inner = write("Mul", root, write("Add", x, write("Mul", cubic, cube)))
    result = write("Mul", write("Mul", half, x), write("Add", one, write("Tanh", inner)))
    return [write.cast(result, dtype)]


@special("QuickGelu", domain=CONTRIB)
def _quick(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    return [_quick_gelu(NodeWriter(interpreter, node), inputs[0], attribute(node, "alpha", 1.702))]


@special("BiasAdd", domain=CONTRIB)
def _bias_add(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    write, (x, bias, skip) = NodeWriter(interpreter, node), inputs
    return [write("Add", write("Add", x, bias), skip)]


@special("BiasSplitGelu", domain=CONTRIB)
def _bias_split_gelu(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    write = NodeWriter(interpreter, node)
    left, right = interpreter.emit("Split", [write("Add", *inputs[:2])], f"{node.name}/Split", outputs=2, axis=-1)
    return [write("Mul", left, _gelu(write, right))]


@special("BiasSoftmax", domain=CONTRIB)
def _bias_softmax(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> _Results:
    write, (x, bias) = NodeWriter(interpreter, node), inputs
    rank = len(x.shape)
    axis = attribute(node, "axis", 1) % rank
    if not attribute(node, "is_inner_broadcast") and len(bias.shape) != rank:
        # The bias is of the first axes of the batch, and the same for those that follow.
        inner = bias.shape[-(rank - axis) :]
        outer = bias.shape[: len(bias.shape) - len(inner)]
        bias = write("Reshape", bias, constant([*outer, *[1] * (axis - len(outer)), *inner], "int64"))
    total = write("Add", x, bias)
    rows = write("Reshape", total, constant([math.prod(x.shape[:axis]), math.prod(x.shape[axis:])], "int64"))
    return [write("Reshape", write("Softmax", rows, axis=-1), constant(list(x.shape), "int64"))]


@special("RotaryEmbedding", domain=CONTRIB)
def _rotary_embedding(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> _Results:
    x, positions, cosines, sines = inputs
    write = NodeWriter(interpreter, node)
    if attribute(node, "is_packed_batching", 0):
        raise Obstacle("its attribute is_packed_batching = 1 is not supported", "give the sequences padded")
    given, interleaved, heads = x.shape, attribute(node, "interleaved", 0), attribute(node, "num_heads", 0)
    rotated = attribute(node, "rotary_embedding_dim", 0)
    if len(given) == 4:
        batch, heads, length, size = given
        x = write("Transpose", x, perm=[0, 2, 1, 3])
    else:
        batch, length, hidden = given
        size = hidden // heads if heads else 2 * cosines.shape[1]
        heads = hidden // size
        x = write("Reshape", x, constant([batch, length, heads, size], "int64"))
    rotated = rotated or size
    if positions.shape in ((1,), ()):
        # Where the first token stands.
        steps = constant(np.arange(length), positions.dtype)
        row = write("Add", write("Reshape", positions, constant([1], "int64")), steps)
        positions = write(
            "Expand", write("Reshape", row, constant([1, length], "int64")), constant([batch, length], "int64")
        )
    half = rotated // 2
    tables = [
        write("Unsqueeze", write("Gather", table, positions), constant([2], "int64")) for table in (cosines, sines)
    ]
    parts = _sliced(write, x, 0, rotated)
    if interleaved:
        pairs = write("Reshape", parts, constant([batch, length, heads, half, 2], "int64"))
        first, second = (write("Gather", pairs, constant(k, "int64"), axis=4) for k in (0, 1))
    else:
        first, second = _sliced(write, parts, 0, half), _sliced(write, parts, half, rotated)
    cosine, sine = tables
    real = write("Sub", write("Mul", first, cosine), write("Mul", second, sine))
    imaginary = write("Add", write("Mul", first, sine), write("Mul", second, cosine))
    if interleaved:
        both = [write("Unsqueeze", part, constant([4], "int64")) for part in (real, imaginary)]
        result = write("Concat", *both, axis=4)
        result = write("Reshape", result, constant([batch, length, heads, rotated], "int64"))
    else:
        result = write("Concat", real, imaginary, axis=3)
    if rotated < size:
        result = write("Concat", result, _sliced(write, x, rotated, size), axis=3)
    scale = attribute(node, "scale", 1.0)
    if scale != 1.0:
        result = write("Mul", result, constant(scale, result.dtype))
    if len(given) == 4:
        return [write("Transpose", result, perm=[0, 2, 1, 3])]
    return [write("Reshape", result, constant(list(given), "int64"))]


def _sliced(write: NodeWriter, x: Value, start: int, stop: int) -> Value:
    if (start, stop) == (0, x.shape[-1]):
        return x
    return write("Slice", x, *(constant([k], "int64") for k in (start, stop, len(x.shape) - 1)))
