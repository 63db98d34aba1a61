"""Stages as text: what each computes, by which rule, in which tiles, and what a block of it asks for."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from souffle.program import Tensor
from souffle.program.printer import format_item, loop_edges
from souffle.schedule.gpu.rule import GpuSchedule
from souffle.schedule.resources import StageResources

if TYPE_CHECKING:
    from souffle.schedule.stage import LoopStage, Stage

__all__ = ["format_loop_stage", "format_stage"]

_LABEL = 10
"""Columns of the word that says what a line is about, with the indentation before it."""


def format_stage(stage: Stage) -> str:
    """A stage: its rule and tiles, what it asks for where that is known, what it reads and writes, and its TEs."""
    lines = [f"stage {stage.name}"]
    if isinstance(stage.schedule, GpuSchedule):
        lines += _labelled("rule", [_rule(stage.schedule)])
    lines += _labelled(
        "function",
        [f"{f.name}: {_tiles(f.tiles, f.threads)}, {f.shared_bytes} bytes shared" for f in stage.functions],
    )
    lines += _labelled("block", [_block(stage.resources)] if stage.resources else [])
    lines += _ends(stage.inputs, stage.outputs)
    lines += ["  computes", *(f"    {line}" for te in stage.tes for line in format_item(te))]
    return "\n".join(lines)


def format_loop_stage(unit: LoopStage) -> str:
    """A loop over stages: its steps, what each is given and what is kept of it, and the stages of one step."""
    given, kept = loop_edges(unit.loop)
    lines = [f"loop {unit.name}: {unit.loop.steps} steps", *_ends(unit.inputs, unit.outputs)]
    lines += [*_labelled("given", given), *_labelled("kept", kept)]
    for stage in unit.stages:
        lines += ["", *textwrap.indent(str(stage), "  ").splitlines()]
    return "\n".join(lines)


def _rule(schedule: GpuSchedule) -> str:
    """The rule, and how it divides the work."""
    cores = ", on tensor cores" if schedule.tensor_cores else ""
    return f"{schedule.rule}, {_tiles(schedule.tiles, schedule.threads)}{cores}"


def _tiles(tiles: int, threads: int) -> str:
    """``12 tiles of 256 threads``."""
    return f"{tiles} tile{'' if tiles == 1 else 's'} of {threads} thread{'' if threads == 1 else 's'}"


def _block(used: StageResources) -> str:
    """What a block asks for, and who says so."""
    source = "measured" if used.measured else "assumed"
    text = f"{used.registers} registers of a thread ({source}), {used.shared_bytes} bytes of shared memory"
    text += f", {used.spill_bytes} bytes spilled" if used.spill_bytes else ""
    return text + (f", {used.stack_bytes} bytes of stack" if used.stack_bytes else "")


def _ends(inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> list[str]:
    return [*_labelled("reads", list(map(repr, inputs))), *_labelled("writes", list(map(repr, outputs)))]


def _labelled(label: str, entries: Sequence[str]) -> list[str]:
    """Entries below each other, the first beside a word."""
    heads = [label, *[""] * (len(entries) - 1)]
    return [f"  {head:{_LABEL - 2}} {entry}" for head, entry in zip(heads, entries, strict=False)]
