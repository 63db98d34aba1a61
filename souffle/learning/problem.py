"""What a policy sees of a problem: the features of a graph, and the time that priorities lead to (002 §3)."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np

from souffle.errors import SouffleError

__all__ = ["NEEDED", "Environment", "GraphFeatures", "PolicyError", "imported", "require"]

NEEDED = ("torch", "torch_geometric", "safetensors")


class PolicyError(SouffleError):
    """A policy cannot be made, read, trained or asked; the message says why and what would help."""


@dataclass(frozen=True, eq=False)
class GraphFeatures:
    """A graph as arrays.

    Attributes
    ----------
    name : str
        Different for each graph of a training: the history and the best priorities are kept by it.
    nodes : float32 array (n, F)
        Vertices in a topological order. Scaled to about [-1, 1] or [0, 3].
    edges : int64 array (2, E)
        Producers and consumers; a producer stands before its consumer.
    edge_weights : float32 array (E,)
        Scaled logarithm of the bytes that pass.

    Raises
    ------
    PolicyError
        If the arrays are no such graph.
    """

    name: str
    nodes: np.ndarray
    edges: np.ndarray
    edge_weights: np.ndarray

    def __post_init__(self) -> None:
        problem = _problem(self.nodes, self.edges, self.edge_weights)
        if problem:
            raise PolicyError(f"the features of the graph {self.name!r} are not valid: {problem}")


def _problem(nodes: np.ndarray, edges: np.ndarray, weights: np.ndarray) -> str:
    """What is wrong with the arrays of a graph, or nothing."""
    if nodes.ndim != 2 or 0 in nodes.shape or nodes.dtype != np.float32:
        return f"nodes are {nodes.dtype} {nodes.shape}, which should be float32 (n, F) of one vertex at least"
    if edges.ndim != 2 or len(edges) != 2 or edges.dtype != np.int64:
        return f"edges are {edges.dtype} {edges.shape}, which should be int64 (2, E)"
    if weights.shape != edges.shape[1:] or weights.dtype != np.float32:
        return f"edge_weights are {weights.dtype} {weights.shape}, which should be float32 {edges.shape[1:]}"
    if not np.isfinite(nodes).all() or not np.isfinite(weights).all():
        return "a feature of a vertex or an edge is no finite number"
    if edges.size and (edges.min() < 0 or edges.max() >= len(nodes)):
        return f"an edge leads to no vertex of the {len(nodes)}"
    if (edges[0] >= edges[1]).any():
        return "a consumer stands before its producer; number the vertices in a topological order"
    return ""


class Environment(Protocol):
    """One graph on one device.

    Attributes
    ----------
    features : GraphFeatures
    baseline_seconds : float
        The predicted time without fusion.
    evaluations : int
        How often :meth:`seconds` was asked so far.
    """

    features: GraphFeatures
    baseline_seconds: float
    evaluations: int

    def seconds(self, priorities: np.ndarray) -> float:
        """The predicted time after priority fusion.

        Parameters
        ----------
        priorities : int64 array (n,)
            From 0, the lowest, to one below the policy's number of levels, the highest.

        Returns
        -------
        float
            Infinity where what the priorities lead to cannot run.
        """
        ...


def require(*names: str) -> None:
    """Refuse to go on where a library is missing.

    Parameters
    ----------
    *names : str
        Modules; those of policies and their training if none is given.

    Raises
    ------
    PolicyError
        If one of them cannot be imported.
    """
    missing = [f"{name} ({problem})" for name in names or NEEDED if (problem := _import_problem(name))]
    if missing:
        raise PolicyError(f"priorities need {', '.join(missing)}: pip install 'souffle-dl[learn]'")


def imported(name: str) -> ModuleType:
    """A module, without the warnings of libraries about each other that no user can mend."""
    with warnings.catch_warnings():
        # torch_geometric calls what PyTorch has deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        return importlib.import_module(name)


def _import_problem(name: str) -> str:
    try:
        imported(name)
    except ImportError as error:
        return str(error)
    return ""
