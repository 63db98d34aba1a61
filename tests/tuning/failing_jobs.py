"""Jobs of a search that end badly for some candidates: which, their payload's ``fails`` says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from souffle.tuning.candidate import Candidate

__all__ = ["figures"]


def figures(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> Any:
    """As :func:`souffle.tuning.stage_work.predict_built`, without a compiler, but for the candidate of a name."""
    failing, how = payload["fails"]
    names = [Candidate.of_bytes(data).name for data in payload["candidates"]]
    if failing in names:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            time.sleep(600)
        if how == "takes all memory":
            bytearray(1 << 40)
        if how == "gives too few":
            return []
        if how == "gives no number":
            return [_figures(float("nan")) for _ in names]
    return [_figures(1e-6 * len(name)) for name in names]


def _figures(seconds: float) -> dict[str, Any]:
    return {"problem": "", "seconds": [seconds], "registers": 1, "spill_bytes": 0}
