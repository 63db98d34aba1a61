"""What the machine itself costs: a grid sync, a launch, a node of a CUDA graph, a byte moved."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.codegen.nvcc import find_nvcc
from souffle.errors import CompilerNotFoundError
from souffle.runtime.cuda import Cuda, PreparedLaunch

__all__ = ["measure"]

_MICRO = Path(__file__).with_name("microbench.cu")


class _Clock:
    """Median device time of something that is queued on a stream."""

    def __init__(self, cuda: Cuda, repeats: int) -> None:
        self.cuda, self.stream = cuda, cuda.stream()
        self._repeats = repeats

    def microseconds(self, queue: Callable[[], None]) -> float:
        cuda, samples = self.cuda, []
        first, last = cuda.event(timing=True), cuda.event(timing=True)
        for index in range(self._repeats + 3):
            cuda.record(first, self.stream)
            queue()
            cuda.record(last, self.stream)
            cuda.synchronize(self.stream)
            if index >= 3:
                samples.append(cuda.microseconds(first, last))
        return statistics.median(samples)

    def launches(self, prepared: PreparedLaunch, count: int) -> Callable[[], None]:
        def queue() -> None:
            for _ in range(count):
                self.cuda.launch(prepared, self.stream)

        return queue

    def graph(self, prepared: PreparedLaunch, count: int) -> Callable[[], None]:
        self.cuda.begin_capture(self.stream)
        self.launches(prepared, count)()
        graph = self.cuda.end_capture(self.stream)
        return lambda: self.cuda.launch_graph(graph, self.stream)


def _machine_code(arch: str) -> bytes:
    nvcc = find_nvcc()
    if nvcc is None:
        raise CompilerNotFoundError("no nvcc in $CUDA_HOME/bin or on PATH; the micro step compiles its kernels with it")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "micro.cubin"
        subprocess.run([str(nvcc), "-cubin", f"-arch={arch}", "-O3", "-o", str(cubin), str(_MICRO)], check=True)
        return cubin.read_bytes()


def measure(*, rehearse: bool, repeats: int) -> dict[str, Any]:
    """Grid sync by block count, launch, node of a CUDA graph in µs; copies and reads in GB/s, reads plus writes.

    Parameters
    ----------
    rehearse
        Play a GPU; the sizes are then small and the times mean nothing.
    repeats
        Samples of each figure, of which the median counts.

    Raises
    ------
    CompilerNotFoundError
        If there is no nvcc to compile the kernels with.
    """
    text = _MICRO.read_text()
    small = rehearse
    cuda = Cuda(0, RehearsalDriver({b"rehearsal": text}) if small else None)
    module = cuda.load_module(b"rehearsal" if small else _machine_code(cuda.arch))
    clock = _Clock(cuda, 2 if small else repeats)
    done = cuda.alloc(256)
    count, nbytes = (2, 1 << 16) if small else (200, 1 << 30)

    sync = cuda.function(module, "micro_sync")
    grid_sync = []
    for threads in (256, 1024):
        resident = cuda.resident_blocks(sync, threads, 0)
        for grid in sorted({min(cuda.multiprocessors, resident), resident}):
            times = []
            for syncs in (count, 2 * count):
                prepared = cuda.prepare(
                    "micro_sync", sync, grid=grid, threads=threads, pointers=[done], integers=[syncs], cooperative=True
                )
                times.append(clock.microseconds(clock.launches(prepared, 1)))
            grid_sync.append(
                {"blocks": grid, "threads": threads, "us": (times[1] - times[0]) / count, "runs_us": times}
            )

    empty = cuda.prepare("micro_empty", cuda.function(module, "micro_empty"), grid=1, threads=32, pointers=[done])
    launch = [clock.microseconds(clock.launches(empty, number)) for number in (count, 2 * count)]
    node = [clock.microseconds(clock.graph(empty, number)) for number in (count, 2 * count)]
    alone = clock.microseconds(clock.launches(empty, 1))

    source, target = cuda.alloc(nbytes), cuda.alloc(nbytes)
    cuda.fill(source, 0x3C, nbytes, clock.stream)
    driver_copy = clock.microseconds(lambda: cuda.copy(target, source, nbytes, clock.stream))
    blocks = cuda.multiprocessors * 8

    def traffic(name: str, moved: int, pointers: list[int], times: int = 1) -> float:
        """GB/s of a kernel that goes over ``moved`` bytes of its source ``times`` times."""
        vectors = moved // 16
        prepared = cuda.prepare(
            name, cuda.function(module, name), grid=min(vectors // 256, blocks), threads=256, pointers=pointers,
            integers=[vectors, times],
        )  # fmt: skip
        return moved * times / clock.microseconds(clock.launches(prepared, 1)) / 1e3

    kernel_copy = 2 * traffic("micro_copy", nbytes, [target, source])
    copied = np.empty(min(nbytes, 1 << 20), np.uint8)
    cuda.to_host(copied, target, clock.stream)
    cuda.synchronize(clock.stream)
    cached = min(nbytes, 16 << 20)
    read = traffic("micro_read", nbytes, [done, source])
    read_cached = traffic("micro_read", cached, [done, source], 2 if small else 50)
    return {
        "ok": bool((copied == 0x3C).all()),
        "grid_sync": grid_sync,
        "launch_us": (launch[1] - launch[0]) / count,
        "graph_node_us": (node[1] - node[0]) / count,
        "one_empty_launch_us": alone,
        "bytes": nbytes,
        "driver_copy_gb_s": 2 * nbytes / driver_copy / 1e3,
        "kernel_copy_gb_s": kernel_copy,
        "read_gb_s": read,
        "cached_bytes": cached,
        "read_cached_gb_s": read_cached,
    }
