"""What is tuned: each distinct stage of some networks that is worth a search."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from souffle.analysis import Analysis
from souffle.errors import OptionError
from souffle.schedule.stage import Stage, Unit
from souffle.schedule.tuned import searched_stages

__all__ = ["Task", "expression", "tasks_of"]


def expression(names: str) -> re.Pattern[str]:
    """That stages are chosen by.

    Raises
    ------
    OptionError
        If it is no regular expression.
    """
    try:
        return re.compile(names)
    except re.error as error:
        raise OptionError(f"tasks={names!r} is no regular expression: {error}") from error


@dataclass(frozen=True, eq=False)
class Task:
    """A stage to tune.

    Attributes
    ----------
    stage : Stage
        As the rules scheduled it.
    weight : int
        How often one run of the networks computes it.
    """

    stage: Stage
    weight: int

    @property
    def name(self) -> str:
        """Of the stage."""
        return self.stage.name


Network = tuple[Sequence[Unit], Analysis]
"""A network's stages, and the analysis of its program."""


def tasks_of(networks: Sequence[Network], names: str = "", *, others: Sequence[Network] = ()) -> tuple[Task, ...]:
    """The tasks of some networks; equal stages are one.

    Parameters
    ----------
    networks : sequence of (stages, Analysis)
    names : str
        A regular expression: only stages whose name it is found in.
    others : sequence of (stages, Analysis)
        What may take the place of some of the networks, depending on what is found: counted are stages that these do
        not have.

    Raises
    ------
    OptionError
        If it is no regular expression, or no stage is left.
    """
    wanted = expression(names)
    first: dict[str, Stage] = {}
    weights: dict[str, int] = {}
    for units, analysis in networks:
        for stage, runs in searched_stages(units, analysis):
            first.setdefault(stage.draft.digest, stage)
            weights[stage.draft.digest] = weights.get(stage.draft.digest, 0) + runs
    for units, analysis in others:
        for stage, runs in searched_stages(units, analysis):
            first.setdefault(stage.draft.digest, stage)
            weights.setdefault(stage.draft.digest, runs)
    tasks = tuple(Task(stage, weights[digest]) for digest, stage in first.items() if wanted.search(stage.name))
    if not tasks:
        known = ", ".join(stage.name for stage in first.values()) or "none"
        raise OptionError(f"no stage to tune has a name with {names!r}; there are: {known}")
    return tasks
