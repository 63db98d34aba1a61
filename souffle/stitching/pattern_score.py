"""What a planner thinks of a pattern: the scores of one graph on one GPU, each distinct pattern worked out once."""

from __future__ import annotations

from abc import ABC, abstractmethod

from souffle.cost.device import CostDevice
from souffle.stitching.graph import OpGraph, members_of

__all__ = ["PatternScore"]


class PatternScore(ABC):
    """A score.

    Parameters
    ----------
    graph : OpGraph
    device : CostDevice
    """

    def __init__(self, graph: OpGraph, device: CostDevice) -> None:
        self.graph, self.device = graph, device
        self._known: dict[int, float] = {}

    def __call__(self, pattern: int) -> float:
        """Seconds that a pattern saves, whose vertices are the bits of a number; negative where it cannot be."""
        if pattern not in self._known:
            members = tuple(members_of(pattern))
            self._known[pattern] = self.score(members) if len(members) > 1 else 0.0
        return self._known[pattern]

    @abstractmethod
    def score(self, members: tuple[int, ...]) -> float:
        """Of several vertices, rising."""
