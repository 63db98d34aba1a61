"""The CPU device: runs emitted CUDA C++ text, unchanged, on the CPU, every CUDA thread a fiber.

``compile_text`` gives a :class:`CpuModule`, whose ``launch`` runs a kernel. A barrier is a switch to the next fiber, so
a missing one shows as a wrong result and a misplaced one as a :class:`~souffle.errors.DeviceError`, not as a hang.
"""

from __future__ import annotations

from souffle.runtime.cpu_device.module import CpuModule, LaunchReport, compile_text

__all__ = ["CpuModule", "LaunchReport", "compile_text"]
