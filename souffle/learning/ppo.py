"""Training by proximal policy optimization (002 §3, the second formula).

An episode has one step: priorities are drawn for all vertices of a graph, and the reward is what fusion by them gains.
The action of a vertex has a ratio of its own, and all vertices of a draw share the draw's reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import numpy as np
import torch
import torch_geometric
from torch import Tensor

from souffle.learning.history import Best, HistoryRow
from souffle.learning.inference import drawn, repeatable
from souffle.learning.objective import advantages, clipped_objective, rewards
from souffle.learning.policy import Policy
from souffle.learning.problem import Environment, GraphFeatures, PolicyError
from souffle.learning.training import State, Training, begun, best_so_far, load_state, save_state

__all__ = ["PpoConfig", "fine_tune", "train"]

_MAY_CHANGE = ("updates", "evaluations")
"""Hyperparameters that a training may go on with other values of: where it ends."""


@dataclass(frozen=True)
class PpoConfig:
    """Hyperparameters.

    Attributes
    ----------
    updates : int
        After so many the training ends.
    evaluations : int, optional
        Times that the environment of each graph is asked at most; a graph that has fewer than two left takes no part.
    draws : int
        Priorities drawn for each graph of an update.
    graphs : int
        Graphs of an update at most. Those that were asked least take part.
    epochs : int
        Steps of the optimizer in an update.
    clip : float
        The formula's epsilon.
    kl_limit : float
        Once the policy moved so far in an update, nats for a vertex, no further step is taken.
    learning_rate : float
        Of Adam.
    gradient_norm : float
        Longer gradients are shortened to it.
    entropy : float
        Weight of the entropy, nats for a vertex, in the first update.
    entropy_half_life : float
        Updates after which the weight is half. It depends on no total, so that a training can go on for longer.
    seed : int
        Of the draws and of the order of graphs.
    """

    updates: int = 200
    evaluations: int | None = None
    draws: int = 16
    graphs: int = 8
    epochs: int = 4
    clip: float = 0.2
    kl_limit: float = 0.05
    learning_rate: float = 2e-3
    gradient_norm: float = 1.0
    entropy: float = 0.003
    entropy_half_life: float = 50.0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.draws, self.graphs, self.epochs, self.updates) < 1 or self.draws < 2:
            raise PolicyError("a training needs one update, epoch and graph at least, and two draws to compare")
        numbers = (self.clip, self.kl_limit, self.learning_rate, self.gradient_norm, self.entropy_half_life)
        if not all(math.isfinite(number) and number > 0 for number in numbers):
            raise PolicyError("clip, kl_limit, learning_rate, gradient_norm and entropy_half_life should be above zero")
        if not 0 <= self.entropy < math.inf:
            raise PolicyError(f"the weight of the entropy is {self.entropy}, no number from zero")


@dataclass(frozen=True, eq=False)
class _Batch:
    """Draws of one graph, with what the policy that drew them thought of them."""

    features: GraphFeatures
    priorities: Tensor  # int64 (draws, n)
    advantages: Tensor  # float32 (draws,)
    log_policy: Tensor  # float32 (n, levels)
    baseline_seconds: float
    mean_seconds: float
    evaluations: int


def train(
    policy: Policy,
    environments: Sequence[Environment],
    config: PpoConfig | None = None,
    *,
    checkpoint: str | Path | None = None,
    every: int = 10,
    progress: Callable[[HistoryRow], None] = lambda row: None,
) -> Training:
    """Train a policy on several graphs jointly.

    Parameters
    ----------
    policy : Policy
        To begin with. It is not changed.
    environments : sequence of Environment
    config : PpoConfig, optional
    checkpoint : path, optional
        A file that the training writes, and goes on from if it is there. To the last bit, the result is that of a
        training that was not interrupted; an interruption, as by ``KeyboardInterrupt``, leaves the file whole.
    every : int
        Updates from one checkpoint to the next; one is also written at the end.
    progress : callable
        Is told each row of the history.

    Returns
    -------
    Training

    Raises
    ------
    PolicyError
        If graphs have equal names or other features than the policy knows, if an environment answers with what is no
        time, or the checkpoint is damaged or of another training.
    """
    config = config or PpoConfig()
    path = Path(checkpoint) if checkpoint is not None else None
    _check(environments)
    settings = {name: value for name, value in asdict(config).items() if name not in _MAY_CHANGE}
    with repeatable():
        if path is not None and path.exists():
            state = load_state(path, policy, environments, settings, config.learning_rate)
        else:
            state = begun(policy, config.learning_rate, config.seed)
        saved = state.update
        before = monotonic() - state.wall_seconds
        while state.update < config.updates and (chosen := _taking_part(state, environments, config)):
            _update(state, chosen, config, before, progress)
            if path is not None and state.update - saved >= every:
                save_state(path, state, policy, environments, settings)
                saved = state.update
        if path is not None and state.update > saved:
            save_state(path, state, policy, environments, settings)
    return Training(state.policy, tuple(state.history), state.best, _provenance(state, environments, config))


def fine_tune(
    policy: Policy,
    environment: Environment,
    config: PpoConfig | None = None,
    *,
    checkpoint: str | Path | None = None,
    every: int = 10,
    progress: Callable[[HistoryRow], None] = lambda row: None,
) -> Training:
    """Train a policy further on one graph; see :func:`train`."""
    return train(policy, [environment], config, checkpoint=checkpoint, every=every, progress=progress)


def _check(environments: Sequence[Environment]) -> None:
    names = [environment.features.name for environment in environments]
    if not names or len(set(names)) < len(names):
        raise PolicyError(f"a training needs graphs with different names, not {', '.join(names) or 'none'}")
    for environment in environments:
        baseline = environment.baseline_seconds
        if not (math.isfinite(baseline) and baseline > 0):
            raise PolicyError(f"{environment.features.name!r} takes {baseline} s without fusion, which is no time")


def _taking_part(state: State, environments: Sequence[Environment], config: PpoConfig) -> list[Environment]:
    """The graphs of the next update: those asked least, by chance among equals."""
    asked = state.evaluations

    def spent(environment: Environment) -> int:
        return asked.get(environment.features.name, 0)

    left = [environment for environment in environments if _draws_left(spent(environment), config) >= 2]
    if not left:
        return []  # nothing is drawn: a training that goes on with more evaluations does not know of this end
    order = torch.randperm(len(environments), generator=state.generator).tolist()
    places = {environments[number].features.name: place for place, number in enumerate(order)}
    left.sort(key=lambda environment: (spent(environment), places[environment.features.name]))
    return left[: config.graphs]


def _draws_left(asked: int, config: PpoConfig) -> int:
    return config.draws if config.evaluations is None else min(config.draws, config.evaluations - asked)


def _update(
    state: State,
    chosen: Sequence[Environment],
    config: PpoConfig,
    before: float,
    progress: Callable[[HistoryRow], None],
) -> None:
    """Draw for some graphs, and improve the policy by what the draws gained."""
    batches = [_drawn_batch(state, environment, config) for environment in chosen]
    weight = config.entropy * 0.5 ** (state.update / config.entropy_half_life)
    for _ in range(config.epochs):
        state.optimizer.zero_grad()
        if _backward(state.policy, batches, weight, config.clip) > config.kl_limit:
            break
        torch.nn.utils.clip_grad_norm_(state.policy.parameters(), config.gradient_norm)
        state.optimizer.step()
    rows = [_row(state, batch, config, monotonic() - before) for batch in batches]
    state.history += rows
    state.update += 1
    for row in rows:
        progress(row)


def _drawn_batch(state: State, environment: Environment, config: PpoConfig) -> _Batch:
    features = environment.features
    asked = state.evaluations.get(features.name, 0)
    with torch.no_grad():
        logits = state.policy(features)
    priorities = drawn(logits, _draws_left(asked, config), state.generator)
    seconds = np.array([_seconds(environment, draw) for draw in priorities.numpy()])
    first = int(seconds.argmin())
    if seconds[first] < best_so_far(state, features.name):
        state.best[features.name] = Best(float(seconds[first]), priorities[first].numpy().copy())
    runs = seconds[np.isfinite(seconds)]
    return _Batch(
        features,
        priorities,
        torch.from_numpy(advantages(rewards(seconds, environment.baseline_seconds)).astype(np.float32)),
        logits.log_softmax(dim=1),
        environment.baseline_seconds,
        float(runs.mean()) if len(runs) else math.inf,
        asked + len(seconds),
    )


def _seconds(environment: Environment, priorities: np.ndarray) -> float:
    """The answer of an environment; it gets a copy, which it may keep."""
    seconds = float(environment.seconds(priorities.copy()))
    if not seconds > 0:
        name = environment.features.name
        raise PolicyError(f"{name!r} takes {seconds} s with some priorities, which is no time; infinity: it cannot run")
    return seconds


def _backward(policy: Policy, batches: Sequence[_Batch], entropy_weight: float, clip: float) -> float:
    """Add up the gradients of the graphs; also how far the policy is from the one that drew."""
    divergence = 0.0
    for batch in batches:
        log_policy = policy(batch.features).log_softmax(dim=1)
        gain = clipped_objective(_log_ratios(log_policy, batch), batch.advantages, clip)
        (-(gain + entropy_weight * _entropy(log_policy)) / len(batches)).backward()
        divergence += _divergence(batch.log_policy, log_policy.detach()) / len(batches)
    return divergence


def _log_ratios(log_policy: Tensor, batch: _Batch) -> Tensor:
    return (log_policy - batch.log_policy).gather(1, batch.priorities.T).T


def _entropy(log_policy: Tensor) -> Tensor:
    return -(log_policy.exp() * log_policy).sum(dim=1).mean()


def _divergence(old: Tensor, new: Tensor) -> float:
    return float((old.exp() * (old - new)).sum(dim=1).mean())


def _row(state: State, batch: _Batch, config: PpoConfig, wall_seconds: float) -> HistoryRow:
    with torch.no_grad():
        log_policy = state.policy(batch.features).log_softmax(dim=1)
        outside = (_log_ratios(log_policy, batch).exp() - 1).abs() > config.clip
    return HistoryRow(
        state.update,
        batch.features.name,
        batch.baseline_seconds,
        batch.mean_seconds,
        best_so_far(state, batch.features.name),
        float(_entropy(batch.log_policy)),
        _divergence(batch.log_policy, log_policy),
        float(outside.float().mean()),
        batch.evaluations,
        wall_seconds,
    )


def _provenance(state: State, environments: Sequence[Environment], config: PpoConfig) -> dict:
    asked = state.evaluations
    names = [environment.features.name for environment in environments]
    return {
        "graphs": {name: asked.get(name, 0) for name in names},
        "updates": state.update,
        "hyperparameters": asdict(config),
        "versions": {
            "torch": torch.__version__,
            "torch_geometric": torch_geometric.__version__,
            "numpy": np.__version__,
        },
    }
