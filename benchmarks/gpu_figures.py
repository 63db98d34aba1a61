"""What figures found on a GPU host mean, the same for Souffle and for its peers: errors, latencies, clocks."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["BATCH", "SPIN_SECONDS", "compare", "over_rounds", "read_clocks"]

SPIN_SECONDS = 0.5
"""Of work before anything is timed: a GPU that had nothing to do runs at a fraction of its clock."""
BATCH = 20
"""Graphs between one pair of events, beside one by one."""
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
"""Against ONNX Runtime, in fp32."""
_EXACT = ("fp32", "tf32x3")
"""Precisions that are held to that."""
_ROUNDED = 2e-2
"""Of the output's largest magnitude, where factors of products are rounded to fp16 or TF32."""


def compare(found: np.ndarray, expected: np.ndarray, precision: str) -> dict[str, Any]:
    """Whether an output is within its precision's tolerance, and the largest error, absolute and over the tolerance."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return {"ok": False, "error": f"{found.dtype} {found.shape} and not {expected.dtype} {expected.shape}"}
    if expected.dtype.kind in "biu":
        wrong = int(np.count_nonzero(found != expected))
        return {"ok": wrong == 0, "wrong_elements": wrong}
    if not expected.size:
        return {"ok": True, "max_abs": 0.0, "of_tolerance": 0.0}
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    allowed = _ABSOLUTE + _RELATIVE * np.abs(expected)
    if precision not in _EXACT:
        allowed = np.full(expected.shape, max(_ABSOLUTE, _ROUNDED * np.abs(expected).max()))
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(found - expected))
    if not np.isfinite(difference).all():
        return {"ok": False, "error": f"{int((~np.isfinite(difference)).sum())} elements are not finite"}
    of_tolerance = float((difference / allowed).max())
    return {"ok": of_tolerance <= 1.0, "max_abs": float(difference.max()), "of_tolerance": of_tolerance}


def read_clocks() -> str | None:
    """The driver's version and the clocks at this moment, in its own tool's words."""
    found = shutil.which("nvidia-smi")
    if found is None:
        return None
    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw"
    command = [found, f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def over_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One way to run, of the ``median_us``, ``min_us`` and ``p90_us`` that each round has found."""
    return {
        "median_us": statistics.median(item["median_us"] for item in rounds),
        "min_us": min(item["min_us"] for item in rounds),
        "p90_us": statistics.median(item["p90_us"] for item in rounds),
        "round_medians_us": [item["median_us"] for item in rounds],
    }
