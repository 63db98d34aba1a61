"""What schedules and the partition need to know of a GPU, by architecture."""

from __future__ import annotations

from dataclasses import dataclass

from souffle.errors import OptionError
from souffle.multiprocessor import MOST_REGISTERS, MULTIPROCESSORS, Multiprocessor

__all__ = ["ASSUMED_REGISTERS", "DEVICES", "SHARING", "GpuDevice", "device_for", "taken_registers"]

SHARING = 2
"""Blocks on a multiprocessor that stages of one kernel leave each other: one computes while the other waits."""

ASSUMED_REGISTERS = 128
"""Of a thread, where no compiler says: what is left to each when two blocks of 256 threads share a multiprocessor."""


@dataclass(frozen=True)
class GpuDevice:
    """Limits of one GPU.

    Attributes
    ----------
    arch : str
        Such as ``"sm_90"``.
    name : str
        The product that the figures are of.
    sm_count : int
        Streaming multiprocessors.
    shared_per_sm, shared_per_block : int
        Bytes of shared memory of a multiprocessor, and the most that one block may ask for. The system keeps 1 KiB of
        each resident block (CUDA C++ Programming Guide, "Compute Capabilities").
    threads_per_sm, blocks_per_sm, registers_per_sm : int
        Most resident threads and blocks, and registers, of a multiprocessor.
    """

    arch: str
    name: str
    sm_count: int
    shared_per_sm: int
    shared_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 65536

    def most_registers(self, threads: int) -> int:
        """Of a thread, so that a block of so many threads is resident."""
        return next(n for n in range(MOST_REGISTERS, 0, -1) if self.resident_blocks(threads, 0, n)["registers"])

    def resident_blocks(self, threads: int, shared_bytes: int, registers: int) -> dict[str, int]:
        """Blocks of a multiprocessor that each of its resources has room for, by the resource's name.

        Parameters as for :meth:`souffle.multiprocessor.Multiprocessor.room`. The system keeps 1 KiB of shared memory of
        each block.
        """
        each = Multiprocessor(self.registers_per_sm, self.shared_per_sm, self.threads_per_sm, self.blocks_per_sm)
        return each.room(threads, shared_bytes, registers)

    def shared_for(self, blocks: int) -> int:
        """Bytes of shared memory that each of so many blocks may have on one multiprocessor."""
        return self.shared_per_sm // blocks - (self.shared_per_sm - self.shared_per_block)

    def blocks_per_wave(self, threads: int, shared_bytes: int, registers: int) -> int:
        """Blocks that are on the device at once, at least one for each multiprocessor.

        Parameters as for :meth:`resident_blocks`.
        """
        return max(1, min(self.resident_blocks(threads, shared_bytes, registers).values())) * self.sm_count


def _product(arch: str, name: str, sm_count: int) -> GpuDevice:
    one = MULTIPROCESSORS[arch]
    most = one.shared_bytes - one.system_bytes
    return GpuDevice(arch, name, sm_count, one.shared_bytes, most, one.threads, one.blocks, one.registers)


DEVICES = {
    device.arch: device
    for device in (
        _product("sm_75", "T4", 40),
        _product("sm_80", "A100", 108),
        _product("sm_86", "A10", 72),
        _product("sm_89", "L4", 58),
        _product("sm_90", "H200", 132),
        _product("sm_100", "B200", 148),
        _product("sm_120", "RTX 5090", 170),
    )
}
"""By architecture: a product for each."""


def device_for(arch: str) -> GpuDevice:
    """The device description for an architecture.

    Raises
    ------
    OptionError
        Naming the architectures known, if `arch` is not one.
    """
    if arch not in DEVICES:
        raise OptionError(f"arch {arch!r} is not known; known are {', '.join(DEVICES)}")
    return DEVICES[arch]


def taken_registers(wanted: int, spared: int, most: int = ASSUMED_REGISTERS) -> int:
    """Registers of a thread that would like some, can do without `spared` of them, and is asked to take `most`.

    A compiler that is asked for two blocks on a multiprocessor makes do with what these leave each other where it can,
    and with what one block of many threads leaves each of them.
    """
    return most if most < wanted <= most + spared else wanted
