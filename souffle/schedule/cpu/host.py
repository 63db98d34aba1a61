"""The machine that ``target="cpu"`` compiles for: its vectors, registers and cores."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import ClassVar

import tvm
from tvm.target import codegen

from souffle.parallel import physical_cores
from souffle.tvm_compat import limit_parallel_loops

__all__ = ["Machine", "SharedCores", "host_target", "machine_of", "use_cores"]

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


def host_target() -> tvm.target.Target:
    """TVM's LLVM target for the CPU that this process runs on, with as many cores as it may use."""
    return tvm.target.Target(
        {"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": len(physical_cores())}
    )


def machine_of(target: tvm.target.Target) -> Machine:
    """The vectors and cores of a target (``mcpu``, ``mattr`` and ``num-cores``)."""
    bits = max(64, int(codegen.llvm_get_vector_width(target)))
    many = bits >= 512 or (target.attrs.get("mtriple") or "").startswith(("aarch64", "arm64"))
    cores = int(target.attrs.get("num-cores") or 0) or len(physical_cores())
    return Machine(bits, 32 if many else 16, cores)


def use_cores(target: tvm.target.Target) -> None:
    """Let parallel loops of the calling thread use as many cores as `target` has; see :class:`SharedCores`."""
    cores = machine_of(target).cores
    _use(cores, _one_each(cores))


class SharedCores:
    """Divides the cores among the threads that run compiled functions at the same time; to be used as a context.

    TVM has a pool of workers for each thread that calls it, as large as the machine, and they poll while they wait. So
    a thread that enters while others are inside takes only its share of the cores; with as many threads as cores, each
    runs its loops alone and without a pool. What an element is does not depend on how many workers there are.

    Parameters
    ----------
    cores : int
        How many there are to divide.
    """

    _inside: ClassVar[set[int]] = set()
    # Threads by number, not a count: what an interrupt left in it, the thread's next turn puts right.

    def __init__(self, cores: int) -> None:
        self._cores, self._cpus = cores, _one_each(cores)

    def __enter__(self) -> None:
        self._inside.add(threading.get_ident())
        share = max(1, self._cores // len(self._inside))
        # All, or a power of two, for a change of the share costs as much as a small call.
        _use(share if share == self._cores else 1 << share.bit_length() - 1, self._cpus)

    def __exit__(self, *_: object) -> None:
        self._inside.discard(threading.get_ident())


def _one_each(cores: int) -> list[str]:
    """The processor numbers for a pool of so many workers."""
    cpus = [str(cpu) for cpu in physical_cores()]
    return [cpus[i % len(cpus)] for i in range(cores)]


def _use(cores: int, cpus: list[str]) -> None:
    """Let parallel loops of the calling thread use so many cores; TVM by itself takes half of x86's processors.

    The thread's pool is made when it is first allowed more than one. It has a worker for each of `cpus` then, of which
    some are used, for it cannot grow later.
    """
    if getattr(_thread, "cores", None) == cores:
        return
    if cores == 1:
        limit_parallel_loops(1)
    else:
        tvm.get_global_func("runtime.config_threadpool")(_SHARE_CORES, cores, cpus)
    _thread.cores = cores
