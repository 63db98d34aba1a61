"""ONNX operators written with others, where TVM's importer lacks them or gives another result."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto

from souffle.frontend.accumulation import NARROW
from souffle.frontend.attributes import attribute, attributes, sides
from souffle.frontend.custom_selection import compressed
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.normalization import normalized_rows
from souffle.frontend.refusal import Obstacle, version_of
from souffle.frontend.values import Known, Scope, Value
from souffle.program import Tensor

__all__: list[str] = []


@special("LayerNormalization")
def _layer_normalization(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    x, scale, *bias = (interpreter.whole(value) for value in inputs if value is not None)
    # TVM gives no mean and deviation, and normalizes doubles in single precision.
    if not any(list(node.output)[1:]) and x.dtype != "float64":
        return None
    write, first = NodeWriter(interpreter, node), attribute(node, "axis", -1) % len(x.shape)
    rows, mean, inverse = normalized_rows(write, x, attribute(node, "epsilon", 1e-5), axis=first)
    result = write.cast(rows, x.dtype)
    result = write("Mul", result, scale)
    result = write("Add", result, bias[0]) if bias else result
    return [result, *(write.cast(value, "float32") for value in (mean, inverse))]


@special("DynamicQuantizeLinear")
def _dynamic_quantize_linear(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    write, x = NodeWriter(interpreter, node), interpreter.whole(inputs[0])
    zero, one, most = (constant(value, x.dtype) for value in (0, 1, 255))
    least, largest = (write(f"Reduce{kind}", x, keepdims=0) if math.prod(x.shape) else zero for kind in ("Min", "Max"))
    least, largest = write("Min", least, zero), write("Max", largest, zero)
    width = write("Sub", largest, least)
    # Where all are zero ONNX's definition divides by zero; ONNX Runtime takes one for the scale.
    scale = write("Where", write("Equal", width, zero), one, write("Div", width, most))
    # Rounded, saturated and cast as its definition says; Cast would look for NaN and infinity, four times at all of it.
    point = write("QuantizeLinear", write("Neg", least), scale, constant(0, "uint8"))
    return [write("QuantizeLinear", x, scale, point), scale, point]


@special("Attention")
def _attention(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    # TVM's converter is for the operator of the same name in another domain.
    return interpreter.by_definition(node, inputs, scope)


@special("AffineGrid")
def _affine_grid(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    size = inputs[1]
    if attribute(node, "align_corners", 0) and isinstance(size, Known) and 1 in size.array.tolist()[2:]:
        # ONNX's definition divides by zero, its reference puts the one point at -1, ONNX Runtime at 1, PyTorch at 0.
        raise Obstacle(
            "with align_corners = 1 and one point along a dimension, ONNX does not say where that point is",
            "align_corners = 0 puts it in the middle",
        )
    theta = inputs[0]
    if theta.dtype != "float64" or not isinstance(size, Known):
        return None
    # TVM places points in single precision.
    batch, _, *extents = size.array.tolist()
    corners = attribute(node, "align_corners", 0)
    axes = [np.linspace(-1.0, 1.0, n) if corners else (2.0 * np.arange(n) + 1.0) / n - 1.0 for n in extents]
    # The innermost axis is the first coordinate.
    points = np.stack([*np.meshgrid(*axes, indexing="ij")[::-1], np.ones(extents)], axis=-1)
    write = NodeWriter(interpreter, node)
    places = Known(points.reshape(-1, len(extents) + 1), f"{node.name}_points")
    moved = write("MatMul", places, write("Transpose", theta, perm=[0, 2, 1]))
    shape = Known(np.array([batch, *extents, len(extents)], np.int64), f"{node.name}_shape")
    return [write("Reshape", moved, shape)]


@special("MeanVarianceNormalization")
def _mean_variance_normalization(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    write, x = NodeWriter(interpreter, node), interpreter.whole(inputs[0])
    axes = list(attribute(node, "axes", (0, 2, 3)))

    def mean(value: Value) -> Value:
        return write("ReduceMean", value, axes=axes, keepdims=1)

    # The mean of squared distances: a difference of mean squares has no correct digit where the mean is large.
    distance = write("Sub", x, mean(x))
    deviation = write("Sqrt", mean(write("Mul", distance, distance)))
    return [write("Div", distance, write("Add", deviation, constant(1e-9, x.dtype)))]


@special("GroupNormalization")
def _group_normalization(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    write, (x, scale, bias) = NodeWriter(interpreter, node), (interpreter.whole(value) for value in inputs)
    groups, (batch, channels, *_) = attribute(node, "num_groups"), x.shape
    wide = x.dtype if x.dtype == "float64" or attribute(node, "stash_type", 1) != TensorProto.FLOAT else "float32"
    rows = write("Reshape", write.cast(x, wide), constant([batch, groups, -1], "int64"))
    # In two passes, which TVM's operator is not.
    ones, zeros = (constant(np.full(groups, value), wide) for value in (1, 0))
    epsilon = attribute(node, "epsilon", 1e-5)
    rows = write("InstanceNormalization", rows, ones, zeros, epsilon=epsilon)
    result = write("Reshape", rows, constant(list(x.shape), "int64"))
    result = write.cast(result, x.dtype)
    for operator, value in (("Mul", scale), ("Add", bias)):
        if value.shape != (channels,):
            # Before operator set 21, one for each group.
            value = write("Reshape", value, constant([groups, 1], "int64"))
            value = write("Expand", value, constant([groups, channels // groups], "int64"))
        value = write("Reshape", value, constant([channels, *[1] * (len(x.shape) - 2)], "int64"))
        result = write(operator, result, value)
    return [result]


@special("LpNormalization")
def _lp_normalization(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    write, x = NodeWriter(interpreter, node), inputs[0]
    order = attribute(node, "p", 2)
    norm = write(f"ReduceL{order}", x, axes=[attribute(node, "axis", -1)], keepdims=1)
    # A vector of zeros stays one.
    one, zero = constant(1, x.dtype), constant(0, x.dtype)
    return [write("Div", x, write("Where", write("Equal", norm, zero), one, norm))]


@special("IsInf")
def _is_inf(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    positive, negative = attribute(node, "detect_positive", 1), attribute(node, "detect_negative", 1)
    if positive and negative:
        return None
    write, x = NodeWriter(interpreter, node), inputs[0]
    if not positive and not negative:
        return [Known(np.zeros(x.shape, dtype=bool), node.name)]
    return [write("Equal", x, constant(np.inf if positive else -np.inf, x.dtype))]


@special("Pow")
def _pow(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value] | None:
    base, exponent = inputs
    if all(isinstance(value, Known) for value in inputs) or not isinstance(exponent, (Known, Tensor)):
        return None
    write = NodeWriter(interpreter, node)
    floating = base.dtype.startswith(("float", "bfloat"))
    value = None
    if isinstance(exponent, Known) and exponent.array.size == 1 and len(exponent.shape) <= len(base.shape):
        value = float(exponent.array.reshape(-1)[0])
    # Small powers as products: exact for integers, right for negative bases, and cheaper.
    if value in (1.0, 2.0, 3.0):
        result = base
        for _ in range(int(value) - 1):
            result = write("Mul", result, base)
        return [result]
    if base.dtype in NARROW or (floating and exponent.dtype == "float64" != base.dtype):
        # A power is rounded once, to the type of the base; of bfloat16 there is none.
        kind = "float64" if exponent.dtype == "float64" else "float32"
    elif floating and exponent.dtype == base.dtype:
        return None
    else:
        kind = base.dtype if floating else "float64"
    powered = write("Pow", write.cast(base, kind), write.cast(exponent, kind))
    return [write.cast(powered, base.dtype)]


def _element_type(dtype: str) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


@special("Compress")
def _compress(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    value, condition = inputs
    if isinstance(value, Known) and isinstance(condition, Known):
        return None
    value = interpreter.whole(value)
    if not isinstance(condition, Known):
        return compressed(interpreter, node, value, interpreter.whole(condition), {})
    write, axis = NodeWriter(interpreter, node), attribute(node, "axis")
    if axis is None:
        value, axis = write("Reshape", value, constant([-1], "int64")), 0
    chosen = np.flatnonzero(condition.array)
    if not chosen.size:
        shape = list(value.shape)
        shape[axis] = 0
        return [Known(np.zeros(shape, dtype=value.dtype), f"{node.name}_empty")]
    return [write("Gather", value, Known(chosen, f"{node.name}_chosen"), axis=axis)]


@special("Equal")
def _equal(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value] | None:
    # TVM compares booleans as floating-point numbers, which its compiler then refuses.
    if inputs[0].dtype != "bool":
        return None
    write = NodeWriter(interpreter, node)
    return [write("Not", write("Xor", *inputs))]


@special("Slice")
def _slice(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value] | None:
    starts = attribute(node, "starts")
    if starts is None:
        return None
    axes = attribute(node, "axes", range(len(starts)))
    bounds = [constant(list(values), "int64") for values in (starts, attribute(node, "ends"), axes)]
    return [NodeWriter(interpreter, node)("Slice", inputs[0], *bounds)]


@special("Upsample", "Resize")
def _upsample(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    if node.op_type == "Resize" and len(inputs) != 2:
        return None
    scales = inputs[1] if len(inputs) > 1 else constant(attribute(node, "scales"), "float32")
    mode = attribute(node, "mode", b"nearest").decode()
    return [
        NodeWriter(interpreter, node)(
            "Resize",
            inputs[0],
            None,
            scales,
            mode="linear" if mode == "bilinear" else mode,
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )
    ]


@special("EyeLike")
def _eye_like(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    element = attribute(node, "dtype", _element_type(inputs[0].dtype))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(element)
    return [Known(np.eye(*inputs[0].shape, k=attribute(node, "k", 0), dtype=dtype), node.name)]


@special("Hardmax")
def _hardmax(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    if version_of("", scope.opsets) >= 13:
        return None
    # Once the largest of all elements from the axis on, and not of those along it.
    x, write = inputs[0], NodeWriter(interpreter, node)
    axis = attribute(node, "axis", 1)
    axis = axis + len(x.shape) if axis < 0 else axis
    rows = write("Reshape", x, constant([math.prod(x.shape[:axis]), math.prod(x.shape[axis:])], "int64"))
    return [write("Reshape", write("Hardmax", rows, axis=1), constant(list(x.shape), "int64"))]


@special("PRelu")
def _p_relu(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    x, slope = inputs
    if version_of("", scope.opsets) >= 7 or len(slope.shape) != 1 or len(x.shape) < 2 or slope.shape == (1,):
        return None
    # Once one slope for each channel, and not broadcast as arrays are.
    write = NodeWriter(interpreter, node)
    return [write("PRelu", x, write("Reshape", slope, constant([-1, *[1] * (len(x.shape) - 2)], "int64")))]


@special("SpaceToDepth")
def _space_to_depth(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    if attribute(node, "mode", b"DCR") == b"DCR":
        return None
    write, block = NodeWriter(interpreter, node), attribute(node, "blocksize")
    n, c, h, w = inputs[0].shape
    split = write("Reshape", inputs[0], constant([n, c, h // block, block, w // block, block], "int64"))
    moved = write("Transpose", split, perm=[0, 1, 3, 5, 2, 4])
    return [write("Reshape", moved, constant([n, c * block * block, h // block, w // block], "int64"))]


@special("ConvTranspose")
def _conv_transpose(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    shape = attribute(node, "output_shape")
    auto = attribute(node, "auto_pad", b"NOTSET").decode()
    if not shape and auto in ("NOTSET", "VALID"):
        return None
    spatial = inputs[0].shape[2:]
    rank = len(spatial)
    kernel = attribute(node, "kernel_shape", inputs[1].shape[2:])
    strides, dilations = attribute(node, "strides", [1] * rank), attribute(node, "dilations", [1] * rank)
    extra = attribute(node, "output_padding", [0] * rank)
    wanted = (
        list(shape)[-rank:] if shape else [extent * stride for extent, stride in zip(spatial, strides, strict=True)]
    )
    totals = []
    for k in range(rank):
        full = strides[k] * (spatial[k] - 1) + extra[k] + (kernel[k] - 1) * dilations[k] + 1
        total = full - wanted[k]
        if total < 0:
            extra = [e - total if j == k else e for j, e in enumerate(extra)]
            total = 0
        totals.append(total)
    attributes = {
        "kernel_shape": list(kernel),
        "strides": list(strides),
        "dilations": list(dilations),
        "output_padding": list(extra),
        "pads": sides(auto, totals),
        "group": attribute(node, "group", 1),
    }
    return interpreter.emit("ConvTranspose", list(inputs), f"{node.name}/ConvTranspose", **attributes)


@special("Concat")
def _concat(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    full = [value for value in inputs if math.prod(value.shape)]
    if not full or len(full) == len(inputs):
        return None
    if len(full) == 1:
        return [full[0]]
    return interpreter.primitive(node, full, scope.opsets)


@special("RoiAlign")
def _roi_align(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    usual = b"half_pixel" if version_of("", scope.opsets) >= 16 else b"output_half_pixel"
    scale, mode = attribute(node, "spatial_scale", 1.0), attribute(node, "coordinate_transformation_mode")
    if inputs[0].dtype in NARROW:
        return interpreter.in_single_precision(node, inputs, scope)
    if attribute(node, "sampling_ratio", 0) < 1:
        raise Obstacle(
            "with sampling_ratio = 0 each region has as many points as its size says, and that is data",
            "give it a sampling_ratio of at least 1",
        )
    if attribute(node, "mode", b"avg") != b"avg":
        if mode is not None:
            return None
        given = attributes(node)
        return interpreter.emit(
            "RoiAlign", list(inputs), f"{node.name}/RoiAlign", coordinate_transformation_mode=usual, **given
        )
    image, regions, batch = inputs
    if (mode or usual) == b"half_pixel" and scale not in (0.0, 1.0):
        # TVM moves regions by half a pixel before it scales them, and ONNX afterwards.
        regions = NodeWriter(interpreter, node)("Add", regions, constant(0.5 - 0.5 / scale, regions.dtype))
    # ONNX's reference takes half a pixel for what is usual before operator set 16, too.
    return interpreter.primitive(node, [image, regions, batch], scope.opsets, folding=False)
