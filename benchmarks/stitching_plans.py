"""What each fusion planner makes of networks: kernels, schemes, bytes, shared memory, predicted time, planning time.

::

    python -m benchmarks.stitching_plans [--models bert crnn ...] [--size paper] [--limit SECONDS] [--out FILE.json]
    python -m benchmarks.stitching_plans --models bert --size tiny --plans                         # and print each plan

Planners are those of FusionStitching (``stitching-ilp`` of 2019, ``stitching-dp`` of 2021), ``xla-rules``, and ``tvm``,
whose kernels are level V0's. Every one is asked for an A100, an H200 and a V100, whose bandwidths and launches decide,
and its plans are predicted by the latency-evaluator of 2021 on that GPU, launches included. Nothing is compiled or run.
Each model is planned in a process of its own within a time limit. Seconds are the processor's. Results are kept as they
are made: the same command goes on where it stopped. At the end, kernels are compared as the papers' tables do.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import souffle
from benchmarks.alone import made_alone
from benchmarks.record import kept_results, save_results
from souffle.cli.output import format_table
from souffle.cost import CostDevice, cost_device
from souffle.evaluation.published import published
from souffle.models import NAMES, STITCHING_NAMES, build
from souffle.stitching import (
    FUSION_PLANNERS,
    FusionPlan,
    FusionRequest,
    OpGraph,
    Scheme,
    fusion_planner_for,
    graph_of,
    predicted_seconds,
    shared_plans,
    traffic_of,
)
from souffle.stitching.layout import layout_of
from souffle.stitching.plan_figures import is_memory_intensive

DEVICES = ("A100-SXM4-40GB", "H200-SXM5-141GB", "V100-PCIE-16GB")
PLANNERS = tuple(FUSION_PLANNERS)

TABLE_3 = {row["name"]: tuple(row["cells"][:2]) for row in published("stitching-2019-table3")["rows"]}
"""003 Table 3: kernels of TensorFlow over those of XLA, and over those of FusionStitching."""

_MEMORY = {
    (row["network"], row["system"]): row["calls"][2]
    for row in published("stitching-2021-table2")["rows"]
    if "network" in row
}
TABLE_2 = {name: (_MEMORY[name, "XLA"], _MEMORY[name, "FusionStitching"]) for name, _ in _MEMORY}
"""000 Table 2: memory-intensive kernels of XLA and of FusionStitching; of BERT and DIEN inference."""


def planned(graph: OpGraph, planner: str, device: CostDevice) -> tuple[FusionPlan, float]:
    """A plan and the processor seconds that it took, on a graph of which nothing is known yet."""
    fresh = OpGraph(graph.ops)
    start = time.process_time()
    plan = fusion_planner_for(planner).plan(FusionRequest(fresh, device))
    return plan, time.process_time() - start


def figures(graph: OpGraph, plan: FusionPlan) -> dict[str, Any]:
    """What is told of a plan without a device."""
    moved = traffic_of(graph, plan)
    intensive = [pattern for pattern in plan.patterns if is_memory_intensive(pattern)]
    shared = [one for pattern in plan.fused for one in shared_plans(graph, pattern)]
    schemes = Counter(scheme for pattern in plan.fused for scheme in pattern.schemes)
    return {
        "kernels": len(plan.patterns),
        "memory_kernels": len(intensive),
        "patterns": len(plan.fused),
        "packed": sum(len(layout_of(graph, pattern.members).components) > 1 for pattern in plan.fused),
        "largest": max(map(len, plan.patterns)),
        "schemes": {str(scheme): schemes[scheme] for scheme in Scheme},
        "read": moved.read,
        "written": moved.written,
        "between": moved.between,
        "read_by_memory_kernels": traffic_of(graph, plan, intensive).read,
        "shared_requested": sum(one.requested for one in shared),
        "shared_allocated": sum(one.allocated for one in shared),
        "refused": [str(one)[:240] for one in plan.decisions if not one.accepted][:3],
    }


def model_figures(name: str, size: str, show: bool = False) -> dict[str, Any]:
    """All planners on all devices; the figures without a device are those of the plan for the first."""
    start = time.process_time()
    graph = graph_of(souffle.import_onnx(build(name, size)))
    found: dict[str, Any] = {"model": name, "size": size, "tes": len(graph.ops), "edges": len(graph.edges)}
    found |= {"import_s": round(time.process_time() - start, 2), "planners": {}}
    for planner in PLANNERS:
        of_planner: dict[str, Any] = {"predicted_us": {}, "kernels_on": {}, "planning_s": {}}
        for product in DEVICES:
            device = cost_device(product)
            plan, seconds = planned(graph, planner, device)
            predicted = predicted_seconds(graph, plan, device) * 1e6
            of_planner["predicted_us"][product] = round(predicted, 1) if math.isfinite(predicted) else None
            of_planner["kernels_on"][product] = len(plan.patterns)
            of_planner["planning_s"][product] = round(seconds, 3)
            if product == DEVICES[0]:
                of_planner |= figures(graph, plan)
                if show:
                    print(plan, *(f"  {decision}" for decision in plan.decisions), sep="\n")
        found["planners"][planner] = of_planner
    return found


def table(results: list[dict[str, Any]]) -> str:
    """A line for each model and planner."""
    rows = []
    for one in results:
        for planner, of in one.get("planners", {}).items():
            schemes = " ".join(str(of["schemes"][str(scheme)]) for scheme in Scheme)
            asked = f"{of['shared_requested']:,} {of['shared_allocated']:,}"
            names = [
                one["model"],
                one["size"],
                one["tes"],
                planner,
                of["kernels"],
                of["memory_kernels"],
                of["patterns"],
            ]
            moved = [f"{of[key] / 2**20:.1f}" for key in ("read", "written", "between")]
            times = [f"{us:,.1f}" if us else "no room" for us in map(of["predicted_us"].get, DEVICES)]
            rows.append([*names, of["packed"], schemes, *moved, asked, *times, of["planning_s"][DEVICES[0]]])
    columns = ["model", "size", "TEs", "planner", "kernels", "memory-intensive", "patterns", "packed", "p t w b"]
    columns += [
        "read MiB",
        "written MiB",
        "between MiB",
        "shared B asked, given",
        *(f"µs {d[:4]}" for d in DEVICES),
        "s",
    ]
    return format_table(columns, rows)


def beside_the_papers(results: list[dict[str, Any]]) -> str:
    """Kernels against the papers': of each TE alone over a plan's (003), of FusionStitching over XLA's (000)."""
    rows = []
    for one in results:
        if "planners" not in one:
            continue
        name, of = one["model"].removesuffix("-train"), one["planners"]
        alone = [f"{one['tes'] / of[planner]['kernels']:.2f}" for planner in ("xla-rules", "stitching-ilp")]
        part = f"{of['stitching-dp']['memory_kernels'] / max(1, of['xla-rules']['memory_kernels']):.2f}"
        theirs = [f"{ratio:g}" for ratio in TABLE_3.get(name, ())] or ["", ""]
        by_2021 = f"{TABLE_2[name][1] / TABLE_2[name][0]:.2f}" if name in TABLE_2 else ""
        rows.append([one["model"], one["size"], *theirs, *alone, by_2021, part])
    columns = ["model", "size", "xla/tf of 003", "fs/tf of 003", "xla-rules", "stitching-ilp", "FS/XLA of 000", "here"]
    return format_table(columns, rows)


def main() -> int:
    """Plan what is not kept yet, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = (*NAMES, *STITCHING_NAMES)
    parser.add_argument("--models", nargs="+", choices=every, default=every, metavar="MODEL")
    parser.add_argument("--size", default="tiny", choices=("tiny", "paper"))
    parser.add_argument("--limit", type=float, default=600, help="seconds of a processor for one model")
    parser.add_argument("--plans", action="store_true", help="print each plan, in this process")
    parser.add_argument("--out", type=Path, help="where to keep the results as JSON")
    parser.add_argument("--alone", choices=every, metavar="MODEL", help="print one model's figures as JSON")
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(model_figures(arguments.alone, arguments.size)))
        return 0
    kept = kept_results(arguments.out)
    known = {(one["model"], one["size"]) for one in kept}
    for name in arguments.models:
        if (name, arguments.size) not in known:
            print(f"{name} ...", file=sys.stderr, flush=True)
            if arguments.plans:
                found = model_figures(name, arguments.size, show=True)
            else:
                alone = ["--alone", name, "--size", arguments.size]
                found = made_alone("benchmarks.stitching_plans", alone, arguments.limit)
            kept.append({"model": name, "size": arguments.size} | found)
            if arguments.out:
                save_results(str(arguments.out), "benchmarks.stitching_plans", kept)
    print(table(kept))
    print(beside_the_papers(kept))
    for one in kept:
        if "failed" in one:
            print(f"{one['model']} {one['size']}: {one['failed']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
