"""Decisions as data: every choice of the compiler with its reason (what ``explain`` shows)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Decision"]


@dataclass(frozen=True)
class Decision:
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
