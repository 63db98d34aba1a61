"""``souffle report``: one HTML file that shows what was compiled and why (``docs/report.md``)."""

from __future__ import annotations

import argparse
from pathlib import Path

from souffle.cli.compiler_options import compiler_options
from souffle.cli.model_options import model_options
from souffle.cli.output import Progress, human_bytes, write_json
from souffle.reporting import write_report
from souffle.wording import counted

__all__ = ["report"]


def report(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command."""
    path = Path(arguments.output or Path(arguments.model).with_suffix(".html"))
    options = {}
    if Path(arguments.model).suffix != ".souffle":
        options = {
            **compiler_options(arguments),
            **model_options(arguments),
            "levels": arguments.levels,
            "tuning_log": None if arguments.tuning_log == "none" else arguments.tuning_log,
            "cubin": not arguments.no_cubin,
        }
    made = write_report(arguments.model, path, progress=progress, **options)
    progress.done()
    size = path.stat().st_size
    if arguments.json:
        write_json({"file": str(path), "bytes": size, "report": made})
    else:
        what = f"{counted(len(made['kernels']), 'kernel')}, {counted(len(made['stages']), 'stage')} at {made['shown']}"
        print(f"{path}: {what}, {human_bytes(size)}; open it in a browser")
    return 0
