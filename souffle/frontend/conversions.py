"""Conversions to, from and between the small element types, and their bits taken for those of another type."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper
from tvm import te

from souffle.frontend.attributes import attribute
from souffle.frontend.constant_folding import evaluate_node
from souffle.frontend.custom import NodeOperands
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.refusal import Obstacle, is_text
from souffle.frontend.small_types import (
    CODES,
    bits_of,
    codes_of,
    converted,
    decoded,
    encoded,
    is_small,
    source_type,
    standing_for,
)
from souffle.frontend.values import Known, Scope, Value

__all__: list[str] = []

_NEWEST = (helper.make_opsetid("", 25),)


@special("Cast", "CastLike")
def _cast(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value] | None:
    value, like = interpreter.whole(inputs[0]), node.op_type == "CastLike"
    if is_text(inputs[1]) if like else attribute(node, "to") == TensorProto.STRING:
        raise Obstacle("it makes text", "let the network return numbers, and write them as text outside of it")
    target = inputs[1].dtype if like else str(helper.tensor_dtype_to_np_dtype(attribute(node, "to")))
    saturate = bool(attribute(node, "saturate", 1))
    mode = attribute(node, "round_mode", b"up").decode()
    if is_text(value) or not (is_small(value.dtype) or is_small(target)):
        if like:
            return interpreter.emit("Cast", [value], f"{node.name}/Cast", to=element_number(target))
        return None
    if isinstance(value, Known) and target != "float8_e8m0fnu":
        cast = helper.make_node("Cast", ["x"], ["y"], to=element_number(target), saturate=int(saturate))
        folded = evaluate_node(cast, [value.array], _NEWEST)
        if folded is not None:
            return [Known(folded[0], f"{node.name}_value")]
    parameters = (value.dtype, target, saturate, mode)
    (result,) = interpreter.defined(_conversion, node, [codes_of(value)], parameters)
    return [standing_for(result, target) if is_small(target) else result]


def element_number(dtype: str) -> int:
    """The number that ONNX has for an element type."""
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _conversion(operands: NodeOperands, source: str, target: str, saturate: bool, round_mode: str) -> list[te.Tensor]:
    data, shape = operands.tensor(0), operands.shape(0)

    def number(*at):
        return decoded(data(*at), source) if is_small(source) else data(*at)

    if not is_small(target):
        return [te.compute(shape, lambda *at: converted(number(*at), target), name="cast")]
    kind = "int32" if bits_of(source) < 8 and "int" in source else "float32" if is_small(source) else source
    wide = source_type(kind, target)
    if wide != source:
        # A byte is put together from several looks at the number, which is computed once.
        data = te.compute(shape, lambda *at: converted(number(*at), wide), name="wide")
    return [
        te.compute(shape, lambda *at: encoded(data(*at), target, saturate=saturate, round_mode=round_mode), name="cast")
    ]


@special("BitCast")
def _bit_cast(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    value = interpreter.whole(inputs[0])
    source, target = value.dtype, str(helper.tensor_dtype_to_np_dtype(attribute(node, "to")))
    if bits_of(source) != bits_of(target):
        raise Obstacle(
            f"an element of {source} has {bits_of(source)} bits, and one of {target} has {bits_of(target)}",
            "give a type of as many bits",
        )
    if not (is_small(source) or is_small(target) or "bool" in (source, target)):
        return None
    codes = codes_of(value)
    if codes.dtype != CODES:
        kind = "Cast" if source == "bool" else "BitCast"
        (codes,) = interpreter.emit(kind, [codes], f"{node.name}/{kind}", to=TensorProto.UINT8)
    if is_small(target):
        return [standing_for(codes, target)]
    if target == CODES:
        return [codes]
    kind = "Cast" if target == "bool" else "BitCast"
    return interpreter.emit(kind, [codes], f"{node.name}/{kind}", to=element_number(target))
