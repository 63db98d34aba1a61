"""What each fusion planner makes of networks, how long it takes, and how its time grows.

``python -m benchmarks.stitching_plans [--models bert swin] [--size paper] [--plans] [--out FILE.json]``. For each model
and planner: kernels, patterns of several TEs, the planner's own score, what the latency-evaluator of 000 predicts of
the plan (one ruler for all, with launches), and seconds of planning. ``--plans`` prints each plan, one line a pattern.
For ``stitching-dp`` also the gap of its beam to the best plan of the same candidates under the same score, which the
integer linear program finds. Then BERT with more and more encoder layers: seconds for each vertex and edge, which stay
the same where the work is linear in both. Seconds are of the process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import souffle
from benchmarks.record import save_results
from souffle.cli.output import format_table
from souffle.cost import CostDevice, cost_device
from souffle.models import bert, build
from souffle.stitching import FUSION_PLANNERS, FusionPlan, FusionRequest, OpGraph, fusion_planner_for, graph_of
from souffle.stitching.delta import DeltaScore
from souffle.stitching.ilp import best_patterns
from souffle.stitching.latency import LatencyEvaluator
from souffle.stitching.reduction import candidates_of
from souffle.stitching.stitching_dp import beam_search

_NETWORKS = ("bert", "resnext", "efficientnet", "swin", "mmoe")
"""The paper's networks but the LSTM, whose 17,148 TEs are two equal ones in a loop."""

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """A result, and the seconds of the process that it took."""
    start = time.process_time()
    return work(), time.process_time() - start


def predicted(graph: OpGraph, plan: FusionPlan, device: CostDevice) -> float:
    """Seconds of a plan by the latency-evaluator, launches included; what is computed again counts with it."""
    evaluator = LatencyEvaluator(graph, device)
    total = 0.0
    for pattern in plan.patterns:
        members = tuple(sorted((*pattern.members, *pattern.recomputed)))
        inside = frozenset(members)
        needed = frozenset(n for n in pattern.recomputed) | inside
        total += evaluator.kernel(members, needed).seconds + device.launch_seconds
    return total


def row(graph: OpGraph, planner: str, device: CostDevice) -> tuple[FusionPlan, dict]:
    """One planner on one graph."""
    plan, seconds = timed(lambda: fusion_planner_for(planner).plan(FusionRequest(graph, device)))
    return plan, {
        "planner": planner,
        "kernels": len(plan.patterns),
        "fused": len(plan.fused),
        "largest": max(map(len, plan.patterns)),
        "score_us": round(plan.score * 1e6, 2),
        "latency_us": round(predicted(graph, plan, device) * 1e6, 1),
        "seconds": round(seconds, 3),
        "decisions": [str(d) for d in plan.decisions if not d.accepted],
        "patterns": [str(pattern) for pattern in plan.fused],
    }


def gap(graph: OpGraph, device: CostDevice) -> dict:
    """The beam's score beside that of the best plan of the same candidates."""
    score = DeltaScore(graph, device)
    candidates = candidates_of(graph, score)
    plans = beam_search(candidates)
    found = max(sum(map(score, plan)) for plan in plans)
    remote = [pattern for plan in plans for options in candidates.remote(plan) for pattern in options]
    every = dict.fromkeys([pattern for options in candidates.of for pattern in options] + remote)
    every.update(dict.fromkeys(pattern for plan in plans for pattern in plan))
    best = sum(score(pattern) for pattern in best_patterns(graph, {pattern: score(pattern) for pattern in every})[0])
    return {"beam_us": round(found * 1e6, 2), "optimum_us": round(best * 1e6, 2), "gap": round(1 - found / best, 4)}


def scaling(counts: list[int], device: CostDevice) -> list[dict]:
    """BERT with so many layers: seconds of each planner for a vertex or an edge."""
    found = []
    for count in counts:
        graph = graph_of(souffle.import_onnx(bert.build_bert(replace(bert.SIZES["paper"], layers=count), 0)))
        parts = len(graph.ops) + len(graph.edges)
        for planner in FUSION_PLANNERS:
            fresh = OpGraph(graph.ops)
            _, seconds = timed(lambda p=planner, g=fresh: fusion_planner_for(p).plan(FusionRequest(g, device)))
            each = round(1e6 * seconds / parts, 1)
            found.append({"layers": count, "planner": planner, "vertices_and_edges": parts})
            found[-1] |= {"seconds": round(seconds, 3), "us_each": each}
    return found


def main() -> int:
    """Plan, print tables, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(_NETWORKS))
    parser.add_argument("--size", default="paper")
    parser.add_argument("--device", default="A100-SXM4-40GB")
    parser.add_argument("--layers", nargs="*", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--plans", action="store_true", help="print each plan")
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    device = cost_device(arguments.device)
    networks: list[dict] = []
    for name in arguments.models:
        print(f"{name} ...", file=sys.stderr, flush=True)
        graph = graph_of(souffle.import_onnx(build(name, size=arguments.size)))
        for planner in FUSION_PLANNERS:
            plan, figures = row(graph, planner, device)
            more = {"beam": gap(graph, device)} if planner == "stitching-dp" else {}
            networks.append({"model": name, "tes": len(graph.ops), "edges": len(graph.edges), **figures, **more})
            if arguments.plans:
                print(plan)
                print("\n".join(f"  {decision}" for decision in plan.decisions))
    columns = ["model", "tes", "planner", "kernels", "fused", "largest", "score_us", "latency_us", "seconds"]
    print(format_table(columns, [[one[column] for column in columns] for one in networks]))
    for one in networks:
        if "beam" in one:
            print(f"{one['model']}: beam {one['beam']}")
    grown = scaling(arguments.layers, device)
    columns = ["layers", "vertices_and_edges", "planner", "seconds", "us_each"]
    print(format_table(columns, [[one[column] for column in columns] for one in grown]))
    if arguments.out:
        about = {"size": arguments.size, "device": arguments.device, "scaling": grown}
        save_results(arguments.out, "benchmarks.stitching_plans", networks, **about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
