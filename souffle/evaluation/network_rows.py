"""Rows of the papers' tables that are made of one network: compiled, planned, or ordered for fusion.

A task is data, so that a worker can make its row (:mod:`souffle.cli.row_work`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import onnx

import souffle
from souffle import models
from souffle.analysis.intensity import Arithmetic
from souffle.cost import cost_device
from souffle.errors import SouffleError
from souffle.evaluation.ablation import Expected, Variant, measured_row
from souffle.evaluation.traffic_counting import CountingError, Moved, count_functions, count_shape
from souffle.kernel.merged_program import MergedProgram
from souffle.program import ExternTE, TEProgram, parts_of
from souffle.runtime import Network
from souffle.runtime.comparison import random_inputs
from souffle.schedule.stage import Stage, flat_stages
from souffle.stitching import (
    FusionPlan,
    FusionRequest,
    OpGraph,
    fusion_planner_for,
    graph_of,
    predicted_seconds,
    shared_plans,
)
from souffle.stitching.latency import LatencyEvaluator
from souffle.stitching.plan_figures import is_memory_intensive
from souffle.stitching.priority import FusionEnvironment, FusionRules, anneal

__all__ = [
    "Benched",
    "Compiled",
    "Ordered",
    "Planned",
    "Reference",
    "Task",
    "made_row",
    "task_data",
    "task_key",
    "task_of",
]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Compiled:
    """A network compiled at one level.

    Attributes
    ----------
    network, size : str
        Of :mod:`souffle.models`.
    level, fusion, precision, arch : str
        Of :func:`souffle.compile`.
    cubin : bool
        Whether nvcc says what kernels ask for.
    traffic : bool
        Whether bytes are counted for each launch, too.
    gpu : bool
        Whether it is run, compared with ONNX Runtime and timed.
    """

    network: str
    size: str
    level: str
    precision: str
    arch: str
    fusion: str = "souffle"
    cubin: bool = True
    traffic: bool = False
    gpu: bool = False


@dataclass(frozen=True)
class Planned:
    """The kernels that fusion planners make of a network as level V0 has it; nothing is compiled.

    Attributes
    ----------
    network, size : str
    planners : tuple of str
    product : str
        The GPU that they plan for, and that the latency-evaluator of 000 predicts for.
    """

    network: str
    size: str
    planners: tuple[str, ...]
    product: str


@dataclass(frozen=True)
class Ordered:
    """Orders of priority fusion for a network (002), by the latency-evaluator's time of their plans.

    Attributes
    ----------
    network, size : str
    product : str
    evaluations : int
        Of annealing.
    """

    network: str
    size: str
    product: str
    evaluations: int


@dataclass(frozen=True)
class Benched:
    """A network beside other compilers on the GPU at hand.

    Attributes
    ----------
    network, size, precision : str
    against : tuple of str
        Peers of :func:`souffle.bench`.
    """

    network: str
    size: str
    precision: str
    against: tuple[str, ...]


Task = Compiled | Planned | Ordered | Benched
Reference = Callable[[onnx.ModelProto, Mapping[str, np.ndarray]], dict[str, np.ndarray]]
"""What a model is to compute of inputs."""


def made_row(task: Task, progress: Progress, reference: Reference) -> dict[str, Any]:
    """The row of a task.

    Parameters
    ----------
    task : Task
    progress : callable
        Told in a few words what is being done.
    reference : callable
        What networks that run are compared with.

    Returns
    -------
    dict
        As JSON has it; ``failed`` alone, with the reason, where it cannot be made.
    """
    try:
        if isinstance(task, Compiled):
            return _compiled(task, progress, reference)
        if isinstance(task, Planned):
            return _planned(task, progress)
        return _ordered(task, progress) if isinstance(task, Ordered) else _benched(task, progress)
    except SouffleError as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def task_of(content: Mapping[str, Any]) -> Task:
    """A task from what :func:`task_data` gave."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
    return _KINDS[fields.pop("kind")](**fields)


def task_data(task: Task) -> dict[str, Any]:
    """A task as JSON has it."""
    return {"kind": type(task).__name__, **dataclasses.asdict(task)}


def task_key(task: Task) -> str:
    """By what its row is known: its kind and all that it says."""
    words = (f"{name}={_word(value)}" for name, value in dataclasses.asdict(task).items())
    return f"{type(task).__name__.lower()}: {', '.join(words)}"


def _word(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


@lru_cache(maxsize=1)
def _program(network: str, size: str) -> TEProgram:
    return souffle.import_onnx(models.build(network, size))


# Compiled


class _Seen:
    """The kernels that the compiler makes, on their way."""

    def __init__(self) -> None:
        self.merged: MergedProgram | None = None

    def __call__(self, name: str, result: Any) -> Any:
        if name == "merge":
            self.merged = result
        return result

    @property
    def compute_intensive(self) -> frozenset[str]:
        """The stages with a compute-intensive TE (004 §5.3), by their labels."""
        launches = () if self.merged is None else self.merged.launches
        stages = (stage for launch in launches for stage in flat_stages(launch.stages))
        return frozenset(stage.label for stage in stages if _is_compute_intensive(stage))


def _is_compute_intensive(stage: Stage) -> bool:
    parts = [part for te in stage.tes if not isinstance(te, ExternTE) for part in parts_of(te)]
    return any(part.is_reduction and Arithmetic(part).compute_intensive for part in parts)


def _compiled(task: Compiled, progress: Progress, reference: Reference) -> dict[str, Any]:
    seen = _Seen()

    def expected(network: Network) -> Expected:
        inputs = random_inputs(network.signature.inputs, 0)
        return Expected(inputs, reference(models.build(task.network, task.size), inputs))

    row = measured_row(
        _program(task.network, task.size),
        Variant(task.level, (), task.fusion),
        {"precision": task.precision, "arch": task.arch, "cubin": task.cubin},
        expected=expected if task.gpu else None,
        gpu=task.gpu,
        progress=progress,
        hook=seen,
    )
    intensive = seen.compute_intensive
    row["compute_us"] = round(sum(one["us"] for one in row["stage_us"] if one["stage"] in intensive), 3)
    row["memory_us"] = round(sum(one["us"] for one in row["stage_us"]) - row["compute_us"], 3)
    if task.traffic and seen.merged is not None:
        progress("counting bytes")
        row |= _traffic(seen.merged)
    return row


def _traffic(merged: MergedProgram) -> dict[str, Any]:
    """Bytes read by all launches of a run, as shared memory and caches serve them within a stage or a launch."""
    try:
        known = count_functions(function for kernel in merged.kernels for function in kernel.shape.wholes)
        shapes = [count_shape(kernel.shape, known) for kernel in merged.kernels]
    except CountingError as error:
        return {"not_counted": str(error)}
    moved = {"once_per_stage": Moved(), "once_per_launch": Moved()}
    for launch in merged.launches:
        for counting in moved:
            moved[counting] += getattr(shapes[launch.kernel], counting)
    return {counting: dataclasses.asdict(total) for counting, total in moved.items()}


# Planned


def _planned(task: Planned, progress: Progress) -> dict[str, Any]:
    progress("reading the graph")
    graph, device = graph_of(_program(task.network, task.size)), cost_device(task.product)
    row: dict[str, Any] = {"tes": len(graph.ops), "planners": {}}
    for name in task.planners:
        progress(f"planning by {name}")
        # On a graph of which nothing is known yet, so that its seconds are the planner's own.
        fresh, start = OpGraph(graph.ops), time.process_time()
        plan = fusion_planner_for(name).plan(FusionRequest(fresh, device))
        seconds = time.process_time() - start
        row["planners"][plan.planner] = _plan_figures(graph, plan, task.product) | {"planning_cpu_s": round(seconds, 3)}
    return row


def _plan_figures(graph: OpGraph, plan: FusionPlan, product: str) -> dict[str, Any]:
    device = cost_device(product)
    evaluator = LatencyEvaluator(graph, device)
    times = [evaluator.kernel(p.members, recomputed=p.recomputed).seconds * 1e6 for p in plan.patterns]
    intensive = [is_memory_intensive(pattern) for pattern in plan.patterns]
    shared = {
        number: (sum(one.requested for one in plans), sum(one.allocated for one in plans))
        for number, pattern in enumerate(plan.patterns)
        if len(pattern) > 1 and (plans := shared_plans(graph, pattern))
    }
    with_shared = [number for number, (_, given) in shared.items() if given]
    return {
        "kernels": len(plan.patterns),
        "memory_kernels": sum(intensive),
        "kernels_us": _finite(sum(times)),
        "memory_us": _finite(sum(us for us, own in zip(times, intensive, strict=True) if own)),
        "launch_us": round(len(plan.patterns) * device.launch_seconds * 1e6, 3),
        "patterns": len(plan.fused),
        "patterns_with_shared": len(with_shared),
        "shared_patterns_us": _finite(sum(times[number] for number in with_shared)),
        "shared_requested": sum(shared[number][0] for number in with_shared),
        "shared_given": sum(shared[number][1] for number in with_shared),
        "shared_most": max((shared[number][1] for number in with_shared), default=0),
    }


def _finite(us: float) -> float | None:
    """A time; None where the evaluator knows no kernel."""
    return round(us, 3) if math.isfinite(us) else None


# Ordered


def _ordered(task: Ordered, progress: Progress) -> dict[str, Any]:
    graph = graph_of(_program(task.network, task.size))
    row: dict[str, Any] = {"tes": len(graph.ops), "evaluations": task.evaluations, "us": {}}
    for way, seconds in _orders(graph, task, progress):
        row["us"][way] = seconds if isinstance(seconds, str) else round(seconds * 1e6, 2)
    return row


def _orders(graph: OpGraph, task: Ordered, progress: Progress) -> Iterator[tuple[str, float | str]]:
    def fresh() -> FusionEnvironment:
        return FusionEnvironment(graph, cost_device(task.product), FusionRules(), task.network)

    environment = fresh()
    yield "none", environment.baseline_seconds
    yield "default", environment.seconds(np.zeros(len(graph.ops)))
    progress(f"annealing, {task.evaluations} orders")
    environment = fresh()
    found = anneal(environment.seconds, len(graph.ops), environment.baseline_seconds, task.evaluations, 0)
    yield "annealing", found.seconds
    progress("asking the policy that ships")
    try:
        plan = fusion_planner_for("learned").plan(FusionRequest(graph, cost_device(task.product)))
    except SouffleError as error:
        yield "learned", str(error)
        return
    yield "learned", predicted_seconds(graph, plan, cost_device(task.product))


# Benched


def _benched(task: Benched, progress: Progress) -> dict[str, Any]:
    report = souffle.bench(
        models.build(task.network, task.size),
        against=task.against,
        target="cuda",
        precision=task.precision,
        progress=progress,
    )
    rows: dict[str, Any] = {}
    for row in report.rows:
        own = rows.setdefault(row.name, {"version": row.version, "reason": row.reason})
        if row.times:
            own[row.form] = row.times["warm"].median_us
    return {"machine": report.machine, "peers": rows}


_KINDS = {kind.__name__: kind for kind in (Compiled, Planned, Ordered, Benched)}
