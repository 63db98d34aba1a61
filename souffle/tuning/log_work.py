"""What people do with tuning logs: put several together, look at one, shorten it, and try what it still gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from souffle.decision import Refused
from souffle.errors import OptionError
from souffle.schedule.follow import followed
from souffle.schedule.gpu.device import SHARING, device_for
from souffle.schedule.gpu.scheduler import THREADS, gpu_request
from souffle.schedule.log import ARRANGEMENTS, RECORDS, Record, TuningLog, Workload
from souffle.schedule.lower import LoweringError, cuda_target, lower_stage, text_of
from souffle.tuning.store import LogWriter, NewRecord, marks_of_records

__all__ = ["StageRow", "Verdict", "best_records", "logs_in", "merge", "prune", "stage_name", "stage_rows", "verdicts"]

_FOUND_BY = (RECORDS, ARRANGEMENTS)
"""The files by which a folder is known for a log."""

Outcome = Literal["same", "unsaid", "another", "unfit"]
"""What a record's recipe gives now: the text of its figure, a text that may be it, another text, or no schedule."""


def logs_in(folder: Path) -> list[TuningLog]:
    """The logs of a folder, one for each architecture; or the one of an architecture's own folder.

    Raises
    ------
    OptionError
        If there is none.
    """
    if any((folder / name).is_file() for name in _FOUND_BY):
        return [TuningLog(folder, folder.resolve().name)]
    folders = sorted({path.parent for name in _FOUND_BY for path in folder.glob(f"*/{name}")})
    found = [TuningLog(path, path.name) for path in folders]
    if not found:
        raise OptionError(
            f"there is no tuning log in {folder}: no file {' or '.join(_FOUND_BY)} in it or in a folder of an "
            f"architecture; "
            f"souffle tune MODEL --log {folder} makes one, souffle log import one of MetaSchedule's database"
        )
    return found


def merge(sources: Sequence[TuningLog], target: Path) -> list[TuningLog]:
    """Put the records of several logs into one, equal ones once; what the target holds already stays.

    Returns
    -------
    list of TuningLog
        The target's, one for each architecture that was added to.
    """
    writers: dict[str, LogWriter] = {}
    for log in sources:
        writer = writers.setdefault(log.arch, LogWriter(target, log.arch, cuda_target(log.arch)))
        _copy(log, writer, log.of_workload)
        writer.append_tried(log.tried)
        writer.append_arrangements(log.arrangements)
    for writer in writers.values():
        writer.sort()
    return [writer.read() for writer in writers.values()]


def _copy(log: TuningLog, writer: LogWriter, chosen: Callable[[str], Sequence[Record]]) -> None:
    for digest, workload in log.table.workloads.items():
        func = log.table.decoded(workload)
        if func is not None:
            records = [NewRecord(record.recipe, record.figures, record.origin) for record in chosen(digest)]
            writer.append(func, records, workload.name)


def best_records(log: TuningLog, digest: str, keep: int) -> list[Record]:
    """The best of one workload's records: useful ones that leave other stages of a kernel room."""
    device = device_for(log.arch)

    def fits(record: Record) -> bool:
        origin = record.origin
        room = device.resident_blocks(THREADS, origin.shared_bytes, max(origin.registers, 1))
        return min(room.values()) >= SHARING

    useful = [record for record in log.of_workload(digest) if record.useful and fits(record)]
    return sorted(useful, key=lambda record: record.rank(device.name))[:keep]


def prune(log: TuningLog, keep: int, target: Path | None = None) -> TuningLog:
    """Keep the best records of each workload, and no workload without one; of others, that they were tried.

    Arrangements stay, all of them: there are few.

    Parameters
    ----------
    log : TuningLog
    keep : int
        How many of each workload.
    target : Path, optional
        A log to write them to; without one they take the place of the log's own, and what is appended to it meanwhile
        is pruned with the rest.

    Returns
    -------
    TuningLog
        What there is then.
    """
    if keep < 1:
        raise OptionError(f"keep={keep}: at least one record of each stage is kept")
    if target is None:
        writer = LogWriter(log.folder.parent, log.folder.name, cuda_target(log.arch))
        writer.reduce(lambda now: [one for digest in now.table.workloads for one in best_records(now, digest, keep)])
    else:
        writer = LogWriter(target, log.arch, cuda_target(log.arch))
        kept = {digest: best_records(log, digest, keep) for digest in log.table.workloads}
        _copy(log, writer, lambda digest: kept[digest])
        places = {record.where for records in kept.values() for record in records}
        left = marks_of_records(record for record in log.records if record.where not in places)
        writer.append_tried([*log.tried, *left])
        writer.append_arrangements(log.arrangements)
        writer.sort()
    return writer.read()


def stage_name(workload: Workload) -> str:
    """What people call a workload."""
    return workload.name or f"stage {workload.digest}"


@dataclass(frozen=True)
class Verdict:
    """What a record's recipe gives now.

    Attributes
    ----------
    where : str
        File and line.
    stage : str
        Its name, or its digest where it has none (:func:`stage_name`).
    recipe, figure : str
        In words.
    outcome : {"same", "unsaid", "another", "unfit"}
    reason : str
        Why there is no schedule.
    """

    where: str
    stage: str
    recipe: str
    figure: str
    outcome: Outcome
    reason: str = ""


def verdicts(log: TuningLog, progress: Callable[[str], None] = lambda message: None) -> Iterator[Verdict]:
    """Follow the recipe of each record that can be used, and look at what comes of it."""
    for number, (digest, workload) in enumerate(log.table.workloads.items(), 1):
        progress(f"{log.arch}: stage {number}/{len(log.table.workloads)}")
        for record in log.of_workload(digest):
            if not record.failed and log.table.decoded(workload) is not None:
                yield _verdict(log, workload, record)


def _verdict(log: TuningLog, workload: Workload, record: Record) -> Verdict:
    outcome, reason = _outcome(log, workload, record)
    return Verdict(record.where, stage_name(workload), record.recipe.summary, record.summary, outcome, reason)


def _outcome(log: TuningLog, workload: Workload, record: Record) -> tuple[Outcome, str]:
    func = workload.func.with_attr("global_symbol", "stage")
    schedule = followed(record.recipe, func, gpu_request(device_for(log.arch)))
    if isinstance(schedule, Refused):
        return "unfit", schedule.reason
    try:
        text = text_of(lower_stage("stage", schedule, cuda_target(log.arch)))
    except LoweringError as error:
        return "unfit", str(error)
    if not record.origin.text:
        return "unsaid", ""
    return ("same" if record.origin.text == text else "another"), ""


@dataclass(frozen=True)
class StageRow:
    """One workload of a log.

    Attributes
    ----------
    stage : str
        Its name, or its digest where it has none (:func:`stage_name`).
    parameters : str
        Shapes and dtypes, in words.
    records, failed, useful : int
        How many there are, how many cannot be used, and how many are as good as the rules' own choice.
    tried : int
        How many were tried, with those of which no record was kept.
    best : str
        Its recipe, or nothing.
    seconds : float or None
    figure, device, date : str
        Of the best.
    gain : float or None
        The rules' own choice takes so many times as long.
    outcome : str
        What the recipe gives now, where that was asked.
    """

    stage: str
    parameters: str
    records: int
    failed: int
    useful: int
    tried: int = 0
    best: str = ""
    seconds: float | None = None
    figure: str = ""
    device: str = ""
    date: str = ""
    gain: float | None = None
    outcome: str = ""


def stage_rows(log: TuningLog, *, replay: bool = False) -> Iterator[StageRow]:
    """The workloads of a log, in the order of the file, each with its best record."""
    product = device_for(log.arch).name
    for digest, workload in log.table.workloads.items():
        records = log.of_workload(digest)
        useful = sorted((one for one in records if one.useful), key=lambda one: one.rank(product))
        failed = sum(record.failed for record in records)
        left = sum(len(one.marks) for one in log.tried if one.workload == digest)
        tried = len(records) + left
        row = (stage_name(workload), _words(workload.signature), len(records), failed, len(useful), tried)
        if not useful:
            yield StageRow(*row)
            continue
        best = useful[0]
        origin, own = best.origin, best.origin.own_seconds
        gain = own / best.seconds if own > 0 else None
        outcome = _outcome(log, workload, best)[0] if replay and log.table.decoded(workload) is not None else ""
        said = (origin.figure, origin.device, origin.date)
        yield StageRow(*row, best.recipe.summary, best.seconds, *said, gain, outcome)


def _words(signature: tuple) -> str:
    """Such as ``float16[384,768] x2, float32[768]``."""
    words = []
    for (shape, dtype), several in groupby(signature):
        count = len(tuple(several))
        words.append(f"{dtype}[{','.join(map(str, shape))}]" + (f" x{count}" if count > 1 else ""))
    return ", ".join(words)
