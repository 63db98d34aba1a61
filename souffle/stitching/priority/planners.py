"""Priority fusion as fusion planners, by who gives the priorities (002 §3, §4).

Each plans with :class:`~souffle.stitching.priority.fusing.PriorityFusion`, and the best of the orders that it tries by
predicted time is the plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from souffle import learning
from souffle.decision import Decision
from souffle.stitching.graph import members_of
from souffle.stitching.plan import FusionPlan, plan_of
from souffle.stitching.planner import FusionRequest
from souffle.stitching.priority.annealing import anneal
from souffle.stitching.priority.environment import FusionEnvironment
from souffle.stitching.priority.features import FEATURES
from souffle.stitching.priority.fusing import FusionRules
from souffle.stitching.priority.orders import by_saved_bytes
from souffle.wording import counted

__all__ = ["AnnealedFusion", "DefaultFusion", "GreedyFusion", "LearnedFusion", "SHIPPED", "trained_rules"]

SHIPPED = Path(learning.__file__).with_name("policies") / "default.safetensors"
"""The policy where the user names none."""


class _PriorityPlanner(ABC):
    """Plans by priorities that a kind of planner chooses."""

    name: str
    rules: FusionRules
    block_composition = True

    def plan(self, request: FusionRequest) -> FusionPlan:
        """See :meth:`souffle.stitching.planner.FusionPlanner.plan`."""
        environment = FusionEnvironment(request.graph, request.device, self.rules)
        return _planned(environment, *self.chosen(environment), self.name)

    @abstractmethod
    def chosen(self, environment: FusionEnvironment) -> tuple[np.ndarray, str]:
        """Priorities, one for each vertex, and by what they were chosen, for the decision."""


@dataclass(frozen=True)
class DefaultFusion(_PriorityPlanner):
    """The order of TensorFlow's fusion: topological, first come first served.

    Attributes
    ----------
    rules : FusionRules
    """

    rules: FusionRules = field(default_factory=FusionRules)
    name = "priority-default"

    def chosen(self, environment: FusionEnvironment) -> tuple[np.ndarray, str]:
        """All equal."""
        return np.zeros(len(environment.graph.ops)), "the default order"


@dataclass(frozen=True)
class GreedyFusion(_PriorityPlanner):
    """What saves most bytes of global memory first, as XLA's priority fusion does.

    Attributes
    ----------
    rules : FusionRules
    """

    rules: FusionRules = field(default_factory=FusionRules)
    name = "priority-greedy"

    def chosen(self, environment: FusionEnvironment) -> tuple[np.ndarray, str]:
        """By their places in that order."""
        return -np.argsort(by_saved_bytes(environment.graph)), "bytes that are saved"


@dataclass(frozen=True)
class AnnealedFusion(_PriorityPlanner):
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

    def chosen(self, environment: FusionEnvironment) -> tuple[np.ndarray, str]:
        """The best that are met."""
        count, scale = len(environment.graph.ops), environment.baseline_seconds
        found = anneal(environment.seconds, count, scale, self.evaluations, self.seed)
        return found.priorities, f"annealing, {counted(self.evaluations, 'order')} tried"


@dataclass(frozen=True)
class LearnedFusion:
    """Priorities of a policy that was trained (:mod:`souffle.learning`): its likeliest ones, draws, and all equal.

    What may be fused is what was while it was trained.

    Attributes
    ----------
    evaluations : int
        Orders that are tried.
    seed : int
        Of the draws.
    """

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
        file = SHIPPED if request.policy is None else request.policy
        stored = learning.load_policy(file, len(FEATURES))
        environment = FusionEnvironment(request.graph, request.device, trained_rules(stored.provenance))
        default = np.zeros(len(request.graph.ops), np.int64)
        tried = learning.priorities(stored.policy, environment.features, self.evaluations - 1, self.seed)
        best = min(chain([default], tried), key=environment.seconds)
        return _planned(environment, best, f"a policy, {counted(environment.evaluations, 'order')} tried", self.name)


def trained_rules(provenance: Mapping[str, object]) -> FusionRules:
    """What could be fused in the training of a policy, as far as its file says so."""
    given = {name: provenance.get(name) for name in ("limit", "products")}
    return FusionRules(**{name: value for name, value in given.items() if type(value) is int})


def _planned(environment: FusionEnvironment, priorities: np.ndarray, by: str, name: str) -> FusionPlan:
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
