"""Random chains of conversions between integer types with arithmetic that no type of 32 or 64 bits overflows in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from souffle.tvm_compat import PrimExpr

__all__ = ["SOURCES", "Chain", "drawn_chain", "drawn_values"]

SOURCES = ("int8", "uint8", "int32", "uint32", "int64")
_TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")


@dataclass(frozen=True, eq=False)
class Chain:
    """A number that is made of one element.

    Attributes
    ----------
    source : int
        Position in :data:`SOURCES`.
    of : callable
        Makes the TensorIR of the element.
    numpy : callable
        Makes the array of the elements, as ``int64``.
    text : str
    """

    source: int
    of: Callable[[PrimExpr], PrimExpr]
    numpy: Callable[[np.ndarray], np.ndarray]
    text: str


def _truncated_rest(a: np.ndarray, b: int) -> np.ndarray:
    return np.fmod(a, b)


def drawn_chain(seed: int, steps: int = 6) -> Chain:
    """A chain that ends in a comparison, a remainder, a quotient or an extreme, converted to ``float32``."""
    random = np.random.default_rng(seed)

    def one_of(choices: Sequence) -> object:
        return choices[int(random.integers(len(choices)))]

    source = int(random.integers(len(SOURCES)))
    dtype = SOURCES[source]
    low, high = (int(end) for end in (np.iinfo(dtype).min, np.iinfo(dtype).max))
    if dtype == "int64":
        low, high = -(2**40), 2**40  # what is drawn
    makes: list[tuple[Callable, Callable]] = []
    text = dtype
    for _ in range(steps):
        least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        kind = one_of(("convert", "convert", "add", "add", "mul", "min", "max", "shift"))
        if kind == "convert":
            target = str(one_of([t for t in _TYPES if t != dtype]))
            makes.append((lambda x, t=target: tirx.Cast(t, x), lambda a, t=target: a.astype(t).astype(np.int64)))
            dtype, ends = target, (int(np.iinfo(target).min), int(np.iinfo(target).max))
            if not ends[0] <= low <= high <= ends[1]:
                low, high = ends
            text += f" → {target}"
            continue
        number = int(one_of((1, 2, 3, 100, 127, 128, 255, 2**15, 2**31, 2**32 + 5, -1, -7, -200, -(2**31))))
        if kind == "mul":
            number = int(one_of((2, 3, 5)))
        if kind == "shift":
            number = int(one_of((1, 3, 7)))
        if not least <= number <= most:
            continue
        ends = {
            "add": (low + number, high + number),
            "mul": (min(low * number, high * number), max(low * number, high * number)),
            "min": (min(low, number), min(high, number)),
            "max": (max(low, number), max(high, number)),
            "shift": (low >> max(number, 0), high >> max(number, 0)),
        }[str(kind)]
        wraps = not least <= ends[0] <= ends[1] <= most
        # TVM refuses to convert a literal that the new type does not hold, so nothing is made one.
        if (wraps and np.iinfo(dtype).bits > 16) or ends[0] == ends[1]:
            continue
        node = {"add": tirx.Add, "mul": tirx.Mul, "min": tirx.Min, "max": tirx.Max, "shift": tirx.RShift}[str(kind)]
        array = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "shift": np.right_shift}
        function = array[str(kind)]
        makes.append(
            (
                lambda x, n=number, t=dtype, node=node: node(x, tirx.const(n, t)),
                lambda a, n=number, t=dtype, f=function: f(a, n).astype(t).astype(np.int64),
            )
        )
        low, high = (least, most) if wraps else ends
        text += f" {kind} {number}"
    last = one_of(("less", "at least", "floormod", "truncmod", "floordiv", "max"))
    number = int(one_of((2, 3, 5, 100) if last in ("floormod", "truncmod", "floordiv") else (0, 1, 5, 127)))
    endings = {
        "less": (tirx.LT, np.less),
        "at least": (tirx.GE, np.greater_equal),
        "floormod": (tirx.FloorMod, np.mod),
        "truncmod": (tirx.Mod, _truncated_rest),
        "floordiv": (tirx.FloorDiv, np.floor_divide),
        "max": (tirx.Max, np.maximum),
    }
    node, function = endings[str(last)]

    def of(x: PrimExpr) -> PrimExpr:
        for make, _ in makes:
            x = make(x)
        return tirx.Cast("float32", node(x, tirx.const(number, dtype)))

    def numpy(a: np.ndarray) -> np.ndarray:
        a = a.astype(np.int64)
        for _, make in makes:
            a = make(a)
        return np.asarray(function(a, number)).astype(np.float32)

    return Chain(source, of, numpy, f"{text} {last} {number}")


def drawn_values(count: int, seed: int) -> tuple[np.ndarray, ...]:
    """Elements of each source, near the ends of it, near zero and anywhere."""
    random = np.random.default_rng(seed)
    arrays = []
    for dtype in SOURCES:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        if dtype == "int64":
            least, most = -(2**40), 2**40
        near = np.array([least, least + 1, most, most - 1, 0, 1, 2, most // 2, 5, 100], np.int64)
        anywhere = random.integers(least, most, count)
        arrays.append(np.where(random.random(count) < 0.5, random.choice(near, count), anywhere).astype(dtype))
    return tuple(arrays)
