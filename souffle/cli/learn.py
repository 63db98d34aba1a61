"""``souffle learn``: train a policy that orders the fusions of networks."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

import souffle
from souffle.cli.model_options import add_model_options, model_options
from souffle.cli.output import Progress, format_table, write_json
from souffle.options import PRECISIONS

if TYPE_CHECKING:
    from souffle.stitching.priority import GraphLesson, LearningReport

__all__ = ["add_arguments", "learn"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("models", nargs="+", metavar="MODEL", help="ONNX files; the policy is trained on all jointly")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="for the policy, such as own.safetensors")
    parser.add_argument("--evaluations", type=int, default=1000, metavar="N", help="of each graph (default: 1000)")
    parser.add_argument("--start", metavar="POLICY", help="train this one further; without, one by chance")
    parser.add_argument("--limit", type=int, metavar="N", help="TEs of a kernel at most (default: the planners' own)")
    parser.add_argument("--level", choices=("V0", "V1", "V2"), default="V0", help="whose TEs are fused (default: V0)")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--device", metavar="PRODUCT", help="predict for this GPU (default: that of sm_90)")
    add_model_options(parser)
    parser.add_argument("--checkpoint", metavar="FILE", help="where training goes on from (default: FILE.checkpoint)")
    parser.add_argument("--curves", metavar="FILE.svg", help="for a picture of the training")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(command=learn)


def learn(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command."""
    report = souffle.learn(
        arguments.models,
        out=arguments.out,
        evaluations=arguments.evaluations,
        start=arguments.start,
        limit=arguments.limit,
        level=arguments.level,
        precision=arguments.precision,
        device=arguments.device,
        **model_options(arguments),
        checkpoint=arguments.checkpoint,
        curves=arguments.curves,
        seed=arguments.seed,
        progress=progress,
    )
    progress.done()
    if arguments.json:
        write_json(asdict(report))
    else:
        print(_table(report))
    return 0


def _table(report: LearningReport) -> str:
    header = ("graph", "TEs", "no fusion µs", "default order µs", "policy µs", "best drawn µs", "evaluations")
    rows = [
        (one.name, one.vertices, *(f"{seconds * 1e6:.1f}" for seconds in _times(one)), one.evaluations)
        for one in report.graphs
    ]
    return "\n".join(
        [
            format_table(header, rows),
            "",
            f"{report.updates} updates in {report.seconds:.0f} s. Times are predicted for {report.device}, one kernel "
            "after another, launches included.",
            f"The policy is in {report.policy}: souffle compile MODEL --fusion learned --policy {report.policy}",
        ]
    )


def _times(one: GraphLesson) -> tuple[float, ...]:
    return one.unfused_seconds, one.default_seconds, one.policy_seconds, one.best_seconds
