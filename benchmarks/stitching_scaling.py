"""How planning grows with the graph, and how near the planners' searches come to the best plan.

::

    python -m benchmarks.stitching_scaling [--vertices 100 200 400 ...] [--limit SECONDS] [--out FILE.json]
    python -m benchmarks.stitching_scaling --gap 200 [--out FILE.json]

Growth: random graphs in which each vertex reads some of the last ones, of the kinds that networks have, so that edges
grow with vertices, and chains of transformer blocks. Processor seconds for each vertex and edge stay the same where the
work is linear in both, which 000 §5.2 claims of its own. A planner that took longer than the limit is not asked for
more. Gap: random programs of up to 10 TEs and random graphs of 10; the score of the plan of ``stitching-dp`` beside the
best of all plans under the same score, which an integer linear program over all patterns finds, and which trying every
set of patterns confirms for up to 5.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any

from benchmarks.record import save_results
from souffle.cli.output import format_table
from souffle.cost import CostDevice, cost_device
from souffle.stitching import FUSION_PLANNERS, FusionRequest, Kind, Op, OpGraph, Read, fusion_planner_for, graph_of
from souffle.stitching.axes import Alignment
from souffle.stitching.delta import MEMORY_INTENSIVE, DeltaScore
from souffle.stitching.ilp import best_patterns
from souffle.stitching.kinds import CONTRACTIONS, REDUCTIONS
from souffle.stitching.reduction import candidates_of
from souffle.stitching.stitching_dp import beam_search
from souffle.stitching.work import OpWork

_ROWS, _COLUMNS = 512, 768
MOST, TRIED = 10, 5
"""TEs of a graph whose best plan is looked for, and of one for which every set of patterns is tried as well."""

_NEAR = 8
"""How far back a vertex reads."""


def vertex(number: int, kind: Kind, producers: Sequence[int], ops: Sequence[Op], needed: bool) -> Op:
    """A vertex of 512 rows that reads others element by element, or their rows."""
    one_column = kind in REDUCTIONS
    shape = (_ROWS, 1 if one_column else _COLUMNS)
    reads = []
    for producer in producers:
        wide = ops[producer].shape[1] > 1
        axes = [Alignment(0, 0, _ROWS)]
        if wide and kind not in CONTRACTIONS:
            axes.append(Alignment(1, 2 if one_column else 1, _COLUMNS))
        times = 1.0 if wide or one_column else float(_COLUMNS)
        reads.append(Read(producer, producer, ops[producer].written, times, False, ops[producer].shape, tuple(axes)))
    if not reads:
        own = (Alignment(0, 0, _ROWS), Alignment(1, 2 if one_column else 1, _COLUMNS))
        reads.append(Read(f"x{number}", None, 4 * _ROWS * _COLUMNS, 1.0, False, (_ROWS, _COLUMNS), own))
    reduced = (_COLUMNS,) if one_column or kind in CONTRACTIONS else ()
    points = shape[0] * shape[1] * (reduced[0] if reduced else 1)
    work = OpWork(points * (8 if kind is Kind.EXPENSIVE else 1), points if kind is Kind.EXPENSIVE else 0)
    return Op(f"v{number}", kind, shape, 4 * shape[0] * shape[1], tuple(reads), reduced, work, needed=needed)


def random_graph(count: int, seed: int) -> OpGraph:
    """So many vertices; of ten, six are light, one is expensive, two are sums of rows and one is a product."""
    rng = random.Random(seed)
    kinds = [Kind.LIGHT] * 6 + [Kind.EXPENSIVE, Kind.ROW, Kind.ROW, Kind.GEMM]
    ops: list[Op] = []
    for number in range(count):
        near = range(max(0, number - _NEAR), number)
        wide = [n for n in near if ops[n].shape[1] > 1]
        kind = rng.choice(kinds)
        pool = wide if kind not in MEMORY_INTENSIVE or kind in REDUCTIONS else list(near)
        producers = sorted(rng.sample(pool, min(len(pool), 1 if kind in REDUCTIONS else rng.randint(1, 2))))
        ops.append(vertex(number, kind, producers, ops, number == count - 1))
    return OpGraph(tuple(ops))


def blocks(count: int) -> OpGraph:
    """About so many vertices: products, each followed by a bias, a residual sum and a layer normalization."""
    ops: list[Op] = []

    def add(kind: Kind, *producers: int) -> int:
        ops.append(vertex(len(ops), kind, producers, ops, False))
        return len(ops) - 1

    last = add(Kind.LIGHT)
    while len(ops) < count:
        total = add(Kind.LIGHT, add(Kind.LIGHT, add(Kind.GEMM, last)), last)
        centred = add(Kind.LIGHT, add(Kind.ROW, total), total)
        inverse = add(Kind.EXPENSIVE, add(Kind.ROW, add(Kind.LIGHT, centred)))
        last = add(Kind.LIGHT, add(Kind.LIGHT, add(Kind.LIGHT, inverse, centred)))
    return OpGraph(tuple(ops))


GRAPHS: dict[str, Callable[[int], OpGraph]] = {"random": lambda count: random_graph(count, count), "blocks": blocks}


def growth(counts: Sequence[int], limit: float, device: CostDevice) -> list[dict[str, Any]]:
    """Processor seconds of each planner on graphs of each kind."""
    found = []
    for kind, make in GRAPHS.items():
        slow: set[str] = set()
        for count in counts:
            graph = make(count)
            for planner in FUSION_PLANNERS:
                if planner in slow:
                    continue
                fresh = OpGraph(graph.ops)
                start = time.process_time()
                plan = fusion_planner_for(planner).plan(FusionRequest(fresh, device))
                seconds = time.process_time() - start
                parts = len(graph.ops) + len(graph.edges)
                one = {"graph": kind, "planner": planner, "vertices": len(graph.ops), "edges": len(graph.edges)}
                one |= {"kernels": len(plan.patterns), "seconds": round(seconds, 3)}
                found.append(one | {"us_each": round(1e6 * seconds / parts, 1)})
                print(*found[-1].values(), file=sys.stderr, flush=True)
                if seconds > limit:
                    slow.add(planner)
    return found


def programs() -> Iterator[OpGraph]:
    """Random programs of up to 10 TEs."""
    from tests.testlib import random_program

    for seed in itertools.count():
        rng = random.Random(seed)
        graph = graph_of(random_program(rng.choice, rng.randint(2, 8), seed))
        if 2 <= len(graph.ops) <= MOST:
            yield graph


def small_graphs() -> Iterator[OpGraph]:
    """Random graphs of 10 vertices."""
    return (random_graph(MOST, seed) for seed in itertools.count())


def gaps(kind: str, graphs: Iterator[OpGraph], count: int, device: CostDevice) -> list[dict[str, Any]]:
    """The beam's plan beside the best one, on so many graphs on which fusing gains something."""
    found: list[dict[str, Any]] = []
    for graph in graphs:
        score = DeltaScore(graph, device)
        fusible = [n for n, op in enumerate(graph.ops) if op.kind in MEMORY_INTENSIVE]
        scores = {
            pattern: score(pattern)
            for size in range(2, len(fusible) + 1)
            for pattern in (sum(1 << n for n in some) for some in itertools.combinations(fusible, size))
        }
        chosen = best_patterns(graph, scores)[0]
        best = sum(scores[pattern] for pattern in chosen)
        if best <= 0:
            continue
        if len(graph.ops) <= TRIED:
            tried = by_trying(graph, scores)
            if abs(best - tried) > 1e-9 * tried:
                raise AssertionError(f"{best} by the program, {tried} by trying")
        beam = max(sum(map(score, plan)) for plan in beam_search(candidates_of(graph, score)))
        one = {"graph": kind, "tes": len(graph.ops), "patterns": len(chosen), "best_us": best * 1e6}
        found.append(one | {"gap": 1 - beam / best})
        if len(found) == count:
            break
    return found


def by_trying(graph: OpGraph, scores: dict[int, float]) -> float:
    """The highest total of disjoint patterns that can run one after another, of every set of them."""
    worth = [pattern for pattern, gain in scores.items() if gain > 0]

    def extended(chosen: list[int], start: int, gain: float) -> float:
        best = gain if runs(graph, chosen) else 0.0
        for place in range(start, len(worth)):
            if not any(worth[place] & one for one in chosen):
                best = max(best, extended([*chosen, worth[place]], place + 1, gain + scores[worth[place]]))
        return best

    return extended([], 0, 0.0)


def runs(graph: OpGraph, patterns: Sequence[int]) -> bool:
    """Whether kernels of these vertices, and of each other one alone, can run in some order: by running what can."""
    held = sum(patterns)
    waiting = [*patterns, *(1 << n for n in range(len(graph.ops)) if not held >> n & 1)]
    done = 0
    while waiting:
        ready = [k for k in waiting if not _needed(graph, k) & ~(k | done)]
        if not ready:
            return False
        done |= sum(ready)
        waiting = [kernel for kernel in waiting if kernel not in ready]
    return True


def _needed(graph: OpGraph, kernel: int) -> int:
    return sum({1 << p for n in range(len(graph.ops)) if kernel >> n & 1 for p in graph.producers[n]})


def main() -> int:
    """Measure, print tables, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vertices", nargs="+", type=int, default=[100, 200, 400, 800, 1600, 3200, 6400])
    parser.add_argument("--limit", type=float, default=60, help="seconds after which a planner is not asked for more")
    parser.add_argument("--gap", type=int, metavar="N", help="compare with the best plan on so many of each instead")
    parser.add_argument("--device", default="A100-SXM4-40GB")
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    device = cost_device(arguments.device)
    if arguments.gap:
        results = []
        for kind, graphs in (("programs", programs()), ("graphs", small_graphs())):
            found = gaps(kind, graphs, arguments.gap, device)
            of = [one["gap"] for one in found]
            met = f"{len(of)} {kind}: the best plan in {sum(gap < 1e-9 for gap in of)}"
            print(f"{met}, mean gap {mean(of):.2%}, largest {max(of):.2%}")
            results += found
    else:
        results = growth(arguments.vertices, arguments.limit, device)
        print(format_table(list(results[0]), [list(one.values()) for one in results]))
    if arguments.out:
        save_results(arguments.out, "benchmarks.stitching_scaling", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
