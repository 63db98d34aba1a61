"""Where a network's predicted time goes: its launches, its waits, and each of its stages."""

from __future__ import annotations

from typing import Any

from souffle.codegen.plan import Plan
from souffle.runtime.explain import launch_counts

__all__ = ["stage_times"]


def stage_times(plan: Plan) -> dict[str, Any]:
    """The terms of a plan's predicted time, in microseconds of one run.

    Returns
    -------
    dict
        ``launch_us``, ``wait_us``, ``code_us`` and ``stage_us``: a list of a stage's name, its time in all its runs,
        how many these are, and what bounds it. Equal stages of a kernel are one. All empty where nothing is predicted.
    """
    launches = waits = code = 0.0
    stages: dict[str, dict[str, Any]] = {}
    for kernel, count in zip(plan.kernels, launch_counts(plan), strict=True):
        predicted = kernel.predicted
        if predicted is None or not count:
            continue
        launches += count * predicted.launch_seconds * 1e6
        waits += count * predicted.sync_seconds * 1e6
        code += count * predicted.code_seconds * 1e6
        for stage in predicted.stages:
            known = stages.setdefault(stage.name, {"stage": stage.name, "us": 0.0, "runs": 0, "bound": stage.bound})
            known["us"] += count * stage.seconds * 1e6
            known["runs"] += count * stage.runs
    for one in stages.values():
        one["us"] = round(one["us"], 3)
    return {
        "launch_us": round(launches, 3),
        "wait_us": round(waits, 3),
        "code_us": round(code, 3),
        "stage_us": sorted(stages.values(), key=lambda one: -one["us"]),
    }
