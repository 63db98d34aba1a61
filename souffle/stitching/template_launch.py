"""What a template means for an operation of given extents: its blocks, warps and threads (FusionStitching 2019, §5.2).

The paper says by examples what its attributes do and nothing of extents that do not divide. Here:

- A dimension without counts is given to its blocks, warps or threads as a whole. There may be fewer of them than
  iterations: then each takes several, in turns. ``GRID`` has a block for each iteration.
- Counts are those of a tiling, outermost level first, and cover the dimension as nearly as they can:
  ``GRID_4-WARP_2`` is for 7 or 8 iterations. Those beyond the last are left out. ``WARP`` and ``CTA`` with counts are
  that many warps and threads at once, so their product over the schedule is no more than the block has.
- ``WARP`` dimensions of one schedule are divided among the warps of a block together, and ``CTA`` dimensions among the
  32 lanes of each warp; in a schedule without ``WARP`` among all threads of the block. Where both reduced and other
  dimensions have one attribute, the kind that holds the innermost dimension gets as many threads as it has iterations,
  rounded up to a divisor, and the rest goes to the other.
- Reduced dimensions: of ``CTA`` are combined across lanes (shuffles) or the block, of ``WARP`` across warps through
  shared memory, of ``THREAD`` in sequence. Of ``GRID`` would need blocks to wait for each other, which is refused.

``cta_num`` and ``cta_size`` are the launch parameters of the paper's Figure 1 (c): blocks of the grid, threads of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from operator import mul

from souffle.stitching.kinds import CONTRACTIONS, Kind
from souffle.stitching.template import Attribute, Dimension, OpSchedule, Part, TemplateError

__all__ = [
    "MOST_THREADS",
    "WARP_SIZE",
    "ThreadGroup",
    "TemplateOp",
    "Tiling",
    "chunk_of",
    "enumerate_schedules",
    "stored_by",
    "tiling_of",
]

WARP_SIZE = 32
MOST_THREADS = 1024
"""Of a block, on every GPU. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""


@dataclass(frozen=True)
class TemplateOp:
    """What a schedule is for.

    Attributes
    ----------
    name : str
    extents : tuple of int
        Of its dimensions: a reduction's those of its input, in their order; a product's those of its output, then the
        summed one; else those of its output.
    reduced : tuple of bool
        Which of them it reduces.
    kind : Kind
    axes : tuple of int
        Which axis of the TE each is, of the data-parallel ones and then the reduced; as they stand, where not given.
    """

    name: str
    extents: tuple[int, ...]
    reduced: tuple[bool, ...]
    kind: Kind
    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.axes:
            object.__setattr__(self, "axes", tuple(range(len(self.extents))))


@dataclass(frozen=True)
class ThreadGroup:
    """Dimensions that some threads of a block share.

    Attributes
    ----------
    attribute : Attribute
        ``WARP`` or ``CTA``.
    reduced : bool
    levels : tuple of (int, int)
        Dimension and level of the tiling of each part, outermost first; none where threads are left without work.
    iterations : int
        Product of the parts' extents.
    threads : int
        How many share them; no more than `iterations` have work.
    """

    attribute: Attribute
    reduced: bool
    levels: tuple[tuple[int, int], ...]
    iterations: int
    threads: int


@dataclass(frozen=True)
class Tiling:
    """A schedule with the numbers of an operation.

    Attributes
    ----------
    schedule : OpSchedule
    op : TemplateOp
    extents : tuple of tuple of int
        Of each level of each dimension.
    grid : int
        Blocks that have work of their own: ``cta_num`` where no fewer are asked for.
    groups : tuple of ThreadGroup
        From those whose threads are next to each other to the outermost; their threads multiply to ``cta_size``.
    """

    schedule: OpSchedule
    op: TemplateOp
    extents: tuple[tuple[int, ...], ...]
    grid: int
    groups: tuple[ThreadGroup, ...]

    @property
    def borders(self) -> tuple[int, ...]:
        """How many threads a group and those before it are together, where that is neither one nor all."""
        before = list(accumulate((group.threads for group in self.groups), mul))
        return tuple(dict.fromkeys(border for border in before if 1 < border < before[-1]))

    @property
    def across(self) -> tuple[ThreadGroup, ...]:
        """The groups whose threads reduce together."""
        return tuple(group for group in self.groups if group.reduced and group.threads > 1)

    def without(self, attributes: Collection[Attribute], dimension: int) -> int:
        """How many iterations of a dimension are in one of those that these divide, at most."""
        parts = zip(self.schedule.dimensions[dimension], self.extents[dimension], strict=True)
        inside = prod(extent for part, extent in parts if part.attribute not in attributes)
        return min(inside, self.op.extents[dimension])


def tiling_of(schedule: OpSchedule, op: TemplateOp, cta_size: int) -> Tiling:
    """The numbers of a schedule for an operation.

    Raises
    ------
    TemplateError
        If they do not go together; the message names the dimension and what would.
    """
    if len(schedule.dimensions) != len(op.extents):
        raise TemplateError(f"{schedule} has {len(schedule.dimensions)} dimensions, {op.name} {len(op.extents)}")
    _check_block(schedule, cta_size)
    extents = tuple(_levels(op, number, parts) for number, parts in enumerate(schedule.dimensions))
    warps = schedule.has(Attribute.WARP)
    lanes = WARP_SIZE if warps else cta_size
    groups = [*_shared_out(schedule, op, extents, Attribute.CTA, lanes)]
    if warps:
        groups += _shared_out(schedule, op, extents, Attribute.WARP, cta_size // WARP_SIZE)
    grid = prod(extents[d][n] for d, n in _places(schedule, Attribute.GRID))
    return Tiling(schedule, op, extents, grid, tuple(groups))


def _check_block(schedule: OpSchedule, cta_size: int) -> None:
    if not 1 <= cta_size <= MOST_THREADS:
        raise TemplateError(f"cta_size={cta_size}: a block has 1 to {MOST_THREADS} threads")
    if schedule.has(Attribute.WARP) and cta_size % WARP_SIZE:
        raise TemplateError(f"{schedule} names warps, and cta_size={cta_size} is no multiple of {WARP_SIZE}")


def _levels(op: TemplateOp, number: int, parts: Dimension) -> tuple[int, ...]:
    """Extents of the levels of a dimension."""
    whole = op.extents[number]
    extents = tuple(whole if part.count is None else part.count for part in parts)
    inner = prod(extents[1:])
    if extents[0] != -(-whole // inner):
        text = "-".join(map(str, parts))
        best = Part(parts[0].attribute, -(-whole // inner))
        would = "-".join(map(str, (best, *parts[1:])))
        raise TemplateError(
            f"{text} is for {(extents[0] - 1) * inner + 1} to {extents[0] * inner} iterations; "
            f"dimension {number} of {op.name} has {whole}, for which {would} would do"
        )
    if op.reduced[number] and any(
        part.attribute is Attribute.GRID and extent > 1 for part, extent in zip(parts, extents, strict=True)
    ):
        raise TemplateError(
            f"dimension {number} of {op.name} is reduced, and GRID would divide that among blocks, which would have to "
            "wait for each other; WARP, CTA and THREAD do not"
        )
    return extents


def _places(
    schedule: OpSchedule, attribute: Attribute, op: TemplateOp | None = None, reduced: bool = False
) -> tuple[tuple[int, int], ...]:
    """Dimension and level of the parts that have an attribute; with `op`, of its dimensions that are reduced or not."""
    return tuple(
        (d, n)
        for d, parts in enumerate(schedule.dimensions)
        if op is None or op.reduced[d] == reduced
        for n, part in enumerate(parts)
        if part.attribute is attribute
    )


def _shared_out(
    schedule: OpSchedule, op: TemplateOp, extents: Sequence[Sequence[int]], attribute: Attribute, threads: int
) -> Iterator[ThreadGroup]:
    """The groups of an attribute among so many threads, the inner one first."""
    places = {reduced: _places(schedule, attribute, op, reduced) for reduced in (False, True)}
    counted = {
        reduced: prod(extents[d][n] for d, n in here if schedule.dimensions[d][n].count is not None)
        for reduced, here in places.items()
    }
    if prod(counted.values()) > threads:
        who = "threads" if attribute is Attribute.CTA else "warps"
        raise TemplateError(
            f"{schedule} asks for {prod(counted.values())} {who} by its counts of {attribute.value}, and has {threads}"
        )
    sizes = {reduced: prod(extents[d][n] for d, n in here) for reduced, here in places.items()}
    if sizes[False] == 1 or sizes[True] == 1:
        reduced = sizes[True] > 1
        own = places[reduced] if sizes[reduced] > 1 else ()
        yield ThreadGroup(attribute, reduced, own, sizes[reduced], threads)
        return
    inner = places[True][-1] > places[False][-1]
    fit = [d for d in range(1, threads + 1) if threads % d == 0 and threads // d >= counted[not inner]]
    count = next((d for d in fit if d >= sizes[inner]), fit[-1])
    if count < counted[inner]:
        raise TemplateError(
            f"{schedule}: of {threads} threads none divide into {counted[inner]} and {counted[not inner]} or more"
        )
    yield ThreadGroup(attribute, inner, places[inner], sizes[inner], count)
    yield ThreadGroup(attribute, not inner, places[not inner], sizes[not inner], threads // count)


def stored_by(schedule: OpSchedule, op: TemplateOp, cta_size: int) -> tuple[OpSchedule, TemplateOp]:
    """How the threads of a block store what it has of a result in shared memory.

    Parameters
    ----------
    schedule, op
        What computes the result.
    cta_size : int

    Returns
    -------
    OpSchedule
        The same ``GRID`` parts; all else of the result is the threads'.
    TemplateOp
        The result's dimensions, without those that are reduced.
    """
    dimensions, extents, left = [], [], cta_size
    own = sorted((axis, d) for d, axis in enumerate(op.axes) if not op.reduced[d])
    for _, d in reversed(own):
        parts = schedule.dimensions[d]
        if parts[0].attribute is Attribute.GRID and parts[0].count is not None:
            inner = chunk_of(Attribute.CTA, prod(part.count or 1 for part in parts[1:]), left)
            left //= prod(part.count or 1 for part in inner if part.attribute is Attribute.CTA)
            dimensions.append((parts[0], *inner))
        else:
            dimensions.append(parts if parts[0].attribute is Attribute.GRID else (Part(Attribute.CTA),))
        extents.append(op.extents[d])
    if not own:
        dimensions, extents = [(Part(Attribute.THREAD),)], [1]
    made = OpSchedule(schedule.name, tuple(reversed(dimensions)))
    return made, TemplateOp(op.name, tuple(reversed(extents)), (False,) * len(extents), Kind.LIGHT)


def chunk_of(attribute: Attribute, extent: int, threads: int) -> Dimension:
    """Parts that give an extent to so many threads or warps at most, each several in turn if need be.

    Their counts multiply to the extent, since what is within a ``GRID`` part says where each block begins.
    """
    count = max(divisor for divisor in range(1, max(1, min(threads, extent)) + 1) if extent % divisor == 0)
    if count == extent:
        return (Part(attribute, extent),)
    if count == 1:
        return (Part(Attribute.THREAD, extent),)
    turns = Part(Attribute.THREAD, extent // count)
    # Threads have neighbours, which are next to each other in memory; a warp has its own run.
    return (turns, Part(attribute, count)) if attribute is Attribute.CTA else (Part(attribute, count), turns)


def enumerate_schedules(
    op: TemplateOp, cta_size: int = 256, *, levels: int = 2, shared: bool | None = None
) -> Iterator[OpSchedule]:
    """All schedules of an operation for blocks of so many threads.

    Counts of inner levels are powers of two, and levels stand in the order of ``GRID``, ``WARP``, ``CTA``, ``THREAD``.
    A dimension of one iteration is ``THREAD``: its other forms would be the same code. Light element-wise operations
    are not kept in shared memory (2021 §4.2: their single schedule is thread composition), the others either way.
    Products have the attributes that the paper composes them by: ``GRID`` and ``CTA``, and along the sum ``CTA`` or
    ``THREAD``; they are not tiled.

    Parameters
    ----------
    op : TemplateOp
    cta_size : int
    levels : int
        Of the tiling of one dimension, at most.
    shared : bool, optional
        Only those that are, or are not, kept in shared memory.

    Yields
    ------
    OpSchedule
        Each once, each one valid for :func:`tiling_of`.
    """
    ways = (False,) if op.kind is Kind.LIGHT else (False, True)
    choices = [list(_dimensions(op, number, cta_size, levels)) for number in range(len(op.extents))]
    for dimensions in product(*choices):
        plain = OpSchedule(op.name, dimensions)
        try:
            tiling_of(plain, op, cta_size)
        except TemplateError:
            continue
        for way in ways:
            if shared is None or way == shared:
                yield OpSchedule(op.name, dimensions, way)


def _dimensions(op: TemplateOp, number: int, cta_size: int, levels: int) -> Iterator[Dimension]:
    """The ways to tile a dimension."""
    extent, reduced = op.extents[number], op.reduced[number]
    product_ = op.kind in CONTRACTIONS
    if extent == 1:
        yield (Part(Attribute.THREAD),)
        return
    allowed = [
        attribute
        for attribute in Attribute
        if not (reduced and attribute is Attribute.GRID)
        and not (attribute is Attribute.WARP and (product_ or cta_size % WARP_SIZE))
        and not (product_ and not reduced and attribute is Attribute.THREAD)
    ]
    yield from ((Part(attribute),) for attribute in allowed)
    if not product_:
        yield from _tiled(allowed, extent, levels)


def _tiled(allowed: Sequence[Attribute], extent: int, levels: int) -> Iterator[Dimension]:
    """Two levels and more, by choosing the innermost counts first."""
    waiting: list[tuple[int, tuple[Part, ...]]] = [(len(allowed), ())]
    for end, inner in waiting:
        covered = prod(part.count or 1 for part in inner)
        for at in range(end):
            if inner:
                yield (Part(allowed[at], -(-extent // covered)), *inner)
            if len(inner) + 1 < levels and at:
                count = 2
                while covered * count < extent:
                    waiting.append((at, (Part(allowed[at], count), *inner)))
                    count *= 2
