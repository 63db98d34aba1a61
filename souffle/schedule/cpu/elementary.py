"""exp, tanh, erf and sigmoid as arithmetic, so that loops with them vectorise.

LLVM turns a vector ``exp`` into one call of the C library per lane. The polynomials below were fitted by iteratively
reweighted least squares over the intervals given; with the arithmetic's own rounding the results are within about two
units in the last place of float32 (erf near its saturation: 1e-7 absolute).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tvm
from tvm import tirx
from tvm.ir import Call
from tvm.target import codegen
from tvm.tirx import Div

from souffle.schedule.cpu.host import features_of
from souffle.schedule.cpu.temporaries import Bind, bind_calls
from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import PrimExpr, dtype_of

__all__ = ["expand_elementary", "is_expensive", "is_expensive_call", "rounded_to_bfloat16", "scales"]

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
_SINH_SMALL = tuple(1 / math.factorial(n) for n in (3, 5, 7, 9, 11))
"""(sinh(x)/x - 1) / x² in x² for \\|x\\| ≤ 1."""
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

_EXTERN = frozenset(("tirx.call_extern", "tirx.call_pure_extern"))
"""Their first argument is a name, and the first kind may have effects."""

_ROUNDED = "rounded to bfloat16"
_SCALING = "llvm.ldexp"
_Scaling = Callable[[PrimExpr, PrimExpr, Bind], PrimExpr]
"""A value, times two to a power."""


def is_expensive_call(call: Call) -> bool:
    """Whether a call costs many times an addition, so that it should not be repeated."""
    return getattr(call.op, "name", "") in _EXPENSIVE


def is_expensive(expression: PrimExpr) -> bool:
    """Whether an expression has such a call, or a division of floating-point numbers."""
    found: list[bool] = []
    structural_walk(
        expression,
        [
            (Call, lambda call: found.append(is_expensive_call(call))),
            (Div, lambda division: found.append(dtype_of(division).startswith(("float", "bfloat")))),
        ],
    )
    return any(found)


def _f32(value: float) -> PrimExpr:
    return tirx.const(value, "float32")


def _polynomial(x: PrimExpr, coefficients: Sequence[float]) -> PrimExpr:
    result = _f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + _f32(coefficient)
    return result


def _power_of_two(exponent: PrimExpr) -> PrimExpr:
    return tirx.reinterpret("float32", tirx.shift_left(exponent + tirx.const(127, "int32"), tirx.const(23, "int32")))


def _is_nan(x: PrimExpr) -> PrimExpr:
    # On the bits, since x != x is simplified away.
    magnitude = tirx.bitwise_and(tirx.reinterpret("int32", x), tirx.const(0x7FFFFFFF, "int32"))
    return magnitude > tirx.const(0x7F800000, "int32")


def _times_power_of_two(value: PrimExpr, exponent: PrimExpr, bind: Bind) -> PrimExpr:
    # Two factors, since 2^k itself leaves the range of normal numbers at both ends.
    half = bind(tirx.shift_right(exponent, tirx.const(1, "int32")))
    return value * _power_of_two(half) * _power_of_two(exponent - half)


def _scaled(value: PrimExpr, exponent: PrimExpr, bind: Bind) -> PrimExpr:
    return tirx.call_llvm_pure_intrin("float32", _SCALING, bind(value), exponent)


def _exp(x: PrimExpr, bind: Bind, times: _Scaling, *, halvings: int = 0) -> PrimExpr:
    """exp(x), or exp(x) divided by two so many times, also where exp(x) itself would overflow."""
    clamped = bind(tirx.max(tirx.min(x, _f32(_EXP_HIGH + halvings)), _f32(_EXP_LOW)))
    n = bind(tirx.nearbyint(clamped * _f32(_LOG2_E)))
    r = bind(clamped - n * _f32(_LN2_HIGH) - n * _f32(_LN2_LOW))
    k = bind(tirx.Cast("int32", n) - tirx.const(halvings, "int32") if halvings else tirx.Cast("int32", n))
    value = _polynomial(r, _EXP_TAIL) * (r * r) + r + _f32(1.0)
    return tirx.Select(_is_nan(x), x, times(value, k, bind))


def _sigmoid(x: PrimExpr, bind: Bind, times: _Scaling) -> PrimExpr:
    return _f32(1.0) / (_f32(1.0) + _exp(bind(_f32(0.0) - x), bind, times))


def _tanh(x: PrimExpr, bind: Bind, times: _Scaling) -> PrimExpr:
    magnitude = bind(tirx.abs(x))
    square = bind(x * x)
    small = x + x * (square * _polynomial(square, _TANH_SMALL))
    large = bind(_f32(1.0) - _f32(2.0) / (_exp(bind(magnitude + magnitude), bind, times) + _f32(1.0)))
    signed = tirx.Select(x < _f32(0.0), _f32(0.0) - large, large)
    return tirx.Select(magnitude < _f32(0.625), small, signed)


def _cosh(x: PrimExpr, bind: Bind, times: _Scaling) -> PrimExpr:
    grown = bind(_exp(bind(tirx.abs(x)), bind, times, halvings=1))
    return grown + _f32(0.25) / grown


def _sinh(x: PrimExpr, bind: Bind, times: _Scaling) -> PrimExpr:
    square = bind(x * x)
    small = x + x * (square * _polynomial(square, _SINH_SMALL))
    grown = bind(_exp(bind(tirx.abs(x)), bind, times, halvings=1))
    large = bind(grown - _f32(0.25) / grown)
    signed = tirx.Select(x < _f32(0.0), _f32(0.0) - large, large)
    return tirx.Select(tirx.abs(x) < _f32(1.0), small, signed)


def _erf(x: PrimExpr, bind: Bind, times: _Scaling) -> PrimExpr:
    magnitude = bind(tirx.abs(x))
    small = x * _polynomial(bind(x * x), _ERF_SMALL)
    limited = bind(tirx.min(magnitude, _f32(4.0)))
    large = bind(_f32(1.0) - _exp(bind(_f32(0.0) - _polynomial(limited, _ERFC_LOG)), bind, times))
    signed = tirx.Select(x < _f32(0.0), _f32(0.0) - large, large)
    result = tirx.Select(magnitude < _f32(1.0), small, signed)
    return tirx.Select(_is_nan(x), x, result)


_UNARY = {
    "tirx.exp": _exp,
    "tirx.erf": _erf,
    "tirx.tanh": _tanh,
    "tirx.sigmoid": _sigmoid,
    "tirx.cosh": _cosh,
    "tirx.sinh": _sinh,
}
_POWERS = {1.0: lambda x: x, 2.0: lambda x: x * x, 3.0: lambda x: x * x * x}


def scales(target: tvm.target.Target) -> bool:
    """Whether a target has an instruction for vectors of float32 times powers of two, that of AVX-512."""
    return "avx512f" in features_of(target) and codegen.llvm_lookup_intrinsic_id(_SCALING) > 0


def expand_elementary(statement: tirx.Stmt, *, scaling: bool = False) -> tirx.Stmt:
    """Replace exp, erf, tanh, sigmoid and small constant powers of float32 and float16 by arithmetic.

    Arguments and results of these and of other expensive functions are kept in local arrays, so that none is repeated.

    Parameters
    ----------
    statement : Stmt
    scaling : bool
        Whether the target :func:`scales`.
    """
    times = _scaled if scaling else _times_power_of_two

    def expand(call: Call, arguments: Sequence[PrimExpr], bind: Bind) -> PrimExpr:
        name, dtype = call.op.name, dtype_of(call)
        if dtype in ("float16", "bfloat16") and all(dtype_of(argument) == dtype for argument in arguments):
            # Nothing computes such a function of half the width, and in LLVM few exist.
            wide = [bind(tirx.Cast("float32", argument)) for argument in arguments]
            return tirx.Cast(dtype, expand(tirx.call_intrin("float32", name, *wide), wide, bind))
        if name in _UNARY and dtype == "float32":
            return _UNARY[name](arguments[0], bind, times)
        if name == "tirx.pow" and dtype == "float32" and isinstance(arguments[1], tirx.FloatImm):
            power = _POWERS.get(arguments[1].value)
            if power is not None:
                return power(arguments[0])
        return Call(call.op, list(arguments), call.attrs, None, None, call.ty)

    return bind_calls(statement, lambda call: is_expensive_call(call) and call.op.name not in _EXTERN, expand)


def rounded_to_bfloat16(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with the rounding of each conversion to bfloat16 written as arithmetic.

    TVM computes bfloat16 as float32 on a CPU and rounds what is stored alone, so that a value that is converted there
    and back, with nothing stored between, would keep all its bits.
    """

    def marked(cast: tirx.Cast) -> PrimExpr:
        if dtype_of(cast) != "bfloat16" or dtype_of(cast.value) == "bfloat16":
            return cast
        return tirx.call_pure_extern("bfloat16", _ROUNDED, cast.value)

    def expand(call: Call, arguments: Sequence[PrimExpr], bind: Bind) -> PrimExpr:
        value = bind(tirx.Cast("float32", arguments[1]))
        bits = bind(tirx.reinterpret("int32", value))
        odd = tirx.bitwise_and(tirx.shift_right(bits, tirx.const(16, "int32")), tirx.const(1, "int32"))
        high = tirx.const(-(2**16), "int32")
        nearest = tirx.bitwise_and(bits + odd + tirx.const(0x7FFF, "int32"), high)
        # The sum would carry through a NaN whose bits are all set.
        quiet = tirx.bitwise_and(tirx.bitwise_or(bits, tirx.const(0x400000, "int32")), high)
        rounded = bind(tirx.reinterpret("float32", tirx.Select(_is_nan(value), quiet, nearest)))
        return tirx.Cast("bfloat16", rounded)

    body = structural_map(func.body, (tirx.Cast, marked))
    if body.same_as(func.body):
        return func
    return func.with_body(bind_calls(body, _is_rounding, expand))


def _is_rounding(call: Call) -> bool:
    return getattr(call.op, "name", "") in _EXTERN and getattr(call.args[0], "value", None) == _ROUNDED
