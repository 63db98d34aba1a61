"""Stages whose rule is another where the cost model compares prices: what they are predicted to take before and after.

``python -m benchmarks.rule_prices [--models resnext ...] [--sizes tiny paper] [--archs sm_80 sm_90] [--precisions fp32
mixed] [--out FILE.json]``. Each stage of a network compiled at V4 is scheduled twice: by the order of the rules alone,
and by :class:`souffle.schedule.gpu.scheduler.GpuScheduler` with prices. Nothing is compiled by nvcc, nothing runs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import souffle
from benchmarks.record import save_results
from souffle import models
from souffle.cli.output import format_table
from souffle.cost.device import device_of_arch
from souffle.cost.stage_price import price_on
from souffle.pipeline import stages_of
from souffle.program import TEProgram
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.stage import LoopStage, StageDraft, Unit

MODELS = ("bert", "resnext", "lstm", "efficientnet", "swin", "mmoe")


def drafts_of(units: tuple[Unit, ...]) -> Counter[StageDraft]:
    """Each distinct stage that is computed from TEs, and how often a run computes it."""
    first: dict[str, StageDraft] = {}
    runs: Counter[str] = Counter()
    for unit in units:
        stages, times = (unit.stages, unit.loop.steps) if isinstance(unit, LoopStage) else ((unit,), 1)
        for stage in stages:
            first.setdefault(stage.draft.digest, stage.draft)
            runs[stage.draft.digest] += times
    return Counter({first[digest]: count for digest, count in runs.items()})


def changed(program: TEProgram, arch: str, precision: str) -> tuple[list[dict], dict]:
    """The stages whose rule changes, and the seconds of processor time that scheduling all stages took both ways."""
    price = price_on(device_of_arch(arch))
    ways = (GpuScheduler(device_for(arch)), GpuScheduler(device_for(arch), price))
    found, seconds = [], [0.0, 0.0]
    units, _ = stages_of(program, level="V4", precision=precision, arch=arch, cubin=False)
    for draft, runs in drafts_of(units).items():
        answers = []
        for number, scheduler in enumerate(ways):
            begin = time.process_time()
            answers.append(scheduler(draft.func))
            seconds[number] += time.process_time() - begin
        before, after = answers
        if before.rule != after.rule:
            prices = [round(1e6 * price(answer.functions), 2) for answer in answers]
            rules = {"before": before.rule, "after": after.rule}
            found.append({"stage": draft.tes[-1].name, "runs": runs, **rules, "us": prices})
    return found, {"schedule_s": [round(one, 2) for one in seconds]}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--sizes", nargs="+", choices=("tiny", "paper"), default=("tiny", "paper"))
    parser.add_argument("--archs", nargs="+", default=("sm_80", "sm_90"))
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "mixed"), default=("fp32", "mixed"))
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    results, rows = [], []
    for size in arguments.sizes:
        for name in arguments.models:
            program = souffle.import_onnx(models.build(name, size=size))
            for arch in arguments.archs:
                for precision in arguments.precisions:
                    stages, took = changed(program, arch, precision)
                    where = {"model": name, "size": size, "arch": arch, "precision": precision}
                    results.append({**where, **took, "stages": stages})
                    for one in stages:
                        us = [f"{value:.1f}" for value in one["us"]]
                        rows.append([*where.values(), one["stage"], str(one["runs"]), one["before"], one["after"], *us])
                    print(f"{name} {size} {arch} {precision}: {len(stages)} stages, {took['schedule_s']} s", flush=True)
                    if arguments.out:
                        save_results(arguments.out, "benchmarks.rule_prices", results)
    header = ["model", "size", "arch", "precision", "stage", "runs", "before", "after", "us before", "us after"]
    print(format_table(header, rows))


if __name__ == "__main__":
    main()
