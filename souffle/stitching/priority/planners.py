"""Priority fusion as fusion planners, by who gives the priorities (002 §3, §4).

Each plans with :class:`~souffle.stitching.priority.fusing.PriorityFusion`, and the best of the orders that it tries by
predicted time is the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from souffle import learning
from souffle.decision import Decision
from souffle.stitching.graph import members_of
from souffle.stitching.plan import FusionPlan, plan_of
from souffle.stitching.planner import FusionRequest
from souffle.stitching.priority.annealing import anneal
from souffle.stitching.priority.environment import FusionEnvironment
from souffle.stitching.priority.fusing import FusionRules
from souffle.stitching.priority.orders import by_saved_bytes
from souffle.wording import counted

__all__ = ["AnnealedFusion", "DefaultFusion", "GreedyFusion", "LearnedFusion", "SHIPPED"]

SHIPPED = Path(learning.__file__).with_name("policies") / "default.safetensors"
"""The policy where the user names none."""


@dataclass(frozen=True)
class DefaultFusion:
    """The order of TensorFlow's fusion: topological, first come first served.

    Attributes
    ----------
    rules : FusionRules
    """

    rules: FusionRules = field(default_factory=FusionRules)
    name = "priority-default"
    block_composition = True

    def plan(self, request: FusionRequest) -> FusionPlan:
        """See :meth:`souffle.stitching.planner.FusionPlanner.plan`."""
        environment = FusionEnvironment(request.graph, request.device, self.rules)
        return _planned(environment, np.zeros(len(request.graph.ops)), self.name, "the default order")


@dataclass(frozen=True)
class GreedyFusion:
    """What saves most bytes of global memory first, as XLA's priority fusion does.

    Attributes
    ----------
    rules : FusionRules
    """

    rules: FusionRules = field(default_factory=FusionRules)
    name = "priority-greedy"
    block_composition = True

    def plan(self, request: FusionRequest) -> FusionPlan:
        """See :meth:`souffle.stitching.planner.FusionPlanner.plan`."""
        environment = FusionEnvironment(request.graph, request.device, self.rules)
        priorities = -np.argsort(by_saved_bytes(request.graph))
        return _planned(environment, priorities, self.name, "bytes that are saved")


@dataclass(frozen=True)
class AnnealedFusion:
    """Simulated annealing from the default order.

    Attributes
    ----------
    rules : FusionRules
    evaluations : int
        Orders that are tried.
    seed : int
    """

    rules: FusionRules = field(default_factory=FusionRules)
    evaluations: int = 1000
    seed: int = 0
    name = "priority-annealing"
    block_composition = True

    def plan(self, request: FusionRequest) -> FusionPlan:
        """See :meth:`souffle.stitching.planner.FusionPlanner.plan`."""
        environment = FusionEnvironment(request.graph, request.device, self.rules)
        found = anneal(
            environment.seconds, len(request.graph.ops), environment.baseline_seconds, self.evaluations, self.seed
        )
        return _planned(
            environment, found.priorities, self.name, f"annealing, {counted(self.evaluations, 'order')} tried"
        )


@dataclass(frozen=True)
class LearnedFusion:
    """Priorities of a policy that was trained (:mod:`souffle.learning`): its likeliest ones, draws, and all equal.

    Attributes
    ----------
    rules : FusionRules
    evaluations : int
        Orders that are tried.
    seed : int
        Of the draws.
    """

    rules: FusionRules = field(default_factory=FusionRules)
    evaluations: int = 64
    seed: int = 0
    name = "learned"
    block_composition = True

    def plan(self, request: FusionRequest) -> FusionPlan:
        """See :meth:`souffle.stitching.planner.FusionPlanner.plan`.

        Raises
        ------
        PolicyError
            If PyTorch and what else a policy needs is not installed, or the file is no policy of these features.
        """
        environment = FusionEnvironment(request.graph, request.device, self.rules)
        best, least = np.zeros(len(request.graph.ops), np.int64), np.inf
        for priorities in islice(self._tried(environment, request.policy), self.evaluations):
            seconds = environment.seconds(priorities)
            if seconds < least:
                best, least = priorities, seconds
        return _planned(environment, best, self.name, f"a policy, {counted(environment.evaluations, 'order')} tried")

    def _tried(self, environment: FusionEnvironment, file: str | None) -> Iterator[np.ndarray]:
        policy = learning.load_policy(SHIPPED if file is None else file).policy
        yield np.zeros(len(environment.graph.ops), np.int64)
        yield from learning.priorities(policy, environment.features, self.evaluations, self.seed)


def _planned(environment: FusionEnvironment, priorities: np.ndarray, name: str, by: str) -> FusionPlan:
    """The plan of some priorities."""
    graph, prices = environment.graph, environment.prices
    kernels = environment.kernels(priorities)
    fused = [kernel for kernel in kernels if kernel.bit_count() > 1]
    groups = [tuple(members_of(kernel)) for kernel in fused]
    scores = {
        frozenset(group): sum(prices(1 << number) for number in group) - prices(kernel)
        for group, kernel in zip(groups, fused, strict=True)
    }
    schemes = {number: scheme for group in groups for number, scheme in prices.schemes(group).items()}
    told = (
        f"{environment.fusion.seconds(kernels) * 1e6:.2f} us by the latency-evaluator, launches included; "
        f"{environment.baseline_seconds * 1e6:.2f} without fusion"
    )
    decision = Decision("priority", f"{counted(len(kernels), 'kernel')} by {by}", True, told)
    return plan_of(graph, groups, name, [decision], scores=scores, schemes=schemes)
