"""What training maximizes: rewards of draws, their advantages, and the clipped objective (002 §3)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["advantages", "clipped_objective", "rewards"]

_LEAST_SPREAD = 1e-6
"""Of a batch's rewards: below, the draws differ by rounding only, which would be scaled up to an advantage."""
_LEAST_PENALTY = 0.1
"""How far below the worst draw that runs one that cannot run is at least."""


def rewards(seconds: np.ndarray, baseline_seconds: float) -> np.ndarray:
    """Rewards of draws: ``-log(seconds / baseline)``.

    A logarithm, because twice as fast is worth as much from wherever it begins, and one very slow draw does not
    outweigh the differences of all others. A draw that cannot run is as far below the worst one that runs as that is
    below the best.

    Parameters
    ----------
    seconds : float64 array (draws,)
        Infinity where the draw cannot run.
    baseline_seconds : float

    Returns
    -------
    float64 array (draws,)
        Zeros if no draw can run.
    """
    runs = np.isfinite(seconds)
    if not runs.any():
        return np.zeros(len(seconds))
    gains = np.log(baseline_seconds) - np.log(seconds[runs])
    found = np.full(len(seconds), gains.min() - max(np.ptp(gains), _LEAST_PENALTY))
    found[runs] = gains
    return found


def advantages(gained: np.ndarray) -> np.ndarray:
    """``R - R-bar`` in units of the spread, so that graphs with small gains count as much as others.

    R-bar is the mean of the batch: that of the policy as it is, where a running mean is that of older policies too.

    Parameters
    ----------
    gained : float64 array (draws,)

    Returns
    -------
    float64 array (draws,)
    """
    spread = gained.std()
    return (gained - gained.mean()) / spread if spread > _LEAST_SPREAD else np.zeros(len(gained))


def clipped_objective(log_ratios: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """What the policy should maximize (002 §3, the second formula).

    Parameters
    ----------
    log_ratios : float array (draws, n)
        Logarithm of the new probability of each vertex's priority to the old one.
    advantage : float array (draws,)
    clip : float

    Returns
    -------
    float array ()
    """
    ratios = log_ratios.exp()
    shared = advantage[:, None]
    return torch.minimum(ratios * shared, ratios.clamp(1 - clip, 1 + clip) * shared).mean()
