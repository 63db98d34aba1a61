"""exp, tanh, erf and sigmoid as arithmetic, so that loops with them vectorise.

LLVM turns a vector ``exp`` into one call of the C library per lane. The polynomials below were fitted by iteratively
reweighted least squares over the intervals given; with the arithmetic's own rounding the results are within about two
units in the last place of float32 (erf near its saturation: 1e-7 absolute).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from souffle.tvm_compat import PrimExpr, dtype_of

__all__ = ["expand_elementary", "is_expensive_call"]

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # few bits, so that its product with a small integer is exact
_LN2_LOW = -2.12194440054690583e-4
_EXP_HIGH, _EXP_LOW = 89.0, -104.0  # beyond these float32 overflows, or is zero
_EXP_TAIL = (0.5, 0.16666513681411743, 0.0416661873459816, 0.008369590155780315, 0.001395170227624476)
"""(exp(r) - 1 - r) / r² for \\|r\\| ≤ ln(2)/2; error 4e-9 of exp."""
_TANH_SMALL = (
    -0.3333333134651184,
    0.13333195447921753,
    -0.053945377469062805,
    0.021692603826522827,
    -0.008156274445354939,
    0.0021227404940873384,
)
"""(tanh(x)/x - 1) / x² in x² for x² ≤ 0.4."""
_ERF_SMALL = (
    1.1283791065216064,
    -0.3761262595653534,
    0.1128358542919159,
    -0.026853810995817184,
    0.00518832728266716,
    -0.0008010191959328949,
    7.853855640860274e-05,
)
"""erf(x)/x in x² for \\|x\\| ≤ 1."""
_ERFC_LOG = (
    -0.00018804127466864884,
    1.1295784711837769,
    0.6332198977470398,
    0.10841858386993408,
    -0.025208262726664543,
    0.004204563796520233,
    -0.00044133677147328854,
    2.1686881154892035e-05,
)
"""-log(1 - erf(t)) for 1 ≤ t ≤ 4; from 4 on erf is 1 in float32."""

_EXPENSIVE = frozenset(
    f"tirx.{name}"
    for name in (
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "call_extern",
        "call_pure_extern",
        "cos",
        "cosh",
        "erf",
        "exp",
        "exp10",
        "exp2",
        "fmod",
        "hypot",
        "ldexp",
        "log",
        "log10",
        "log1p",
        "log2",
        "pow",
        "rsqrt",
        "sigmoid",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    )
)


def is_expensive_call(call: Call) -> bool:
    """Whether a call costs many times an addition, so that it should not be repeated."""
    return getattr(call.op, "name", "") in _EXPENSIVE


def _f32(value: float) -> PrimExpr:
    return tirx.const(value, "float32")


def _polynomial(x: PrimExpr, coefficients: Sequence[float]) -> PrimExpr:
    result = _f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + _f32(coefficient)
    return result


def _let(value: PrimExpr, make: Callable[[tirx.Var], PrimExpr]) -> PrimExpr:
    variable = tirx.Var("t", dtype_of(value))
    return tirx.Let(variable, value, make(variable))


def _power_of_two(exponent: PrimExpr) -> PrimExpr:
    return tirx.reinterpret("float32", tirx.shift_left(exponent + tirx.const(127, "int32"), tirx.const(23, "int32")))


def _is_nan(x: PrimExpr) -> PrimExpr:
    # On the bits, since x != x is simplified away.
    magnitude = tirx.bitwise_and(tirx.reinterpret("int32", x), tirx.const(0x7FFFFFFF, "int32"))
    return magnitude > tirx.const(0x7F800000, "int32")


def _exp(x: PrimExpr) -> PrimExpr:
    def of_clamped(c: PrimExpr, original: PrimExpr) -> PrimExpr:
        return _let(tirx.nearbyint(c * _f32(_LOG2_E)), lambda n: of_parts(c, n, original))

    def of_parts(c: PrimExpr, n: PrimExpr, original: PrimExpr) -> PrimExpr:
        rest = c - n * _f32(_LN2_HIGH) - n * _f32(_LN2_LOW)
        return _let(rest, lambda r: _let(tirx.Cast("int32", n), lambda k: scaled(r, k, original)))

    def scaled(r: PrimExpr, k: PrimExpr, original: PrimExpr) -> PrimExpr:
        # Two factors, since 2^k itself leaves the range of normal numbers at both ends.
        value = _polynomial(r, _EXP_TAIL) * (r * r) + r + _f32(1.0)
        half = tirx.shift_right(k, tirx.const(1, "int32"))
        result = _let(half, lambda h: value * _power_of_two(h) * _power_of_two(k - h))
        return tirx.Select(_is_nan(original), original, result)

    return _let(x, lambda v: _let(tirx.max(tirx.min(v, _f32(_EXP_HIGH)), _f32(_EXP_LOW)), lambda c: of_clamped(c, v)))


def _sigmoid(x: PrimExpr) -> PrimExpr:
    return _f32(1.0) / (_f32(1.0) + _exp(_f32(0.0) - x))


def _tanh(x: PrimExpr) -> PrimExpr:
    def of(v: PrimExpr) -> PrimExpr:
        magnitude = tirx.abs(v)
        small = _let(v * v, lambda s: v + v * (s * _polynomial(s, _TANH_SMALL)))
        large = _f32(1.0) - _f32(2.0) / (_exp(magnitude + magnitude) + _f32(1.0))
        signed = tirx.Select(v < _f32(0.0), _f32(0.0) - large, large)
        return tirx.Select(magnitude < _f32(0.625), small, signed)

    return _let(x, of)


def _erf(x: PrimExpr) -> PrimExpr:
    def of(v: PrimExpr) -> PrimExpr:
        small = v * _polynomial(v * v, _ERF_SMALL)
        limited = tirx.min(tirx.abs(v), _f32(4.0))
        large = _let(limited, lambda t: _f32(1.0) - _exp(_f32(0.0) - _polynomial(t, _ERFC_LOG)))
        signed = tirx.Select(v < _f32(0.0), _f32(0.0) - large, large)
        result = tirx.Select(tirx.abs(v) < _f32(1.0), small, signed)
        return tirx.Select(_is_nan(v), v, result)

    return _let(x, of)


def _power(x: PrimExpr, exponent: PrimExpr) -> PrimExpr | None:
    if not isinstance(exponent, tirx.FloatImm):
        return None
    if exponent.value == 2.0:
        return _let(x, lambda v: v * v)
    if exponent.value == 3.0:
        return _let(x, lambda v: v * v * v)
    if exponent.value == 1.0:
        return x
    return None


_UNARY = {"tirx.exp": _exp, "tirx.erf": _erf, "tirx.tanh": _tanh, "tirx.sigmoid": _sigmoid}


def expand_elementary(statement: tirx.Stmt) -> tirx.Stmt:
    """Replace exp, erf, tanh, sigmoid and small constant powers of float32 and float16 by arithmetic."""

    def expand(call: Call) -> PrimExpr:
        name = getattr(call.op, "name", "")
        if name in _UNARY and dtype_of(call) in ("float32", "float16"):
            narrow = dtype_of(call) == "float16"
            result = _UNARY[name](tirx.Cast("float32", call.args[0]) if narrow else call.args[0])
            return tirx.Cast("float16", result) if narrow else result
        if name == "tirx.pow" and dtype_of(call) == "float32":
            return _power(call.args[0], call.args[1]) or call
        return call

    return tvm_ffi.structural_map(statement, (Call, expand))
