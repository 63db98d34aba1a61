"""On-chip tensor reuse between stages (paper §6.5): stages whose tiles match become one, and what passes between them
stays in shared memory or registers. A block barrier takes the place of a grid sync.
"""

from __future__ import annotations

from collections.abc import Sequence

from souffle.analysis import Analysis
from souffle.decision import Decision, Refused
from souffle.program import TE, ExternTE
from souffle.schedule.drafts import Drafts, Formed, FormedLoop
from souffle.schedule.placed_stages import PlacedStages

__all__ = ["join_rows"]

_READS_PER_BARRIER = 32 * 1024
"""Elements that one multiprocessor reads in the time of a grid sync: about 1.3 µs at about 100 GB/s. It decides where
no product of the architecture is described, so that no time can be predicted."""


def join_rows(
    stages: Sequence[Formed | FormedLoop], analysis: Analysis, drafts: Drafts
) -> tuple[list[Formed | FormedLoop], list[Decision]]:
    """Join dependent stages that can share tiles.

    In rounds, in each of which a stage is joined once at most: scheduling a stage takes time that grows with the cube
    of its TEs, so that stages of a chain grow together, and those of repeated layers stay equal and are scheduled once.

    Parameters
    ----------
    stages : sequence of Formed or FormedLoop
        In topological order.
    analysis : Analysis
        Of their program.
    drafts : Drafts
        Where its scheduler predicts no times, a join must not read more in one block than takes as long as a grid sync.

    Returns
    -------
    stages : list of Formed or FormedLoop
    decisions : list of Decision
        One for each pair tried.
    """
    tried: set[tuple[Formed, Formed]] = set()
    decisions: list[Decision] = []
    while True:
        joiner = _Joiner(analysis, drafts, tried)
        for stage in stages:
            joiner.add(stage)
        stages = joiner.placed.stages
        decisions += joiner.decisions
        if not joiner.made:
            return stages, decisions


class _Joiner:
    """One round; ``tried`` are the pairs of those before, ``made`` is what was joined in this one."""

    def __init__(self, analysis: Analysis, drafts: Drafts, tried: set[tuple[Formed, Formed]]) -> None:
        self.tried = tried
        self.made: set[Formed] = set()
        self.analysis = analysis
        self.drafts = drafts
        self.placed = PlacedStages(analysis.program)
        self.depth: dict[TE | ExternTE, int] = {}
        self.decisions: list[Decision] = []

    def add(self, stage: Formed | FormedLoop) -> None:
        """Place a stage, joined with the stage of its latest producer where that pays."""
        before = self.placed.before(stage)
        if before is not None and before not in self.made and (before, stage) not in self.tried:
            stage = self._joined(before, stage)
        self.depth |= dict.fromkeys(stage.tes, self._depth(stage.tes))
        self.placed.place(stage)

    def _joined(self, before: Formed, stage: Formed) -> Formed:
        """The two as one stage, or the second alone."""
        self.tried.add((before, stage))
        joined = self._join(before, stage)
        accepted = isinstance(joined, Formed)
        subject = f"{stage.draft.name} on the tiles of {before.draft.name}"
        reason = "what passes between them stays on chip" if accepted else joined.reason
        self.decisions.append(Decision("reuse", subject, accepted, reason))
        if not accepted:
            return stage
        self.made.add(joined)
        return joined

    def _join(self, before: Formed, stage: Formed) -> Formed | Refused:
        members = (*before.tes, *stage.tes)
        heavy = next((m for m in members if m.is_reduction and self.analysis.is_compute_intensive(m)), None)
        if heavy is not None:
            # A row at a time, every block would read the whole other operand again.
            return Refused(f"{heavy.name} is compute-intensive and tiled on its own")
        readers = self.placed.other_readers(before, members)
        between = self.placed.first_placed(readers)
        if between is not None:
            return Refused(f"{between.name} between them reads the first")
        if readers and self._depth(members) > self._depth(before.tes):
            return Refused(f"{readers[0].name} reads the first too and would wait for more grid syncs")
        joined = self.drafts.formed(members, (before, stage))
        if joined.answer.schedule is None or not joined.answer.rowwise:
            return Refused(f"their tiles do not match: {joined.answer.reason}")
        seconds = self.drafts.scheduler.seconds
        together = seconds(joined.answer)
        if together is not None:
            apart = seconds(before.answer) + seconds(stage.answer)
            if together > apart:
                return Refused(f"together they would take {together * 1e6:.1f} µs, apart {apart * 1e6:.1f} µs")
            return joined
        reads = sum(_points(member) for member in members) // joined.answer.tiles
        if reads > _READS_PER_BARRIER:
            return Refused(
                f"a block would read {reads} elements alone, more than the {_READS_PER_BARRIER} that take as long as a "
                "grid sync"
            )
        return joined

    def _depth(self, tes: Sequence[TE | ExternTE]) -> int:
        """Stages on the longest path to these TEs."""
        return max((self.depth[p] + 1 for p in self.placed.producers(tes)), default=0)


def _points(te_: TE) -> int:
    points = te_.outputs[0].size
    for extent in te_.reduction_shape:
        points *= extent
    return points
