"""The table of ``souffle run --counts``: what each kernel of a checked run moved."""

from __future__ import annotations

from collections.abc import Sequence

from souffle.cli.output import format_table
from souffle.emulator import LaunchReport, Traffic

__all__ = ["counts_table"]


def counts_table(reports: Sequence[LaunchReport]) -> str:
    """One row for each kernel, its launches added up, and one for all. Bytes are as threads ask for them."""
    kernels: dict[str, list[LaunchReport]] = {}
    for report in reports:
        kernels.setdefault(report.kernel, []).append(report)
    rows = [_row(name, launches) for name, launches in kernels.items()]
    if len(rows) > 1:
        rows.append(_row("all", reports))
    head = ("kernel", "launches", "read B", "written B", "shared read B", "shared written B", "barriers", "grid syncs")
    return format_table((*head, "atomics"), rows)


def _row(name: str, launches: Sequence[LaunchReport]) -> tuple:
    total = sum((report.total for report in launches), Traffic())
    shared = sum((report.shared for report in launches), Traffic())
    barriers = sum(report.block_barriers for report in launches)
    syncs = sum(report.grid_syncs for report in launches)
    moved = (total.read, total.written, shared.read, shared.written)
    return (name, len(launches), *moved, barriers, syncs, total.atomics + shared.atomics)
