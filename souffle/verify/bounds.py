"""Bounds and alignment of accesses, and whether a kernel's blocks are on the device at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np

from souffle.certificate import Counterexample
from souffle.codegen.plan import Buffer, Kernel
from souffle.schedule.gpu.device import GpuDevice
from souffle.verify.accesses import Function
from souffle.verify.expressions import Undecided, const, interval, linear_terms, operation
from souffle.verify.footprint import Footprint, Touch
from souffle.verify.kernel_reader import KernelText
from souffle.verify.ranges import index_range, points
from souffle.verify.stage_functions import text_of
from souffle.verify.tiles_in_a_row import StageRun, Sync

__all__ = ["calculated", "fit", "inside", "outside_pointer"]

_OUT = "out of bounds"
_EVALUATED = 2**62
"""Numbers that are evaluated in 64 bits."""
_MOST_BLOCKS = 2**31
_MOST_THREADS = 1024
_MOST_REGISTERS = 255
"""Of a thread, on every GPU so far; what a kernel has that no compiler has measured."""


def inside(kernel: str, footprint: Footprint, shared_bytes: int) -> Iterator[Counterexample | Undecided]:
    """Accesses lie within the buffers of the function's own declarations, and its pool within that of the launch.

    Where global memory ends only the launch knows: :func:`outside_pointer`.
    """
    name = footprint.function.name
    pool = max((memory.nbytes for memory in footprint.function.memories if memory.pool), default=0)
    if pool > shared_bytes:
        why = f"{name} uses {pool} bytes of shared memory, the launch has {shared_bytes}"
        yield Counterexample("does not fit", kernel, (name,), (), (), "shared memory", why)
    for touch in footprint.touches:
        memory, within = touch.access.place.memory, touch.access.place.within
        first, last = within or (0, memory.nbytes)
        yield from _misaligned(kernel, footprint, touch)
        if memory.kind == "global" and within is None:
            continue
        if not (touch.range.low >= first and touch.range.high < last):
            where = f"{last - first} bytes that are declared from byte {first} of {memory.name}, {memory.kind} memory,"
            yield _outside(kernel, footprint, touch, -first, last - first, where)


def calculated(kernel: str, function: Function) -> Iterator[Counterexample | Undecided]:
    """The whole numbers of a function stay in their types, and nothing is divided by zero."""
    for claim in function.claims:
        text, why = text_of(claim.statement), f"{function.name} {claim.otherwise}"
        if max(map(abs, interval(claim.value))) > _EVALUATED:
            yield Undecided(f"whether {why}: {text}")
            continue
        reach = index_range(claim.value, claim.conditions)
        if reach is None or (reach.low >= claim.low and reach.high <= claim.high):
            continue
        if not reach.exact:
            yield Undecided(f"whether {why}: {text}")
            continue
        parts = points(claim.value, claim.conditions, function.tile, function.thread)
        who = _somebody(((values < claim.low) | (values > claim.high), *where) for values, *where in parts)
        value = reach.high if reach.high > claim.high else reach.low
        element = "a divisor" if "zero" in claim.otherwise else f"the number {value}"
        yield Counterexample("arithmetic", kernel, (function.name,), (text,), who, element, why)


def _misaligned(kernel: str, footprint: Footprint, touch: Touch) -> Iterator[Counterexample | Undecided]:
    """An access of several elements at once lies at a multiple of its size, given memory that begins at one."""
    access = touch.access
    if access.alignment == 1:
        return
    terms, total = linear_terms(access.place.offset)
    if all(factor % access.alignment == 0 for factor in (*terms.values(), total)):
        return
    rest = index_range(operation("floormod", access.place.offset, const(access.alignment)), touch.conditions)
    if rest is None or rest.high == 0:
        return
    name, text = footprint.function.name, text_of(access.statement)
    if not rest.exact:
        yield Undecided(f"whether {name} touches {access.place.memory.name} in multiples of {access.alignment}: {text}")
        return
    why = f"it is {rest.high} bytes behind a multiple of {access.alignment}, which one instruction touches"
    yield Counterexample("misaligned", kernel, (name,), (text,), (), access.place.memory.name, why)


def outside_pointer(
    kernel: str, run: StageRun, footprint: Footprint, parameter: int, start: int, buffer: Buffer
) -> Iterator[Counterexample | Undecided]:
    """Accesses through one pointer, which points to byte `start` of a buffer, lie within the buffer, and aligned."""
    for writes in (False, True):
        wide = max((t.access.alignment for t in footprint.of(parameter, writes)), default=1)
        if (start + buffer.offset) % wide:
            why = f"{run.name} touches {wide} bytes of it at once and is given byte {start + buffer.offset}"
            yield Counterexample("misaligned", kernel, (run.name,), (), (), buffer.name, why)
        reach = footprint.range_of(parameter, writes)
        if reach is None:
            continue
        if writes and buffer.kind in ("input", "constant"):
            why = f"{run.name} writes the {buffer.kind} {buffer.name}"
            yield Counterexample(_OUT, kernel, (run.name,), (), (), buffer.name, why)
        if start + reach.low >= 0 and start + reach.high < buffer.nbytes:
            continue
        for touch in footprint.of(parameter, writes):
            if start + touch.range.low < 0 or start + touch.range.high >= buffer.nbytes:
                where = f"{buffer.nbytes} bytes of {buffer.name}"
                yield _outside(kernel, footprint, touch, start, buffer.nbytes, where)
                break


def _outside(
    kernel: str, footprint: Footprint, touch: Touch, start: int, nbytes: int, where: str
) -> Counterexample | Undecided:
    name = footprint.function.name
    low, high = start + touch.range.low, start + touch.range.high
    text = text_of(touch.access.statement)
    if not touch.range.exact:
        return Undecided(f"whether {name} stays in {where}: {text} may touch bytes {low} to {high}")
    who: tuple[str, ...] = ()
    if touch.access.place.memory.kind == "global":
        unit = touch.access.place.memory.unit
        firsts = ((elements * unit + start, *where) for elements, *where in footprint.elements(touch))
        who = _somebody(((first < 0) | (first + unit > nbytes), *where) for first, *where in firsts)
    byte = low if low < 0 else high
    verb = "writes" if touch.access.writes else "reads"
    return Counterexample(_OUT, kernel, (name,), (text,), who, f"byte {byte} of {where}", f"{name} {verb} it")


def _somebody(parts: Iterable[tuple[np.ndarray, ...]]) -> tuple[str, ...]:
    """The first of whom something holds: given in parts, where it holds, of which tiles and threads."""
    with suppress(Undecided):
        for bad, tiles, threads in parts:
            if bad.any():
                i = int(np.argmax(bad))
                return (f"tile {int(tiles[i])}, thread {int(threads[i])}",)
    return ()


def fit(kernel: Kernel, text: KernelText, device: GpuDevice, static: int) -> Iterator[Counterexample | Undecided]:
    """A launch as the plan says has room, for at least one block on each multiprocessor, and may wait for the grid.

    `static` bytes of shared memory are declared; where a compiler has measured the kernel, it says how many there are.
    """

    def bad(rule: str, why: str) -> Counterexample:
        return Counterexample(rule, kernel.name, (), (), (), kernel.name, why)

    if kernel.threads != text.threads:
        yield bad("launch", f"it is launched with {kernel.threads} threads and written for {text.threads}")
    if any(isinstance(e, Sync) and e.scope == "grid" for e in text.events) and not kernel.cooperative:
        yield bad("launch", "it waits for all blocks, and is not launched so that all are on the device")
    tiles = [e.tiles for e in text.events if isinstance(e, StageRun)]
    if tiles and kernel.tiles < 1:
        yield bad("launch", "it is launched without blocks")
    turns = max((e.turns for e in text.events if isinstance(e, StageRun)), default=0)
    if turns + kernel.tiles > _MOST_BLOCKS:
        yield bad("arithmetic", f"the number of a tile, of {turns}, overflows int32 on a grid of {kernel.tiles} blocks")
    static = static if kernel.resources is None else kernel.resources.static_shared_bytes
    shared = kernel.dynamic_shared_bytes + static
    if kernel.threads > _MOST_THREADS or shared > device.shared_per_block:
        limits = f"{_MOST_THREADS} threads and {device.shared_per_block} bytes"
        yield bad(
            "does not fit",
            f"a block of {kernel.threads} threads and {shared} bytes of shared memory; {limits} are the most",
        )
        return
    if kernel.resources is not None:
        registers = max(1, kernel.resources.registers)
    else:
        # The text says __launch_bounds__(threads), so the compiler keeps to what a block of them can have.
        registers = min(_MOST_REGISTERS, device.registers_per_sm // (-(-kernel.threads // 128) * 128) // 8 * 8)
    resident = device.resident_blocks(kernel.threads, shared, registers)
    if min(resident.values()) < 1:
        short = min(resident, key=lambda name: resident[name])
        yield bad("does not fit", f"no block of {kernel.threads} threads has room for its {short} on {device.arch}")
