"""Patterns of plans as stages by templates, beside the stage that Souffle's rules make of the same TEs.

``python -m benchmarks.template_patterns [--models bert ...] [--size paper] [--planner stitching-dp] [--most 16] [--out
FILE.json]``. For each network: distinct patterns of several TEs, how many templates refuse and how many the rules do,
and of those that both have the geometric mean of predicted seconds of the template's stage over those of the rule's,
by the one price that both are chosen by.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from math import exp, log

import souffle
from benchmarks.record import save_results
from souffle.cli.output import format_table
from souffle.cost import cost_device
from souffle.cost.stage_price import price_on
from souffle.models import build
from souffle.program import TE, TEProgram
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.stage import draft_stage
from souffle.stitching import FusionRequest, Stitcher, TemplateError, fusion_planner_for, graph_of

_MOST_TES = 64
"""Of a pattern that Souffle's rules are asked about."""


def distinct(program: TEProgram, planner: str, product: str) -> Iterator[tuple[str, Sequence[TE]]]:
    """The patterns of a plan that are not equal to one before."""
    graph = graph_of(program)
    seen: set[str] = set()
    for pattern in fusion_planner_for(planner).plan(FusionRequest(graph, cost_device(product))).fused:
        tes = [program.tes[number] for number in pattern.members]
        if len(tes) > _MOST_TES or not all(isinstance(one, TE) and len(one.outputs) == 1 for one in tes):
            continue
        digest = draft_stage(tes, program).digest
        if digest not in seen:
            seen.add(digest)
            yield pattern.name, tes


def row(name: str, arguments: argparse.Namespace) -> dict[str, object]:
    """One network."""
    device = cost_device(arguments.product)
    price = price_on(device)
    scheduler = GpuScheduler(device_for(device.arch), price)
    stitcher = Stitcher(device, most=arguments.most)
    program = souffle.import_onnx(build(name, arguments.size)).expanded()
    ratios, each, refused, schemes, seconds = [], [], Counter(), Counter(), 0.0
    for pattern, tes in distinct(program, arguments.planner, arguments.product):
        answer = scheduler(draft_stage(tes, program).func)
        rules = price(answer.functions) if answer.schedule is not None else None
        start = time.perf_counter()
        try:
            made = stitcher(tes, program)
        except TemplateError as error:
            refused["template"] += 1
            each.append({"pattern": pattern, "tes": len(tes), "refused": str(error)[-300:]})
            continue
        finally:
            seconds += time.perf_counter() - start
        schemes.update(map(str, made.schemes))
        refused["rules"] += rules is None
        each.append({"pattern": pattern, "tes": len(tes), "template_us": made.seconds * 1e6, "rule": answer.rule})
        if rules is not None:
            ratios.append(made.seconds / rules)
            each[-1]["rules_us"] = rules * 1e6
    return {
        "network": name,
        "patterns": len(each),
        "refused by templates": refused["template"],
        "by rules": refused["rules"],
        "template / rules": round(exp(sum(map(log, ratios)) / len(ratios)), 2) if ratios else "",
        "best": round(min(ratios, default=1), 2),
        "worst": round(max(ratios, default=1), 2),
        "schemes": " ".join(f"{count} {scheme}" for scheme, count in sorted(schemes.items())),
        "s": round(seconds),
        "each": each,
    }


def main() -> None:
    """Print and save the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["bert", "transformer", "asr", "crnn"])
    parser.add_argument("--size", default="paper")
    parser.add_argument("--planner", default="stitching-dp")
    parser.add_argument("--product", default="A100-SXM4-40GB")
    parser.add_argument("--most", type=int, default=16, help="templates that are lowered of a pattern")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        rows.append(row(name, arguments))
        print({key: value for key, value in rows[-1].items() if key != "each"}, flush=True)
    shown = [{key: value for key, value in one.items() if key != "each"} for one in rows]
    print(format_table(tuple(shown[0]), [tuple(one.values()) for one in shown]))
    if arguments.out:
        save_results(arguments.out, "benchmarks.template_patterns", rows)


if __name__ == "__main__":
    main()
