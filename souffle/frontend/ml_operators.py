"""Operators of ``ai.onnx.ml`` that are arithmetic or a search in a list of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import numpy_helper
from tvm import te, tirx

from souffle.frontend.attributes import attribute
from souffle.frontend.custom import NodeOperands, check_length, defines, int_imm
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.refusal import Obstacle
from souffle.frontend.values import Known, Scope, Value
from souffle.tvm_compat import PrimExpr

__all__: list[str] = []

_ML = "ai.onnx.ml"


@special(f"{_ML}::ArrayFeatureExtractor")
def _array_feature_extractor(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    x, chosen = (interpreter.whole(value) for value in inputs)
    write = NodeWriter(interpreter, node)
    flat = write("Reshape", chosen, constant([-1], "int64"))
    shape = [1] if len(x.shape) == 1 else list(x.shape[:-1])
    taken = write("Gather", x, flat, axis=len(x.shape) - 1)
    return [write("Reshape", taken, constant([*shape, math.prod(chosen.shape)], "int64"))]


@special(f"{_ML}::Binarizer")
def _binarizer(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    x, write = interpreter.whole(inputs[0]), NodeWriter(interpreter, node)
    limit = attribute(node, "threshold", 0.0)
    if not x.dtype.startswith(("float", "bfloat")):
        # An integer is above a threshold where it is above the integer below.
        limit = math.floor(limit)
    return [write.cast(write("Greater", x, constant(limit, x.dtype)), x.dtype)]


@special(f"{_ML}::Scaler")
def _scaler(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    write, x = NodeWriter(interpreter, node), interpreter.whole(inputs[0])
    x = x if x.dtype == "float64" else write.cast(x, "float32")
    offset, scale = (constant(attribute(node, name, [rest]), x.dtype) for name, rest in (("offset", 0), ("scale", 1)))
    return [write.cast(write("Mul", write("Sub", x, offset), scale), "float32")]


@special(f"{_ML}::Normalizer")
def _normalizer(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    write, x = NodeWriter(interpreter, node), interpreter.whole(inputs[0])
    x, axis = x if x.dtype == "float64" else write.cast(x, "float32"), [len(x.shape) - 1]
    norm = attribute(node, "norm", b"MAX")
    if norm == b"MAX":
        width = write("ReduceMax", x, axes=axis, keepdims=1)
    elif norm in (b"L1", b"L2"):
        width = write(f"Reduce{norm.decode()}", x, axes=axis, keepdims=1)
    else:
        raise Obstacle(f"its attribute norm is {norm!r}", "the norms are MAX, L1 and L2")
    # A row without any width stays.
    width = write("Where", write("Equal", width, constant(0, x.dtype)), constant(1, x.dtype), width)
    return [write.cast(write("Div", x, width), "float32")]


@special(f"{_ML}::Imputer")
def _imputer(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    write, x = NodeWriter(interpreter, node), interpreter.whole(inputs[0])
    kind = "float" if x.dtype.startswith("float") else "int64"
    values, old = attribute(node, f"imputed_value_{kind}s"), attribute(node, f"replaced_value_{kind}", 0)
    if not values or len(values) not in (1, x.shape[-1]):
        raise Obstacle(
            f"it has {len(values or ())} values for {x.shape[-1]} features of type {x.dtype}",
            f"give it imputed_value_{kind}s, one or as many as there are features",
        )
    replaced = write("IsNaN", x) if math.isnan(old) else write("Equal", x, constant(old, x.dtype))
    return [write("Where", replaced, constant(values, x.dtype), x)]


@special(f"{_ML}::LinearRegressor")
def _linear_regressor(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value]:
    kind = attribute(node, "post_transform", b"NONE")
    if kind not in (b"NONE", b"SOFTMAX", b"LOGISTIC"):
        raise Obstacle(f"its attribute post_transform is {kind.decode()}", "NONE, SOFTMAX and LOGISTIC are supported")
    write, x = NodeWriter(interpreter, node), _as_float(interpreter, node, inputs[0])
    weights = np.asarray(attribute(node, "coefficients"), "float32").reshape(attribute(node, "targets", 1), -1)
    x = write("Reshape", x, constant([1, -1], "int64")) if len(x.shape) == 1 else x
    result = write("MatMul", x, Known(np.ascontiguousarray(weights.T), f"{node.name}_coefficients"))
    shift = attribute(node, "intercepts")
    result = write("Add", result, constant(shift, "float32")) if shift else result
    if kind == b"NONE":
        return [result]
    return [write("Softmax", result, axis=-1) if kind == b"SOFTMAX" else write("Sigmoid", result)]


def _as_float(interpreter: Interpreter, node: onnx.NodeProto, value: Value) -> Value:
    """`value` in float32."""
    return NodeWriter(interpreter, node).cast(interpreter.whole(value), "float32")


def _listed(node: onnx.NodeProto, side: str) -> np.ndarray:
    """The keys or values of a ``LabelEncoder``.

    Raises
    ------
    Obstacle
        If they are text.
    """
    for name, dtype in (("floats", "float32"), ("int64s", "int64"), ("tensor", None), ("strings", None)):
        given = attribute(node, f"{side}_{name}")
        if given is None:
            continue
        array = numpy_helper.to_array(given) if name == "tensor" else np.asarray(given, dtype)
        if array.dtype.kind in "OUS":
            break
        return array.reshape(-1)
    raise Obstacle(f"its {side} are text", "encode text as numbers outside of the network")


@defines(f"{_ML}::LabelEncoder")
def _label_encoder(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    """Each element looks for the key that it is equal to."""
    keys, values = _listed(node, "keys"), _listed(node, "values")
    if len(keys) != len(values):
        raise Obstacle(f"it has {len(keys)} keys and {len(values)} values", "give it one value for each key")
    meanings: dict[str, str] = {}
    for key, value in zip(map(str, keys), map(str, values), strict=True):
        if meanings.setdefault(key, value) != value:
            raise Obstacle(f"its key {key} has two values, and ONNX does not say which counts", "give each key once")
    check_length(len(keys))
    data, shape, dtype, out = operands.tensor(0), operands.shape(0), operands.dtype(0), str(values.dtype)
    tensor = attribute(node, "default_tensor")
    default = numpy_helper.to_array(tensor).reshape(-1)[0] if tensor is not None else None
    if default is None:
        floating = values.dtype.kind == "f"
        default = attribute(node, "default_float" if floating else "default_int64", -0.0 if floating else -1)
    rest = tirx.const(np.asarray(default, out).item(), out)
    known, results = operands.table(keys.astype(dtype)), operands.table(values)
    nan = np.flatnonzero(keys != keys)

    def position(*at: PrimExpr) -> PrimExpr:
        k = te.reduce_axis((0, len(keys)), name="k")
        return te.max(tirx.Select(data(*at) == known(k), k.var, int_imm(-1)), axis=k)

    where = te.compute(shape, position, name="position")

    def value(*at: PrimExpr) -> PrimExpr:
        place = where(*at)
        if nan.size:
            place = tirx.Select(tirx.isnan(data(*at)), int_imm(int(nan[-1])), place)
        return tirx.Select(place >= 0, results(tirx.max(place, int_imm(0))), rest)

    return [te.compute(shape, value, name="label")]
