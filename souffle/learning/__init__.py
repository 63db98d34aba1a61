"""Learning to Fuse (002): a policy network that assigns priorities to the vertices of a graph, and its training.

The room knows nothing of compilers: it sees arrays and a time (:mod:`souffle.learning.problem`). What needs PyTorch is
loaded when first used, so that importing the package needs NumPy only.
"""

from __future__ import annotations

from souffle.learning.problem import NEEDED, Environment, GraphFeatures, PolicyError, imported, require

_LAZY = {
    "Policy": "souffle.learning.policy",
    "PolicyConfig": "souffle.learning.policy",
    "priorities": "souffle.learning.inference",
    "Best": "souffle.learning.history",
    "HistoryRow": "souffle.learning.history",
    "Training": "souffle.learning.training",
    "PpoConfig": "souffle.learning.ppo",
    "fine_tune": "souffle.learning.ppo",
    "train": "souffle.learning.ppo",
    "StoredPolicy": "souffle.learning.files",
    "load_policy": "souffle.learning.files",
    "save_policy": "souffle.learning.files",
    "training_curves": "souffle.learning.curves",
}
_ALSO_NEEDED = {"souffle.learning.curves": ("matplotlib",)}

__all__ = [
    "NEEDED",
    "Best",
    "Environment",
    "GraphFeatures",
    "HistoryRow",
    "Policy",
    "PolicyConfig",
    "PolicyError",
    "PpoConfig",
    "StoredPolicy",
    "Training",
    "fine_tune",
    "load_policy",
    "priorities",
    "require",
    "save_policy",
    "train",
    "training_curves",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'souffle.learning' has no attribute {name!r}")
    require(*_ALSO_NEEDED.get(_LAZY[name], ()))
    return getattr(imported(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
