"""Priorities from a policy that is not trained any further, and what makes them and a training repeatable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from souffle.learning.policy import Policy
from souffle.learning.problem import GraphFeatures

__all__ = ["drawn", "priorities", "repeatable"]


def priorities(policy: Policy, features: GraphFeatures, samples: int = 1, seed: int = 0) -> Iterator[np.ndarray]:
    """Priorities of a graph's vertices: first the most likely of each vertex, then draws.

    Parameters
    ----------
    policy : Policy
    features : GraphFeatures
    samples : int
        How many are given in all. One more costs next to nothing: the network is asked once.
    seed : int
        Of the draws.

    Yields
    ------
    int64 array (n,)
        From 0 to one below the policy's levels.

    Raises
    ------
    PolicyError
        If the policy knows other features.
    """
    with torch.no_grad(), repeatable():
        logits = policy(features)
    generator = torch.Generator().manual_seed(seed)
    for number in range(samples):
        yield drawn(logits, 1, generator)[0].numpy() if number else logits.argmax(dim=1).numpy()


def drawn(logits: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draws of priorities (count, n) from logits (n, levels)."""
    return torch.multinomial(logits.softmax(dim=1), count, replacement=True, generator=generator).T.contiguous()


@contextmanager
def repeatable() -> Iterator[None]:
    """Let the same numbers come out the same to the last bit, then set PyTorch back.

    On one thread, for sums depend on how many share them. It is also faster: a policy's operations take microseconds,
    and threads that wait for each other on busy cores take many times that.
    """
    threads = torch.get_num_threads()
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
        torch.set_num_threads(threads)
