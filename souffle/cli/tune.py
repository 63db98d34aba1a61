"""``souffle tune``: search schedules, or who computes independent stages, and write a tuning log."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

import souffle
from souffle.cli.compiler_options import compiler_options
from souffle.cli.interruption import INTERRUPTED
from souffle.cli.model_options import model_options
from souffle.cli.output import Progress, format_table, write_json
from souffle.options import LEVELS
from souffle.wording import counted

if TYPE_CHECKING:
    from souffle.tuning import ArrangingReport, TaskReport, TuningReport

__all__ = ["add_arguments", "tune"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("models", nargs="+", metavar="MODEL", help="ONNX files; equal stages of several are one task")
    parser.add_argument(
        "--trials",
        type=int,
        required=True,
        metavar="N",
        help="candidates of each task, with those that the log holds already",
    )
    parser.add_argument(
        "--side-by-side",
        action="store_true",
        help="search who computes independent stages at the same time, not schedules: N ways of each set of stages",
    )
    parser.add_argument("--level", choices=tuple(LEVELS), default="V4")
    parser.add_argument("--log", default="tuning_logs", metavar="DIR", help="folder of the logs (default: tuning_logs)")
    parser.add_argument("--device", metavar="PRODUCT", help="predict for this product, and measure nothing")
    parser.add_argument("--tasks", default="", metavar="REGEX", help="only stages (sets with one) of such a name")
    parser.add_argument("--time", type=float, metavar="SECONDS", help="build no further candidates after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--on",
        default="local",
        metavar="WHERE",
        help="local (default: a process on each core), local:N, here, ray, ray://HOST:PORT",
    )
    parser.add_argument(
        "--measure",
        default="auto",
        metavar="HOW",
        help="auto (on a GPU that is here, else predict; default), none, gpu (of the workers), rpc://HOST:PORT/KEY",
    )
    parser.add_argument(
        "--candidate-seconds", type=float, default=120.0, metavar="S", help="end a worker after so long (default: 120)"
    )
    parser.add_argument(
        "--candidate-mb", type=int, default=4096, metavar="MB", help="memory for one candidate (default: 4096)"
    )
    parser.set_defaults(command=tune)


def tune(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command."""
    search = souffle.tune_side_by_side if arguments.side_by_side else souffle.tune
    schedules = {} if arguments.side_by_side else {"seed": arguments.seed}
    report = search(
        arguments.models,
        trials=arguments.trials,
        log=arguments.log,
        level=arguments.level,
        **model_options(arguments),
        device=arguments.device,
        tasks=arguments.tasks,
        seconds=arguments.time,
        on=arguments.on,
        measure=arguments.measure,
        candidate_seconds=arguments.candidate_seconds,
        candidate_mb=arguments.candidate_mb,
        progress=progress,
        **schedules,
        **compiler_options(arguments),
    )
    progress.done()
    if arguments.json:
        write_json(asdict(report) | {"source": report.source})
    else:
        print(_groups(report) if arguments.side_by_side else _table(report))
    return INTERRUPTED if report.interrupted else 0


def _groups(report: ArrangingReport) -> str:
    """A row for each way, those of one set of stages together."""
    header = ("stages", "runs", "who computes them", "predicted µs", "measured µs", "one after the other µs", "gain")
    rows: list[tuple] = []
    for group in report.groups:
        rows.append((" | ".join(group.stages), group.runs, "one after the other", _us(group.apart_seconds), "", "", ""))
        for way in group.ways:
            gain = "-" if way.gain is None else f"{way.gain:.2f}"
            figures = _us(way.predicted_seconds), way.problem or _us(way.seconds), _us(way.apart_seconds), gain
            rows.append(("", "", " | ".join(way.shares), *figures))
    if not rows:
        return "No kernel of these models has stages that could be computed side by side."
    shown = len(header) if report.figure == "measured" else _UNMEASURED
    lines = [format_table(header[:shown], [row[:shown] for row in rows]), ""]
    if report.figure == "measured":
        lines.append(f"Times are {report.source}, with their launch: means of a cold and a warm second-level cache.")
        lines.append(f"{report.new_trials} new trials in {report.seconds:.0f} s on {report.engine}; in {report.log}")
    else:
        lines.append(f"Times are {report.source}, by which compilation chooses; nothing was measured or written.")
    unlike = sum(not group.alike for group in report.groups)
    if unlike:
        lines.append(f"{unlike} are not measured: alone they would have blocks of fewer threads than in their kernel.")
    if report.interrupted:
        lines.append("Interrupted; the same command goes on from here.")
    return "\n".join(lines)


_UNMEASURED = 4
"""Columns where nothing was measured."""


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.2f}"


def _table(report: TuningReport) -> str:
    header = ("task", "runs", "rule's own µs", "best µs", "gain", "trials", "new", "best schedule")
    lines = [format_table(header, [_row(task) for task in report.tasks]), ""]
    own = sum(task.weight * task.own_seconds for task in report.tasks if task.own_seconds is not None)
    best = sum(
        task.weight * min(task.best_seconds, task.own_seconds)
        for task in report.tasks
        if task.best_seconds is not None and task.own_seconds is not None
    )
    lines.append(f"All runs together: {own * 1e6:.1f} µs as the rules choose, {best * 1e6:.1f} µs as found.")
    each = f", {report.seconds / report.new_trials:.2f} s each" if report.new_trials else ""
    lines.append(f"Times are {report.source}: means of a cold and a warm second-level cache.")
    where = f" on {report.engine}" if report.new_trials else ""
    lines.append(f"{report.new_trials} new trials in {report.seconds:.0f} s{each}{where}; records in {report.log}")
    if report.ranking:
        lines.append(f"What to measure was chosen {report.ranking}.")
    if report.lost:
        lost = counted(report.lost, "attempt")
        lines.append(f"{lost} lost with a worker, by time or by nonsense; each was made once more.")
    if report.interrupted:
        lines.append("Interrupted; the same command goes on from here.")
    return "\n".join(lines)


def _row(task: TaskReport) -> tuple:
    gain = "-" if task.gain is None else f"{task.gain:.2f}"
    times = _us(task.own_seconds), _us(task.best_seconds)
    return (task.name, task.weight, *times, gain, task.trials, task.new_trials, task.best)
