"""The search for the fastest partition of a block's threads and register bound (paper §III-B, Figure 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from souffle.hfuse.errors import FusionError
from souffle.hfuse.fuse import FusedKernel, fuse
from souffle.hfuse.fused_text import Bound
from souffle.hfuse.original import original
from souffle.hfuse.part import Part
from souffle.hfuse.resources import Usage
from souffle.multiprocessor import MOST_REGISTERS, Multiprocessor

__all__ = ["STEP", "Measure", "RegisterBound", "Search", "Trial", "partitions", "register_bound", "search"]

STEP = 128
"""Threads from one partition to the next: other numbers break patterns of memory access (§III-B)."""

Measure = Callable[[FusedKernel], float]
"""The seconds that a fused kernel takes."""


@dataclass(frozen=True)
class RegisterBound:
    """The bound r0 of Figure 6, and the number of resident blocks b0 that it is made of."""

    blocks: int
    registers: int


@dataclass(frozen=True)
class Trial:
    """One candidate that was measured.

    Attributes
    ----------
    splits : tuple of int
        Threads of each part.
    registers : int or None
        The bound r0; None without one.
    blocks : int or None
        The resident blocks b0 of the bound.
    seconds : float
    fused : FusedKernel
    """

    splits: tuple[int, ...]
    registers: int | None
    blocks: int | None
    seconds: float
    fused: FusedKernel


@dataclass(frozen=True)
class Search:
    """All candidates in the order in which they were measured; `best` is the first of the fastest."""

    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The fastest."""
        return min(self.trials, key=lambda trial: trial.seconds)


def partitions(parts: Sequence[Part], block: int, step: int = STEP) -> Iterator[tuple[int, ...]]:
    """The partitions of a block that Figure 6 tries, in its order; parts with a fixed block have that in all of them.

    Parameters
    ----------
    parts : sequence of Part
    block : int
        The threads of the fused block, d0.
    step : int
    """
    if all(part.threads is not None for part in parts):
        yield tuple(part.threads or 0 for part in parts)
        return
    last = max(index for index, part in enumerate(parts) if part.threads is None)

    def chosen(index: int, left: int) -> Iterator[tuple[int, ...]]:
        if index == len(parts):
            if left == 0:
                yield ()
            return
        part = parts[index]
        later = sum(other.threads or 0 for other in parts[index + 1 :])
        if part.threads is not None:
            sizes: Sequence[int] = (part.threads,)
        elif index == last:
            # As in the figure, where d2 is what d1 leaves.
            sizes = (left - later,)
        else:
            sizes = range(step, left - later, step)
        for threads in sizes:
            if part.threads is None and (
                threads < part.granule or threads % part.granule or threads > part.most_threads
            ):
                continue
            for rest in chosen(index + 1, left - threads):
                yield (threads, *rest)

    yield from chosen(0, block)


def register_bound(
    splits: Sequence[int], registers: Sequence[int], shared_bytes: int, multiprocessor: Multiprocessor
) -> RegisterBound:
    """Lines 9 to 12 of Figure 6.

    Parameters
    ----------
    splits : sequence of int
        Threads of each part.
    registers : sequence of int
        Of a thread of each part alone.
    shared_bytes : int
        Of a block of the fused kernel, static and dynamic.
    multiprocessor : Multiprocessor
    """
    block = sum(splits)
    blocks = min(multiprocessor.registers // (d * r) for d, r in zip(splits, registers, strict=True))
    if shared_bytes:
        blocks = min(blocks, multiprocessor.shared_bytes // shared_bytes)
    # The figure divides without a remainder in mind; a bound of no blocks would be none.
    blocks = max(1, min(blocks, multiprocessor.threads // block))
    return RegisterBound(blocks, min(MOST_REGISTERS, multiprocessor.registers // (blocks * block)))


def search(
    parts: Sequence[Part],
    block: int,
    measure: Measure,
    *,
    usage: Usage,
    multiprocessor: Multiprocessor,
    step: int = STEP,
    progress: Callable[[str], None] | None = None,
) -> Search:
    """Measure each partition twice, without and with the bound r0 (Figure 6).

    Parameters
    ----------
    parts : sequence of Part
        Two as in the figure, or more.
    block : int
        The threads of the fused block, d0. Of fixed blocks only, their sum is taken.
    measure : callable
        Gives the seconds of a fused kernel.
    usage : callable
        Gives the registers and the static shared memory of a text's kernel.
    multiprocessor : Multiprocessor
        Of the device.
    step : int
        Of the partitions.
    progress : callable, optional
        Told what is done.

    Returns
    -------
    Search

    Raises
    ------
    FusionError
        There is no partition.
    """
    tried = list(partitions(parts, block, step))
    if not tried:
        raise FusionError(
            f"no partition of {block} threads in steps of {step} fits {', '.join(p.kernel for p in parts)}; ask for "
            "another block or another step"
        )
    alone = [original(part, wrapped=True) for part in parts]
    registers = [usage(text.text, text.name).registers for text in alone]
    trials: list[Trial] = []
    for number, splits in enumerate(tried, 1):
        if progress is not None:
            best = f", best {1e3 * min(t.seconds for t in trials):.3f} ms" if trials else ""
            progress(f"partition {number} of {len(tried)}: {' + '.join(map(str, splits))}{best}")
        fused = fuse(parts, splits)
        trials.append(Trial(splits, None, None, measure(fused), fused))
        shared = usage(fused.text, fused.name).static_shared_bytes + fused.shared_bytes
        bound = register_bound(splits, registers, shared, multiprocessor)
        bounded = fuse(parts, splits, bound=Bound(blocks=bound.blocks))
        trials.append(Trial(splits, bound.registers, bound.blocks, measure(bounded), bounded))
    return Search(tuple(trials))
