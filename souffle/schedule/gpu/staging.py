"""Bringing tiles of an operand from global to shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.schedule.gpu.canonical import Contraction, Operand
from souffle.schedule.gpu.expressions import COMPARE, Axis, buffer_loads, depends, substitute_axes
from souffle.schedule.gpu.statements import Binder, all_of, guarded, loop, sequence
from souffle.tvm_compat import PrimExpr, const_int

__all__ = ["TileFetch", "bits_of", "choose_fetch", "has_condition_on", "lanes_along", "memory_step"]

_WIDEST_BYTES = 16
"""Bytes of the widest load and store instruction of a thread."""


def bits_of(dtype: str) -> int:
    """Bits of one element as stored: a bool takes a byte."""
    return 8 if dtype == "bool" else tvm.DataType(dtype).bits


def _offset(load: TensorLoad) -> PrimExpr:
    offset: PrimExpr = tirx.IntImm("int32", 0)
    for index, extent in zip(load.indices, load.source.shape, strict=True):
        offset = offset * const_int(extent) + index
    return offset


def _step(indices: PrimExpr, axis: Axis) -> int | None:
    """By how much an index grows with one step along `axis`, if that is constant."""
    shifted = substitute_axes(indices, {axis.var: axis.var + 1})
    difference = tvm.sym.Analyzer().simplify(shifted - indices)
    return int(difference.value) if isinstance(difference, tirx.IntImm) else None


def memory_step(value: PrimExpr, axis: Axis) -> int | None:
    """The step in memory of the largest tensor in `value` that depends on `axis`, along `axis`; ``None`` if unknown."""
    best: tuple[int, int | None] | None = None
    for load in buffer_loads(value):
        offset = _offset(load)
        if depends(offset, axis):
            size = prod(const_int(e) for e in load.source.shape)
            if best is None or size > best[0]:
                best = (size, _step(offset, axis))
    return None if best is None else best[1]


def has_condition_on(value: PrimExpr, axis: Axis) -> bool:
    """Whether a comparison in `value` depends on `axis`."""
    found = False

    def see(node: Any) -> None:
        nonlocal found
        found = found or depends(node, axis)

    tvm_ffi.structural_walk(value, (COMPARE, see))
    return found


def lanes_along(value: PrimExpr, axis: Axis, dtype: str) -> int:
    """How many neighbours along `axis` one instruction can take: the widest power of two that divides the axis.

    1 if a condition in `value` depends on the axis, or a read moves by other than 0 or 1 elements along it.
    """
    if has_condition_on(value, axis):
        return 1
    for load in buffer_loads(value):
        if _step(_offset(load), axis) not in (0, 1):
            return 1
    bits = bits_of(dtype)
    # CUDA's own vectors of bytes end at four elements.
    lanes = 4 if bits == 8 and dtype != "bool" else 1 if dtype == "bool" else max(1, _WIDEST_BYTES * 8 // bits)
    while axis.extent % lanes:
        lanes //= 2
    return lanes


@dataclass(frozen=True, eq=False)
class TileFetch:
    """How the threads of a block bring a tile of an operand from global to shared memory, by way of registers.

    Attributes
    ----------
    operand : Operand
    axes : tuple of Axis
        The operand's own axes, rows or columns.
    batch, inner : tuple of Axis
    tile : tuple of int
        Extents of the tile: batch, own, inner.
    along_inner : bool
        Whether neighbouring threads read neighbours of the inner axis, not of the own axis.
    lanes : int
        Elements of one read.
    inner_last : bool
        Whether shared memory holds the inner axis contiguous.
    padding : int
        Elements between rows of shared memory, against bank conflicts.
    threads : int
    """

    operand: Operand
    axes: tuple[Axis, ...]
    batch: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    tile: tuple[int, int, int]
    along_inner: bool
    lanes: int
    inner_last: bool
    padding: int
    threads: int

    @property
    def pitch(self) -> int:
        """Elements from one row of shared memory to the next."""
        return (self.tile[2] if self.inner_last else self.tile[1]) + self.padding

    @property
    def shared_elements(self) -> int:
        """Elements of shared memory of the tile."""
        return self.tile[0] * (self.tile[1] if self.inner_last else self.tile[2]) * self.pitch

    @property
    def turns(self) -> int:
        """Reads of each thread."""
        return -(-prod(self.tile) // (self.lanes * self.threads))

    @property
    def register_elements(self) -> int:
        """Elements that each thread holds between reading and storing."""
        return self.turns * self.lanes

    def place(self, batch: PrimExpr, own: PrimExpr, inner: PrimExpr) -> PrimExpr:
        """Index into shared memory."""
        rows, row, column = (self.tile[1], own, inner) if self.inner_last else (self.tile[2], inner, own)
        return (batch * rows + row) * self.pitch + column

    def _unit(self, turn: PrimExpr, thread: PrimExpr) -> tuple[Binder, list[PrimExpr], list[PrimExpr]]:
        """Place in the tile (batch, own, inner; the contiguous one in units of `lanes`) and whether it is in it."""
        binder = Binder()
        unit = binder.name("unit", turn * self.threads + thread)
        conditions = []
        units = prod(self.tile) // self.lanes
        if units % self.threads:
            conditions.append(tirx.LT(unit, units))
        fast = (self.tile[2] if self.along_inner else self.tile[1]) // self.lanes
        slow = self.tile[1] if self.along_inner else self.tile[2]
        first, second = tirx.floormod(unit, fast), tirx.floordiv(unit, fast)
        batch: PrimExpr = tirx.IntImm("int32", 0)
        if self.tile[0] > 1:
            batch, second = tirx.floordiv(second, slow), tirx.floormod(second, slow)
        own, inner = (second, first) if self.along_inner else (first, second)
        return binder, [batch, own, inner], conditions

    def fetch(self, registers: Any, thread: PrimExpr, corner: Sequence[PrimExpr]) -> tirx.Stmt:
        """Read the tile whose batch, own and inner tile indices are `corner`; outside the tensor it is zero."""

        def turn(index: PrimExpr) -> tirx.Stmt:
            binder, unit, conditions = self._unit(index, thread)
            own_lanes = 1 if self.along_inner else self.lanes
            inner_lanes = self.lanes if self.along_inner else 1
            groups = (self.batch, self.axes, self.inner)
            widths = (1, own_lanes, inner_lanes)
            inside = []
            linear = []
            for part, tile, extent_tile, axes, width in zip(unit, corner, self.tile, groups, widths, strict=True):
                extent = prod(a.extent for a in axes)
                position = binder.name("at", tile * (extent_tile // width) + part)
                linear.append(position)
                if extent % extent_tile:
                    inside.append(tirx.LT(position, extent // width))

            def read(lane: PrimExpr) -> tirx.Stmt:
                value = substitute_axes(self.operand.value, mapping(lane))
                if inside:
                    value = tirx.if_then_else(all_of(inside), value, tirx.const(0, self.operand.dtype))
                return tirx.BufferStore(registers, value, [index * self.lanes + lane])

            located: list[tuple[Axis, PrimExpr, int]] = []
            for axes, position, width in zip(groups, linear, widths, strict=True):
                parts = binder.locate(
                    axes, position, lambda a: depends(self.operand.value, a), width, tirx.IntImm("int32", 0)
                )
                located += [(a, parts[a.var], width if a is axes[-1] else 1) for a in axes if a.var in parts]

            def mapping(lane: PrimExpr) -> Mapping[tirx.Var, PrimExpr]:
                return {a.var: value + lane if width > 1 else value for a, value, width in located}

            body = loop("lane", self.lanes, read, "vectorized")
            return sequence(*binder.statements, guarded(conditions, body))

        return loop("turn", self.turns, turn, "unrolled")

    def put(self, registers: Any, shared: Any, thread: PrimExpr) -> tirx.Stmt:
        """Store what :meth:`fetch` read to shared memory."""

        def turn(index: PrimExpr) -> tirx.Stmt:
            binder, (batch, own, inner), conditions = self._unit(index, thread)

            def write(lane: PrimExpr) -> tirx.Stmt:
                x = own if self.along_inner else own * self.lanes + lane
                k = inner * self.lanes + lane if self.along_inner else inner
                return tirx.BufferStore(shared, registers[index * self.lanes + lane], [self.place(batch, x, k)])

            contiguous = self.along_inner == self.inner_last
            body = loop("lane", self.lanes, write, "vectorized" if contiguous else "unrolled")
            return sequence(*binder.statements, guarded(conditions, body))

        return loop("turn", self.turns, turn, "unrolled")


def choose_fetch(
    contraction: Contraction,
    side: str,
    tile: tuple[int, int, int],
    threads: int,
    inner_last: bool | None,
    padding: Callable[[bool], int],
) -> TileFetch:
    """The fetch of one operand: threads along the axis that is contiguous in memory, the widest reads that fit.

    Parameters
    ----------
    side : str
        ``"left"`` or ``"right"``.
    tile : tuple of int
        Batch, own and inner extent of the tile.
    inner_last : bool or None
        Which axis shared memory holds contiguous; ``None`` for the one that is contiguous in memory.
    padding : callable
        From whether reading and storing go along different axes to the padding of rows.
    """
    operand = contraction.left if side == "left" else contraction.right
    axes = contraction.rows if side == "left" else contraction.columns
    steps = [memory_step(operand.value, group[-1]) if group else None for group in (axes, contraction.inner)]
    far = 1 << 30
    own, inner = (far if s is None else abs(s) or far for s in steps)
    along_inner = inner < own
    group, extent = (contraction.inner, tile[2]) if along_inner else (axes, tile[1])
    lanes = 1
    if group and steps[1 if along_inner else 0] == 1:
        lanes = lanes_along(operand.value, group[-1], operand.dtype)
        while extent % lanes:
            lanes //= 2
        # Short of one read for each thread, narrower reads keep more threads busy.
        while lanes > 1 and prod(tile) < lanes * threads:
            lanes //= 2
    last = along_inner if inner_last is None else inner_last
    return TileFetch(
        operand,
        axes,
        contraction.batch,
        contraction.inner,
        tile,
        along_inner,
        lanes,
        last,
        padding(last != along_inner),
        threads,
    )
