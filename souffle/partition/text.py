"""Partitions as text: the table of a kernel's stages, with what decides where it begins and ends."""

from __future__ import annotations

from collections.abc import Sequence

from souffle.schedule.gpu.rule import GpuSchedule
from souffle.schedule.stage import LoopStage, Stage, Unit

__all__ = ["stage_table"]

_COLUMNS = ("stage", "rule", "tiles", "threads", "registers", "", "shared B", "TEs")
_NUMBERS = frozenset({"tiles", "threads", "registers", "shared B", "TEs"})


def stage_table(units: Sequence[Unit]) -> list[str]:
    """A line for each stage, and one for the head of a loop, whose stages are indented."""
    rows = [row for unit in units for row in _rows(unit)]
    widths = [max(len(cells[i]) for cells in (_COLUMNS, *rows) if len(cells) > 1) for i in range(len(_COLUMNS))]
    return [_line(cells, widths) for cells in (_COLUMNS, *rows)]


def _rows(unit: Unit) -> list[tuple[str, ...]]:
    """A row for each stage, and one cell for the head of a loop."""
    if isinstance(unit, LoopStage):
        head = (f"loop {unit.name}, {unit.loop.steps} steps",)
        return [head, *((f"  {name}", *cells) for name, *cells in map(_row, unit.stages))]
    return [_row(unit)]


def _row(stage: Stage) -> tuple[str, ...]:
    name = stage.label if stage.functions else stage.name
    rule = tiles = threads = registers = source = shared = "-"
    if isinstance(stage.schedule, GpuSchedule):
        schedule = stage.schedule
        rule, tiles, threads = schedule.rule, str(schedule.tiles), str(schedule.threads)
    if stage.resources is not None:
        used = stage.resources
        registers, shared = str(used.registers), str(used.shared_bytes)
        source = "measured" if used.measured else "assumed"
    return name, rule, tiles, threads, registers, source, shared, str(len(stage.tes))


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    if len(cells) == 1:
        return f"  {cells[0]}"
    aligned = (
        cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
        for cell, width, column in zip(cells, widths, _COLUMNS, strict=True)
    )
    return f"  {'  '.join(aligned)}".rstrip()
