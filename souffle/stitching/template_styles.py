"""Schedules of all operations of a pattern from a few choices: sub-roots, chunks and styles (2021 §4.2).

Sub-roots are what a block keeps, roots what the pattern gives; these have templates, and all else is written into its
readers, where its schedule follows from the indices by which it is read. Which dimensions blocks divide comes from the
pattern's layout the same way: along the sets of axes that are one. So a few choices say everything:

    which operations are kept               (:func:`sub_roots`)
    how many blocks there are               the chunk that each has of the sets that are cut
    how threads divide a block's part of a reduction along rows, of one along columns, of a product   (`STYLES`)
    whether a warp keeps in registers what it has one element of
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from souffle.program import TE
from souffle.stitching.graph import Op, OpGraph
from souffle.stitching.kinds import CONTRACTIONS, ELEMENTWISE, REDUCTIONS, Kind
from souffle.stitching.layout import Component, kept_of, layout_of
from souffle.stitching.template import Attribute, Dimension, OpSchedule, Part, Template
from souffle.stitching.template_launch import TemplateOp, chunk_of
from souffle.tvm_compat import load_tensor, loads

__all__ = ["STYLES", "Choices", "points_of", "sub_roots", "template_of"]

MOST_LOADS = 64
"""Of one element, beyond which what is read is kept, and not written into its reader: text would grow out of hand."""

STYLES: Mapping[str, tuple[str, ...]] = {
    "row": ("block", "warp", "mixed", "thread"),
    "column": ("column", "mixed", "thread", "block"),
    "product": ("thread", "mixed"),
}
"""How threads can divide a reduction along rows, along columns, and a product, each by its name:

- ``block``: all reduce one result after another
- ``warp``: each warp reduces results of its own
- ``mixed``: as many reduce a result as it has terms, others have others
- ``thread``: each reduces results of its own
- ``column``: lanes have neighbouring results, and warps reduce
"""

_ATTRIBUTES = {
    "block": (Attribute.THREAD, Attribute.CTA),
    "warp": (Attribute.WARP, Attribute.CTA),
    "mixed": (Attribute.CTA, Attribute.CTA),
    "thread": (Attribute.CTA, Attribute.THREAD),
    "column": (Attribute.CTA, Attribute.WARP),
}
"""Of a style: what results are given to, and what their terms are."""


@dataclass(frozen=True)
class Choices:
    """What there is to choose.

    Attributes
    ----------
    kept : frozenset of int
        Sub-roots.
    blocks : int
        In which the units of each component are divided, nearly.
    row, column, product : str
        One of :data:`STYLES`.
    registers : bool
        Whether a warp keeps in registers what it has one element of.
    threads : int
        Of a block.
    first : bool
        Whether a block has neighbours along the last axes of the first of the largest operations, and not of the last.
    """

    kept: frozenset[int]
    blocks: int
    row: str
    column: str
    product: str
    registers: bool
    threads: int
    first: bool


def sub_roots(graph: OpGraph) -> tuple[frozenset[int], ...]:
    """Which operations may be kept together; the first is the layout's own answer.

    Reductions and products that are read always are. Expensive element-wise operations, and what is computed with these
    alone, are or are not where they are read more than once (2021 §4.2); so are operands of products.
    """
    own = kept_of(graph, range(len(graph.ops)))
    must = frozenset(n for n in own if graph.ops[n].kind not in ELEMENTWISE)
    found = [own, _with_expensive(graph, own), must, _with_expensive(graph, must)]
    return tuple(dict.fromkeys(_readable(graph, kept) for kept in found))


def _with_expensive(graph: OpGraph, kept: Collection[int]) -> frozenset[int]:
    """With what would have an expensive operation computed more than once if it were written into its readers."""
    found = set(kept)
    costly: set[int] = set()
    for number, op in enumerate(graph.ops):
        if op.kind not in ELEMENTWISE or number in found:
            continue
        if op.kind is Kind.EXPENSIVE or not costly.isdisjoint(graph.producers[number]):
            reads = [
                r for consumer in graph.consumers[number] for r in graph.ops[consumer].reads if r.producer == number
            ]
            if len(reads) > 1 or any(read.times > 1 for read in reads):
                found.add(number)
            else:
                costly.add(number)
    return frozenset(found)


def _readable(graph: OpGraph, kept: Collection[int]) -> frozenset[int]:
    """With what would be too large an expression if it were written into its readers."""
    found = set(kept)
    total: list[int] = []
    for number, op in enumerate(graph.ops):
        total.append(
            sum(
                times * (1 if read.producer is None or read.producer in found else total[read.producer])
                for read, times in zip(op.reads, _stands(op), strict=True)
            )
        )
        if total[number] > MOST_LOADS and graph.consumers[number]:
            found.add(number)
    return frozenset(found)


def _stands(op: Op) -> list[int]:
    """How often each tensor stands in an expression."""
    if not isinstance(op.item, TE):
        return [1] * len(op.reads)
    bodies = list(op.item.op.body)
    read = [load_tensor(load) for body in bodies for load in loads(body)]
    return [sum(one.same_as(tensor) for one in read) for tensor in op.item.placeholders]


def template_of(graph: OpGraph, ops: Sequence[TemplateOp], choices: Choices) -> Template:
    """The template that some choices make for a pattern.

    Parameters
    ----------
    graph : OpGraph
        Of the pattern alone.
    ops : sequence of TemplateOp
    choices : Choices

    Raises
    ------
    TemplateError
        If an operation's style does not go with its extents.
    """
    members = range(len(graph.ops))
    layout = layout_of(graph, members, choices.kept)
    stored = {n for n in members if graph.ops[n].needed or not graph.consumers[n]}
    schedules = {}
    for component in layout.components:
        chunks = _chunks(graph, component, choices)
        in_warp = component.single - stored if choices.registers and choices.row == "warp" else frozenset()
        for number in component.members:
            if number in choices.kept or number in stored:
                single = number in in_warp and not graph.ops[number].reduced
                style = "single" if single else _style(graph, number, choices)
                made = _schedule(ops[number], style, choices, chunks.get(number, {}))
                shared = number in choices.kept and bool(graph.consumers[number]) and number not in in_warp
                schedules[number] = replace(made, shared=shared)
    return Template.of(schedules[number] for number in sorted(schedules))


def _chunks(graph: OpGraph, component: Component, choices: Choices) -> dict[int, dict[int, tuple[int, int]]]:
    """For each member the axes that blocks divide: how many there are, and how much of the axis each has."""
    way = component.members if choices.first else component.members[::-1]
    largest = max(way, key=lambda number: points_of(graph, number))
    wanted = -(-component.units // choices.blocks)
    # As many units as warps or threads come in.
    warps = choices.threads // 32
    grain = next((grain for most, grain in ((warps, 1), (32, warps), (256, 32)) if wanted <= most), choices.threads)
    wanted = -(-wanted // grain) * grain
    place = {axis: n for n, axis in enumerate(range(len(graph.ops[largest].shape)))}
    inner = sorted(component.cuts, key=lambda cut: place.get(cut.axis_of(largest), -1), reverse=True)
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for cut in inner:
        size = min(wanted, cut.parts)
        wanted = max(1, wanted // size)
        count = -(-cut.parts // size)
        for number, axis in cut.axes:
            op = graph.ops[number]
            extent = (*op.shape, *op.reduced)[axis]
            if count > 1:
                found.setdefault(number, {})[axis] = (count, size * (extent // cut.parts))
    return found


def points_of(graph: OpGraph, number: int) -> int:
    """What an operation computes: its elements, and terms of each."""
    op = graph.ops[number]
    return max(1, op.size) * prod(op.reduced)


def _schedule(op: TemplateOp, style: str, choices: Choices, chunks: Mapping[int, tuple[int, int]]) -> OpSchedule:
    attributes = list(_attributes(op, style))
    lanes = 32 if Attribute.WARP in attributes else choices.threads
    left = {Attribute.CTA: lanes, Attribute.WARP: choices.threads // 32}
    dimensions: list[Dimension] = []
    for d in reversed(range(len(op.extents))):
        attribute = attributes[d]
        if op.axes[d] not in chunks:
            dimensions.append((Part(attribute if op.extents[d] > 1 else Attribute.THREAD),))
            continue
        count, inner = chunks[op.axes[d]]
        if inner == 1:
            dimensions.append((Part(Attribute.GRID),))
            continue
        parts = chunk_of(attribute, inner, left.get(attribute, 1))
        for part in parts:
            if part.attribute in left:
                left[part.attribute] //= part.count or 1
        dimensions.append((Part(Attribute.GRID, count), *parts))
    return OpSchedule(op.name, tuple(reversed(dimensions)))


def _style(graph: OpGraph, number: int, choices: Choices) -> str:
    kind = graph.ops[number].kind
    if kind in CONTRACTIONS or kind is Kind.WINDOW:
        return choices.product
    if kind in REDUCTIONS:
        return choices.column if kind is Kind.COLUMN else choices.row
    return "rows" if choices.row == "warp" else "elements"


def _attributes(op: TemplateOp, style: str) -> Iterator[Attribute]:
    """What each dimension is given to, beside the blocks."""
    spatial, reduced = _ATTRIBUTES.get(style, (Attribute.CTA, Attribute.CTA))
    last = max((d for d, extent in enumerate(op.extents) if extent > 1), default=0)
    for d in range(len(op.extents)):
        if style == "single" or (style == "rows" and d != last):
            yield Attribute.WARP
        else:
            yield reduced if op.reduced[d] else spatial
