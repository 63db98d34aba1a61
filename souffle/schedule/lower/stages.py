"""Stages with the device functions that kernels call in their place, under the names that these have in the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import tvm

from souffle.schedule.lower.device_function import DeviceFunction, lower_stage
from souffle.schedule.stage import Stage, Unit, map_stages
from souffle.tvm_compat import structural_digest

__all__ = ["lower_stages", "readable_name"]


def lower_stages(units: Sequence[Unit], target: tvm.target.Target) -> tuple[Unit, ...]:
    """Stages with their functions: those that the scheduler has seen already, or lowered here.

    Parameters
    ----------
    units : sequence of Stage or LoopStage
        Each scheduled; a schedule that was brought along has no functions yet.
    target : Target
        See :func:`souffle.schedule.lower.cuda_target`.

    Returns
    -------
    tuple of Stage or LoopStage
        Stages of equal structure share their functions, whose names are unique, after the first stage that needs them.

    Raises
    ------
    LoweringError
        If a stage cannot be lowered.
    """
    known: dict[tuple[str, str], tuple[DeviceFunction, ...]] = {}
    digests: dict[object, str] = {}

    def lowered(stage: Stage) -> Stage:
        # Equal stages may have been given different schedules.
        if stage.schedule not in digests:
            digests[stage.schedule] = structural_digest(stage.schedule.func)
        digest = (stage.draft.digest, digests[stage.schedule])
        if digest not in known:
            label = f"stage{len(known)}_{readable_name(stage.name)}"
            # A schedule may have been exchanged, which the functions of the one before outlive.
            functions = stage.functions if all(f.schedule is stage.schedule for f in stage.functions) else ()
            functions = functions or lower_stage("stage", stage.schedule, target)
            labels = [label] if len(functions) == 1 else [f"{label}_{number}" for number in range(len(functions))]
            known[digest] = tuple(replace(f, name=name) for f, name in zip(functions, labels, strict=True))
        return replace(stage, functions=known[digest])

    return map_stages(units, lowered)


def readable_name(name: str) -> str:
    """The last words of a name as an identifier, as much as keeps the text readable."""
    clean = re.sub(r"\W+", "_", name).strip("_")
    return clean if len(clean) <= 40 else clean[-40:].partition("_")[2].strip("_") or clean[-40:]
