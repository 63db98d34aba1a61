"""The file of a campaign: a line of JSON for each case, appended as it ends, and in the cases' order in the end.

A line is whole, or the last one of a process that was killed; then the next one stays a line of its own, and the rest
is left out. Files of equal cases are equal byte for byte, times aside, whoever made them and in whatever order.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from souffle.errors import OptionError
from souffle.whole_files import append_lines, replace_file

__all__ = ["Record", "RecordFile", "read_records", "without_times"]

Record = dict[str, Any]

_SETTING = "setting"
_TIMES = frozenset({"seconds"})
"""Keys of what differs from one run to the next."""


def without_times(value: Any) -> Any:
    """A record, or a part of one, without what differs from one run to the next."""
    if isinstance(value, Mapping):
        return {key: without_times(one) for key, one in value.items() if key not in _TIMES}
    return [without_times(one) for one in value] if isinstance(value, (list, tuple)) else value


def read_records(path: Path | None) -> list[Record]:
    """The lines of a campaign's file, but for one that was being written as the machine stopped; of no file, none."""
    return [] if path is None or not path.exists() else _records_in(path.read_bytes())


def _records_in(content: bytes) -> list[Record]:
    records = []
    for line in content.splitlines():
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                records.append(found)
    return records


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


class RecordFile:
    """Records by what they are known by, kept in a file where one is given; to be used as a context.

    Parameters
    ----------
    path : Path or None
    key : callable
        Of a record: what it is known by, and sorted by. The last one of a key counts.
    setting : mapping, optional
        How all of them were made. It is the first line of the file, and those of another setting are not gone on with.

    Raises
    ------
    OptionError
        If the file holds something else, another campaign is writing it, or it cannot be written.

    Attributes
    ----------
    records : dict
        By key.
    """

    def __init__(
        self, path: Path | None, key: Callable[[Mapping[str, Any]], Any], setting: Mapping[str, Any] | None = None
    ) -> None:
        self._path, self._key, self._setting = path, key, None if setting is None else {_SETTING: dict(setting)}
        self._file = -1
        self.records: dict[Any, Record] = {}
        if path is not None:
            with self._naming():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._opened()
            try:
                self._read()
            except BaseException:
                os.close(self._file)
                raise

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, record: Record) -> None:
        """Keep a record, in the file before this returns."""
        # First here: what an interrupt keeps from being appended is in the file when that is closed.
        self.records[self._key(record)] = json.loads(json.dumps(record))
        if self._file >= 0:
            with self._naming():
                append_lines(self._file, _line(record))

    def forget(self, which: Callable[[Mapping[str, Any]], bool]) -> None:
        """Do as if some records were not there."""
        self.records = {key: record for key, record in self.records.items() if not which(record)}

    def close(self) -> None:
        """Bring the file into the order of its keys, without lines that do not count."""
        if self._file < 0:
            return
        try:
            with self._naming():
                self._sort()
        finally:
            file, self._file = self._file, -1
            os.close(file)

    def _sort(self) -> None:
        lines = [] if self._setting is None else [self._setting]
        replace_file(self._path, b"".join(map(_line, [*lines, *(self.records[key] for key in sorted(self.records))])))

    def _opened(self) -> int:
        """The file, which this process alone writes from now on."""
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                raise OptionError(f"another campaign is writing {self._path}; give each a file of its own") from None
            except OSError:
                return file  # a file system without locks
            # Whoever had it may have put another one in its place.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), self._path.stat()):
                    return file
            os.close(file)

    def _read(self) -> None:
        content = self._path.read_bytes()
        found = _records_in(content)
        if not found and content.count(b"\n"):
            raise OptionError(f"{self._path} is there and holds no records of a campaign; give another file")
        if self._setting is not None:
            if found and found[0].get(_SETTING) != self._setting[_SETTING]:
                before = found[0].get(_SETTING, "something else")
                raise OptionError(
                    f"{self._path} holds records of {before}, and not of {self._setting[_SETTING]}; give another file"
                )
            if not found:
                with self._naming():
                    append_lines(self._file, _line(self._setting))
        try:
            self.records = {self._key(record): record for record in found if _SETTING not in record}
        except (KeyError, TypeError) as error:
            raise OptionError(f"{self._path} holds records of something else; give another file") from error

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Errors of the system as Souffle's."""
        try:
            yield
        except OSError as error:
            raise OptionError(f"{self._path} cannot be written: {error.strerror or error}") from error
