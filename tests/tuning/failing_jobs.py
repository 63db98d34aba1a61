"""Jobs of a search that end badly for some candidates: which, their payload's ``fails`` says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from souffle.tuning.candidate import Candidate
from souffle.tuning.stage_work import predict_built

__all__ = ["figures"]


def figures(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> Any:
    """As :func:`souffle.tuning.stage_work.predict_built`, but for the candidate of a name."""
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
            return [{"problem": "", "seconds": [float("nan")], "registers": 1, "spill_bytes": 0} for _ in names]
    return predict_built(payload, shared)
