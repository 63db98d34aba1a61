"""The words of stages as text: the rule and its tiles, what a block asks for, and the columns that they stand in."""

from __future__ import annotations

from collections.abc import Iterable

from souffle.schedule.gpu.rule import GpuSchedule
from souffle.schedule.lower import DeviceFunction
from souffle.schedule.resources import StageResources
from souffle.wording import counted

__all__ = ["block_text", "labelled", "rule_text", "tiles_text"]

_LABEL = 10
"""Columns of the word that says what a line is about, with the indentation before it."""


def rule_text(schedule: GpuSchedule) -> str:
    """The rule, and how it divides the work."""
    cores = ", on tensor cores" if schedule.tensor_cores else ""
    way = f", {schedule.way}" if schedule.way else ""
    return f"{schedule.rule}, {tiles_text(schedule)}{cores}{way}"


def tiles_text(divided: GpuSchedule | DeviceFunction) -> str:
    """``12 tiles of 256 threads``."""
    return f"{counted(divided.tiles, 'tile')} of {counted(divided.threads, 'thread')}"


def block_text(used: StageResources) -> str:
    """What a block asks for, and who says so."""
    source = "measured" if used.measured else "assumed"
    text = f"{used.registers} registers of a thread ({source}), {used.shared_bytes} bytes of shared memory"
    text += f", {used.spill_bytes} bytes spilled" if used.spill_bytes else ""
    return text + (f", {used.stack_bytes} bytes of stack" if used.stack_bytes else "")


def labelled(label: str, entries: Iterable[str]) -> list[str]:
    """Entries below each other, the first beside a word."""
    return [f"  {'' if number else label:{_LABEL - 2}} {entry}" for number, entry in enumerate(entries)]
