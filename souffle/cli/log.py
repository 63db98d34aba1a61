"""``souffle log``: look at tuning logs, merge, shorten and try them, and exchange them with MetaSchedule."""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten

from souffle.cli.output import Progress, print_table, write_json
from souffle.errors import OptionError
from souffle.schedule.arrangement import Arrangement
from souffle.schedule.log import TuningLog
from souffle.tuning.log_work import StageRow, Verdict, logs_in, merge, prune, stage_rows, verdicts
from souffle.tuning.metaschedule_log import export_log, import_log
from souffle.wording import counted

__all__ = ["export_logs", "import_logs", "merge_logs", "prune_logs", "show_logs", "verify_logs"]

_OUTCOMES = {
    "same": "give the text that their figure is of",
    "unsaid": "give a schedule; which text their figure is of was not written down",
    "another": "give another text, and are taken for what is predicted of it",
    "unfit": "do not fit any more",
}


def merge_logs(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run ``souffle log merge``."""
    sources = [log for folder in arguments.sources for log in _logs(folder, arguments)]
    progress(f"merging {len(sources)} logs")
    counts = {id(log): len(log.records) for log in sources}
    merged = merge(sources, Path(arguments.output))
    progress.done()
    if arguments.json:
        write_json({log.arch: _size(log) for log in merged})
        return 0
    for log in merged:
        given = [str(counts[id(one)]) for one in sources if one.arch == log.arch]
        print(f"{log.folder}: {_size_words(log)}, of {' + '.join(given)} merged")
    return 0


def show_logs(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run ``souffle log show``."""
    logs = _logs(arguments.log, arguments)
    tables = []
    for log in logs:
        rows = []
        for number, row in enumerate(stage_rows(log, replay=arguments.replay), 1):
            if arguments.replay:
                progress(f"{log.arch}: stage {number}/{len(log.table.workloads)}")
            if re.search(arguments.tasks, row.stage):
                rows.append(row)
        rows.sort(key=lambda row: -(row.seconds or 0.0))
        tables.append((log, rows))
    progress.done()
    if arguments.json:
        write_json(
            [
                {
                    "arch": log.arch,
                    "stages": [asdict(row) for row in rows],
                    "arrangements": [asdict(one) for one in log.arrangements],
                }
                for log, rows in tables
            ]
        )
        return 0
    for number, (log, rows) in enumerate(tables):
        title = f"{log.folder}: {_size_words(log)}"
        header = (*_HEADER[:7], *(("now",) if arguments.replay else ()), *_HEADER[7:])
        print_table(header, [_cells(row, arguments.replay) for row in rows], title)
        beside = [one for one in log.arrangements if any(re.search(arguments.tasks, own.name) for own in one.stages)]
        if beside:
            print()
            print_table(_BESIDE, [_beside(one) for one in beside], f"{log.folder}: stages beside each other")
        if number + 1 < len(tables):
            print()
    return 0


_HEADER = ("stage", "records", "tried", "useful", "best µs", "gain", "figure", "date", "parameters", "schedule")
_MOST_CHARACTERS = 48
"""Of the parameters of a stage in a table; JSON has all of them."""


def _cells(row: StageRow, replay: bool) -> tuple[str, ...]:
    seconds = "-" if row.seconds is None else f"{row.seconds * 1e6:.2f}"
    gain = "-" if row.gain is None else f"{row.gain:.2f}"
    figure = f"{row.figure} {row.device}" if row.figure else "none is useful"
    parameters = shorten(row.parameters, _MOST_CHARACTERS, placeholder=" ...")
    counted = (str(row.records), str(row.tried), str(row.useful))
    now = (row.outcome or "-",) if replay else ()
    return (row.stage, *counted, seconds, gain, figure, *now, row.date or "-", parameters, row.best or "-")


_BESIDE = ("stages", "blocks", "who computes them", "µs", "gain", "figure", "date")


def _beside(one: Arrangement) -> tuple[str, ...]:
    """A measured arrangement."""
    origin = one.origin
    seconds = f"{one.seconds * 1e6:.2f}" if one.figures else origin.problem
    gain = f"{origin.own_seconds / one.seconds:.2f}" if one.figures else "-"
    shares = " | ".join(own.workers for own in one.stages)
    names = " | ".join(own.name for own in one.stages)
    return (names, str(one.block), shares, seconds, gain, f"{origin.figure} {origin.device}", origin.date)


def prune_logs(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run ``souffle log prune``."""
    logs = _logs(arguments.log, arguments)
    target = None if arguments.output is None else Path(arguments.output)
    sizes = []
    for log in logs:
        progress(f"pruning {log.folder}")
        before = _size(log)
        sizes.append((log, before, prune(log, arguments.keep, target)))
    progress.done()
    if arguments.json:
        write_json({log.arch: {"before": before, "after": _size(after)} for log, before, after in sizes})
        return 0
    for log, before, after in sizes:
        print(f"{log.folder}: {before['records']} records of {before['stages']} stages -> {after.folder}: ", end="")
        print(_size_words(after))
    return 0


def verify_logs(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run ``souffle log verify``; the exit status is 1 if a line is damaged, or a recipe does not fit any more."""
    logs = _logs(arguments.log, arguments)
    with _unlogged():
        found = [verdict for log in logs for verdict in verdicts(log, progress)]
    failed = sum(record.failed for log in logs for record in log.records)
    left = sum(len(one.marks) for log in logs for one in log.tried)
    beside = sum(len(log.arrangements) for log in logs)
    progress.done()
    problems = [problem for log in logs for problem in log.problems]
    status = 1 if problems or any(verdict.outcome == "unfit" for verdict in found) else 0
    if arguments.json:
        damaged = [asdict(problem) for problem in problems]
        write_json({"records": [asdict(verdict) for verdict in found], "problems": damaged, "unusable": failed})
        return status
    for problem in problems:
        print(f"{problem.where}: {problem.reason}")
    for verdict in found:
        if arguments.all or verdict.outcome in ("another", "unfit"):
            print(_line(verdict))
    counts = Counter(verdict.outcome for verdict in found)
    print(f"{len(found)} records followed:")
    for outcome, words in _OUTCOMES.items():
        if counts[outcome]:
            print(f"{counts[outcome]:7} {words}")
    if failed:
        print(f"{failed} more say that a candidate cannot be used, and are not tried.")
    if left:
        print(f"{left} more were tried, and no record of them was kept.")
    if beside:
        print(f"{counted(beside, 'arrangement')} of stages: whether they fit is seen where their network is compiled.")
    if problems:
        print(f"{len(problems)} parts are damaged.")
    return status


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """What is damaged is told by the command itself then."""
    logger = logging.getLogger("souffle.tuning")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _line(verdict: Verdict) -> str:
    reason = f": {verdict.reason}" if verdict.reason else ""
    return f"{verdict.where}: {verdict.outcome}{reason} ({verdict.stage}, {verdict.recipe}, {verdict.figure})"


def export_logs(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run ``souffle log export``."""
    logs = _logs(arguments.log, arguments)
    written = {}
    for log in logs:
        progress(f"exporting {log.folder}")
        folder = Path(arguments.output) / log.arch
        written[str(folder)] = export_log(log, folder)
    progress.done()
    if arguments.json:
        write_json(written)
        return 0
    for folder, count in written.items():
        print(f"{folder}: {count} records")
        print(f"  tvm.s_tir.meta_schedule.database.JSONDatabase(work_dir={folder!r}) opens it")
    return 0


def import_logs(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run ``souffle log import``; the exit status is 1 if nothing could be read."""
    progress(f"importing {arguments.database}")
    imported = import_log(Path(arguments.database), Path(arguments.output), arguments.device or "")
    progress.done()
    for problem in imported.problems:
        progress.note(f"souffle: {problem.where} is skipped: {problem.reason}")
    if arguments.json:
        write_json(imported.records)
    for arch, count in () if arguments.json else imported.records.items():
        print(f"{Path(arguments.output) / arch}: {count} records imported")
    return 0 if imported.records else 1


def _logs(folder: str, arguments: argparse.Namespace) -> list[TuningLog]:
    """Those of the folder, of the architecture that was asked for."""
    logs = logs_in(Path(folder))
    wanted = [log for log in logs if arguments.arch in (None, log.arch)]
    if not wanted:
        raise OptionError(f"{folder} has no log for {arguments.arch}, only for {', '.join(log.arch for log in logs)}")
    return wanted


def _size(log: TuningLog) -> dict[str, int]:
    files = (path for path in log.folder.glob("*.jsonl"))
    sizes = {"records": len(log.records), "stages": len(log.table.workloads), "arrangements": len(log.arrangements)}
    return {**sizes, "bytes": sum(path.stat().st_size for path in files)}


def _size_words(log: TuningLog) -> str:
    size = _size(log)
    arrangements = f"{counted(size['arrangements'], 'arrangement')}, " if size["arrangements"] else ""
    return f"{size['records']} records of {size['stages']} stages, {arrangements}{size['bytes'] / 1e3:.1f} kB"
