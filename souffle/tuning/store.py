"""Writes tuning logs: lines that are appended as soon as a candidate is known, and a canonical order in the end."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

import souffle
from souffle.errors import OptionError
from souffle.schedule.arrangement import Arrangement, arrangement_line
from souffle.schedule.log import (
    ARRANGEMENTS,
    RECORDS,
    TRIED,
    WORKLOADS,
    Record,
    RecordOrigin,
    TuningLog,
    WorkloadTable,
    brief,
)
from souffle.schedule.recipe import Recipe
from souffle.schedule.record import DAMAGED, record_line, record_of, workload_digest, workload_line, workload_of
from souffle.schedule.tried import Tried, mark_of, tried_line, united
from souffle.tvm_compat import TVM_PIN
from souffle.whole_files import append_lines, replace_file

__all__ = ["LogWriter", "NewRecord", "marks_of_records", "origin_now"]

_LOCK = ".lock"

_LOGGER = logging.getLogger("souffle.tuning")


def origin_now(figure: str, device: str, own_seconds: float = 0.0, **known: Any) -> RecordOrigin:
    """Where a figure comes from that is found now, by this version; `known` are further fields of it."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return RecordOrigin(figure, device, TVM_PIN, souffle.__version__, today, own_seconds=own_seconds, **known)


@dataclass(frozen=True, eq=False)
class NewRecord:
    """A candidate to write down.

    Attributes
    ----------
    recipe : Recipe
    seconds : sequence of float
        With a cold and with a warm second-level cache; empty for a candidate that cannot be used.
    origin : RecordOrigin
    """

    recipe: Recipe
    seconds: Sequence[float]
    origin: RecordOrigin


class LogWriter:
    """Appends to the log of one architecture.

    What is guaranteed, whatever number of processes and threads writes to one folder, each with a writer of its own or
    not, and whenever one of them is killed:

    - A line is whole or it is the last one of a process that was killed, or of a disk that was full. Such a part gets
      its end before the next line, is named and skipped when the log is read, and is left out by :meth:`sort`.
    - What :meth:`append` returned from is in the file; after a power failure, as far as the system had written it.
    - A record's workload is in its table before the record is, and once.
    - :meth:`sort` loses no line that another process appends meanwhile, and whoever reads finds the old file or the
      new one. Equal sets of records give equal files.

    That takes locks of files that hold between all who write: on one machine always, on a network's file system where
    ``flock`` does.

    Parameters
    ----------
    folder : Path
        Of the logs; the architecture's own is inside.
    arch : str
    target : Target

    Raises
    ------
    OptionError
        If the folder cannot be made.
    """

    def __init__(self, folder: Path, arch: str, target: tvm.target.Target) -> None:
        self.folder = Path(folder) / arch
        self.arch = arch
        self.target = target
        self._digests: dict[int, tuple[tirx.PrimFunc, str]] = {}
        self._table = WorkloadTable(self.folder, _skipped)
        self._stamp: tuple[int, ...] = ()
        with self._naming():
            self.folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> TuningLog:
        """What the log holds now, all of it read."""
        log = TuningLog(self.folder, self.arch)
        with contextlib.suppress(OSError), self._locked():
            return _read(log)
        return _read(log)  # a folder to read only

    def append(self, func: tirx.PrimFunc, records: Sequence[NewRecord], name: str = "") -> None:
        """Append candidates of one stage, all in one piece.

        Parameters
        ----------
        func : PrimFunc
            The stage before it is scheduled.
        records : sequence of NewRecord
        name : str
            What people call the stage; written once.

        Raises
        ------
        OptionError
            If the files cannot be written, as on a full disk. Nothing of these records is in the log then.
        ValueError
            If a figure is no time.
        """
        if not records:
            return
        digest = self._digest(func)
        lines = b"".join(record_line(digest, self.arch, new.recipe, new.seconds, new.origin) for new in records)
        with self._naming(), self._locked():
            known = self._current_table().workloads.get(digest)
            if known is None or (name and not known.name):
                self._extend(WORKLOADS, workload_line(func, digest, name))
            self._extend(RECORDS, lines)

    def append_tried(self, several: Sequence[Tried]) -> None:
        """Append what was tried and has no record.

        Raises
        ------
        OptionError
            If the file cannot be written.
        """
        self._append(TRIED, [tried_line(one, self.arch) for one in several])

    def append_arrangements(self, several: Sequence[Arrangement]) -> None:
        """Append what stages take beside each other.

        Raises
        ------
        OptionError
            If the file cannot be written.
        """
        self._append(ARRANGEMENTS, [arrangement_line(one, self.arch) for one in several])

    def sort(self) -> None:
        """Bring the files into their canonical order, without duplicates and damaged lines.

        Records go by workload, figure, device, trial and recipe. Two are duplicates if all is equal but the day. What
        was tried is one line for each workload, figure and device. Arrangements go by their blocks and stages.

        Raises
        ------
        OptionError
            If the files cannot be written. They are as they were then.
        """
        with self._naming(), self._locked():
            self._replace(WORKLOADS, _sorted_workloads(self._whole_lines(WORKLOADS)))
            self._replace(RECORDS, _sorted_records(self._whole_lines(RECORDS)))
            log = TuningLog(self.folder, self.arch)
            self._replace(TRIED, _tried_lines(log.tried, self.arch))
            self._replace(ARRANGEMENTS, _sorted_arrangements(log.arrangements, self.arch))

    def reduce(self, choose: Callable[[TuningLog], Iterable[Record]]) -> None:
        """Keep chosen records, and the workloads that they are of, in canonical order; of others, that they were tried.

        Parameters
        ----------
        choose : callable
            From what the log holds to those of its records that stay.

        Raises
        ------
        OptionError
            If the files cannot be written.
        """
        with self._naming(), self._locked():
            log = _read(TuningLog(self.folder, self.arch))
            kept = list(choose(log))
            places, digests = {record.where for record in kept}, {record.workload for record in kept}
            records = [(where, line) for where, line in self._whole_lines(RECORDS) if where in places]
            left = marks_of_records(one for one in log.records if one.where not in places)
            self._replace(TRIED, _tried_lines([*log.tried, *left], self.arch))
            # Whoever reads meanwhile finds no record without its workload.
            self._replace(RECORDS, _sorted_records(records))
            self._replace(WORKLOADS, _sorted_workloads(self._whole_lines(WORKLOADS), digests))

    def _digest(self, func: tirx.PrimFunc) -> str:
        key = id(func)
        if key not in self._digests:
            # Versions of TVM may see different digests in one structure, and one digest in two structures.
            table = self._current_table()
            digest = next(iter(table.digests(func)), None)
            if digest is None:
                digest = first = workload_digest(func)
                number = 1
                while digest in table.workloads:
                    digest, number = f"{first}.{number}", number + 1
            self._digests[key] = (func, digest)
        return self._digests[key][1]

    def _current_table(self) -> WorkloadTable:
        """The workloads as they are now: others may have appended some, or put them in order."""
        path = self.folder / WORKLOADS
        found = path.stat() if path.is_file() else None
        stamp = () if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)
        if stamp != self._stamp:
            self._table, self._stamp = WorkloadTable(self.folder, _skipped), stamp
        return self._table

    def _append(self, name: str, lines: Sequence[bytes]) -> None:
        if lines:
            with self._naming(), self._locked():
                self._extend(name, b"".join(lines))

    def _extend(self, name: str, lines: bytes) -> None:
        file = os.open(self.folder / name, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            append_lines(file, lines)
        finally:
            os.close(file)

    def _whole_lines(self, name: str) -> list[tuple[str, bytes]]:
        path = self.folder / name
        text = path.read_bytes() if path.is_file() else b""
        return [(f"{path}:{number}", line) for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]

    def _replace(self, name: str, lines: Sequence[bytes]) -> None:
        path = self.folder / name
        if lines or path.is_file():
            replace_file(path, b"".join(line + b"\n" for line in lines))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone with the files; the lock ends with the process that holds it."""
        file = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Errors of the system as Souffle's, with what would help."""
        try:
            yield
        except OSError as error:
            raise OptionError(
                f"the tuning log in {self.folder} cannot be written: {error.strerror or error}; "
                "make room there, or choose another folder by --log DIR"
            ) from error


def marks_of_records(records: Iterable[Record]) -> list[Tried]:
    """What is left of records that are left out; of one whose recipe cannot be decoded, nothing."""
    found = []
    for record in records:
        with contextlib.suppress(*DAMAGED):
            origin = record.origin
            mark = frozenset({mark_of(record.recipe.key)})
            found.append(Tried(record.workload, origin.figure, origin.device, mark))
    return united(found)


def _read(log: TuningLog) -> TuningLog:
    _ = log.records, log.tried, log.arrangements
    return log


def _skipped(where: str, reason: str) -> None:
    _LOGGER.warning("%s is skipped: %s", where, reason)


def _sorted_workloads(lines: Sequence[tuple[str, bytes]], wanted: Container[str] | None = None) -> list[bytes]:
    """One line for each digest, or each that is wanted; one that can be decoded and has a name where there is one."""
    found: dict[str, bytes] = {}
    for where, line in sorted(lines, key=lambda entry: entry[1]):
        try:
            digest = workload_of(where, line.decode()).digest
        except DAMAGED as error:
            _skipped(where, brief(error))
            continue
        if digest not in found or _worth(line) > _worth(found[digest]):
            found[digest] = line
    return [found[digest] for digest in sorted(found) if wanted is None or digest in wanted]


def _worth(line: bytes) -> tuple[bool, bool]:
    """Whether it can be decoded, and has a name."""
    workload = workload_of("", line.decode())
    try:
        return workload.func is not None, bool(workload.name)
    except DAMAGED:
        return False, bool(workload.name)


def _sorted_records(lines: Sequence[tuple[str, bytes]]) -> list[bytes]:
    """By workload, figure, device, trial and recipe, equal ones once; what only another version understands is last."""
    groups: dict[tuple, list[tuple[Record | None, dict[str, Any], bytes]]] = {}
    for where, line in lines:
        try:
            data = dict(json.loads(line))
        except DAMAGED as error:
            _skipped(where, brief(error))
            continue
        order: tuple = (True,)
        record = None
        with contextlib.suppress(*DAMAGED):
            record = record_of(where, data, data["arch"])
            origin = record.origin
            order = (False, record.workload, origin.figure, origin.device, origin.trial)
        groups.setdefault(order, []).append((record, data, line))
    return [line for order in sorted(groups) for line in _distinct(groups[order])]


def _sorted_arrangements(several: Sequence[Arrangement], arch: str) -> list[bytes]:
    """By blocks, stages, figure, device and trial, those once of which all is equal but the day."""
    found: dict[tuple, Arrangement] = {}
    for one in sorted(several, key=lambda one: one.origin.date):
        found.setdefault((*one.place, one.figures, replace(one.origin, date="")), one)

    def order(one: Arrangement) -> tuple:
        block, shared, *figure = one.place
        return (astuple(block), shared, *figure, one.origin.trial, one.origin.date, one.figures)

    return [arrangement_line(one, arch).rstrip(b"\n") for one in sorted(found.values(), key=order)]


def _tried_lines(several: Iterable[Tried], arch: str) -> list[bytes]:
    """One line for each workload, figure and device, in their order."""
    return [tried_line(one, arch).rstrip(b"\n") for one in united(several)]


def _distinct(group: Sequence[tuple[Record | None, dict[str, Any], bytes]]) -> list[bytes]:
    """Of duplicates the first day stays, and of one day the first line."""
    if len(group) == 1:
        return [group[0][2]]
    found: dict[str, tuple[str, str, bytes]] = {}
    for record, data, line in group:
        key = ""
        with contextlib.suppress(*DAMAGED):
            if record is not None:
                key = record.recipe.key
                data = {**data, "trace": record.recipe.trace}  # however it was compressed
        same = json.dumps({name: value for name, value in data.items() if name != "date"}, sort_keys=True)
        entry = (key, str(data.get("date", "")), line)
        found[same] = min(entry, found.get(same, entry))
    return [line for *_, line in sorted(found.values())]
