"""Stages on trial: groups of TEs and what the scheduler answers about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from souffle.program import TE, ExternTE, Loop, TEProgram
from souffle.schedule.stage import StageDraft, draft_stage
from souffle.tvm_compat import structural_digest

__all__ = ["Answer", "Drafts", "Formed", "FormedLoop", "Scheduler", "cached_scheduler", "stands_alone"]


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


def cached_scheduler(scheduler: Scheduler) -> Scheduler:
    """`scheduler`, asked once for each structure, whatever drafts ask it."""
    answers: dict[str, Answer] = {}

    def answer(func: tirx.PrimFunc) -> Answer:
        digest = structural_digest(func)
        if digest not in answers:
            answers[digest] = scheduler(func)
        return answers[digest]

    return answer


@dataclass(frozen=True, eq=False)
class Formed:
    """A stage being formed, with what the scheduler said about it."""

    tes: tuple[TE | ExternTE, ...]
    draft: StageDraft
    answer: Answer


@dataclass(frozen=True, eq=False)
class FormedLoop:
    """A loop whose body is formed stages."""

    loop: Loop
    stages: tuple[Formed, ...]

    @property
    def tes(self) -> tuple[Loop]:
        """The loop itself, which no TE joins."""
        return (self.loop,)


def stands_alone(formed: Formed | FormedLoop) -> bool:
    """Whether nothing joins it: a loop, or an operator that is no TE."""
    return isinstance(formed.tes[0], (ExternTE, Loop))


class Drafts:
    """Drafts stages and asks the scheduler about each distinct one once."""

    def __init__(self, program: TEProgram, scheduler: Scheduler, answers: dict[str, Answer] | None = None) -> None:
        self.program = program
        self.scheduler = scheduler
        self._answers = {} if answers is None else answers

    def of(self, program: TEProgram) -> Drafts:
        """For another program, with what the scheduler has answered already."""
        return Drafts(program, self.scheduler, self._answers)

    def formed(self, tes: Sequence[TE | ExternTE]) -> Formed:
        """Some TEs as one stage; its answer may hold no schedule."""
        draft = draft_stage(tes, self.program)
        if draft.digest not in self._answers:
            self._answers[draft.digest] = self.scheduler(draft.func)
        return Formed(tuple(tes), draft, self._answers[draft.digest])
