"""A fusion plan is data: which TEs one kernel computes, and how each is attached to the others (003 §4.1, 000 §5.1).

Every TE of the program is in one pattern, a lone one in a pattern of its own. What makes a plan valid, and what
:meth:`FusionPlan.check` asserts:

    patterns are disjoint, and hold every TE
    kernels can run one after another: contracted to its patterns, the graph has no cycle

A pattern may compute a TE of another pattern again (*thread composition* with recomputation, which is all that XLA
has); then it does not depend on that one for it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from souffle.decision import Decision
from souffle.errors import SouffleError
from souffle.stitching.graph import OpGraph
from souffle.stitching.kinds import Kind
from souffle.wording import counted

__all__ = ["FusionError", "FusionPattern", "FusionPlan", "Scheme", "cycle_between", "plan_of"]


class FusionError(SouffleError):
    """A fusion plan is not valid; the message names the TEs."""


class Scheme(enum.Enum):
    """How a TE is attached to those of its pattern that read it (003 §5.1, 000 §4.1).

    ``PACKING``: none reads it. ``THREAD``: through registers, computed again where several threads need it. ``WARP``:
    by shuffles. ``BLOCK``: through shared memory.
    """

    PACKING = "packing"
    THREAD = "thread"
    WARP = "warp"
    BLOCK = "block"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class FusionPattern:
    """What one kernel computes.

    Attributes
    ----------
    members : tuple of int
        Vertices of the graph, rising, so in a topological order.
    tes : tuple of str
        Their names.
    kinds : tuple of Kind
    schemes : tuple of (Scheme or None)
        How each is attached; ``None`` where the planner leaves it open.
    recomputed : tuple of int
        Vertices of other patterns that are computed again in here.
    score : float
        What the planner's score gives it, in seconds saved; 0 for a lone TE.
    """

    members: tuple[int, ...]
    tes: tuple[str, ...]
    kinds: tuple[Kind, ...]
    schemes: tuple[Scheme | None, ...]
    recomputed: tuple[int, ...] = ()
    score: float = 0.0

    @property
    def name(self) -> str:
        """The name of its last TE."""
        return self.tes[-1]

    def __len__(self) -> int:
        return len(self.members)

    def __str__(self) -> str:
        """One line: its TEs, each with its scheme where that is known."""
        parts = [name if scheme is None else f"{name}/{scheme}" for name, scheme in zip(self.tes, self.schemes)]
        again = f", {counted(len(self.recomputed), 'TE')} computed again" if self.recomputed else ""
        kinds = ", ".join(f"{self.kinds.count(kind)} {kind}" for kind in Kind if kind in self.kinds)
        return f"{counted(len(self), 'TE')} ({kinds}{again}; {self.score * 1e6:.2f} us): {' '.join(parts)}"


@dataclass(frozen=True, eq=False)
class FusionPlan:
    """What a planner answers.

    Attributes
    ----------
    patterns : tuple of FusionPattern
        In an order in which their kernels can run.
    planner : str
        By whom.
    decisions : tuple of Decision
        Why it is so: cuts, limits that were met, what was given up.
    """

    patterns: tuple[FusionPattern, ...]
    planner: str
    decisions: tuple[Decision, ...] = ()

    @property
    def score(self) -> float:
        """Of all patterns together, in seconds saved."""
        return sum(pattern.score for pattern in self.patterns)

    @property
    def fused(self) -> tuple[FusionPattern, ...]:
        """The patterns of several TEs."""
        return tuple(pattern for pattern in self.patterns if len(pattern) > 1)

    def check(self, graph: OpGraph) -> None:
        """Assert that it is a valid plan of `graph`, in a valid order.

        Raises
        ------
        FusionError
            Naming a TE that is in no pattern or in two, or the TEs that a cycle leads through.
        """
        owner: dict[int, int] = {}
        for place, pattern in enumerate(self.patterns):
            for number in pattern.members:
                if number in owner:
                    raise FusionError(f"{self.planner}: TE {graph.ops[number].name} is in two patterns")
                owner[number] = place
        missing = next((number for number in range(len(graph.ops)) if number not in owner), None)
        if missing is not None:
            raise FusionError(f"{self.planner}: TE {graph.ops[missing].name} is in no pattern")
        links = _links(graph, self.patterns, owner)
        cycle = _cycle(len(self.patterns), links)
        if cycle is not None:
            raise FusionError(f"{self.planner}: {_told(graph, links, cycle)}")
        late = next(((one, other) for one, other in links if one > other), None)
        if late is not None:
            producer, consumer = (graph.ops[number].name for number in links[late])
            raise FusionError(f"{self.planner}: {consumer} stands before {producer}, which it reads")

    def __str__(self) -> str:
        """One line a pattern, in order."""
        head = f"{self.planner}: {counted(len(self.patterns), 'kernel')}, {self.score * 1e6:.2f} us saved by its score"
        return "\n".join([head, *(f"  {number}: {pattern}" for number, pattern in enumerate(self.patterns))])


def plan_of(
    graph: OpGraph,
    groups: Iterable[Sequence[int]],
    planner: str,
    decisions: Sequence[Decision] = (),
    *,
    scores: Mapping[frozenset[int], float] | None = None,
    schemes: Mapping[int, Scheme] | None = None,
    recomputed: Mapping[frozenset[int], Sequence[int]] | None = None,
) -> FusionPlan:
    """The plan whose kernels are `groups`, and each other TE alone; in an order in which they can run, and checked.

    Parameters
    ----------
    graph : OpGraph
    groups : iterable of sequences of int
        Disjoint sets of vertices.
    planner : str
    decisions : sequence of Decision
    scores : mapping, optional
        By set of vertices.
    schemes : mapping, optional
        By vertex.
    recomputed : mapping, optional
        What a group computes again, by its set of vertices.

    Raises
    ------
    FusionError
        As :meth:`FusionPlan.check`.
    """
    parts = [tuple(sorted(group)) for group in groups]
    held = {number for part in parts for number in part}
    parts += [(number,) for number in range(len(graph.ops)) if number not in held]
    patterns = []
    for part in parts:
        again = tuple(sorted((recomputed or {}).get(frozenset(part), ())))
        ops = [graph.ops[number] for number in part]
        how = tuple((schemes or {}).get(number) for number in part)
        score = (scores or {}).get(frozenset(part), 0.0)
        names, kinds = tuple(op.name for op in ops), tuple(op.kind for op in ops)
        patterns.append(FusionPattern(part, names, kinds, how, again, score))
    plan = FusionPlan(_in_order(graph, patterns), planner, tuple(decisions))
    plan.check(graph)
    return plan


def cycle_between(graph: OpGraph, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], str] | None:
    """Groups whose fusion makes a cycle, and the cycle in words; ``None`` if there is none.

    Parameters
    ----------
    graph : OpGraph
    groups : sequence of sequences of int
        Disjoint sets of vertices; every other vertex stays alone.

    Returns
    -------
    tuple of int
        Places in `groups`. A single one where a group is in a cycle with lone vertices.
    str
        Such as ``"a, c -> b -> a, c"``, by names.
    """
    parts = [tuple(sorted(group)) for group in groups]
    held = {number for part in parts for number in part}
    parts += [(number,) for number in range(len(graph.ops)) if number not in held]
    patterns = [FusionPattern(part, (), (), ()) for part in parts]
    owner = {number: place for place, part in enumerate(parts) for number in part}
    links = _links(graph, patterns, owner)
    cycle = _cycle(len(parts), links)
    if cycle is None:
        return None
    return tuple(place for place in cycle if place < len(groups)), _told(graph, links, cycle)


Links = dict[tuple[int, int], tuple[int, int]]
"""From a pair of patterns to an edge of the graph that leads from the one to the other."""


def _links(graph: OpGraph, patterns: Sequence[FusionPattern], owner: Mapping[int, int]) -> Links:
    links: Links = {}
    for place, pattern in enumerate(patterns):
        inside = {*pattern.members, *pattern.recomputed}
        for number in (*pattern.members, *pattern.recomputed):
            for producer in graph.producers[number]:
                if producer not in inside:
                    links.setdefault((owner[producer], place), (producer, number))
    return links


def _cycle(count: int, links: Links) -> list[int] | None:
    """The patterns of a cycle, in the order of its edges."""
    after: list[list[int]] = [[] for _ in range(count)]
    for one, other in links:
        after[one].append(other)
    state = [0] * count
    for root in range(count):
        path: list[tuple[int, int]] = [(root, 0)] if not state[root] else []
        while path:
            place, child = path.pop()
            state[place] = 1
            if child == len(after[place]):
                state[place] = 2
                continue
            path.append((place, child + 1))
            reached = after[place][child]
            if state[reached] == 1:
                places = [one for one, _ in path]
                return places[places.index(reached) :]
            if not state[reached]:
                path.append((reached, 0))
    return None


def _told(graph: OpGraph, links: Links, cycle: Sequence[int]) -> str:
    """A cycle by the names of the TEs where it enters and leaves each pattern."""
    steps = []
    for place, one in enumerate(cycle):
        entered = links[cycle[place - 1], one][1]
        left = links[one, cycle[(place + 1) % len(cycle)]][0]
        steps.append(" + ".join(dict.fromkeys((graph.ops[entered].name, graph.ops[left].name))))
    return "a cycle leads through " + " -> ".join([*steps, steps[0]])


def _in_order(graph: OpGraph, patterns: Sequence[FusionPattern]) -> tuple[FusionPattern, ...]:
    """`patterns` in a topological order, by their first vertices; what is in a cycle stands last."""
    first = sorted(patterns, key=lambda pattern: pattern.members)
    owner = {number: place for place, pattern in enumerate(first) for number in pattern.members}
    links = _links(graph, first, owner)
    waiting = [0] * len(first)
    after: list[list[int]] = [[] for _ in first]
    for one, other in links:
        waiting[other] += 1
        after[one].append(other)
    ready = [place for place, count in enumerate(waiting) if not count]
    order: list[int] = []
    for place in ready:
        order.append(place)
        for other in after[place]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    placed = set(order)
    return tuple(first[place] for place in (*order, *(p for p in range(len(first)) if p not in placed)))
