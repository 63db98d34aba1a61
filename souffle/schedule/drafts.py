"""Stages on trial: groups of TEs and what the scheduler answers about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from souffle.program import TE, ExternTE, TEProgram
from souffle.schedule.stage import StageDraft, draft_stage

__all__ = ["Answer", "Drafts", "Formed", "Scheduler"]


@dataclass(frozen=True)
class Answer:
    """What a scheduler says about a draft.

    Attributes
    ----------
    schedule : object or None
        ``None`` where no schedule without a grid-wide barrier exists.
    rule : str
        The rule that made it.
    rank : int
        Position of the rule in the order of preference; smaller is better.
    rowwise : bool
        Whether dependent reductions of the draft stay within a block.
    tiles : int
        Blocks that share the work.
    reason : str
        Why there is none, or why better rules refused.
    """

    schedule: object | None
    rule: str
    rank: int
    rowwise: bool
    tiles: int
    reason: str

    @property
    def summary(self) -> str:
        """The schedule in a few words, and why no better rule applies."""
        refused = f"; {self.reason}" if self.reason else ""
        return f"rule {self.rule}, {self.tiles} tile{'s' if self.tiles != 1 else ''}{refused}"


Scheduler = Callable[[tirx.PrimFunc], Answer]


@dataclass(frozen=True, eq=False)
class Formed:
    """A stage being formed, with what the scheduler said about it."""

    tes: tuple[TE | ExternTE, ...]
    draft: StageDraft
    answer: Answer


class Drafts:
    """Drafts stages and asks the scheduler about each distinct one once."""

    def __init__(self, program: TEProgram, scheduler: Scheduler) -> None:
        self.program = program
        self.scheduler = scheduler
        self._answers: dict[str, Answer] = {}

    def formed(self, tes: Sequence[TE | ExternTE]) -> Formed:
        """Some TEs as one stage; its answer may hold no schedule."""
        draft = draft_stage(tes, self.program)
        if draft.digest not in self._answers:
            self._answers[draft.digest] = self.scheduler(draft.func)
        return Formed(tuple(tes), draft, self._answers[draft.digest])
