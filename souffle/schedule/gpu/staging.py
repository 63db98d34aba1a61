"""Statements that the contraction kernels have in common: fetching tiles of operands, and writing results back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.schedule.gpu.canonical import Axis, Contraction, Operand, buffer_loads, substitute_axes
from souffle.tvm_compat import PrimExpr, const_int, variables

__all__ = [
    "Binder",
    "TileFetch",
    "bits_of",
    "choose_fetch",
    "guarded",
    "kernel_func",
    "local_buffer",
    "loop",
    "sequence",
    "shared_buffer",
    "store_lanes",
    "unit_step",
    "write_results",
]

_WIDEST_BYTES = 16
"""Bytes of the widest load and store instruction of a thread."""


def bits_of(dtype: str) -> int:
    """Bits of one element as stored: a bool takes a byte."""
    return 8 if dtype == "bool" else tvm.DataType(dtype).bits


def sequence(*statements: tirx.Stmt | None) -> tirx.Stmt:
    """The statements in order, without the missing ones."""
    present = [s for s in statements if s is not None]
    return present[0] if len(present) == 1 else tirx.SeqStmt(present)


def loop(name: str, extent: int, body: Callable[[PrimExpr], tirx.Stmt], kind: str = "serial") -> tirx.Stmt:
    """A loop over ``[0, extent)``; a single turn needs none.

    Parameters
    ----------
    kind : str
        ``"serial"``, ``"vectorized"``, or ``"unrolled"``: by the CUDA compiler (``#pragma unroll``), which keeps the
        emitted text short while arrays that are indexed by the loop still become registers.
    """
    if extent == 1:
        return body(tirx.IntImm("int32", 0))
    var = tirx.Var(name, "int32")
    kinds = tirx.ForKind
    chosen = {"serial": kinds.SERIAL, "vectorized": kinds.VECTORIZED, "unrolled": kinds.UNROLLED}[kind]
    return tirx.For(var, tirx.IntImm("int32", 0), tirx.IntImm("int32", extent), chosen, body(var))


def guarded(conditions: Sequence[PrimExpr], body: tirx.Stmt) -> tirx.Stmt:
    """`body` where all `conditions` hold."""
    return tirx.IfThenElse(_all(conditions), body, None) if conditions else body


def _all(conditions: Sequence[PrimExpr]) -> PrimExpr:
    result = conditions[0]
    for condition in conditions[1:]:
        result = tirx.And(result, condition)
    return result


def shared_buffer(name: str, elements: int, dtype: str) -> Any:
    """Static shared memory, one-dimensional so that no pass can take the padding out of its rows."""
    return tirx.decl_buffer((elements,), dtype, name, scope="shared")


def local_buffer(name: str, elements: int, dtype: str) -> Any:
    """Registers of a thread."""
    return tirx.decl_buffer((elements,), dtype, name, scope="local")


class Binder:
    """Collects scalar bindings, so that an index that is used many times is computed once."""

    def __init__(self) -> None:
        self.statements: list[tirx.Stmt] = []

    def name(self, name: str, value: PrimExpr) -> PrimExpr:
        """A variable for `value`, or the value itself if it is trivial."""
        if isinstance(value, tirx.IntImm | tirx.Var):
            return value
        var = tirx.Var(name, "int32")
        self.statements.append(tirx.Bind(var, value))
        return var

    def locate(
        self, axes: Sequence[Axis], linear: PrimExpr, used: Callable[[Axis], bool], lanes: int = 1, lane: Any = 0
    ) -> dict[tirx.Var, PrimExpr]:
        """The axes of a row-major group from its linear index, which counts vectors of `lanes` of the last axis.

        The first axis is not reduced, so an index beyond the group gives a value out of its range: guard its use.
        """
        found: dict[tirx.Var, PrimExpr] = {}
        rest = linear
        for position in reversed(range(len(axes))):
            axis = axes[position]
            width = lanes if position == len(axes) - 1 else 1
            extent = axis.extent // width
            part = rest if position == 0 else tirx.floormod(rest, extent)
            rest = tirx.floordiv(rest, extent)
            if used(axis):
                part = self.name(str(axis.var.name), part)
                found[axis.var] = part * width + lane if width > 1 else part
        return found


def _offset(load: TensorLoad) -> PrimExpr:
    offset: PrimExpr = tirx.IntImm("int32", 0)
    for index, extent in zip(load.indices, load.source.shape, strict=True):
        offset = offset * const_int(extent) + index
    return offset


def _step(value: PrimExpr, indices: PrimExpr, axis: Axis) -> int | None:
    """By how much an index grows with one step along `axis`, if that is constant."""
    shifted = substitute_axes(indices, {axis.var: axis.var + 1})
    difference = tvm.sym.Analyzer().simplify(shifted - indices)
    return int(difference.value) if isinstance(difference, tirx.IntImm) else None


def unit_step(value: PrimExpr, axis: Axis) -> int | None:
    """The step in memory of the largest tensor in `value` that depends on `axis`, along `axis`; ``None`` if unknown."""
    best: tuple[int, int | None] | None = None
    for load in buffer_loads(value):
        offset = _offset(load)
        if any(axis.var.same_as(v) for v in variables(offset)):
            size = prod(const_int(e) for e in load.source.shape)
            if best is None or size > best[0]:
                best = (size, _step(value, offset, axis))
    return None if best is None else best[1]


def _has_condition_on(value: PrimExpr, axis: Axis) -> bool:
    found = False

    def see(node: Any) -> None:
        nonlocal found
        found = found or any(axis.var.same_as(v) for v in variables(node))

    compares = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
    tvm_ffi.structural_walk(value, (compares, see))
    return found


def store_lanes(value: PrimExpr, axis: Axis, dtype: str) -> int:
    """How many neighbours along `axis` one instruction can take: the widest power of two that divides the axis.

    1 if a condition in `value` depends on the axis, or a read moves by other than 0 or 1 elements along it.
    """
    if _has_condition_on(value, axis):
        return 1
    for load in buffer_loads(value):
        if _step(value, _offset(load), axis) not in (0, 1):
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
                    value = tirx.if_then_else(_all(inside), value, tirx.const(0, self.operand.dtype))
                return tirx.BufferStore(registers, value, [index * self.lanes + lane])

            names = variables(self.operand.value)
            located: list[tuple[Axis, PrimExpr, int]] = []
            for axes, position, width in zip(groups, linear, widths, strict=True):
                parts = binder.locate(
                    axes, position, lambda a: any(a.var.same_as(v) for v in names), width, tirx.IntImm("int32", 0)
                )
                located += [
                    (a, parts[a.var], width if a is axes[-1] else 1) for a in axes if a.var in parts
                ]

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
    steps = [unit_step(operand.value, group[-1]) if group else None for group in (axes, contraction.inner)]
    far = 1 << 30
    own, inner = (far if s is None else abs(s) or far for s in steps)
    along_inner = inner < own
    group, extent = (contraction.inner, tile[2]) if along_inner else (axes, tile[1])
    lanes = 1
    if group and steps[1 if along_inner else 0] == 1:
        lanes = store_lanes(operand.value, group[-1], operand.dtype)
        while extent % lanes:
            lanes //= 2
        # Short of one read for each thread, narrower reads keep more threads busy.
        while lanes > 1 and prod(tile) < lanes * threads:
            lanes //= 2
    last = along_inner if inner_last is None else inner_last
    return TileFetch(
        operand, axes, contraction.batch, contraction.inner, tile, along_inner, lanes, last,
        padding(last != along_inner), threads,
    )


def write_results(
    contraction: Contraction,
    batch: PrimExpr,
    row: PrimExpr,
    column: PrimExpr,
    lanes: int,
    total: Callable[[PrimExpr], PrimExpr],
    tile: tuple[int, int, int],
) -> tirx.Stmt:
    """Store all outputs that depend on `lanes` neighbouring totals.

    Parameters
    ----------
    batch, row, column : expression
        Linear indices in the groups; `column` counts vectors of `lanes`.
    total : callable
        From the lane to the finished total.
    tile : tuple of int
        Extents of the tile, to know which groups have a ragged end.
    """
    binder = Binder()
    conditions = []
    mapping: dict[tirx.Var, PrimExpr] = {}
    last: Axis | None = contraction.columns[-1] if lanes > 1 else None
    names = [v for s in contraction.stores for e in (*s.indices, s.value, *([s.where] if s.where is not None else []))
             for v in variables(e)]
    groups = (contraction.batch, contraction.rows, contraction.columns)
    for axes, linear, extent, size, width in zip(
        groups, (batch, row, column), contraction.extents, tile, (1, 1, lanes), strict=False
    ):
        position = binder.name("at", linear)
        if extent % size:
            conditions.append(tirx.LT(position, extent // width))
        mapping.update(binder.locate(axes, position, lambda a: any(a.var.same_as(v) for v in names), width, 0))

    statements = []
    for store in contraction.stores:

        def write(lane: PrimExpr, store: Any = store) -> tirx.Stmt:
            # Lanes move the last column axis only; the position itself is bound once.
            here = dict(mapping)
            if last is not None and last.var in here:
                here[last.var] = here[last.var] + lane
            here[contraction.total] = total(lane)
            value = substitute_axes(store.value, here)
            return tirx.BufferStore(store.buffer, value, [substitute_axes(i, here) for i in store.indices])

        body = loop("lane", lanes, write, "vectorized")
        where = [] if store.where is None else [substitute_axes(store.where, mapping)]
        statements.append(guarded(where, body))
    return sequence(*binder.statements, guarded(conditions, sequence(*statements)))


def result_lanes(contraction: Contraction, most: int) -> int:
    """How many neighbouring columns one store can take in every output, at most `most`."""
    if not contraction.columns:
        return 1
    axis = contraction.columns[-1]
    lanes = most
    for store in contraction.stores:
        target = store.buffer[store.indices] if store.indices else None
        if target is None or store.where is not None and _has_condition_on(store.where, axis):
            return 1
        if unit_step(target, axis) != 1 or any(isinstance(c, Call) for c in _calls(store.value)):
            return 1
        lanes = min(lanes, store_lanes(store.value, axis, str(store.buffer.dtype)))
    return lanes


def _calls(value: PrimExpr) -> list[Call]:
    found: list[Call] = []
    tvm_ffi.structural_walk(value, (Call, found.append))
    return found


def kernel_func(
    func: tirx.PrimFunc, tiles: int, threads: int, buffers: Sequence[Any],
    body: Callable[[PrimExpr, PrimExpr], tirx.Stmt],
) -> tirx.PrimFunc:
    """`func` with its body replaced by ``body(blockIdx.x, threadIdx.x)``, and `buffers` allocated for it."""
    block, thread = tirx.Var("tile", "int32"), tirx.Var("thread", "int32")

    def bind(var: tirx.Var, extent: int, tag: str, inner: tirx.Stmt) -> tirx.Stmt:
        axis = tirx.IterVar((0, extent), tirx.Var(tag.replace(".", "_"), "int32"), tirx.IterVar.ThreadIndex, tag)
        zero, size = tirx.IntImm("int32", 0), tirx.IntImm("int32", extent)
        return tirx.For(var, zero, size, tirx.ForKind.THREAD_BINDING, inner, axis)

    # Unrolling is the CUDA compiler's: the text stays short, and arrays indexed by such a loop still become registers.
    zero = tirx.IntImm("int32", 0)
    inside = tirx.AttrStmt(zero, "pragma_unroll_explicit", zero, body(block, thread))
    # All buffers are allocated, and touched, in one scope. Otherwise TVM's StorageRewrite gives the memory of fp16 tiles
    # to fp32 results, and then rejects pointers into it for their type.
    inside = tirx.AttrStmt(zero, "extern_scope", zero, inside)
    inside = sequence(*(tirx.AllocBuffer(buffer) for buffer in buffers), inside)
    nest = bind(block, tiles, "blockIdx.x", bind(thread, threads, "threadIdx.x", inside))
    root = func.body.block
    new_root = tvm.s_tir.SBlock([], [], [], root.name_hint, nest)
    return func.with_body(tvm.s_tir.SBlockRealize([], True, new_root))
