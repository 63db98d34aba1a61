"""The graph that fusion planners plan on: one vertex for each TE, with what it moves and computes (003 §4.1, 000 §5.1).

It holds numbers and no expression, so that planners can be tried on any graph. Vertices are numbered in a topological
order: an edge leads from a smaller number to a larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from souffle.analysis import access_of, expression_of
from souffle.analysis.access import reads
from souffle.program import TE, Item, Tensor, TEProgram
from souffle.stitching.axes import Alignment, alignments
from souffle.stitching.kinds import Kind, kind_of
from souffle.stitching.work import OpWork, work_of

__all__ = ["Op", "OpGraph", "Read", "graph_of", "members_of", "pattern_graph"]


@dataclass(frozen=True)
class Read:
    """What a vertex reads of one tensor.

    Attributes
    ----------
    tensor : object
        Equal for reads of one tensor; a :class:`souffle.program.Tensor` in the graph of a program.
    producer : int or None
        The vertex that writes it; ``None`` for an input or a constant.
    bytes : int
        Distinct ones that are read.
    times : float
        How often each of these is read.
    constant : bool
        Whether it is a constant of the program.
    shape : tuple of int
        Of the tensor.
    alignments : tuple of Alignment
        Which axes of the tensor are axes of the reader.
    indices : int
        How many different ones its expression reads the tensor at.
    """

    tensor: object
    producer: int | None
    bytes: int
    times: float = 1.0
    constant: bool = False
    shape: tuple[int, ...] = ()
    alignments: tuple[Alignment, ...] = ()
    indices: int = 1


@dataclass(frozen=True)
class Op:
    """A vertex.

    Attributes
    ----------
    name : str
    kind : Kind
    shape, reduced : tuple of int
        Extents of its output's axes and of its reduction axes.
    written : int
        Bytes of its outputs.
    reads : tuple of Read
        One for each tensor.
    work : OpWork
        What it computes.
    item : Item or None
        The TE.
    needed : bool
        Whether an output of it is one of the program.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    written: int
    reads: tuple[Read, ...] = ()
    reduced: tuple[int, ...] = ()
    work: OpWork = field(default_factory=OpWork)
    item: Item | None = field(default=None, compare=False)
    needed: bool = False

    @property
    def size(self) -> int:
        """Elements of an output."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, eq=False)
class OpGraph:
    """Vertices, numbered by their place.

    Attributes
    ----------
    ops : tuple of Op
        Each reads from smaller numbers only.
    """

    ops: tuple[Op, ...]

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """The vertices that each reads from, in order."""
        return tuple(tuple(sorted({r.producer for r in op.reads if r.producer is not None})) for op in self.ops)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """The vertices that read from each, in order."""
        found: list[list[int]] = [[] for _ in self.ops]
        for number, producers in enumerate(self.producers):
            for producer in producers:
                found[producer].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def edges(self) -> tuple[tuple[int, int, int], ...]:
        """Producer, consumer and the bytes that the consumer reads of it, in the consumers' order."""
        found: dict[tuple[int, int], int] = {}
        for number, op in enumerate(self.ops):
            for read in op.reads:
                if read.producer is not None:
                    found[read.producer, number] = found.get((read.producer, number), 0) + read.bytes
        return tuple((producer, consumer, size) for (producer, consumer), size in found.items())

    @cached_property
    def above(self) -> tuple[int, ...]:
        """For each vertex the set of those that it needs, directly or not, as the bits of a number."""
        found: list[int] = []
        for producers in self.producers:
            mask = 0
            for producer in producers:
                mask |= found[producer] | 1 << producer
            found.append(mask)
        return tuple(found)

    @cached_property
    def below(self) -> tuple[int, ...]:
        """For each vertex the set of those that need it, directly or not, as the bits of a number."""
        found = [0] * len(self.ops)
        for number in reversed(range(len(self.ops))):
            for consumer in self.consumers[number]:
                found[number] |= found[consumer] | 1 << consumer
        return tuple(found)

    def is_convex(self, members: Iterable[int]) -> bool:
        """Whether no path between two of some vertices leads through another one: fused, they are in no cycle."""
        above = below = own = 0
        for number in members:
            above, below, own = above | self.above[number], below | self.below[number], own | 1 << number
        return not above & below & ~own

    def escapes(self, number: int, members: frozenset[int]) -> bool:
        """Whether something outside of `members` needs what a vertex writes."""
        return self.ops[number].needed or any(consumer not in members for consumer in self.consumers[number])


def graph_of(program: TEProgram) -> OpGraph:
    """The graph of a program's TEs, each part of a fused TE alone.

    Parameters
    ----------
    program : TEProgram
    """
    program = program.expanded()
    return pattern_graph(program.tes, program)


def pattern_graph(items: Sequence[Item], program: TEProgram) -> OpGraph:
    """The graph of some items of a program alone, in their order.

    Parameters
    ----------
    items : sequence of Item
        In topological order. What others of the program need is `needed`.
    program : TEProgram
        Which they are of.
    """
    producers: dict[Tensor, int] = {}
    inside = set(items)
    outputs = set(program.outputs)
    outputs |= {t for item in items for t in item.outputs if any(one not in inside for one in program.consumers[t])}
    ops = []
    for number, item in enumerate(items):
        plain = isinstance(item, TE)
        ops.append(
            Op(
                item.name,
                kind_of(item),
                item.outputs[0].shape,
                sum(tensor.nbytes for tensor in item.outputs),
                _reads(item, producers, program),
                item.reduction_shape if plain else (),
                work_of(item),
                item,
                any(tensor in outputs for tensor in item.outputs),
            )
        )
        producers.update(dict.fromkeys(item.outputs, number))
    return OpGraph(tuple(ops))


def _reads(item: Item, producers: dict[Tensor, int], program: TEProgram) -> tuple[Read, ...]:
    found = []
    for position, tensor in enumerate(item.inputs):
        producer = producers.get(tensor)
        plain = isinstance(item, TE)
        access = access_of(item, position) if plain else None
        elements = access.elements if access else tensor.size
        times = access.times / max(1, elements) if access else 1.0
        aligned = alignments(item, position) if plain else ()
        constant = tensor in program.constants
        places = len({load.indices for load in reads(expression_of(item), position)}) if plain else 1
        size = elements * tensor.itemsize
        found.append(Read(tensor, producer, size, times, constant, tensor.shape, aligned, places))
    return tuple(found)


def members_of(mask: int) -> Sequence[int]:
    """The numbers whose bits are set, rising."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
