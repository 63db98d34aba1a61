"""A GPU that the emulator plays, for jobs that measure."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.tuning import measuring

__all__ = ["driver", "measure"]

_TEXTS: dict[bytes, str] = {}
"""Of the machine code that was sent."""


def driver() -> RehearsalDriver:
    """The driver of the GPU."""
    return RehearsalDriver(_TEXTS)


def measure(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> dict[str, Any]:
    """As :func:`souffle.tuning.measuring.measure`, on the played GPU."""
    for role in ("plan", "baseline"):
        _TEXTS.update((module.cubin, module.text) for module in pickle.loads(payload[role]).modules)
    return measuring.measure(payload, shared)
