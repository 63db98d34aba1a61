"""Sums of products of short integers on x86, several of them in each word: ``vpdpbusd``, ``vpdpwssd`` and ``vpmaddwd``.

::

    C[m, n] += x[m, k] * w[k, n]   →   C[m, n] += dot(X[m, q], W[q, n]),   X[m, q] = x[m, d q], ..., x[m, d q + d - 1]

Right since integers are added in any order with one result, and zeros, which fill the last word up, add nothing. A
word has four bytes where one operand is without a sign and the other one with it, which is what ``vpdpbusd`` takes;
else two numbers of 16 bits, which hold differences of bytes, too.

LLVM itself makes such an instruction of sums of products of bytes, and of some a wrong one: of 8 or 16 products of a
byte without a sign and one with it, version 22 takes the first lane for the sum of all. So a function is compiled for a
processor without these instructions (:func:`plain_target`) unless it has one by its schedule, and it has none where
another sum of its would be LLVM's to make (:func:`safe_dots`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import tirx
from tvm.ir.expr import Call, TensorLoad
from tvm.target import codegen

from souffle.schedule.cpu.contraction_form import CpuContraction, contraction_of
from souffle.schedule.cpu.host import features_of
from souffle.schedule.cpu.nest import Axis, Nest, decode, product, replace_variables, simplify, stride_along
from souffle.tvm_calls import collect
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, is_branch

__all__ = ["WordDot", "dots_of", "in_words", "plain_target", "safe_dots"]

_WORD = "int32"
_LEAST_NUMBERS = 8
"""Products of a sum: fewer are padding for the most part."""
_BYTE_DOTS = {512: "llvm.x86.avx512.vpdpbusd.512", 256: "llvm.x86.avx512.vpdpbusd.256"}
_SHORT_DOTS = {512: "llvm.x86.avx512.vpdpwssd.512", 256: "llvm.x86.avx512.vpdpwssd.256"}
_ADDING_FEATURES = frozenset({"avx512vnni", "avxvnni"})
_BYTES = ("int8", "uint8")
_INTRINSIC = tvm.ir.Op.get("tirx.call_llvm_pure_intrin")
_SHORT_PAIRS = {512: "llvm.x86.avx512.pmaddw.d.512", 256: "llvm.x86.avx2.pmadd.wd"}


@dataclass(frozen=True)
class WordDot:
    """One instruction that multiplies the numbers of words and adds their products.

    Attributes
    ----------
    name : str
        LLVM's.
    bits : int
        Of a vector.
    numbers : int
        In a word: 4 of 8 bits, or 2 of 16.
    adds : bool
        Whether it adds to a total; else an addition follows.
    swapped : bool
        Whether the vector operand is the one without a sign, which the instruction takes first.
    """

    name: str
    bits: int
    numbers: int
    adds: bool
    swapped: bool = False

    @property
    def lanes(self) -> int:
        """Words of a vector."""
        return self.bits // 32

    def apply(self, total: PrimExpr, scalar: PrimExpr, vector: PrimExpr) -> PrimExpr:
        """The new totals of a vector of them, of words of both operands."""
        count = self.bits // 32 * self.numbers
        first, second = (tirx.reinterpret(f"int{32 // self.numbers}x{count}", word) for word in (scalar, vector))
        operands = (second, first) if self.swapped else (first, second)
        result = f"{_WORD}x{self.lanes}"
        if self.adds:
            return tirx.call_llvm_pure_intrin(result, self.name, total, *operands)
        return total + tirx.call_llvm_pure_intrin(result, self.name, *operands)


def dots_of(target: tvm.target.Target, vector_bits: int) -> tuple[WordDot, ...]:
    """The instructions that a target has, the faster first.

    Parameters
    ----------
    target : Target
    vector_bits : int
        Width of its vectors.
    """
    features = features_of(target)
    if not features & {"avx2", "avx512bw"} or vector_bits < 256:
        return ()
    bits = 512 if vector_bits >= 512 and "avx512bw" in features else 256
    found = []
    vnni = "avx512vnni" in features and (bits == 512 or "avx512vl" in features)
    if vnni:
        found = [WordDot(_BYTE_DOTS[bits], bits, 4, True), WordDot(_SHORT_DOTS[bits], bits, 2, True)]
    pairs = WordDot(_SHORT_PAIRS[bits], bits, 2, False)
    return tuple(dot for dot in (*found, pairs) if codegen.llvm_lookup_intrinsic_id(dot.name))


def safe_dots(nests: Iterable[Nest], dots: Sequence[WordDot]) -> tuple[WordDot, ...]:
    """Those of the instructions that a function may have: none that adds, where it has sums of products of bytes that
    are not made of words.

    Parameters
    ----------
    nests : iterable of Nest
        All of the function.
    dots : sequence of WordDot
    """
    forms = (contraction_of(nest) for nest in nests if _multiplies_bytes(nest))
    if any(form is None or in_words(form, dots) is None for form in forms):
        return tuple(dot for dot in dots if not dot.adds)
    return tuple(dots)


def _multiplies_bytes(nest: Nest) -> bool:
    bytes_read = any(str(load.source.dtype) in _BYTES for load in buffer_loads(nest.body))
    return bool(nest.reduce) and bytes_read and bool(collect(nest.body, tirx.Mul))


def plain_target(target: tvm.target.Target, body: tirx.Stmt) -> tvm.target.Target:
    """The target that a scheduled function is compiled for: without instructions that add products of words to words
    where the function has none."""
    having = sorted(features_of(target) & _ADDING_FEATURES)
    adding = {codegen.llvm_lookup_intrinsic_id(name) for name in (*_BYTE_DOTS.values(), *_SHORT_DOTS.values())}
    calls = (call for call in collect(body, Call) if call.op.same_as(_INTRINSIC))
    if not having or any(int(call.args[0].value) in adding for call in calls):
        return target
    removed = [f"-{feature}" for feature in having]
    return tvm.target.Target({**target.export(), "mattr": [*(target.attrs.get("mattr") or ()), *removed]})


def in_words(form: CpuContraction, dots: Sequence[WordDot]) -> CpuContraction | None:
    """A contraction of short integers in words, for the first instruction that takes them; ``None`` for any other.

    Parameters
    ----------
    form : CpuContraction
    dots : sequence of WordDot
    """
    if not dots or str(form.nest.body.buffer.dtype) != _WORD:
        return None
    kinds = [_range_of(side.value) for side in (form.scalar, form.vector)]
    count = product(axis.extent for axis in form.nest.reduce)
    if any(kind is None for kind in kinds) or count < _LEAST_NUMBERS:
        return None
    dot = next((chosen for chosen in (_fitting(dot, *kinds) for dot in dots) if chosen is not None), None)
    if dot is None:
        return None
    axis = _word_axis(form, dot.numbers)
    if axis is not None:
        word = Axis(tirx.Var(f"{axis.var.name}_word", axis.dtype), axis.extent // dot.numbers)
        reduce = tuple(word if one is axis else one for one in form.nest.reduce)
        number = word.var * dot.numbers
        lanes = [({axis.var: number + lane}, None) for lane in range(dot.numbers)]
    else:
        dtype = form.nest.reduce[-1].dtype
        word = Axis(tirx.Var("word", dtype), -(-count // dot.numbers))
        reduce, lanes = (word,), []
        for lane in range(dot.numbers):
            place = word.var * dot.numbers + lane
            exists = None if count % dot.numbers == 0 else place < tirx.const(count, dtype)
            inside = place if exists is None else tirx.min(place, tirx.const(count - 1, dtype))
            lanes.append((decode(inside, form.nest.reduce), exists))
    axes = (*form.nest.spatial, *reduce)
    scalar, vector = (
        replace(side, value=_packed(side.value, lanes, dot.numbers, axes)) for side in (form.scalar, form.vector)
    )
    nest = replace(form.nest, reduce=reduce)
    return replace(form, nest=nest, scalar=scalar, vector=vector, dot=dot, in_numbers=form)


def _range_of(value: PrimExpr) -> tuple[int, int] | None:
    """The least and the greatest number of a factor that is made of bytes; ``None`` where it is not known to be."""
    known = {"int8": (-128, 127), "uint8": (0, 255)}
    if dtype_of(value) in known:
        return known[dtype_of(value)]
    if isinstance(value, tirx.IntImm):
        return int(value.value), int(value.value)
    if isinstance(value, tirx.Cast) and dtype_of(value) == _WORD:
        return known.get(dtype_of(value.value))
    parts: list[PrimExpr] = []
    if isinstance(value, tirx.Sub):
        parts = [value.a, value.b]
    elif is_branch(value):
        parts = [value.args[1], value.args[2]]
    elif isinstance(value, tirx.Select):
        parts = [value.true_value, value.false_value]
    ranges = [_range_of(part) for part in parts]
    if not ranges or any(one is None for one in ranges):
        return None
    (low, high), (other_low, other_high) = ranges
    if isinstance(value, tirx.Sub):
        return low - other_high, high - other_low
    return min(low, other_low), max(high, other_high)


def _fitting(dot: WordDot, scalar: tuple[int, int], vector: tuple[int, int]) -> WordDot | None:
    """The instruction for factors of these ranges, or ``None``."""

    def within(one: tuple[int, int], low: int, high: int) -> bool:
        return low <= one[0] and one[1] <= high

    if dot.numbers == 2:
        # Two products of numbers below 2**15 are below 2**31.
        return dot if all(within(one, -(2**15) + 1, 2**15 - 1) for one in (scalar, vector)) else None
    if within(scalar, 0, 255) and within(vector, -128, 127):
        return dot
    return replace(dot, swapped=True) if within(vector, 0, 255) and within(scalar, -128, 127) else None


def _word_axis(form: CpuContraction, numbers: int) -> Axis | None:
    """The axis along which neighbours make a word: one that a word divides, contiguous in memory if there is one."""
    axes = form.nest.axes
    whole = [axis for axis in form.nest.reduce if axis.extent % numbers == 0]

    def contiguous(axis: Axis) -> bool:
        loads = [load for side in (form.scalar, form.vector) for load in buffer_loads(side.value)]
        return any(stride_along(load, axis, axes) == 1 for load in loads if isinstance(load, TensorLoad))

    return max([axis for axis in whole if contiguous(axis)] or whole, key=lambda axis: axis.extent, default=None)


def _packed(value: PrimExpr, lanes: Sequence, numbers: int, axes: Sequence[Axis]) -> PrimExpr:
    """The word of `value` at some places, the first one lowest."""
    bits = 32 // numbers
    word: PrimExpr | None = None
    for lane, (where, exists) in enumerate(lanes):
        part = replace_variables(value, where)
        part = part if dtype_of(part) == _WORD else tirx.Cast(_WORD, part)
        if exists is not None:
            part = tirx.if_then_else(exists, part, tirx.const(0, _WORD))
        if lane < numbers - 1:
            # The sign is not the next number's.
            part = tirx.bitwise_and(part, tirx.const((1 << bits) - 1, _WORD))
        part = tirx.shift_left(part, tirx.const(bits * lane, _WORD)) if lane else part
        word = part if word is None else tirx.bitwise_or(word, part)
    return simplify(word, axes)
