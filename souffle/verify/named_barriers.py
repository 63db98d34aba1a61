"""Numbers of named barriers: each is used by one set of threads until all threads of the block have waited."""

from __future__ import annotations

from collections.abc import Iterator

from souffle.certificate import Counterexample
from souffle.verify.accesses import Wait, all_of
from souffle.verify.expressions import Undecided
from souffle.verify.kernel import KernelText, StageRun, Sync
from souffle.verify.library import Library, text_of

__all__ = ["mixed_numbers"]


def mixed_numbers(kernel: str, text: KernelText, library: Library) -> Iterator[Counterexample]:
    """Stages of a kernel that may wait at one barrier with different counts at the same time.

    A barrier takes a new count once nobody waits there under the old one. Threads that have no part in a stage go on to
    the next while others still wait in it, so that between two counts all threads of the block must wait. Number 0 is
    that of the barrier of the whole block, which takes no other count.
    """
    last: dict[int, tuple[StageRun, int]] = {}
    told: set[tuple[str, str, int]] = set()
    for event in text.events:
        if isinstance(event, Sync):
            last.clear()
        if not isinstance(event, StageRun):
            continue
        if event.before:
            last.clear()
        try:
            body = library.footprint(event).function.body
        except Undecided:
            continue
        for wait in all_of(body, Wait):
            if wait.scope != "part":
                continue
            before, count = last.get(wait.number, (event, wait.count))
            if wait.number == 0 and wait.count != text.threads:
                before, count = event, text.threads
            last[wait.number] = event, wait.count
            key = (before.name, event.name, wait.number)
            if count == wait.count or key in told:
                continue
            told.add(key)
            names = tuple(dict.fromkeys((before.name, event.name)))
            why = f"{count} threads may still wait at it when others come and wait for {wait.count}"
            yield Counterexample(
                "divergent barrier", kernel, names, (text_of(wait.statement),), (), f"barrier {wait.number}", why
            )
        if event.after:
            last.clear()
