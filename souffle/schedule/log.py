"""Tuning logs: schedules found by an earlier search, read back tolerantly (the search itself is ``souffle.tuning``).

A log is a folder with one folder for each architecture, and in it files of lines of JSON that are only appended to:
``workloads.jsonl``, stages before they are scheduled, ``records.jsonl``, candidates of them, each with its recipe, its
seconds and where these come from, ``tried.jsonl``, which candidates have no record any more, and
``arrangements.jsonl``, what stages take beside each other (:mod:`souffle.schedule.arrangement`). Equal workloads are
found by structure, so one log serves every network with the same TE. ``souffle log export`` makes MetaSchedule's
database of a log.

A damaged line is named and skipped. No stage and no trace is decoded before a stage with the same parameters asks.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path

import tvm_ffi
from tvm import tirx

from souffle.schedule.arrangement import Arrangement, arrangement_of
from souffle.schedule.log_folders import (
    ARRANGEMENTS,
    LOG_VARIABLE,
    METASCHEDULE_FILES,
    RECORDS,
    TRIED,
    WORKLOADS,
    log_folders,
    shipped_log,
)
from souffle.schedule.near import distance, outline, structure_of
from souffle.schedule.record import (
    DAMAGED,
    FAILED_SECONDS,
    Record,
    RecordOrigin,
    Workload,
    named_workload,
    record_of,
    signature_of,
    workload_digest,
    workload_module,
    workload_of,
)
from souffle.schedule.tried import Tried, tried_of, united

__all__ = [
    "ARRANGEMENTS",
    "FAILED_SECONDS",
    "LOG_VARIABLE",
    "RECORDS",
    "TRIED",
    "WORKLOADS",
    "LogProblem",
    "Record",
    "RecordOrigin",
    "TuningLog",
    "Workload",
    "WorkloadTable",
    "brief",
    "log_folders",
    "open_log",
    "read_lines",
    "shipped_log",
    "signature_of",
    "workload_module",
]

_LOGGER = logging.getLogger("souffle.tuning")


@dataclass(frozen=True)
class LogProblem:
    """A part of a log that was skipped, or not taken for what it says."""

    where: str
    reason: str


class WorkloadTable:
    """The stages of one folder.

    Parameters
    ----------
    folder : Path
        With the file, or without.
    problem : callable
        Is told where a part is skipped, and why.
    """

    def __init__(self, folder: Path, problem: Callable[[str, str], None]) -> None:
        self._path = folder / WORKLOADS
        self._problem = problem
        self._structures: dict[str, tuple | None] = {}

    @cached_property
    def workloads(self) -> dict[str, Workload]:
        """By their digest, in the order of the file; which of them can be decoded is not known yet."""
        found: dict[str, Workload] = {}
        for where, line in read_lines(self._path, self._problem):
            try:
                workload = workload_of(where, line)
            except DAMAGED as error:
                self._problem(where, brief(error))
            else:
                if not found.get(workload.digest, workload).name:
                    found[workload.digest] = workload
                found.setdefault(workload.digest, workload)
        return found

    def digests(self, func: tirx.PrimFunc) -> list[str]:
        """Of the workloads that are this stage: one, unless versions of TVM see different digests in it."""
        alike = self._by_signature.get(signature_of(func), ())
        return [workload.digest for workload in alike if self.is_stage(workload, func)]

    def is_stage(self, workload: Workload, func: tirx.PrimFunc) -> bool:
        """Whether a workload is of the structure of a stage; one that cannot be decoded is of none."""
        known = self.decoded(workload)
        return known is not None and bool(tvm_ffi.structural_equal(known, named_workload(func)))

    def decoded(self, workload: Workload) -> tirx.PrimFunc | None:
        """The function of a workload, if it is not damaged."""
        try:
            return workload.func
        except DAMAGED as error:
            self._problem(workload.where, brief(error))
            return None

    def near(self, func: tirx.PrimFunc) -> list[Workload]:
        """Stages of the same structure but other extents, the nearest first (:mod:`souffle.schedule.near`)."""
        signature = signature_of(func)
        alike = self._by_outline.get(outline(signature), ())
        wanted = structure_of(func) if alike else ()
        found = [
            (distance(signature, workload.signature), workload.digest, workload)
            for workload in alike
            if self._structure(workload) == wanted and not self.is_stage(workload, func)
        ]
        return [workload for *_, workload in sorted(found)]

    def _structure(self, workload: Workload) -> tuple | None:
        if workload.digest not in self._structures:
            known = self.decoded(workload)
            self._structures[workload.digest] = None if known is None else structure_of(known)
        return self._structures[workload.digest]

    @cached_property
    def _by_outline(self) -> dict[tuple, list[Workload]]:
        table: dict[tuple, list[Workload]] = {}
        for workload in self.workloads.values():
            table.setdefault(outline(workload.signature), []).append(workload)
        return table

    @cached_property
    def _by_signature(self) -> dict[tuple, list[Workload]]:
        table: dict[tuple, list[Workload]] = {}
        for workload in self.workloads.values():
            table.setdefault(workload.signature, []).append(workload)
        return table


def read_lines(path: Path, problem: Callable[[str, str], None]) -> list[tuple[str, str]]:
    """The lines of a file that is there, with where they are; a byte that is no text is replaced."""
    if not path.is_file():
        return []
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError as error:
        problem(str(path), str(error))
        return []
    # Only this byte ends a line: text may hold what else Python takes for an end.
    return [(f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def brief(error: Exception) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200]}" if lines else type(error).__name__


class TuningLog:
    """The records of one folder, for one architecture.

    Parameters
    ----------
    folder : Path
        With the two files; empty or missing is an empty log.
    arch : str
        Such as ``"sm_90"``; records for another are skipped.
    """

    def __init__(self, folder: Path, arch: str) -> None:
        self.folder = folder
        self.arch = arch
        self.problems: list[LogProblem] = []
        self._orders: dict[tuple[str, str], list[Record]] = {}

    @property
    def name(self) -> str:
        """For people; the one that ships is the same wherever it is installed."""
        return f"shipped, {self.arch}" if self.folder.parent == shipped_log() else str(self.folder)

    def problem(self, where: str, reason: str) -> None:
        """Note that something was skipped, and why; once."""
        if self._noted(where, reason):
            _LOGGER.warning("%s is skipped: %s", where, reason)

    def remark(self, where: str, reason: str) -> None:
        """Note that something was not taken for what it says, and why; once."""
        if self._noted(where, reason):
            _LOGGER.info("%s: %s", where, reason)

    def _noted(self, where: str, reason: str) -> bool:
        found = LogProblem(where, reason)
        new = found not in self.problems
        if new:
            self.problems.append(found)
        return new

    @cached_property
    def _record_lines(self) -> list[tuple[str, str]]:
        """Read before the workloads, behind which they are written: a search that writes meanwhile changes nothing."""
        path = self.folder / RECORDS
        if not path.is_file() and (self.folder / METASCHEDULE_FILES[1]).is_file():
            self.problem(str(self.folder), "it holds MetaSchedule's database; souffle log import makes a log of it")
        return read_lines(path, self.problem)

    @cached_property
    def table(self) -> WorkloadTable:
        """The stages that there are records of."""
        _ = self._record_lines
        return WorkloadTable(self.folder, self.problem)

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """All that can be read, in the order of the file."""
        found = []
        for where, line in self._record_lines:
            try:
                record = record_of(where, json.loads(line), self.arch)
                if record.workload not in self.table.workloads:
                    raise ValueError(f"there is no workload {record.workload}")
                found.append(record)
            except DAMAGED as error:
                self.problem(where, brief(error))
        return tuple(found)

    @cached_property
    def tried(self) -> tuple[Tried, ...]:
        """What has no record any more, one of each stage, kind of figure and device."""
        found = []
        for where, line in read_lines(self.folder / TRIED, self.problem):
            try:
                found.append(tried_of(json.loads(line), self.arch))
            except DAMAGED as error:
                self.problem(where, brief(error))
        return tuple(united(found))

    @cached_property
    def arrangements(self) -> tuple[Arrangement, ...]:
        """All that can be read, in the order of the file."""
        found = []
        for where, line in read_lines(self.folder / ARRANGEMENTS, self.problem):
            try:
                found.append(arrangement_of(where, json.loads(line), self.arch))
            except DAMAGED as error:
                self.problem(where, brief(error))
        return tuple(found)

    def marks_of(self, func: tirx.PrimFunc, figure: str, device: str) -> frozenset[bytes]:
        """The marks of recipes of a stage that were tried and have no record any more."""
        if not self.tried:
            return frozenset()
        places = {(digest, figure, device) for digest in (workload_digest(func), *self.table.digests(func))}
        return frozenset().union(*(one.marks for one in self.tried if one.place in places))

    def of(self, func: tirx.PrimFunc) -> list[Record]:
        """The records of a stage of this structure, in the order of the file."""
        return [record for digest in self.table.digests(func) for record in self.of_workload(digest)]

    def of_workload(self, digest: str) -> list[Record]:
        """The records of a workload whose recipes can be decoded, in the order of the file."""
        return [record for record in self._by_workload.get(digest, ()) if self._decodes(record)]

    def _decodes(self, record: Record) -> bool:
        try:
            return record.recipe is not None
        except DAMAGED as error:
            self.problem(record.where, brief(error))
            return False

    def near(self, func: tirx.PrimFunc, count: int, product: str = "") -> list[Record]:
        """Useful records of stages that are as this one but for their extents.

        Parameters
        ----------
        func : PrimFunc
            The stage before it is scheduled.
        count : int
            How many at most.
        product : str
            The GPU that schedules are for; see :meth:`Record.rank`.

        Returns
        -------
        list of Record
            The best of each stage, the nearest stage first, then the second best of each.
        """
        ranked = [self._ranked(workload.digest, product) for workload in self.table.near(func)]
        rounds = (record for records in zip_longest(*ranked) for record in records if record is not None)
        return list(islice((record for record in rounds if self._decodes(record)), count))

    def _ranked(self, digest: str, product: str) -> list[Record]:
        """A workload's useful records, the best first."""
        if (digest, product) not in self._orders:
            useful = [record for record in self._by_workload.get(digest, ()) if record.useful]
            self._orders[digest, product] = sorted(useful, key=lambda record: record.rank(product))
        return self._orders[digest, product]

    @cached_property
    def _by_workload(self) -> dict[str, list[Record]]:
        table: dict[str, list[Record]] = {}
        for record in self.records:
            table.setdefault(record.workload, []).append(record)
        return table


def open_log(option: str | os.PathLike | None, arch: str) -> tuple[TuningLog, ...]:
    """The logs that the option ``tuning_log`` means, for one architecture; see :func:`log_folders`."""
    folders: Iterable[Path] = (folder / arch for folder in log_folders(option))
    return tuple(TuningLog(folder, arch) for folder in folders if folder.is_dir())
