"""``souffle reproduce``: tables and figures of the papers, with ours beside them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from souffle.cli.output import Progress, print_table, write_json
from souffle.cli.rate_line import RateLine
from souffle.codegen.nvcc import find_nvcc
from souffle.errors import OptionError, SouffleError
from souffle.evaluation.cells import PaperTable
from souffle.evaluation.making import Row, make_rows
from souffle.evaluation.network_rows import Benched, Compiled, Task, task_key
from souffle.evaluation.result_file import ResultFile, device_name, result_header, write_whole
from souffle.evaluation.setting import Setting
from souffle.evaluation.tables import TABLES
from souffle.runtime.detect import gpu_arch
from souffle.workers import Engine, engine_for

__all__ = ["WORK", "reproduce"]

WORK = "souffle.cli.row_work:make"
"""What workers do."""

_PAPERS_ARCH = "sm_80"
_ROWS, _PAGE = "rows.json", "tables.md"


def reproduce(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command; the exit status is 1 if a row could not be made."""
    names = _names(arguments.tables)
    folder = Path(arguments.out)
    _prepare(folder, names, arguments.force)
    arch, cubin = gpu_arch(), not arguments.no_cubin and find_nvcc() is not None
    options = {"size": arguments.size, "arch": arguments.arch or arch or _PAPERS_ARCH, "cubin": cubin}
    header = result_header(options, device_name() if arch else None)
    setting = Setting(**options, gpu=header["device"], date=header["date"][:10], evaluations=arguments.evaluations)
    file = ResultFile(folder / _ROWS, header, force=arguments.force)
    if file.anew:
        progress.note(f"souffle: {file.path} held rows {file.anew}; they are in {file.path}.before, and are made anew")
    elif file.rows:
        progress.note(f"souffle: {len(file.rows)} rows of {file.path} are taken over")
    file.save()
    tasks = [task for name in names for task in TABLES[name].tasks(setting)]
    on = _where(arguments, 1 if arch else min(2, os.cpu_count() or 1))
    wanted = {task_key(task) for task in tasks}
    line = RateLine(progress, "rows", on, sum(file.row(key) is None for key in wanted))

    def heard(task: Task, row: Row, workers: int) -> None:
        if "failed" in row:
            progress.note(f"souffle: {_named(task)}: {row['failed']}")
        line.count(workers, failed="failed" in row)

    def engine() -> Engine:
        workers = engine_for(on)
        line.show(workers.workers)
        return workers

    made = make_rows(tasks, file, engine, WORK, heard, lambda: progress.interrupted)
    progress.done()
    tables = [TABLES[name].table(setting, lambda task: made.get(task_key(task))) for name in names]
    _write(folder, header, tables)
    if arguments.json:
        write_json([table.data() for table in tables])
    else:
        for table in tables:
            _print(table)
        print(f"\nThe same as data and as a page: {folder}")
    return 1 if any("failed" in row for row in made.values()) else 0


def _names(asked: list[str]) -> list[str]:
    unknown = [name for name in asked if name not in (*TABLES, "all")]
    if unknown:
        raise OptionError(f"there is no table {unknown[0]!r}; there are {', '.join(TABLES)}, and all")
    return list(TABLES) if "all" in asked else list(dict.fromkeys(asked))


def _prepare(folder: Path, names: list[str], force: bool) -> None:
    """Make the folder; one that this command has not made is none to write over."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SouffleError(f"{folder} cannot be made: {error.strerror}") from error
    there = [name for name in (_PAGE, *(f"{name}.json" for name in names)) if (folder / name).exists()]
    if there and not force and not (folder / _ROWS).exists():
        raise OptionError(
            f"{folder} has {there[0]}, and no {_ROWS} that this command would have left beside it; "
            "give another folder, or --force to write over it"
        )


def _where(arguments: argparse.Namespace, jobs: int) -> str:
    if arguments.on is not None and arguments.jobs is not None:
        raise OptionError(f"--on {arguments.on} says already which workers there are; leave --jobs out")
    return arguments.on or f"local:{jobs if arguments.jobs is None else arguments.jobs}"


def _named(task: Task) -> str:
    if isinstance(task, Compiled):
        return f"{task.network} {task.level} {task.precision}"
    return f"{task.network} {'beside others' if isinstance(task, Benched) else type(task).__name__.lower()}"


def _write(folder: Path, header: dict[str, Any], tables: list[PaperTable]) -> None:
    for table in tables:
        content = header | {"results": table.data()["lines"]} | {k: v for k, v in table.data().items() if k != "lines"}
        write_whole(folder / f"{table.name}.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    made = f"`{header['command']}`, {header['date']}, commit {header['commit']}"
    device = f"on {header['device']}" if header["device"] else "without a GPU"
    page = "\n".join([f"Made by {made}, {device}.", "", *(table.markdown() for table in tables)])
    write_whole(folder / _PAGE, page)


def _print(table: PaperTable) -> None:
    header, rows, notes = table.text_rows()
    print()
    print_table(header, rows, f"{table.name}: {table.heading}")
    for note in notes:
        print(f"  {note}")
