"""Element types of less than 16 bits that neither TVM nor a GPU computes in, held as bytes.

A tensor of such a type is one of ``uint8`` in the program, a byte for each element as in NumPy's arrays of it, and
data movement moves these. To compute with them they are converted: an element's bits are put together from the bits
of a number by integer arithmetic, which is exact on every target.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from souffle.element_types import SMALL_TYPES
from souffle.frontend.refusal import Obstacle
from souffle.frontend.values import Coded, Known, Stacked, Value
from souffle.program import Tensor
from souffle.program.extrema import is_floating
from souffle.tvm_compat import PrimExpr, dtype_of

__all__ = [
    "CODES",
    "bits_of",
    "codes_of",
    "converted",
    "decoded",
    "encoded",
    "is_small",
    "source_type",
    "standing_for",
    "zero_code",
]

CODES = "uint8"
"""What holds an element of any small type."""

_FAR = 2.0**30
"""Beyond it every number has the lower bits zero, and within it every one is an int32."""


@dataclass(frozen=True)
class _Format:
    """A floating-point type of up to 8 bits.

    Attributes
    ----------
    mantissa : int
        Bits behind the point.
    bias : int
        Of the exponent.
    sign : int
        The sign's bit.
    largest : int
        The bits of the largest finite number.
    beyond : int or None
        The bits of an infinity, or of what takes its place; ``None`` where there is nothing beyond the finite.
    nan : int or None
        The bits of what is no number.
    """

    mantissa: int
    bias: int
    sign: int
    largest: int
    beyond: int | None
    nan: int | None

    @property
    def unsigned_zero(self) -> bool:
        """Whether the bits of minus zero are those of NaN, so that there is none."""
        return self.nan == self.sign

    @property
    def infinite(self) -> bool:
        """Whether it has infinities."""
        return self.beyond is not None and self.beyond != self.nan


_FORMATS = {
    "float8_e4m3fn": _Format(3, 7, 0x80, 0x7E, 0x7F, 0x7F),
    "float8_e4m3fnuz": _Format(3, 8, 0x80, 0x7F, 0x80, 0x80),
    "float8_e5m2": _Format(2, 15, 0x80, 0x7B, 0x7C, 0x7E),
    "float8_e5m2fnuz": _Format(2, 16, 0x80, 0x7F, 0x80, 0x80),
    "float6_e2m3fn": _Format(3, 1, 0x20, 0x1F, None, None),
    "float6_e3m2fn": _Format(2, 3, 0x20, 0x1F, None, None),
    "float4_e2m1fn": _Format(1, 1, 0x08, 0x07, None, None),
}
_INTEGERS = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2}
_POWERS = "float8_e8m0fnu"
"""Powers of two from 2**-127 on, and NaN; without zero and sign."""


def is_small(dtype: str) -> bool:
    """Whether elements of this type are held as bytes."""
    return dtype in SMALL_TYPES


@dataclass(frozen=True)
class _Wide:
    """The type that is converted from: its name, the integers of as many bits, and where its parts are."""

    name: str
    integer: str
    mantissa: int
    bias: int

    def number(self, value: int) -> PrimExpr:
        """An integer constant."""
        return tirx.const(value, self.integer)

    @property
    def infinity(self) -> int:
        """The bits of infinity, as an integer."""
        return (2 * self.bias + 1) << self.mantissa

    def bits_of(self, value: float) -> int:
        """The bits of a number, as an integer."""
        return int(np.array(value, self.name).view(self.integer))

    def magnitude(self, x: PrimExpr) -> PrimExpr:
        """The bits of `x` without its sign."""
        return tirx.bitwise_and(tirx.reinterpret(self.integer, x), self.number(np.iinfo(self.integer).max))


_WIDE = {"float32": _Wide("float32", "int32", 23, 127), "float64": _Wide("float64", "int64", 52, 1023)}


def source_type(dtype: str, target: str) -> str:
    """The type by way of which `dtype` becomes the small type `target`, without a digit of difference."""
    if target in _INTEGERS and not is_floating(dtype):
        return "int32" if dtype == "bool" else dtype
    if target == _POWERS:
        # Whose range holds all numbers of single precision with an exponent of their own.
        return "float64"
    return "float64" if dtype in ("float64", "int32", "uint32", "int64", "uint64") else "float32"


def encoded(x: PrimExpr, target: str, *, saturate: bool = True, round_mode: str = "up") -> PrimExpr:
    """The byte of `x` in a small type.

    Parameters
    ----------
    x : expression
        Of the type that :func:`source_type` names.
    target : str
    saturate : bool
        Whether what is too large becomes the largest finite number, in types of 8 bits, and not an infinity or NaN.
    round_mode : {"up", "down", "nearest"}
        How to round to powers of two; all others take the nearest number, and of two such the even one.

    Raises
    ------
    Obstacle
        If `round_mode` is another word.
    """
    if target in _INTEGERS:
        return _encoded_integer(x, _INTEGERS[target])
    wide = _WIDE[dtype_of(x)]
    if target == _POWERS:
        return tirx.Cast(CODES, _encoded_power(x, wide, saturate, round_mode))
    return tirx.Cast(CODES, _encoded_float(x, wide, _FORMATS[target], saturate))


def _encoded_integer(x: PrimExpr, bits: int) -> PrimExpr:
    if is_floating(dtype_of(x)):
        # ONNX leaves open what becomes of numbers out of range; here they lose their upper bits, and NaN is 0.
        least, most = (tirx.const(value, dtype_of(x)) for value in (-_FAR, _FAR))
        x = tirx.Cast("int32", tirx.Select(x >= least, tirx.Min(x, most), least))
    return tirx.Cast(CODES, tirx.bitwise_and(x, tirx.const((1 << bits) - 1, dtype_of(x))))


def _encoded_float(x: PrimExpr, wide: _Wide, form: _Format, saturate: bool) -> PrimExpr:
    n, a, dropped = wide.number, wide.magnitude(x), wide.mantissa - form.mantissa
    least_exponent = wide.bias + 1 - form.bias
    finite = tirx.Min(a, n(wide.infinity))
    even = tirx.bitwise_and(tirx.shift_right(finite, n(dropped)), n(1))
    normal = tirx.shift_right(finite + n((1 << (dropped - 1)) - 1) + even, n(dropped))
    normal = normal - n((least_exponent - 1) << form.mantissa)
    # The sum with a number whose last digit is the type's own last one is rounded to that by the addition itself.
    last_digit = math.ldexp(1.0, wide.mantissa + 1 - form.bias - form.mantissa)
    shifted = tirx.reinterpret(wide.name, a) + tirx.const(last_digit, wide.name)
    tiny = tirx.reinterpret(wide.integer, shifted) - n(wide.bits_of(last_digit))
    code = tirx.Select(a >= n(least_exponent << wide.mantissa), normal, tiny)
    if saturate or form.beyond is None:
        code = tirx.Min(code, n(form.largest))
    else:
        code = tirx.Select(code > n(form.largest), n(form.beyond), code)
    sign = tirx.shift_right(tirx.reinterpret(wide.integer, x), n(np.iinfo(wide.integer).bits - 1))
    sign = tirx.bitwise_and(sign, n(1)) * n(form.sign)
    no_number = a > n(wide.infinity)
    if form.nan is None:
        # As NumPy's types have it: there is no NaN, and it becomes a zero.
        return tirx.Select(no_number, n(form.sign) - sign, tirx.bitwise_or(code, sign))
    if form.unsigned_zero:
        signed = tirx.Select(code == n(0), n(0), tirx.bitwise_or(code, sign))
        return tirx.Select(no_number, n(form.nan), signed)
    return tirx.bitwise_or(tirx.Select(no_number, n(form.nan), code), sign)


def _encoded_power(x: PrimExpr, wide: _Wide, saturate: bool, round_mode: str) -> PrimExpr:
    """The exponent of a power of two; of signs nothing is said, and there is none."""
    n, a, one = wide.number, wide.magnitude(x), 1 << wide.mantissa
    # What is added to the bits so that the exponent is that of the rounded number; ties go up.
    added = {"up": one - 1, "down": 0, "nearest": one >> 1}.get(round_mode)
    if added is None:
        raise Obstacle(
            f"its attribute round_mode = {round_mode} is not known", "give one of the words up, down and nearest"
        )
    exponent = tirx.shift_right(tirx.Min(a, n(wide.infinity)) + n(added), n(wide.mantissa)) - n(wide.bias - 127)
    inside = tirx.Max(tirx.Min(exponent, n(254)), n(0))
    # Zero is beyond the least power of two, as an infinity is beyond the largest.
    code = inside if saturate else tirx.Select(exponent == inside, inside, n(255))
    return tirx.Select(a > n(wide.infinity), n(255), code)


def decoded(code: PrimExpr, source: str) -> PrimExpr:
    """The number that a byte of a small type stands for: an int32 or a float32."""
    code = tirx.Cast("int32", code)

    def n(value: int) -> PrimExpr:
        return tirx.const(value, "int32")

    if source in _INTEGERS:
        bits = _INTEGERS[source]
        # The upper bits of the byte are whatever they are.
        value = tirx.bitwise_and(code, n((1 << bits) - 1))
        return (
            value
            if source.startswith("uint")
            else tirx.Select(value >= n(1 << (bits - 1)), value - n(1 << bits), value)
        )
    nan = tirx.const(math.nan, "float32")
    if source == _POWERS:
        power = tirx.reinterpret("float32", tirx.shift_left(tirx.Max(code, n(1)), n(23)))
        return tirx.Select(code == n(255), nan, tirx.Select(code == n(0), tirx.const(2.0**-127, "float32"), power))
    form = _FORMATS[source]
    magnitude = tirx.bitwise_and(code, n(form.sign - 1))
    bits = tirx.shift_left(magnitude, n(23 - form.mantissa)) + n((127 - form.bias) << 23)
    tiny = tirx.Cast("float32", magnitude) * tirx.const(math.ldexp(1.0, 1 - form.bias - form.mantissa), "float32")
    value = tirx.Select(magnitude < n(1 << form.mantissa), tiny, tirx.reinterpret("float32", bits))
    if form.infinite:
        infinity = tirx.const(math.inf, "float32")
        value = tirx.Select(magnitude < n(form.beyond), value, tirx.Select(magnitude == n(form.beyond), infinity, nan))
    elif form.nan is not None and not form.unsigned_zero:
        value = tirx.Select(magnitude == n(form.nan), nan, value)
    negative = tirx.bitwise_and(code, n(form.sign)) != n(0)
    value = tirx.Select(negative, tirx.const(-1.0, "float32"), tirx.const(1.0, "float32")) * value
    return tirx.Select(code == n(form.nan), nan, value) if form.unsigned_zero else value


def converted(x: PrimExpr, target: str) -> PrimExpr:
    """`x` in another type that programs hold; true where it is not zero."""
    dtype = dtype_of(x)
    if target == "bool":
        # NaN is true, though a comparison with it does not hold on every target.
        return tirx.Select(x == tirx.const(0, dtype), tirx.const(False, "bool"), tirx.const(True, "bool"))
    return x if dtype == target else tirx.Cast(target, x)


def zero_code(dtype: str) -> int:
    """The byte of zero in a small type.

    Raises
    ------
    Obstacle
        If the type has no zero.
    """
    if dtype == _POWERS:
        raise Obstacle(f"it puts zeros into elements of type {dtype}, which has no zero", "give the value to pad with")
    return 0


def bits_of(dtype: str) -> int:
    """How many bits ONNX gives an element."""
    narrow = re.match(r"(?:u?int|float)([246])(?:_|$)", dtype)
    return int(narrow[1]) if narrow else 8 * np.dtype(dtype).itemsize


def codes_of(value: Value) -> Value:
    """A value of a small type as the bytes that it is held as; any other as it is."""
    if isinstance(value, Coded):
        return value.codes
    if isinstance(value, Known) and is_small(value.dtype):
        return Known(value.array.view(CODES), value.name)
    if isinstance(value, Stacked):
        return Stacked(tuple(codes_of(piece) for piece in value.pieces), value.axis, value.name)
    return value


def standing_for(codes: Value, dtype: str) -> Value:
    """Bytes as a value of the small type that they are held for."""
    if isinstance(codes, Known):
        return Known(codes.array.view(np.dtype(dtype)), codes.name)
    if isinstance(codes, Stacked):
        return Stacked(tuple(standing_for(piece, dtype) for piece in codes.pieces), codes.axis, codes.name)
    return Coded(codes, dtype) if isinstance(codes, Tensor) else codes
