"""Stages joined where tiles can own units of an axis, such as channels, through all of them (paper §6.5).

A convolution within channels and the pooling of its result, the products that all need beside what they scale: each
pair of stages of which one reads the other is a candidate. It is legal where the rule ``channel_owned`` finds such an
axis and room on chip, and taken where one stage is predicted to take less time than two with the grid sync between.
Where the two are so near that the prices do not tell them apart, the join is offered nevertheless: what a grid sync
costs is only known of a whole kernel, in which :mod:`souffle.choice` compares the stage with its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from souffle.analysis import Analysis
from souffle.decision import Decision, Refused
from souffle.schedule.drafts import Drafts, Formed, FormedLoop
from souffle.schedule.placed_stages import PlacedStages
from souffle.schedule.stage import draft_stage

__all__ = ["join_owned"]

_LARGEST_STAGE = 64
"""TEs in a stage, beyond which scheduling it takes longer than it can be worth."""


def join_owned(
    stages: Sequence[Formed | FormedLoop], analysis: Analysis, drafts: Drafts
) -> tuple[list[Formed | FormedLoop], list[Decision]]:
    """Join dependent stages whose tiles can own what they compute.

    Parameters
    ----------
    stages : sequence of Formed or FormedLoop
        In topological order.
    analysis : Analysis
        Of their program.
    drafts : Drafts
        Where its scheduler predicts no times, nothing is joined.

    Returns
    -------
    stages : list of Formed or FormedLoop
    decisions : list of Decision
        One for each pair tried.
    """
    joiner = _Joiner(analysis, drafts)
    for stage in stages:
        joiner.add(stage)
    # Afterwards, each stage once: taken apart again, what is offered leaves all that is joined for certain.
    near = _NearlyAsFast(analysis, drafts)
    for stage in joiner.placed.stages:
        near.add(stage)
    return near.placed.stages, [*joiner.decisions, *near.decisions]


class _Joiner:
    """Joins what is predicted to take no longer together than apart, as chains grow."""

    def __init__(self, analysis: Analysis, drafts: Drafts) -> None:
        self.program = analysis.program
        self.drafts = drafts
        self.placed = PlacedStages(analysis.program)
        self.decisions: list[Decision] = []

    def add(self, stage: Formed | FormedLoop) -> None:
        """Place a stage, joined with the stage of its latest producer where that pays."""
        before = self.placed.before(stage)
        if before is not None and self.may_join(before):
            joined = self._join(before, stage)
            subject = f"{stage.draft.name} in the tiles of {before.draft.name}"
            if isinstance(joined, Refused):
                self.decisions.append(Decision("channels", subject, False, joined.reason))
            else:
                stage, reason = joined
                self.decisions.append(Decision("channels", subject, True, reason))
        self.placed.place(stage)

    def may_join(self, before: Formed) -> bool:
        """Whether a stage is one to join with."""
        return True

    def limit(self, apart: float) -> float:
        """What a stage may take where its parts take `apart`."""
        return apart

    def _join(self, before: Formed, stage: Formed) -> tuple[Formed, str] | Refused:
        members = (*before.tes, *stage.tes)
        between = self.placed.first_placed(self.placed.other_readers(before, members))
        if between is not None:
            return Refused(f"{between.name} between them reads the first")
        if len(members) > _LARGEST_STAGE:
            return Refused(f"they are {len(members)} TEs together, more than {_LARGEST_STAGE}")
        scheduler = self.drafts.scheduler
        prices = [scheduler.seconds(one.answer) for one in (before, stage)]
        if None in prices:
            return Refused("no product of the architecture is described, and whether it pays depends on times")
        apart = sum(prices)
        draft = draft_stage(members, self.program, owned=True)
        least = scheduler.least_seconds(draft.func)
        limit = self.limit(apart)
        if least > limit:
            return Refused(f"together they would take {least * 1e6:.1f} µs at least, apart {apart * 1e6:.1f} µs")
        joined = self.drafts.answered(draft, (before, stage))
        if joined.answer.schedule is None or not joined.answer.rowwise:
            return Refused(f"no tiles own what they compute: {joined.answer.reason}")
        together = scheduler.seconds(joined.answer)
        if together > limit:
            return Refused(f"together they would take {together * 1e6:.1f} µs, apart {apart * 1e6:.1f} µs")
        tiles = joined.answer.tiles
        return joined, f"{tiles} tiles take {together * 1e6:.1f} µs, apart they take {apart * 1e6:.1f} µs"


class _NearlyAsFast(_Joiner):
    """Joins what its price does not tell from its parts, each stage once."""

    def __init__(self, analysis: Analysis, drafts: Drafts) -> None:
        super().__init__(analysis, drafts)
        self._made: set[Formed] = set()

    def add(self, stage: Formed | FormedLoop) -> None:
        """As of all joiners; what is refused was refused before, or would be."""
        known = len(self.decisions)
        super().add(stage)
        self.decisions[known:] = [decision for decision in self.decisions[known:] if decision.accepted]
        if len(self.decisions) > known:
            self._made.add(self.placed.stages[-1])

    def may_join(self, before: Formed) -> bool:
        """Whether it is none of those joined here."""
        return before not in self._made

    def limit(self, apart: float) -> float:
        """As much longer as the model may err."""
        return apart * self.drafts.scheduler.error
