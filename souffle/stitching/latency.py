"""The latency-evaluator: how long the kernel of a pattern takes, by waves, instructions and CPI (000 §4.3).

    L = N_wave * L_warp        N_wave = N_warp / occupancy        L_warp = sum over kinds of N_instruction * CPI

Each component of a pattern is given 1, 32 or 256 threads for a unit (``layout.py``), in blocks of 256: thread, warp and
block composition; the fastest counts. Where a unit has so few elements of a member that lanes of its warp would do
nothing, a block may also take several units together and give their elements to all its threads, through shared memory
(003 Figure 1 has a block compute 94 rows). A reduction at the end may also be shared out between blocks. The paper
takes CPI from microbenchmarks of Volta and Turing (Jia et al. 2018, 2019). Here latencies and rates come from the
device file, each with its source, and CPI is that of a warp among the others on its multiprocessor:

    sum of N_instruction * CPI = max(sum of N * latency, sum of N * resident warps * 32 / operations a clock)

so that a device that is full of warps is bound by its rates and an empty one by its latencies: which of both is asked
for a warp and not for each kind of instruction, since other warps issue theirs while one waits. Of global memory the
rate is of bytes: distinct ones from memory, and what is read again from the L2 cache if it has room for the tensor.
Registers and shared memory, which decide the occupancy, follow from life times; simplified (for the delta-evaluator,
§5.4), registers are 16 and shared memory is the most in and between any members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from souffle.cost.counting import WARP
from souffle.cost.device import CostDevice
from souffle.schedule.lower.local_arrays import OWN_REGISTERS
from souffle.stitching.graph import OpGraph, Read
from souffle.stitching.kinds import CONTRACTIONS, REDUCTIONS
from souffle.stitching.layout import Component, layout_of
from souffle.stitching.plan import Scheme
from souffle.stitching.schemes import schemes_in

__all__ = ["BLOCK", "SIMPLE_REGISTERS", "KernelLatency", "LatencyEvaluator"]

BLOCK = 256
"""Threads of a block, as those of all schedule rules."""

SIMPLE_REGISTERS = 16
"""Of a thread, in the simplified evaluation: the paper's number."""

_ARITHMETIC, _SPECIAL, _SHARED = range(3)

_TOGETHER = (8, 16, 32)
"""Units that a block takes together where lanes would do nothing: from as many as its warps to as a warp has lanes."""

_WORD = 4
_SECTOR_WORDS = 8
"""Words of a sector of memory: a thread may compute a unit of so many elements without wasting bandwidth."""


@dataclass(frozen=True)
class KernelLatency:
    """What is predicted of the kernel of a pattern.

    Attributes
    ----------
    seconds : float
        Without its launch; infinite where no block fits.
    threads : tuple of int
        Of a unit of each component.
    registers, shared_bytes : int
        Of a thread and of a block.
    schemes : dict of int to Scheme
        How each member is attached.
    """

    seconds: float
    threads: tuple[int, ...]
    registers: int
    shared_bytes: int
    schemes: dict[int, Scheme]


@dataclass(frozen=True)
class _Way:
    """A component with so many threads for a unit: warps, what one executes and moves, and what a block asks for.

    Of arithmetic, special functions and shared memory, instructions of the longest warp and of one on average: warps
    of a block for which nothing is left issue none. `loads` are those of global memory that wait for each other: those
    of one tensor, and what is loaded before and after a result is kept for other threads. `memory_bytes` and
    `cache_bytes` are what a warp loads and stores of memory and of the L2 cache.
    """

    warps: float
    longest: tuple[float, float, float]
    average: tuple[float, float, float]
    loads: float
    memory_bytes: float
    cache_bytes: float
    barriers: float
    shared_bytes: int
    threads: int


class _Traffic(NamedTuple):
    """Vertices whose results cost no global memory, and members that are not stored."""

    inside: frozenset[int]
    recomputed: frozenset[int]


class LatencyEvaluator:
    """Latencies of patterns of one graph on one GPU.

    Parameters
    ----------
    graph : OpGraph
    device : CostDevice
    simplified : bool
        Without life times, as the delta-evaluator takes it.
    """

    def __init__(self, graph: OpGraph, device: CostDevice, *, simplified: bool = False) -> None:
        self.graph, self.device, self.simplified = graph, device, simplified
        self._alone: dict[tuple, float] = {}

    def kernel(
        self,
        members: tuple[int, ...],
        inside: frozenset[int] | None = None,
        *,
        recomputed: Sequence[int] = (),
    ) -> KernelLatency:
        """The kernel of some vertices.

        Parameters
        ----------
        members : tuple of int
            Rising.
        inside : frozenset of int, optional
            Vertices whose results cost no global memory, where these are more than `members`.
        recomputed : sequence of int
            Vertices that it computes besides, and that another kernel stores where that is needed.
        """
        members = tuple(sorted((*members, *recomputed)))
        traffic = _Traffic(frozenset(members) if inside is None else inside, frozenset(recomputed))
        components = layout_of(self.graph, members).components
        registers = SIMPLE_REGISTERS if self.simplified else OWN_REGISTERS + self._live_values(members)
        chosen = [
            min(self._ways(component, traffic), key=lambda way: self._cycles([way], registers))
            for component in components
        ]
        shared = max(way.shared_bytes for way in chosen)
        seconds = self._cycles(chosen, registers) / self.device.clock_hz
        schemes = dict.fromkeys(members, Scheme.THREAD)
        for component, way in zip(components, chosen, strict=True):
            schemes |= schemes_in(self.graph, component, component.single if way.threads <= WARP else ())
        return KernelLatency(seconds, tuple(way.threads for way in chosen), registers, shared, schemes)

    def alone(self, number: int, inside: frozenset[int]) -> float:
        """Seconds of the kernel of one vertex, with as much global traffic as it has among others of a pattern."""
        op = self.graph.ops[number]
        outside = tuple(read.producer not in inside for read in op.reads)
        key = (number, outside, self.graph.escapes(number, inside))
        if key not in self._alone:
            self._alone[key] = self.kernel((number,), inside | {number}).seconds
        return self._alone[key]

    # A component

    def _ways(self, component: Component, traffic: _Traffic) -> list[_Way]:
        points = {number: self._points(number) / component.units for number in component.members}
        # A product reads its operands by tiles, so a thread may compute a result alone.
        streamed = [n for number, n in points.items() if self.graph.ops[number].kind not in CONTRACTIONS]
        threads = [count for count in (1, WARP, BLOCK) if count == 1 or max(points.values()) > 1]
        if max(streamed, default=1) > _SECTOR_WORDS:
            threads.remove(1)
        ways = [self._way(component, traffic, count) for count in threads]
        if component.splits > 1:
            ways.append(self._way(component, traffic, 1, splits=component.splits))
        if WARP in threads and min(points.values()) < WARP:
            ways += [self._way(component, traffic, BLOCK, together=n) for n in _TOGETHER if n < component.units]
        return ways

    def _points(self, number: int) -> int:
        op = self.graph.ops[number]
        return op.size * math.prod(op.reduced)

    def _way(
        self, component: Component, traffic: _Traffic, threads: int, *, splits: int = 1, together: int = 1
    ) -> _Way:
        """A way of `threads` for so many units `together`, each cut into `splits`."""
        total = component.units * splits * threads / together
        longest, average = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        barriers = 0.0
        in_warp = component.single if threads <= WARP else frozenset()

        def execute(pipe: int, elements: float, each: float = 1.0) -> None:
            longest[pipe] += math.ceil(elements / total) * each
            average[pipe] += _turns_of_warps(elements, total, threads) * each

        for number in (*component.members, *component.extra):
            op = self.graph.ops[number]
            points = max(1, self._points(number))
            execute(_ARITHMETIC, points * component.again[number], op.work.arithmetic / points)
            execute(_SPECIAL, points * component.again[number], op.work.special / points)
            for read in op.reads:
                if read.producer in in_warp:
                    execute(_SHARED, total)  # a shuffle, which takes the data path of shared memory
                elif read.producer in component.shared:
                    execute(_SHARED, self._read_bytes(component, number, read) / _WORD)
            if number in component.shared and number not in in_warp:
                execute(_SHARED, component.shared[number] * component.units / _WORD)
                barriers += 1
            if op.kind in REDUCTIONS and (threads > 1 or splits > 1):
                lanes = min(WARP, math.prod(op.reduced))
                execute(_SHARED, min(total, points), math.ceil(math.log2(max(1, lanes))))
                barriers += threads > WARP
        units = together * BLOCK // threads
        of_unit = component.peak_around(self.graph) if self.simplified else component.peak
        kept = of_unit if not component.shared.keys() <= in_warp else 0
        moved = self._moved(component, traffic, total)
        return _Way(total / WARP, tuple(longest), tuple(average), *moved, barriers, kept * units, threads)

    def _moved(self, component: Component, traffic: _Traffic, total: float) -> tuple[float, float, float]:
        """Loads of a warp that wait for each other, and the bytes that it moves of memory and of the L2 cache.

        Between two results that are kept, threads need not wait for a load to issue one of another tensor, and never
        for a store.
        """
        phases = dict.fromkeys(component.extra, 0)
        words: dict[object, tuple[int, int]] = {}
        memory: dict[object, float] = {}
        cache: dict[object, float] = {}
        for number in (*component.extra, *component.members):
            before = [n for n in self.graph.producers[number] if n in phases]
            phases[number] = max((phases[n] + (n in component.shared) for n in before), default=0)
            for read in self.graph.ops[number].reads:
                if read.producer in component.shared or read.producer in traffic.inside:
                    continue
                size = self._read_bytes(component, number, read)
                loads = math.ceil(size / _WORD / total)
                words[read.tensor] = max(words.get(read.tensor, (0, 0)), (loads, -phases[number]))
                once = min(size, read.bytes) if read.bytes <= self.device.l2_bytes else size
                memory[read.tensor] = max(memory.get(read.tensor, 0), once)
                cache[read.tensor] = max(cache.get(read.tensor, 0), size)
        longest: dict[int, int] = {}
        for loads, phase in words.values():
            longest[phase] = max(longest.get(phase, 0), loads)
        own = [number for number in component.members if number not in traffic.recomputed]
        stored = sum(self.graph.ops[n].written for n in own if self.graph.escapes(n, traffic.inside))
        moved = ((sum(sizes.values()) + stored) / (total / WARP) for sizes in (memory, cache))
        return sum(longest.values()), *moved

    def _read_bytes(self, component: Component, number: int, read: Read) -> float:
        """Bytes that all threads together read of a tensor for a vertex; a product reads its operands by tiles."""
        times = 1.0 if self.graph.ops[number].kind in CONTRACTIONS else read.times
        return read.bytes * times * component.again[number]

    def _live_values(self, members: tuple[int, ...]) -> int:
        """The most results of members that a thread holds at once, in words."""
        inside = set(members)
        last = {n: max((c for c in self.graph.consumers[n] if c in inside), default=n) for n in members}
        live: set[int] = set()
        most = 0
        for number in members:
            live = {one for one in live if last[one] >= number} | {number}
            most = max(most, len(live))
        return most

    # A kernel

    def _cycles(self, ways: list[_Way], registers: int) -> float:
        device = self.device
        shared = max(way.shared_bytes for way in ways)
        if shared > device.shared_per_block:
            return math.inf
        blocks = min(device.limits.resident_blocks(BLOCK, shared, registers).values())
        if blocks < 1:
            return math.inf
        occupancy = blocks * BLOCK // WARP * device.sm_count
        warps = sum(way.warps for way in ways)
        resident = min(occupancy, max(1.0, warps)) / device.sm_count
        latencies = [self._warp_cycles(way, max(1.0, resident)) for way in ways]
        waves = sum(way.warps * cycles for way, cycles in zip(ways, latencies, strict=True)) / occupancy
        return max(waves, *latencies)

    def _warp_cycles(self, way: _Way, resident: float) -> float:
        """``L_warp`` among so many warps on a multiprocessor."""
        device = self.device
        memory_per_clock = device.memory_bytes_per_second / device.clock_hz / device.sm_count
        cache_per_clock = min(device.l2_bytes_per_clock / device.sm_count, device.l2_bytes_per_clock_per_sm)
        latencies = (device.arithmetic_latency_clocks, device.arithmetic_latency_clocks, device.shared_latency_clocks)
        rates = (
            device.fp32_per_clock_per_sm,
            device.special_per_clock_per_sm,
            device.shared_bytes_per_clock_per_sm / _WORD,
        )
        waited = way.loads * device.memory_latency_clocks
        waited += sum(turns * latency for turns, latency in zip(way.longest, latencies, strict=True))
        issued = max(resident * way.memory_bytes / memory_per_clock, resident * way.cache_bytes / cache_per_clock)
        issued += sum(each * resident * WARP / rate for each, rate in zip(way.average, rates, strict=True))
        return max(waited, issued) + way.barriers * device.barrier_clocks


def _turns_of_warps(elements: float, total: float, threads: int) -> float:
    """How often a warp computes an element in each of its threads, on average, where `threads` share elements."""
    if threads <= WARP:
        return math.ceil(elements / total)
    return math.ceil(elements / (total / threads) / WARP) / (threads / WARP)
