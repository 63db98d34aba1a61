"""``souffle tune``: search schedules and write a tuning log."""

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
    from souffle.tuning import TaskReport, TuningReport

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
    parser.add_argument("--level", choices=tuple(LEVELS), default="V4")
    parser.add_argument("--log", default="tuning_logs", metavar="DIR", help="folder of the logs (default: tuning_logs)")
    parser.add_argument("--device", metavar="PRODUCT", help="predict for this product, and measure nothing")
    parser.add_argument("--tasks", default="", metavar="REGEX", help="only stages whose name it is found in")
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
    report = souffle.tune(
        arguments.models,
        trials=arguments.trials,
        log=arguments.log,
        level=arguments.level,
        **model_options(arguments),
        device=arguments.device,
        tasks=arguments.tasks,
        seed=arguments.seed,
        seconds=arguments.time,
        on=arguments.on,
        measure=arguments.measure,
        candidate_seconds=arguments.candidate_seconds,
        candidate_mb=arguments.candidate_mb,
        progress=progress,
        **compiler_options(arguments),
    )
    progress.done()
    if arguments.json:
        write_json(asdict(report) | {"source": report.source})
    else:
        print(_table(report))
    return INTERRUPTED if report.interrupted else 0


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
    def microseconds(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e6:.2f}"

    gain = "-" if task.gain is None else f"{task.gain:.2f}"
    times = microseconds(task.own_seconds), microseconds(task.best_seconds)
    return (task.name, task.weight, *times, gain, task.trials, task.new_trials, task.best)
