"""What ``benchmarks.learned_ranking`` judges rankings on: candidates with a time that is known, or made up."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from benchmarks import cost_against_gpu_build as building
from benchmarks.cost_against_gpu_cases import Case, cases
from benchmarks.cost_against_measured import (
    Compiler,
    Problem,
    convolution,
    depthwise,
    grouped,
    mean,
    problem_of,
    product,
)
from benchmarks.product_tilings import case_of
from souffle.cost import CostDevice, predict_stage
from souffle.decision import Refused
from souffle.errors import SouffleError
from souffle.schedule.follow import followed
from souffle.schedule.gpu import GpuSchedule, StageForms
from souffle.schedule.gpu.forms.matrix_product import read_contraction
from souffle.schedule.gpu.rules.mma_contraction import MMA_CONTRACTION
from souffle.schedule.gpu.scheduler import gpu_request
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling, assumed_operands
from souffle.schedule.lower import DeviceFunction, cuda_target, lower_stage
from souffle.schedule.recipe import NATIVE_RULE
from souffle.tuning.learned import Sample, features_of
from souffle.tuning.sketches import spaces_of
from souffle.tuning.space import sampled

__all__ = ["Known", "best_of_others", "made_up", "measured_tilings", "workloads"]

_AS_RECORDED = 2e-3
"""Of a prediction: what is predicted so near to what was recorded beside a measurement is the schedule measured."""
_TRIES = 60
"""Draws for each candidate that is wanted."""


@dataclass(frozen=True, eq=False)
class Known:
    """A candidate with its time.

    Attributes
    ----------
    sample : Sample
    func : PrimFunc
        The stage before it is scheduled.
    schedule : GpuSchedule
    """

    sample: Sample
    func: tirx.PrimFunc
    schedule: GpuSchedule


def measured_tilings(path: Path, device: CostDevice, products: Sequence[str] = ()) -> tuple[list[Known], int]:
    """Products of halves in many tilings each, as an H100 measured them on 2026-11-27.

    Each is scheduled again, and taken if the cost model predicts of it what was recorded beside the measurement.

    Parameters
    ----------
    path : Path
        ``docs/results/gpu-h100-2026-11-27.json``.
    device : CostDevice
        The H100's.
    products : sequence of str
        Only these, such as ``"384x768x768"``.

    Returns
    -------
    candidates : list of Known
        Seconds are the mean of those with a cold and with a warm second-level cache.
    left_out : int
        Tilings that are not scheduled as they were then.
    """
    orders: dict[tuple, dict[str, list]] = {}
    for name, warps, parts, step, stages, order, *figures in json.loads(path.read_text())["product_tilings"]["crossed"]:
        orders.setdefault((name, MmaTiling(tuple(warps), tuple(parts), step, stages)), {})[order] = figures
    request, target = gpu_request(device.limits), cuda_target(device.arch)
    found, left_out = [], 0
    for name in dict.fromkeys(name for name, _ in orders):
        if products and name not in products:
            continue
        stage = building.stage_of(case_of(name), device, target)
        forms = StageForms(stage.draft.func)
        sketch, problem = MMA_CONTRACTION.sketch(forms, request), forms.read(read_contraction)
        operands = assumed_operands(problem, request)
        for tiling, measured in ((tiling, figures) for (own, tiling), figures in orders.items() if own == name):
            _, made = building.made_schedule(stage, sketch, dict(tiling.values), request, target, set())
            steps = -(-int(name.split("x")[2]) // tiling.step)
            ahead = "ahead" in measured and tiling.reads_ahead(operands, request.threads, steps)
            warm_us, cold_us, *predicted_us, _, _ = measured["ahead" if ahead else "own"]
            if made is None or not _predicted(made[1], device, predicted_us):
                left_out += 1
                continue
            features = tuple(features_of(made[1:], device).tolist())
            sample = Sample(name, json.dumps(dict(tiling.values)), features, (warm_us + cold_us) / 2e6)
            found.append(Known(sample, stage.draft.func, made[0]))
    return found, left_out


def _predicted(function: DeviceFunction, device: CostDevice, recorded_us: Sequence[float]) -> bool:
    now = (predict_stage([function], device, warm=warm).seconds * 1e6 for warm in (True, False))
    return all(
        math.isclose(seconds, recorded, rel_tol=_AS_RECORDED)
        for seconds, recorded in zip(now, recorded_us, strict=True)
    )


def workloads() -> tuple[Case, ...]:
    """TEs of all kinds that are scheduled, as in networks."""
    more: dict[str, Problem] = {
        "gemm_512_fp16": product(1, 512, 512, 512, "float16"),
        "gemm_128_fp16": product(1, 128, 768, 3072, "float16"),
        "gemm_197_fp16": product(1, 197, 3072, 1024, "float16"),
        "gemm_256": product(1, 256, 256, 1024, "float32"),
        "gemm_49": product(1, 49, 1024, 512, "float32"),
        "gemm_narrow": product(1, 1000, 37, 64, "float32"),
        "convolution_14": convolution(1, 14, 14, 256, 256, 3),
        "convolution_1x1": convolution(1, 28, 28, 128, 512, 1),
        "convolution_7": convolution(1, 7, 7, 512, 512, 3),
        "depthwise_28": depthwise(1, 28, 28, 240, 5, 1),
        "depthwise_112": depthwise(1, 112, 112, 32, 3, 1),
        "grouped_56": grouped(32, 1, 4, 56, 56, 4, 3),
        "mean_7": mean(1, 7, 7, 1280),
        "mean_14": mean(1, 14, 14, 672),
    }
    return (*cases(False), *(Case(name, problem.build) for name, problem in more.items()))


def made_up(
    chosen: Sequence[Case], device: CostDevice, truth: CostDevice, count: int, noise: float, seed: int
) -> Iterator[Known]:
    """Random candidates of our rules, whose time is what another product's cost model predicts, and noise.

    Parameters
    ----------
    chosen : sequence of Case
    device : CostDevice
        That they are scheduled for, and whose cost model their features are of.
    truth : CostDevice
        Whose cost model gives the times: it is hidden from who learns.
    count : int
        Of each workload.
    noise : float
        Standard deviation of a time's logarithm.
    seed : int
    """
    logging.getLogger("souffle.tuning").setLevel(logging.ERROR)
    request, target = gpu_request(device.limits), cuda_target(device.arch)
    for case in chosen:
        func = building.stage_of(case, device, target).draft.func
        rng = random.Random(f"{seed} {case.name}")
        spaces = [space for space in spaces_of(func, request, target, seed=1) if space.rule != NATIVE_RULE]
        seen: set[str] = set()
        found = 0
        for number in range(_TRIES * count):
            if found == count:
                break
            recipe = sampled(spaces[number % len(spaces)], request.threads, rng)
            schedule = followed(recipe, func, request) if recipe.key not in seen else Refused("")
            seen.add(recipe.key)
            known = None if isinstance(schedule, Refused) else _made_up(func, schedule, device, truth, target)
            if known is not None:
                found += 1
                sample = replace(
                    known.sample,
                    workload=case.name,
                    candidate=recipe.key,
                    seconds=known.sample.seconds * math.exp(rng.gauss(0.0, noise)),
                )
                yield replace(known, sample=sample)


def _made_up(
    func: tirx.PrimFunc, schedule: GpuSchedule, device: CostDevice, truth: CostDevice, target: tvm.target.Target
) -> Known | None:
    try:
        functions = lower_stage("stage", schedule, target)
        features = tuple(features_of(functions, device).tolist())
        seconds = np.mean([predict_stage(functions, truth, warm=warm).seconds for warm in (False, True)])
    except SouffleError:
        return None
    return Known(Sample("", "", features, float(seconds)), func, schedule)


def best_of_others(path: Path, device: CostDevice) -> list[tuple[str, Sample]]:
    """The kernels of a file of an A100's best times, each as our rules schedule it; and of which kind each is.

    The schedules that were measured are others than these, which are what features are of.
    """
    best: dict[tuple, tuple[float, str, Problem]] = {}
    logs: dict[str, dict[str, Any]] = json.loads(path.read_text())
    for name, (microseconds, *_) in ((name, entry) for folder in logs.values() for name, entry in folder.items()):
        problem = problem_of(name)
        if problem is not None and microseconds < best.get(problem.shape, (math.inf,))[0]:
            best[problem.shape] = (microseconds, name, problem)
    lowered = Compiler(device, nvcc=False, cache=None).lowered([problem for *_, problem in best.values()])
    found = []
    for (microseconds, name, problem), stages in zip(best.values(), lowered, strict=True):
        functions = [function for stage in stages for function in stage.functions]
        features = tuple(features_of(functions, device).tolist())
        found.append((problem.kind, Sample("all", name, features, microseconds * 1e-6)))
    return found
