"""Candidate patterns of each vertex by approximate dynamic programming, and remote fusion (000 §5.2).

    P(v) = the k best patterns that start with v = PatternReduction(consumers of v)

in post-order, so that the candidates of all consumers are there. The consumers are divided into halves until a group is
of at most two; of a group every combination of its members' candidates (or none of one) is joined with v. The paper
then takes the best of all groups. Here the best of two halves are joined as well, without which no pattern would hold
three consumers of a vertex; that adds a bounded number of patterns to each step. A pattern in a cycle, which the paper
drops, is completed by what lies on the ways out of it and back, and dropped if something there cannot be fused: where
several ways lead from a vertex and join again, as in the cell of an LSTM, no group of its consumers is without a cycle.
Patterns for which there is no kernel are dropped. A consumer alone is always among its candidates: where all of the
best few reach around something that cannot be fused, it can be joined by itself.

Remote fusion (Figure 5) joins patterns that are not neighbours once a plan is there: the same for a virtual vertex
whose consumers are the patterns of the plan, and the TEs that are in none; these are joined whole. Every step of its
division leaves its best patterns as candidates, since those of the last step can hold a bounded number of TEs only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from souffle.stitching.delta import MEMORY_INTENSIVE, DeltaScore
from souffle.stitching.graph import OpGraph, members_of

__all__ = ["MOST_TES", "TOP", "Candidates", "candidates_of"]

TOP = 3
"""Patterns that are kept of a vertex: the paper's k."""

MOST_TES = 64
"""Of a pattern. Without a bound the work of one vertex would grow with the graph, and the whole would not be linear."""

_GROUP = 2


class Candidates:
    """The candidate patterns of a graph, as the bits of numbers.

    Parameters
    ----------
    graph : OpGraph
    score : DeltaScore
    """

    def __init__(self, graph: OpGraph, score: DeltaScore) -> None:
        self.graph, self.score = graph, score
        self.of: list[tuple[int, ...]] = [()] * len(graph.ops)
        self.in_cycles: dict[int, None] = {}  # patterns that were dropped for what is not fused between their vertices
        self._reach: dict[int, tuple[int, int]] = {}
        self._depth: list[int] = []
        for producers in graph.producers:
            self._depth.append(max((self._depth[producer] + 1 for producer in producers), default=0))
        self._fusible = sum(1 << n for n, op in enumerate(graph.ops) if op.kind in MEMORY_INTENSIVE)

    def find(self) -> None:
        """Work out the candidates of each vertex, from the last to the first."""
        for number in reversed(range(len(self.graph.ops))):
            if self.graph.ops[number].kind in MEMORY_INTENSIVE:
                consumers = [
                    tuple(dict.fromkeys((*self.of[consumer], 1 << consumer))) if self.of[consumer] else ()
                    for consumer in self.graph.consumers[number]
                ]
                self.of[number] = self._reduced(consumers, 1 << number)

    def remote(self, patterns: Sequence[int]) -> list[tuple[int, ...]]:
        """Candidates that join patterns of a plan, those of the last step of the division first.

        Parameters
        ----------
        patterns : sequence of int
            Disjoint.
        """
        held = sum(patterns)
        alone = [1 << n for n in range(len(self.of)) if self.of[n] and not held >> n & 1]
        steps: list[tuple[int, ...]] = []
        # By depth: parts of one depth do not need each other, and neighbours are joined first.
        parts = sorted((*patterns, *alone), key=lambda part: (max(self._depth[n] for n in members_of(part)), part))
        whole = {number: part for part in parts for number in members_of(part)}
        self._reduced([(part,) for part in parts], 0, steps, whole)
        return steps[::-1]

    def _reduced(
        self,
        consumers: Sequence[tuple[int, ...]],
        vertex: int,
        steps: list[tuple[int, ...]] | None = None,
        whole: Mapping[int, int] | None = None,
    ) -> tuple[int, ...]:
        """PatternReduction over the candidates of some consumers, with the vertex (or none) in each pattern."""
        if len(consumers) <= _GROUP:
            choices = [(0, *candidates) for candidates in consumers]
        else:
            half = len(consumers) // 2
            parts = (consumers[:half], consumers[half:])
            choices = [(0, *self._reduced(part, vertex, steps, whole)) for part in parts]
        joined = [vertex]
        for options in choices:
            joined = [one | other for one in joined for other in options]
        best = self._best(self.completed(pattern, whole) for pattern in joined)
        if steps is not None:
            steps.append(best)
        return best

    def _best(self, patterns: Iterable[int]) -> tuple[int, ...]:
        """The few of the highest score among those that lose nothing; of equal ones the larger."""
        scored = []
        for pattern in dict.fromkeys(patterns):
            if pattern and pattern.bit_count() <= MOST_TES:
                gain = self.score(pattern)
                if gain >= 0:
                    scored.append((-gain, -pattern.bit_count(), pattern))
        return tuple(pattern for _, _, pattern in sorted(scored)[:TOP])

    def completed(self, pattern: int, whole: Mapping[int, int] | None = None) -> int:
        """A pattern with all that lies between its vertices; nothing if something of that cannot be fused.

        Parameters
        ----------
        pattern : int
        whole : mapping of int to int, optional
            The pattern of a plan that holds a vertex, which is not to be taken apart.
        """
        while pattern.bit_count() <= MOST_TES:
            above, below = self.reach(pattern)
            between = above & below & ~pattern
            if not between:
                return pattern
            if between & ~self._fusible:
                self.in_cycles[pattern | between & self._fusible] = None
                return 0
            for number in members_of(between):
                pattern |= whole[number] if whole else 1 << number
        return 0

    def is_convex(self, pattern: int) -> bool:
        """Whether no path leads out of a pattern and back."""
        above, below = self.reach(pattern)
        return not above & below & ~pattern

    def reach(self, pattern: int) -> tuple[int, int]:
        """What the vertices of a pattern need, and what needs them."""
        if pattern not in self._reach:
            above = below = 0
            mask = pattern
            while mask:
                low = mask & -mask
                number = low.bit_length() - 1
                above, below = above | self.graph.above[number], below | self.graph.below[number]
                mask ^= low
            self._reach[pattern] = above, below
        return self._reach[pattern]


def candidates_of(graph: OpGraph, score: DeltaScore) -> Candidates:
    """All candidates of a graph."""
    found = Candidates(graph, score)
    found.find()
    return found
