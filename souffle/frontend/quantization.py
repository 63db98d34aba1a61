"""Linear quantization and dequantization, each one TE: per tensor, along an axis, or in blocks along one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import helper
from tvm import te, tirx

from souffle.frontend.attributes import attribute
from souffle.frontend.constant_folding import evaluate_node
from souffle.frontend.custom import NodeOperands
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.refusal import Obstacle
from souffle.frontend.small_types import codes_of, converted, decoded, encoded, is_small, standing_for
from souffle.frontend.values import Known, Scope, Value
from souffle.program.extrema import is_floating
from souffle.tvm_compat import PrimExpr

__all__: list[str] = []

_RANGES = {
    f"{kind}{bits}": (0, 2**bits - 1) if kind == "uint" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for kind in ("int", "uint")
    for bits in (2, 4, 8, 16)
}


@special("QuantizeLinear")
def _quantize(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    x, scale, zero = [*map(interpreter.whole, inputs), None][:3]
    wanted = attribute(node, "output_dtype", 0)
    target = str(helper.tensor_dtype_to_np_dtype(wanted)) if wanted else zero.dtype if zero is not None else "uint8"
    if zero is not None and zero.dtype != target:
        raise Obstacle(
            f"its zero point is of {zero.dtype}, and its attribute output_dtype says {target}", "give both one type"
        )
    if target not in _RANGES and (not is_small(target) or target == "float8_e8m0fnu"):
        raise Obstacle(f"it quantizes to {target}", "quantize to integers of 16 bits or less, or to float8 or float4")
    precision = attribute(node, "precision", 0)
    division = str(helper.tensor_dtype_to_np_dtype(precision)) if precision else _division_type(scale.dtype)
    block = _block(node, x.shape, scale, zero)
    parameters = (block, scale.dtype, target, division, bool(attribute(node, "saturate", 1)))
    (result,) = interpreter.defined(_quantized, node, [codes_of(v) for v in (x, scale, _shift(zero))], parameters)
    return [standing_for(result, target) if is_small(target) else result]


@special("DequantizeLinear")
def _dequantize(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
    x, scale, zero = [*map(interpreter.whole, inputs), None][:3]
    wanted = attribute(node, "output_dtype", 0)
    target = str(helper.tensor_dtype_to_np_dtype(wanted)) if wanted else scale.dtype
    if not is_floating(target) or is_small(target):
        raise Obstacle(f"its result is of {target}", "say a floating-point type of 16 bits or more by output_dtype")
    if zero is not None and zero.dtype != x.dtype:
        raise Obstacle(f"its zero point is of {zero.dtype}, and its input of {x.dtype}", "give both one type")
    block = _block(node, x.shape, scale, zero)
    given = [None if value is None else value.array for value in (x, scale, zero) if not _computed(value)]
    if len(given) == 3:
        folded = evaluate_node(node, given[: len(node.input)], scope.opsets)
        if folded is not None:
            return [Known(folded[0], f"{node.name}_value")]
    parameters = (block, x.dtype, scale.dtype, target)
    return list(interpreter.defined(_dequantized, node, [codes_of(v) for v in (x, scale, _shift(zero))], parameters))


def _computed(value: Value) -> bool:
    return value is not None and not isinstance(value, Known)


def _shift(zero: Value) -> Value:
    """The zero point, where it may be another than zero."""
    if isinstance(zero, Known) and not np.any(zero.array.astype("float32")):
        return None
    return zero


def _division_type(scale: str) -> str:
    """In what precision to divide by a scale."""
    if is_small(scale):
        return "float32"
    return scale if is_floating(scale) else "float64"


_Block = tuple[int, int] | None
"""The axis along which elements have scales of their own, and how many in a row share one; ``None``: all share one."""


def _block(node: onnx.NodeProto, shape: Sequence[int], scale: Value, zero: Value) -> _Block:
    if zero is not None and zero.shape != scale.shape and math.prod(zero.shape) != math.prod(scale.shape):
        raise Obstacle(
            f"its zero point has shape {list(zero.shape)}, and its scale {list(scale.shape)}", "give both one shape"
        )
    if math.prod(scale.shape) == 1 and len(scale.shape) < 2:
        return None
    rank, axis, size = len(shape), attribute(node, "axis", 1), attribute(node, "block_size", 0)
    axis = 0 if rank == 1 else axis
    if not -rank <= axis < rank:
        raise Obstacle(f"its axis {axis} is none of {rank}", f"give one from {-rank} to {rank - 1}")
    axis %= rank
    if len(scale.shape) == 1:
        wanted: tuple[int, ...] = (shape[axis],)
    elif size > 0:
        wanted = (*shape[:axis], -(-shape[axis] // size), *shape[axis + 1 :])
    else:
        raise Obstacle(f"its scale has shape {list(scale.shape)}, and there is no block_size", "give a block_size")
    if tuple(scale.shape) != wanted:
        raise Obstacle(f"its scale has shape {list(scale.shape)}", f"for these attributes it must be {list(wanted)}")
    return axis, 0 if len(scale.shape) == 1 else size


def _reader(operands: NodeOperands, block: _Block) -> Callable[[int, Sequence[PrimExpr]], PrimExpr]:
    """What reads the scale, or the zero point, of an element."""

    def read(position: int, at: Sequence[PrimExpr]) -> PrimExpr:
        tensor, shape = operands.tensor(position), operands.shape(position)
        if block is None or math.prod(shape) == 1:
            return tensor(*([0] * len(shape)))
        axis, size = block
        if len(shape) == 1:
            return tensor(at[axis])
        return tensor(*at[:axis], tirx.floordiv(at[axis], size) if size != 1 else at[axis], *at[axis + 1 :])

    return read


def _number(value: PrimExpr, dtype: str) -> PrimExpr:
    """An element: of small types and integers an int32 or a float32, others as they are."""
    if is_small(dtype):
        return decoded(value, dtype)
    return value if is_floating(dtype) or dtype == "int32" else tirx.Cast("int32", value)


def _quantized(
    operands: NodeOperands, block: _Block, scale_type: str, target: str, division: str, saturate: bool
) -> list[te.Tensor]:
    data, read = operands.tensor(0), _reader(operands, block)
    wide = "float64" if division == "float64" else "float32"

    def operand(value: PrimExpr) -> PrimExpr:
        return converted(converted(value, division), wide)

    # A quotient of 16-bit numbers that is rounded twice is that which is rounded once.
    def divided(*at):
        return operand(operand(data(*at)) / operand(_number(read(1, at), scale_type)))

    def zero_of(at: Sequence[PrimExpr]) -> PrimExpr:
        return converted(_number(read(2, at), target), wide)

    shape, shifted = operands.shape(0), operands.present(2)
    if target not in _RANGES:
        # A byte is put together from several looks at the number, which is computed once.
        value = te.compute(shape, divided, name="quotient")
        if shifted:
            quotient, zero = value, te.compute(shape, lambda *at: zero_of(at), name="zero")

            def moved(*at):
                # The sum with zero would lose the sign of another.
                none = zero(*at) == tirx.const(0, wide)
                return tirx.Select(none, quotient(*at), quotient(*at) + zero(*at))

            value = te.compute(shape, moved, name="shifted")
        return [te.compute(shape, lambda *at: encoded(value(*at), target, saturate=saturate), name="quantize")]
    least, most = (tirx.const(float(bound), wide) for bound in _RANGES[target])

    def element(*at):
        number = tirx.nearbyint(divided(*at))
        number = number + zero_of(at) if shifted else number
        # What is no number becomes the least one, on every target.
        whole = tirx.Cast("int32", tirx.Select(number >= least, tirx.Min(number, most), least))
        return encoded(whole, target) if is_small(target) else tirx.Cast(target, whole)

    return [te.compute(shape, element, name="quantize")]


def _dequantized(operands: NodeOperands, block: _Block, source: str, scale_type: str, target: str) -> list[te.Tensor]:
    data, read = operands.tensor(0), _reader(operands, block)
    wide = "float64" if "float64" in (scale_type, target) else "float32"

    def element(*at):
        value = _number(data(*at), source)
        if operands.present(2):
            value = value - _number(read(2, at), source)
        scale = converted(_number(read(1, at), scale_type), wide)
        return converted(converted(value, wide) * scale, target)

    return [te.compute(operands.shape(0), element, name="dequantize")]
