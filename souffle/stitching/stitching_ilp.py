"""The planner of 2019: patterns by substitution and exploration, chosen by an integer linear program (003 §4)."""

from __future__ import annotations

from souffle.decision import Decision
from souffle.stitching.exploration import explored_patterns
from souffle.stitching.graph import members_of
from souffle.stitching.ilp import best_patterns
from souffle.stitching.model_score import ModelScore
from souffle.stitching.plan import FusionPlan, plan_of
from souffle.stitching.planner import FusionRequest
from souffle.stitching.schemes import schemes_of
from souffle.stitching.substitution import substitution_patterns
from souffle.wording import counted

__all__ = ["StitchingIlp"]


class StitchingIlp:
    """See the module."""

    name = "stitching-ilp"
    block_composition = True

    def plan(self, request: FusionRequest) -> FusionPlan:
        """See :meth:`souffle.stitching.planner.FusionPlanner.plan`.

        Raises
        ------
        OptionError
            If HiGHS is not installed.
        """
        graph, device = request.graph, request.device
        score = ModelScore(graph, device)
        substituted = substitution_patterns(graph, device)
        explored, given_up = explored_patterns(graph, device)
        scores = {pattern: score(pattern) for pattern in dict.fromkeys((*substituted, *explored))}
        chosen, cuts = best_patterns(graph, scores)
        worth = sum(gain > 0 for gain in scores.values())
        found = f"{len(substituted)} by substitution, {len(explored)} by exploration, {worth} worth something"
        decisions = [Decision("stitching", counted(len(scores), "candidate pattern"), True, found), *given_up, *cuts]
        groups = [members_of(pattern) for pattern in chosen]
        gains = {frozenset(members_of(pattern)): scores[pattern] for pattern in chosen}
        schemes = {number: scheme for group in groups for number, scheme in schemes_of(graph, group).items()}
        return plan_of(graph, groups, self.name, decisions, scores=gains, schemes=schemes)
