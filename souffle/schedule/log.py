"""Tuning logs: schedules found by an earlier search, read back tolerantly (the search itself is ``souffle.tuning``).

A log is a folder with one folder for each architecture, and in it MetaSchedule's own JSON database: a table of
workloads (TensorIR before it is scheduled) and a table of records (a trace of scheduling steps and the seconds that it
takes). What MetaSchedule has no field for is in the trace, as annotations of the root block behind its last step: see
:class:`RecordOrigin`. Equal workloads are found by structure, so one log serves every network with the same TE.

MetaSchedule refuses a file with one damaged line; here such a line is named and skipped. Nothing is decoded before a
stage with the same parameters asks for it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from souffle.schedule.log_folders import LOG_VARIABLE, RECORDS, WORKLOADS, log_folders, shipped_log
from souffle.tvm_compat import const_int

__all__ = [
    "FAILED_SECONDS",
    "KNOB",
    "LOG_VARIABLE",
    "RECORDS",
    "RULE",
    "WORKLOADS",
    "LogProblem",
    "Record",
    "RecordOrigin",
    "TuningLog",
    "log_folders",
    "open_log",
    "shipped_log",
    "signature_of",
    "workload_module",
]

RULE, KNOB = "souffle.rule", "souffle.knob."
"""Annotations that say which of our rules makes the schedule, and with which value of each knob."""

FAILED_SECONDS = 1e10
"""What MetaSchedule writes for a candidate that could not be built or gave wrong results."""

_FIELD = "souffle.origin."
_ROUNDING = 1e-6
"""Of a float in an annotation, which TVM keeps in fp32."""
_DECODE = tvm.get_global_func("s_tir.meta_schedule.WorkloadFromJSON")
_LOGGER = logging.getLogger("souffle.tuning")
_PARSING = (ValueError, TypeError, RuntimeError, AttributeError, LookupError)
"""What damaged input raises in TVM and in Python's own readers."""


@dataclass(frozen=True)
class RecordOrigin:
    """Where the figure of a record comes from.

    Attributes
    ----------
    figure : str
        ``"measured"`` or ``"predicted"``.
    device : str
        The GPU that it was measured on, as the driver names it, or the product whose cost model predicted it.
    tvm, souffle, date : str
        Versions, and the day as ``YYYY-MM-DD``.
    spill_bytes : int
        Stores of spilled registers, as ptxas reports them.
    own_seconds : float
        Of the schedule that the rules chose by themselves then, by the same figure; 0 where that is not known.
    registers, shared_bytes : int
        Of a thread and of a block, as compiled alone; 0 registers where no compiler was asked.
    """

    figure: str
    device: str
    tvm: str
    souffle: str
    date: str
    spill_bytes: int = 0
    own_seconds: float = 0.0
    registers: int = 0
    shared_bytes: int = 0

    def annotate(self, sch: s_tir.Schedule) -> None:
        """Write it on the root block, behind the trace's last step (MetaSchedule replays it or leaves it out)."""
        root = sch.get_sblock("root")
        for name, value in vars(self).items():
            sch.annotate(root, _FIELD + name, value)

    @classmethod
    def of_trace(cls, trace: Sequence[Any]) -> RecordOrigin:
        """Read from a trace as JSON.

        Raises
        ------
        ValueError
            If it says nothing of that kind.
        """
        fields: dict[str, Any] = {}
        for step in trace[0]:
            key = step[2][0] if step[0] == "Annotate" else ""
            if key.startswith(_FIELD):
                fields[key.removeprefix(_FIELD)] = _plain(step[1][1])
        if not fields:
            raise ValueError("it does not say whether it was measured or predicted, nor on what")
        origin = cls(**fields)
        if origin.figure not in ("measured", "predicted"):
            raise ValueError(f"its figure is {origin.figure!r}, neither measured nor predicted")
        return origin


def _plain(value: Any) -> Any:
    """A constant of a trace as JSON: text is quoted once more there, since unquoted names are variables."""
    return json.loads(value) if isinstance(value, str) and value.startswith('"') else value


@dataclass(frozen=True)
class LogProblem:
    """A part of a log that was skipped."""

    where: str
    reason: str


@dataclass(frozen=True, eq=False)
class Record:
    """One schedule of one workload, not replayed yet.

    Attributes
    ----------
    where : str
        File and line.
    workload : int
        Line of the workload in its table, from 0.
    seconds : float
        The mean of its figures.
    origin : RecordOrigin
    trace : list
        MetaSchedule's trace as JSON.
    signature : tuple
        Shape and dtype of each parameter.
    """

    where: str
    workload: int
    seconds: float
    origin: RecordOrigin
    trace: list
    signature: tuple

    @property
    def failed(self) -> bool:
        """Whether it says only that this schedule cannot be used."""
        return self.seconds >= FAILED_SECONDS

    @property
    def useful(self) -> bool:
        """Whether it is as good as what the rules chose when it was found: a search writes down what is worse, too."""
        own = self.origin.own_seconds
        return not self.failed and (own <= 0 or self.seconds <= own * (1 + _ROUNDING))

    @property
    def summary(self) -> str:
        """Such as ``measured 12.3 µs on NVIDIA H200``."""
        verb = "measured" if self.origin.figure == "measured" else "predicted"
        where = f"on {self.origin.device}" if verb == "measured" else f"with the cost model of {self.origin.device}"
        return f"{verb} {self.seconds * 1e6:.1f} µs {where}"

    def rank(self, product: str) -> tuple:
        """Smaller is better: measured before predicted, on this product before another, no spills, less time."""
        measured = self.origin.figure == "measured"
        spills = not measured and self.origin.spill_bytes > 0
        words = self.origin.device.replace("-", " ").split()
        return (not measured, product not in words, spills, self.seconds)


def workload_module(func: tirx.PrimFunc) -> tvm.IRModule:
    """A stage as MetaSchedule's workload: named alike whatever network it is of, and a copy of its own.

    Replaying a trace changes statements of the function in place that others share, so MetaSchedule too copies first.
    """
    return tvm.ir.load_json(tvm.ir.save_json(tvm.IRModule({"main": _named(func)})))


def _named(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return func.with_attr("global_symbol", "main")


def signature_of(func: tirx.PrimFunc) -> tuple:
    """Shape and dtype of each parameter, as in a record's ``args_info``."""
    return tuple((tuple(const_int(extent) for extent in p.shape), str(p.dtype)) for p in func.params)


class TuningLog:
    """The records of one folder, for one architecture.

    Parameters
    ----------
    folder : Path
        With MetaSchedule's two files; empty or missing is an empty log.
    arch : str
        Such as ``"sm_90"``; records for another are skipped.
    """

    def __init__(self, folder: Path, arch: str) -> None:
        self.folder = folder
        self.arch = arch
        self.problems: list[LogProblem] = []
        self._modules: dict[int, tirx.PrimFunc | None] = {}

    @property
    def name(self) -> str:
        """For people; the one that ships is the same wherever it is installed."""
        return f"shipped, {self.arch}" if self.folder.parent == shipped_log() else str(self.folder)

    def problem(self, where: str, reason: str) -> None:
        """Note that something was skipped, and why; once."""
        found = LogProblem(where, reason)
        if found not in self.problems:
            self.problems.append(found)
            _LOGGER.warning("%s is skipped: %s", where, reason)

    @cached_property
    def workload_lines(self) -> list[str]:
        """The table of workloads, not decoded."""
        return self._lines(WORKLOADS)

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """All that can be read, in the order of the file."""
        found = []
        for number, line in enumerate(self._lines(RECORDS), 1):
            where = f"{self.folder / RECORDS}:{number}"
            try:
                found.append(self._record(where, line))
            except _PARSING as error:
                self.problem(where, _brief(error))
        return tuple(found)

    def of(self, func: tirx.PrimFunc) -> list[Record]:
        """The records of a stage of this structure, in the order of the file."""
        wanted = self._by_signature.get(signature_of(func), ())
        mine = {number for number in {record.workload for record in wanted} if self._is(number, func)}
        return [record for record in wanted if record.workload in mine]

    def workload_number(self, func: tirx.PrimFunc) -> int | None:
        """The line of a stage in the table of workloads, from 0."""
        numbers = (number for number in range(len(self.workload_lines)) if self._is(number, func))
        return next(numbers, None)

    @cached_property
    def _by_signature(self) -> dict[tuple, list[Record]]:
        table: dict[tuple, list[Record]] = {}
        for record in self.records:
            table.setdefault(record.signature, []).append(record)
        return table

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        if not path.is_file():
            return []
        try:
            return path.read_bytes().decode(errors="replace").splitlines()
        except OSError as error:
            self.problem(str(path), str(error))
            return []

    def _record(self, where: str, line: str) -> Record:
        number, (trace, seconds, target, parameters) = json.loads(line)
        if target.get("arch") != self.arch:
            raise ValueError(f"it is for {target.get('arch')}, not for {self.arch}")
        if not 0 <= number < len(self.workload_lines):
            raise ValueError(f"there is no workload {number}")
        figures = [float(one) for one in seconds]
        mean = sum(figures) / len(figures)
        if not mean > 0:
            raise ValueError(f"{mean} is no time")
        signature = tuple((tuple(int(extent) for extent in shape), dtype) for _, dtype, shape in parameters)
        return Record(where, number, mean, RecordOrigin.of_trace(trace), trace, signature)

    def _is(self, number: int, func: tirx.PrimFunc) -> bool:
        if number not in self._modules:
            where = f"{self.folder / WORKLOADS}:{number + 1}"
            try:
                digest, text = json.loads(self.workload_lines[number])
                self._modules[number] = _DECODE([digest, text]).mod["main"]
            except _PARSING as error:
                self._modules[number] = None
                self.problem(where, _brief(error))
        known = self._modules[number]
        return known is not None and bool(tvm_ffi.structural_equal(known, _named(func)))


def _brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200]}" if lines else type(error).__name__


def open_log(option: str | os.PathLike | None, arch: str) -> tuple[TuningLog, ...]:
    """The logs that the option ``tuning_log`` means, for one architecture; see :func:`log_folders`."""
    folders: Iterable[Path] = (folder / arch for folder in log_folders(option))
    return tuple(TuningLog(folder, arch) for folder in folders if folder.is_dir())
