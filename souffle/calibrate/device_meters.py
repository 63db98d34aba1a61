"""What each figure of a GPU's description is measured with: which kernel, how much of it, and what its clocks mean."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from souffle.calibrate.device_bench import Bench, Cost, Pairs, cost
from souffle.errors import DeviceError

__all__ = ["GROUPS", "Points", "Reading", "capacity", "plateau", "reading"]

Points = tuple[tuple[int, float], ...]
"""A figure that depends on a number: pairs of the number and the value."""


_MOST_SPREAD = 0.5
"""Of the middle half of the runs, as a part of the median: beyond it a figure is noise."""
_BLOCK = 256
"""Threads of the blocks that stages are scheduled for."""
_LINE = 128
"""Bytes of a line of the caches."""
_READ = 64
"""Bytes that a thread of measure_read reads in a round."""
_CODE_PART = 16 << 10
"""Bytes of a part of measure_code."""
_PLATEAU = 0.9
"""Part of a cache's best rate at which it still delivers what it holds."""


@dataclass(frozen=True)
class Reading:
    """A figure as measured.

    Attributes
    ----------
    value : float, Points or None
        None where it could not be measured.
    source : str
        How it was measured, or why it was not.
    """

    value: float | Points | None
    source: str


def reading(found: Cost, how: str, convert: Callable[[float], float] = lambda value: value) -> Reading:
    """A figure from the cost of a unit, or the reason why there is none."""
    if not found.value > 0:
        return Reading(None, f"{how}: the longer runs took no longer")
    if found.spread > _MOST_SPREAD:
        return Reading(None, f"{how}: the middle half of {found.runs} runs spreads over {found.spread:.0%}")
    spread = f"{found.runs} pairs of runs, the middle half within {found.spread:.1%}"
    return Reading(convert(found.value), f"{how}; {spread}")


def per_clock(found: Cost, how: str) -> Reading:
    """A rate from the clocks of a unit."""
    return reading(found, how, lambda clocks: 1.0 / clocks)


def larger(readings: list[Reading]) -> Reading:
    """The largest, or the last where none could be measured."""
    return max(readings, key=lambda one: -1.0 if one.value is None else one.value)


def _keep(name: str, value: Reading, more: dict[str, Any]) -> None:
    more[name] = {"value": value.value, "source": value.source}


class Meter:
    """The measurements, in groups; each adds to the figures, and to what else is worth keeping.

    Parameters
    ----------
    bench : Bench
    small : bool
        Do little work.
    """

    def __init__(self, bench: Bench, small: bool) -> None:
        self.bench, self.cuda, self.small = bench, bench.cuda, small
        self.sms = bench.cuda.multiprocessors
        self.ones = bench.constant(np.array([1.0, 1.0], np.float32))
        self.counts = bench.constant(np.array([1, 1], np.uint32))

    def steps(self, short: int) -> tuple[int, int]:
        """Of the shorter and the longer run; multiples of what ptxas may unroll a loop by."""
        return (2, 6) if self.small else (short, 3 * short)

    def arithmetic(self, figures: dict[str, Reading], more: dict[str, Any]) -> None:
        """Rates of a multiprocessor's units, and its clock."""

        def rate(
            kernel: str, how: str, short: int, each: int, data: int, dtype: type,
            expected: Callable[[int], float], threads: int = 1024, **other: Any,
        ) -> Reading:  # fmt: skip
            """Operations (of one thread) a clock; every multiprocessor holds one block of 32 warps."""
            steps = self.steps(short)
            pairs = self.bench.pairs(
                kernel, grid=self.sms, threads=threads, steps=steps, data=[data], results=self.sms * threads,
                dtype=dtype, expected=expected, **other,
            )  # fmt: skip
            return per_clock(cost(pairs.typical, (steps[1] - steps[0]) * each * threads), how)

        fma = "independent fp32 multiply-adds of 32 warps"
        figures["fp32_per_clock_per_sm"] = rate("measure_fp32", fma, 64, 256, self.ones, np.float32, lambda n: 256 * n)
        integer = "independent 32-bit multiply-adds of 32 warps"
        figures["int32_per_clock_per_sm"] = rate(
            "measure_int32_multiply", integer, 64, 256, self.counts, np.uint32, lambda n: 256 * n
        )
        mixed = "32-bit additions and exclusive ors by turns, which use two pipes"
        _keep(
            "int32_mixed_per_clock_per_sm",
            rate("measure_int32_mixed", mixed, 64, 256, self.counts, np.uint32, lambda n: 128 * n),
            more,
        )
        issue = rate(
            "measure_issue", "fp32 multiply-adds and integer operations by turns, of 32 warps", 128, 128, self.ones,
            np.float32, lambda n: 96 * n,
        )  # fmt: skip
        figures["warp_instructions_per_clock_per_sm"] = Reading(issue.value and issue.value / 32, issue.source)
        # The fixed point of x = 2^-x, eight times; ex2.approx is right to 2 units in the last place.
        rest = 8 * 0.6411857445
        special = "ex2.approx of 32 warps"
        figures["special_per_clock_per_sm"] = rate(
            "measure_special", special, 16, 128, self.ones, np.float32,
            lambda n: rest, tolerance=1e-4,
        )  # fmt: skip
        halves = self.bench.constant(np.full(8, 1.0, np.float16).view(np.uint32))

        def product(kernel: str, inner: int, of: str, operand: int) -> Reading:
            """Multiply-adds of tensor cores in a clock; a kernel's 32 products in a step, each of a warp."""
            return larger(
                [
                    rate(
                        kernel, f"mma.sync m16n8k{inner} of {of} with fp32 totals, {threads // 32} warps", 256,
                        16 * 8 * inner, operand, np.float32, lambda n: inner * 128 * n, threads=threads,
                    )
                    for threads in (128, 256, 512)
                ]
            )  # fmt: skip

        of_halves = product("measure_tensor", 16, "fp16", halves)
        of_words = product("measure_tf32", 8, "TF32", self.bench.constant(np.full(8, 1.0, np.float32)))
        figures["tensor_fma_per_clock_per_sm"] = of_halves
        share = of_words.value / of_halves.value if of_words.value and of_halves.value else None
        told = f"{of_words.value:.0f} a clock: {of_words.source}" if share is not None else of_words.source
        figures["tf32_share"] = Reading(share, told)
        steps = (2, 6) if self.small else (512, 4096)
        pairs = self.bench.pairs(
            "measure_fp32", grid=self.sms, threads=1024, steps=steps, data=[self.ones], results=self.sms * 1024,
            dtype=np.float32, expected=lambda n: 256 * n,
        )  # fmt: skip
        clocks = [a / b if b > 0 else 0.0 for a, b in zip(pairs.typical, pairs.seconds, strict=True)]
        how = "clocks that a multiprocessor counts in a second of the GPU's events, all of them busy with fp32"
        figures["clock_hz"] = reading(cost(clocks, 1.0), how)
        more["largest_clock_hz"] = self.cuda.attribute("CLOCK_RATE") * 1e3

    def latencies(self, figures: dict[str, Reading], more: dict[str, Any]) -> None:
        """Of instructions in chains."""
        bench = self.bench

        def chain(kernel: str, how: str, short: int, each: int, threads: int = 32, **other: Any) -> Reading:
            steps = self.steps(short)
            pairs = bench.pairs(kernel, grid=1, threads=threads, steps=steps, **other)
            return reading(cost(pairs.typical, (steps[1] - steps[0]) * each), how)

        figures["arithmetic_latency_clocks"] = chain(
            "measure_dependent", "a chain of fp32 multiply-adds of one warp", 64, 256,
            data=[self.ones], results=32, dtype=np.float32, expected=lambda n: 256 * n,
        )  # fmt: skip
        figures["barrier_clocks"] = chain(
            "measure_barrier", f"barriers of a block of {_BLOCK} threads, one after another", 64, 32, _BLOCK,
            results=_BLOCK, dtype=np.uint32, expected=lambda n: 32 * n,
        )  # fmt: skip
        figures["shared_latency_clocks"] = chain(
            "measure_chase_shared", "a chain of addresses in shared memory", 32, 64, 1,
            results=1, dtype=np.uint32, expected=lambda n: 64 * n * 33 % 1024,
        )  # fmt: skip
        figures["l1_latency_clocks"] = self.chase("measure_chase_l1", "the L1 cache", 64, _LINE, 128)
        slots = 64 if self.small else 8192
        figures["l2_latency_clocks"] = self.chase("measure_chase_l2", "the L2 cache", slots, 2 * _LINE, 64)
        # Each slot is read once, in an order that no prefetch foresees, after the L2 was filled with other data. They
        # lie close enough together for the table of addresses to hold all their pages.
        l2 = self.cuda.attribute("L2_CACHE_SIZE")
        other = bench.buffer(4 * l2)
        figures["memory_latency_clocks"] = self.chase(
            "measure_chase_l2", "memory, the L2 full of other data", 100 if self.small else 3200, 8192, 64,
            warm=0, before=lambda: self.cuda.fill(other, 0, 4 * l2, bench.stream),
        )  # fmt: skip
        bench.release(other)

    def chase(
        self,
        kernel: str,
        where: str,
        slots: int,
        stride: int,
        short: int,
        *,
        warm: int | None = None,
        before: Callable[[], None] = lambda: None,
        shuffled: bool = True,
        repeats: int | None = None,
    ) -> Reading:
        """Clocks from one load to the next around a ring of addresses, `stride` bytes apart in memory."""
        bench = self.bench
        order = np.arange(slots, dtype=np.int32)
        if shuffled:
            order[1:] = np.random.default_rng(0).permutation(order[1:])
        ring, given = bench.buffer(slots * stride), bench.constant(order)
        bench.launch("measure_link", 1, 256, [ring, given], [slots, stride])
        untimed = slots if warm is None else warm
        steps = self.steps(short)
        kept, bench.repeats = bench.repeats, repeats or bench.repeats
        pairs = bench.pairs(
            kernel, grid=1, threads=1, steps=steps, data=[ring], integers=lambda n: (untimed, n), results=1,
            dtype=np.uint64, l1=True, before=before,
            expected=lambda n: ring + stride * int(order[(untimed + 16 * n) % slots]),
        )  # fmt: skip
        bench.repeats = kept
        bench.release(ring)
        bench.release(given)
        return reading(cost(pairs.typical, (steps[1] - steps[0]) * 16), f"a chain of addresses in {where}")

    def l1(self, figures: dict[str, Reading], more: dict[str, Any]) -> None:
        """The largest ring that stays in the L1 cache."""
        near, far = figures["l1_latency_clocks"].value, figures["l2_latency_clocks"].value
        largest = self.cuda.attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
        sizes = [largest * part // 32 // _LINE * _LINE for part in range(8, 44, 16 if self.small else 1)]
        found = {}
        for size in sizes:
            slots = size // _LINE
            steps = -(-slots // 16)
            one = self.chase(
                "measure_chase_l1", "a ring", slots, _LINE, steps, shuffled=False, repeats=min(3, self.bench.repeats)
            )
            found[size] = one.value
        more["l1_chase_clocks"] = found
        figures["l1_bytes"] = capacity(found, near, far)

    def code(self, figures: dict[str, Reading], more: dict[str, Any]) -> None:
        """Machine code that is executed again and again: how much of it a multiprocessor keeps, and the rate beyond."""
        threads, steps, found = 128, self.steps(16), {}
        for parts in (4, 12, 20) if self.small else range(4, 21):
            pairs = self.bench.pairs(
                "measure_code", grid=self.sms, threads=threads, steps=steps, data=[self.ones],
                integers=lambda n, parts=parts: (parts, n), results=self.sms * threads, dtype=np.float32,
                expected=lambda n, parts=parts: parts * 1024 * n,
            )  # fmt: skip
            size = parts * _CODE_PART
            how = f"{size >> 10} KiB of straight-line code of 4 warps, executed again and again"
            found[size] = reading(cost(pairs.typical, (steps[1] - steps[0]) * size), how)
        clocks = {size: one.value for size, one in found.items()}
        more["code_clocks_per_byte"] = clocks
        figures["code_cache_bytes"] = capacity(clocks, clocks[min(clocks)], clocks[max(clocks)], "straight-line code")
        last = found[max(found)]
        figures["code_bytes_per_clock"] = Reading(last.value and 1.0 / last.value, last.source)

    def extra(self, short: int) -> int:
        """Steps that the longer run does more."""
        steps = self.steps(short)
        return steps[1] - steps[0]

    def filled(self, nbytes: int) -> int:
        """Memory in which every word is 1."""
        turn = self.sms * _BLOCK * 16
        turns = -(-nbytes // turn)
        data = self.bench.buffer(turns * turn)
        self.bench.launch("measure_fill", self.sms, _BLOCK, [data, self.counts], [turns])
        return data

    def read(self, grid: int, threads: int, data: int, steps: tuple[int, int], rounds: int | None = None) -> Pairs:
        """Read `rounds` rounds of memory, steps times; or, without, steps rounds of it once."""
        return self.bench.pairs(
            "measure_read", grid=grid, threads=threads, steps=steps, data=[data], results=grid * threads,
            dtype=np.uint32, integers=(lambda n: (n, 1)) if rounds is None else (lambda n: (rounds, n)),
            expected=lambda n: 16 * n * (rounds or 1),
        )  # fmt: skip

    def bandwidths(self, figures: dict[str, Reading], more: dict[str, Any]) -> None:
        """Of shared memory, the L2 cache and device memory, of one multiprocessor and of all."""
        bench, l2 = self.bench, self.bench.cuda.attribute("L2_CACHE_SIZE")
        pairs = bench.pairs(
            "measure_shared", grid=self.sms, threads=_BLOCK, steps=self.steps(128), data=[self.counts],
            results=self.sms * _BLOCK, dtype=np.uint32, expected=lambda n: 128 * n,
        )  # fmt: skip
        figures["shared_bytes_per_clock_per_sm"] = per_clock(
            cost(pairs.typical, self.extra(128) * 32 * 16 * _BLOCK), "reads of 16 bytes by 8 warps"
        )
        # A GPU of two halves keeps a copy of what one half reads from the other, so that a third of the cache is safe.
        shapes = ((2 * self.sms, 1024), (self.sms, 1024), (self.sms, 512), (self.sms, _BLOCK))
        grid, threads = next((shape for shape in shapes if shape[0] * shape[1] * _READ <= l2 // 3), shapes[-1])
        turn, turn_of_one = grid * threads * _READ, 1024 * _READ
        rounds, rounds_of_one = max(1, l2 // 4 // turn), max(1, min(1 << 20, l2 // 8) // turn_of_one)
        data = self.filled(max(rounds * turn, rounds_of_one * turn_of_one))
        how = "{} KiB read again and again past the L1 cache by {}"
        pairs = self.read(grid, threads, data, self.steps(32), rounds)
        figures["l2_bytes_per_clock"] = per_clock(
            cost(pairs.slowest, self.extra(32) * rounds * turn), how.format(rounds * turn >> 10, "all multiprocessors")
        )
        pairs, moved = self.read(1, 1024, data, self.steps(16), rounds_of_one), rounds_of_one * turn_of_one
        figures["l2_bytes_per_clock_per_sm"] = per_clock(
            cost(pairs.typical, self.extra(16) * moved), how.format(moved >> 10, "one of them")
        )
        bench.release(data)
        self.l2(figures, more)
        self.memory(figures, more)

    def l2(self, figures: dict[str, Reading], more: dict[str, Any]) -> None:
        """How much all multiprocessors can read again and again from the L2 cache."""
        size, threads = self.cuda.attribute("L2_CACHE_SIZE"), 512
        turn = self.sms * threads * _READ
        most = 2 if self.small else max(2, -(-size * 5 // 4 // turn))
        data = self.filled(most * turn)
        found = {}
        for rounds in range(1, most + 1):
            steps = self.steps(max(1, 32 // rounds))
            pairs = self.read(self.sms, threads, data, steps, rounds)
            rate = per_clock(cost(pairs.slowest, (steps[1] - steps[0]) * rounds * turn), "bytes read again and again")
            found[rounds * turn] = rate.value
        self.bench.release(data)
        more["l2_bytes_per_clock_by_bytes"] = found
        figures["l2_bytes"] = plateau(found)

    def memory(self, figures: dict[str, Reading], more: dict[str, Any]) -> None:
        """Of device memory: reads by all multiprocessors and by one, copies by a kernel and by the driver."""
        bench, cuda = self.bench, self.bench.cuda
        grid, threads = 2 * self.sms, 1024
        turn = grid * threads * _READ
        short = 1 if self.small else 8
        data = None
        while data is None:
            # On a GPU that others use, less memory may be free.
            try:
                data = self.filled((6 if self.small else 9 * short) * turn)
            except DeviceError:
                if short == 1:
                    raise
                short //= 2
        steps = (2, 6) if self.small else (3 * short, 9 * short)
        extra = (steps[1] - steps[0]) * turn
        pairs = self.read(grid, threads, data, steps)
        figures["memory_bytes_per_second"] = per_clock(
            cost(pairs.seconds, extra), f"{steps[1] * turn >> 20} MiB read once"
        )
        one = (2, 6) if self.small else (256, 768)
        pairs = self.read(1, 1024, data, one)
        alone = cost(pairs.typical, (one[1] - one[0]) * 1024 * _READ)
        how = f"{one[1] * 1024 * _READ >> 10} KiB read by one multiprocessor"
        _keep("memory_bytes_per_clock_per_sm", per_clock(alone, how), more)
        half = steps[1] * turn // 2
        more["copy_bytes"] = half
        rounds = half // turn
        copy = cuda.prepare(
            "measure_copy", bench.function("measure_copy"), grid=grid, threads=threads,
            pointers=[data + half, data], integers=[rounds],
        )  # fmt: skip
        by_kernel = [bench.seconds(lambda: cuda.launch(copy, bench.stream)) for _ in range(bench.repeats)]
        by_driver = [
            bench.seconds(lambda: cuda.copy(data + half, data, half, bench.stream)) for _ in range(bench.repeats)
        ]
        more["kernel_copy_bytes_per_second"] = 2 * rounds * turn / max(float(np.median(by_kernel)), 1e-12)
        more["driver_copy_bytes_per_second"] = 2 * half / max(float(np.median(by_driver)), 1e-12)
        bench.release(data)

    def starts(self, figures: dict[str, Reading], more: dict[str, Any]) -> None:
        """Of launches, nodes of a CUDA graph and grid syncs."""
        bench, cuda = self.bench, self.bench.cuda
        counts = (2, 6) if self.small else (100, 300)
        target = bench.buffer(4)
        empty = cuda.prepare(
            "measure_empty", bench.function("measure_empty"), grid=self.sms, threads=_BLOCK, pointers=[target]
        )

        def launches(count: int) -> Callable[[], None]:
            def queue() -> None:
                for _ in range(count):
                    cuda.launch(empty, bench.stream)

            return queue

        # The host may need longer for a launch than the GPU: a kernel that goes before keeps the GPU busy until all are
        # queued, and is not timed.
        began = time.perf_counter()
        launches(counts[1])()
        cuda.synchronize(bench.stream)
        clock = figures["clock_hz"].value or cuda.attribute("CLOCK_RATE") * 1e3
        waits = 2.0 * (time.perf_counter() - began) * clock
        busy = cuda.prepare(
            "measure_busy", bench.function("measure_busy"), grid=1, threads=32, pointers=[target],
            integers=[0 if self.small else math.ceil(waits / 1024)],
        )  # fmt: skip
        found = bench.differences(
            (launches(counts[0]), launches(counts[1])), before=lambda: cuda.launch(busy, bench.stream)
        )
        extra = counts[1] - counts[0]
        figures["launch_seconds"] = reading(
            cost(found, extra), f"empty kernels of {self.sms} blocks of {_BLOCK} threads, queued beforehand"
        )
        graphs = []
        for count in counts:
            cuda.begin_capture(bench.stream)
            launches(count)()
            graphs.append(cuda.end_capture(bench.stream))
        found = bench.differences(tuple(lambda graph=graph: cuda.launch_graph(graph, bench.stream) for graph in graphs))
        figures["graph_node_seconds"] = reading(cost(found, extra), "the same as nodes of a CUDA graph")
        for graph in graphs:
            cuda.destroy_graph(graph)
        syncs = more["grid_syncs"] = self.grid_syncs(counts)
        points = tuple((one["blocks"], one["seconds"]) for one in syncs if one["seconds"] is not None)
        how = f"cooperative groups' grid syncs of 1 to {len(syncs)} blocks of {_BLOCK} threads on each multiprocessor"
        figures["grid_sync_points"] = Reading(points or None, how if points else f"{how}; {syncs[-1]['source']}")

    def grid_syncs(self, counts: tuple[int, int]) -> list[dict[str, Any]]:
        """By how many blocks wait for each other, up to as many as the GPU holds at once."""
        bench, cuda = self.bench, self.bench.cuda
        most = cuda.resident_blocks(bench.function("measure_grid_sync"), _BLOCK, 0) // self.sms
        found = []
        for blocks in range(1, most + 1):
            grid = blocks * self.sms
            pairs = bench.pairs(
                "measure_grid_sync", grid=grid, threads=_BLOCK, steps=counts, results=grid * _BLOCK, dtype=np.uint32,
                expected=lambda n: n, cooperative=True,
            )  # fmt: skip
            how = f"cooperative groups' grid sync of {grid} blocks of {_BLOCK} threads, all that are resident"
            taken = reading(cost(pairs.seconds, counts[1] - counts[0]), how)
            found.append({"blocks": grid, "threads": _BLOCK, "seconds": taken.value, "source": taken.source})
        return found


def capacity(
    found: dict[int, float | None], near: float | None, far: float | None, what: str = "ring of addresses"
) -> Reading:
    """Bytes of a multiprocessor's cache, from the clocks that what is read again and again takes, by its size.

    What does not fit comes from the L2 cache: the largest that takes less than the mean of `near` and `far` counts.
    """
    if near is None or far is None or not near < far:
        return Reading(None, f"the clocks of a {what} from the own cache and from the L2 cache are not known apart")
    fits = [size for size, clocks in found.items() if clocks is not None and clocks < (near + far) / 2]
    if not fits or max(fits) == max(found):
        return Reading(None, f"no {what} of {min(found)} to {max(found)} bytes tells the size of the cache")
    how = f"the largest {what} that a multiprocessor reads from its own cache, with no shared memory"
    beyond = min(size for size in found if size > max(fits))
    return Reading(max(fits), f"{how}; the next one tried, {beyond} bytes, does not fit")


def plateau(found: dict[int, float | None]) -> Reading:
    """Bytes that a cache holds, from the rate at which so many are read again and again.

    What is held is a part of the cache where halves of it keep copies of each other's lines. The rate falls beyond: the
    most bytes before count.
    """
    best, held = 0.0, 0
    for size, rate in sorted(found.items()):
        if rate is None:
            continue
        if rate < _PLATEAU * best:
            how = f"the most that is read again at {_PLATEAU:.0%} of the best rate by all multiprocessors"
            return Reading(held, f"{how}; the next size tried, {size} bytes, is read at {rate / best:.0%}")
        best, held = max(best, rate), size
    return Reading(None, f"no size of {min(found)} to {max(found)} bytes is read slower than the ones before")


GROUPS = (
    ("arithmetic", Meter.arithmetic),
    ("latencies", Meter.latencies),
    ("the L1 cache", Meter.l1),
    ("bandwidths", Meter.bandwidths),
    ("machine code", Meter.code),
    ("launches and barriers", Meter.starts),
)
"""What is measured in which order; some need what came before."""
