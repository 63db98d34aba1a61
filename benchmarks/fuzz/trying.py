"""How a network is tried: first it is made and the oracle asked, then it goes to each target, each by a job of its own.

So a death names its target, and what was running is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.campaign import Death, Record, death_of
from benchmarks.fuzz.case import write_case_data
from benchmarks.fuzz.targets import FAILURES, OUTCOMES
from souffle.workers import Job, Outcome
from souffle.workers.cases import Asking

__all__ = ["WORK", "Limits", "failures_of", "try_case", "try_seed"]

WORK = "benchmarks.fuzz.work"
"""The module of what workers do."""


@dataclass(frozen=True)
class Limits:
    """What holds for all jobs.

    Attributes
    ----------
    seconds : float
        For one network on one target.
    memory_mb : int
    checked : float
        The share of networks run in checked mode, too.
    failures : Path, optional
        The folder where what fails is kept.
    """

    seconds: float = 90.0
    memory_mb: int = 8192
    checked: float = 0.1
    failures: Path | None = None


def failures_of(out: Path) -> Path:
    """The folder beside a file of records."""
    return out.with_name(out.name + ".failures")


def try_seed(seed: int, targets: Sequence[str], settings: Mapping[str, Any], limits: Limits) -> Asking[Record]:
    """The network of a seed.

    Parameters
    ----------
    seed : int
    targets : sequence of str
    settings : mapping
        Of :class:`benchmarks.fuzz.draft.Settings`, those that are not as usual.
    limits : Limits

    Returns
    -------
    dict
        ``seed``; ``generate``, facts of the network; ``outcomes`` by target.
    """
    payload = {"seed": seed, "settings": dict(settings)}
    return _try("made_case", payload, f"seed {seed}", seed, targets, limits)


def try_case(
    data: Mapping[str, Any], seed: int, targets: Sequence[str], limits: Limits, name: str = ""
) -> Asking[Record]:
    """As :func:`try_seed`, of a network as :func:`benchmarks.fuzz.case.case_data` has it."""
    case = {key: data[key] for key in ("note", "inputs", "model")}
    return _try("judged_case", {"case": case}, name or f"case {seed}", seed, targets, limits)


def _try(
    function: str, payload: dict[str, Any], label: str, seed: int, targets: Sequence[str], limits: Limits
) -> Asking[Record]:
    def job(function: str, payload: dict[str, Any], label: str) -> Job:
        limit = {"seconds": limits.seconds, "memory_mb": limits.memory_mb}
        return Job(f"{WORK}:{function}", payload, label, **limit)

    targets = list(targets)
    making = job(function, {**payload, "targets": targets}, f"the making of {label}")
    (answer,) = yield [(making, _lacks_case)]
    death = death_of(making, answer)
    if death is not None:
        # Only ONNX Runtime has run yet.
        found = {"kind": "unsure", "detail": f"{death.kind} of the oracle: {death.reason}"}
        return {"seed": seed, "generate": {}, "outcomes": {"generate": found}}
    made = answer.value
    payload = {"case": made["case"], "expected": made["expected"], "seed": seed, "checked": limits.checked}
    trials = [job("tried_case", {**payload, "target": target}, f"{label} on {target}") for target in targets]
    answers = yield [(trial, _lacks_outcome) for trial in trials]
    outcomes = {
        target: _outcome(trial, answer, f"{seed}-{target}", made["case"], target, limits.failures)
        for target, trial, answer in zip(targets, trials, answers, strict=True)
    }
    return {"seed": seed, "generate": made["facts"], "outcomes": outcomes}


def _lacks_case(value: Any) -> str:
    whole = isinstance(value, Mapping) and {"facts", "case", "expected"} <= value.keys()
    return "" if whole else f"its worker gave {str(value)[:80]!r} for a network"


def _lacks_outcome(value: Any) -> str:
    whole = isinstance(value, Mapping) and value.get("kind") in OUTCOMES and isinstance(value.get("detail"), str)
    return "" if whole else f"its worker gave {str(value)[:80]!r} for an outcome"


def _outcome(
    job: Job, answer: Outcome, name: str, case: Mapping[str, Any], target: str, folder: Path | None
) -> dict[str, Any]:
    """What came of it, after what fails was kept."""
    death: Death | None = death_of(job, answer)
    found = answer.value if death is None else {"kind": death.kind, "detail": death.reason}
    if folder is None:
        return found
    if found["kind"] in FAILURES:
        said = {} if death is None else {"said": death.said}
        facts = {"target": target, "kind": found["kind"], "detail": found["detail"], **said}
        write_case_data(case, folder / f"{name}.json", **facts)
        return {**found, "file": f"{name}.json"}
    if found.get("verdict") == "UNKNOWN":
        facts = {"target": target, "kind": "UNKNOWN", "detail": "; ".join(found["undecided"])}
        write_case_data(case, folder / f"{name}.unknown.json", **facts)
    return found
