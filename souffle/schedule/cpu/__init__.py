"""Schedules for ``target="cpu"``: what a machine without a GPU runs."""

from __future__ import annotations

from souffle.schedule.cpu.build import build_cpu, build_objects
from souffle.schedule.cpu.host import (
    Machine,
    best_processor,
    host_target,
    limit_cores,
    machine_of,
    missing_instructions,
    use_cores,
)
from souffle.schedule.cpu.price import function_cycles
from souffle.schedule.cpu.schedule import (
    Layout,
    ScheduledFunction,
    schedule_cpu,
    schedule_with_constants,
    takes_followers,
)

__all__ = [
    "Layout",
    "Machine",
    "ScheduledFunction",
    "best_processor",
    "build_cpu",
    "build_objects",
    "function_cycles",
    "host_target",
    "limit_cores",
    "machine_of",
    "missing_instructions",
    "schedule_cpu",
    "schedule_with_constants",
    "takes_followers",
    "use_cores",
]
