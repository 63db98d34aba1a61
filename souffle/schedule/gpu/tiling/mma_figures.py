"""What the estimates of tensor-core tilings reckon with: registers of a thread, and figures of a multiprocessor."""

from __future__ import annotations

from souffle.schedule.gpu.rule import GpuRequest

__all__ = [
    "BARRIER",
    "BUSY_LATENCY",
    "COPY_BYTES",
    "L2_BYTES",
    "LATENCY",
    "LOAD_LATENCY",
    "MOST_PARTS",
    "MOST_REGISTERS",
    "OWN_REGISTERS",
    "SHARED_BYTES",
    "SPARED_AHEAD",
    "SPARED_REGISTERS",
    "THREADS",
    "tensor_fma",
]

MOST_PARTS = 32
"""Fragments of totals of a warp: 4 registers of each thread for one, so half of the 255 that there are."""

MOST_REGISTERS = 216
"""Of a thread, as estimated by :meth:`MmaTiling.registers`; ptxas reports up to 255 without spilling."""

OWN_REGISTERS = 56
"""Of a thread beside fragments and what is on its way: addresses, indices, bounds."""

SPARED_REGISTERS = 40
"""Of these, what nvcc does without, and spills nothing, when it is asked for two blocks on a multiprocessor."""

SPARED_AHEAD = 20
"""The same where it loads fragments of one piece while it multiplies those of another: of BERT's and ResNeXt's merged
kernels those with 144 wanted spill nothing in their loops, and those with 152 up to 40 words a step."""

_TENSOR_FMA = {"sm_90": 1362.0}
"""As measured on an H100 (docs/results.md, "On an H100"), which reaches two thirds of its peak by mma.sync."""

_AMPERE_TENSOR_FMA = 1024.0
"""Four tensor cores of 256."""

SHARED_BYTES, COPY_BYTES, L2_BYTES = 128.0, 64.0, 29.0
"""Bytes in a clock of a multiprocessor: of shared memory, of asynchronous copies into it, which take its path twice as
long (on an H100 20.7 clocks for a warp's copies that make 10.5 writes), and of its part of what the L2 cache delivers
where all read at once (3,862 bytes for 132 of them there)."""

LATENCY, BUSY_LATENCY, LOAD_LATENCY, BARRIER = 700.0, 1000.0, 30.0, 40.0
"""Clocks: from a copy or load of global memory to its use (686 on an H100), the same while all multiprocessors ask for
more all the time, of shared memory, and of a barrier."""

THREADS = 128.0
"""Instructions of threads that a multiprocessor issues in a clock: four warps."""


def tensor_fma(request: GpuRequest) -> float:
    """Multiply-adds of fp16 in a clock of one multiprocessor, by mma.sync."""
    return _TENSOR_FMA.get(request.arch, _AMPERE_TENSOR_FMA)
