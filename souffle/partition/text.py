"""Partitions as text: the kernels with their stages, and why they begin and end where they do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from souffle.schedule.gpu.rule import GpuSchedule
from souffle.schedule.stage import LoopStage, Stage, Unit, flat_stages

if TYPE_CHECKING:
    from souffle.partition.planner import Partition, Subprogram

__all__ = ["format_partition", "format_subprogram"]

_COLUMNS = ("stage", "rule", "tiles", "threads", "registers", "", "shared B", "TEs")
_NUMBERS = frozenset({"tiles", "threads", "registers", "shared B", "TEs"})


def format_partition(partition: Partition) -> str:
    """The kernels in the order in which they run, then the decisions, then the loops that have to be taken apart."""
    count = len(partition.subprograms)
    stages = sum(len(flat_stages(subprogram.stages)) for subprogram in partition.subprograms)
    lines = [f"{_count(count, 'kernel')} of {_count(stages, 'stage')}"]
    for number, subprogram in enumerate(partition.subprograms):
        lines += ["", f"kernel {number} {format_subprogram(subprogram)}"]
    if partition.decisions:
        lines += ["", "decisions", *(f"  {decision}" for decision in partition.decisions)]
    if partition.unroll:
        lines += ["", "loops to take apart", *(f"  {name}: {reason}" for name, reason in partition.unroll.items())]
    return "\n".join(lines)


def format_subprogram(subprogram: Subprogram) -> str:
    """A kernel's name and bound, and a table of its stages; those of a loop are indented."""
    bound = subprogram.blocks_per_sm
    head = f"{subprogram.name}: {_count(len(flat_stages(subprogram.stages)), 'stage')}"
    head += f", {bound} resident blocks on each multiprocessor" if bound > 1 else ""
    rows = [row for unit in subprogram.stages for row in _rows(unit)]
    widths = [max(len(cells[i]) for cells in (_COLUMNS, *rows) if len(cells) > 1) for i in range(len(_COLUMNS))]
    return "\n".join([head, *(_line(cells, widths) for cells in (_COLUMNS, *rows))])


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


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
