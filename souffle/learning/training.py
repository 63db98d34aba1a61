"""The state of a training, and its checkpoints: a run that was interrupted goes on to the same bits."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from souffle.learning.files import fill_policy, read_tensors, write_tensors
from souffle.learning.history import Best, HistoryRow
from souffle.learning.policy import Policy
from souffle.learning.problem import Environment, PolicyError

__all__ = ["State", "Training", "begun", "best_so_far", "load_state", "save_state"]


@dataclass(frozen=True, eq=False)
class Training:
    """What a training gave.

    Attributes
    ----------
    policy : Policy
    history : tuple of HistoryRow
    best : dict of Best
        By the name of the graph. A graph of which no draw could run has none.
    provenance : dict
        Graphs, seed, updates, hyperparameters and versions of libraries, for :func:`souffle.learning.save_policy`.
    """

    policy: Policy
    history: tuple[HistoryRow, ...]
    best: dict[str, Best]
    provenance: dict


@dataclass(eq=False)
class State:
    """A training under way; all that an update reads, and all that it changes."""

    policy: Policy
    optimizer: torch.optim.Adam
    generator: torch.Generator
    update: int = 0
    history: list[HistoryRow] = field(default_factory=list)
    best: dict[str, Best] = field(default_factory=dict)

    @property
    def evaluations(self) -> dict[str, int]:
        """How often each graph was asked for; a graph that was not is missing."""
        return {row.graph: row.evaluations for row in self.history}

    @property
    def wall_seconds(self) -> float:
        """Of the updates so far."""
        return self.history[-1].wall_seconds if self.history else 0.0


def begun(policy: Policy, learning_rate: float, seed: int) -> State:
    """A training that has made no update; `policy` itself is not changed by it."""
    own = copy.deepcopy(policy)
    return State(own, torch.optim.Adam(own.parameters(), learning_rate), torch.Generator().manual_seed(seed))


def save_state(
    path: Path, state: State, policy: Policy, environments: Sequence[Environment], settings: Mapping[str, object]
) -> None:
    """Write a checkpoint.

    Parameters
    ----------
    path : Path
    state : State
    policy : Policy
        As it was before the training.
    environments : sequence of Environment
    settings : mapping
        The hyperparameters that may not change on the way.
    """
    names = [environment.features.name for environment in environments]
    tensors = {f"policy.{name}": value for name, value in state.policy.state_dict().items()}
    for number, moments in state.optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{number}.{name}": value for name, value in moments.items()}
    tensors |= {f"best.{names.index(name)}": torch.from_numpy(best.priorities) for name, best in state.best.items()}
    tensors["generator"] = state.generator.get_state()
    # Numbers and not JSON, which a long training would write and read for a long time.
    rows = [astuple(replace(row, graph=names.index(row.graph))) for row in state.history]
    tensors["history"] = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), -1)
    write_tensors(path, "checkpoint", tensors, {**_identity(policy, environments, settings), "update": state.update})


def load_state(
    path: Path,
    policy: Policy,
    environments: Sequence[Environment],
    settings: Mapping[str, object],
    learning_rate: float,
) -> State:
    """What :func:`save_state` wrote.

    Raises
    ------
    PolicyError
        If the file is damaged or of another training.
    """
    tensors, values = read_tensors(path, "checkpoint")
    for what, own in _identity(policy, environments, settings).items():
        if values.get(what) != own:
            raise PolicyError(
                f"{path}: the checkpoint of another training: its {what} are not the same; "
                "delete it to begin anew, or name another file"
            )
    try:
        return _restored(path, tensors, int(values["update"]), policy, environments, learning_rate)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(f"{path}: a damaged checkpoint ({error}); delete it to begin anew") from error


def _restored(
    path: Path,
    tensors: Mapping[str, Tensor],
    update: int,
    policy: Policy,
    environments: Sequence[Environment],
    learning_rate: float,
) -> State:
    state = begun(fill_policy(path, policy.config, _under(tensors, "policy.")), learning_rate, 0)
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in _under(tensors, "adam.").items():
        number, _, moment = name.partition(".")
        moments.setdefault(int(number), {})[moment] = value
    for number, parameter in enumerate(state.policy.parameters() if moments else ()):
        found = {name: value.shape for name, value in moments[number].items()}
        if found != {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}:
            raise ValueError(f"the optimizer's state of parameter {number} is not that of Adam")
    groups = state.optimizer.state_dict()["param_groups"]
    state.optimizer.load_state_dict({"state": moments, "param_groups": groups})
    state.generator.set_state(tensors["generator"])
    state.update = update
    for row in tensors["history"].tolist():
        environment = environments[int(row[1])]
        whole = {"update": int(row[0]), "graph": environment.features.name, "evaluations": int(row[8])}
        state.history.append(replace(HistoryRow(*row), **whole))
    last = {row.graph: row for row in state.history}
    for number, priorities in _under(tensors, "best.").items():
        name = environments[int(number)].features.name
        state.best[name] = Best(last[name].best_seconds, priorities.numpy())
    return state


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _identity(policy: Policy, environments: Sequence[Environment], settings: Mapping[str, object]) -> dict:
    """What has to be the same for a training to go on."""
    first = hashlib.sha256()
    for value in policy.state_dict().values():
        first.update(value.numpy().tobytes())
    return {
        "policy": policy.config.as_json(),
        "first parameters": first.hexdigest(),
        "graphs": [_graph_identity(environment) for environment in environments],
        "hyperparameters": dict(settings),
    }


def _graph_identity(environment: Environment) -> list:
    features = environment.features
    digest = hashlib.sha256()
    for array in (features.nodes, features.edges, features.edge_weights):
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return [features.name, digest.hexdigest(), float(environment.baseline_seconds)]


def best_so_far(state: State, graph: str) -> float:
    """The best time of a graph yet; infinity where no draw could run."""
    return state.best[graph].seconds if graph in state.best else math.inf
