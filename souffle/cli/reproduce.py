"""``souffle reproduce``: tables and figures of the papers, with ours beside them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from souffle.cli.output import Progress, print_table, write_json
from souffle.codegen.nvcc import find_nvcc
from souffle.errors import OptionError, SouffleError
from souffle.evaluation.cells import PaperTable
from souffle.evaluation.making import Said, make_rows, worker_command
from souffle.evaluation.network_rows import Benched, Compiled, Task, task_key
from souffle.evaluation.result_file import ResultFile, device_name, result_header, write_whole
from souffle.evaluation.setting import Setting
from souffle.evaluation.tables import TABLES
from souffle.runtime.detect import gpu_arch

__all__ = ["reproduce"]

_PAPERS_ARCH = "sm_80"
_WORKER = "souffle.cli.row_worker"
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
    jobs = arguments.jobs or (1 if arch else min(2, os.cpu_count() or 1))
    made = make_rows(tasks, file, worker_command(_WORKER), jobs, _Heard(progress))
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


class _Heard:
    """Shows what the processes say: all of them on one line that moves, or a line for each row; and what failed."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.doing: dict[str, str] = {}

    def __call__(self, said: Said, there: int, all_rows: int) -> None:
        self.progress.prefix = f"{there} of {all_rows} rows; "
        name = _named(said.task)
        if said.row is None:
            self.doing[said.task.network] = f"{name}: {said.message}"
        else:
            self.doing.pop(said.task.network, None)
            if "failed" in said.row:
                self.progress.note(f"souffle: {name}: {said.row['failed']}")
        if self.progress.live:
            self.progress("  ".join(self.doing.values()))
        elif said.row is not None:
            self.progress(name)
        if self.progress.interrupted:
            self.progress("")


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
