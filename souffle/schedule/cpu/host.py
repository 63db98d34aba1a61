"""The machine that ``target="cpu"`` compiles for: its vectors, registers and cores."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm.target import codegen

__all__ = ["Machine", "host_target", "machine_of", "use_cores"]

_SHARE_CORES = -3
"""TVM's affinity mode in which the threads may move among the cores given, as other processes leave them free."""

_configured = threading.local()


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


def _physical_cores() -> list[int]:
    """One processor number for each core that this process may use: two threads of a core share its vector units."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: dict[str, int] = {}
    for cpu in usable:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(path.read_text().strip() if path.is_file() else str(cpu), cpu)
    return list(cores.values())


def host_target() -> tvm.target.Target:
    """TVM's LLVM target for the CPU that this process runs on, with as many cores as it may use."""
    return tvm.target.Target(
        {"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": len(_physical_cores())}
    )


def machine_of(target: tvm.target.Target) -> Machine:
    """The vectors and cores of a target (``mcpu``, ``mattr`` and ``num-cores``)."""
    bits = max(64, int(codegen.llvm_get_vector_width(target)))
    many = bits >= 512 or (target.attrs.get("mtriple") or "").startswith(("aarch64", "arm64"))
    cores = int(target.attrs.get("num-cores") or 0) or len(_physical_cores())
    return Machine(bits, 32 if many else 16, cores)


def use_cores(target: tvm.target.Target) -> None:
    """Let TVM's thread pool use as many cores as `target` has; by itself it takes half of the processors on x86.

    The pool belongs to the calling thread, so every thread that runs compiled functions calls this, before the first
    of them (a pool that exists already cannot grow). Repeated calls cost nothing.
    """
    cores = machine_of(target).cores
    if getattr(_configured, "cores", None) == cores:
        return
    cpus = [str(cpu) for cpu in _physical_cores()]
    chosen = [cpus[i % len(cpus)] for i in range(cores)]
    tvm.get_global_func("runtime.config_threadpool")(_SHARE_CORES, cores, chosen)
    _configured.cores = cores
