"""The machine that ``target="cpu"`` compiles for: its vectors, registers and cores."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm.target import codegen

__all__ = ["Machine", "host_target", "machine_of", "use_cores"]

_ONE_CORE_PER_THREAD = 1
"""TVM's affinity mode in which the threads are spread over the fast cores."""


@dataclass(frozen=True)
class Machine:
    """What the schedules need to know of a CPU.

    Attributes
    ----------
    vector_bits : int
        Width of a vector register.
    vector_registers : int
    cores : int
        Threads that run parallel loops.
    """

    vector_bits: int
    vector_registers: int
    cores: int

    def lanes(self, dtype: str) -> int:
        """Elements of `dtype` in one vector register."""
        bits = 8 if dtype == "bool" else int("".join(c for c in dtype if c.isdigit()) or 32)
        return max(1, self.vector_bits // bits)


def _physical_cores() -> int:
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = set()
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(path.read_text().strip() if path.is_file() else str(cpu))
    return max(1, len(siblings))


def host_target() -> tvm.target.Target:
    """TVM's LLVM target for the CPU that this process runs on, with as many cores as it may use."""
    return tvm.target.Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": _physical_cores()})


def machine_of(target: tvm.target.Target) -> Machine:
    """The vectors and cores of a target (``mcpu``, ``mattr`` and ``num-cores``)."""
    bits = max(64, int(codegen.llvm_get_vector_width(target)))
    many = bits >= 512 or (target.attrs.get("mtriple") or "").startswith(("aarch64", "arm64"))
    cores = int(target.attrs.get("num-cores") or 0) or _physical_cores()
    return Machine(bits, 32 if many else 16, cores)


def use_cores(target: tvm.target.Target) -> None:
    """Let TVM's thread pool use all the cores of `target`; by itself it takes half of them on x86."""
    tvm.get_global_func("runtime.config_threadpool")(_ONE_CORE_PER_THREAD, machine_of(target).cores)
