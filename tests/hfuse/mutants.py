"""Wrong fused kernels: each with one thing in the text of the fusion itself that is not as it should be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from souffle.hfuse import FusedKernel

__all__ = ["KINDS", "mutants"]

KINDS = ("barrier id", "barrier count", "no barrier", "thread index", "block extent", "shared offset", "first thread")


def mutants(fused: FusedKernel) -> Iterator[tuple[str, FusedKernel]]:
    """Every mutant of a fused kernel in thread space, with its kind.

    A part's dynamic shared memory begins where that of the part before it does; a barrier waits with the number, or
    for the number of threads, of the next part.
    """
    text, count = fused.text, len(fused.parts)
    for number, threads in enumerate(fused.splits, 1):
        other = number % count + 1
        more = threads + 32 if threads + 32 <= fused.block else threads - 32
        wait = f'asm volatile("bar.sync {number}, {threads};" ::: "memory");'
        # Threads of the other part wait at that number, where it has a barrier.
        if f"bar.sync {other}," in text:
            yield from _changed(fused, "barrier id", wait, wait.replace(f"bar.sync {number},", f"bar.sync {other},"))
        yield from _changed(fused, "barrier count", wait, wait.replace(f" {threads};", f" {more};"))
        yield from _changed(fused, "no barrier", wait, "")
        first = sum(fused.splits[: number - 1])
        if number > 1:
            yield from _changed(fused, "thread index", f"threadIdx.x - {first}u", f"threadIdx.x - {first - 1}u")
            yield from _changed(
                fused, "first thread", f"if (threadIdx.x < {first}u)", f"if (threadIdx.x < {first - 32}u)"
            )
    for match in re.finditer(r"dim3 hfuse_block\(\) \{ return dim3\((\d+), ", text):
        wrong = text[: match.start(1)] + str(int(match[1]) + 1) + text[match.end(1) :]
        yield "block extent", replace(fused, text=wrong)
    offsets = sorted({int(offset) for offset in re.findall(r"hfuse_pool \+ (\d+)", text)})
    for before, offset in pairwise(offsets):
        yield from _changed(fused, "shared offset", f"hfuse_pool + {offset})", f"hfuse_pool + {before})")


def _changed(fused: FusedKernel, kind: str, before: str, after: str) -> Iterator[tuple[str, FusedKernel]]:
    if before in fused.text:
        yield kind, replace(fused, text=fused.text.replace(before, after))
