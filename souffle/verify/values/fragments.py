"""Instructions on fragments of matrices that a warp holds together (``wmma`` of the CUDA manual)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm.ir import Call, TensorLoad

from souffle.tvm_compat import const_int
from souffle.verify.expressions import Undecided
from souffle.verify.values.memory import PerWarp
from souffle.verify.values.scalars import Evaluator, Frame, Mask

if TYPE_CHECKING:
    from souffle.verify.values.function import FunctionRun

__all__ = ["matrix_instruction"]

_WARP = 32


def matrix_instruction(run: FunctionRun, name: str, arguments: Sequence[Any]) -> Callable[[Frame, Mask], None] | None:
    """The function that executes an instruction on fragments; ``None`` for a name that is not known."""
    known = {
        "tirx.tvm_fill_fragment": _fill,
        "tirx.tvm_load_matrix_sync": partial(_transfer, stores=False),
        "tirx.tvm_store_matrix_sync": partial(_transfer, stores=True),
        "tirx.tvm_mma_sync": _product,
    }.get(name)
    return known(run, arguments) if known is not None else None


def _fragment(run: FunctionRun, data: Any, index: Any, elements: int) -> tuple[PerWarp, Evaluator]:
    """A fragment's memory, and where it begins in it."""
    pointer = run.pointer(data)
    if pointer is None or not isinstance(pointer.memory, PerWarp):
        raise Undecided(f"the fragment {data}")
    number = run.of(index)
    return pointer.memory, lambda f, m: number(f, m) * elements


def _shape(data: Any, m: int, n: int, k: int) -> tuple[int, int]:
    scope = str(data.args[0].scope()) if isinstance(data, Call) else ""
    shapes = {"wmma.matrix_a": (m, k), "wmma.matrix_b": (k, n), "wmma.accumulator": (m, n)}
    if scope not in shapes:
        raise Undecided(f"the fragment {data}")
    return shapes[scope]


def _leaders(run: FunctionRun, m: Mask) -> np.ndarray:
    """The lanes that speak for their warps: the first of each that takes part."""
    if run.lanes.threads % _WARP:
        raise Undecided(f"fragments of {run.lanes.threads} threads, whose last warp is not full")
    first = np.arange(run.lanes.count) % _WARP == 0
    if m is None:
        return first
    if run.lanes.parted(m, _WARP):
        raise Undecided("fragments in a part of a warp")
    return first & m


def _places(extents: tuple[int, int]) -> np.ndarray:
    """The place of each element in a fragment's memory, rows after each other, with an axis for lanes."""
    return np.arange(extents[0] * extents[1])[:, None]


def _fill(run: FunctionRun, arguments: Sequence[Any]) -> Callable[[Frame, Mask], None]:
    data, *extents, index, value = arguments
    shape = _shape(data, *(const_int(e) for e in extents))
    memory, start = _fragment(run, data, index, shape[0] * shape[1])
    filled, places = run.of(value), _places(shape)

    def fill(f: Frame, m: Mask) -> None:
        memory.write(start(f, m) + places, memory.unit, filled(f, m), _leaders(run, m), run.current)

    return fill


def _transfer(run: FunctionRun, arguments: Sequence[Any], *, stores: bool) -> Callable[[Frame, Mask], None]:
    """A fragment from or to rows of another memory, or columns, so many elements apart."""
    data, *extents, index, outside, stride, layout = arguments
    shape = _shape(data, *(const_int(e) for e in extents))
    memory, start = _fragment(run, data, index, shape[0] * shape[1])
    pointer, apart = run.pointer(outside), run.of(stride)
    if pointer is None or not isinstance(outside.args[0], TensorLoad):
        raise Undecided(f"the memory {outside}")
    places = _places(shape)
    row, column = places // shape[1], places % shape[1]
    if "col" in str(layout.value):
        row, column = column, row
    scale = pointer.size // pointer.memory.unit

    def transfer(f: Frame, m: Mask) -> None:
        leaders, within = _leaders(run, m), start(f, m) + places
        elsewhere = pointer.at(f, m) + (row * apart(f, m) + column) * scale
        if stores:
            values = memory.read(within, memory.unit, leaders)
            pointer.memory.write(elsewhere, pointer.size, values, leaders, run.current)
        else:
            values = pointer.memory.read(elsewhere, pointer.size, leaders)
            memory.write(within, memory.unit, values, leaders, run.current)

    return transfer


def _product(run: FunctionRun, arguments: Sequence[Any]) -> Callable[[Frame, Mask], None]:
    """``d = a b + c``; the extents are those with which the fragments were made."""
    side = 16
    parts = [
        _fragment(run, data, index, side * side) for data, index in zip(arguments[0::2], arguments[1::2], strict=True)
    ]
    for data in arguments[0::2]:
        if _shape(data, side, side, side) != (side, side):
            raise Undecided(f"the fragment {data}")
    places = _places((side, side))
    warps = run.lanes.count // _WARP

    def matrix(part: tuple[PerWarp, Evaluator], f: Frame, m: Mask) -> np.ndarray:
        memory, start = part
        found = memory.read(start(f, m) + places, memory.unit, m)
        return np.broadcast_to(found, (side * side, run.lanes.count))[:, ::_WARP].T.reshape(warps, side, side)

    def product(f: Frame, m: Mask) -> None:
        leaders = _leaders(run, m)
        into, a, b, c = parts
        numbers = run.numbers
        found = numbers.add(numbers.matrix_product(matrix(a, f, m), matrix(b, f, m)), matrix(c, f, m))
        value = np.repeat(found.reshape(warps, -1).T, _WARP, axis=1)
        into[0].write(into[1](f, m) + places, into[0].unit, value, leaders, run.current)

    return product
