"""What workers do for the siege: they make cases, judge them and run them, some together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.siege.trial import run_batch

__all__ = ["tried_batch"]


def tried_batch(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """What came of some cases: a :class:`~benchmarks.siege.trial.Trial` of each as a dictionary.

    Parameters
    ----------
    payload : mapping
        ``seeds``; ``forms`` of stages, all where there are none; ``timeout``, in seconds, of one run.
    shared : mapping
        Not looked at.
    """
    trials = run_batch(payload["seeds"], payload["timeout"], tuple(payload["forms"]))
    return [asdict(trial) for trial in trials]
