"""``souffle bench``: a model beside other compilers on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import souffle
from souffle.benchmark.measure import CACHES
from souffle.benchmark.report import BenchmarkReport, BenchmarkRow
from souffle.cli.compiler_options import compiler_options
from souffle.cli.interruption import INTERRUPTED
from souffle.cli.model_options import model_options
from souffle.cli.output import Progress, format_table, write_json
from souffle.errors import OptionError

__all__ = ["bench"]


def bench(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command; the exit status is 1 if our own outputs are wrong."""
    out, profile = (None if name is None else Path(name) for name in (arguments.out, arguments.profile))
    for option, path in (("--out", out), ("--profile", profile)):
        # Not after minutes of measuring.
        if path is not None and not path.parent.is_dir():
            raise OptionError(f"{option} {path}: there is no folder {path.parent}")
    report = souffle.bench(
        arguments.model,
        against=[name for name in arguments.against.split(",") if name],
        threads=arguments.threads,
        runs=arguments.runs,
        warmup=arguments.warmup,
        seconds=arguments.seconds,
        seed=arguments.seed,
        target=arguments.target,
        level=arguments.level,
        tuning_log=None if arguments.tuning_log == "none" else arguments.tuning_log,
        profile=None if profile is None else lambda trace: _write("--profile", profile, trace.text()),
        progress=progress,
        **model_options(arguments),
        **compiler_options(arguments),
    )
    progress.done()
    record = dataclasses.asdict(report)
    if out is not None:
        _write("--out", out, json.dumps(record, indent=2))
    if arguments.json:
        write_json(record)
    else:
        print(_text(report))
    return INTERRUPTED if report.interrupted else int(report.wrong)


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{option} {path} cannot be written: {error}") from error


def _text(report: BenchmarkReport) -> str:
    setting = report.setting
    threads = f", {setting.threads} thread{'s' if setting.threads > 1 else ''} each" if setting.device == "cpu" else ""
    lines = [
        f"{report.model} on {report.machine}{threads}, {setting.precision}, level {report.level}",
        f"Outputs were compared with {report.reference}, before anything was timed.",
    ]
    for cache in CACHES:
        lines += ["", f"caches {cache}: {_ORDERS[cache]}"]
        lines.append(format_table(_HEADER, [_row(row, cache) for row in report.rows]))
    lines += ["", f"{report.runs} rounds after {report.warmup} of warm-up; a round runs each once, in this order."]
    lines.append("us: median and quartiles. times ours: median over rounds of peer / souffle, and its 95 % interval.")
    lines += [f"{row.name}{f' {row.form}' if row.form else ''}: {row.reason}" for row in report.rows if row.reason]
    if report.interrupted:
        lines.append("Interrupted: what is above is of the rounds that were whole.")
    return "\n".join(lines)


_ORDERS = {
    "warm": "the same has run right before, untimed",
    "cold": "overwritten before each run",
}
_HEADER = ("", "version", "as", "clock", "error", "runs", "us", "quartiles", "times ours", "95 %")


def _row(row: BenchmarkRow, cache: str) -> tuple:
    times, ratio = row.times.get(cache), row.ratios.get(cache)
    error = "-" if row.error is None else f"{row.error:.1e}"
    measured = ("-", "-", "-") if times is None else (
        times.runs, f"{times.median_us:.1f}", f"{times.lower_us:.1f} .. {times.upper_us:.1f}"
    )  # fmt: skip
    beside = ("-", "-") if ratio is None else (f"{ratio.median:.3g}", f"{ratio.low:.3g} .. {ratio.high:.3g}")
    return (row.name, row.version or "-", row.form or "-", row.clock or "-", error, *measured, *beside)
