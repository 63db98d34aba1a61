"""Schedules for ``target="cpu"``: what a machine without a GPU runs."""

from __future__ import annotations

from souffle.schedule.cpu.build import build_cpu
from souffle.schedule.cpu.host import Machine, SharedCores, host_target, machine_of, use_cores
from souffle.schedule.cpu.packed_constants import PackedLayout
from souffle.schedule.cpu.schedule import ScheduledFunction, schedule_cpu, schedule_with_constants

__all__ = [
    "Machine",
    "PackedLayout",
    "ScheduledFunction",
    "SharedCores",
    "build_cpu",
    "host_target",
    "machine_of",
    "schedule_cpu",
    "schedule_with_constants",
    "use_cores",
]
