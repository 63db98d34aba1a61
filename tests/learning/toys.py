"""Small problems whose optimum is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from souffle.learning import GraphFeatures

LEVELS = 8


class Toy:
    """An environment; `time` gives the seconds of priorities."""

    def __init__(self, features: GraphFeatures, baseline_seconds: float, time: Callable[[np.ndarray], float]) -> None:
        self.features, self.baseline_seconds, self.time = features, baseline_seconds, time
        self.evaluations = 0

    def seconds(self, priorities: np.ndarray) -> float:
        self.evaluations += 1
        return self.time(priorities)


def graph(
    nodes: np.ndarray, edges: list[tuple[int, int]], weights: np.ndarray | None = None, name: str = "toy"
) -> GraphFeatures:
    """Features from lists."""
    ends = np.array(edges, np.int64).reshape(-1, 2).T
    weights = np.ones(len(edges)) if weights is None else weights
    return GraphFeatures(name, np.asarray(nodes, np.float32), ends, np.asarray(weights, np.float32))


def random_graph(count: int, features: int = 3, seed: int = 0) -> GraphFeatures:
    """Every vertex but the first reads one or two before it."""
    rng = np.random.default_rng(seed)
    edges = [(int(place), end) for end in range(1, count) for place in rng.choice(end, min(end, 2), replace=False)]
    return graph(rng.normal(size=(count, features)), edges, rng.random(len(edges)), f"random {count}")


def ordering(count: int, seed: int) -> Toy:
    """Each vertex should have the priority that its first feature says; no edges."""
    wanted = np.random.default_rng(seed).integers(0, LEVELS, count)
    nodes = np.stack([wanted / (LEVELS - 1), np.ones(count)], axis=1)

    def time(priorities: np.ndarray) -> float:
        return 1.0 + float(np.abs(priorities - wanted).mean())

    return Toy(graph(nodes, [], name=f"ordering {seed}"), 4.0, time)


class Chain(Toy):
    """Fusion in pairs along a chain, as in the paper's example (002 Figure 2): each saves what passes between.

    In the order of their priorities the vertices are fused with their consumers, if both are still alone. Which pairs
    are best cannot be seen at one vertex: a large tensor between two larger ones should stay.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.saved = np.random.default_rng(seed).random(count - 1)
        into, out_of = np.r_[0, self.saved], np.r_[self.saved, 0]
        edges = [(number, number + 1) for number in range(count - 1)]
        features = graph(np.stack([into, out_of], axis=1), edges, self.saved, f"chain {seed}")
        super().__init__(features, count / 2 + float(self.saved.sum()), self._time)

    def _time(self, priorities: np.ndarray) -> float:
        alone = np.ones(len(priorities), bool)
        seconds = self.baseline_seconds
        for number in np.argsort(-priorities, kind="stable"):
            if alone[number : number + 2].sum() == 2:
                alone[number : number + 2] = False
                seconds -= self.saved[number]
        return float(seconds)

    def gained(self, seconds: float) -> float:
        """The share of what can be saved."""
        before = best = 0.0
        for saved in self.saved:
            before, best = best, max(best, before + saved)
        return (self.baseline_seconds - seconds) / best


def by_chance(environment: Toy, evaluations: int) -> float:
    """The best of as many random priorities."""
    rng = np.random.default_rng(77)
    count = len(environment.features.nodes)
    return min(environment.seconds(rng.integers(0, LEVELS, count)) for _ in range(evaluations))
