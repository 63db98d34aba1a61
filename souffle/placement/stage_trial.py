"""Stages on trial: what some TEs would take as stages of one kernel, before it is decided whether they become that.

All of it is predicted from the schedules that the rules choose, in a kernel of which two blocks share a multiprocessor:
merged kernels take the registers of their most demanding stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from souffle.cost.counting import Work
from souffle.cost.device import CostDevice
from souffle.cost.predict import Terms, predict_work, resources_in_kernel
from souffle.cost.work import work_of
from souffle.decision import Refused
from souffle.program import TE, FusedTE, Tensor, TEProgram, parts_of
from souffle.schedule.drafts import Answer, Scheduler
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import StageDraft, draft_stage

__all__ = ["StageTrial", "StageTrials", "reduction_of", "reductions_of_groups", "seconds_of"]


@dataclass(frozen=True)
class StageTrial:
    """A lowered stage: the work of each of its functions with its tiles, and what its blocks ask for.

    ``far`` counts the bytes of tensors that no stage has brought into the cache, ``every`` those of all its tensors.
    """

    works: tuple[tuple[Work, int], ...]
    resources: StageResources
    far: int
    every: int


class StageTrials:
    """Schedules, lowers and predicts stages of a program's items.

    Parameters
    ----------
    program : TEProgram
        What it is given is far, in memory; the rest was written by stages before. Its operators say which reductions
        share rows.
    device : CostDevice or None
        Needed for predictions.
    scheduler : Scheduler
    tuned : callable, optional
        From a stage's draft and what the scheduler says of it to what it will have in the end, such as from a log.
    """

    def __init__(
        self,
        program: TEProgram,
        device: CostDevice | None,
        scheduler: Scheduler,
        tuned: Callable[[StageDraft, Answer], Answer] = lambda draft, answer: answer,
    ) -> None:
        self.program = program
        self.device = device
        self._scheduler, self._tuned = scheduler, tuned
        self._of_group = reductions_of_groups(program)
        self._far = {*program.inputs, *program.constants}
        self._known: dict[tuple[str, int], StageTrial] = {}

    def add_constants(self, tensors: Sequence[Tensor]) -> None:
        """Constants that the program would have, besides its own."""
        self._far.update(tensors)

    def shares_rows(self, item: TE | FusedTE) -> bool:
        """Whether its operator has other reductions, as a softmax has, which one stage computes with it."""
        return any(part.is_reduction and self._of_group[part.origin.group] > 1 for part in parts_of(item))

    def answer(
        self, *items: TE | FusedTE, needed: Sequence[Tensor] | None = None, owned: bool = False
    ) -> tuple[Answer, StageDraft]:
        """What the scheduler says of some items as one stage, and the stage's draft.

        Parameters
        ----------
        items : TE or FusedTE
            In topological order.
        needed : sequence of Tensor, optional
            What others need of what they define; without, all that they define for others.
        owned : bool
            See :func:`souffle.schedule.stage.draft_stage`.
        """
        draft = self.draft(*items, needed=needed, owned=owned)
        return self._tuned(draft, self._scheduler(draft.func)), draft

    def least_seconds(self, *items: TE | FusedTE, needed: Sequence[Tensor] | None = None, owned: bool = False) -> float:
        """What some items take as one stage at least, before it is scheduled; parameters as for :meth:`answer`."""
        return self._scheduler.least_seconds(self.draft(*items, needed=needed, owned=owned).func)

    def draft(self, *items: TE | FusedTE, needed: Sequence[Tensor] | None = None, owned: bool = False) -> StageDraft:
        """Some items as one stage; parameters as for :meth:`answer`."""
        parts = tuple(part for item in items for part in parts_of(item))
        defined = {tensor for part in parts for tensor in part.outputs}
        inputs = tuple(dict.fromkeys(t for item in items for t in item.inputs if t not in defined))
        outputs = tuple(t for item in items for t in item.outputs) if needed is None else tuple(needed)
        names = [tuple(tensor.name for tensor in tensors) for tensors in (inputs, outputs)]
        program = TEProgram(inputs, outputs, parts, {}, *names, products=self.program.products)
        return draft_stage(parts, program, owned=owned)

    def price(self, answer: Answer) -> float:
        """Seconds of a stage that has a schedule, in a kernel, with the grid sync before it."""
        return self._scheduler.seconds(answer)

    def stages(self, items: Sequence[TE | FusedTE]) -> list[StageTrial] | Refused:
        """Each item as a stage of its own."""
        stages = []
        for item in items:
            answer, draft = self.answer(item)
            if answer.schedule is None:
                return Refused(f"{item.name} is no stage of its own: {answer.reason}")
            stages.append(self.lowered(answer, draft))
        return stages

    def lowered(self, answer: Answer, draft: StageDraft) -> StageTrial:
        """A stage that has a schedule, lowered."""
        far = sum(tensor.nbytes for tensor in draft.inputs if tensor in self._far)
        if (draft.digest, far) not in self._known:
            functions = answer.functions
            resources = resources_in_kernel(functions)
            every = sum(tensor.nbytes for tensor in (*draft.inputs, *draft.outputs))
            works = tuple((work_of(function), function.tiles) for function in functions)
            self._known[draft.digest, far] = StageTrial(works, resources, far, every)
        return self._known[draft.digest, far]

    def predicted(self, stages: Sequence[StageTrial]) -> list[Terms]:
        """Of stages that follow each other in one kernel, a grid sync before each."""
        kernel = StageResources.together(stage.resources for stage in stages)
        found = []
        for stage in stages:
            start = self.device.shared_sync_seconds
            for work, tiles in stage.works:
                # What comes from memory counts, if anything does; the rest was written by stages before.
                moved, warm = (stage.far, False) if stage.far else (stage.every, True)
                found.append(predict_work(work, tiles, kernel, self.device, moved, start, warm=warm))
                start = 0.0
        return found

    def seconds(self, stages: Sequence[StageTrial]) -> list[float]:
        """Of each of some stages that follow each other in one kernel, with the grid sync before it."""
        terms = iter(self.predicted(stages))
        return [sum(seconds_of(next(terms)) for _ in stage.works) for stage in stages]


def seconds_of(terms: Terms) -> float:
    """What is predicted of one function."""
    return terms.start + max(terms.multiprocessors, terms.l2, terms.memory)


def reduction_of(item: TE | FusedTE) -> TE:
    """The part of an item that is its reduction."""
    return next(part for part in parts_of(item) if part.is_reduction)


def reductions_of_groups(program: TEProgram) -> Counter[str]:
    """How many reductions each fused operator has, without those that are computed in the tiles of another's."""
    parts = (part for item in program.tes for part in parts_of(item) if isinstance(part, TE))
    return Counter(part.origin.group for part in parts if part.is_reduction and part.placement is None)
