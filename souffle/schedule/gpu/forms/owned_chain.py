"""Chains of blocks in which a tile owns some units of one axis, such as channels, from the first block to the last.

Theorem. Give each block of a stage an *owner* axis of extent ``units * grain``, or none. Let every read of an owned
block's element, by an owned block at its owner coordinate ``o``, be at the producer's owner coordinate ``o`` (equal
grains) or ``o * g + r`` with a reduced axis ``r`` over ``[0, g)`` (``g`` times the grain); let blocks without an owner
read only blocks without one. Then the elements of one unit depend on elements of that unit and on blocks without an
owner. So tiles of whole units need nothing of each other: each computes its units of the owned blocks one after
another, and all of the blocks without an owner for itself. A convolution within channels, a pooling of all their pixels
and products over groups of channels are such chains, whatever they read from outside; small products that all need are
blocks without an owner.

Blocks come in groups, each a loop over its elements between two barriers of the thread block: a reduction with what
follows it element by element, or a block that is none. What a later group reads stays in shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import DataType, tirx
from tvm.ir import Call

from souffle.decision import Refused
from souffle.schedule.gpu.forms.behind_contraction import Block
from souffle.schedule.gpu.forms.contraction_expressions import NotAContraction, depends
from souffle.schedule.gpu.forms.stage_blocks import OutputBlocks, demand_own_axes, stage_blocks
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import OWNS_TILES
from souffle.tvm_compat import collect, const_int, dtype_of

__all__ = ["OwnedChain", "Owner", "evaluations_of", "local_shape", "multiplies_halves", "read_owned_chain"]

_CHEAP_TO_REPEAT = 0
"""Calls of functions in a block that each of its readers computes again."""


@dataclass(frozen=True)
class Owner:
    """The owner axis of a block.

    Attributes
    ----------
    place : int
        Among its data-parallel axes, and so among the dimensions of its buffer.
    grain : int
        Elements of a unit along it.
    """

    place: int
    grain: int


@dataclass(frozen=True, eq=False)
class OwnedChain:
    """A stage whose tiles own units of an axis.

    Attributes
    ----------
    func : PrimFunc
        The stage.
    blocks : tuple of Block
        Producers before consumers.
    owners : mapping of Block to Owner
        Of the owned blocks.
    units : int
        Extent of the owner axes, in units.
    groups : tuple of tuple of Block
        In order; each ends in a reduction with what follows it, or is one block that reduces nothing. Blocks that are
        computed where they are read come first, in each group that reads them.
    kept : frozenset of Block
        Those that a later group reads.
    outputs : frozenset of Block
        Those whose buffer is the stage's to write.
    """

    func: tirx.PrimFunc
    blocks: tuple[Block, ...]
    owners: Mapping[Block, Owner]
    units: int
    groups: tuple[tuple[Block, ...], ...]
    kept: frozenset[Block]
    outputs: frozenset[Block]

    @property
    def repeated(self) -> int:
        """Evaluations of the reductions that every tile repeats."""
        return _repeated(self.blocks, self.owners)

    @property
    def spreads(self) -> bool:
        """Whether several blocks may share a tile: each computes all groups for itself, and a part of the last one.

        No other group writes to global memory, where two blocks would write the same.
        """
        return self.outputs <= {*self.groups[-1]}

    @property
    def common_bytes(self) -> int:
        """What every tile reads from global memory: of each tensor no more than its elements."""
        found: dict[Any, int] = {}
        inside = [block.buffer for block in self.blocks]
        shared = {*self.groups[-1]} if self.spreads else set()
        for block in self.blocks:
            if block in shared:
                continue
            owner = self.owners.get(block)
            for load in block.loads:
                own = owner is not None and any(depends(i, block.spatial[owner.place]) for i in load.indices)
                if own or any(load.source.same_as(buffer) for buffer in inside):
                    continue
                elements = min(prod(map(const_int, load.source.shape)), evaluations_of(block))
                found[load.source] = elements * -(-DataType(str(load.source.dtype)).bits // 8)
        return sum(found.values())

    def refused(self, reason: str) -> Refused:
        """A rule's refusal of it."""
        return Refused(f"the chain up to block {self.blocks[-1].name}: {reason}")


def read_owned_chain(stage: StageForms) -> OwnedChain | Refused:
    """The chain of a stage that asks for one (``OWNS_TILES``); or why its tiles cannot own anything."""
    func = stage.func
    if OWNS_TILES not in func.attrs:
        return Refused("its tiles are not asked to own what they compute")
    try:
        blocks = stage_blocks(func)
        for block in blocks:
            demand_own_axes(block)
    except NotAContraction as reason:
        return Refused(str(reason))
    around = OutputBlocks(func)
    outputs = frozenset(block for block in blocks if block in around)
    if sum(bool(block.reduction) for block in blocks) < 2:
        return Refused("it has no two reductions that a tile could chain")
    chosen: tuple[int, int, dict[Block, Owner], int] | None = None
    refusal = Refused(f"block {blocks[-1].name} has no axis of two elements or more")
    last = blocks[-1]
    for place, axis in enumerate(last.spatial):
        if axis.extent < 2:
            continue
        owners = _owners(blocks, place, outputs)
        if isinstance(owners, Refused):
            refusal = owners
            continue
        repeated = _repeated(blocks, owners)
        if chosen is None or (repeated, -axis.extent) < chosen[:2]:
            chosen = (repeated, -axis.extent, owners, axis.extent)
    if chosen is None:
        return refusal
    groups = _groups(blocks, outputs)
    kept = frozenset(
        block
        for number, group in enumerate(groups)
        for block in group
        if any(_reads_across(later, block, group) for later in groups[number + 1 :])
    )
    return OwnedChain(func, tuple(blocks), chosen[2], chosen[3], groups, kept, outputs)


def _repeated(blocks: Sequence[Block], owners: Mapping[Block, Owner]) -> int:
    """Evaluations of the reductions without an owner."""
    whole = (block for block in blocks if block.reduction and block not in owners)
    return sum(map(evaluations_of, whole))


def multiplies_halves(block: Block) -> bool:
    """Whether a block may be a sum of products in fp32 of what is in fp16."""
    return sum(str(dtype_of(one.value)) == "float16" for one in collect(block.value, tirx.Cast)) > 1


def evaluations_of(block: Block) -> int:
    """Elements of a block times those that each is reduced of."""
    return prod(axis.extent for axis in (*block.spatial, *block.reduction))


def _owners(blocks: Sequence[Block], place: int, outputs: frozenset[Block]) -> dict[Block, Owner] | Refused:
    """The owner axes if that of the last block is one of its axes, at `place`; or why that does not go."""
    last = blocks[-1]
    units = last.spatial[place].extent
    owners = {last: Owner(place, 1)}
    pending = [block for block in blocks if block is not last]
    # Backwards from readers to what they read; a block that nothing in the stage reads has an axis by what it reads.
    for block in reversed(pending):
        readers = [other for other in blocks if other is not block and other.reads(block)]
        if not readers:
            continue
        found = _read_by(block, readers, owners, units)
        if found is not None:
            owners[block] = found
    for block in pending:
        if block not in owners and not any(other.reads(block) for other in blocks if other is not block):
            found = _reading(block, [p for p in blocks if block.reads(p)], owners, units)
            if found is not None:
                owners[block] = found
    for block in blocks:
        if block not in owners and block in outputs:
            return Refused(f"block {block.name} is an output that is no part of the tiles along axis {place}")
        for producer in blocks:
            if producer is block or producer not in owners or not block.reads(producer):
                continue
            if block not in owners or _matching(block, owners[block], producer, owners[producer]) is None:
                axis = producer.spatial[owners[producer].place].var.name
                return Refused(f"block {block.name} reads {producer.name} across its axis {axis}")
    return owners


def _read_by(block: Block, readers: Sequence[Block], owners: Mapping[Block, Owner], units: int) -> Owner | None:
    """The axis of a block by which all its readers stay within their units."""
    for place, axis in enumerate(block.spatial):
        if axis.extent % units:
            continue
        owner = Owner(place, axis.extent // units)
        if all(reader in owners and _matching(reader, owners[reader], block, owner) is not None for reader in readers):
            return owner
    return None


def _reading(block: Block, producers: Sequence[Block], owners: Mapping[Block, Owner], units: int) -> Owner | None:
    """The axis of a block by which it stays within the units of the owned blocks that it reads, one at least."""
    owned = [producer for producer in producers if producer in owners]
    for place, axis in enumerate(block.spatial):
        if not owned or axis.extent % units:
            continue
        owner = Owner(place, axis.extent // units)
        if all(_matching(block, owner, producer, owners[producer]) is not None for producer in owned):
            return owner
    return None


def _matching(reader: Block, own: Owner, producer: Block, other: Owner) -> int | None:
    """How many of a producer's elements along its owner axis one of the reader's has; ``None`` if its reads stray."""
    axis = reader.spatial[own.place]
    factor, rest = divmod(other.grain, own.grain)
    if rest:
        return None
    for load in reader.loads:
        if not load.source.same_as(producer.buffer):
            continue
        index = load.indices[other.place]
        if any(depends(part, axis) for place, part in enumerate(load.indices) if place != other.place):
            return None
        if not _is_part(index, axis.var, factor, reader):
            return None
    return factor


def _is_part(index: Any, var: tirx.Var, factor: int, reader: Block) -> bool:
    """Whether an index is ``var * factor + r`` with a reduced axis ``r`` of that extent, or ``var`` for factor 1."""
    if factor == 1:
        return index.same_as(var)
    if not isinstance(index, tirx.Add):
        return False
    for scaled, part in ((index.a, index.b), (index.b, index.a)):
        if not isinstance(scaled, tirx.Mul) or not scaled.a.same_as(var) or not isinstance(scaled.b, tirx.IntImm):
            continue
        reduced = next((axis for axis in reader.reduction if axis.var.same_as(part)), None)
        if int(scaled.b.value) == factor and reduced is not None and reduced.extent == factor:
            return True
    return False


def _groups(blocks: Sequence[Block], outputs: frozenset[Block]) -> tuple[tuple[Block, ...], ...]:
    """The blocks in groups, each with the blocks that it computes where it reads them."""
    groups: list[list[Block]] = []
    # What is computed where it is read, and what such a block reads in its turn.
    inside: list[Block] = []
    group_of: dict[Block, int] = {}

    def sources(block: Block) -> list[Block]:
        """The grouped blocks that it reads, through those that are computed where they are read."""
        found = []
        for other in blocks:
            if other is not block and block.reads(other):
                found += sources(other) if other in inside else [other]
        return found

    def through(block: Block) -> list[Block]:
        found = []
        for other in inside:
            if block.reads(other):
                found += [one for one in (*through(other), other) if one not in found]
        return found

    for block in blocks:
        read = sources(block)
        numbers = [group_of[one] for one in read]
        if not block.reduction and numbers:
            number = max(numbers)
            main = next((one for one in groups[number] if one.reduction), None)
            if main is not None and _elementwise(block, main, read, groups[number]):
                groups[number] += [*(one for one in through(block) if one not in groups[number]), block]
                group_of[block] = number
                continue
        if not block.reduction and block not in outputs and _functions(block) <= _CHEAP_TO_REPEAT:
            inside.append(block)
            continue
        groups.append([*through(block), block])
        group_of[block] = len(groups) - 1
    return tuple(map(tuple, groups))


def _elementwise(block: Block, main: Block, read: Sequence[Block], group: Sequence[Block]) -> bool:
    """Whether a block has an element for each of a reduction, and reads those of its group at its own place."""
    if [axis.extent for axis in block.spatial] != [axis.extent for axis in main.spatial]:
        return False
    for load in block.loads:
        if any(load.source.same_as(one.buffer) for one in group if one in read or one is main):
            own = zip(load.indices, block.indices, block.spatial, strict=True)
            if not all(index.same_as(mine) or axis.extent == 1 for index, mine, axis in own):
                return False
    return True


def _functions(block: Block) -> int:
    """Calls of functions, beside choices."""
    names = [str(getattr(call.op, "name", "")).rpartition(".")[2] for call in collect(block.value, Call)]
    return sum(name not in ("if_then_else", "likely") for name in names)


def _reads_across(group: Sequence[Block], block: Block, own: Sequence[Block]) -> bool:
    """Whether a group reads a block that is no part of it."""
    return block not in group and any(reader.reads(block) for reader in group if reader not in own)


def local_shape(chain: OwnedChain, block: Block, width: int) -> tuple[int, ...]:
    """The shape of a block's elements in a tile of `width` units."""
    shape = [const_int(extent) for extent in block.buffer.shape]
    if block in chain.owners:
        owner = chain.owners[block]
        shape[owner.place] = width * owner.grain
    return tuple(shape)
