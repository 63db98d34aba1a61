"""The machine that ``target="cpu"`` compiles for: its vectors, registers and cores."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import tvm
from tvm.target import codegen

from souffle.parallel import physical_cores, usable_cores
from souffle.tvm_compat import limit_parallel_loops

__all__ = ["Machine", "host_target", "limit_cores", "machine_of", "use_cores"]

_SHARE_CORES = -3
"""TVM's affinity mode in which the threads may move among the cores given, as other processes leave them free."""

_thread = threading.local()
"""``cores``: how many the thread's parallel loops use."""


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


def host_target(threads: int | None = None) -> tvm.target.Target:
    """TVM's LLVM target for the CPU that this process runs on.

    Parameters
    ----------
    threads : int, optional
        Cores that parallel loops are cut for; all that this process may use without.
    """
    cores = threads or usable_cores()
    return tvm.target.Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": cores})


def machine_of(target: tvm.target.Target) -> Machine:
    """The vectors and cores of a target (``mcpu``, ``mattr`` and ``num-cores``)."""
    bits = max(64, int(codegen.llvm_get_vector_width(target)))
    many = bits >= 512 or (target.attrs.get("mtriple") or "").startswith(("aarch64", "arm64"))
    cores = int(target.attrs.get("num-cores") or 0) or usable_cores()
    return Machine(bits, 32 if many else 16, cores)


def use_cores(target: tvm.target.Target) -> None:
    """Let parallel loops in TVM's pool that the calling thread runs use as many cores as `target` has."""
    limit_cores(machine_of(target).cores)


def limit_cores(cores: int) -> None:
    """Let parallel loops in TVM's pool that the calling thread runs use so many cores.

    TVM has a pool for each thread that calls. It is made when that is first allowed more than one core, and cannot grow
    later: it has a worker for each core that the process may use then, or as many as are asked for if these are more.
    """
    if getattr(_thread, "cores", None) == cores:
        return
    if cores == 1:
        limit_parallel_loops(1)
    else:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        cpus = [str(cpu) for cpu in physical_cores()]
        cpus = [cpus[i % len(cpus)] for i in range(max(cores, len(cpus)))]
        tvm.get_global_func("runtime.config_threadpool")(_SHARE_CORES, cores, cpus)
        if allowed is not None:
            # TVM confines this thread to these processors, too, and with it all threads and processes that it starts.
            os.sched_setaffinity(0, allowed)
    _thread.cores = cores
