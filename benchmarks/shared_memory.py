"""Kernels that use much shared memory: 100 KiB of a block, and all that a block may have.

Here, with the compiler and nvcc::

    python -m benchmarks.shared_memory build --out FOLDER

On a host with a GPU (Python, NumPy, cuda-bindings)::

    python -m benchmarks.shared_memory run --in FOLDER --json shared.json

``rehearse`` in the place of ``run`` runs the same kernels on the CPU device. Beyond 48 KiB the driver must be asked to
allow a kernel its dynamic shared memory, which few networks come to. Each block writes a pattern to all of its memory
and reads it back by other threads, in another order and width, so that memory which is not there, or is there twice,
leaves a wrong word. Exit status 0 means that every word was right, and that one byte more is refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import carried_kernels
from benchmarks.carried_kernels import Found
from souffle.calibrate.device_bench import Bench
from souffle.errors import DeviceError
from souffle.runtime.cuda import Cuda

__all__ = ["SOURCE", "compile_kernels", "check", "found_in", "is_right", "main"]

_THREADS = 256
_MIDDLE = 100 * 1024
"""Bytes: two such blocks fit on a multiprocessor of sm_90."""

# A word's content depends on its place and its block. Words are written one by one by neighbouring threads and read
# back in a run of each thread's own, from the end; or written four at once and read one by one by threads far apart.
SOURCE = f"""
__device__ unsigned pattern(int at) {{
  return (unsigned)at * 2654435761u ^ (blockIdx.x + 1u) * 40503u;
}}
extern "C" __global__ void __launch_bounds__({_THREADS}) shared_words(unsigned* wrong, int words) {{
  extern __shared__ unsigned memory[];
  for (int at = threadIdx.x; at < words; at += blockDim.x) memory[at] = pattern(at);
  __syncthreads();
  int each = (words + blockDim.x - 1) / blockDim.x;
  unsigned sum = 0;
  for (int i = 0; i < each; ++i) {{
    int at = words - 1 - (int)threadIdx.x * each - i;
    if (at >= 0) sum += memory[at] != pattern(at);
  }}
  wrong[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}}
extern "C" __global__ void __launch_bounds__({_THREADS}) shared_vectors(unsigned* wrong, int words) {{
  extern __shared__ uint4 vectors[];
  for (int at = threadIdx.x; at < words / 4; at += blockDim.x) {{
    vectors[at] = make_uint4(pattern(4 * at), pattern(4 * at + 1), pattern(4 * at + 2), pattern(4 * at + 3));
  }}
  __syncthreads();
  const unsigned* memory = (const unsigned*)vectors;
  unsigned sum = 0;
  for (int at = (threadIdx.x * 67) % blockDim.x; at < words; at += blockDim.x) sum += memory[at] != pattern(at);
  wrong[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}}
"""
"""CUDA text of the kernels; of the second, the number of words is a multiple of four."""


def check(cuda: Cuda, image: bytes) -> list[dict[str, Any]]:
    """Run both kernels with 100 KiB of a block and with all that a block may have.

    Parameters
    ----------
    cuda : Cuda
    image : bytes
        Machine code of :data:`SOURCE`.

    Returns
    -------
    list of dict
        ``kernel``, ``dynamic_bytes``, ``static_bytes`` (as the driver says: the kernels declare none, so that any other
        number than 0 is memory that the driver counts as theirs), ``blocks_per_multiprocessor``,
        ``wrong_words``, and for one byte more than there is ``refused``, the message.

    Raises
    ------
    DeviceError
        If the device refuses what it says that it has.
    """
    rows = []
    with cuda.current(), Bench(cuda, image, 1) as bench:
        for name in ("shared_words", "shared_vectors"):
            static = cuda.static_shared_bytes(cuda.function(bench.module, name))
            most = cuda.max_shared_bytes - static
            for nbytes in (_MIDDLE, most // 16 * 16):
                # Asked for again each time, as a network does that is loaded after another.
                function = cuda.function(bench.module, name, nbytes)
                blocks = cuda.resident_blocks(function, _THREADS, nbytes)
                row = {"kernel": name, "dynamic_bytes": nbytes, "static_bytes": static}
                row["blocks_per_multiprocessor"] = blocks // cuda.multiprocessors
                rows.append({**row, "wrong_words": _wrong_words(bench, name, function, blocks, nbytes)})
            try:
                cuda.function(bench.module, name, most + 1)
                refused = None
            except DeviceError as error:
                refused = str(error)
            rows.append({"kernel": name, "dynamic_bytes": most + 1, "static_bytes": static, "refused": refused})
    return rows


def _wrong_words(bench: Bench, name: str, function: Any, blocks: int, nbytes: int) -> int:
    """In how many words a launch of twice as many blocks as fit at once has read something else than was written."""
    if blocks == 0:
        raise DeviceError(f"kernel {name} with {nbytes} bytes of shared memory does not fit on {bench.cuda.label}")
    cuda, grid = bench.cuda, 2 * blocks
    wrong = np.empty(grid * _THREADS, np.uint32)
    address = bench.buffer(wrong.nbytes)
    cuda.fill(address, 0xFF, wrong.nbytes, bench.stream)
    prepared = cuda.prepare(
        name, function, grid=grid, threads=_THREADS, pointers=[address], integers=[nbytes // 4],
        dynamic_shared_bytes=nbytes,
    )  # fmt: skip
    cuda.launch(prepared, bench.stream)
    cuda.to_host(wrong, address, bench.stream)
    cuda.synchronize(bench.stream, f"kernel {name} with {nbytes} bytes of dynamic shared memory")
    bench.release(address)
    return int(wrong.sum(dtype=np.uint64))


def is_right(row: dict[str, Any]) -> bool:
    """Whether a row of :func:`check` is as it should be."""
    return row["wrong_words"] == 0 if "wrong_words" in row else row["refused"] is not None


def compile_kernels(folder: Path, arch: str) -> list[Path]:
    """Compile the kernels; the files that travel."""
    return carried_kernels.build(folder, "shared", SOURCE, arch)


def found_in(folder: Path, *, rehearse: bool) -> Found:
    """Run what :func:`compile_kernels` has left: the rows of :func:`check`."""
    cuda, image, _ = carried_kernels.opened(folder, "shared", rehearse=rehearse)
    rows = check(cuda, image)
    text = ""
    for row in rows:
        if "wrong_words" in row:
            found = f"{row['wrong_words']} wrong words, {row['blocks_per_multiprocessor']} blocks on a multiprocessor"
        else:
            found = f"refused: {row['refused']}" if row["refused"] else "not refused, though there are no more"
        text += f"{row['kernel']:<15} {row['dynamic_bytes']:>7} + {row['static_bytes']} bytes: {found}\n"
    return Found(cuda, text, rows, all(is_right(row) for row in rows))


def main(argv: list[str] | None = None) -> int:
    """The command; see the module's text."""

    def find(options: argparse.Namespace) -> Found:
        return found_in(options.input, rehearse=options.rehearse)

    return carried_kernels.command("shared_memory", __doc__, compile_kernels, find, argv)


if __name__ == "__main__":
    sys.exit(main())
