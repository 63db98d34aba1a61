"""Who orders the fusions best: no fusion, rules, annealing and a policy that was trained (002, Table 1).

::

    python -m benchmarks.learning --seeds 0 1 2 3 4 --policies build/learning --out docs/results/learning.json
    python -m benchmarks.learning --table docs/results/learning.json        # the table of results that are there
    python -m benchmarks.learning --only-policy --seeds 4 --evaluations 3000                # as the one that ships
    python -m benchmarks.learning --rates                                   # evaluations a second, of one core

Each graph is a network of paper size in fp32 as level V0 plans it, on one GPU. For each seed a policy is trained on all
graphs but those held out, with half of the evaluations of each, and then on every graph alone with the rest; on those
held out with all. Annealing and draws by chance have as many evaluations of each graph. Every time is the
latency-evaluator's of the plan, launches included, and nothing is run. Results are kept as they are made: the same
command goes on where it stopped. Seeds may run in processes of their own, each with a file; ``--table`` takes several.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import souffle
from benchmarks.record import kept_results, save_results
from souffle import learning
from souffle.cli.output import format_table
from souffle.cost import cost_device
from souffle.models import build
from souffle.stitching import FusionRequest, OpGraph, fusion_planner_for, graph_of, predicted_seconds
from souffle.stitching.priority import FEATURES, FusionEnvironment, FusionRules, anneal, by_saved_bytes

TRAINED = (
    *("amoebanet", "gnmt", "rnnlm", "transformer-xl"),
    *("bert", "resnext", "efficientnet", "mmoe", "nmt", "var-encoder", "multi-interests", "dyn-rnn"),
)
"""The paper's kinds of networks, then others."""

HELD_OUT = ("swin", "word2vec-train")
"""Seen by no training but their own: one large, one a training step."""

OTHERS = ("tvm", "xla-rules", "stitching-dp", "stitching-ilp")
"""Planners that have no order; their kernels have no limit of operators."""

_DRAWS = 64
"""Evaluations of a policy that is not trained any further, as ``fusion="learned"`` has them."""


def environment_of(name: str, arguments: argparse.Namespace, graphs: dict[str, OpGraph]) -> FusionEnvironment:
    """A network's graph, read once, with nothing known of it yet."""
    if name not in graphs:
        graphs[name] = graph_of(souffle.import_onnx(build(name, arguments.size)))
    rules = FusionRules(arguments.limit)
    return FusionEnvironment(graphs[name], cost_device(arguments.device), rules, name)


def by_rule(environment: FusionEnvironment) -> Iterator[tuple[str, float]]:
    """What needs no search."""
    graph, device = environment.graph, environment.device
    yield "none", environment.baseline_seconds
    yield "default", environment.seconds(np.zeros(len(graph.ops)))
    yield "greedy", environment.seconds(-np.argsort(by_saved_bytes(graph)))
    for name in OTHERS:
        yield name, predicted_seconds(graph, fusion_planner_for(name).plan(FusionRequest(graph, device)), device)


def by_chance(environment: FusionEnvironment, evaluations: int, seed: int) -> float:
    """The best of so many orders that are drawn."""
    draws = np.random.default_rng(seed)
    return min(environment.seconds(draws.random(len(environment.graph.ops))) for _ in range(evaluations))


def asked(policy: learning.Policy, environment: FusionEnvironment, seed: int) -> float:
    """The best of what ``fusion="learned"`` tries: the default order, the likeliest priorities, and draws."""
    tried = learning.priorities(policy, environment.features, _DRAWS - 1, seed)
    default = environment.seconds(np.zeros(len(environment.graph.ops)))
    return min(default, *map(environment.seconds, tried))


def joint(arguments: argparse.Namespace, seed: int, graphs: dict[str, OpGraph]) -> tuple[learning.Policy, dict]:
    """A policy trained on all graphs but those held out, or the one that was; and the best of each."""
    folder = Path(arguments.policies)
    config = learning.PpoConfig(updates=10**6, evaluations=arguments.evaluations // 2, seed=seed, graphs=len(TRAINED))
    environments = [environment_of(name, arguments, graphs) for name in arguments.trained]
    first = learning.Policy(learning.PolicyConfig(len(FEATURES)), seed)
    training = learning.train(first, environments, config, checkpoint=folder / f"joint-{seed}.checkpoint")
    about = {"device": arguments.device, "limit": arguments.limit}
    learning.save_policy(folder / f"policy-{seed}.safetensors", training.policy, training.provenance | about)
    learning.training_curves(training.history, folder / f"curves-{seed}.svg", f"All graphs, seed {seed}")
    return training.policy, {name: best.seconds for name, best in training.best.items()}


def searched(
    name: str, seed: int, arguments: argparse.Namespace, graphs: dict[str, OpGraph], policy: learning.Policy, best: dict
) -> Iterator[tuple[str, float]]:
    """What each search finds for a graph with as many evaluations."""

    def fresh() -> FusionEnvironment:
        return environment_of(name, arguments, graphs)

    count = arguments.evaluations
    environment = fresh()
    scale = environment.baseline_seconds
    yield "annealing", anneal(environment.seconds, len(environment.graph.ops), scale, count, seed).seconds
    yield "random", by_chance(fresh(), count, seed)
    alone = asked(policy, fresh(), seed)
    yield "policy alone", alone
    left = count - _DRAWS - (0 if name in arguments.held_out else count // 2)
    config = learning.PpoConfig(updates=10**6, evaluations=left, seed=seed)
    tuned = learning.fine_tune(policy, fresh(), config).best[name].seconds
    yield "learned", min(alone, best.get(name, math.inf), tuned)


def measure(arguments: argparse.Namespace) -> None:
    """Whatever is not in the file yet."""
    rows = kept_results(arguments.out)
    graphs: dict[str, OpGraph] = {}
    names = (*arguments.trained, *arguments.held_out)

    def keep(name: str, seed: int | None, found: Iterator[tuple[str, float]]) -> None:
        begun = time.perf_counter()
        for way, seconds in found:
            row: dict[str, Any] = {"graph": name, "vertices": len(graphs[name].ops), "seed": seed, "way": way}
            row["held_out"] = name in arguments.held_out
            row["us"] = seconds * 1e6 if math.isfinite(seconds) else None
            row["took_s"] = round(time.perf_counter() - begun, 2)
            rows.append(row)
            print(f"{name}  {seed}  {way}  {seconds * 1e6:.1f} us", flush=True)
            begun = time.perf_counter()
        about = {"device": arguments.device, "limit": arguments.limit, "evaluations": arguments.evaluations}
        save_results(arguments.out, "benchmarks.learning", rows, **about)

    def missing(name: str, seed: int | None) -> bool:
        return not any(row["graph"] == name and row["seed"] == seed for row in rows)

    for name in names if arguments.rules else ():
        if missing(name, None):
            keep(name, None, by_rule(environment_of(name, arguments, graphs)))
    for seed in arguments.seeds:
        left = [name for name in names if missing(name, seed)]
        if left:
            policy, best = joint(arguments, seed, graphs)
            for name in left:
                environment_of(name, arguments, graphs)
                keep(name, seed, searched(name, seed, arguments, graphs, policy, best))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Table 1 of 002: by how many percent each way is faster than no fusion, mean and spread over seeds."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["graph"], row["way"]), []).append(row["us"])
    ways = ("default", "greedy", "random", "annealing", "policy alone", "learned", *OTHERS)
    lines, gains = [], {way: [] for way in ways}
    for name in dict.fromkeys(row["graph"] for row in rows):
        if (name, "none") not in found:
            continue  # a file of seeds alone
        (none,), row = found[name, "none"], next(row for row in rows if row["graph"] == name)
        cells = []
        for way in ways:
            speedups = [none / us for us in found.get((name, way), ()) if us is not None]
            if speedups:
                gains[way].append(statistics.mean(map(math.log, speedups)))
            spread = f" ± {100 * statistics.stdev(speedups):.1f}" if len(speedups) > 1 else ""
            cells.append(f"{100 * (statistics.mean(speedups) - 1):.1f}{spread}" if speedups else "-")
        mark = " (held out)" if row["held_out"] else ""
        lines.append([f"{name}{mark}", str(row["vertices"]), f"{none:,.1f}", *cells])
    means = [f"{math.exp(statistics.mean(of)):.4f} x" if of else "-" for of in gains.values()]
    return format_table(["graph", "TEs", "no fusion, us", *ways], [*lines, ["geometric mean", "", "", *means]])


def rates(arguments: argparse.Namespace) -> str:
    """Evaluations a second of each graph, of priorities drawn by chance, when prices are known and when not."""
    graphs: dict[str, OpGraph] = {}
    lines = []
    for name in (*arguments.trained, *arguments.held_out):
        environment = environment_of(name, arguments, graphs)
        draws = np.random.default_rng(0).integers(0, 8, (200, len(environment.graph.ops)))
        cells = []
        for _ in range(2):
            begun = time.perf_counter()
            for priorities in draws:
                environment.seconds(priorities)
            cells.append(f"{len(draws) / (time.perf_counter() - begun):,.0f}")
        lines.append([name, str(len(environment.graph.ops)), *cells, f"{environment.prices.predicted:,}"])
    return format_table(["graph", "TEs", "first 200 /s", "the same 200 /s", "patterns predicted"], lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trained", nargs="+", default=TRAINED)
    parser.add_argument("--held-out", nargs="*", default=HELD_OUT)
    parser.add_argument("--size", default="paper")
    parser.add_argument("--device", default="A100-SXM4-40GB")
    parser.add_argument("--limit", type=int, default=FusionRules().limit)
    parser.add_argument("--evaluations", type=int, default=1000, help="of each graph and seed")
    parser.add_argument("--seeds", type=int, nargs="*", default=range(5))
    parser.add_argument("--only-policy", action="store_true", help="train on all graphs jointly, and no more")
    parser.add_argument("--no-rules", dest="rules", action="store_false", help="only what has seeds")
    parser.add_argument("--policies", default="build/learning", help="folder of checkpoints, policies and curves")
    parser.add_argument("--out", default="build/learning/learning.json")
    parser.add_argument("--table", nargs="+", metavar="FILE")
    parser.add_argument("--rates", action="store_true")
    arguments = parser.parse_args()
    if arguments.rates:
        print(rates(arguments))
        return
    if not arguments.table:
        Path(arguments.policies).mkdir(parents=True, exist_ok=True)
        Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
        if arguments.only_policy:
            for seed in arguments.seeds:
                joint(arguments, seed, {})
            return
        measure(arguments)
    files = arguments.table or [arguments.out]
    print(table([row for file in files for row in kept_results(file)]))


if __name__ == "__main__":
    main()
