"""Chains of stages from one product to the next that become one stage (paper §6.5), such as attention.

Between two products that each have tiles of their own lie stages over the rows of the first. Where one schedule
computes the whole chain a tile of rows at a time (the rule ``chained_products``), what passes between them is in no
global memory, and the grid syncs between them go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from souffle.analysis import Analysis
from souffle.decision import Decision, Refused
from souffle.program import TE, ExternTE
from souffle.schedule.drafts import Drafts, Formed, FormedLoop, stands_alone

__all__ = ["join_chains"]

_LONGEST = 6
"""Stages of a chain that is tried: two products, and four between them, which would have been one if they could."""


def join_chains(
    stages: Sequence[Formed | FormedLoop], analysis: Analysis, drafts: Drafts
) -> tuple[list[Formed | FormedLoop], list[Decision]]:
    """Join chains of stages that begin and end with a product.

    A chain ends in a product and goes back through stages that nothing else reads, to another product.

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
        One for each chain tried.
    """
    joiner = _Chains(list(stages), analysis, drafts)
    for stage in stages:
        if joiner.is_product(stage):
            joiner.end_at(stage)
    return joiner.stages, joiner.decisions


class _Chains:
    def __init__(self, stages: list[Formed | FormedLoop], analysis: Analysis, drafts: Drafts) -> None:
        self.stages, self.analysis, self.drafts = stages, analysis, drafts
        self.program = analysis.program
        self.decisions: list[Decision] = []
        self._home = {member: stage for stage in stages for member in stage.tes}

    def is_product(self, stage: Formed | FormedLoop) -> bool:
        """Whether a stage has a reduction that is compute-intensive."""
        if stands_alone(stage):
            return False
        return any(member.is_reduction and self.analysis.is_compute_intensive(member) for member in stage.tes)

    def end_at(self, last: Formed) -> None:
        """Join the first chain to `last` that pays."""
        for chain in self._chains((last,)):
            joined = self._joined(chain)
            accepted = isinstance(joined, Formed)
            subject = f"{last.draft.name} with the rows of {chain[0].draft.name}"
            reason = joined.answer.summary if accepted else joined.reason
            self.decisions.append(Decision("attention", subject, accepted, reason))
            if accepted:
                self._place(chain, joined)
                return

    def _chains(self, chain: tuple[Formed, ...]) -> Iterator[tuple[Formed, ...]]:
        """The chains that end in `chain`, in the order of the program, shorter ones first."""
        for stage in self._feeding(chain):
            longer = (stage, *chain)
            if self.is_product(stage):
                yield longer
            elif len(longer) < _LONGEST:
                yield from self._chains(longer)

    def _feeding(self, chain: Sequence[Formed]) -> list[Formed]:
        """The stages that a chain reads, and nothing else does."""
        members = {member for stage in chain for member in stage.tes}
        producers = [
            self.program.producers[tensor]
            for member in members
            for tensor in member.inputs
            if tensor in self.program.producers
        ]
        homes = {self._home[producer] for producer in producers if producer not in members}
        feeding = [stage for stage in homes if not stands_alone(stage) and self._only_for(stage, members)]
        return sorted(feeding, key=self.stages.index, reverse=True)

    def _only_for(self, stage: Formed, members: set[TE | ExternTE]) -> bool:
        outputs = [tensor for member in stage.tes for tensor in member.outputs]
        readers = (reader for tensor in outputs for reader in self.program.consumers[tensor])
        kept = any(tensor in self.program.outputs for tensor in outputs)
        return not kept and all(reader in members or reader in stage.tes for reader in readers)

    def _joined(self, chain: Sequence[Formed]) -> Formed | Refused:
        ordered = sorted(chain, key=self.stages.index)
        joined = self.drafts.formed([member for stage in ordered for member in stage.tes], ordered)
        if joined.answer.schedule is None or not joined.answer.rowwise:
            return Refused(f"no schedule keeps its rows: {joined.answer.reason}")
        seconds = self.drafts.scheduler.seconds
        together = seconds(joined.answer)
        if together is None:
            return Refused("no product of the architecture is described, so that no time can be predicted")
        apart = sum(seconds(stage.answer) for stage in chain)
        if together > apart:
            return Refused(f"together they would take {together * 1e6:.1f} µs, apart {apart * 1e6:.1f} µs")
        return joined

    def _place(self, chain: Sequence[Formed], joined: Formed) -> None:
        """The joined stage where the last of the chain was, when all that it reads is defined."""
        last = max(self.stages.index(stage) for stage in chain)
        self.stages[last] = joined
        self.stages = [stage for stage in self.stages if stage not in chain]
        self._home |= dict.fromkeys(joined.tes, joined)
