"""The figures of candidates: built together, then measured on a GPU, or predicted with ptxas' report.

Some candidates of a batch are emitted into one file, since a call of nvcc costs seconds whatever it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from souffle.codegen.nvcc import find_nvcc
from souffle.cost import CostDevice, cost_device, device_of_arch, product_names
from souffle.errors import CompilerNotFoundError, DeviceError, OptionError
from souffle.tuning.board import job_seconds, parse_board_address
from souffle.tuning.evolution import Look
from souffle.tuning.shared_stage import SharedStage, lacks_seconds
from souffle.workers import Check, Engine, Job, Outcome, Places
from souffle.workers.cases import Asking

__all__ = [
    "CandidateBench",
    "Compilable",
    "Figures",
    "MeasuringBench",
    "PredictingBench",
    "bench_for",
    "built_figures",
    "cost_device_for",
]

_TOGETHER = 4
"""Candidates in one call of nvcc."""


@dataclass(frozen=True)
class Figures:
    """What is known of a candidate.

    Attributes
    ----------
    seconds : tuple of float
        With a cold and with a warm second-level cache; empty where it cannot be used.
    spill_bytes, registers : int
        0 registers where no compiler was asked.
    problem : str
        Why it cannot be used.
    device : str
        That it was measured on; empty for the bench's own.
    own_seconds : tuple of float
        What it was compared with took in the same turns; empty where nothing was measured.
    """

    seconds: tuple[float, ...] = ()
    spill_bytes: int = 0
    registers: int = 0
    problem: str = ""
    device: str = ""
    own_seconds: tuple[float, ...] = ()


class Compilable(Protocol):
    """What a worker can compile."""

    candidate: bytes
    """A :class:`souffle.tuning.candidate.Candidate`, packed."""


class CandidateBench(Protocol):
    """Gives figures."""

    figure: str
    """``"measured"`` or ``"predicted"``."""
    device: str
    """What it is measured on, or the product that is predicted."""

    def figures(self, stage: SharedStage, candidates: Sequence[Look], own: Look | None) -> Asking[list[Figures]]:
        """The figures of some candidates of a stage; `own`, of the rule, says what its outputs must be."""
        ...


class PredictingBench:
    """Predicts with the cost model of a product.

    Parameters
    ----------
    device : str
        The product.
    nvcc : bool
        Whether to ask ptxas for registers and spills; without a compiler they are estimated.
    """

    figure = "predicted"

    def __init__(self, device: str, *, nvcc: bool = True) -> None:
        self.device = device
        self.nvcc = nvcc and find_nvcc() is not None

    def figures(self, stage: SharedStage, candidates: Sequence[Look], own: Look | None) -> Asking[list[Figures]]:
        """See :class:`CandidateBench`."""
        if not self.nvcc:
            return [Figures(look.times) for look in candidates]
        found = yield from built_figures(stage, "souffle.tuning.stage_work:predict_built", candidates)
        return [
            Figures(problem=one["problem"])
            if one["problem"]
            else Figures(tuple(one["seconds"]), one["spill_bytes"], one["registers"])
            for one in found
        ]


@dataclass
class MeasuringBench:
    """Measures on GPUs, each owned by one worker.

    Attributes
    ----------
    device : str
        The GPU's name.
    function : str
        ``"module:name"`` of the job that measures: :func:`souffle.tuning.measuring.measure`, or one that takes and
        gives the same.
    given : dict
        What that function is given beside ``plan`` and ``baseline``.
    resource : str
        ``"gpu"`` where a worker owns the GPU.
    seconds : float, optional
        That a measurement may take; as for other jobs without.
    places : Places, optional
        The boards, of which each measurement takes one.
    """

    device: str
    function: str = "souffle.tuning.measuring:measure"
    given: dict[str, Any] = field(default_factory=lambda: {"driver": ""})
    resource: str = "gpu"
    seconds: float | None = None
    places: Places | None = None
    figure = "measured"

    def __post_init__(self) -> None:
        if find_nvcc() is None:
            raise CompilerNotFoundError("measuring on a GPU needs nvcc: pip install 'souffle-dl[cuda]'")
        self._baselines: dict[str, bytes] = {}

    def figures(
        self, stage: SharedStage, candidates: Sequence[Compilable], own: Compilable | None
    ) -> Asking[list[Figures]]:
        """See :class:`CandidateBench`."""
        built = yield from built_figures(stage, "souffle.tuning.stage_work:build", candidates)
        baseline = self._baselines.get(stage.stage)
        if baseline is None:
            reference = own or candidates[0]
            same = next((one for look, one in zip(candidates, built, strict=True) if look is reference), None)
            if same is None:
                (same,) = yield from built_figures(stage, "souffle.tuning.stage_work:build", [reference])
            if same["problem"]:
                return [Figures(problem=f"nothing to compare with: {same['problem']}")] * len(candidates)
            baseline = self._baselines.setdefault(stage.stage, same["plan"])
        working = [one for one in built if not one["problem"]]
        jobs = [self._job(stage, {"plan": one["plan"], "baseline": baseline, **self.given}) for one in working]
        outcomes = (yield [(job, lacks_seconds) for job in jobs]) if jobs else []
        values = {id(one): _value(outcome) for one, outcome in zip(working, outcomes, strict=True)}
        return [self._figures(one, values.get(id(one), one)) for one in built]

    def _job(self, stage: SharedStage, payload: dict[str, Any]) -> Job:
        job = stage.job(self.function, "a measurement", payload, resource=self.resource, places=self.places)
        return job if self.seconds is None else replace(job, seconds=self.seconds)

    def _figures(self, built: dict[str, Any], value: dict[str, Any]) -> Figures:
        if value.get("gone"):
            raise DeviceError(f"{value['problem']}; what was measured is in the log, from which the command goes on")
        if value["problem"]:
            return Figures(problem=value["problem"])
        used, own = (built["spill_bytes"], built["registers"]), tuple(value["baseline_seconds"])
        return Figures(tuple(value["seconds"]), *used, device=value["device"], own_seconds=own)


def _value(outcome: Outcome) -> dict[str, Any]:
    return {"problem": outcome.reason} if outcome.failure else outcome.value


def built_figures(
    stage: SharedStage, function: str, candidates: Sequence[Compilable], given: Mapping[str, Any] | None = None
) -> Asking[list[dict[str, Any]]]:
    """What a job that compiles candidates says of each; where a job fails, its candidates are tried one by one.

    Parameters
    ----------
    stage : SharedStage
    function : str
        ``"module:name"``; :func:`souffle.tuning.stage_work.build` or another that is given ``candidates``.
    candidates : sequence of Compilable
    given : mapping, optional
        What the function is given beside.
    """
    given = given or {}
    # Neighbours in their order are of one sketch, and those whose text is long would all be in one call.
    count = -(-len(candidates) // _TOGETHER)
    groups = [list(candidates[start::count]) for start in range(count)]
    outcomes = yield [_building(stage, function, group, given) for group in groups]
    alone = [look for group, outcome in zip(groups, outcomes, strict=True) if outcome.failure for look in group]
    again: dict[int, dict[str, Any]] = {}
    if alone and any(outcome.failure and len(group) > 1 for group, outcome in zip(groups, outcomes, strict=True)):
        singles = yield [_building(stage, function, [look], given) for look in alone]
        again = {
            id(look): {"problem": outcome.reason} if outcome.failure else outcome.value[0]
            for look, outcome in zip(alone, singles, strict=True)
        }
    found = {
        id(look): again.get(id(look), {"problem": outcome.reason}) if outcome.failure else outcome.value[place]
        for group, outcome in zip(groups, outcomes, strict=True)
        for place, look in enumerate(group)
    }
    return [found[id(look)] for look in candidates]


def _building(
    stage: SharedStage, function: str, group: Sequence[Compilable], given: Mapping[str, Any]
) -> tuple[Job, Check]:
    packed = [look.candidate for look in group]
    job = stage.job(function, f"{len(group)} candidates", {"candidates": packed, **given})
    return job, partial(_each_is_said, len(group))


def _each_is_said(count: int, value: Any) -> str:
    if not isinstance(value, list) or len(value) != count:
        return f"its worker gave {str(value)[:80]!r} for {count} candidates"
    return next((problem for one in value if "plan" not in one and (problem := lacks_seconds(one))), "")


def cost_device_for(arch: str, product: str | None) -> CostDevice:
    """The cost model that ranks candidates.

    Parameters
    ----------
    arch : str
    product : str or None
        To predict for, where it was asked for.

    Raises
    ------
    OptionError
        If no product of the architecture is described.
    """
    device = cost_device(product) if product is not None else device_of_arch(arch)
    if device is None:
        described = ", ".join(f"{name} ({cost_device(name).arch})" for name in product_names())
        raise OptionError(f"no GPU of {arch} is described, to rank candidates with; described: {described}")
    if device.arch != arch:
        raise OptionError(f"device {device.product} is {device.arch}, and the schedules are for {arch}")
    return device


def bench_for(
    measure: str, device: CostDevice, engine: Engine, *, asked: bool = False, present: str | None = None
) -> CandidateBench:
    """What gives figures of candidates.

    Parameters
    ----------
    measure : str
        ``"auto"``, ``"none"``, ``"gpu"`` or ``"rpc://HOST:PORT/KEY"``; as for :func:`souffle.tune`.
    device : CostDevice
    engine : Engine
    asked : bool
        Whether the product was named, so that ``"auto"`` predicts.
    present : str or None
        Architecture of the GPU of this machine.

    Raises
    ------
    OptionError
        If it is none of these.
    DeviceError
        If there is no such GPU.
    """
    if measure.startswith("rpc:"):
        return _board_bench(measure, device, engine)
    if measure == "none" or (measure == "auto" and (asked or present != device.arch)):
        return PredictingBench(device.product)
    if measure not in ("auto", "gpu"):
        raise OptionError(f"measure={measure!r} is not valid; choose auto, none, gpu or rpc://HOST:PORT/KEY")
    outcome = engine.submit(Job("souffle.tuning.measuring:device", {"driver": ""}, "the GPU", resource="gpu")).result()
    if outcome.failure:
        raise DeviceError(f"measure={measure!r}: no worker of {engine.name} has a GPU to measure on: {outcome.reason}")
    return MeasuringBench(_right_gpu(measure, outcome.value, device))


def _board_bench(measure: str, device: CostDevice, engine: Engine) -> MeasuringBench:
    address = parse_board_address(measure)
    given = {"address": measure}
    job = Job("souffle.tuning.board:device", given, f"the board {measure}", seconds=job_seconds(address))
    outcome = engine.submit(job).result()
    if outcome.failure:
        raise DeviceError(f"measure={measure!r}: {outcome.reason}")
    name = _right_gpu(measure, outcome.value, device)
    places = Places(measure, outcome.value["boards"])
    return MeasuringBench(name, "souffle.tuning.board:measure", given, "cpu", job_seconds(address), places)


def _right_gpu(measure: str, found: dict[str, str], device: CostDevice) -> str:
    """The name of a GPU, if it is of the architecture."""
    if found["arch"] != device.arch:
        raise DeviceError(
            f"measure={measure!r}: the GPU there, {found['name']}, is {found['arch']}, and the schedules are for "
            f"{device.arch}; give arch={found['arch']!r}, or a GPU of {device.arch}"
        )
    return found["name"]
