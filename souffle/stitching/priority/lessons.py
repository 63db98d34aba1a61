"""A policy trained on graphs of networks: environments, training, and what came of it (002 §3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from souffle import learning
from souffle.cost.device import CostDevice
from souffle.errors import OptionError
from souffle.stitching.graph import OpGraph
from souffle.stitching.priority.environment import FusionEnvironment
from souffle.stitching.priority.features import FEATURES
from souffle.stitching.priority.fusing import FusionRules

__all__ = ["GraphLesson", "LearningReport", "learn_fusion"]

_ENDLESS = 1 << 40
"""Updates: the number of evaluations ends a training."""


@dataclass(frozen=True)
class GraphLesson:
    """What was learned of one graph; times are predicted, launches included.

    Attributes
    ----------
    name : str
    vertices : int
    unfused_seconds, default_seconds : float
        Each TE alone, and fused in the default order.
    policy_seconds : float
        With the likeliest priorities of the policy.
    best_seconds : float
        The best that was drawn in the training.
    evaluations : int
        In the training.
    """

    name: str
    vertices: int
    unfused_seconds: float
    default_seconds: float
    policy_seconds: float
    best_seconds: float
    evaluations: int


@dataclass(frozen=True)
class LearningReport:
    """What a training gave.

    Attributes
    ----------
    graphs : tuple of GraphLesson
    policy : str
        Its file.
    updates : int
    seconds : float
        Of training, those of runs before included that it went on from.
    device : str
        The GPU that times are predicted for.
    """

    graphs: tuple[GraphLesson, ...]
    policy: str
    updates: int
    seconds: float
    device: str


def learn_fusion(
    graphs: Mapping[str, OpGraph],
    device: CostDevice,
    out: Path,
    *,
    rules: FusionRules,
    evaluations: int,
    start: Path | None,
    seed: int,
    checkpoint: Path,
    curves: Path | None,
    progress: Callable[[str], None],
) -> LearningReport:
    """Train a policy and write its file.

    Parameters
    ----------
    graphs : mapping of str to OpGraph
    device : CostDevice
    out : Path
        For the policy.
    rules : FusionRules
    evaluations : int
        Of each graph.
    start : Path or None
        A policy to begin with; parameters by chance without one.
    seed : int
    checkpoint : Path
        Where a training is kept that is not at its end. It goes on from there.
    curves : Path or None
        For a picture of the training.
    progress : callable

    Raises
    ------
    OptionError
        If there is nothing to train on.
    PolicyError
        If PyTorch is missing, or a file is none of its kind or cannot be written.
    """
    empty = next((name for name, graph in graphs.items() if not graph.ops), None)
    if empty is not None or not graphs or evaluations < 2:
        what = f"{len(graphs)} graphs, {evaluations} evaluations of each" if empty is None else f"{empty} has no TEs"
        raise OptionError(f"{what}: training needs a graph with TEs, and 2 evaluations to compare")
    environments = [FusionEnvironment(graph, device, rules, name) for name, graph in graphs.items()]
    policy = (
        learning.Policy(learning.PolicyConfig(len(FEATURES)), seed)
        if start is None
        else learning.load_policy(start, len(FEATURES)).policy
    )
    config = learning.PpoConfig(updates=_ENDLESS, evaluations=evaluations, seed=seed, graphs=len(environments))

    def told(row: learning.HistoryRow) -> None:
        gain = row.baseline_seconds / row.mean_seconds
        progress(f"update {row.update + 1}, {row.graph}: {gain:.3f} times as fast as without fusion on average")

    training = learning.train(policy, environments, config, checkpoint=checkpoint, progress=told)
    about = {"device": device.product, "limit": rules.limit, "products": rules.products}
    learning.save_policy(out, training.policy, training.provenance | about)
    if curves is not None:
        learning.training_curves(training.history, curves, f"Priority fusion, {device.product}")
    lessons = tuple(_lesson(environment, training) for environment in environments)
    last = training.history[-1]
    return LearningReport(lessons, str(out), last.update + 1, last.wall_seconds, device.product)


def _lesson(environment: FusionEnvironment, training: learning.Training) -> GraphLesson:
    name, count = environment.name, len(environment.graph.ops)
    own = next(learning.priorities(training.policy, environment.features))
    return GraphLesson(
        name,
        count,
        environment.baseline_seconds,
        environment.seconds(np.zeros(count)),
        environment.seconds(own),
        training.best[name].seconds,
        max(row.evaluations for row in training.history if row.graph == name),
    )
