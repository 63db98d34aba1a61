"""Measured records of a log as samples to learn from: what is told of each candidate, and its seconds.

Features are made anew of each record, by the cost model of today: a recipe is followed and lowered, which costs a tenth
of a second or more, so workers can do it. A record whose recipe gives another text than was measured is no sample of
what it gives now, and is left out.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from souffle.cost import CostDevice
from souffle.decision import Refused
from souffle.errors import SouffleError
from souffle.schedule.follow import followed
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import gpu_request
from souffle.schedule.log import Record, TuningLog, Workload
from souffle.schedule.lower import cuda_target, lower_stage, text_of
from souffle.schedule.packed import unpack_function
from souffle.schedule.recipe import Recipe
from souffle.tuning.learned.features import FEATURES, features_of
from souffle.tuning.shared_stage import Limits
from souffle.workers import Engine, Job, Outcome

__all__ = ["MOST_RECORDS", "Sample", "described", "measured_records", "measured_samples"]

MOST_RECORDS = 1024
"""Of which features are made: some hundreds are enough (``benchmarks/learned_ranking.py``), and more take long."""

_TOGETHER = 16
"""Records of one job: sent and decoded once for some, and lost together if a worker is."""


@dataclass(frozen=True)
class Sample:
    """A candidate whose time is known.

    Attributes
    ----------
    workload : str
        What tells its stage from others; only candidates of one stage are compared.
    candidate : str
        What tells it from others of the stage.
    features : tuple of float
        One number for each of :data:`souffle.tuning.learned.features.FEATURES`.
    seconds : float
    """

    workload: str
    candidate: str
    features: tuple[float, ...]
    seconds: float


def measured_samples(
    log: TuningLog, device: CostDevice, measured_on: str, engine: Engine, *, most: int = MOST_RECORDS
) -> tuple[tuple[Sample, ...], Counter[str]]:
    """The samples of a log.

    Parameters
    ----------
    log : TuningLog
    device : CostDevice
        Whose cost model the features are of; of the log's architecture.
    measured_on : str
        The GPU, as records name it. Others' records say something else.
    engine : Engine
        Makes the features; closed by the caller.
    most : int
        How many records are looked at: where there are more, as many of each stage, whichever chance takes.

    Returns
    -------
    samples : tuple of Sample
        The same in whatever order the records stand.
    left_out : Counter of str
        How many measured records gave none, by the reason.
    """
    setting = engine.share(pickle.dumps(device))
    waiting: list[tuple[str, Sequence[Record], Future[Outcome]]] = []
    for digest, workload, records in _some(list(measured_records(log, measured_on)), most):
        for start in range(0, len(records), _TOGETHER):
            part = records[start : start + _TOGETHER]
            check = partial(_each_is_described, len(part))
            waiting.append((digest, part, engine.submit(_job(workload, part, setting), check)))
    samples, left_out = [], Counter()
    for digest, records, future in waiting:
        outcome = future.result()
        values = [outcome.failure] * len(records) if outcome.failure else outcome.value
        for record, value in zip(records, values, strict=True):
            if isinstance(value, str):
                left_out[value] += 1
            else:
                samples.append(Sample(digest, record.recipe.key, tuple(value), record.seconds))
    return tuple(sorted(samples, key=lambda one: (one.workload, one.candidate, one.seconds))), left_out


def measured_records(log: TuningLog, measured_on: str) -> Iterator[tuple[str, Workload, list[Record]]]:
    """Of each workload, by its digest, the records of what one GPU measured."""
    for digest, workload in log.table.workloads.items():
        records = [
            record
            for record in log.of_workload(digest)
            if record.origin.figure == "measured" and record.origin.device == measured_on and not record.failed
        ]
        if records and log.table.decoded(workload) is not None:
            yield digest, workload, records


def _some(
    measured: list[tuple[str, Workload, list[Record]]], most: int
) -> list[tuple[str, Workload, list[Record]]]:
    """At most so many records, the same ones in whatever order the log has them."""
    each = most
    while each > 1 and sum(min(each, len(records)) for *_, records in measured) > most:
        each -= 1
    measured = sorted(measured, key=lambda one: _chance_of(one[0]))[:most]
    return [(digest, workload, sorted(records, key=_drawn)[:each]) for digest, workload, records in measured]


def _drawn(record: Record) -> tuple:
    return (_chance_of(record.recipe.key), record.figures, record.origin.text)


def _chance_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _job(workload: Workload, records: Sequence[Record], setting: str) -> Job:
    recipes = [[record.recipe.data(), record.origin.text] for record in records]
    payload = {"setting": setting, "function": workload.packed, "recipes": recipes}
    label = f"features of {len(records)} records of {workload.name or workload.digest}"
    limits = Limits()
    function = "souffle.tuning.learned.samples:described"
    return Job(function, payload, label, (setting,), limits.seconds, limits.memory_mb)


def _each_is_described(count: int, value: Any) -> str:
    if not isinstance(value, list) or len(value) != count:
        return f"its worker gave {str(value)[:80]!r} for {count} records"
    for one in value:
        numbers = isinstance(one, list) and len(one) == len(FEATURES) and all(isinstance(n, float) for n in one)
        if not numbers and not isinstance(one, str):
            return f"its worker gave the features {str(one)[:80]!r}"
    return ""


def described(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> list[list[float] | str]:
    """The features of some recipes of one stage, or why there are none.

    Parameters
    ----------
    payload : mapping
        ``setting``, the key of the device that is shared; ``function``, as a log has it packed; ``recipes``: pairs of a
        recipe's data and the digest of the text that was measured, empty where that is not known.
    shared : mapping
    """
    device: CostDevice = pickle.loads(shared[payload["setting"]])
    func = unpack_function(payload["function"]).with_attr("global_symbol", "stage")
    request, target = gpu_request(device_for(device.arch)), cuda_target(device.arch)

    def one(recipe: Recipe, text: str) -> list[float] | str:
        schedule = followed(recipe, func, request)
        if isinstance(schedule, Refused):
            return "its schedule does not fit any more"
        try:
            functions = lower_stage("stage", schedule, target)
            if text and text_of(functions) != text:
                return "its recipe gives another text now"
            return features_of(functions, device).tolist()
        except SouffleError as error:
            return f"its schedule is no candidate any more: {type(error).__name__}"

    return [one(Recipe.of_data(data), text) for data, text in payload["recipes"]]
