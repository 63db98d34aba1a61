"""Which of many patterns make the best plan: an integer linear program, with cycles cut off one by one (003 §4.1).

    maximize    sum of f(P) * X(P)                          X(P) is 0 or 1
    subject to  sum of X(P) over the P that hold v  <=  1   for each vertex v that two patterns hold
                sum of X(P) over the P of a cycle   <=  their number - 1

The paper has ``X(u) + X(v) <= 1`` for each pair of patterns that overlap. Those that hold one vertex are a clique of
such pairs, and one constraint for it says the same of whole numbers and more of fractions; two patterns overlap if and
only if they hold a common vertex, so no pair is lost. A solution whose contracted graph has a cycle is cut off by the
patterns of that cycle (any plan that has them all has the cycle too, whatever becomes of other vertices), until none
has. HiGHS solves each exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from souffle.decision import Decision
from souffle.errors import OptionError
from souffle.stitching.graph import OpGraph, members_of
from souffle.stitching.plan import cycle_between

try:
    import highspy
except ImportError:  # the optional dependency group "stitching"
    highspy = None

__all__ = ["best_patterns"]


class _QuietSolver(highspy.Highs if highspy else object):
    """HiGHS without a word: it prints its version where its constructor enables callbacks, before it can be told."""

    def enableCallbacks(self) -> None:  # HiGHS's name
        self.silent()
        super().enableCallbacks()


def best_patterns(graph: OpGraph, scores: Mapping[int, float]) -> tuple[tuple[int, ...], tuple[Decision, ...]]:
    """The disjoint patterns of the highest total score among which there is no cycle, and each cycle that was cut.

    Parameters
    ----------
    graph : OpGraph
    scores : mapping of int to float
        In seconds, by pattern, whose vertices are the bits of a number. Those that are not positive are never chosen.

    Raises
    ------
    OptionError
        If HiGHS is not installed.
    """
    if highspy is None:
        raise OptionError("the planner stitching-ilp needs HiGHS: pip install 'souffle-dl[stitching]'")
    patterns = sorted(pattern for pattern, score in scores.items() if score > 0)
    if not patterns:
        return (), ()
    solver = _solver([scores[pattern] for pattern in patterns], _cliques(graph, patterns))
    decisions: list[Decision] = []
    while True:
        chosen = _solved(solver)
        groups = [members_of(patterns[place]) for place in chosen]
        cycle = cycle_between(graph, groups)
        if cycle is None:
            return tuple(patterns[place] for place in chosen), tuple(decisions)
        places, words = cycle
        cut = [chosen[place] for place in places]
        _add_row(solver, cut, len(cut) - 1)
        names = " with ".join(" + ".join(graph.ops[n].name for n in groups[place]) for place in places)
        decisions.append(Decision("stitching", f"fuse {names}", False, words))


def _cliques(graph: OpGraph, patterns: Sequence[int]) -> list[list[int]]:
    """For each vertex that several patterns hold, these; each set once."""
    held: list[list[int]] = [[] for _ in graph.ops]
    for place, pattern in enumerate(patterns):
        for number in members_of(pattern):
            held[number].append(place)
    return [list(clique) for clique in dict.fromkeys(tuple(places) for places in held if len(places) > 1)]


def _solver(gains: Sequence[float], cliques: Sequence[Sequence[int]]) -> highspy.Highs:
    solver = _QuietSolver()
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 0.0)
    largest = max(gains)  # so that tolerances are of the size of the scores
    for place, gain in enumerate(gains):
        solver.addCol(gain / largest, 0.0, 1.0, 0, [], [])
        solver.changeColIntegrality(place, highspy.HighsVarType.kInteger)
    solver.changeObjectiveSense(highspy.ObjSense.kMaximize)
    for clique in cliques:
        _add_row(solver, clique, 1)
    return solver


def _add_row(solver: highspy.Highs, places: Sequence[int], most: int) -> None:
    solver.addRow(-highspy.kHighsInf, most, len(places), list(places), [1.0] * len(places))


def _solved(solver: highspy.Highs) -> list[int]:
    """The places of what is chosen."""
    solver.run()
    status = solver.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        raise AssertionError(f"HiGHS ended with {solver.modelStatusToString(status)}")
    return [place for place, value in enumerate(solver.getSolution().col_value) if value > 0.5]
