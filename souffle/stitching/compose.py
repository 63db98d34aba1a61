"""The stages of a pattern as one stage, so that one kernel without a grid barrier computes it (003 §5, 000 §4).

TEs of a pattern that depend on each other are one stage where a schedule exists that keeps what passes between them in
a block. Of several it is the one that is predicted to take least:

    a rule's, as of any stage
    a rule's for tiles that own what they compute, from the first TE to the last    (``schedule/owned_tiles.py``)
    a template's                                                                    (``template_choice.py``)

Whether it pays is decided when all stages of the network are known: a joined stage knows its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from souffle.analysis import Analysis
from souffle.cost.device import CostDevice
from souffle.decision import Decision, Refused
from souffle.program import TE, Tensor, TEProgram
from souffle.schedule.drafts import Answer, Drafts, Formed, FormedLoop, stands_alone
from souffle.stitching.template import TemplateError
from souffle.stitching.template_choice import Stitcher
from souffle.wording import counted

__all__ = ["Composer"]

_MOST = 64
"""TEs of a stage that is tried: scheduling takes time that grows with the cube of them."""

_TEMPLATE = "template"
"""In the place of a rule's name."""


class Composer:
    """Composes the stages of patterns, of which equal ones are searched once.

    Parameters
    ----------
    device : CostDevice
    stitches : bool
        Whether threads of a block may give each other results: without, a rule's schedule is all that is tried.
    owns : bool
        Whether tiles may own what they compute.
    """

    def __init__(self, device: CostDevice, *, stitches: bool, owns: bool) -> None:
        self.stitches, self.owns = stitches, owns
        self.stitcher = Stitcher(device)

    def __call__(
        self, stages: Sequence[Formed | FormedLoop], analysis: Analysis, drafts: Drafts
    ) -> tuple[list[Formed | FormedLoop], list[Decision]]:
        """Stages of one pattern, those that depend on each other as one where there is a schedule for them.

        Parameters
        ----------
        stages : sequence of Formed or FormedLoop
            In topological order.
        analysis : Analysis
            Of their program.
        drafts : Drafts

        Returns
        -------
        stages : list of Formed or FormedLoop
        decisions : list of Decision
            One for each set of stages that depend on each other, and of a template its own.
        """
        found: list[Formed | FormedLoop] = []
        decisions: list[Decision] = []
        position = {te_: number for number, te_ in enumerate(analysis.program.tes)}
        for part in _connected(stages):
            if any(stands_alone(stage) for stage in part) or not _is_stitched(part, analysis.program):
                found += part
                continue
            names = ", ".join(stage.draft.name for stage in part)
            tes = sorted((te_ for stage in part for te_ in stage.tes), key=position.__getitem__)
            whole = self.whole(tes, part, analysis.program, drafts, decisions)
            accepted = isinstance(whole, Formed)
            reason = _told(whole.answer, drafts) if accepted else whole.reason
            subject = f"one stage of {names}" if len(part) > 1 else f"the stage of {names}"
            decisions.append(Decision("fusion", subject, accepted, reason))
            found += [whole] if accepted else part
        return found, decisions

    def whole(
        self,
        tes: Sequence[TE],
        parts: Sequence[Formed],
        program: TEProgram,
        drafts: Drafts,
        decisions: list[Decision],
    ) -> Formed | Refused:
        """Some TEs as one stage, by the schedule that is predicted to take least."""
        if len(tes) > _MOST:
            return Refused(f"it would have {len(tes)} TEs, and at most {_MOST} are tried as one stage")
        before = tuple(parts) if len(parts) > 1 else ()
        ways = [drafts.formed(tes, before)]
        reasons = [ways[0].answer.summary]
        templated: Answer | None = None
        if self.stitches:
            ways += [drafts.formed(tes, before, owned=True)] if self.owns else []
            made = self.by_template(tes, program)
            if isinstance(made, Refused):
                reasons.append(made.reason)
            else:
                templated, told = made
                ways.append(replace(ways[0], answer=templated))
        possible = [way for way in ways if way.answer.schedule is not None]
        if not possible:
            return Refused("; ".join(reasons))
        best = min(possible, key=lambda way: drafts.scheduler.seconds(way.answer))
        if templated is not None:
            decisions += told if best.answer is templated else [_beaten(told[0], best.answer, drafts)]
        return best

    def by_template(self, tes: Sequence[TE], program: TEProgram) -> tuple[Answer, tuple[Decision, ...]] | Refused:
        """The best template of some TEs as a scheduler's answer, with what is to be said of it."""
        try:
            made = self.stitcher(tes, program)
        except TemplateError as error:
            return Refused(f"{_TEMPLATE}: {error}")
        schedule = made.stage.schedule
        return Answer(schedule, _TEMPLATE, 0, False, schedule.tiles, "", made.stage.functions), made.decisions


def _told(answer: Answer, drafts: Drafts) -> str:
    """A schedule, and what it is predicted to take."""
    seconds = drafts.scheduler.seconds(answer)
    return f"rule {answer.rule}, {counted(answer.tiles, 'tile')}, {seconds * 1e6:.2f} us predicted"


def _beaten(template: Decision, best: Answer, drafts: Drafts) -> Decision:
    """That a template was not taken."""
    return template._replace(accepted=False, reason=f"{template.reason}; taken: {_told(best, drafts)}")


def _is_stitched(part: Sequence[Formed], program: TEProgram) -> bool:
    """Whether something passes between the threads of a block: several stages, or a reduction that others read."""
    if len(part) > 1:
        return True
    inside = set(part[0].tes)
    return any(
        te_.is_reduction and any(reader in inside for tensor in te_.outputs for reader in program.consumers[tensor])
        for te_ in part[0].tes
    )


def _connected(stages: Sequence[Formed | FormedLoop]) -> list[list[Formed | FormedLoop]]:
    """Stages in the sets that depend on each other, in the order of their first ones."""
    owner: dict[Tensor, int] = {}
    sets: dict[int, list[Formed | FormedLoop]] = {}
    for number, stage in enumerate(stages):
        read = [tensor for te_ in stage.tes for tensor in te_.inputs]
        joined = sorted({owner[tensor] for tensor in read if tensor in owner})
        first = joined[0] if joined else number
        merged = [one for other in joined for one in sets.pop(other)]
        sets[first] = [*merged, stage]
        for tensor, other in owner.items():
            owner[tensor] = first if other in joined else other
        owner |= {tensor: first for te_ in stage.tes for tensor in te_.outputs}
    return [sets[first] for first in sorted(sets)]
