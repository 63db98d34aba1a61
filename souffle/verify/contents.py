"""What each read finds: the last write of its own tensor, over all launches in order.

Tensors of the workspace that share memory lose what they hold when another one is written. A read of an element that
its own tensor does not hold then is a counterexample, be it that nobody wrote it, or that another tensor has. A stage
finds what the stages before it left, and what it has itself written (:mod:`souffle.verify.own_writes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from souffle.certificate import Counterexample
from souffle.codegen.plan import Buffer
from souffle.verify.expressions import Undecided
from souffle.verify.footprint import Footprint
from souffle.verify.library import text_of
from souffle.verify.own_writes import Missing, missing_read
from souffle.verify.sequence import StageRun

__all__ = ["Contents"]

_RULE = "stale or undefined read"


@dataclass(eq=False)
class _Held:
    """What a buffer holds.

    Attributes
    ----------
    full : bool
        Whether every element is its own; otherwise `mask` says which.
    doubt : str
        Why what it holds is not known for certain.
    overwritten : str
        Who has last destroyed a part.
    """

    full: bool
    mask: np.ndarray | None = None
    doubt: str = ""
    overwritten: str = ""


@dataclass(eq=False)
class Contents:
    """The state of all buffers while the launches run."""

    buffers: Sequence[Buffer]
    held: list[_Held] = field(init=False)
    neighbours: list[list[int]] = field(init=False)
    reads: int = 0
    writes: int = 0
    overwrites: int = 0

    def __post_init__(self) -> None:
        self.held = [_Held(b.kind in ("input", "constant")) for b in self.buffers]
        work = [i for i, b in enumerate(self.buffers) if b.kind == "workspace"]
        work.sort(key=lambda i: self.buffers[i].offset)
        self.neighbours = [[] for _ in self.buffers]
        active: list[int] = []
        for i in work:
            start = self.buffers[i].offset
            active = [j for j in active if self.buffers[j].offset + self.buffers[j].nbytes > start]
            for j in active:
                self.neighbours[i].append(j)
                self.neighbours[j].append(i)
            active.append(i)

    def run(
        self, kernel: str, run: StageRun, footprint: Footprint, places: Sequence[tuple[int, int]]
    ) -> Iterator[Counterexample | Undecided]:
        """A stage reads, and writes; `places` are (buffer, byte) of its pointers."""
        for parameter, (index, start) in enumerate(places):
            if footprint.range_of(parameter, False) is None:
                continue
            meet = {places[other][0] for other in range(len(places)) if self._meet(footprint, parameter, other, places)}
            yield from self._read(kernel, run, footprint, parameter, index, start, index not in meet)
            for other in meet - {index}:
                lost = list(self._lost(kernel, run, footprint, parameter, other, places))
                yield from lost
                one, two = self.buffers[index].name, self.buffers[other].name
                if not lost:
                    yield Undecided(
                        f"whether {run.name} reads {one} before it writes {two}, which shares memory with it"
                    )
        for parameter, (index, start) in enumerate(places):
            yield from self._write(run, footprint, parameter, index, start)

    def _lost(
        self,
        kernel: str,
        run: StageRun,
        footprint: Footprint,
        parameter: int,
        other: int,
        places: Sequence[tuple[int, int]],
    ) -> Iterator[Counterexample]:
        """A read of what an earlier tile of the same slot has written over, being of the buffer `other`."""
        if run.slots is None or run.ranks is None:
            return
        index, start = places[parameter]
        buffer = self.buffers[index]
        slots, ranks = np.asarray(run.slots), np.asarray(run.ranks)
        unit = footprint.function.pointers[parameter].unit
        for pointer, (theirs, begin) in enumerate(places):
            if theirs != other or footprint.range_of(pointer, True) is None:
                continue
            with suppress(Undecided):
                owners = footprint.writes(pointer)
                first = begin + self.buffers[other].offset - buffer.offset
                own = footprint.function.pointers[pointer].unit
                for touch in footprint.of(parameter, False):
                    for elements, tiles, threads in footprint.elements(touch):
                        at = (elements * unit + start - first) // own - owners.low
                        inside = (at >= 0) & (at < owners.owner.size)
                        owner = np.where(inside, owners.owner[np.clip(at, 0, owners.owner.size - 1)], -1)
                        writer = np.clip(owner // owners.threads, 0, len(slots) - 1)
                        bad = (owner >= 0) & (slots[writer] == slots[tiles]) & (ranks[writer] < ranks[tiles])
                        if owners.certain and bad.any():
                            i = int(np.flatnonzero(bad)[0])
                            name = self.buffers[other].name
                            why = f"tile {int(writer[i])} of the same block has written {name} over it"
                            element = f"element {(int(elements[i]) * unit + start) // _unit(buffer)} of {buffer.name}"
                            who = (f"tile {int(tiles[i])}, thread {int(threads[i])}",)
                            text = (text_of(touch.access.statement),)
                            yield Counterexample(_RULE, kernel, (run.name,), text, who, element, why)
                            return

    def outputs(self) -> Iterator[Counterexample | Undecided]:
        """After the last launch, each output holds all its elements."""
        for buffer, held in zip(self.buffers, self.held, strict=True):
            if buffer.kind == "output" and buffer.nbytes and not held.full:
                if held.doubt:
                    yield Undecided(f"whether all of the output {buffer.label} is written: {held.doubt}")
                    continue
                missing = 0 if held.mask is None else int(np.flatnonzero(~held.mask)[0])
                element = f"element {missing} of {buffer.label}"
                yield Counterexample(_RULE, "", (), (), (), element, "no stage writes it, an element of an output")

    def _mask(self, index: int) -> np.ndarray:
        held, buffer = self.held[index], self.buffers[index]
        if held.mask is None:
            held.mask = np.full(buffer.nbytes // _unit(buffer), held.full)
        return held.mask

    def _read(
        self,
        kernel: str,
        run: StageRun,
        footprint: Footprint,
        parameter: int,
        index: int,
        start: int,
        own: bool,
    ) -> Iterator[Counterexample | Undecided]:
        reach = footprint.range_of(parameter, False)
        self.reads += 1
        held, buffer = self.held[index], self.buffers[index]
        unit = _unit(buffer)
        low, high = (start + reach.low) // unit, (start + reach.high) // unit
        if held.full or bool(self._mask(index)[max(0, low) : high + 1].all()):
            return
        try:
            missing = self._missing(footprint, parameter, index, start, own)
        except Undecided as reason:
            yield Undecided(f"whether {run.name} reads of {buffer.name} only what it holds: {reason}")
            return
        if missing is None:
            return
        if held.doubt:
            yield Undecided(f"whether {buffer.name} holds what {run.name} reads: {held.doubt}")
            return
        element = (missing.element * footprint.function.pointers[parameter].unit + start) // unit
        why = f"{held.overwritten} has written over it" if held.overwritten else "no stage has written it"
        yield Counterexample(
            _RULE,
            kernel,
            (run.name,),
            (text_of(missing.statement),),
            (f"tile {missing.tile}, thread {missing.thread}",),
            f"element {element} of {buffer.name}",
            f"{run.name} reads it, but {why}",
        )

    def _missing(self, footprint: Footprint, parameter: int, index: int, start: int, own: bool) -> Missing | None:
        mask, unit = self._mask(index), _unit(self.buffers[index])
        width = footprint.function.pointers[parameter].unit

        def held(elements: np.ndarray) -> np.ndarray:
            # What lies outside is another rule's business.
            return mask[np.clip((elements * width + start) // unit, 0, mask.size - 1)]

        return missing_read(footprint, parameter, held, own=own)

    def _meet(self, footprint: Footprint, parameter: int, other: int, places: Sequence[tuple[int, int]]) -> bool:
        """Whether a stage writes through another pointer to memory that it reads through one."""
        read, written = footprint.range_of(parameter, False), footprint.range_of(other, True)
        if read is None or written is None or parameter == other:
            return False
        (index, start), (theirs, begin) = places[parameter], places[other]
        if index != theirs and theirs not in self.neighbours[index]:
            return False
        shift = self.buffers[theirs].offset - self.buffers[index].offset if index != theirs else 0
        return written.low + begin + shift <= read.high + start and read.low + start <= written.high + begin + shift

    def _write(
        self, run: StageRun, footprint: Footprint, parameter: int, index: int, start: int
    ) -> Iterator[Counterexample | Undecided]:
        reach = footprint.range_of(parameter, True)
        if reach is None:
            return
        self.writes += 1
        held, buffer = self.held[index], self.buffers[index]
        unit, own = _unit(buffer), footprint.function.pointers[parameter].unit
        written: np.ndarray | None = None
        try:
            owners = footprint.writes(parameter)
            first, count = owners.low, owners.owner.size
            written = owners.written
            if not owners.certain:
                held.doubt = f"{run.name} writes it where data says so"
        except Undecided as reason:
            held.doubt = str(reason)
            self._destroy(run, index, start + reach.low, start + reach.high, None)
            return
        begin = start + first * own
        self._destroy(run, index, begin, begin + count * own - 1, None if written is None else (written, own))
        if own != unit or start % unit:
            held.doubt = f"{run.name} writes it as elements of {own} bytes"
            return
        if held.doubt and not owners.certain:
            return
        low = begin // unit
        size = buffer.nbytes // unit
        if written is None and low <= 0 and low + count >= size:
            held.full, held.mask, held.overwritten = True, None, ""
        elif not held.full:
            mask = self._mask(index)
            a, b = max(0, low), min(size, low + count)
            if a < b:
                mask[a:b] |= True if written is None else written[a - low : b - low]
            if mask.all():
                held.full, held.mask = True, None
        yield from ()

    def _destroy(self, run: StageRun, index: int, low: int, high: int, written: tuple[np.ndarray, int] | None) -> None:
        """Take from the buffers that share memory with one what is written of it, bytes `low` to `high`."""
        base = self.buffers[index].offset
        for other in self.neighbours[index]:
            held, buffer = self.held[other], self.buffers[other]
            if not held.full and held.mask is None:
                continue
            unit = _unit(buffer)
            shift = base - buffer.offset
            a, b = max(0, low + shift), min(buffer.nbytes - 1, high + shift)
            if a > b:
                continue
            mask = self._mask(other)
            if written is None:
                mask[a // unit : b // unit + 1] = False
            else:
                touched = np.repeat(written[0], written[1])[a - low - shift : b - low - shift + 1]
                places = np.flatnonzero(touched) + a
                mask[places // unit] = False
            held.full = False
            held.overwritten = f"{run.name}, writing {self.buffers[index].name},"
            self.overwrites += 1


def _unit(buffer: Buffer) -> int:
    return 1 if buffer.dtype == "bool" else np.dtype(buffer.dtype).itemsize
