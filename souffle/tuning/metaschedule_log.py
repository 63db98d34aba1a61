"""Tuning logs as MetaSchedule's JSON database, and back.

MetaSchedule has no field for where a figure comes from, nor for a rule of ours: both are annotations of the root block,
``souffle.origin.*`` behind a trace's last step, ``souffle.rule`` and ``souffle.knob.*`` in place of its steps. So
MetaSchedule opens what is written here, replays the traces of its own sketches to their schedules, and those of our
rules to a stage that says which rule is to schedule it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import meta_schedule as ms

from souffle.errors import OptionError
from souffle.schedule.log import (
    FAILED_SECONDS,
    LogProblem,
    Record,
    RecordOrigin,
    TuningLog,
    brief,
    read_lines,
    signature_of,
    workload_module,
)
from souffle.schedule.log_folders import METASCHEDULE_FILES
from souffle.schedule.lower import cuda_target
from souffle.schedule.recipe import NATIVE_RULE, Recipe
from souffle.schedule.record import DAMAGED
from souffle.tuning.store import LogWriter, NewRecord
from souffle.tvm_compat import TVM_PIN

__all__ = ["Imported", "export_log", "import_log", "recipe_of_trace"]

_RULE, _KNOB, _ORIGIN = "souffle.rule", "souffle.knob.", "souffle.origin."
_ROOT = ["root", "main"]
_WORKLOAD_JSON = tvm.get_global_func("s_tir.meta_schedule.WorkloadAsJSON")
_DECODE = tvm.get_global_func("s_tir.meta_schedule.WorkloadFromJSON")


def export_log(log: TuningLog, folder: Path) -> int:
    """Write MetaSchedule's database of a log; its folder for one architecture is replaced.

    Parameters
    ----------
    log : TuningLog
        What of it cannot be decoded is left out, and named by it.
    folder : Path
        For the two files.

    Returns
    -------
    int
        How many records there are.
    """
    target = json.loads(json.dumps(dict(cuda_target(log.arch).export()), default=_plain))
    workloads, records = [], []
    for digest, workload in log.table.workloads.items():
        func = log.table.decoded(workload)
        if func is None:
            continue
        parameters = [["TENSOR", dtype, list(shape)] for shape, dtype in signature_of(func)]
        for record in log.of_workload(digest):
            seconds = list(record.figures) or [FAILED_SECONDS]
            records.append([len(workloads), [_trace(record), seconds, target, parameters]])
        workloads.append([str(part) for part in _WORKLOAD_JSON(ms.database.Workload(workload_module(func)))])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in zip(METASCHEDULE_FILES, (workloads, records), strict=True):
            lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in table)
            (folder / name).write_text("".join(lines))
    except OSError as error:
        reason = error.strerror or error
        raise OptionError(f"MetaSchedule's database cannot be written to {folder}: {reason}") from error
    return len(records)


def _plain(value: Any) -> Any:
    """What TVM's targets hold, as JSON."""
    if isinstance(value, (tirx.IntImm, tirx.FloatImm)):
        return value.value
    return dict(value.items()) if hasattr(value, "items") else list(value)


def _trace(record: Record) -> list[Any]:
    """A record as MetaSchedule's trace, annotated."""
    recipe = record.recipe
    steps, decisions = (list(part) for part in recipe.trace or ([], []))
    names = {name for step in steps for name in step[3]}
    roots = (f"b{number}" for number in range(len(names) + 2) if f"b{number}" not in names)
    if recipe.trace is None:
        root = next(roots)
        steps.append(["GetSBlock", [], _ROOT, [root]])
        steps += [_annotation(root, _KNOB + name, value) for name, value in recipe.knobs.items()]
        steps.append(_annotation(root, _RULE, recipe.rule))
    if not any(step[0] == "EnterPostproc" for step in steps):
        steps.append(["EnterPostproc", [], [], []])
    root = next(roots)
    steps.append(["GetSBlock", [], _ROOT, [root]])
    steps += [_annotation(root, _ORIGIN + name, value) for name, value in vars(record.origin).items()]
    return [steps, decisions]


def _annotation(block: str, key: str, value: Any) -> list[Any]:
    # Text is quoted once more: names without quotes are variables of the trace.
    return ["Annotate", [block, json.dumps(value) if isinstance(value, str) else value], [key], []]


def recipe_of_trace(trace: Sequence[Any]) -> tuple[Recipe, dict[str, Any]]:
    """What a trace of MetaSchedule's says: the recipe, and the fields of its origin, if it says some.

    Raises
    ------
    ValueError, TypeError, LookupError
        If it is no trace.
    """
    steps, decisions = [list(step) for step in trace[0]], {int(step): decision for step, decision in trace[1]}
    drawn = {step[3][0]: step[2][0][decisions[n]] for n, step in enumerate(steps) if step[0] == "SampleCategorical"}
    notes: dict[str, Any] = {}
    kept = []
    for number, (kind, inputs, attributes, _) in enumerate(steps):
        key = str(attributes[0]) if kind == "Annotate" else ""
        if key.startswith("souffle."):
            value = inputs[1]
            is_text = isinstance(value, str) and value.startswith('"')
            notes[key] = json.loads(value) if is_text else drawn.get(value, value)
        else:
            kept.append(number)
    origin = {key.removeprefix(_ORIGIN): value for key, value in notes.items() if key.startswith(_ORIGIN)}
    if _RULE in notes:
        knobs = {key.removeprefix(_KNOB): int(value) for key, value in notes.items() if key.startswith(_KNOB)}
        return Recipe(str(notes[_RULE]), knobs), origin
    while kept and steps[kept[-1]][0] == "GetSBlock":
        kept.pop()  # the root, for the annotations that are left out
    place = {number: index for index, number in enumerate(kept)}
    own = [[place[number], decision] for number, decision in sorted(decisions.items()) if number in place]
    return Recipe(NATIVE_RULE, {}, [[steps[number] for number in kept], own]), origin


@dataclass
class Imported:
    """What came of a database.

    Attributes
    ----------
    records : dict of str to int
        How many of each architecture.
    problems : list of LogProblem
        What was skipped.
    """

    records: dict[str, int] = field(default_factory=dict)
    problems: list[LogProblem] = field(default_factory=list)


def import_log(database: Path, target: Path, device: str = "") -> Imported:
    """Add MetaSchedule's database to a log.

    Parameters
    ----------
    database : Path
        A folder with its two files, as one architecture of an older log is, or with such folders.
    target : Path
        The log.
    device : str
        On what records were measured that do not say it, as MetaSchedule's own searches write them. Without it they
        are skipped.

    Raises
    ------
    OptionError
        If there is no such database, or the log cannot be written.
    """
    folders = [folder for folder in (database, *sorted(database.glob("*/"))) if _is_database(folder)]
    if not folders:
        names = " and ".join(METASCHEDULE_FILES)
        raise OptionError(f"{database} holds no database of MetaSchedule's, which is two files: {names}")
    done = Imported()
    writers: dict[str, LogWriter] = {}
    for folder in folders:
        for arch, func, records in _read_database(folder, device, done.problems):
            if arch not in writers:
                writers[arch] = LogWriter(target, arch, cuda_target(arch))
            writers[arch].append(func, records)
            done.records[arch] = done.records.get(arch, 0) + len(records)
    for writer in writers.values():
        writer.sort()
    return done


def _is_database(folder: Path) -> bool:
    return all((folder / name).is_file() for name in METASCHEDULE_FILES)


def _read_database(
    folder: Path, device: str, problems: list[LogProblem]
) -> Iterator[tuple[str, tirx.PrimFunc, list[NewRecord]]]:
    """The records of each workload, for each architecture."""

    def problem(where: str, reason: str) -> None:
        problems.append(LogProblem(where, reason))

    workloads = read_lines(folder / METASCHEDULE_FILES[0], problem)
    found: dict[tuple[int, str], list[NewRecord]] = {}
    for where, line in read_lines(folder / METASCHEDULE_FILES[1], problem):
        try:
            number, (trace, seconds, described, _) = json.loads(line)
            if not 0 <= number < len(workloads):
                raise ValueError(f"there is no workload {number}")
            record = _new_record(trace, seconds, device)
            found.setdefault((number, str(described["arch"])), []).append(record)
        except DAMAGED as error:
            problem(where, brief(error))
    for (number, arch), records in found.items():
        where, line = workloads[number]
        try:
            digest, text = json.loads(line)
            yield arch, _DECODE([digest, text]).mod["main"], records
        except DAMAGED as error:
            problem(where, brief(error))


def _new_record(trace: Sequence[Any], seconds: Sequence[float], device: str) -> NewRecord:
    recipe, said = recipe_of_trace(trace)
    if not said:
        if not device:
            raise ValueError("it does not say on what it was measured, and no device was named")
        said = {"figure": "measured", "device": device, "tvm": TVM_PIN, "souffle": "", "date": ""}
    figures = [float(figure) for figure in seconds]
    if any(not figure > 0 for figure in figures):
        raise ValueError(f"{figures} are no seconds")
    failed = any(figure >= FAILED_SECONDS for figure in figures)
    return NewRecord(recipe, () if failed else figures, RecordOrigin.of_data(said))
