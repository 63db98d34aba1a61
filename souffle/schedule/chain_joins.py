"""Chains of stages from one product to the next that become one stage (paper §6.5), such as attention.

Between two products that each have tiles of their own lie stages over the rows of the first. Where one schedule
computes the whole chain a tile of rows at a time (the rule ``chained_products``), what passes between them is in no
global memory, and the grid syncs between them go.
"""

from __future__ import annotations

from collections.abc import Sequence

from souffle.analysis import Analysis
from souffle.decision import Decision, Refused
from souffle.program import Tensor
from souffle.schedule.chains import ChainSearch
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
        self.decisions: list[Decision] = []

    def is_product(self, stage: Formed | FormedLoop) -> bool:
        """Whether a stage has a reduction that is compute-intensive."""
        if stands_alone(stage):
            return False
        return any(member.is_reduction and self.analysis.is_compute_intensive(member) for member in stage.tes)

    def end_at(self, last: Formed) -> None:
        """Join the first chain to `last` that pays."""
        outputs = self.analysis.program.outputs
        search = ChainSearch(
            self.stages, _tensors, outputs, lambda stage: not stands_alone(stage), self.is_product, _LONGEST
        )
        for chain in search.to(last):
            joined = self._joined(chain)
            accepted = isinstance(joined, Formed)
            subject = f"{last.draft.name} with the rows of {chain[0].draft.name}"
            reason = joined.answer.summary if accepted else joined.reason
            self.decisions.append(Decision("attention", subject, accepted, reason))
            if accepted:
                # The joined stage stands where the last was, when all that it reads is defined.
                self.stages = [joined if stage is last else stage for stage in self.stages]
                self.stages = [stage for stage in self.stages if stage not in chain]
                return

    def _joined(self, chain: Sequence[Formed]) -> Formed | Refused:
        joined = self.drafts.formed([member for stage in chain for member in stage.tes], chain)
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


def _tensors(stage: Formed | FormedLoop) -> tuple[list[Tensor], list[Tensor]]:
    return [t for member in stage.tes for t in member.inputs], [t for member in stage.tes for t in member.outputs]
