"""The planner of 2021: candidates by dynamic programming, a plan by beam search, chosen by latency (000 §5.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from souffle.decision import Decision
from souffle.stitching.delta import DeltaScore
from souffle.stitching.graph import members_of
from souffle.stitching.latency import KernelLatency, LatencyEvaluator
from souffle.stitching.plan import FusionPlan, cycle_between, plan_of
from souffle.stitching.planner import FusionRequest
from souffle.stitching.reduction import MOST_TES, Candidates, candidates_of
from souffle.wording import counted

__all__ = ["BEAM", "StitchingDp", "beam_search"]

BEAM = 3
"""Buffer sets: the paper's width."""


@dataclass(frozen=True)
class _Buffer:
    """Disjoint patterns among which there is no cycle, what they hold together, and their score."""

    patterns: tuple[int, ...] = ()
    held: int = 0
    gain: float = 0.0


def beam_search(candidates: Candidates) -> tuple[tuple[int, ...], ...]:
    """The best plans; each a tuple of disjoint patterns.

    From producers to consumers, a candidate is appended where it makes no cycle with what is there, which the paper
    does not say and a plan needs. Of one that overlaps with that, which the paper drops, what is left is appended where
    it is a pattern itself: the few candidates of a vertex often hold one TE in common, and would be lost together. Then
    remote fusion merges the patterns of each plan.
    """
    beam = _searched(candidates, candidates.of)
    found = {frozenset(buffer.patterns): buffer for buffer in (*map(partial(_merged, candidates), beam), *beam)}
    return tuple(buffer.patterns for buffer in _best(found.values()))


def _merged(candidates: Candidates, buffer: _Buffer) -> _Buffer:
    """A plan whose patterns and lone TEs are joined while that gains something and makes no cycle."""
    patterns = dict.fromkeys(buffer.patterns)
    improved = True
    while improved:
        improved = False
        for options in candidates.remote(tuple(patterns)):
            for union in options:
                inside = [pattern for pattern in patterns if pattern & union]
                joined = union | sum(pattern & ~union for pattern in inside)
                gain = _gain(candidates, joined) - sum(map(candidates.score, inside))
                others = [pattern for pattern in patterns if not pattern & joined]
                if gain > 0 and not _makes_cycle(candidates, others, joined):
                    patterns = dict.fromkeys((*others, joined))
                    improved = True
    return _Buffer(tuple(patterns), sum(patterns), sum(map(candidates.score, patterns)))


def _gain(candidates: Candidates, pattern: int) -> float:
    if pattern.bit_count() > MOST_TES or not candidates.is_convex(pattern):
        return -math.inf
    return candidates.score(pattern)


def _searched(candidates: Candidates, choices: Iterable[Sequence[int]]) -> list[_Buffer]:
    beam = [_Buffer()]
    for options in choices:
        grown = {frozenset(buffer.patterns): buffer for buffer in beam}
        for buffer in beam:
            left = dict.fromkeys(_left_of(candidates, pattern, buffer.held) for pattern in options)
            for pattern in left:
                if candidates.score(pattern) > 0 and not _makes_cycle(candidates, buffer.patterns, pattern):
                    gain = buffer.gain + candidates.score(pattern)
                    added = _Buffer((*buffer.patterns, pattern), buffer.held | pattern, gain)
                    grown.setdefault(frozenset(added.patterns), added)
        beam = _best(grown.values())
    return beam


def _left_of(candidates: Candidates, pattern: int, held: int) -> int:
    """What a plan does not hold yet of a candidate, with its first vertex; nothing if that is no pattern."""
    left = pattern & ~held
    return left if left == pattern or (left & pattern & -pattern and candidates.is_convex(left)) else 0


def _best(buffers: Iterable[_Buffer]) -> list[_Buffer]:
    return sorted(buffers, key=lambda buffer: (-buffer.gain, len(buffer.patterns)))[:BEAM]


def _makes_cycle(candidates: Candidates, patterns: Sequence[int], new: int) -> bool:
    """Whether a pattern needs itself through others of a plan."""
    needing = candidates.reach(new)[1] & ~new
    waiting = list(patterns)
    while True:
        entered = [pattern for pattern in waiting if pattern & needing]
        if not entered:
            return False
        waiting = [pattern for pattern in waiting if not pattern & needing]
        for pattern in entered:
            below = candidates.reach(pattern)[1]
            if below & new:
                return True
            needing |= below


class StitchingDp:
    """See the module."""

    name = "stitching-dp"
    block_composition = True

    def plan(self, request: FusionRequest) -> FusionPlan:
        """See :meth:`souffle.stitching.planner.FusionPlanner.plan`."""
        graph, device = request.graph, request.device
        score = DeltaScore(graph, device)
        candidates = candidates_of(graph, score)
        evaluator = LatencyEvaluator(graph, device)
        kernels: dict[tuple[int, ...], KernelLatency] = {}

        def latency(patterns: Sequence[int]) -> float:
            held = sum(patterns)
            alone = [(number,) for number in range(len(graph.ops)) if not held >> number & 1]
            groups = [tuple(members_of(pattern)) for pattern in patterns] + alone
            for group in groups:
                if group not in kernels:
                    kernels[group] = evaluator.kernel(group)
            return sum(kernels[group].seconds + device.launch_seconds for group in groups)

        plans = sorted((latency(patterns), place, patterns) for place, patterns in enumerate(beam_search(candidates)))
        chosen = plans[0][2]
        decisions = [Decision("stitching", *_considered(plan, plan is plans[0])) for plan in plans]
        decisions += _cut(candidates)
        groups = [members_of(pattern) for pattern in chosen]
        scores = {frozenset(group): score(pattern) for group, pattern in zip(groups, chosen, strict=True)}
        schemes = {n: scheme for group in groups for n, scheme in kernels[tuple(group)].schemes.items()}
        return plan_of(graph, groups, self.name, decisions, scores=scores, schemes=schemes)


def _cut(candidates: Candidates) -> list[Decision]:
    """The smallest candidate that was dropped for a cycle, and how many were."""
    if not candidates.in_cycles:
        return []
    graph = candidates.graph
    members = members_of(min(candidates.in_cycles, key=lambda pattern: (pattern.bit_count(), pattern)))
    _, words = cycle_between(graph, [members])
    more = len(candidates.in_cycles) - 1
    told = f"{words}; {counted(more, 'more candidate pattern')} dropped for a cycle" if more else words
    return [Decision("stitching", f"fuse {' + '.join(graph.ops[number].name for number in members)}", False, told)]


def _considered(plan: tuple[float, int, tuple[int, ...]], taken: bool) -> tuple[str, bool, str]:
    seconds, place, patterns = plan
    what = f"plan {place + 1} of the beam, {counted(len(patterns), 'pattern')}"
    return what, taken, f"{seconds * 1e6:.2f} us by the latency-evaluator, launches included"
