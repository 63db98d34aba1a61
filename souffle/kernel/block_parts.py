"""Stages in parts of a block of different sizes: which divisions there are, and how a kernel's text has them.

::

    [.., A, S, B, ..]   →   [.., block barrier, A by threads 0 to 383, B by threads 384 to 511, block barrier, S, ..]

Two stages or three have a block's threads, in steps of 128 as in 001 (Figure 6), and in whole warps near what is best
of these.

Legal for what :mod:`souffle.kernel.side_by_side` puts side by side, for it needs nothing of the stages of its epoch: so
it may also stand earlier among them. No thread of the block is in a stage of all workers while a part is in its own.
Tensors and constants that stay in shared memory would be overwritten, so kernels with such are not divided so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from weakref import WeakKeyDictionary

from souffle.cost.device import device_of_arch
from souffle.cost.stage_price import price_on
from souffle.kernel.kernel_shape import KernelShape, LoopCall, StageCall
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.lower.device_function import DeviceFunction
from souffle.schedule.lower.parts import MOST_NUMBER, Part, part_function, part_number
from souffle.schedule.lower.shares import ALL_WORKERS, Share
from souffle.schedule.resources import aligned
from souffle.schedule.stage import Stage

__all__ = ["PART_STEP", "WARP", "Divisions", "parts_together", "scheduled_for"]

PART_STEP = 128
"""Threads in whose steps a block is divided (001, Figure 6, which says why: what is between breaks memory accesses of
kernels that were written for a power of two; a stage is scheduled for whatever number its part has)."""

WARP = 32
"""Threads of a warp: the least that a part can have, for its barriers count whole warps."""

_SIZES = (128, 256, 384, 512)
"""Threads of a part that are tried first. A block of more has not the registers that stages are scheduled with."""

_SHIFTED = (1, 2, 3)
"""Warps that one part gives to another, then."""

_MOST_PARTS = 3
"""Stages that divide a block."""


class Divisions:
    """Divisions of a kernel's blocks between stages.

    Parameters
    ----------
    shape : KernelShape
        Of teams that are blocks.
    teams : int
        Of each block.
    arch : str
        Such as ``"sm_90"``.
    """

    def __init__(self, shape: KernelShape, teams: int, arch: str) -> None:
        self.threads, self.shared_bytes = shape.threads * teams, aligned(shape.shared_bytes) * teams
        self.teams, self.team_threads, self.arch = teams, shape.threads, arch
        # What stays in shared memory lies where parts would have theirs.
        windows = any(place.window for call in shape.stage_calls for place in call.arguments)
        self.stays = windows or any(call.kept and call.kept.shared_bytes for call in shape.stage_calls)

    def of(self, stages: Sequence[Stage], longest: Sequence[int]) -> Iterator[tuple[Share, ...]]:
        """Of each two and each three of some stages in steps of 128 threads; all workers compute the others.

        Parameters
        ----------
        stages : sequence of Stage
        longest : sequence of int
            Those that may have a part, by number.
        """
        if self.threads % PART_STEP:
            return
        for count in range(2, min(_MOST_PARTS, len(longest)) + 1):
            for chosen in combinations(sorted(longest), count):
                for sizes in product(_SIZES, repeat=count):
                    yield from self.made(stages, chosen, sizes)

    def near(self, stages: Sequence[Stage], shares: Sequence[Share]) -> Iterator[tuple[Share, ...]]:
        """The divisions of the same stages in which one part has some warps of another, or some that nobody has."""
        chosen = [number for number, share in enumerate(shares) if share.part is not None]
        sizes = [shares[number].part.function.threads for number in chosen]
        for taker, giver in product(range(len(sizes)), range(len(sizes) + 1)):
            if taker == giver:
                continue
            for warps in _SHIFTED:
                moved = [*sizes, self.threads - sum(sizes)]
                moved[taker], moved[giver] = moved[taker] + warps * WARP, moved[giver] - warps * WARP
                yield from self.made(stages, chosen, moved[:-1])

    def made(
        self, stages: Sequence[Stage], chosen: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[Share, ...]]:
        """The division with parts of some sizes for chosen stages; nothing where blocks cannot be divided so.

        Parameters
        ----------
        stages : sequence of Stage
        chosen, sizes : sequence of int
            Which of them have parts, and of how many threads.
        """
        parts = self._parts([stages[number] for number in chosen], sizes)
        if parts:
            shares = [ALL_WORKERS] * len(stages)
            for number, part in zip(chosen, parts, strict=True):
                shares[number] = Share(part=part)
            yield tuple(shares)

    def _parts(self, stages: Sequence[Stage], sizes: Sequence[int]) -> list[Part]:
        """A part for each stage; none where the block has not the room, or a stage no such schedule."""
        first = start = 0
        parts: list[Part] = []
        if self.stays or sum(sizes) > self.threads or part_number(self.teams, len(sizes) - 1) > MOST_NUMBER:
            return []
        if any(threads % WARP or not WARP <= threads <= _SIZES[-1] for threads in sizes):
            return []
        for order, (stage, threads) in enumerate(zip(stages, sizes, strict=True)):
            function = scheduled_for(stage, threads, self.arch)
            if function is None:
                return []
            number = part_number(self.teams, order)
            own = part_function(stage.functions[0], function, number, start)
            parts.append(Part(own, self.team_threads, first, number, start, len(sizes)))
            first, start = first + threads, start + aligned(function.shared_bytes)
        return parts if start <= self.shared_bytes else []


_known: WeakKeyDictionary[DeviceFunction, dict[tuple[int, str], DeviceFunction | None]] = WeakKeyDictionary()


@cache
def _scheduler(arch: str, threads: int) -> GpuScheduler:
    return GpuScheduler(device_for(arch), price_on(device_of_arch(arch)), threads)


def scheduled_for(stage: Stage, threads: int, arch: str) -> DeviceFunction | None:
    """The function of a stage for blocks of so many threads, asked for once; none where the rules have no single one.

    Parameters
    ----------
    stage : Stage
        Of one function.
    threads : int
    arch : str
    """
    (own,) = stage.functions
    if own.threads == threads:
        return own
    known = _known.setdefault(own, {})
    if (threads, arch) not in known:
        answer = _scheduler(arch, threads)(stage.draft.func)
        single = answer.schedule is not None and len(answer.functions) == 1 and answer.functions[0].threads == threads
        known[threads, arch] = replace(answer.functions[0], name=f"{own.name}_of{threads}") if single else None
    return known[threads, arch]


def parts_together(calls: Sequence[StageCall | LoopCall]) -> tuple[StageCall | LoopCall, ...]:
    """The calls with the parts of each division together, where the first of them stands, and barriers around them.

    An epoch has one division at most, so that a part behind the last of a division is the first of the next.
    """
    found: list[StageCall | LoopCall] = []
    # Where the next part of a division that has begun will stand, and how many of it there are yet to come.
    place = left = 0
    for call in calls:
        part = call.share.part if isinstance(call, StageCall) else None
        if part is None:
            found.append(call)
            continue
        opens = not left
        place, left = (len(found), part.count - 1) if opens else (place, left - 1)
        made = replace(call, share=replace(call.share, part=replace(part, opens=opens, closes=not left)))
        found.insert(place, made)
        place += 1
    return tuple(found)
