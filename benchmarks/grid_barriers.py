"""Grid barriers and flags side by side, between stages that do nothing or next to nothing.

A wait for flags is for 32 blocks around a block's own, or for all (:mod:`souffle.kernel.block_flags`). Blocks have as
many threads as stages are scheduled for, and two and four times as many, as those of several teams have
(:mod:`souffle.schedule.lower.teams`): as many threads on a multiprocessor, and fewer blocks that wait.

Here, with the compiler and nvcc::

    python -m benchmarks.grid_barriers build --out FOLDER

On a host with a GPU (Python, NumPy, cuda-bindings)::

    python -m benchmarks.grid_barriers run --in FOLDER --json barriers.json

``rehearse`` in the place of ``run`` runs the same kernels on the CPU device. Whole networks with either barrier are
timed, run 1,000 times and put under compute-sanitizer by ``benchmarks.gpu_host`` (``--variants grid_barrier``).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import carried_kernels
from benchmarks.carried_kernels import Found
from souffle.calibrate.device_bench import Bench, cost
from souffle.calibrate.device_meters import reading
from souffle.runtime.cuda import Cuda

__all__ = ["compile_kernels", "found_in", "main", "measure", "source", "table"]

_THREADS = (256, 512, 1024)
"""Of the blocks that stages are scheduled for, and of those of two and four teams."""
_AROUND = 32
"""Blocks that a block waits for: those that it reads from and those that read from it are among them."""
_STATE_WORDS = 256
"""At least what any of them keeps, flags not counted."""
_WAITS = (256, 768)
"""Of the shorter and the longer run; what both have in common cancels."""

# Of ``passing``, the value that a block leaves in a round is read by its neighbour after the wait. Two places take
# turns, so that one wait a round is enough: a place is written again only when the next wait is over.
_KERNELS = """
extern "C" __global__ void __launch_bounds__({threads}) empty_{name}(
    unsigned long long* clocks, unsigned* out, unsigned* places, unsigned* state, int waits) {{
  int num_blocks = gridDim.x;
  {begin}
  if (threadIdx.x == 0) clocks[2 * blockIdx.x] = clock64();
  for (int i = 0; i < waits; ++i) {{
    {wait}
  }}
  if (threadIdx.x == 0) clocks[2 * blockIdx.x + 1] = clock64();
  {end}
  out[blockIdx.x * blockDim.x + threadIdx.x] = waits;
}}
extern "C" __global__ void __launch_bounds__({threads}) passing_{name}(
    unsigned long long* clocks, unsigned* out, unsigned* places, unsigned* state, int waits) {{
  int num_blocks = gridDim.x, all = num_blocks * blockDim.x;
  int at = blockIdx.x * blockDim.x + threadIdx.x, from = (at + blockDim.x + 1) % all;
  unsigned sum = 0;
  {begin}
  if (threadIdx.x == 0) clocks[2 * blockIdx.x] = clock64();
  for (int i = 0; i < waits; ++i) {{
    places[(i & 1) * all + at] = at + i;
    {wait}
    sum += places[(i & 1) * all + from] == from + i;
  }}
  if (threadIdx.x == 0) clocks[2 * blockIdx.x + 1] = clock64();
  {end}
  out[at] = sum;
}}
"""


def source() -> tuple[str, tuple[str, ...]]:
    """CUDA text with two kernels for each way to wait that there is, and the ways' names."""
    barriers = importlib.import_module("souffle.kernel.grid_barrier").GRID_BARRIERS.values()
    flags = importlib.import_module("souffle.kernel.block_flags")
    text, names = "#include <cooperative_groups.h>\n" + flags.FLAGS_TEXT, []
    for barrier in barriers:
        wait = "cooperative_groups::this_grid().sync();"
        if barrier.function:
            wait = f"{barrier.function}(state, num_blocks);"
        text += barrier.text + _KERNELS.format(name=barrier.name, begin="", wait=wait, end="", threads=_THREADS[-1])
        names.append(barrier.name)
    begin = f"int before = {flags.BEGIN_FUNCTION}(state);"
    for name, others in ((f"flags{_AROUND}", str(_AROUND)), ("flags", "num_blocks")):
        first = f"(int)blockIdx.x + {_AROUND // 2} * (num_blocks - 1)"
        arrive = f"{flags.ARRIVE_FUNCTION}(state, before + i + 1);"
        wait = f"{flags.WAIT_FUNCTION}(state, {first}, {first} + {others} - 1, num_blocks, before + i + 1);"
        words = f"{flags.flag_words(0)} + num_blocks"
        end = f"{flags.LEAVE_FUNCTION}(state, num_blocks, before + waits, {words});"
        text += _KERNELS.format(name=name, begin=begin, wait=f"{arrive} {wait}", end=end, threads=_THREADS[-1])
        names.append(name)
    return text, tuple(names)


def measure(
    cuda: Cuda, image: bytes, names: tuple[str, ...], *, repeats: int, small: bool = False
) -> list[dict[str, Any]]:
    """Seconds of one wait, for each barrier and size of blocks, with one to as many as a multiprocessor holds.

    Raises
    ------
    DeviceError
        If a block has read what its neighbour had not written yet.
    """
    found = []
    steps = (2, 6) if small else _WAITS
    with cuda.current(), Bench(cuda, image, repeats) as bench:
        kernels = [f"{kind}_{name}" for kind in ("empty", "passing") for name in names]
        fit = {n: min(cuda.resident_blocks(bench.function(k), n, 0) for k in kernels) for n in _THREADS}
        most = {threads: blocks // cuda.multiprocessors for threads, blocks in fit.items()}
        state = bench.constant(np.zeros(_STATE_WORDS + max(fit.values()), np.uint32))
        powers = {n: sorted({*(1 << p for p in range(most[n].bit_length())), most[n]}) for n in _THREADS}
        for threads, each in ((n, each) for n in _THREADS for each in powers[n]):
            grid = each * cuda.multiprocessors
            places = bench.buffer(2 * 4 * grid * threads)
            row: dict[str, Any] = {"blocks": grid, "blocks_per_multiprocessor": each, "threads": threads}
            for kernel in kernels:
                pairs = bench.pairs(
                    kernel, grid=grid, threads=threads, steps=steps, data=[places, state], results=grid * threads,
                    dtype=np.uint32, expected=lambda n: n, cooperative=True,
                )  # fmt: skip
                one = reading(cost(pairs.seconds, steps[1] - steps[0]), kernel.replace("_", ", "))
                row[kernel] = {"seconds": one.value, "source": one.source}
            bench.release(places)
            found.append(row)
    return found


def table(rows: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    """The rows in microseconds, short."""
    kernels = [f"{kind}_{name}" for kind in ("empty", "passing") for name in names]
    names_of = " ".join(f"{k.replace('_', ' '):>20}" for k in kernels)
    lines = ["µs of a wait, by blocks x threads", " " * 14 + names_of]
    for row in rows:
        values = ["-" if row[k]["seconds"] is None else f"{row[k]['seconds'] * 1e6:.3f}" for k in kernels]
        lines.append(f"{row['blocks']:>4} x {row['threads']:<6} " + " ".join(f"{value:>20}" for value in values))
    return "\n".join(lines) + "\n"


def compile_kernels(folder: Path, arch: str) -> list[Path]:
    """Compile the kernels; the files that travel."""
    text, names = source()
    return carried_kernels.build(folder, "barriers", text, arch, names=names)


def found_in(folder: Path, *, rehearse: bool, repeats: int) -> Found:
    """Run what :func:`compile_kernels` has left: the rows of :func:`measure`."""
    cuda, image, about = carried_kernels.opened(folder, "barriers", rehearse=rehearse)
    names = tuple(about["names"])
    rows = measure(cuda, image, names, repeats=repeats, small=rehearse)
    return Found(cuda, table(rows, names), rows)


def main(argv: list[str] | None = None) -> int:
    """The command; see the module's text."""

    def find(options: argparse.Namespace) -> Found:
        return found_in(options.input, rehearse=options.rehearse, repeats=options.repeats)

    return carried_kernels.command("grid_barriers", __doc__, compile_kernels, find, argv)


if __name__ == "__main__":
    sys.exit(main())
