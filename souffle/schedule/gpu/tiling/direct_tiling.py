"""How one reduction is shared among threads that hold a few outputs each, and read what these need once.

A thread's outputs are neighbours along some axes, so one value of a leaf (see ``forms/one_reduction.py``) serves
several of them. The axes of the reduction along which they meet are unrolled; the others are one long axis that threads
may share, each taking every so many of its terms, their totals joined by shuffles inside a warp and through shared
memory beyond it. Reads and stores take up to 16 bytes along the axis that is contiguous in memory.
``emit/direct_emission.py`` writes it out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from souffle.decision import Refused
from souffle.schedule.gpu.forms.contraction_expressions import Axis, depends
from souffle.schedule.gpu.forms.memory_access import bits_of, lanes_along, memory_step
from souffle.schedule.gpu.forms.one_reduction import Meeting, Sum, find_meeting, read_sum
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.forms.two_operands import Operand
from souffle.schedule.gpu.rule import GpuRequest
from souffle.tvm_compat import PrimExpr, buffer_loads, const_int

__all__ = [
    "WARP",
    "DirectTiling",
    "Held",
    "SumPlan",
    "halves_totals",
    "held_of",
    "parts_of",
    "plan_sum",
    "read_plan",
    "read_tile_plan",
    "shared_bytes",
    "split_refusal",
    "totals_exchanged",
]

WARP = 32

_MOST_WINDOW = 64
"""Places of a window that are unrolled: 7 x 7 and a little."""

_MOST_MANY = 3
"""Axes along which a thread may hold several outputs."""


@dataclass(frozen=True, eq=False)
class SumPlan:
    """What is settled of a sum before its numbers are chosen.

    Attributes
    ----------
    problem : Sum
    main : Operand
        The leaf whose order in memory decides.
    order : tuple of Axis
        The outputs' axes as threads count them, the last one fastest.
    window : tuple of Axis
        Reduced axes that are unrolled.
    long : tuple of Axis
        The other ones; the last is contiguous in memory if `vector` is it.
    meetings : tuple of tuple
        For each leaf, of which output axis and window axis it meets itself, and how.
    vector : Axis or None
        Along which reads take several elements: an output axis, or the last of `long`; where it is a slot, all of it.
    sum_fast : bool
        Whether neighbouring threads share a sum, instead of having neighbouring outputs.
    many : tuple of Axis
        Output axes along which a thread may hold several; of slots, which come first, it holds all.
    """

    problem: Sum
    main: Operand
    order: tuple[Axis, ...]
    window: tuple[Axis, ...]
    long: tuple[Axis, ...]
    meetings: tuple[tuple[tuple[Axis, Axis, Meeting], ...], ...]
    vector: Axis | None
    sum_fast: bool
    many: tuple[Axis, ...]

    @cached_property
    def vector_is_output(self) -> bool:
        """Whether the lanes of a read belong to different outputs."""
        return any(axis is self.vector for axis in self.order)

    @cached_property
    def terms(self) -> int:
        """Extent of the long axis."""
        return prod(axis.extent for axis in self.long)

    @cached_property
    def together(self) -> int:
        """Outputs that what follows the sum needs for one element."""
        return prod(axis.extent for axis in self.problem.slots)

    def is_slot(self, axis: Axis) -> bool:
        """Whether what follows the sum needs all outputs along an axis."""
        return any(axis is slot for slot in self.problem.slots)


def read_plan(stage: StageForms) -> SumPlan | Refused:
    """What is settled of a stage's sum before its numbers are chosen; or why it cannot be scheduled so."""
    problem = stage.read(read_sum)
    if isinstance(problem, Refused):
        return problem
    return plan_sum(problem, lambda leaf: _largest(leaf.value))


def read_tile_plan(stage: StageForms) -> SumPlan | Refused:
    """As :func:`read_plan`, for a sum of one tile: what it reads most of decides, however large the tensors are."""
    problem = stage.read(read_sum)
    if isinstance(problem, Refused):
        return problem
    axes = (*problem.axes, *problem.inner)
    return plan_sum(problem, lambda leaf: prod(axis.extent for axis in axes if depends(leaf.value, axis)))


def plan_sum(problem: Sum, weight: Callable[[Operand], int]) -> SumPlan | Refused:
    """What is settled of a sum; the order in memory of the leaf of most `weight` decides."""
    if not problem.leaves:
        return Refused(f"block {problem.name} reads nothing")
    main = max(problem.leaves, key=weight)
    meetings: list[tuple] = []
    window: list[Axis] = []
    for leaf in problem.leaves:
        found = []
        for axis, place in itertools.product(problem.axes, problem.inner):
            how = find_meeting(leaf.value, axis, place)
            if how is not None and how.across < place.extent:
                found.append((axis, place, how))
        meetings.append(tuple(found))
    met = [place for place in problem.inner if any(place is m[1] for found in meetings for m in found)]
    for place in sorted(met, key=lambda axis: axis.extent):
        if prod(axis.extent for axis in window) * place.extent <= _MOST_WINDOW:
            window.append(place)
    window = [place for place in problem.inner if any(place is w for w in window)]
    kept = tuple(tuple(m for m in found if any(m[1] is w for w in window)) for found in meetings)

    def far(axis: Axis) -> int:
        step = memory_step(main.value, axis)
        if not step and problem.stores:
            store = problem.stores[0]
            step = memory_step(store.buffer[store.indices], axis)
        return abs(step) if step else 0

    long = sorted((axis for axis in problem.inner if not any(axis is w for w in window)), key=far, reverse=True)
    reused = [axis for axis in problem.axes if any(not depends(leaf.value, axis) for leaf in problem.leaves)]
    slots = problem.slots
    # What the main leaf does not depend on goes first, so that neighbouring threads read neighbours; before it slots,
    # which no two threads share.
    across = [axis for axis in problem.axes if not any(axis is slot for slot in slots)]
    across.sort(key=lambda axis: (depends(main.value, axis), -far(axis)))
    order = [*slots, *across]
    vector = None
    fixed = [*slots, *(m[0] for m in kept[_index(problem, main)])]
    beside = next((axis for axis in slots if _is_one_read(main, axis)), None)
    if beside is not None:
        vector = beside
    elif order and memory_step(main.value, order[-1]) == 1 and not any(axis is order[-1] for axis in fixed):
        vector = order[-1]
    elif long and memory_step(main.value, long[-1]) == 1:
        vector = long[-1]
    sum_fast = beside is None and bool(long) and (memory_step(main.value, long[-1]) == 1 or not order)
    if vector is not None and lanes_along(main.value, vector, main.dtype) == 1:
        vector = None
    overlap = [m[0] for found in kept for m in found]
    rest = [axis for axis in across if axis is not vector]
    many = [axis for axis in rest if any(axis is one for one in overlap)]
    many += [a for a in reversed(rest) if any(a is one for one in reused) and not any(a is one for one in many)]
    several = [axis for axis in slots if axis is not vector]
    many = [*several, *many[: max(0, _MOST_MANY - len(several))]]
    return SumPlan(problem, main, tuple(order), tuple(window), tuple(long), kept, vector, sum_fast, tuple(many))


def _is_one_read(main: Operand, axis: Axis) -> bool:
    """Whether all of a leaf along an axis is one read."""
    return memory_step(main.value, axis) == 1 and lanes_along(main.value, axis, main.dtype) == axis.extent


def _index(problem: Sum, leaf: object) -> int:
    return next(number for number, one in enumerate(problem.leaves) if one is leaf)


def _largest(value: PrimExpr) -> int:
    return max(prod(const_int(e) for e in load.source.shape) for load in buffer_loads(value))


@dataclass(frozen=True)
class DirectTiling:
    """The numbers.

    Attributes
    ----------
    each : tuple of int
        Outputs of a thread along each of ``SumPlan.many``.
    lanes : int
        Elements of a read along ``SumPlan.vector``.
    split : int
        Threads that share a sum.
    turns : int
        Steps along the long axis whose reads are issued together.
    gathered : bool
        Whether what follows the sums is computed by neighbouring threads, the first of the block, and not by one of
        those that share a sum each: fewer warps have something to do then. Only where these are in one warp.
    ahead : bool
        Whether they ask for what they read beside the sums before these are joined, which takes registers.
    """

    each: tuple[int, ...]
    lanes: int
    split: int
    turns: int
    gathered: bool = False
    ahead: bool = False

    def width(self, plan: SumPlan, axis: Axis) -> int:
        """Outputs of a thread along an axis."""
        return next(width for one, width in zip(plan.order, self.widths(plan), strict=True) if one is axis)

    def widths(self, plan: SumPlan) -> tuple[int, ...]:
        """Outputs of a thread along each of ``SumPlan.order``."""
        return _widths(plan, self.each, self.lanes)

    def outputs(self, plan: SumPlan) -> int:
        """Outputs of a thread."""
        return prod(self.widths(plan))

    def groups(self, plan: SumPlan) -> int:
        """Threads that the outputs take, each once."""
        return prod(-(-axis.extent // width) for axis, width in zip(plan.order, self.widths(plan), strict=True))

    def tiles(self, plan: SumPlan, threads: int) -> int:
        """Blocks of the grid."""
        return -(-self.groups(plan) // (threads // self.split))


@lru_cache(maxsize=1024)
def _widths(plan: SumPlan, each: tuple[int, ...], lanes: int) -> tuple[int, ...]:
    found = []
    for axis in plan.order:
        own = lanes if plan.vector_is_output and axis is plan.vector else 1
        found.append(next((n for a, n in zip(plan.many, each, strict=True) if a is axis), own))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Held:
    """What a thread holds of one leaf.

    Attributes
    ----------
    leaf : Operand
    kinds : tuple
        Of each dimension: ``("turn",)``, ``("met", axis, window, meeting)``, ``("own", axis)``, ``("window", axis)``
        or ``("lane",)``, the last one fastest.
    extents : tuple of int
    long : bool
        Whether it is read anew in every turn.
    vector : bool
        Whether its lanes are neighbours in memory.
    """

    leaf: Operand
    kinds: tuple[tuple, ...]
    extents: tuple[int, ...]
    long: bool
    vector: bool

    @cached_property
    def size(self) -> int:
        """Elements."""
        return prod(self.extents)

    @cached_property
    def registers(self) -> int:
        """Of a thread."""
        return -(-self.size * bits_of(self.leaf.dtype) // 32)


@lru_cache(maxsize=4096)
def _reads(leaf: Operand, axis: Axis) -> bool:
    return depends(leaf.value, axis)


@lru_cache(maxsize=4096)
def _widest(leaf: Operand, axis: Axis) -> int:
    """Neighbours along an axis that one read of a leaf takes; 1 if they are not neighbours in memory."""
    return lanes_along(leaf.value, axis, leaf.dtype) if memory_step(leaf.value, axis) == 1 else 1


def held_of(plan: SumPlan, tiling: DirectTiling) -> tuple[Held, ...]:
    """What a thread holds of each leaf."""
    return _held(plan, replace(tiling, split=1))


@lru_cache(maxsize=1024)
def _held(plan: SumPlan, tiling: DirectTiling) -> tuple[Held, ...]:
    """The same however many threads share a sum."""
    found = []
    for leaf, meetings in zip(plan.problem.leaves, plan.meetings, strict=True):
        long = any(_reads(leaf, axis) for axis in plan.long)
        kinds: list[tuple] = []
        extents: list[int] = []
        met: list[Axis] = []
        if long and tiling.turns > 1:
            kinds.append(("turn",))
            extents.append(tiling.turns)
        for axis, width in zip(plan.order, tiling.widths(plan), strict=True):
            if width == 1 or axis is plan.vector or not _reads(leaf, axis):
                continue
            meeting = next((m for m in meetings if m[0] is axis and not any(m[1] is w for w in met)), None)
            if meeting is None:
                kinds.append(("own", axis))
                extents.append(width)
                continue
            _, window, how = meeting
            met.append(window)
            kinds.append(("met", axis, window, how))
            extents.append((width - 1) * how.across + (window.extent - 1) * how.along + 1)
        for axis in plan.window:
            if _reads(leaf, axis) and not any(axis is w for w in met):
                kinds.append(("window", axis))
                extents.append(axis.extent)
        lanes = tiling.lanes > 1 and plan.vector is not None and _reads(leaf, plan.vector)
        if lanes:
            kinds.append(("lane",))
            extents.append(tiling.lanes)
        contiguous = lanes and _widest(leaf, plan.vector) >= tiling.lanes
        found.append(Held(leaf, tuple(kinds), tuple(extents), long, contiguous))
    return tuple(found)


def split_refusal(plan: SumPlan, split: int, request: GpuRequest) -> Refused | None:
    """Why a sum cannot be shared by so many threads, or ``None``."""
    threads = request.threads
    if split == 1:
        return None
    if threads % split or threads % WARP:
        return Refused(f"{split} threads do not share {threads} evenly")
    fast = split if plan.sum_fast else threads // split
    if (fast < WARP and fast & (fast - 1)) or (fast > WARP and fast % WARP):
        return Refused(f"{fast} neighbouring threads are no part of a warp and no whole warps")
    if plan.terms < split:
        return Refused(f"a sum of {plan.terms} steps has not one for each of {split} threads")
    return None


def parts_of(plan: SumPlan, split: int, threads: int) -> tuple[list[int], int]:
    """Distances between the lanes of a warp that share a sum, and how many warps do."""
    fast = split if plan.sum_fast else threads // split
    if plan.sum_fast:
        distances = [1 << bit for bit in range(min(fast, WARP).bit_length() - 1)]
        return distances, max(1, split // WARP)
    if fast >= WARP:
        return [], split
    distances = [fast << bit for bit in range((WARP // fast).bit_length() - 1)]
    return distances, threads // WARP


def totals_exchanged(outputs: int, levels: int) -> tuple[int, ...]:
    """Totals that a lane goes on with behind each exchange: half of them where they are even in number."""
    found = []
    for _ in range(levels):
        outputs = outputs if outputs % 2 else outputs // 2
        found.append(outputs)
    return tuple(found)


def halves_totals(plan: SumPlan, tiling: DirectTiling, threads: int) -> bool:
    """Whether lanes that join totals exchange halves of them, instead of joining each total on all lanes.

    Only where the totals of an element that is computed of several come to one lane behind it, and for fewer
    instructions: beside a shuffle and an addition an exchanged pair takes two choices, and each exchange a comparison
    and where what is left begins.
    """
    if tiling.split == 1:
        return False
    distances, parts = parts_of(plan, tiling.split, threads)
    if tiling.gathered:
        return bool(distances)
    if parts == 1 and plan.together > 1:
        return False
    outputs = tiling.outputs(plan)
    before, instructions = outputs, 1
    for after in totals_exchanged(outputs, len(distances)):
        instructions += 2 * after + (2 * after + 2 if after < before else 0)
        before = after
    return instructions + before < 2 * outputs * len(distances) + outputs


def shared_bytes(plan: SumPlan, tiling: DirectTiling, threads: int) -> int:
    """Bytes of shared memory of a block."""
    if tiling.split == 1:
        return 0
    _, parts = parts_of(plan, tiling.split, threads)
    total = tiling.outputs(plan) * (threads // tiling.split)
    return 0 if parts == 1 and not tiling.gathered else parts * total * -(-bits_of(plan.problem.dtype) // 8)
