"""What a block of a stage, or of a kernel of several stages, asks of a multiprocessor (paper §5.4)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from souffle.schedule.gpu.device import ASSUMED_REGISTERS

__all__ = ["SHARED_ALIGNMENT", "StageResources", "aligned", "with_constants"]

SHARED_ALIGNMENT = 128
"""Bytes of shared memory at whose multiples what stages have there begins."""


def aligned(nbytes: int) -> int:
    """The next multiple of :data:`SHARED_ALIGNMENT`."""
    return -(-nbytes // SHARED_ALIGNMENT) * SHARED_ALIGNMENT


def with_constants(nbytes: int, constants: int) -> int:
    """Bytes of shared memory of which some are for constants that stay, behind all others."""
    return aligned(nbytes) + constants if constants else nbytes


@dataclass(frozen=True)
class StageResources:
    """What a block of one stage asks of a multiprocessor.

    Attributes
    ----------
    registers : int
        Of a thread.
    static_shared_bytes, dynamic_shared_bytes : int
        Of a block.
    threads : int
        Of a block.
    spill_bytes : int
        What a thread stores to local memory for want of registers; 0 where not measured.
    measured : bool
        Whether the compiler said so. Otherwise `registers` is an assumption; shared memory and threads are the lowered
        stage's in both cases.
    stack_bytes : int or None
        Of a thread, in local memory; None where not measured.
    code_bytes : int or None
        Of machine code; None where not measured.
    kept_registers : int
        Of `registers`, those in which constants stay for all steps of its loop, its own and those of stages beside it.
    kept_shared_bytes : int
        Of a block, behind the others: where constants stay, as in `kept_registers`.
    """

    registers: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    threads: int
    spill_bytes: int
    measured: bool
    stack_bytes: int | None = None
    code_bytes: int | None = None
    kept_registers: int = 0
    kept_shared_bytes: int = 0

    def keeping(self, registers: int, shared_bytes: int = 0) -> StageResources:
        """The same beside what constants stay in, in the place of what they stay in now."""
        working = self.registers - self.kept_registers + registers
        return replace(self, registers=working, kept_registers=registers, kept_shared_bytes=shared_bytes)

    @classmethod
    def assumed(cls, dynamic_shared_bytes: int, threads: int, registers: int = 0) -> StageResources:
        """Those of a stage that no compiler is asked about; 0 `registers` where none said them before."""
        return cls(registers or ASSUMED_REGISTERS, 0, dynamic_shared_bytes, threads, 0, False)

    @property
    def shared_bytes(self) -> int:
        """Of a block, static and dynamic, and where constants stay behind it."""
        return self.static_shared_bytes + with_constants(self.dynamic_shared_bytes, self.kept_shared_bytes)

    @classmethod
    def together(cls, used: Iterable[StageResources]) -> StageResources:
        """What a block of a kernel of several stages asks for: of each resource the most that any of them does.

        It spills nothing by itself: what each of its stages spills is that stage's own.
        """
        every = tuple(used)
        return cls(
            max(one.registers for one in every),
            max(one.static_shared_bytes for one in every),
            max(one.shared_bytes - one.static_shared_bytes for one in every),
            max(one.threads for one in every),
            0,
            all(one.measured for one in every),
        )
