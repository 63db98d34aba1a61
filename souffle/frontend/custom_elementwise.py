"""Element-wise operators where TVM has another result for NaN, infinities or divisors of zero, or another form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import ml_dtypes
import numpy as np
import onnx
from onnx import helper
from tvm import DataType, te, tirx

from souffle.frontend.attributes import attribute
from souffle.frontend.custom import NodeOperands, defines
from souffle.program.extrema import is_floating
from souffle.tvm_compat import PrimExpr

__all__: list[str] = []


def _elementwise(name: str, operands: NodeOperands, function: Callable[..., PrimExpr]) -> list[te.Tensor]:
    """One TE: `function` of the operands' elements, which are broadcast as NumPy broadcasts."""
    tensors = [tensor for tensor in operands.placeholders if tensor is not None]
    shapes = [tuple(int(extent) for extent in tensor.shape) for tensor in tensors]
    shape = np.broadcast_shapes(*shapes)

    def element(*at):
        def read(tensor: te.Tensor, extents: Sequence[int]) -> PrimExpr:
            own = at[len(shape) - len(extents) :]
            return tensor(*(0 if extent == 1 else index for index, extent in zip(own, extents, strict=True)))

        return function(*map(read, tensors, shapes))

    return [te.compute(shape, element, name=name)]


@defines("Max", "Min", "Sum", "Mean")
def _fold(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    combine = {"Max": tirx.Max, "Min": tirx.Min}.get(node.op_type, tirx.Add)

    def folded(*values: PrimExpr) -> PrimExpr:
        result = reduce(combine, values)
        return result / tirx.const(len(values), operands.dtype(0)) if node.op_type == "Mean" else result

    return _elementwise(node.op_type.lower(), operands, folded)


@defines("Sign")
def _sign(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    zero, one = (tirx.const(value, operands.dtype(0)) for value in (0, 1))
    minus = zero if operands.dtype(0).startswith("uint") else tirx.const(-1, operands.dtype(0))
    # What is neither above nor below zero is NaN, or a zero of either sign, and its square is the sign.
    return _elementwise("sign", operands, lambda x: tirx.Select(x > zero, one, tirx.Select(x < zero, minus, x * x)))


@defines("Clip")
def _clip(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    dtype = operands.dtype(0)
    low, high = (operands.present(position) for position in (1, 2))
    # By default the bounds are the least and the greatest finite number, so that infinities become these.
    least, most = (
        tirx.const(attribute(node, name, float(getattr(ml_dtypes.finfo(dtype), name))), dtype)
        if is_floating(dtype)
        else None
        for name in ("min", "max")
    )

    def clipped(x: PrimExpr, *bounds: PrimExpr) -> PrimExpr:
        low_bound = bounds[0] if low else least
        high_bound = bounds[-1] if high else most
        x = x if low_bound is None else tirx.Max(x, low_bound)
        return x if high_bound is None else tirx.Min(x, high_bound)

    return _elementwise("clip", operands, clipped)


@defines("Sub")
def _difference(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    dtype = operands.dtype(0)
    if not dtype.startswith("uint") or DataType(dtype).bits < 32:
        return None
    one = tirx.const(1, dtype)

    def difference(a: PrimExpr, b: PrimExpr) -> PrimExpr:
        # TVM and LLVM take a difference of unsigned integers to be one of the integers proper; none here is below zero,
        # of constants neither, which TVM would refuse.
        distance = tirx.Max(a, b) - tirx.Min(a, b)
        return tirx.Select(a < b, tirx.bitwise_not(tirx.Max(distance, one) - one), distance)

    return _elementwise("subtract", operands, difference)


@defines("ThresholdedRelu")
def _thresholded_relu(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    alpha, zero = (tirx.const(value, operands.dtype(0)) for value in (attribute(node, "alpha", 1.0), 0.0))
    return _elementwise("thresholded_relu", operands, lambda x: tirx.Select(x > alpha, x, zero))


@defines("Elu", "Selu", "Celu")
def _exponential_unit(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    dtype = operands.dtype(0)
    wide = "float64" if dtype == "float64" else "float32"
    alpha = attribute(node, "alpha", 1.67326319217681884765625 if node.op_type == "Selu" else 1.0)
    factor, gamma = tirx.const(alpha, wide), attribute(node, "gamma", 1.05070102214813232421875)
    zero, one = (tirx.const(value, wide) for value in (0.0, 1.0))

    def unit(x: PrimExpr) -> PrimExpr:
        x = x if dtype == wide else tirx.Cast(wide, x)
        power = tirx.exp(x / factor if node.op_type == "Celu" and alpha != 1.0 else x)
        result = tirx.Select(x < zero, factor * (power - one), x)
        result = tirx.const(gamma, wide) * result if node.op_type == "Selu" else result
        return result if dtype == wide else tirx.Cast(dtype, result)

    return _elementwise(node.op_type.lower(), operands, unit)


@defines("Softplus")
def _softplus(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    zero = tirx.const(0.0, operands.dtype(0))

    def softplus(x: PrimExpr) -> PrimExpr:
        # Of 1 + exp(-20) single precision leaves nothing but 1.
        return tirx.Max(x, zero) + tirx.log1p(tirx.exp(zero - tirx.abs(x)))

    return _elementwise("softplus", operands, softplus)


@defines("Mish")
def _mish(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    two, most = (tirx.const(value, operands.dtype(0)) for value in (2.0, 20.0))

    def mish(x: PrimExpr) -> PrimExpr:
        # tanh(log(1 + e)) is ((1 + e)² - 1) / ((1 + e)² + 1), which from 20 on is 1 in every precision.
        power = tirx.exp(tirx.Min(x, most))
        above = power * (power + two)
        return x * (above / (above + two))

    return _elementwise("mish", operands, mish)


@defines("PRelu")
def _p_relu(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    zero = tirx.const(0, operands.dtype(0))
    # A zero stays what it is, whatever the slope, which may be infinite.
    return _elementwise("p_relu", operands, lambda x, slope: tirx.Select(x < zero, x * slope, x))


@defines("LeakyRelu")
def _leaky_relu(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    if attribute(node, "alpha", 0.01) != 0.0:
        return None
    # TVM takes a product with zero to be zero, also of an infinity.
    zero = tirx.const(0.0, operands.dtype(0))
    return _elementwise("leaky_relu", operands, lambda x: tirx.Select(x < zero, tirx.Mul(x, zero), x))


@defines("Mul", "Div")
def _with_zero(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    if not is_floating(operands.dtype(0)):
        return _divided(node, operands) if node.op_type == "Div" else None
    known = [operands.constant(k) for k in range(2)]
    if not any(array is not None and array.size == 1 and not array.any() for array in known):
        return None
    # TVM refuses a division by zero, and takes zero times or by anything to be zero.
    kind = tirx.Mul if node.op_type == "Mul" else tirx.Div
    return _elementwise(node.op_type.lower(), operands, kind)


def _divided(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    """A quotient or remainder of integers, which no divisor makes trap: by zero it is zero, as NumPy has it."""
    divisor, dtype = operands.constant(1), operands.dtype(0)
    signed = dtype.startswith("int")
    if divisor is not None and divisor.all() and not (signed and (divisor == -1).any()):
        return None
    zero, one = (tirx.const(value, dtype) for value in (0, 1))

    def quotient(a: PrimExpr, b: PrimExpr) -> PrimExpr:
        # The least integer by -1 overflows, which traps as zero does.
        unsafe, special = b == zero, zero
        if signed:
            minus = tirx.const(-1, dtype)
            unsafe = tirx.Or(unsafe, b == minus)
            if node.op_type == "Div":
                special = tirx.Select(b == minus, zero - a, zero)
        safe = tirx.Select(unsafe, one, b)
        if node.op_type == "Div":
            return tirx.Select(unsafe, special, tirx.truncdiv(a, safe))
        rest = tirx.truncmod(a, safe) if attribute(node, "fmod", 0) else tirx.floormod(a, safe)
        return tirx.Select(unsafe, special, rest)

    return _elementwise(node.op_type.lower(), operands, quotient)


@defines("Cast")
def _cast(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    source, target = operands.dtype(0), str(helper.tensor_dtype_to_np_dtype(attribute(node, "to")))
    if not (source.startswith("uint") and target.startswith("int")) or DataType(source).bits < DataType(target).bits:
        return None
    unsigned, minus = f"u{target}", tirx.const(-1, target)
    most = tirx.const(np.iinfo(target).max, unsigned)

    def signed(x: PrimExpr) -> PrimExpr:
        x = x if source == unsigned else tirx.Cast(unsigned, x)
        # TVM takes what was cast from an unsigned type not to be negative, which is true of each side here.
        return tirx.Select(x > most, minus - tirx.Cast(target, tirx.bitwise_not(x)), tirx.Cast(target, x))

    return _elementwise("cast", operands, signed)


@defines("Mod")
def _mod(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    dtype = operands.dtype(0)
    if not is_floating(dtype):
        return _divided(node, operands)
    # A remainder is exact, in the wider type, too.
    wide = "float64" if dtype == "float64" else "float32"
    zero = tirx.const(0.0, wide)

    def rest(a: PrimExpr, b: PrimExpr) -> PrimExpr:
        a, b = (value if dtype == wide else tirx.Cast(wide, value) for value in (a, b))
        truncated = tirx.Mod(a, b)
        if attribute(node, "fmod", 0):
            result = truncated
        else:
            # With the sign of the divisor; an infinite divisor of the other sign is the result itself.
            other_sign = tirx.Or(tirx.And(truncated < zero, b > zero), tirx.And(truncated > zero, b < zero))
            result = tirx.Select(other_sign, truncated + b, truncated)
        return result if dtype == wide else tirx.Cast(dtype, result)

    return _elementwise("mod", operands, rest)


@defines("BitShift")
def _bit_shift(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    dtype = operands.dtype(0)
    bits, right = DataType(dtype).bits, attribute(node, "direction") == b"RIGHT"
    zero, most = tirx.const(0, dtype), tirx.const(bits - 1, dtype)

    def shifted(x: PrimExpr, amount: PrimExpr) -> PrimExpr:
        inside = tirx.LE(amount, most)
        if dtype.startswith("int"):
            inside = tirx.And(inside, tirx.GE(amount, zero))
        safe = tirx.Select(inside, amount, zero)
        # Beyond the width nothing but the sign is left, of which a shift to the right makes copies.
        rest = tirx.shift_right(x, most) if right and dtype.startswith("int") else zero
        return tirx.Select(inside, tirx.shift_right(x, safe) if right else tirx.shift_left(x, safe), rest)

    return _elementwise("bit_shift", operands, shifted)
