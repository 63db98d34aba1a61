"""Files of figures: what they hold, and where it comes from.

A header says ``command`` and ``date``; ``commit``, the state of the checkout that made the figures, and ``committed``,
when that was committed; ``device``, which measured them; ``versions``. Files that say no commit have ``recorded``
instead: the commit by which they came into the repository, and its date.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from souffle.errors import SouffleError

__all__ = ["Origin", "PageError", "Record", "Source", "moment_of", "read_source"]

_DEVICES = Path(__file__).resolve().parents[2] / "souffle" / "cost" / "devices"
_DESCRIBED = {path.stem for path in _DEVICES.glob("*.json")}


class PageError(SouffleError):
    """A chapter or a file of figures is not what the page can be made of."""


class Record(dict[str, Any]):
    """A JSON object that knows its file, for what is missing in it."""

    def __init__(self, file: str, pairs: Iterable[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.file = file

    def __missing__(self, key: str) -> Any:
        raise PageError(f"{self.file}: a record has no {key!r}, only {', '.join(map(repr, self)) or 'nothing'}")

    def number(self, key: str) -> int | float:
        """A number.

        Raises
        ------
        PageError
            If there is something else.
        """
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise PageError(f"{self.file}: {key!r} is {value!r} and no number")
        return value

    def records(self, key: str) -> list[Record]:
        """A list of objects."""
        value = self[key]
        if not isinstance(value, list) or not all(isinstance(item, Record) for item in value):
            raise PageError(f"{self.file}: {key!r} is no list of objects")
        return value

    def record(self, key: str) -> Record:
        """An object."""
        value = self[key]
        if not isinstance(value, Record):
            raise PageError(f"{self.file}: {key!r} is no object")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of words."""
        value = self[key]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise PageError(f"{self.file}: {key!r} is {value!r} and no list of texts")
        return value

    def text(self, key: str) -> str:
        """Words."""
        value = self[key]
        if not isinstance(value, str):
            raise PageError(f"{self.file}: {key!r} is {value!r} and no text")
        return value


@dataclass(frozen=True)
class Origin:
    """Where figures come from.

    Attributes
    ----------
    date : str
        The day.
    commit : str or None
        The state that made them, or the commit that they came with.
    recorded : bool
        Whether it is the commit that they came with.
    moment : datetime.datetime
        The newest state of the compiler that they can be of.
    device : str or None
        What measured them, or what they are predicted for.
    command : str or None
    """

    date: str
    commit: str | None
    recorded: bool
    moment: datetime.datetime
    device: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class Source:
    """A file of figures.

    Attributes
    ----------
    name : str
        As chapters name it, relative to docs/results/.
    content : Record
    origin : Origin
    """

    name: str
    content: Record
    origin: Origin

    @property
    def is_typed(self) -> bool:
        """Whether its cells were typed once: a file of docs/results/tables/."""
        return self.name.startswith("tables/")

    @property
    def results(self) -> list[Record]:
        """The rows of a campaign."""
        return self.content.records("results")


def moment_of(date: str, file: str) -> datetime.datetime:
    """The latest moment that a date in ISO 8601 can mean: of a day its last second, UTC."""
    try:
        moment = datetime.datetime.fromisoformat(date.replace("Z", "+00:00"))
    except (AttributeError, ValueError) as error:
        raise PageError(f"{file}: the date {date!r} is none in ISO 8601") from error
    if len(date) == len("2026-11-27"):
        moment += datetime.timedelta(days=1, seconds=-1)
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)


def read_source(folder: Path, name: str) -> Source:
    """A file of figures and its header.

    Raises
    ------
    PageError
        If it is not there, is no JSON object, or does not say from when it is.
    """
    try:
        content = json.loads((folder / name).read_text(), object_pairs_hook=lambda pairs: Record(name, pairs))
    except OSError as error:
        raise PageError(f"{name} cannot be read from {folder}: {error.strerror}") from error
    except ValueError as error:
        raise PageError(f"{name} is no JSON: {error}") from error
    if not isinstance(content, Record):
        raise PageError(f"{name} holds no JSON object")
    return Source(name, content, _origin(content))


def _origin(content: Record) -> Origin:
    recorded = content.record("recorded") if content.get("recorded") else Record(content.file, ())
    for header in (content, recorded):
        for key in ("date", "commit", "committed", "command", "device"):
            if header.get(key) is not None:
                header.text(key)
    date = content.get("date") or recorded.get("date")
    if date is None:
        raise PageError(
            f"{content.file}: no 'date' and no 'recorded' in its header; python -m benchmarks.results_page --record "
            f"{content.file} adds it"
        )
    commit = content.get("commit")
    moments = [moment_of(content.get("committed") or date, content.file)]
    if recorded:
        moments.append(moment_of(recorded["date"], content.file))
    return Origin(
        date[:10],
        commit or recorded.get("commit"),
        commit is None,
        min(moments),
        _device(content.get("device")),
        content.get("command"),
    )


def _device(name: str | None) -> str | None:
    # Descriptions for the cost model are named like products; drivers name what they find otherwise.
    return f"predicted for {name}" if name in _DESCRIBED else name
