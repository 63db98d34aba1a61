"""What a worker with a GPU does: candidates run beside the rule's own schedule, compared with it first."""

from __future__ import annotations

import pickle
import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from souffle.codegen.plan import Plan
from souffle.errors import DeviceError
from souffle.named import imported
from souffle.runtime import Network
from souffle.runtime.cuda import Cuda
from souffle.tuning.board.values import outputs_differ, random_inputs

__all__ = ["device", "measure"]

_ROUNDS, _REPEATS, _WARMUP = 5, 8, 3
"""Turns of a candidate and the baseline, runs in each, and runs before them."""
_OUTLYING = 3.0
"""Times the median deviation of a turn from the median of all, beyond which it does not count."""


def device(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> dict[str, str]:
    """The GPU of this worker: ``name``, as its driver says, and ``arch``; `payload` holds ``driver`` alone."""
    gpu = Cuda(0, _driver(payload))
    return {"name": gpu.name, "arch": gpu.arch}


def measure(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> dict[str, Any]:
    """Seconds of a candidate.

    Parameters
    ----------
    payload : mapping
        ``plan`` of the candidate and ``baseline``, bytes as :func:`souffle.tuning.stage_work.build` gives them, and
        ``driver``: ``"module:name"`` of a function that gives another driver than CUDA's, or ``""``.
    shared : mapping

    Returns
    -------
    dict
        ``problem``, or ``seconds`` with a cold and with a warm second-level cache, those of the baseline in the same
        turns (``baseline_seconds``), and ``device``.
    """
    driver = _driver(payload)
    try:
        inputs, expected = _reference(payload["baseline"], payload["driver"])
        plan: Plan = pickle.loads(payload["plan"])
        problem = outputs_differ(Network(plan, device="cuda", poison=True, driver=driver)(inputs), expected)
        if problem:
            return {"problem": problem}
        pair = [Network(one, device="cuda", driver=driver) for one in (plan, pickle.loads(payload["baseline"]))]
        times = [_interleaved(pair, inputs, flush) for flush in (True, False)]
    except DeviceError as error:
        return {"problem": str(error)}
    own, base = zip(*times, strict=True)
    name = Cuda(0, driver).name
    return {"problem": "", "seconds": list(own), "baseline_seconds": list(base), "device": name}


def _driver(payload: Mapping[str, Any]) -> Any:
    place = payload["driver"]
    made: Any = imported("driver", place) if place else None
    return made() if callable(made) else None


@lru_cache(maxsize=4)
def _reference(baseline: bytes, driver: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Inputs of a stage, and what the rule's own schedule makes of them."""
    plan: Plan = pickle.loads(baseline)
    inputs = random_inputs((one.name, one.shape, one.dtype) for one in plan.buffers if one.kind == "input")
    outputs = Network(plan, device="cuda", poison=True, driver=_driver({"driver": driver}))(inputs)
    return inputs, {name: np.array(value) for name, value in outputs.items()}


def _interleaved(pair: Sequence[Network], inputs: dict[str, np.ndarray], flush: bool) -> list[float]:
    """Seconds of each network: the median of their turns, but for those that something else disturbed."""
    turns: list[list[float]] = [[] for _ in pair]
    for _ in range(_ROUNDS):
        for own, network in zip(turns, pair, strict=True):
            run = network.time(inputs, repeats=_REPEATS, warmup=_WARMUP, flush=flush)
            own.append(run["median_us"] * 1e-6)
    return [statistics.median(_undisturbed(own)) for own in turns]


def _undisturbed(times: Sequence[float]) -> list[float]:
    middle = statistics.median(times)
    deviation = statistics.median(abs(one - middle) for one in times)
    return [one for one in times if abs(one - middle) <= _OUTLYING * deviation] or [middle]
