"""The stages of a pattern as one stage, so that one kernel without a grid barrier computes it (003 §5, 000 §4).

Stages of a pattern that depend on each other are joined into one where a schedule exists that keeps what passes between
them in a block. Whether it pays is decided when all stages of the network are known: a joined stage knows its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from souffle.analysis import Analysis
from souffle.decision import Decision
from souffle.program import Tensor
from souffle.schedule.drafts import Drafts, Formed, FormedLoop, stands_alone

__all__ = ["compose"]

_MOST = 64
"""TEs of a stage that is tried: scheduling takes time that grows with the cube of them."""


def compose(
    stages: Sequence[Formed | FormedLoop], analysis: Analysis, drafts: Drafts
) -> tuple[list[Formed | FormedLoop], list[Decision]]:
    """Stages of one pattern, those that depend on each other as one where the scheduler has a schedule for them.

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
        One for each set of stages that depend on each other.
    """
    found: list[Formed | FormedLoop] = []
    decisions: list[Decision] = []
    position = {te_: number for number, te_ in enumerate(analysis.program.tes)}
    for part in _connected(stages):
        if len(part) == 1 or any(stands_alone(stage) for stage in part):
            found += part
            continue
        names = ", ".join(stage.draft.name for stage in part)
        count = sum(len(stage.tes) for stage in part)
        if count > _MOST:
            reason = f"it would have {count} TEs, and at most {_MOST} are tried as one stage"
            decisions.append(Decision("fusion", f"one stage of {names}", False, reason))
            found += part
            continue
        tes = sorted((te_ for stage in part for te_ in stage.tes), key=position.__getitem__)
        whole = drafts.formed(tes, part)
        accepted = whole.answer.schedule is not None
        decisions.append(Decision("fusion", f"one stage of {names}", accepted, whole.answer.summary))
        found += [whole] if accepted else part
    return found, decisions


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
