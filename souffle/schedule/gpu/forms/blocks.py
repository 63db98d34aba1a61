"""What the forms of a stage share: reading blocks of a PrimFunc, and inlining.

A stage runs without a grid barrier (the kernel has them only between stages), so nothing that one thread block writes
may be read by another inside it. The functions here remove what would break that;
:func:`souffle.schedule.gpu.schedule_check.check_schedule` asserts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from souffle.decision import Refused
from souffle.tvm_calls import PlainSchedule, structural_map
from souffle.tvm_compat import collect, const_int

__all__ = [
    "BlockAccess",
    "BlockView",
    "block_loops",
    "block_views",
    "detach_outputs",
    "detaching_refusal",
    "expression_cost",
    "index_step",
    "inline_injective",
    "inlining_refusal",
    "intermediates",
    "is_reduction",
    "open_schedule",
    "product",
    "same_buffer",
]

_REDUCE = 2
"""``IterVar.iter_type`` of a commutative reduction."""

MAX_LOADS = 1024
"""Loads of one block beyond which the text, and TVM's time for it, grow out of hand."""

_CHEAP_CALLS = frozenset({"if_then_else", "likely", "fabs", "reinterpret", "floor", "ceil", "trunc", "round"})
"""Operators without their namespace, which differs from one to the next and between versions of TVM."""


def same_buffer(left: ir.Var, right: ir.Var) -> bool:
    """Whether two buffer variables are one."""
    return left.same_as(right)


@dataclass(frozen=True, eq=False)
class BlockAccess:
    """One place in a block that reads or writes one element of `buffer`."""

    buffer: ir.Var
    indices: tuple[tirx.PrimExpr, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the buffer."""
        return tuple(const_int(extent) for extent in self.buffer.shape)

    @property
    def flat(self) -> tirx.PrimExpr:
        """Row-major position in the buffer."""
        position: tirx.PrimExpr = tirx.IntImm("int32", 0)
        for index, extent in zip(self.indices, self.shape, strict=True):
            position = position * extent + index
        return position


@dataclass(frozen=True, eq=False)
class BlockView:
    """A block of the stage as the rules see it.

    Attributes
    ----------
    rv : SBlockRV
        Its handle in the schedule.
    node : SBlock
    spatial, reduction : tuple of IterVar
    reads : tuple of BlockAccess
        Without the reads of its own accumulators; repeated reads repeat.
    writes : tuple of BlockAccess
        One per written buffer.
    """

    rv: object
    node: s_tir.SBlock
    spatial: tuple[tirx.IterVar, ...]
    reduction: tuple[tirx.IterVar, ...]
    reads: tuple[BlockAccess, ...]
    writes: tuple[BlockAccess, ...]

    @property
    def name(self) -> str:
        """The block's name, which is the TE's."""
        return self.node.name_hint

    @property
    def spatial_shape(self) -> tuple[int, ...]:
        """Extents of the data-parallel axes."""
        return tuple(const_int(axis.dom.extent) for axis in self.spatial)

    @property
    def reduction_size(self) -> int:
        """Product of the extents of the reduction axes; 1 without any."""
        return product(const_int(axis.dom.extent) for axis in self.reduction)

    @property
    def size(self) -> int:
        """Product of the extents of the data-parallel axes."""
        return product(self.spatial_shape)

    def writes_to(self, buffer: ir.Var) -> bool:
        """Whether it writes `buffer`."""
        return any(same_buffer(access.buffer, buffer) for access in self.writes)

    def reads_from(self, buffer: ir.Var) -> bool:
        """Whether it reads `buffer`."""
        return any(same_buffer(access.buffer, buffer) for access in self.reads)


def is_reduction(axis: tirx.IterVar) -> bool:
    """Whether a block's axis is reduced."""
    return axis.iter_type == _REDUCE


def product(extents: Iterator[int] | Sequence[int]) -> int:
    """Product of integers; 1 for none."""
    result = 1
    for extent in extents:
        result *= extent
    return result


def open_schedule(func: tirx.PrimFunc) -> s_tir.Schedule:
    """A schedule of `func` alone."""
    return PlainSchedule(func)


def block_view(sch: s_tir.Schedule, rv: object) -> BlockView:
    """Read the block `rv`."""
    node = sch.get(rv)
    return BlockView(rv, node, *_read(node))


@lru_cache(maxsize=1024)
def _read(node: s_tir.SBlock) -> tuple[tuple[Any, ...], ...]:
    """A block's axes and accesses, as :class:`BlockView` has them: rules look at it several times between two steps."""
    writes: list[BlockAccess] = []
    reads: list[BlockAccess] = []
    for store in collect(node.body, tirx.BufferStore):
        if not any(same_buffer(store.buffer, access.buffer) for access in writes):
            writes.append(BlockAccess(store.buffer, tuple(store.indices)))
    for load in collect(node.body, ir.TensorLoad):
        if not any(same_buffer(load.source, access.buffer) for access in writes):
            reads.append(BlockAccess(load.source, tuple(load.indices)))
    axes = list(node.iter_vars)
    return (
        tuple(axis for axis in axes if not is_reduction(axis)),
        tuple(axis for axis in axes if is_reduction(axis)),
        tuple(reads),
        tuple(writes),
    )


def block_views(sch: s_tir.Schedule) -> list[BlockView]:
    """The stage's blocks, producers before consumers."""
    return [block_view(sch, rv) for rv in sch.get_child_blocks(sch.get_sblock("root"))]


def intermediates(sch: s_tir.Schedule) -> list[ir.Var]:
    """Buffers that are neither read from nor written to the caller."""
    return list(sch.get(sch.get_sblock("root")).alloc_buffers)


def block_loops(sch: s_tir.Schedule, view: BlockView) -> list[Any]:
    """The loop over each axis of an unscheduled block, in order; ``None`` where an axis of extent 1 has none."""
    loops = sch.get_loops(view.rv)
    if not loops:
        return [None] * len(view.node.iter_vars)
    nodes = [sch.get(loop) for loop in loops]
    table = []
    for value in nodes[-1].body.iter_values:
        matches = (loop for loop, node in zip(loops, nodes, strict=True) if node.loop_var.same_as(value))
        table.append(next(matches, None))
    return table


def detach_outputs(sch: s_tir.Schedule) -> None:
    """Give every output that the stage also reads a private copy for those reads.

    The copy is an intermediate, so that what follows can inline it or place it on chip; the output is written from it
    by a block of its own.
    """
    private = intermediates(sch)
    found = block_views(sch)
    for view in found[:]:
        for index, access in enumerate(view.writes):
            if any(same_buffer(access.buffer, buffer) for buffer in private):
                continue
            readers = [other.rv for other in found if other.reads_from(access.buffer)]
            if readers:
                position = _write_index(view, access.buffer)
                sch.cache_write(view.rv, position if position is not None else index, "local", readers)
                found = block_views(sch)


def detaching_refusal(func: tirx.PrimFunc) -> Refused | None:
    """Why an output that the stage also reads cannot get a private copy: TVM finds one region of it in each reader."""
    sch = open_schedule(func)
    private, views = intermediates(sch), block_views(sch)
    for view in views:
        for written in (written for maker in views for written in maker.writes):
            regions = sum(same_buffer(region.source, written.buffer) for region in view.node.reads)
            if regions > 1 and not any(same_buffer(written.buffer, buffer) for buffer in private):
                return Refused(f"block {view.name} reads an output of the stage in {regions} places that are no region")
    return None


def _write_index(view: BlockView, buffer: ir.Var) -> int | None:
    """Position of `buffer` in the block's declared writes, which `cache_write` counts by."""
    for position, region in enumerate(view.node.writes):
        if same_buffer(region.source, buffer):
            return position
    return None


def inline_injective(sch: s_tir.Schedule, keep: frozenset[str] = frozenset()) -> None:
    """Inline every block without reduction whose output stays in the stage, except those named in `keep`."""
    private = intermediates(sch)
    for rv in sch.get_child_blocks(sch.get_sblock("root")):
        view = block_view(sch, rv)
        if view.reduction or view.name in keep:
            continue
        if all(any(same_buffer(a.buffer, buffer) for buffer in private) for a in view.writes):
            sch.compute_inline(rv)


def inlining_refusal(func: tirx.PrimFunc) -> Refused | None:
    """Why the injective blocks of `func` should not all be inlined: a chain of squares doubles at every step."""
    sch = open_schedule(func)
    views = block_views(sch)
    loads: dict[str, int] = {}
    for view in views:
        makers = [next((p for p in views if p.writes_to(read.buffer)), None) for read in view.reads]
        total = sum(1 if maker is None or maker.reduction else loads[maker.name] for maker in makers)
        if total > MAX_LOADS:
            return Refused(f"block {view.name} would have more than {MAX_LOADS} loads with its producers inlined")
        loads[view.name] = total
    return None


def expression_cost(node: s_tir.SBlock) -> int:
    """A rough count of what one evaluation of the block costs in arithmetic: 1 per simple call, 8 per function."""
    names = [getattr(call.op, "name", "").rpartition(".")[2] for call in collect(node.body, ir.Call)]
    return sum(1 if name in _CHEAP_CALLS else 8 for name in names)


def index_step(access: BlockAccess, variable: tirx.Var, analyzer: Analyzer) -> int | None:
    """How far in memory, in elements, a step of `variable` moves an access; ``None`` if that is not constant."""
    flat = access.flat
    moved = structural_map(flat, (ir.Var, lambda var: variable + 1 if var.same_as(variable) else var))
    step = analyzer.simplify(moved - flat)
    return int(step.value) if isinstance(step, tirx.IntImm) else None
