"""Decisions as data: every choice of the compiler with its reason (what ``explain`` shows), and how it says no."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Barrier", "Decision", "Refused", "TooMany"]


@dataclass(frozen=True)
class Refused:
    """What was asked for cannot be had, or does not pay: the one way in which a stage of the flow says no.

    Attributes
    ----------
    reason : str
        Names what it is about and what it lacks.
    """

    reason: str


@dataclass(frozen=True)
class TooMany(Refused):
    """More of something is needed than there is.

    Attributes
    ----------
    what : str
        Such as ``"registers"``.
    needed, most : int
    """

    what: str
    needed: int
    most: int


class Decision(NamedTuple):
    """One choice.

    Attributes
    ----------
    stage : str
        The stage of the flow that chose: ``"analysis"``, ``"horizontal"``, ``"partition"``, ...
    subject : str
        What it was about: names of TEs, stages or kernels.
    accepted : bool
        Whether the thing considered was done.
    reason : str
        Why, with the figures that decided.
    """

    stage: str
    subject: str
    accepted: bool
    reason: str

    def __str__(self) -> str:
        return f"[{self.stage}] {'+' if self.accepted else '-'} {self.subject}: {self.reason}"


@dataclass(frozen=True)
class Barrier:
    """Why blocks, or the threads of a block, wait before a stage.

    Attributes
    ----------
    scope : str
        ``"grid"`` or ``"block"``; or ``"flags"``, where tiles wait for those that they need.
    before, after : str
        The stage that waits, and the one that it waits for.
    tensor : str
        What the one writes and the other reads; between steps of a loop, also what the one reads and the other
        overwrites.
    reason : str
        How their tiles depend on each other.
    runs : int
        How often a launch waits there.
    """

    scope: str
    before: str
    after: str
    tensor: str
    reason: str
    runs: int = 1

    def __str__(self) -> str:
        times = f"{self.runs} x " if self.runs > 1 else ""
        what = self.scope if self.scope == "flags" else f"{self.scope} barrier"
        return f"{times}{what} before {self.before}, after {self.after}, for {self.tensor}: {self.reason}"
