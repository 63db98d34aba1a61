"""Stages on trial: groups of TEs and what the scheduler answers about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tvm import tirx

from souffle.program import TE, ExternTE, Loop, TEProgram
from souffle.schedule.lower import DeviceFunction
from souffle.schedule.stage import Stage, StageDraft, draft_stage
from souffle.wording import counted

__all__ = ["Answer", "Drafts", "Formed", "FormedLoop", "Scheduler", "stands_alone"]


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
    functions : tuple of DeviceFunction
        What the schedule was lowered to; none where the target has no device functions.
    """

    schedule: object | None
    rule: str
    rank: int
    rowwise: bool
    tiles: int
    reason: str
    functions: tuple[DeviceFunction, ...] = ()

    @property
    def summary(self) -> str:
        """The schedule in a few words, and why no better rule applies."""
        refused = f"; {self.reason}" if self.reason else ""
        return f"rule {self.rule}, {counted(self.tiles, 'tile')}{refused}"


class Scheduler(Protocol):
    """Schedules stages for one target."""

    error: float
    """The factor by which two predicted times must differ to be told apart."""

    def __call__(self, func: tirx.PrimFunc) -> Answer:
        """The answer about a stage that is one TensorIR function."""
        ...

    def least_seconds(self, func: tirx.PrimFunc) -> float | None:
        """What a stage takes in a kernel at least, known before it is scheduled; ``None`` if unknown."""
        ...

    def seconds(self, answer: Answer) -> float | None:
        """What a stage that has a schedule takes in a kernel, with the grid sync before it; ``None`` if unknown."""
        ...


@dataclass(frozen=True, eq=False)
class Formed:
    """A stage being formed, with what the scheduler said about it.

    ``parts`` are the stages that it was joined of to keep what passes between them on chip; none where TEs became it.
    """

    tes: tuple[TE | ExternTE, ...]
    draft: StageDraft
    answer: Answer
    parts: tuple[Formed, ...] = ()

    def stage(self) -> Stage:
        """As a stage, with its parts as stages."""
        parts = tuple(part.stage() for part in self.parts)
        return Stage(self.draft, self.answer.schedule, self.answer.functions, parts=parts)


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

    def formed(self, tes: Sequence[TE | ExternTE], parts: Sequence[Formed] = (), *, owned: bool = False) -> Formed:
        """Some TEs as one stage; its answer may hold no schedule.

        Parameters
        ----------
        tes : sequence of TE or ExternTE
        parts : sequence of Formed
            Stages of these TEs that the stage is to take the place of. Whether it does is decided again when all stages
            of the program are known, and their resources with them.
        owned : bool
            See :func:`souffle.schedule.stage.draft_stage`.
        """
        return self.answered(draft_stage(tes, self.program, owned=owned), parts)

    def answered(self, draft: StageDraft, parts: Sequence[Formed] = ()) -> Formed:
        """A draft with what the scheduler says of it; `parts` as for :meth:`formed`."""
        if draft.digest not in self._answers:
            self._answers[draft.digest] = self.scheduler(draft.func)
        return Formed(draft.tes, draft, self._answers[draft.digest], tuple(parts))
