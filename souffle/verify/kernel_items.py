"""The statements of a kernel as they are read, the sequence that they unroll to, and errors in its arrivals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from souffle.verify.expressions import Axis, Expr, const
from souffle.verify.kernel_pointers import Choice, Pointer, number_at, resolved
from souffle.verify.tiles_in_a_row import Arrive, Prefetch, SlotWait, StageRun, Sync

__all__ = [
    "Ahead",
    "Arrival",
    "Await",
    "BarrierMark",
    "KernelIf",
    "KernelLoop",
    "Leave",
    "parted",
    "unrolled",
    "waits",
    "wrong_ticks",
]


@dataclass(frozen=True)
class BarrierMark:
    """All threads of a block wait, in the turns of slots below a bound, or in all."""

    slots: int | None


@dataclass(frozen=True, eq=False)
class Await:
    """The turn of a slot waits for an arrival."""

    tick: Expr
    slots: SlotWait


@dataclass(frozen=True, eq=False)
class Arrival:
    """Each block says that it is done with all before."""

    tick: Expr


@dataclass(frozen=True, eq=False)
class Leave:
    """No block waits any more in this launch."""

    tick: Expr


@dataclass(frozen=True, eq=False)
class Ahead:
    """Bytes that are asked into the cache."""

    pointer: Pointer | Choice
    nbytes: Expr


@dataclass(frozen=True, eq=False)
class KernelLoop:
    """A loop of the kernel of a constant number of turns."""

    axis: Axis
    low: Expr
    body: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class KernelIf:
    """A branch whose condition all threads of all blocks share."""

    condition: Expr
    then: tuple[Any, ...]
    otherwise: tuple[Any, ...]


def parted(marks: Sequence[StageRun | BarrierMark]) -> list[StageRun]:
    """The calls of one turn, with whether a barrier stands between each and its neighbours whenever it is made."""
    runs: list[StageRun] = []
    waits: list[BarrierMark] = []
    for mark in (*(mark for mark in marks if not isinstance(mark, Await)), None):
        if isinstance(mark, BarrierMark):
            waits.append(mark)
            continue
        for run in runs[-1:]:
            runs[-1] = replace(run, after=_reached(waits, run))
        if mark is not None:
            runs.append(replace(mark, before=_reached(waits, mark)))
        waits = []
    return runs


def _reached(waits: Sequence[BarrierMark], run: StageRun) -> bool:
    return any(wait.slots is None or wait.slots >= run.turns for wait in waits)


def waits(item: Any) -> bool:
    if isinstance(item, KernelLoop):
        return any(waits(i) for i in item.body)
    if isinstance(item, KernelIf):
        return any(waits(i) for i in (*item.then, *item.otherwise))
    return isinstance(item, Sync | Arrival | Leave) or (isinstance(item, StageRun) and (item.before or item.after))


def unrolled(
    items: tuple[Any, ...],
    given: Sequence[tuple[Pointer | Choice, ...]],
    awaits: Mapping[int, tuple[Await, ...]],
    values: dict[Axis, np.int64],
    step: tuple[int, ...] = (),
) -> Iterator[StageRun | Sync | Arrive | Prefetch | Leave]:
    for item in items:
        if isinstance(item, KernelLoop):
            for turn in range(item.axis.extent):
                yield from unrolled(item.body, given, awaits, {**values, item.axis: np.int64(turn)}, (*step, turn))
        elif isinstance(item, KernelIf):
            yield from unrolled(
                item.then if number_at(item.condition, values) else item.otherwise, given, awaits, values, step
            )
        elif isinstance(item, StageRun) and item.tiles:
            pointers = tuple(resolved(p, values) for p in given[item.call])
            ticks = tuple((int(number_at(w.tick, values)), w.slots) for w in awaits.get(item.call, ()))
            yield replace(item, pointers=pointers, step=step, awaits=ticks)
        elif isinstance(item, Arrival):
            yield Arrive(int(number_at(item.tick, values)))
        elif isinstance(item, Leave):
            yield Leave(const(int(number_at(item.tick, values))))
        elif isinstance(item, Ahead):
            yield Prefetch(resolved(item.pointer, values), number_at(item.nbytes, values))
        elif not isinstance(item, StageRun):
            yield item


def wrong_ticks(events: Sequence[Any]) -> Iterator[str]:
    """What is wrong with the numbers of arrivals: of each, of those that are waited for, and of all in a launch.

    A block comes to its waits in the order of the text, as all do: if each is for an arrival before it, those that are
    least far go on, so that all come to the end.
    """
    arrived, left = 0, False
    for event in events:
        if left and not isinstance(event, Sync | Prefetch):
            yield "flags are left before the end of the kernel"
            left = False
        if isinstance(event, Arrive):
            arrived += 1
            if event.tick != arrived:
                yield f"arrival {arrived} of a launch says that it is number {event.tick}"
        elif isinstance(event, StageRun):
            for tick, _ in event.awaits:
                if tick > arrived:
                    at = f" at step {'.'.join(map(str, event.step))}" if event.step else ""
                    yield f"{event.name}{at} waits for arrival {tick}, and {arrived} stand before it: a deadlock"
        elif isinstance(event, Leave):
            left = True
            if event.tick.value != arrived:
                yield f"a launch with {arrived} arrivals leaves flags for the next one as after {event.tick.value}"
    leaves = sum(isinstance(event, Leave) for event in events)
    if leaves != (arrived > 0):
        yield f"flags of {arrived} arrivals are left {leaves} times"
