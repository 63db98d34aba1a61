"""What the functions and instructions that stages call do to values. What is not listed here is not decided.

Stated anew from the PTX and CUDA manuals ("ldmatrix", "mma.m16n8k16", "cp.async", "Warp Shuffle Functions"), not
imported from the rules that emit them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from souffle.tvm_compat import dtype_of
from souffle.verify.device_effects import ACTIVE_MASKS, BYTE_DOT, BYTE_PRODUCT, COPY, TAKE
from souffle.verify.expressions import Undecided
from souffle.verify.values.field import Number
from souffle.verify.values.fragments import matrix_instruction
from souffle.verify.values.function import FunctionRun
from souffle.verify.values.places import Pointer
from souffle.verify.values.scalars import Evaluator, Frame, Mask, both
from souffle.verify.values.statements import Statement

__all__ = ["intrinsic"]

_WARP = 32
_NOTHING = re.compile(r"souffle_copy_commit|souffle_copy_wait<\d+>|souffle_prefetch_l2")
_SHUFFLE = re.compile(r"tirx\.(?:cuda\.__shfl_|tvm_warp_shuffle_?)(up|down|xor|)_?(?:sync)?")


def intrinsic(run: FunctionRun, name: str, arguments: Sequence[Any]) -> Statement | Evaluator | None:
    """The function that executes a call, for :class:`FunctionRun`; ``None`` for a name that is not known."""
    if _NOTHING.fullmatch(name):
        return lambda f, m: None
    if name in ACTIVE_MASKS:
        # Which threads take part is known; the number only says it again.
        return lambda f, m: 0
    copy, take, shuffle = COPY.fullmatch(name), TAKE.fullmatch(name), _SHUFFLE.fullmatch(name)
    if copy:
        return _copy(run, int(copy.group(2)), bool(copy.group(1)), arguments)
    if take:
        return _take(run, int(take.group(1)), int(take.group(2)), arguments)
    if shuffle:
        return _shuffled(run, shuffle.group(1), arguments)
    if name == "souffle_put_totals":
        return _copy(run, 8, False, arguments)
    if name in ("souffle_load_matrices", "souffle_load_transposed_matrices"):
        return _load_matrices(run, 2, "transposed" in name, arguments)
    if name == "souffle_load_word_matrices":
        return _load_matrices(run, 4, False, arguments)
    if name == "souffle_load_words":
        return _load_words(run, arguments)
    if name == "souffle_round_to_tf32":
        # Rounding is none in the field, as of other conversions.
        return lambda f, m: None
    if name == "souffle_split_to_tf32":
        return _split(run, arguments)
    if name in ("souffle_add_product", "souffle_add_tf32_product", "souffle_begin_tf32_product"):
        return _product(run, arguments, words="tf32" in name, adds="add" in name)
    products, dot = BYTE_PRODUCT.fullmatch(name), BYTE_DOT.fullmatch(name)
    if products:
        return _product(run, arguments, words=True, adds=True, types=products.groups())
    if dot:
        return _dot(run, dot.groups(), arguments)
    if name == "souffle_scale_part":
        return _scaled(run, arguments)
    return matrix_instruction(run, name, arguments)


def _pointer(run: FunctionRun, argument: Any) -> Pointer:
    found = run.pointer(argument)
    if found is None:
        raise Undecided(f"the pointer {argument}")
    return found


def _at(pointer: Pointer, f: Frame, m: Mask) -> np.ndarray:
    """The unit that a pointer points to, with room for an axis of elements before the lanes."""
    return np.atleast_1d(np.asarray(pointer.at(f, m)))


def _elements(run: FunctionRun, count: int, size: int, unit: int) -> np.ndarray:
    """How far elements that follow each other are from the first, in units."""
    return np.arange(count)[:, None] * (size // unit)


def _copy(run: FunctionRun, nbytes: int, may_zero: bool, arguments: Sequence[Any]) -> Statement:
    """``cp.async`` of so many bytes, or a plain copy; they are zeros where the last argument is 0, if it may."""
    into, source = _pointer(run, arguments[0]), _pointer(run, arguments[1])
    whether = run.of(arguments[2]) if may_zero else None
    size = source.size
    count = nbytes // size
    ahead, step = (_elements(run, count, size, p.memory.unit) for p in (source, into))

    def copy(f: Frame, m: Mask) -> None:
        wanted = m
        holds = 1
        if whether is not None:
            known = whether(f, m)
            holds = known if isinstance(known, int) else known != 0
            wanted = both(m, holds)
        values: Number = 0
        if not (isinstance(holds, int) and not holds):
            values = source.memory.read(_at(source, f, wanted) + ahead, size, wanted)
            if not isinstance(holds, int):
                values = np.where(holds, values, 0)
        into.memory.write(_at(into, f, m) + step, size, values, m, run.current)

    return copy


def _scaled(run: FunctionRun, arguments: Sequence[Any]) -> Statement:
    """Eight 16-bit numbers in four registers times a factor plus a term, which are of 16 bits as well; those of odd
    registers follow those of even ones.
    """
    part, factors = (_pointer(run, argument) for argument in arguments)
    steps = _elements(run, 8, 2, part.memory.unit)
    own = 2 * (np.arange(8)[:, None] // 2 % 2)
    scale = 2 // factors.memory.unit

    def scaled(f: Frame, m: Mask) -> None:
        numbers, at, first = run.numbers, _at(part, f, m) + steps, _at(factors, f, m)
        by, plus = (factors.memory.read(first + (own + n) * scale, 2, m) for n in range(2))
        found = numbers.add(numbers.multiply(part.memory.read(at, 2, m), by), plus)
        part.memory.write(at, 2, found, m, run.current)

    return scaled


def _take(run: FunctionRun, lanes: int, planes: int, arguments: Sequence[Any]) -> Statement:
    """The sums of planes of shared memory, element by element; `lanes` neighbours for each thread."""
    into, source, apart = _pointer(run, arguments[0]), _pointer(run, arguments[1]), run.of(arguments[2])
    step, ahead = (_elements(run, lanes, 4, p.memory.unit) for p in (into, source))
    scale = 4 // source.memory.unit
    whole = str(dtype_of(arguments[0].args[0])).startswith("int")

    def plus(a: Number, b: Number) -> Number:
        return _in_32_bits(a + b) if whole else run.numbers.add(a, b)

    def take(f: Frame, m: Mask) -> None:
        first, between = _at(source, f, m) + ahead, apart(f, m)
        total = source.memory.read(first, 4, m)
        for plane in range(1, planes):
            total = plus(total, source.memory.read(first + plane * between * scale, 4, m))
        into.memory.write(_at(into, f, m) + step, 4, total, m, run.current)

    return take


def _warps(run: FunctionRun, what: str) -> np.ndarray:
    """The lane with which each lane's warp begins."""
    if run.lanes.threads % _WARP:
        raise Undecided(f"{what} by {run.lanes.threads} threads, whose last warp is not full")
    lane = np.arange(run.lanes.count)
    return lane - lane % _WARP


def _whole_warps(run: FunctionRun, m: Mask, what: str) -> None:
    if run.lanes.parted(m, _WARP):
        raise Undecided(f"{what} by a part of a warp")


def _spread(run: FunctionRun, value: Number) -> np.ndarray:
    """A value with all lanes."""
    return np.broadcast_to(value, (*np.shape(value)[:-1], run.lanes.count))


def _shuffled(run: FunctionRun, kind: str, arguments: Sequence[Any]) -> Evaluator:
    """The value that another thread of the warp has, or noise where none gives one."""
    _, value, other, width = (run.of(a) for a in arguments[:4])
    lane = np.arange(run.lanes.count)
    within = lane % run.lanes.threads % _WARP
    salt = "shuffle from nowhere"

    def shuffle(f: Frame, m: Mask) -> Number:
        # Threads that a condition leaves out give nothing.
        given, step, wide = _spread(run, value(f, m)), other(f, m), width(f, m)
        place = within % wide
        segment = within - place
        giver = {
            "": lambda: segment + step % wide,
            "up": lambda: np.where(place < step, within, within - step),
            "down": lambda: np.where(place + step >= wide, within, within + step),
            # A thread of a segment that follows gives nothing.
            "xor": lambda: np.where((within ^ step) // wide * wide > segment, within, within ^ step),
        }[kind]()
        wanted = lane - within + giver
        inside = (wanted >= 0) & (wanted < run.lanes.count)
        inside &= (wanted // run.lanes.threads) == lane // run.lanes.threads
        if m is not None:
            active = np.broadcast_to(m, given.shape[-1:]) if np.ndim(m) == 1 else np.broadcast_to(m, given.shape)
            inside &= active[..., np.where(inside, wanted, 0)]
        found = given[..., np.where(inside, wanted, 0)]
        return found if inside.all() else np.where(inside, found, run.numbers.noise(run.lanes.count, salt))

    return shuffle


def _load_matrices(run: FunctionRun, size: int, transposed: bool, arguments: Sequence[Any]) -> Statement:
    """``ldmatrix.x4``: four matrices of 8 rows of 16 bytes; lane ``8 i + r`` points to row `r` of matrix `i`.

    Each thread gets 4 bytes of row ``lane / 4`` of each matrix, in one register: two neighbours of 16 bits, or one
    element of 32; of column, if transposed.
    """
    into, source = _pointer(run, arguments[0]), _pointer(run, arguments[1])
    first, each = _warps(run, "ldmatrix"), 4 // size
    count = 4 * each
    lane = np.arange(run.lanes.count) % _WARP
    matrix, part = np.divmod(np.arange(count)[:, None], each)
    along, across = lane // 4, each * (lane % 4) + part
    row, column = (across, along) if transposed else (along, across)
    giver = np.broadcast_to(first + 8 * matrix + row, (count, run.lanes.count))
    scale = size // source.memory.unit
    step = _elements(run, count, size, into.memory.unit)
    ahead = np.broadcast_to(column * scale, giver.shape)

    def load(f: Frame, m: Mask) -> None:
        _whole_warps(run, m, "ldmatrix")
        given = _spread(run, _at(source, f, m))[giver] + ahead
        into.memory.write(_at(into, f, m) + step, size, source.memory.read(given, size, m), m, run.current)

    return load


def _load_words(run: FunctionRun, arguments: Sequence[Any]) -> Statement:
    """Two elements of 32 bits, the second so many behind the first."""
    into, source, apart = _pointer(run, arguments[0]), _pointer(run, arguments[1]), run.of(arguments[2])
    step, number = _elements(run, 2, 4, into.memory.unit), np.arange(2)[:, None]
    scale = 4 // source.memory.unit

    def load(f: Frame, m: Mask) -> None:
        found = source.memory.read(_at(source, f, m) + number * apart(f, m) * scale, 4, m)
        into.memory.write(_at(into, f, m) + step, 4, found, m, run.current)

    return load


def _split(run: FunctionRun, arguments: Sequence[Any]) -> Statement:
    """Four numbers as sums of two: rounding is none in the field, so that nothing is left of them."""
    part, rest = _pointer(run, arguments[0]), _pointer(run, arguments[1])
    own, step = (_elements(run, 4, 4, one.memory.unit) for one in (part, rest))

    def split(f: Frame, m: Mask) -> None:
        numbers = part.memory.read(_at(part, f, m) + own, 4, m)
        left = run.numbers.subtract(numbers, numbers)
        rest.memory.write(_at(rest, f, m) + step, 4, left, m, run.current)

    return split


def _bytes(words: Number, kind: str) -> np.ndarray:
    """The four numbers of words, on a new last axis; of a type of PTX, ``s8`` or ``u8``."""
    parts = (np.asarray(words)[..., None] >> (8 * np.arange(4))) & 0xFF
    return (parts ^ 0x80) - 0x80 if kind == "s8" else parts


def _in_32_bits(value: np.ndarray) -> np.ndarray:
    return ((value + 2**31) & 0xFFFFFFFF) - 2**31


def _dot(run: FunctionRun, types: Sequence[str], arguments: Sequence[Any]) -> Evaluator:
    """``dp4a``: a total with the products of the numbers of two words."""
    # The first of them is the function's name.
    left, right, total = (run.of(a) for a in arguments[-3:])

    def dot(f: Frame, m: Mask) -> np.ndarray:
        a, b = (_bytes(value(f, m), kind) for value, kind in zip((left, right), types, strict=True))
        return _in_32_bits(total(f, m) + (a * b).sum(axis=-1))

    return dot


def _product(
    run: FunctionRun, arguments: Sequence[Any], *, words: bool, adds: bool, types: Sequence[str] = ()
) -> Statement:
    """``mma.m16n8k16``, or ``mma.m16n8k8`` of 32-bit words: a warp adds the product of two matrices to totals that its
    threads hold, or puts it there.

    With ``g = lane / 4`` and ``t = lane % 4``, element `e` of a thread is: of the left matrix, row ``g``, 8 further if
    bit 1 of `e` is set, and column ``2 t + e % 2``, 8 further if bit 2 is; of the right one, row ``2 t + e % 2``, 8
    further if bit 1 is set, and column ``g``; of totals, row ``g``, 8 further if bit 1 is set, column ``2 t + e % 2``.
    Of words, an element is a register: of the left matrix, row ``g``, 8 further if bit 0 of `e` is set, and column
    ``t``, 4 further if bit 1 is; of the right one, row ``t``, 4 further if `e` is 1, and column ``g``. Where words hold
    four 8-bit integers of these types each (``mma.m16n8k32``), their products and totals are whole numbers.
    """
    totals, left, right = (_pointer(run, a) for a in arguments)
    _warps(run, "mma")
    warps = run.lanes.count // _WARP
    group, thread = np.divmod(np.arange(_WARP), 4)

    def bit(number: int, count: int) -> np.ndarray:
        return np.arange(count)[:, None] >> number & 1

    total_at = (group + 8 * bit(1, 4), 2 * thread + bit(0, 4))
    if words:
        inner, size = 8, 4
        left_at = (group + 8 * bit(0, 4), thread + 4 * bit(1, 4))
        right_at = (thread + 4 * bit(0, 2), group + 0 * bit(0, 2))
    else:
        inner, size = 16, 2
        left_at = (group + 8 * bit(1, 8), 2 * thread + bit(0, 8) + 8 * bit(2, 8))
        right_at = (2 * thread + bit(0, 4) + 8 * bit(1, 4), group + 0 * bit(0, 4))
    counts = ((totals, 4, 4), (left, len(left_at[0]), size), (right, len(right_at[0]), size))
    steps = [_elements(run, count, size, p.memory.unit) for p, count, size in counts]

    def matrix(pointer: Pointer, f: Frame, m: Mask, step: np.ndarray) -> np.ndarray:
        found = _spread(run, pointer.memory.read(_at(pointer, f, m) + step, size, m))
        return found.reshape(len(step), warps, _WARP).transpose(1, 0, 2)

    def product(f: Frame, m: Mask) -> None:
        _whole_warps(run, m, "mma")
        a, b, c = np.empty((warps, 16, inner), np.int64), np.empty((warps, inner, 8), np.int64), totals
        a[:, left_at[0], left_at[1]] = matrix(left, f, m, steps[1])
        b[:, right_at[0], right_at[1]] = matrix(right, f, m, steps[2])
        if types:
            left_bytes, right_bytes = _bytes(a, types[0]), _bytes(b, types[1])
            whole = np.einsum("wmkb,wknb->wmn", left_bytes, right_bytes)
        else:
            whole = run.numbers.matrix_product(a, b)
        found = whole[:, total_at[0], total_at[1]].transpose(1, 0, 2).reshape(4, -1)
        at = _at(c, f, m) + steps[0]
        if types:
            value = _in_32_bits(c.memory.read(at, 4, m) + found)
        else:
            value = run.numbers.add(c.memory.read(at, 4, m), found) if adds else found
        c.memory.write(at, 4, value, m, run.current)

    return product
