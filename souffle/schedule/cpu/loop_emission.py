"""Loops over nests: vectors with their remainders, and parallel loops over what is outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import EQ, GE, GT, LE, LT, NE, FloorDiv, FloorMod, ForKind

from souffle.program.ieee import with_ieee_arithmetic
from souffle.schedule.cpu.contraction_form import without_units
from souffle.schedule.cpu.host import Machine
from souffle.schedule.cpu.nest import Axis, Nest, decode, flat_index, loop, map_buffer_loads, simplify, uses
from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, sequence

__all__ = ["VectorRun", "collapse", "emit_injective", "overlapping", "pieces", "segments", "serial", "whole_vector"]

_MAX_SEGMENTS = 6


@dataclass(frozen=True)
class VectorRun:
    """`count` vectors of `width` elements from `start`; width 1 is a scalar loop.

    They end `over` elements sooner than they would one behind the other, by as much of the last one as lies in the one
    before it.
    """

    start: int
    count: int
    width: int
    over: int = 0

    @property
    def starts(self) -> list[int]:
        """The first element of each vector."""
        last = (self.count - 1) * self.width - self.over
        return [self.start + min(number * self.width, last) for number in range(self.count)]

    def first(self, number: PrimExpr) -> PrimExpr:
        """The first element of a vector."""
        if not self.over:
            return number * self.width + self.start
        # As a number of its own it stays whole in TVM's arithmetic, which takes constants out of quotients.
        return tirx.min(number * self.width, (self.count - 1) * self.width - self.over) + self.start


def pieces(extent: int, width: int) -> list[VectorRun]:
    """Cover ``[0, extent)``: full vectors, then one vector of each smaller power of two, scalars for the last few."""
    found: list[VectorRun] = []
    start = 0
    while extent - start >= 4 and width >= 4:
        count = (extent - start) // width
        if count:
            found.append(VectorRun(start, count, width))
            start += count * width
        width //= 2
    if start < extent:
        found.append(VectorRun(start, extent - start, 1))
    return found


def overlapping(extent: int, width: int) -> list[VectorRun]:
    """Cover ``[0, extent)`` with vectors of one width; the last one may begin before the others end.

    For what may be written twice: no scalars are left, each of which would take as long as a vector.
    """
    while width > max(extent, 1):
        width //= 2
    if width < 4:
        return pieces(extent, width)
    return [VectorRun(0, -(-extent // width), width, -extent % width)]


def whole_vector(count: int) -> int:
    """The elements of the smallest vector that holds so many."""
    return 1 << max(0, count - 1).bit_length()


def collapse(nest: Nest, kind: str = "spatial") -> Nest:
    """Count as many of the last loops as possible with one variable, where all accesses are contiguous in them.

    Before: ``for y < 7, x < 7: B[c, y, x] = f(A[c, y, x])``; after: ``for yx < 49``.
    """
    axes = getattr(nest, kind)
    for first in range(len(axes) - 1):
        merged = _merged(nest, axes[first:], kind)
        if merged is not None:
            return merged
    return nest


def _merged(nest: Nest, axes: Sequence[Axis], kind: str) -> Nest | None:
    extent = 1
    for axis in axes:
        extent *= axis.extent
    dtype = axes[0].dtype
    joint = Axis(tirx.Var("_".join(a.var.name for a in axes), dtype), extent)
    bound = nest.bind(decode(joint.var, axes))
    spatial = (*bound.spatial, joint) if kind == "spatial" else bound.spatial
    reduction = (*bound.reduce, joint) if kind == "reduce" else bound.reduce
    everything = (*spatial, *reduction)
    divided: list[bool] = []

    def check(node: FloorDiv | FloorMod) -> None:
        divided.append(bool(uses(node, [joint])))

    statements = [s for s in (bound.body, bound.init, bound.epilogue) if s is not None]
    for statement in statements:
        stores: list[tirx.BufferStore] = []
        structural_walk(statement, (tirx.BufferStore, stores.append))
        if not isinstance(statement, tirx.BufferStore):
            return None
        positions = [flat_index(s.buffer, list(s.indices)) for s in stores]
        positions += [flat_index(load.source, list(load.indices)) for load in buffer_loads(statement)]
        for position in positions:
            structural_walk(simplify(position, everything), ((FloorDiv, FloorMod), check))
        # Outside of loads the variables stand for themselves (a range test, an iota): not a matter of positions.
        rest = map_buffer_loads(statement.value, lambda load: tirx.const(0, dtype_of(load)))
        if uses(rest, [joint]):
            return None
    if any(divided):
        return None

    def along(buffer: Any, indices: list[PrimExpr]) -> tuple[Any, list[PrimExpr]] | None:
        if not uses(indices, [joint]):
            return None
        # Counted in the last dimension from the first element: quotients would be left where vectors begin anywhere.
        position = simplify(flat_index(buffer, indices), everything)
        return buffer, [*(tirx.const(0, dtype_of(position)) for _ in indices[1:]), position]

    return replace(bound.on_buffers(along), spatial=spatial, reduce=reduction)


def segments(expression: PrimExpr | tirx.Stmt, axis: Axis) -> list[tuple[int, int]]:
    """Ranges of `axis` in which every comparison of it with a constant in `expression` has one answer."""
    points: set[int] = set()

    def note(comparison: LT) -> None:
        difference = simplify(comparison.a - comparison.b)
        if len(uses(difference, [axis])) == 0:
            return
        at_zero = simplify(structural_map(difference, (tirx.Var, lambda v: _zero(v, axis))))
        slope = simplify(difference - at_zero)
        unit = simplify(structural_map(slope, (tirx.Var, lambda v: _one(v, axis))))
        if not isinstance(at_zero, tirx.IntImm) or not isinstance(unit, tirx.IntImm) or int(unit.value) == 0:
            return
        if not isinstance(simplify(slope - axis.var * unit), tirx.IntImm):
            return
        crossing = -int(at_zero.value) / int(unit.value)
        low = int(crossing // 1)
        points.update(p for p in (low, low + 1) if 0 < p < axis.extent)

    structural_walk(expression, ((LT, LE, GT, GE, EQ, NE), note))
    if len(points) > 2 * _MAX_SEGMENTS:
        return [(0, axis.extent)]
    bounds = [0, *sorted(points), axis.extent]
    return [(a, b - a) for a, b in pairwise(bounds)]


def _zero(variable: tirx.Var, axis: Axis) -> PrimExpr:
    return tirx.const(0, axis.dtype) if variable.same_as(axis.var) else variable


def _one(variable: tirx.Var, axis: Axis) -> PrimExpr:
    return tirx.const(1, axis.dtype) if variable.same_as(axis.var) else variable


def serial(nest: Nest, axes: Sequence[Axis], make: Callable[[Nest], tirx.Stmt]) -> tirx.Stmt:
    """Serial loops over some spatial or reduction axes, around ``make`` of the nest without them."""
    if not axes:
        return make(nest)
    axis = axes[0]
    return loop(
        axis.extent,
        lambda v: serial(nest.bind({axis.var: v}), axes[1:], make),
        name=axis.var.name,
        dtype=axis.dtype,
    )


def lanes_of(statement: tirx.Stmt, machine: Machine) -> int:
    """Elements per vector: by the widest float or the narrowest type of what is stored and loaded."""
    stores: list[str] = []
    structural_walk(statement, (tirx.BufferStore, lambda s: stores.append(str(s.buffer.dtype))))
    structural_walk(statement, (TensorLoad, lambda load: stores.append(str(load.source.dtype))))
    return max(4, min(machine.lanes(dtype) for dtype in stores))


def emit_injective(nest: Nest, machine: Machine) -> tirx.Stmt:
    """Serial loops outside, vectors along the last one."""
    nest = collapse(without_units(nest))
    if not nest.spatial:
        return nest.body
    *outer, inner = nest.spatial
    lanes = lanes_of(nest.body, machine)
    return serial(nest, outer, lambda row: _row(row, inner, lanes))


def _row(nest: Nest, inner: Axis, lanes: int) -> tirx.Stmt:
    statements: list[tirx.Stmt] = []
    for start, extent in segments(nest.body, inner):
        part = nest.restrict(inner, start, extent)
        axis = part.spatial[-1]
        body = _decided(part.body, axis)
        again = not any(load.source.same_as(body.buffer) for load in buffer_loads(body.value))
        for piece in (overlapping if again else pieces)(extent, lanes):
            statements.append(_vectors(body, axis, piece))
    return sequence(*statements)


def _decided(body: tirx.BufferStore, axis: Axis) -> tirx.BufferStore:
    # With the range known, range tests fall away, and the loop needs no scalar branches.
    return tirx.BufferStore(body.buffer, simplify(with_ieee_arithmetic(body.value), [axis]), list(body.indices))


def _vectors(body: tirx.BufferStore, axis: Axis, piece: VectorRun) -> tirx.Stmt:
    def at(position: PrimExpr) -> tirx.Stmt:
        return structural_map(body, (tirx.Var, lambda v: position if v.same_as(axis.var) else v))

    if piece.width == 1:
        return loop(piece.count, lambda v: at(v + piece.start), name="t", dtype=axis.dtype)
    return loop(
        piece.count,
        lambda o: loop(
            piece.width,
            lambda v: at(piece.first(o) + v),
            ForKind.VECTORIZED,
            name="v",
            dtype=axis.dtype,
        ),
        name="o",
        dtype=axis.dtype,
    )
