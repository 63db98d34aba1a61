"""How a kernel is launched: its grid, its block and its arguments, as data that a JSON file holds.

The CUDA text alone does not say with what a kernel is called. The check of a fused kernel, its profile and the search
for a partition of its threads need that, and the fused kernel's own launch is made of the launches of its parts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from souffle.hfuse.errors import FusionError

__all__ = ["Argument", "Fill", "Launch"]

_NUMBERS = {"zeros": 0, "constant": 1, "normal": 2, "uniform": 2, "integers": 2}
"""How many numbers each kind of filling takes."""

_MOST_THREADS = 1024
_TUNABLE = "*"
_LAUNCH_KEYS = ("kernel", "grid", "block", "shared_bytes", "arguments")
_ARGUMENT_KEYS = ("name", "value", "dtype", "count", "fill", "output")


@dataclass(frozen=True)
class Fill:
    """What a buffer holds before a launch.

    Attributes
    ----------
    kind : str
        ``"zeros"``; ``"constant"`` with one number; or drawn from a seed: ``"normal"`` with mean and deviation,
        ``"uniform"`` and ``"integers"`` with the lowest and the highest number, the latter excluded.
    numbers : tuple
    """

    kind: str = "zeros"
    numbers: tuple[int | float, ...] = ()

    def array(self, dtype: np.dtype, count: int, generator: np.random.Generator) -> np.ndarray:
        """A new array of `count` elements."""
        if self.kind == "zeros":
            return np.zeros(count, dtype)
        if self.kind == "constant":
            return np.full(count, self.numbers[0], dtype)
        if self.kind == "integers":
            wide = dtype if dtype.kind in "iu" else np.dtype(np.int64)
            return generator.integers(*self.numbers, size=count, dtype=wide).astype(dtype)
        draw = generator.normal if self.kind == "normal" else generator.uniform
        return draw(*self.numbers, size=count).astype(dtype)

    def to_json(self) -> str | dict[str, list[int | float]]:
        """``"zeros"``, or the kind with its numbers."""
        return {self.kind: list(self.numbers)} if self.numbers else self.kind


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel: a scalar (`value`), or a buffer of `count` elements of NumPy's type `dtype`.

    Attributes
    ----------
    name : str
    value : int or float, optional
    dtype : str, optional
    count : int
    fill : Fill
    output : bool
        Whether the kernel's result is in it. Checks compare all buffers; this says which a reader cares for.
    """

    name: str
    value: int | float | None = None
    dtype: str | None = None
    count: int = 0
    fill: Fill = Fill()
    output: bool = False

    def __post_init__(self) -> None:
        if (self.value is None) == (self.dtype is None):
            raise FusionError(f"argument {self.name!r}: give a value for a scalar or a dtype for a buffer, one of them")
        if self.dtype is not None:
            _dtype(self.dtype, f"argument {self.name!r}")
            if self.count < 1:
                raise FusionError(f"argument {self.name!r}: a buffer has a count of at least 1, not {self.count}")

    def to_json(self) -> dict[str, Any]:
        """What :meth:`Launch.write` writes of an argument."""
        if self.value is not None:
            return {"name": self.name, "value": self.value}
        return {
            "name": self.name,
            "dtype": self.dtype,
            "count": self.count,
            "fill": self.fill.to_json(),
            "output": self.output,
        }


@dataclass(frozen=True)
class Launch:
    """A launch of one kernel.

    Attributes
    ----------
    kernel : str
        Its name, with template arguments where it is a template: ``"maxpool<float>"``.
    grid : tuple of int
        Blocks along x, y, z.
    block : tuple
        Threads along x, y, z. None for x is what remains of the threads that the fused kernel gives to this one
        (``"*"`` in JSON): the block is tunable, as in the paper's §II-A. A block of three numbers is fixed.
    shared_bytes : int
        Dynamic shared memory of a block.
    arguments : tuple of Argument
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int | None, int, int]
    shared_bytes: int = 0
    arguments: tuple[Argument, ...] = ()

    def __post_init__(self) -> None:
        where = f"launch of {self.kernel!r}"
        if len(self.grid) != 3 or any(extent < 1 for extent in self.grid):
            raise FusionError(f"{where}: grid is three numbers of at least 1, not {self.grid}")
        numbers = [extent for extent in self.block if extent is not None]
        if len(self.block) != 3 or None in self.block[1:] or any(extent < 1 for extent in numbers):
            raise FusionError(f"{where}: block is three numbers of at least 1, the first may be '*', not {self.block}")
        if math.prod(numbers) > _MOST_THREADS:
            raise FusionError(f"{where}: a block of {self.block} has more than {_MOST_THREADS} threads")
        if self.shared_bytes < 0:
            raise FusionError(f"{where}: shared_bytes is at least 0, not {self.shared_bytes}")

    @property
    def threads(self) -> int | None:
        """Of a block, or None where the block is tunable."""
        x, y, z = self.block
        return None if x is None else x * y * z

    def block_of(self, threads: int) -> tuple[int, int, int]:
        """The block that has so many threads.

        Raises
        ------
        FusionError
            The block is fixed and has another number, or y and z do not divide the number.
        """
        x, y, z = self.block
        if x is not None:
            if x * y * z != threads:
                raise FusionError(
                    f"kernel {self.kernel}: its launch has a fixed block of {self.block}, {x * y * z} threads, and "
                    f"{threads} were asked for; write '*' as the block's first number if the kernel works with others"
                )
            return (x, y, z)
        if threads % (y * z):
            raise FusionError(
                f"kernel {self.kernel}: {threads} threads cannot be a block of '*' x {y} x {z}; give it a multiple of "
                f"{y * z}"
            )
        return (threads // (y * z), y, z)

    def arrays(self, seed: int) -> list[np.ndarray | int | float]:
        """The arguments of a launch, buffers as new arrays; the same seed gives the same arrays."""
        values: list[np.ndarray | int | float] = []
        for position, argument in enumerate(self.arguments):
            if argument.dtype is None:
                values.append(argument.value)
                continue
            # Each buffer has a stream of its own: one more argument leaves the others as they were.
            generator = np.random.default_rng((seed, position))
            values.append(argument.fill.array(np.dtype(argument.dtype), argument.count, generator))
        return values

    def to_json(self) -> dict[str, Any]:
        """What :meth:`write` writes."""
        x, y, z = self.block
        return {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "block": [_TUNABLE if x is None else x, y, z],
            "shared_bytes": self.shared_bytes,
            "arguments": [argument.to_json() for argument in self.arguments],
        }

    @staticmethod
    def from_json(value: Any, source: str = "launch") -> Launch:
        """The launch that some JSON describes.

        Parameters
        ----------
        value
            What ``json.load`` gives.
        source
            The file's name, for messages.

        Raises
        ------
        FusionError
            Naming the key, and what was expected there.
        """
        record = _record(value, source, _LAUNCH_KEYS, required=("kernel", "grid", "block"))
        kernel = _typed(record["kernel"], str, f"{source}: kernel", "the kernel's name")
        grid = _extents(record["grid"], f"{source}: grid", tunable=False)
        block = _extents(record["block"], f"{source}: block", tunable=True)
        shared = _typed(record.get("shared_bytes", 0), int, f"{source}: shared_bytes", "a number of bytes")
        given = _typed(record.get("arguments", []), list, f"{source}: arguments", "a list")
        arguments = tuple(_argument(item, f"{source}: arguments[{i}]") for i, item in enumerate(given))
        try:
            return Launch(kernel, grid, block, shared, arguments)
        except FusionError as error:
            raise FusionError(f"{source}: {error}") from error

    @staticmethod
    def read(path: Path | str) -> Launch:
        """The launch that a JSON file holds; raises FusionError where it is damaged."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FusionError(f"{path}: the launch cannot be read: {error}") from error
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise FusionError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
        return Launch.from_json(value, str(path))

    def write(self, path: Path | str) -> None:
        """Write the launch as a JSON file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")


def _record(value: Any, where: str, keys: tuple[str, ...], required: tuple[str, ...]) -> Mapping[str, Any]:
    record = _typed(value, dict, where, "an object")
    for key in record:
        if key not in keys:
            raise FusionError(f"{where}: the key {key!r} is not known; known are {', '.join(keys)}")
    for key in required:
        if key not in record:
            raise FusionError(f"{where}: the key {key!r} is missing")
    return record


def _typed(value: Any, kind: type, where: str, expected: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FusionError(f"{where}: expected {expected}, not {value!r}")
    return value


def _extents(value: Any, where: str, *, tunable: bool) -> tuple:
    expected = "three numbers of at least 1" + (f', the first may be "{_TUNABLE}"' if tunable else "")
    items = _typed(value, list, where, expected)
    extents = [None if tunable and i == 0 and item == _TUNABLE else item for i, item in enumerate(items)]
    whole = all(item is None or (isinstance(item, int) and not isinstance(item, bool)) for item in extents)
    if len(extents) != 3 or not whole:
        raise FusionError(f"{where}: expected {expected}, not {value!r}")
    return tuple(extents)


def _argument(value: Any, where: str) -> Argument:
    record = _record(value, where, _ARGUMENT_KEYS, required=("name",))
    name = _typed(record["name"], str, f"{where}: name", "the parameter's name")
    scalar, dtype = record.get("value"), record.get("dtype")
    if "value" in record and (isinstance(scalar, bool) or not isinstance(scalar, (int, float))):
        raise FusionError(f"{where}: value: expected a number, not {scalar!r}")
    if "dtype" in record:
        _dtype(_typed(dtype, str, f"{where}: dtype", "a type of NumPy, such as float32"), f"{where}: dtype")
    count = _typed(record.get("count", 0), int, f"{where}: count", "a number of elements")
    output = _typed(record.get("output", False), bool, f"{where}: output", "true or false")
    fill = _fill(record.get("fill", "zeros"), f"{where}: fill")
    try:
        return Argument(name, scalar, dtype, count, fill, output)
    except FusionError as error:
        raise FusionError(f"{where}: {error}") from error


def _fill(value: Any, where: str) -> Fill:
    kinds = ", ".join(f'{{"{kind}": [{count} numbers]}}' for kind, count in _NUMBERS.items() if count)
    expected = f'"zeros" or one of {kinds}'
    kind, numbers = (value, []) if isinstance(value, str) else ("", [])
    if isinstance(value, dict) and len(value) == 1:
        kind, numbers = next(iter(value.items()))
    known = _NUMBERS.get(kind) if isinstance(numbers, list) else None
    if known is None or len(numbers) != known:
        raise FusionError(f"{where}: expected {expected}, not {value!r}")
    if any(isinstance(number, bool) or not isinstance(number, (int, float)) for number in numbers):
        raise FusionError(f"{where}: expected {expected}, not {value!r}")
    if kind in ("integers", "uniform") and numbers[0] >= numbers[1]:
        raise FusionError(f"{where}: the lowest number {numbers[0]} is not below the highest {numbers[1]}")
    if kind == "integers" and any(not isinstance(number, int) for number in numbers):
        raise FusionError(f"{where}: integers are drawn between two integers, not {numbers}")
    return Fill(kind, tuple(numbers))


def _dtype(name: str, where: str) -> np.dtype:
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise FusionError(f"{where}: {name!r} is not a type of NumPy; one is float32") from error
    if dtype.kind not in "biuf":
        raise FusionError(f"{where}: {name!r} is not a type of numbers that a kernel takes; one is float32")
    return dtype
