"""The groups of a chain in one tile, each as a small stage of its own that other rules' forms can be read in.

A group's function has the chain's axes cut down to the tile: along an owner axis ``[0, width * grain)``, and in what is
in global memory ``tile * width * grain`` further. What groups pass on to each other is in buffers of the tile's own, in
shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from tvm import DataType, ir, s_tir, tirx
from tvm.ir import TensorLoad

from souffle.decision import Refused
from souffle.schedule.gpu.forms.behind_contraction import Block, Store
from souffle.schedule.gpu.forms.contraction_expressions import (
    Axis,
    NotAContraction,
    bounded,
    narrow_indices,
    substitute_axes,
)
from souffle.schedule.gpu.forms.matrix_product import Contraction, read_contraction
from souffle.schedule.gpu.forms.owned_chain import OwnedChain, local_shape
from souffle.schedule.gpu.forms.stage_blocks import Inliner
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import MULTIPLIES
from souffle.schedule.gpu.tiling.direct_tiling import SumPlan, read_tile_plan
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, buffer_loads, sequence, structural_digest

__all__ = ["Mapped", "OwnedStep", "OwnedTile", "StepGroup", "cut_tile", "kept_bytes"]

_ALIGNED = 16
"""Bytes to which each array begins at a multiple."""


@dataclass(frozen=True, eq=False)
class Mapped:
    """A block that reduces nothing: one store for each point of its axes, those longer than 1."""

    axes: tuple[Axis, ...]
    store: Store


class StepGroup:
    """Blocks around one reduction, as a stage whose forms are read when they are asked for.

    Groups are equal that take the same time with the same numbers.

    Parameters
    ----------
    func : PrimFunc
    placed : callable
        From stores in the tile to those in global memory, where that is where they go.
    where : hashable
        What `placed` goes by.
    """

    def __init__(
        self, func: tirx.PrimFunc, placed: Callable[[Sequence[Store]], tuple[Store, ...]], where: Hashable
    ) -> None:
        self._stage, self._placed = StageForms(func), placed
        self._key = (structural_digest(func), where)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepGroup) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def sum(self) -> SumPlan | None:
        """See :attr:`OwnedStep.sum`."""
        read = self._stage.read(read_tile_plan)
        if isinstance(read, Refused):
            return None
        return replace(read, problem=replace(read.problem, stores=self._placed(read.problem.stores)))

    @cached_property
    def product(self) -> Contraction | None:
        """See :attr:`OwnedStep.product`."""
        read = self._stage.read(read_contraction)
        return None if isinstance(read, Refused) else replace(read, stores=self._placed(read.stores))

    @cached_property
    def refusal(self) -> str | None:
        """Why it is neither."""
        if self.sum is not None or self.product is not None:
            return None
        return "; ".join(self._stage.read(read).reason for read in (read_tile_plan, read_contraction))


@dataclass(frozen=True, eq=False)
class OwnedStep:
    """What the threads of a block do between two barriers.

    Attributes
    ----------
    name : str
        The block's that it computes.
    group : StepGroup or None
        Where it reduces something.
    mapped : Mapped or None
        Where it reduces nothing.
    writes : bool
        Whether it writes to global memory.
    waits : bool
        Whether it reads what an earlier step has left in shared memory.
    """

    name: str
    group: StepGroup | None = None
    mapped: Mapped | None = None
    writes: bool = False
    waits: bool = False

    @property
    def sum(self) -> SumPlan | None:
        """The group as a sum, if it is one."""
        return None if self.group is None else self.group.sum

    @property
    def product(self) -> Contraction | None:
        """The same, where it is a sum of products."""
        return None if self.group is None else self.group.product


@dataclass(frozen=True, eq=False)
class OwnedTile:
    """A chain cut down to one tile.

    Attributes
    ----------
    chain : OwnedChain
    width : int
        Units of the tile.
    number : Var
        Of the tile.
    steps : tuple of OwnedStep
    buffers : tuple of buffer
        In shared memory, for what steps leave to each other.
    """

    chain: OwnedChain
    width: int
    number: tirx.Var
    steps: tuple[OwnedStep, ...]
    buffers: tuple[Any, ...]

    @property
    def tiles(self) -> int:
        """How many there are."""
        return self.chain.units // self.width


def kept_bytes(chain: OwnedChain, width: int) -> int:
    """Bytes of shared memory for what the steps of a tile of `width` units leave to each other."""
    total = 0
    for block in chain.kept:
        elements = prod(local_shape(chain, block, width))
        total += -(-elements * -(-DataType(str(block.buffer.dtype)).bits // 8) // _ALIGNED) * _ALIGNED
    return total


def cut_tile(chain: OwnedChain, width: int) -> OwnedTile | Refused:
    """A chain in tiles of `width` units, which divides all of them; or why a group has no form that can be emitted."""
    number = tirx.Var("tile", "int32")
    cutter = _Cutter(chain, width, number)
    steps = []
    for group in chain.groups:
        step = cutter.step(group)
        if isinstance(step, Refused):
            return step
        steps.append(step)
        # Outputs that later steps read are copied from shared memory: computed twice they would cost their functions.
        steps += [cutter.copy(block) for block in group if block in chain.kept and block in chain.outputs]
    buffers = tuple(cutter.local[block] for block in chain.blocks if block in chain.kept)
    return OwnedTile(chain, width, number, tuple(steps), buffers)


class _Cutter:
    def __init__(self, chain: OwnedChain, width: int, number: tirx.Var) -> None:
        self.chain, self.width, self.number = chain, width, number
        self.local: dict[Block, Any] = {}
        for block in chain.blocks:
            scope = "shared" if block in chain.kept else "global"
            shape = local_shape(chain, block, width)
            self.local[block] = tirx.decl_buffer(shape, str(block.buffer.dtype), f"own_{block.name}", scope=scope)

    def step(self, group: Sequence[Block]) -> OwnedStep | Refused:
        blocks = [self._cut(block) for block in group]
        writes = any(block in self.chain.outputs and block not in self.chain.kept for block in group)
        own = {id(block) for block in group}
        kept = [self.local[block] for block in self.chain.kept if id(block) not in own]
        waits = any(load.source.same_as(buffer) for b in blocks for load in buffer_loads(b.value) for buffer in kept)
        last = group[-1]
        if not any(block.reduction for block in group):
            mapped = self._mapped(blocks)
            return (
                mapped
                if isinstance(mapped, Refused)
                else OwnedStep(last.name, mapped=mapped, writes=writes, waits=waits)
            )
        outputs = [block for block in group if block in self.chain.outputs - self.chain.kept]
        where = tuple((local_shape(self.chain, block, self.chain.units), self._place_of(block)) for block in outputs)
        return OwnedStep(last.name, StepGroup(self._func(group, blocks), self._placed, where), None, writes, waits)

    def _place_of(self, block: Block) -> tuple[int, int] | None:
        """Which axis of an output a tile owns, and how much of it."""
        owner = self.chain.owners.get(block)
        return None if owner is None or self.width == self.chain.units else (owner.place, self.width * owner.grain)

    def copy(self, block: Block) -> OwnedStep:
        """The step that writes an output from where it is kept."""
        axes = [Axis(tirx.Var(str(axis.var.name), "int32"), self._extent(block, axis)) for axis in block.spatial]
        held = self.local[block][tuple(axis.var for axis in axes)]
        indices = tuple(self._beyond(block, place, axis.var) for place, axis in enumerate(axes))
        mapped = _without_units(axes, Store(block.buffer, indices, held, None))
        return OwnedStep(block.name, None, mapped, True, True)

    def _extent(self, block: Block, axis: Axis) -> int:
        owner = self.chain.owners.get(block)
        owned = owner is not None and block.spatial[owner.place] is axis
        return self.width * owner.grain if owned else axis.extent

    def _beyond(self, block: Block, place: int, position: PrimExpr) -> PrimExpr:
        """The place in all of a block's elements of one in the tile."""
        owner = self.chain.owners.get(block)
        if owner is None or owner.place != place or self.width == self.chain.units:
            return position
        return self.number * (self.width * owner.grain) + position

    def _cut(self, block: Block) -> Block:
        """A block over the axes of the tile."""
        fresh = {a: Axis(tirx.Var(str(a.var.name), "int32"), self._extent(block, a)) for a in block.spatial}
        inner = {a: Axis(tirx.Var(str(a.var.name), "int32"), a.extent) for a in block.reduction}
        places = {a.var: self._beyond(block, place, fresh[a].var) for place, a in enumerate(block.spatial)}
        places |= {a.var: axis.var for a, axis in inner.items()}
        here = {a.var: axis.var for a, axis in {**fresh, **inner}.items()}
        value = substitute_axes(self._local_reads(block, here), places)
        indices = tuple(substitute_axes(index, here) for index in block.indices)
        spatial, reduction = tuple(fresh.values()), tuple(inner.values())
        return Block(block.name, spatial, reduction, self.local[block], indices, value, block.initial)

    def _placed(self, stores: Sequence[Store]) -> tuple[Store, ...]:
        """Stores with those of outputs in global memory: forms are read of the tile alone."""
        return tuple(map(self._in_global, stores))

    def _in_global(self, store: Store) -> Store:
        for block in self.chain.outputs - self.chain.kept:
            if store.buffer.same_as(self.local[block]):
                indices = (self._beyond(block, place, index) for place, index in enumerate(store.indices))
                return replace(store, buffer=block.buffer, indices=tuple(indices))
        return store

    def _local_reads(self, block: Block, here: Mapping[tirx.Var, PrimExpr]) -> PrimExpr:
        """A block's value with its reads of the chain in the tile's own buffers, the owner's index in the tile.

        That index is over the new axes already, while all others are still over the old ones.
        """

        def local(load: TensorLoad) -> PrimExpr:
            for producer, buffer in self.local.items():
                if load.source.same_as(producer.buffer):
                    owner = self.chain.owners.get(producer)
                    indices = list(load.indices)
                    if owner is not None:
                        indices[owner.place] = substitute_axes(indices[owner.place], here)
                    return buffer[tuple(indices)]
            return load

        return structural_map(block.value, (TensorLoad, local))

    def _mapped(self, blocks: Sequence[Block]) -> Mapped | Refused:
        """A block without reduction, with those before it that it computes where it reads them."""
        inliner = _inlined(blocks[:-1])
        last = blocks[-1]
        try:
            value = inliner.expand(last.value)
        except NotAContraction as reason:
            return self.chain.refused(str(reason))
        known = bounded(last.spatial)
        value = narrow_indices(value, known)
        return _without_units(list(last.spatial), self._in_global(Store(last.buffer, last.indices, value, None)))

    def _func(self, group: Sequence[Block], blocks: Sequence[Block]) -> tirx.PrimFunc:
        """The group as a stage."""
        inside = [
            cut.buffer
            for block, cut in zip(group, blocks, strict=True)
            if block not in self.chain.kept and block not in self.chain.outputs
        ]
        touched = [load.source for cut in blocks for load in buffer_loads(cut.value)] + [b.buffer for b in blocks]
        params: list[Any] = []
        for buffer in touched:
            if not any(buffer.same_as(one) for one in (*inside, *params)):
                params.append(buffer)
        body = sequence(*map(_nest, blocks))
        root = s_tir.SBlock([], [], [], "root", body, None, inside)
        func = tirx.PrimFunc([*params, self.number], s_tir.SBlockRealize([], True, root))
        attributes = self.chain.func.attrs
        return func.with_attr(MULTIPLIES, attributes[MULTIPLIES]) if MULTIPLIES in attributes else func


def _inlined(blocks: Sequence[Block]) -> Inliner:
    inliner = Inliner()
    for block in blocks:
        inliner.define(block, inliner.expand(block.value))
    return inliner


def _without_units(axes: Sequence[Axis], store: Store) -> Mapped:
    """A store over its axes longer than 1."""
    single = {axis.var: tirx.IntImm("int32", 0) for axis in axes if axis.extent == 1}
    indices = tuple(substitute_axes(index, single) for index in store.indices)
    value = substitute_axes(store.value, single)
    return Mapped(tuple(axis for axis in axes if axis.extent > 1), Store(store.buffer, indices, value, None))


def _nest(block: Block) -> tirx.Stmt:
    """A block in loops over its axes, as TVM makes it of a tensor expression."""

    def region(buffer: Any, indices: Sequence[PrimExpr]) -> tirx.BufferRegion:
        return tirx.BufferRegion(buffer, [ir.Range.from_min_extent(index, 1) for index in indices])

    axes = [*((axis, tirx.IterVar.DataPar) for axis in block.spatial)]
    axes += [(axis, tirx.IterVar.CommReduce) for axis in block.reduction]
    loops = [tirx.Var(f"i{number}", "int32") for number in range(len(axes))]
    reads = [
        region(load.source, load.indices) for load in buffer_loads(block.value) if not load.source.same_as(block.buffer)
    ]
    init = None if block.initial is None else tirx.BufferStore(block.buffer, block.initial, block.indices)
    body = s_tir.SBlock(
        [tirx.IterVar(ir.Range(0, axis.extent), axis.var, kind) for axis, kind in axes],
        reads,
        [region(block.buffer, block.indices)],
        block.name,
        tirx.BufferStore(block.buffer, block.value, block.indices),
        init,
    )
    nest: tirx.Stmt = s_tir.SBlockRealize(loops, True, body)
    for var, (axis, _) in reversed(list(zip(loops, axes, strict=True))):
        zero, extent = tirx.IntImm("int32", 0), tirx.IntImm("int32", axis.extent)
        nest = tirx.For(var, zero, extent, tirx.ForKind.SERIAL, nest)
    return nest
