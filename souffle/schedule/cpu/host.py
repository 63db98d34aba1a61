"""The machine that ``target="cpu"`` compiles for: its vectors, registers and cores."""

from __future__ import annotations

import difflib
import os
import platform
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import tvm
from tvm.target import codegen

from souffle.errors import OptionError
from souffle.parallel import physical_cores, usable_cores
from souffle.tvm_compat import limit_parallel_loops

__all__ = [
    "Machine",
    "best_processor",
    "features_of",
    "host_target",
    "limit_cores",
    "machine_of",
    "missing_instructions",
    "use_cores",
]

_INSTRUCTIONS = (
    *("avx", "sse", "ssse", "fma", "f16c", "bmi", "lzcnt", "popcnt", "movbe", "vaes", "vpclmulqdq", "gfni", "amx"),
    *("neon", "sve", "sme", "dotprod", "fullfp16", "bf16", "fp16fml", "i8mm", "lse"),
)
"""How the names of LLVM's features begin that are instructions of generated code: others say what is fast, or are for
operating systems. What only one maker has (sse4a) is not used."""
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


def host_target(threads: int | None = None, processor: str | None = None) -> tvm.target.Target:
    """TVM's LLVM target for a CPU.

    Parameters
    ----------
    threads : int, optional
        Cores that parallel loops are cut for; all that this process may use without.
    processor : str, optional
        By LLVM's name; the one that this process runs on without.

    Raises
    ------
    OptionError
        If LLVM knows no such processor of this machine's kind.
    """
    if processor is not None and processor not in _processors():
        near = difflib.get_close_matches(str(processor), sorted(_processors()), 4) or [codegen.llvm_get_system_cpu()]
        raise OptionError(
            f"processor={processor!r} is none that LLVM knows on {platform.machine()}; such are {', '.join(near)}"
        )
    cores = threads or usable_cores()
    return tvm.target.Target({"kind": "llvm", "mcpu": processor or codegen.llvm_get_system_cpu(), "num-cores": cores})


def features_of(target: tvm.target.Target) -> frozenset[str]:
    """What LLVM says that a target's processor has."""
    return frozenset(map(str, codegen.llvm_get_cpu_features(target)))


@cache
def _processors() -> frozenset[str]:
    return frozenset(map(str, codegen.llvm_get_cpu_archlist(tvm.target.Target({"kind": "llvm"}))))


@cache
def missing_instructions(processor: str) -> tuple[str, ...]:
    """Instructions that machine code for a processor may have and the one that this process runs on lacks, by LLVM's
    names; none where LLVM does not know the processor here.
    """
    if processor not in _processors():
        return ()
    wanted, present = (
        features_of(tvm.target.Target({"kind": "llvm", "mcpu": name}))
        for name in (processor, codegen.llvm_get_system_cpu())
    )
    return tuple(sorted(name for name in wanted - present if name.startswith(_INSTRUCTIONS) and name != "sse4a"))


def best_processor(processors: Sequence[str]) -> int:
    """For which of some processors code suits this machine best: the first one if it can run none.

    That is this machine's own, or else the one of which it has the most instructions, and all.
    """
    own = codegen.llvm_get_system_cpu()

    def worth(number: int) -> tuple[bool, int]:
        features = features_of(tvm.target.Target({"kind": "llvm", "mcpu": processors[number]}))
        return processors[number] == own, sum(name.startswith(_INSTRUCTIONS) for name in features)

    known = (number for number, name in enumerate(processors) if name in _processors())
    return max((number for number in known if not missing_instructions(processors[number])), key=worth, default=0)


_VECTORS = {"avx512f": 512, "avx": 256, "sse2": 128}
"""Bits of an x86 processor's vectors, by the widest of LLVM's features that it has."""


def machine_of(target: tvm.target.Target) -> Machine:
    """The vectors and cores of a target (``mcpu``, ``mattr`` and ``num-cores``)."""
    # TVM 0.27 says 512 bits of every x86 processor.
    features = features_of(target)
    known = (bits for name, bits in _VECTORS.items() if name in features)
    bits = next(known, max(64, int(codegen.llvm_get_vector_width(target))))
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
