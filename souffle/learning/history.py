"""What a training tells: a row for each graph of each update, and the best priorities of each graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Best", "HistoryRow"]


@dataclass(frozen=True)
class HistoryRow:
    """One graph in one update.

    Attributes
    ----------
    update : int
        From 0.
    graph : str
    baseline_seconds : float
        Without fusion.
    mean_seconds : float
        Of the draws of this update that can run; infinity if none can.
    best_seconds : float
        Of all draws so far.
    entropy : float
        Nats for a vertex, before the update.
    kl : float
        How far the update moved the policy: the divergence of the new from the old one, nats for a vertex.
    clip_fraction : float
        Share of the ratios that were outside of the clip range at the end of the update.
    evaluations : int
        Times that this training asked this graph's environment for so far.
    wall_seconds : float
        Since the training began, without what lay between interruption and resumption.
    """

    update: int
    graph: str
    baseline_seconds: float
    mean_seconds: float
    best_seconds: float
    entropy: float
    kl: float
    clip_fraction: float
    evaluations: int
    wall_seconds: float


@dataclass(frozen=True, eq=False)
class Best:
    """The best of what a training drew for a graph.

    Attributes
    ----------
    seconds : float
    priorities : int64 array (n,)
    """

    seconds: float
    priorities: np.ndarray
