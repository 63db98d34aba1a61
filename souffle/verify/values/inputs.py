"""Random values for the tensors that a stage reads, the same for its definition and for its functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import const_int
from souffle.verify.values.field import P
from souffle.verify.values.points import Literals, Numbers
from souffle.verify.values.scalars import is_float

__all__ = ["DrawnTensor", "Values", "blank", "elements_of", "integer_ranges", "random_tensors"]

_MOST_STORED = 1 << 24
"""Elements of a tensor whose values are stored; those of a larger one are worked out where they are read."""

_MOST_FILLED = 1 << 16
"""Elements of an output that is filled before it is written."""

_INTEGERS = 1 << 10
"""How far integers go that choose no element."""


class DrawnTensor:
    """A tensor that is not stored: each element is worked out from its number.

    Parameters
    ----------
    elements : int
    draw : callable
        The elements at some places.
    """

    def __init__(self, elements: int, draw: Callable[[np.ndarray], np.ndarray]) -> None:
        self.elements = elements
        self.draw = draw

    def __len__(self) -> int:
        return self.elements

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        return self.draw(np.ravel(places)).reshape(np.shape(places))


Values = np.ndarray | DrawnTensor


def elements_of(buffer: Any) -> int:
    """How many elements a buffer has."""
    return prod(const_int(extent) for extent in buffer.shape)


def integer_ranges(reference: tirx.PrimFunc, beyond: bool) -> tuple[tuple[int, int], ...]:
    """Ranges from which integers of the inputs may be drawn, the better first.

    An integer that chooses an element should be able to choose any, counted from the end too where the definition
    allows that; which ranges it allows is seen when it is evaluated.

    Parameters
    ----------
    reference : tirx.PrimFunc
    beyond : bool
        Whether to begin with integers that choose none, on both sides, which a definition that clamps them allows.
    """
    extents: list[int] = []

    def see(load: TensorLoad) -> None:
        for index, extent in zip(load.indices, load.source.shape):
            if not isinstance(index, (tirx.Var, tirx.IntImm)):
                inner: list[Any] = []
                structural_walk(index, (TensorLoad, inner.append))
                if inner:
                    extents.append(const_int(extent))

    structural_walk(reference.body, (TensorLoad, see))
    most = min(extents, default=_INTEGERS)
    return (*(((-2 * most - 2, 2 * most + 2),) if beyond else ()), (-most, most), (0, most), (0, 1))


def random_tensors(
    buffers: Sequence[Any], integers: tuple[int, int], numbers: Numbers, inputs: str, literals: Literals
) -> list[Values]:
    """Elements of the field, of a range of integers, or bits, for each buffer.

    Parameters
    ----------
    buffers : sequence of Buffer
    integers : tuple of int
        The first, and the one after the last.
    numbers : Numbers
    inputs : str
        How they are drawn, see :class:`souffle.verify.values.points.Kind`.
    literals : Literals
    """
    found: list[Values] = []
    for number, buffer in enumerate(buffers):
        count = elements_of(buffer)
        plain = inputs == "random" and numbers.plain and not numbers.mixes
        if plain and count <= _MOST_STORED:
            low, high = (0, numbers.prime) if is_float(str(buffer.dtype)) else _range(str(buffer.dtype), integers)
            found.append(np.random.default_rng((numbers.seed, number)).integers(low, high, count, np.int64))
            continue
        own = "random" if inputs == "cut" and number != numbers.seed % len(buffers) else inputs
        draw = _drawing(buffer, number, integers, numbers, own, literals)
        found.append(draw(np.arange(count)) if count <= _MOST_FILLED else DrawnTensor(count, draw))
    return found


def _range(dtype: str, integers: tuple[int, int]) -> tuple[int, int]:
    """The part of a range of integers that a type has."""
    if dtype == "bool":
        return 0, 2
    kind = np.iinfo(dtype)
    return max(integers[0], int(kind.min)), min(integers[1], int(kind.max) + 1)


def _drawing(
    buffer: Any, number: int, integers: tuple[int, int], numbers: Numbers, inputs: str, literals: Literals
) -> Callable[[np.ndarray], np.ndarray]:
    """What gives the elements of an input at some places."""
    dtype, count = str(buffer.dtype), elements_of(buffer)
    random = np.random.default_rng((numbers.seed, number))
    name = f"input {number}"
    last = const_int(buffer.shape[-1]) if buffer.shape else 1
    level = _level(buffer, random, numbers, inputs) if numbers.mixes else lambda places: places
    if is_float(dtype):
        if inputs in ("rising", "falling"):
            step, start = max(1, P // (4 * count)), int(random.integers(P // 4))
            sign, start = (1, start) if inputs == "rising" else (-1, start + count * step)
            return lambda places: numbers.in_order(name, start + sign * step * places)
        choices = numbers.choices if inputs == "few" or numbers.mixes else None
    else:
        low, high = _range(dtype, integers)
        if inputs in ("rising", "falling"):
            ahead = (lambda places: places) if inputs == "rising" else (lambda places: count - 1 - places)
            return lambda places: low + ahead(places) * (high - low) // count
        near = {c for one in (*literals.whole, low, high - 1) for c in (one, 2 * one) if low <= c < high}
        choices = np.array(sorted(near), np.int64) if inputs == "few" or numbers.mixes else None

    def draw(places: np.ndarray) -> np.ndarray:
        keys = level(places)
        any_number = numbers.element(name, keys)
        if not is_float(dtype):
            any_number = low + numbers.bits(name, keys) % (high - low)
        if inputs == "cut" and is_float(dtype):
            line, place = np.divmod(places, last)
            return np.where(place < numbers.bits(f"cut {name}", line) % (last + 1), numbers.lowest, any_number)
        if choices is None:
            return any_number
        which = numbers.bits(f"which {name}", keys)
        chosen = (which & 1) == 0
        if is_float(dtype) and numbers.mixes:
            # In a small field all numbers are as often as literals. Those of lines should be infinite now and then.
            chosen &= keys >= count
        return np.where(chosen, choices[(which >> 1) % len(choices)], any_number)

    return draw


def _level(
    buffer: Any, random: np.random.Generator, numbers: Numbers, inputs: str
) -> Callable[[np.ndarray], np.ndarray]:
    """A key for each element: its number, or, beyond those, that of a line of elements along some axes.

    Three of four lines are such where inputs are level, along any axes; else one of four, along the last axis.
    """
    shape = tuple(const_int(extent) for extent in buffer.shape)
    own = [bool(random.integers(2)) for _ in shape] if inputs == "level" else [True] * (len(shape) - 1) + [False]
    share = 3 if inputs == "level" else 1

    def level(places: np.ndarray) -> np.ndarray:
        lines = np.zeros_like(places)
        for index, extent, kept in zip(np.unravel_index(places, shape) if shape else (), shape, own):
            lines = lines * extent + index if kept else lines
        flat = numbers.bits(f"level {own}", lines) % 4 < share
        return np.where(flat, lines + prod(shape), places)

    return level


def blank(buffer: Any, numbers: Numbers) -> np.ndarray:
    """An output before it is written: noise, or zeros where it is large."""
    count = elements_of(buffer)
    return numbers.noise(count, "output") if count <= _MOST_FILLED else np.zeros(count, np.int64)
