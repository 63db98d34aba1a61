"""Priorities in, predicted time out: what learns to fuse asks of the compiler (002 §3)."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from souffle.cost.device import CostDevice
from souffle.learning.problem import GraphFeatures
from souffle.stitching.graph import OpGraph
from souffle.stitching.priority.features import features_of
from souffle.stitching.priority.fusing import FusionRules, PriorityFusion
from souffle.stitching.priority.orders import by_priority, topological
from souffle.stitching.priority.prices import PatternPrices

__all__ = ["FusionEnvironment"]


class FusionEnvironment:
    """One graph on one GPU.

    Parameters
    ----------
    graph : OpGraph
    device : CostDevice
    rules : FusionRules, optional
    name : str
        For messages and curves.

    Attributes
    ----------
    evaluations : int
        How often priorities were asked for their time.
    baseline_seconds : float
        With each vertex a kernel of its own.
    default : list of int
        The vertices in TensorFlow's order.
    """

    def __init__(self, graph: OpGraph, device: CostDevice, rules: FusionRules | None = None, name: str = "") -> None:
        self.graph, self.device, self.rules, self.name = graph, device, rules or FusionRules(), name
        self.prices = PatternPrices(graph, device)
        self.fusion = PriorityFusion(graph, self.prices, self.rules)
        self.evaluations = 0
        self.baseline_seconds = sum(self.prices(1 << number) for number in range(len(graph.ops)))
        self.default = topological(graph)
        self._ranks = np.argsort(self.default)

    @cached_property
    def features(self) -> GraphFeatures:
        """What a policy sees of the graph."""
        return features_of(self.graph, self.device, self.prices, self.name)

    def kernels(self, priorities: np.ndarray) -> list[int]:
        """The kernels that priorities lead to, each the bits of a number.

        Parameters
        ----------
        priorities : array of int, (n,)
            One for each vertex; the highest are fused first.
        """
        return self.fusion(by_priority(self._ranks, priorities))

    def seconds(self, priorities: np.ndarray) -> float:
        """Predicted time of all kernels with their launches; one evaluation."""
        self.evaluations += 1
        return self.fusion.seconds(self.kernels(priorities))
