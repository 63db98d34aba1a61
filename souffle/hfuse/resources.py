"""What kernels take of a multiprocessor, and what one has: the constants of the paper's Figure 6.

Kept beside the compiler's own description of devices, and not taken from it: fusion works where the compiler's packages
are not installed, on devices that the compiler has no schedules for, the paper's two among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from souffle.codegen.nvcc import compile_cubin
from souffle.codegen.plan import Resources
from souffle.hfuse.errors import FusionError

__all__ = ["MULTIPROCESSORS", "Multiprocessor", "Usage", "compiled_usage", "multiprocessor_of"]

_WARP = 32
_MOST_REGISTERS = 255
_GRANULE = 8
"""Registers of a thread come in eights."""

_SYSTEM_BYTES = 1024
"""Of shared memory, which the system keeps of each block from Ampere on; before, it kept none."""

Usage = Callable[[str, str], Resources]
"""What a kernel uses, by its text and its name there."""


@dataclass(frozen=True)
class Multiprocessor:
    """What a multiprocessor has for resident blocks.

    Attributes
    ----------
    registers, shared_bytes, threads, blocks : int
    system_bytes : int
        Of shared memory, that the system keeps of each block.
    """

    registers: int
    shared_bytes: int
    threads: int
    blocks: int
    system_bytes: int = _SYSTEM_BYTES

    def resident(self, threads: int, shared_bytes: int, registers: int) -> int:
        """Blocks that are resident at once, by the rules of CUDA's occupancy calculator.

        Parameters
        ----------
        threads : int
            Of a block.
        shared_bytes : int
            Of a block, static and dynamic.
        registers : int
            Of a thread.
        """
        warps = -(-threads // _WARP)
        of_warp = -(-registers // _GRANULE) * _GRANULE * _WARP
        memory = -(-shared_bytes // 128) * 128 + self.system_bytes
        by_memory = self.shared_bytes // memory if memory else self.blocks
        return min(self.registers // of_warp // 4 * 4 // warps, by_memory, self.threads // threads, self.blocks)


_KIB = 1024

MULTIPROCESSORS = {
    "sm_60": Multiprocessor(65536, 64 * _KIB, 2048, 32, 0),
    "sm_61": Multiprocessor(65536, 96 * _KIB, 2048, 32, 0),
    "sm_70": Multiprocessor(65536, 96 * _KIB, 2048, 32, 0),
    "sm_75": Multiprocessor(65536, 64 * _KIB, 1024, 16, 0),
    "sm_80": Multiprocessor(65536, 164 * _KIB, 2048, 32),
    "sm_86": Multiprocessor(65536, 100 * _KIB, 1536, 16),
    "sm_89": Multiprocessor(65536, 100 * _KIB, 1536, 24),
    "sm_90": Multiprocessor(65536, 228 * _KIB, 2048, 32),
    "sm_100": Multiprocessor(65536, 228 * _KIB, 2048, 32),
    "sm_120": Multiprocessor(65536, 100 * _KIB, 1536, 24),
}
"""By architecture; CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""


def multiprocessor_of(arch: str) -> Multiprocessor:
    """That of an architecture, such as ``sm_90`` or ``sm_90a``; raises FusionError where it is not known."""
    plain = arch.rstrip("af")
    if plain not in MULTIPROCESSORS:
        raise FusionError(f"the architecture {arch!r} is not known; known are {', '.join(MULTIPROCESSORS)}")
    return MULTIPROCESSORS[plain]


def compiled_usage(arch: str, cache_dir: Path | None = None) -> Usage:
    """What nvcc says for an architecture.

    The kernel's name must not be mangled: those of fused kernels and of wrapped originals are not.
    """

    def usage(text: str, name: str) -> Resources:
        _, resources = compile_cubin(text, arch, cache_dir=cache_dir)
        if name not in resources:
            raise FusionError(f"nvcc made no kernel {name!r} of the text; it made {', '.join(resources) or 'none'}")
        return resources[name]

    return usage
