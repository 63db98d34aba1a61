"""A product and the functions of elements that read its columns in equal groups, as one stage of the host.

Such are the gates of a recurrent cell. Whether a schedule computes them together is asked of the schedules for the CPU;
what that looks like stands in :mod:`souffle.schedule.cpu.column_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx

from souffle.analysis import Analysis
from souffle.decision import Decision
from souffle.schedule.drafts import Drafts, Formed, FormedLoop, stands_alone

__all__ = ["ColumnJoins"]

_MOST = 4
"""Stages that read one product and are tried together with it."""


class ColumnJoins:
    """Joins stages (:data:`souffle.schedule.form_stages.Join`).

    Parameters
    ----------
    takes : callable
        Whether a schedule computes a function's product and all that follows it together, by the function and the
        positions of parameters that are constants.
    """

    def __init__(self, takes: Callable[[tirx.PrimFunc, Sequence[int]], bool]) -> None:
        self._takes = takes
        self._known: dict[tuple[str, tuple[int, ...]], bool] = {}

    def __call__(
        self, stages: Sequence[Formed | FormedLoop], analysis: Analysis, drafts: Drafts
    ) -> tuple[list[Formed | FormedLoop], list[Decision]]:
        """The stages in topological order, and a decision for each group that was tried."""
        decisions: list[Decision] = []
        found: list[Formed | FormedLoop | None] = list(stages)
        place = {te_: number for number, stage in enumerate(stages) for te_ in stage.tes}
        for number, stage in enumerate(stages):
            members = [] if stands_alone(stage) else self._readers(number, stages, place, drafts)
            if not members or any(found[member] is not stages[member] for member in (number, *members)):
                continue
            joined = self._joined([stage, *(stages[member] for member in members)], drafts, decisions)
            if joined is not None:
                # All that they read is there where the last of them stood.
                for member in (number, *members):
                    found[member] = None
                found[members[-1]] = joined
        return [stage for stage in found if stage is not None], decisions

    def _readers(
        self, number: int, stages: Sequence[Formed | FormedLoop], place: Mapping[Any, int], drafts: Drafts
    ) -> list[int]:
        """The stages that read a product and might be computed behind it, if these are all that do."""
        product, program = stages[number], drafts.program
        if len(product.draft.outputs) != 1 or sum(te_.is_reduction for te_ in product.tes) != 1:
            return []
        result = product.draft.outputs[0]
        members = sorted({place[te_] for te_ in program.consumers[result]})
        if not members or len(members) > _MOST or result in program.outputs:
            return []
        readers = [stages[member] for member in members]
        if any(stands_alone(stage) or any(te_.is_reduction for te_ in stage.tes) for stage in readers):
            return []
        sizes = {tensor.size for stage in readers for tensor in stage.draft.outputs}
        if 0 in sizes or any(result.size % min(sizes) or size % min(sizes) or size >= result.size for size in sizes):
            return []
        # What stands between them must need none of them.
        between = set(range(number, members[-1])) - {number, *members}
        outputs = [tensor for stage in readers for tensor in stage.draft.outputs]
        needed = {place[te_] for tensor in outputs for te_ in program.consumers[tensor]}
        return [] if needed & between else members

    def _joined(self, parts: Sequence[Formed], drafts: Drafts, decisions: list[Decision]) -> Formed | None:
        joined = drafts.formed([te_ for part in parts for te_ in part.tes])
        constants = tuple(i for i, tensor in enumerate(joined.draft.inputs) if tensor in drafts.program.constants)
        key = joined.draft.digest, constants
        if key not in self._known:
            self._known[key] = self._takes(joined.draft.func, constants)
        what = f"{', '.join(part.draft.name for part in parts[1:])} into the stage of {parts[0].draft.name}"
        reason = (
            "a thread computes it as soon as it has the columns that it needs"
            if self._known[key]
            else "its columns are not read in equal groups of whole vectors"
        )
        decisions.append(Decision("schedule", what, self._known[key], reason))
        return joined if self._known[key] else None
