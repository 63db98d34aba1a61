"""The CPU device: runs emitted CUDA C++ text, unchanged, on the CPU, every CUDA thread a fiber.

``compile_text`` gives a :class:`CpuModule`, whose ``launch`` runs a kernel. A barrier is a switch to the next fiber, so
a missing one shows as a wrong result and a misplaced one as a :class:`BarrierError`, not as a hang. A checked text also
shows accesses out of bounds, reads of what nothing has written and races of blocks (:class:`CheckError`), and counts
bytes and atomics.
"""

from __future__ import annotations

from souffle.emulator.checked_memory import CheckedBuffer, CheckedMemory
from souffle.emulator.module import CpuModule, compile_text
from souffle.emulator.reports import BarrierError, CheckError, Finding, LaunchReport, TextPlace, Traffic, WaitingThreads
from souffle.emulator.toolchain import SHARED_STEMS

__all__ = [
    "SHARED_STEMS",
    "BarrierError",
    "CheckError",
    "CheckedBuffer",
    "CheckedMemory",
    "CpuModule",
    "Finding",
    "LaunchReport",
    "TextPlace",
    "Traffic",
    "WaitingThreads",
    "compile_text",
]
