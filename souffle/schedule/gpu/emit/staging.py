"""Bringing tiles of an operand from global to shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.contraction_statements import Binder, all_of, guarded, loop
from souffle.schedule.gpu.forms.contraction_expressions import Axis, depends, is_constant, substitute_axes
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.forms.memory_access import lanes_along, memory_step
from souffle.schedule.gpu.forms.two_operands import Operand
from souffle.tvm_compat import PrimExpr, buffer_loads, cast, dtype_of, is_branch, sequence

__all__ = ["StagingRead", "TileFetch", "choose_fetch", "wide_operand"]

_WARP = 32

_BANK_UNITS = 8
"""Units of 16 bytes in the banks of shared memory."""


@dataclass(frozen=True, eq=False)
class StagingRead:
    """One thread's read of `lanes` neighbours.

    Attributes
    ----------
    statements : tuple of Stmt
        Bind what the rest is made of.
    exists : tuple of expression
        Conditions under which the thread has something to read.
    inside : tuple of expression
        Conditions under which it lies in the tensor; else it is zero.
    mapping : callable
        From the lane to the values of the operand's axes.
    place : expression
        Of the first lane in the tile in shared memory.
    own : callable
        From the lane to batch and own index in the tile.
    """

    statements: tuple[tirx.Stmt, ...]
    exists: tuple[PrimExpr, ...]
    inside: tuple[PrimExpr, ...]
    mapping: Callable[[PrimExpr], Mapping[tirx.Var, PrimExpr]]
    place: PrimExpr
    own: Callable[[PrimExpr], tuple[PrimExpr, PrimExpr]]


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
    whole_rows : bool
        Whether a warp reads whole rows of the tile where that makes addresses fewer.
    unit : int
        Elements of the 16 bytes that change places within a row, against bank conflicts in the place of padding: see
        :meth:`crossing`. 0 where rows lie in order.
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
    whole_rows: bool = False
    unit: int = 0

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
        rows = self._rows_of_warp()
        if rows:
            return self._spans[1] * _WARP // (rows * self.threads)
        return -(-prod(self.tile) // (self.lanes * self.threads))

    @property
    def register_elements(self) -> int:
        """Elements that each thread holds between reading and storing."""
        return self.turns * self.lanes

    def place(self, batch: PrimExpr, own: PrimExpr, inner: PrimExpr) -> PrimExpr:
        """Index into shared memory."""
        rows, row, column = (self.tile[1], own, inner) if self.inner_last else (self.tile[2], inner, own)
        row = batch * rows + row
        return row * self.pitch + (tirx.bitwise_xor(column, self.crossing(row)) if self.crossed else column)

    @property
    def crossed(self) -> int:
        """Elements of a row that change places among each other: those of 2, 4 or 8 units; 0 where none do."""
        return gcd(self.pitch // self.unit, _BANK_UNITS) * self.unit if self.unit else 0

    def crossing(self, row: PrimExpr) -> PrimExpr:
        """What a column of a row is combined with, by exclusive or, to its place in the row.

        Units of eight rows that follow one another, of the same number, then lie in different banks, so that
        ``ldmatrix`` reads them at once. A copy of 32 bytes keeps its sector of 32 bytes and one of 128 its line, which
        rows with 16 bytes between them do not: an H100 fetches half as many sectors again for those, and writes them in
        two and a half times as many turns (docs/results.md, "On an H100").
        """
        alike = _BANK_UNITS * self.unit // self.crossed
        return tirx.floormod(tirx.floordiv(row, alike), self.crossed // self.unit) * self.unit

    @property
    def _spans(self) -> tuple[int, int]:
        """Reads along the axis that neighbouring threads go along, and elements along the other."""
        own, inner = self.tile[1:]
        return (inner // self.lanes, own) if self.along_inner else (own // self.lanes, inner)

    def _rows_of_warp(self) -> int:
        """Rows of the tile that a warp reads at a time where its threads read whole rows; else 0.

        Where a row is no power of two of reads, threads that follow one another through the whole tile need an address
        for each turn. Of warps with whole rows some threads are idle, but the reads of a thread are constants apart.
        """
        fast, slow = self._spans
        if not self.whole_rows or self.tile[0] > 1 or self.threads % _WARP or self.threads % fast == 0 or fast > _WARP:
            return 0
        rows = 1 << (_WARP // fast).bit_length() - 1
        return rows if slow % (self.threads // _WARP * rows) == 0 else 0

    def _unit(self, turn: PrimExpr, thread: PrimExpr) -> tuple[Binder, list[PrimExpr], list[PrimExpr]]:
        """Place in the tile (batch, own, inner; the contiguous one in units of `lanes`) and whether it is in it."""
        binder = Binder()
        batch: PrimExpr = tirx.IntImm("int32", 0)
        conditions = []
        fast, slow = self._spans
        rows = self._rows_of_warp()
        if rows:
            lane, warps = tirx.floormod(thread, _WARP), self.threads // _WARP
            first, second = tirx.floormod(lane, fast), tirx.floordiv(lane, fast)
            second = (turn * warps + tirx.floordiv(thread, _WARP)) * rows + second
            conditions += [tirx.LT(lane, rows * fast)] if rows * fast < _WARP else []
        else:
            unit = binder.name("unit", turn * self.threads + thread)
            units = prod(self.tile) // self.lanes
            if units % self.threads:
                conditions.append(tirx.LT(unit, units))
            first, second = tirx.floormod(unit, fast), tirx.floordiv(unit, fast)
            if self.tile[0] > 1:
                batch, second = tirx.floordiv(second, slow), tirx.floormod(second, slow)
        own, inner = (second, first) if self.along_inner else (first, second)
        return binder, [batch, own, inner], conditions

    def read_of(self, turn: PrimExpr, thread: PrimExpr, corner: Sequence[PrimExpr]) -> StagingRead:
        """What one thread reads in one turn, of the tile whose batch, own and inner tile indices are `corner`."""
        binder, unit, exists = self._unit(turn, thread)
        groups = (self.batch, self.axes, self.inner)
        widths = (1, 1 if self.along_inner else self.lanes, self.lanes if self.along_inner else 1)
        inside = []
        linear = []
        for part, tile, extent_tile, axes, width in zip(unit, corner, self.tile, groups, widths, strict=True):
            extent = prod(a.extent for a in axes)
            position = binder.name("at", tile * (extent_tile // width) + part)
            linear.append(position)
            if extent % extent_tile:
                inside.append(tirx.LT(position, extent // width))
        located: list[tuple[Axis, PrimExpr, int]] = []
        for axes, position, width in zip(groups, linear, widths, strict=True):
            parts = binder.locate(
                axes, position, lambda a: depends(self.operand.value, a), width, tirx.IntImm("int32", 0)
            )
            located += [(a, parts[a.var], width if a is axes[-1] else 1) for a in axes if a.var in parts]

        def mapping(lane: PrimExpr) -> Mapping[tirx.Var, PrimExpr]:
            return {a.var: value + lane if width > 1 else value for a, value, width in located}

        first = tuple(p * width if width > 1 else p for p, width in zip(unit, widths, strict=True))

        def own(lane: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
            return first[0], first[1] if self.along_inner else first[1] + lane

        return StagingRead(tuple(binder.statements), tuple(exists), tuple(inside), mapping, self.place(*first), own)

    def fetch(self, registers: Any, thread: PrimExpr, corner: Sequence[PrimExpr]) -> tirx.Stmt:
        """Read the tile whose batch, own and inner tile indices are `corner`; outside the tensor it is zero."""

        def turn(index: PrimExpr) -> tirx.Stmt:
            read = self.read_of(index, thread, corner)

            def one(lane: PrimExpr) -> tirx.Stmt:
                value = substitute_axes(self.operand.value, read.mapping(lane))
                if read.inside:
                    value = tirx.if_then_else(all_of(read.inside), value, tirx.const(0, self.operand.dtype))
                return tirx.BufferStore(registers, value, [index * self.lanes + lane])

            body = loop("lane", self.lanes, one, "vectorized")
            return sequence(*read.statements, guarded(read.exists, body))

        return loop("turn", self.turns, turn, "unrolled")

    def put(self, registers: Any, shared: Any, thread: PrimExpr, start: PrimExpr | int = 0) -> tirx.Stmt:
        """Store what :meth:`fetch` read to shared memory, in its type, where the tile begins at the element `start`."""

        def turn(index: PrimExpr) -> tirx.Stmt:
            binder, (batch, own, inner), conditions = self._unit(index, thread)

            def write(lane: PrimExpr) -> tirx.Stmt:
                x = own if self.along_inner else own * self.lanes + lane
                k = inner * self.lanes + lane if self.along_inner else inner
                value = cast(registers[index * self.lanes + lane], str(shared.dtype))
                return tirx.BufferStore(shared, value, [start + self.place(batch, x, k)])

            contiguous = self.along_inner == self.inner_last
            body = loop("lane", self.lanes, write, "vectorized" if contiguous else "unrolled")
            return sequence(*binder.statements, guarded(conditions, body))

        return loop("turn", self.turns, turn, "unrolled")


def wide_operand(operand: Operand) -> Operand:
    """The operand before a cast to its type, so that reading it does not wait for what is read; or itself."""

    def before(value: PrimExpr) -> PrimExpr:
        if isinstance(value, tirx.Cast) and buffer_loads(value.value):
            return value.value
        if is_branch(value) and is_constant(value.args[2]) and float(value.args[2].value) == 0.0:
            wide = before(value.args[1])
            return tirx.if_then_else(value.args[0], wide, tirx.const(0, dtype_of(wide)))
        return value

    value = before(operand.value)
    return replace(operand, value=value, dtype=dtype_of(value))


def choose_fetch(
    contraction: Contraction,
    side: str,
    tile: tuple[int, int, int],
    threads: int,
    inner_last: bool | None,
    padding: Callable[[bool], int],
    *,
    wide: bool = False,
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
    wide : bool
        Whether registers hold what is read, and storing casts it; see :func:`wide_operand`.
    """
    operand = contraction.left if side == "left" else contraction.right
    operand = wide_operand(operand) if wide else operand
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
