"""Sums over windows in tiles of several rows, in which a vector of data is read once for all rows that it serves.

A row of a depthwise convolution's data is part of the windows of as many rows of results as the window is high. So the
steps of a tile are straight code, in the order in which their vectors lie in memory: those of one vector follow each
other, and LLVM keeps it in a register. Each result still takes its products in the order of the loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import ForKind

from souffle.schedule.cpu.contraction_form import known_combiner
from souffle.schedule.cpu.nest import (
    Axis,
    Nest,
    guarded_loads,
    loop,
    map_buffer_loads,
    product,
    replace_variables,
    stride_along,
    uses,
)
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, sequence

__all__ = ["Tile", "every_second", "window_steps"]

_MOST_STEPS = 400
"""Of vectors in a tile: 3,000 bytes of instructions, of the 32 KB of a first-level cache."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns of results that are summed in registers.

    Attributes
    ----------
    rows, column : Axis
        Whose variables stand for the row in the tile, and for the column of all.
    height : int
        Rows.
    start : expression
        The first column.
    width, vectors : int
        Elements of a vector, and how many vectors of columns there are.
    """

    rows: Axis
    column: Axis
    height: int
    start: PrimExpr
    width: int
    vectors: int


@dataclass(frozen=True)
class _Step:
    """A product of one row's sum: how far its vector lies behind the tile's first, the row, and where in the window."""

    offset: int
    row: int
    point: tuple[int, ...]


def window_steps(nest: Nest, tile: Tile, update: Callable[..., tirx.Stmt]) -> tirx.Stmt | None:
    """All steps of a tile's sums; None where no vector serves several rows, or they are too many.

    Parameters
    ----------
    nest : Nest
        A reduction, of which all spatial loops but those of the tile are bound.
    tile : Tile
    update : callable
        Makes the statement that adds a value, its third argument, to the sum of a row and a column of the tile.
    """
    load = _vector_load(nest, tile)
    points = product(axis.extent for axis in nest.reduce)
    if load is None or tile.height * points * tile.vectors > _MOST_STEPS:
        return None
    steps = _in_order_of_memory(load, nest, tile)
    places = {offset: list(each) for offset, each in itertools.groupby(steps, key=lambda step: step.offset)}
    if len(places) == len(steps):
        return None
    window = _Window(nest, tile, load, update)
    if stride_along(load, tile.column, [tile.column]) == 1:
        return window.each_vector(lambda first: [window.as_it_lies(each, first) for each in places.values()])
    # What lies between every second element is the next step's.
    pairs: list[tuple[list[_Step], list[_Step]]] = []
    for offset, each in places.items():
        if not pairs or pairs[-1][1] or pairs[-1][0][0].offset + 1 != offset:
            pairs.append((each, []))
        else:
            pairs[-1][1].extend(each)
    return window.each_vector(lambda first: [window.every_second(*pair, first) for pair in pairs])


def _vector_load(nest: Nest, tile: Tile) -> TensorLoad | None:
    """The one load that depends on the column: in vectors that are there as they are, or as every second element."""
    value, column = known_combiner(nest).value, tile.column
    found = [load for load in buffer_loads(value) if uses(load, [column])]
    if not found or any(not tvm_ffi.structural_equal(load, found[0]) for load in found) or guarded_loads(value):
        return None
    first = found[0]
    if not first.indices or uses(list(first.indices)[:-1], [column]) or buffer_loads(list(first.indices)):
        return None
    allowed = (1, 2) if tile.width >= 4 else (1,)
    return first if stride_along(first, column, [column]) in allowed else None


def _in_order_of_memory(load: TensorLoad, nest: Nest, tile: Tile) -> list[_Step]:
    """The steps by their offsets; none where they have no constant ones, or a result's would be in another order."""
    axes = [tile.rows, *nest.reduce]
    strides = [stride_along(load, axis, axes) for axis in axes]
    if any(stride is None for stride in strides):
        return []
    places = itertools.product(range(tile.height), *(range(axis.extent) for axis in nest.reduce))
    steps = [
        _Step(sum(stride * at for stride, at in zip(strides, place, strict=True)), place[0], place[1:])
        for place in places
    ]
    ordered = sorted(steps, key=lambda step: step.offset)
    of_rows = ([step.point for step in ordered if step.row == row] for row in range(tile.height))
    return ordered if all(points == sorted(points) for points in of_rows) else []


class _Window:
    """Statements for the steps of a tile that share a vector.

    Parameters
    ----------
    nest : Nest
    tile : Tile
    load : TensorLoad
        Of the vector.
    update : callable
    """

    def __init__(self, nest: Nest, tile: Tile, load: TensorLoad, update: Callable[..., tirx.Stmt]) -> None:
        self._nest, self._tile, self._load, self._update = nest, tile, load, update
        self._value = known_combiner(nest).value

    def each_vector(self, make: Callable[[PrimExpr], list[tirx.Stmt]]) -> tirx.Stmt:
        """The statements of each vector of the tile, by its first column."""
        width, dtype = self._tile.width, self._tile.column.dtype
        return loop(
            self._tile.vectors, lambda u: sequence(*make(u * width)), ForKind.UNROLLED, name="u", dtype=dtype
        )

    def as_it_lies(self, steps: Sequence[_Step], first: PrimExpr) -> tirx.Stmt:
        """Steps whose vector is contiguous."""
        return sequence(*(self._step(step, first, None) for step in steps))

    def every_second(self, steps: Sequence[_Step], between: Sequence[_Step], first: PrimExpr) -> tirx.Stmt:
        """Steps whose vector is every second element from one on, and those of the elements between these."""
        base = self._at(self._load, steps[0], first)
        statement, *parts = every_second(base, self._tile.width, both=bool(between))
        groups = zip((steps, between), parts, strict=False)
        return sequence(statement, *(self._step(step, first, part) for group, part in groups for step in group))

    def _step(self, step: _Step, first: PrimExpr, part: tirx.Buffer | None) -> tirx.Stmt:
        row = tirx.const(step.row, self._tile.rows.dtype)

        def lane(v: PrimExpr) -> tirx.Stmt:
            def read(load: TensorLoad) -> PrimExpr:
                return tirx.BufferLoad(part, [v]) if tvm_ffi.structural_equal(load, self._load) else load

            value = self._value if part is None else map_buffer_loads(self._value, read)
            return self._update(row, first + v, self._at(value, step, first + v))

        return loop(self._tile.width, lane, ForKind.VECTORIZED, name="v", dtype=self._tile.column.dtype)

    def _at(self, expression: Any, step: _Step, column: PrimExpr) -> Any:
        tile = self._tile
        places = zip((tile.rows, *self._nest.reduce), (step.row, *step.point), strict=True)
        values = {axis.var: tirx.const(place, axis.dtype) for axis, place in places}
        return replace_variables(expression, values | {tile.column.var: tile.start + column})


def every_second(base: TensorLoad, width: int, *, both: bool = False) -> tuple[Any, ...]:
    """Elements 0, 2, ... from `base` on in a local array, from two contiguous vectors.

    Of vectors of which every second element is taken one by one, LLVM makes loads of scalars.

    Parameters
    ----------
    base : TensorLoad
    width : int
        Elements of a vector.
    both : bool
        Elements 1, 3, ..., too. Without, the vectors read nothing behind the last element that is taken.

    Returns
    -------
    tuple of Stmt, Buffer and, for both, Buffer
    """
    dtype = dtype_of(base)
    lying = tirx.decl_buffer((2 * width,), dtype, "both")
    *leading, last = base.indices
    half, behind = width // 2, width if both else width - 1

    def vector(extent: int, make: Callable[[PrimExpr], tirx.Stmt]) -> tirx.Stmt:
        return loop(extent, make, ForKind.VECTORIZED, name="v", dtype=dtype_of(last))

    def read(offset: int) -> Callable[[PrimExpr], PrimExpr]:
        return lambda v: tirx.BufferLoad(base.source, [*leading, last + v + offset])

    low, high = read(0), read(behind)
    statements = [
        tirx.AllocBuffer(lying),
        vector(width, lambda v: tirx.BufferStore(lying, low(v), [v])),
        vector(width, lambda v: tirx.BufferStore(lying, high(v), [v + width])),
    ]
    parts = []
    for parity in range(2 if both else 1):
        part = tirx.decl_buffer((width,), dtype, ("even", "odd")[parity])
        parts.append(part)
        statements.append(tirx.AllocBuffer(part))
        # In the second vector, what is wanted lies as far later as it is read sooner.
        for target, first in ((0, parity), (half, 2 * width - behind + parity)):
            statements.append(
                vector(
                    half,
                    lambda v, part=part, target=target, first=first: tirx.BufferStore(
                        part, tirx.BufferLoad(lying, [v * 2 + first]), [v + target]
                    ),
                )
            )
    return sequence(*statements), *parts
