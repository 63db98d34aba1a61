"""Recipes of operators that go element by element."""

from __future__ import annotations

import numpy as np

from benchmarks.fuzz.draft import Draft, Value
from benchmarks.fuzz.grammar import recipe
from benchmarks.fuzz.values import FLOATS, INTEGERS

__all__: list[str] = []

_COMMON = ("float32", "float32", "float16", "float64", "int64", "int32", "int8", "uint8", "bool")


@recipe("Neg", "Abs")
def _signed(d: Draft, op: str) -> None:
    d.emit(op, [d.pick("ffi")])


@recipe("Relu", "Sigmoid", "Tanh", "Erf", "Softsign", "Atan", "Sin", "Cos", weight=1.5)
def _anywhere(d: Draft, op: str) -> None:
    d.emit(op, [d.pick("f")])


@recipe("Mish", since=18)
def _mish(d: Draft) -> None:
    d.emit("Mish", [d.pick("f")])


@recipe("Softplus", "HardSwish", "Asinh")
def _moderate(d: Draft, op: str) -> None:
    d.emit(op, [d.pick("f")])


@recipe("Exp", "Sinh", "Cosh", weight=0.7)
def _growing(d: Draft, op: str) -> None:
    d.emit(op, [_within(d, -12, 12)])


@recipe("Tan", weight=0.5)
def _tan(d: Draft) -> None:
    d.emit("Tan", [_within(d, -1.4, 1.4)])


@recipe("Log", "Sqrt", "Reciprocal", weight=0.7)
def _of_positive(d: Draft, op: str) -> None:
    x = d.pick("f", tame=True)
    if np.min(x.array, initial=1.0) < 0.05:
        x = d.emit("Add", [d.emit("Abs", [x])[0], d.scalar(0.25, x.dtype)])[0]
    d.emit(op, [x])


@recipe("Asin", "Acos", "Atanh", weight=0.5)
def _of_unit(d: Draft, op: str) -> None:
    d.emit(op, [_within(d, -0.9, 0.9)])


@recipe("Acosh", weight=0.4)
def _acosh(d: Draft) -> None:
    x = d.pick("f", tame=True)
    if np.min(x.array, initial=2.0) < 1.2:
        x = d.emit("Add", [d.emit("Abs", [x])[0], d.scalar(1.5, x.dtype)])[0]
    d.emit("Acosh", [x])


def _within(d: Draft, low: float, high: float) -> Value:
    """A tensor whose values lie in a range."""
    x = d.pick("f", tame=True)
    if np.min(x.array, initial=0.0) < low or np.max(x.array, initial=0.0) > high:
        x = d.emit("Mul", [d.emit("Tanh", [x])[0], d.scalar(min(-low, high), x.dtype)])[0]
    return x


@recipe("Floor", "Ceil", "Round", weight=0.5)
def _rounding(d: Draft, op: str) -> None:
    d.emit(op, [d.pick("f", exact=True)])


@recipe("Sign", weight=0.5)
def _sign(d: Draft) -> None:
    d.emit("Sign", [d.pick("ffi", exact=True)])


@recipe("LeakyRelu", "Elu", "Celu", weight=0.7)
def _alpha(d: Draft, op: str) -> None:
    d.emit(op, [d.pick("f")], alpha=d.choice((None, 0.5, 1.5, 0.01)))


@recipe("Selu", weight=0.7)
def _selu(d: Draft) -> None:
    gamma = d.choice((None, 1.5))
    d.emit("Selu", [d.pick("f")], gamma=gamma, alpha=None if gamma is None else 0.75)


@recipe("HardSigmoid", weight=0.7)
def _hard_sigmoid(d: Draft) -> None:
    alpha = d.choice((None, 0.3))
    d.emit("HardSigmoid", [d.pick("f")], alpha=alpha, beta=None if alpha is None else 0.4)


@recipe("ThresholdedRelu", weight=0.5)
def _thresholded(d: Draft) -> None:
    d.emit("ThresholdedRelu", [d.pick("f", exact=True)], alpha=d.choice((None, 0.5, 0.0)))


@recipe("Shrink", weight=0.5)
def _shrink(d: Draft) -> None:
    bias = d.choice((None, 0.25))
    d.emit("Shrink", [d.pick("f", exact=True)], bias=bias, lambd=None if bias is None else 0.75)


@recipe("Gelu", since=20)
def _gelu(d: Draft) -> None:
    d.emit("Gelu", [d.pick("f")], approximate=d.choice((None, "none", "tanh")))


@recipe("Swish", since=24, weight=0.5)
def _swish(d: Draft) -> None:
    d.emit("Swish", [d.pick("f")], alpha=d.choice((None, 0.5)))


@recipe("PRelu", weight=0.7)
def _prelu(d: Draft) -> None:
    x = d.pick("f")
    shape = [1 if d.chance(0.3) else extent for extent in x.shape][d.integer(0, x.rank) if d.chance(0.5) else 0 :]
    d.emit("PRelu", [x, d.weight(x.dtype, shape)])


@recipe("Clip", weight=1.2)
def _clip(d: Draft) -> None:
    x = d.pick("ffi")
    low, high = (-1, 2) if x.dtype in FLOATS or "u" not in x.dtype else (1, 5)
    bounds = [d.scalar(low, x.dtype) if d.chance(0.7) else None, d.scalar(high, x.dtype) if d.chance(0.7) else None]
    d.emit("Clip", [x, *bounds])


@recipe("IsNaN", weight=0.4)
def _is_nan(d: Draft) -> None:
    d.emit("IsNaN", [d.pick("f")])


@recipe("IsInf", weight=0.4)
def _is_inf(d: Draft) -> None:
    positive = d.choice((None, 0, 1))
    d.emit("IsInf", [d.pick("f")], detect_positive=positive, detect_negative=None if positive is None else 1)


@recipe("Identity", "Dropout", weight=0.5)
def _unchanged(d: Draft, op: str) -> None:
    d.emit(op, [d.pick("ffib" if op == "Identity" else "f")])


@recipe("Cast", weight=1.5)
def _cast(d: Draft) -> None:
    to = d.choice(_COMMON if d.chance(0.7) else (*FLOATS, *INTEGERS, "bool"))
    to_float = to in FLOATS
    x = d.pick("fffiib", tame=not to_float, exact=not to_float)
    if "u" in to and np.min(x.array, initial=0) < 0 and x.dtype in FLOATS:
        # A negative number as an unsigned integer is undefined.
        x = d.emit("Abs", [x])[0]
    if to in INTEGERS and x.dtype in FLOATS and np.max(np.abs(x.array), initial=0) > 100:
        return
    d.emit("Cast", [x], to=int(_onnx_type(to)))


@recipe("CastLike", since=15, weight=0.5)
def _cast_like(d: Draft) -> None:
    x, like = d.pick("fib", tame=True, exact=True), d.pick("fi")
    if "u" not in like.dtype:
        d.emit("CastLike", [x, like])


def _onnx_type(dtype: str) -> int:
    types = {"float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9}
    return {**types, "float16": 10, "float64": 11, "uint32": 12, "uint64": 13}[dtype]


@recipe("Add", "Sub", "Mul", weight=2.5)
def _arithmetic(d: Draft, op: str) -> None:
    x = d.pick("fffffi")
    _either_way(d, op, x, d.broadcastable(x))


def _either_way(d: Draft, op: str, x: Value, y: Value) -> list[Value]:
    return d.emit(op, [y, x] if d.chance(0.4) else [x, y])


@recipe("Div", weight=1.5)
def _div(d: Draft) -> None:
    x = d.pick("fffffi")
    y = d.broadcastable(x)
    if x.dtype in INTEGERS:
        # A remainder is left to the type, division by zero to nobody; of negative numbers ONNX says nothing.
        y = _nonzero(d, x)
        x = x if np.min(x.array, initial=0) >= 0 else d.emit("Abs", [x])[0]
    elif np.min(np.abs(y.array), initial=1.0) < 0.05 and not d.special:
        y = d.emit("Add", [d.emit("Abs", [y])[0], d.scalar(0.5, y.dtype)])[0]
    d.emit("Div", [x, y])


def _nonzero(d: Draft, x: Value) -> Value:
    values = np.asarray(d.rng.integers(1, 6, x.shape if d.chance(0.5) else ())).astype(x.dtype)
    return d.constant(values) if d.chance(0.5) else d.input(values)


@recipe("Pow", weight=0.8)
def _pow(d: Draft) -> None:
    x = d.pick("f", tame=True)
    if d.chance(0.6):
        exponent = d.choice((2.0, 3.0, 2.0, 1.0, 0.0))
        dtype = d.choice((x.dtype, x.dtype, "int32", "int64", "float32"))
        d.emit("Pow", [x, d.scalar(exponent, dtype)])
        return
    base = d.emit("Add", [d.emit("Abs", [x])[0], d.scalar(0.25, x.dtype)])[0]
    d.emit("Pow", [base, d.broadcastable(base, "eighths")])


@recipe("Max", "Min", weight=1.5)
def _extreme(d: Draft, op: str) -> None:
    _several(d, op, d.pick("ffffi"))


@recipe("Sum", "Mean", weight=0.6)
def _sum(d: Draft, op: str) -> None:
    _several(d, op, d.pick("f"))


def _several(d: Draft, op: str, x: Value) -> None:
    operands = [x]
    for _ in range(d.choice((0, 1, 1, 1, 2, 3))):
        operands.append(d.broadcastable(x))
    order = d.rng.permutation(len(operands))
    d.emit(op, [operands[i] for i in order])


@recipe("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", weight=0.6)
def _comparison(d: Draft, op: str) -> None:
    x = d.pick("ffi", exact=True)
    style = "eighths" if x.dtype in FLOATS else ""
    _either_way(d, op, x, d.broadcastable(x, style if d.chance(0.8) else ""))


@recipe("And", "Or", "Xor", weight=0.5)
def _logical(d: Draft, op: str) -> None:
    x = d.pick("b")
    _either_way(d, op, x, d.broadcastable(x))


@recipe("Not", weight=0.5)
def _not(d: Draft) -> None:
    d.emit("Not", [d.pick("b")])


@recipe("BitwiseAnd", "BitwiseOr", "BitwiseXor", since=18, weight=0.4)
def _bitwise(d: Draft, op: str) -> None:
    x = d.pick("i")
    _either_way(d, op, x, d.broadcastable(x))


@recipe("BitwiseNot", since=18, weight=0.3)
def _bitwise_not(d: Draft) -> None:
    d.emit("BitwiseNot", [d.pick("i")])


@recipe("BitShift", weight=0.4)
def _shift(d: Draft) -> None:
    x = d.fresh(d.choice(("uint8", "uint32", "uint64", "uint16")), d.shape())
    y = d.fresh(x.dtype, x.shape if d.chance(0.5) else ())
    d.emit("BitShift", [x, y], direction=d.choice(("LEFT", "RIGHT")))


@recipe("Mod", weight=0.7)
def _mod(d: Draft) -> None:
    x = d.pick("ffii", tame=True, exact=True)
    if x.dtype in INTEGERS:
        y = _nonzero(d, x)
        if d.chance(0.4) and "u" not in x.dtype:
            y = d.emit("Neg", [y])[0]
        d.emit("Mod", [x, y], fmod=d.choice((None, 0, 1)))
    else:
        y = d.constant(np.asarray(d.rng.choice((-1.5, 0.5, 0.75, 2.0, -0.25), x.shape)).astype(x.dtype))
        d.emit("Mod", [x, y], fmod=1)


@recipe("Where", weight=1.2)
def _where(d: Draft) -> None:
    x = d.pick("fffi")
    y = d.broadcastable(x)
    present = [value for value in d.values if value.dtype == "bool" and value.shape == x.shape]
    condition = d.choice(present) if present and d.chance(0.6) else d.broadcastable(x, dtype="bool")
    d.emit("Where", [condition, x, y] if d.chance(0.6) else [condition, y, x])


@recipe("QuantizeLinear", "DequantizeLinear", weight=0.6)
def _quantize(d: Draft, op: str) -> None:
    dtype = d.choice(("uint8", "int8"))
    if op == "QuantizeLinear":
        x = d.pick("f", tame=True, exact=True, where=lambda v: v.dtype == "float32")
    else:
        x = d.fresh(dtype, d.shape())
    if x.dtype in ("float16", "float64"):
        return
    axis, shape, attributes = None, (), {}
    if x.rank and d.chance(0.5):
        axis = d.axis(x)
        shape, attributes = (x.shape[axis],), {"axis": axis}
    scale = d.constant(np.asarray(d.rng.choice((0.125, 0.25, 0.5, 1.0), shape)).astype(np.float32))
    zero = d.constant(np.asarray(d.rng.integers(0, 9, shape)).astype(dtype)) if d.chance(0.8) else None
    if op == "QuantizeLinear" and zero is None:
        dtype = "uint8"
    (y,) = d.emit(op, [x, scale, zero], **attributes)
    if op == "QuantizeLinear" and d.chance(0.6):
        d.emit("DequantizeLinear", [y, scale, zero], **attributes)


@recipe("DynamicQuantizeLinear", weight=0.3)
def _dynamic_quantize(d: Draft) -> None:
    x = d.pick("f", tame=True, exact=True, where=lambda v: v.dtype == "float32")
    d.emit("DynamicQuantizeLinear", [x], outputs=3)
