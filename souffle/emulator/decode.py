"""Records of the fiber runtime as data with names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from souffle.emulator.abi import FindingRecord, TrafficRecord, WaitRecord
from souffle.emulator.checked_memory import CheckedMemory
from souffle.emulator.reports import FINDING_KINDS, Finding, Traffic, WaitingThreads
from souffle.emulator.text_places import TextMap

__all__ = ["findings_of", "traffic_of", "waits_of"]

_STATES = ("poll", "block barrier", "grid sync", "warp operation", "warp operation", "exited", "ready")
_WRITE, _WITHIN, _OF_READ = 1, 32, 64
_SHARED, _NONE = -1, -2


def traffic_of(record: TrafficRecord) -> Traffic:
    """One count."""
    return Traffic(record.read, record.written, record.atomics)


def _position(index: int, extent: tuple[int, int, int]) -> tuple[int, int, int]:
    return index % extent[0], index // extent[0] % extent[1], index // extent[0] // extent[1]


def findings_of(
    text: TextMap,
    records: Sequence[FindingRecord],
    kernel: str,
    memory: CheckedMemory | None,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
) -> tuple[Finding, ...]:
    """All findings of a launch. Barriers that the optimizer copied from one line are left out."""
    places = text.places(address for record in records for address in (record.pc, record.other_pc))
    found = []
    for record in records:
        kind, place = FINDING_KINDS[record.kind], places[record.pc]
        other, other_place = "", places.get(record.other_pc)
        partial = kind == "partial_warp"
        if not partial and other_place is not None and other_place.lines == place.lines and place.function:
            continue
        space, buffer, element, size = "", "", int(record.offset), 0
        if record.region == _SHARED:
            array = text.shared_array(record.offset, place.inner(kernel) or place.function, shared_bytes)
            space, buffer, element, size = "shared", array.name, record.offset - array.offset, array.bytes
        elif record.region >= 0:
            held = memory.buffers[record.region]
            itemsize = np.dtype(held.dtype).itemsize
            space, buffer, element, size = "global", held.name, record.offset, held.nbytes // itemsize
            element = (element - 2**64 if element >= 2**63 else element) // itemsize
        within = kind == "race" and bool(record.what & _WITHIN)
        if within:
            other = f"warp {record.other} of the block"
        elif kind == "race":
            other = f"block {_position(record.other, grid)}"
        elif kind == "foreign":
            other = memory.writer(record.region, record.other, record.offset)
        elif kind in ("divergent_barrier", "partial_warp", "divergent_shuffle"):
            other = f"thread {_position(record.other, block)}"
            if record.other >= block[0] * block[1] * block[2]:
                other = f"lane {record.other % 32}, which the block lacks,"
        elif kind == "divergent_grid_sync":
            other = f"block {_position(record.other, grid)}"
        found.append(
            Finding(
                kind,
                kernel,
                place,
                tuple(record.block),
                tuple(record.thread),
                space,
                buffer,
                element,
                size,
                record.bytes,
                not partial and bool(record.what & _WRITE),
                record.count,
                other,
                other_place,
                within,
                record.what if partial else 0,
                kind == "race" and bool(record.what & _OF_READ),
            )
        )
    return tuple(found)


def waits_of(text: TextMap, records: Sequence[WaitRecord]) -> tuple[WaitingThreads, ...]:
    """Where threads, or blocks, wait."""
    places = text.places(record.pc for record in records)
    return tuple(
        WaitingThreads(
            _STATES[record.state],
            tuple(record.block),
            record.threads,
            tuple(record.thread),
            record.what.decode(),
            record.barrier,
            record.arrived,
            record.expected,
            record.mask,
            places.get(record.pc),
        )
        for record in records
    )
