"""``souffle bench``: a model beside other compilers on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import souffle
from souffle.cli.bench_table import bench_text
from souffle.cli.compiler_options import compiler_options
from souffle.cli.interruption import INTERRUPTED
from souffle.cli.model_options import model_options
from souffle.cli.output import Progress, write_json
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
        print(bench_text(report))
    return INTERRUPTED if report.interrupted else int(report.wrong)


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{option} {path} cannot be written: {error}") from error
