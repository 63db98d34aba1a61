"""What a multiprocessor has for resident blocks, and how many fit: CUDA's occupancy calculator."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MOST_REGISTERS", "MOST_THREADS", "MULTIPROCESSORS", "Multiprocessor"]

MOST_REGISTERS = 255
"""That a thread can have."""

MOST_THREADS = 1024
"""That a block can have."""

_WARP = 32
_GRANULE = 256
"""Registers are given to whole warps, so many at a time."""

_SYSTEM_BYTES = 1024
"""Of shared memory, which the system keeps of each block from Ampere on; before, it kept none."""

_KIB = 1024


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

    def room(self, threads: int, shared_bytes: int, registers: int) -> dict[str, int]:
        """Blocks that each of its resources has room for, by the resource's name.

        Warps are given to four schedulers in equal number; shared memory is given in granules of 128 bytes.

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
        of_warp = -(-registers * _WARP // _GRANULE) * _GRANULE
        memory = -(-shared_bytes // 128) * 128 + self.system_bytes
        return {
            "registers": self.registers // of_warp // 4 * 4 // warps,
            "shared memory": self.shared_bytes // memory if memory else self.blocks,
            "threads": self.threads // threads,
            "block slots": self.blocks,
        }

    def resident(self, threads: int, shared_bytes: int, registers: int) -> int:
        """Blocks that are resident at once; parameters as for :meth:`room`."""
        return min(self.room(threads, shared_bytes, registers).values())


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
