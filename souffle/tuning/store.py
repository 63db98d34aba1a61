"""Writes records: MetaSchedule's JSON database, one line for each candidate as soon as it is known."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace

import souffle
from souffle.schedule.log import FAILED_SECONDS, RECORDS, WORKLOADS, RecordOrigin, TuningLog, workload_module
from souffle.tuning.space import plain
from souffle.tvm_compat import TVM_PIN

__all__ = ["LogWriter", "origin_now"]

_WORKLOAD_JSON = tvm.get_global_func("s_tir.meta_schedule.WorkloadAsJSON")
_RECORD_JSON = tvm.get_global_func("s_tir.meta_schedule.TuningRecordAsJSON")


def origin_now(figure: str, device: str, own_seconds: float = 0.0, **used: int) -> RecordOrigin:
    """Where a figure comes from that is found now, by this version; `used` are what the schedule takes."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return RecordOrigin(figure, device, TVM_PIN, souffle.__version__, today, own_seconds=own_seconds, **used)


class LogWriter:
    """Appends to the log of one architecture.

    A line is written in one piece, so that an interrupted search leaves whole lines. One that a crash cut off gets its
    end before the next is written; it is named and skipped when the log is read.

    Parameters
    ----------
    folder : Path
        Of the logs; the architecture's own is inside.
    arch : str
    target : Target
    """

    def __init__(self, folder: Path, arch: str, target: tvm.target.Target) -> None:
        self.folder = folder / arch
        self.arch = arch
        self.target = target
        self.folder.mkdir(parents=True, exist_ok=True)
        self._workloads: dict[int, tuple[tirx.PrimFunc, ms.database.Workload, int]] = {}

    def read(self) -> TuningLog:
        """What the log holds now."""
        return TuningLog(self.folder, self.arch)

    def add(self, func: tirx.PrimFunc, trace: Trace, seconds: Sequence[float], origin: RecordOrigin) -> None:
        """Append one record.

        Parameters
        ----------
        func : PrimFunc
            The stage before it is scheduled.
        trace : Trace
        seconds : sequence of float
            Empty for a candidate that cannot be used.
        origin : RecordOrigin
        """
        workload, number = self._workload(func)
        sch = s_tir.Schedule(workload.mod, debug_mask="none", error_render_level="none")
        trace.apply_to_schedule(sch, remove_postproc=False)
        if not any(step.kind.name == "EnterPostproc" for step in trace.insts):
            sch.enter_postproc()
        origin.annotate(sch)
        record = ms.database.TuningRecord(
            sch.trace,
            workload,
            list(seconds) or [FAILED_SECONDS],
            self.target,
            ms.arg_info.ArgInfo.from_prim_func(workload.mod["main"]),
        )
        self._append(RECORDS, [number, plain(_RECORD_JSON(record))])

    def _workload(self, func: tirx.PrimFunc) -> tuple[ms.database.Workload, int]:
        key = id(func)
        if key not in self._workloads:
            workload = ms.database.Workload(workload_module(func))
            log = self.read()
            number = log.workload_number(func)
            if number is None:
                number = len(log.workload_lines)
                self._append(WORKLOADS, plain(_WORKLOAD_JSON(workload)))
            self._workloads[key] = (func, workload, number)
        return self._workloads[key][1:]

    def _append(self, name: str, value: Any) -> None:
        path = self.folder / name
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        whole = True
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                whole = file.read(1) == b"\n"
        with path.open("ab", buffering=0) as file:
            file.write(line if whole else b"\n" + line)
