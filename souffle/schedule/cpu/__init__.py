"""Schedules for ``target="cpu"``: what a machine without a GPU runs."""

from __future__ import annotations

from souffle.schedule.cpu.build import build_cpu
from souffle.schedule.cpu.host import Machine, SharedCores, host_target, machine_of, use_cores
from souffle.schedule.cpu.schedule import schedule_cpu

__all__ = ["Machine", "SharedCores", "build_cpu", "host_target", "machine_of", "schedule_cpu", "use_cores"]
