"""Numbers of named barriers: each is used by one set of threads until all threads of the block have waited."""

from __future__ import annotations

from collections.abc import Iterator

from souffle.certificate import Counterexample
from souffle.verify.accesses import BarrierWait, all_of
from souffle.verify.expressions import Undecided
from souffle.verify.kernel_reader import KernelText
from souffle.verify.stage_functions import Library, text_of
from souffle.verify.tiles_in_a_row import StageRun, Sync, unparted

__all__ = ["mixed_numbers"]


def mixed_numbers(kernel: str, text: KernelText, library: Library) -> Iterator[Counterexample]:
    """Stages of a kernel that may wait at one barrier with different counts at the same time.

    A barrier takes a new count once nobody waits there under the old one. Threads that have no part in a stage go on to
    the next while others still wait in it, so that between two counts all threads of the block must wait. Number 0 is
    that of the barrier of the whole block, which takes no other count.
    """
    told: set[tuple[str, str, int]] = set()

    def waits(run: StageRun) -> list[BarrierWait]:
        try:
            return [wait for wait in all_of(library.footprint(run).function.body, BarrierWait) if wait.scope == "part"]
        except Undecided:
            return []

    def mixed(one: StageRun, wait: BarrierWait, count: int, other: StageRun) -> Iterator[Counterexample]:
        key = (one.name, other.name, wait.number)
        if count != wait.count and key not in told:
            told.add(key)
            names = tuple(dict.fromkeys((one.name, other.name)))
            why = f"{count} threads may still wait at it when others come and wait for {wait.count}"
            yield Counterexample(
                "divergent barrier", kernel, names, (text_of(wait.statement),), (), f"barrier {wait.number}", why
            )

    events = [event for event in text.events if isinstance(event, (StageRun, Sync))]
    for run in dict.fromkeys(event for event in events if isinstance(event, StageRun)):
        for wait in waits(run):
            if wait.number == 0:
                yield from mixed(run, wait, text.threads, run)
    for follows in unparted(events, lambda run: bool(waits(run)), library.waits):
        for wait in waits(follows.later):
            for before in waits(follows.earlier):
                if before.number == wait.number:
                    yield from mixed(follows.earlier, wait, before.count, follows.later)
