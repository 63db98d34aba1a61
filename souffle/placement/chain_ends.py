"""Products that end a chain which one stage computes are not split (paper §6.5).

Sharing a long sum among blocks pays by itself where few tiles have it. Attention's second product sums over all keys,
and in two phases it would be no end of a chain any more, whose rows could stay on chip
(:mod:`souffle.schedule.chain_joins`); so the chain is tried first, and compared with its parts and the split.
"""

from __future__ import annotations

from math import inf

from souffle.analysis.intensity import Arithmetic
from souffle.decision import Refused
from souffle.placement.stage_trial import StageTrials
from souffle.placement.two_phase import Split
from souffle.program import TE, FusedTE, Item, TEProgram, parts_of
from souffle.schedule.chains import ChainSearch

__all__ = ["ChainEnds"]

_LONGEST = 12
"""Items of a chain: two products, and what a softmax behind a mask consists of between them."""


class ChainEnds:
    """Says which products to leave whole since they end a chain.

    Parameters
    ----------
    program : TEProgram
        Before any of its products is split.
    trials : StageTrials
    """

    def __init__(self, program: TEProgram, trials: StageTrials) -> None:
        self.trials = trials
        self._search = ChainSearch(
            program.tes, lambda item: (item.inputs, item.outputs), program.outputs, _is_te, _is_product, _LONGEST
        )

    def refusal(self, last: TE | FusedTE, split: Split) -> Refused | None:
        """Why a product is not to be split as it would be by itself; ``None`` if it is."""
        if not _is_product(last):
            return None
        for chain in self._search.to(last):
            together = self._seconds(chain)
            if together is None:
                continue
            apart = split.seconds + self._apart(chain[:-1])
            if together <= apart:
                return Refused(
                    f"with the rows of {chain[0].name} as one stage it takes {together * 1e6:.1f} µs, apart and in "
                    f"{split.parts} parts {apart * 1e6:.1f} µs"
                )
        return None

    def _apart(self, chain: tuple[TE | FusedTE, ...]) -> float:
        """What the product that a chain begins with takes, and what stands behind it: as one stage where it can be."""
        groups = [chain[:1], chain[1:]] if len(chain) > 1 else [chain]
        seconds = 0.0
        for group in groups:
            together = self._seconds(group) if len(group) > 1 else None
            if together is None:
                stages = self.trials.stages(group)
                together = inf if isinstance(stages, Refused) else sum(self.trials.seconds(stages))
            seconds += together
        return seconds

    def _seconds(self, chain: tuple[TE | FusedTE, ...]) -> float | None:
        """What a chain takes as one stage that keeps its rows, if it is one: by the price that a split was found by,
        to which what comes from memory is far."""
        answer, draft = self.trials.answer(*chain, needed=chain[-1].outputs)
        if answer.schedule is None or not answer.rowwise:
            return None
        return sum(self.trials.seconds([self.trials.lowered(answer, draft)]))


def _is_te(item: Item) -> bool:
    return isinstance(item, (TE, FusedTE))


def _is_product(item: Item) -> bool:
    return _is_te(item) and any(part.is_reduction and Arithmetic(part).compute_intensive for part in parts_of(item))
