"""Changes of the compiler after which figures are others: docs/results/changes.json.

Each change says its ``commit`` and ``date``, a short ``name``, ``what`` is different, and which kinds of figures it
``alters``. The kinds are listed in the same file, with what they mean. A table is older than a change that alters one
of its kinds and was committed after the newest state that the table can be of.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.results_page.files import PageError, Record, moment_of

__all__ = ["Change", "Changes"]


@dataclass(frozen=True)
class Change:
    """One change of the compiler."""

    commit: str
    date: str
    moment: datetime.datetime
    name: str
    what: str
    alters: frozenset[str]

    def __str__(self) -> str:
        return f"{self.name} ({self.commit}, {self.date[:10]})"


@dataclass(frozen=True)
class Changes:
    """All of them, the oldest first, and the kinds of figures that there are."""

    changes: tuple[Change, ...]
    kinds: frozenset[str]

    @staticmethod
    def of(content: Record) -> Changes:
        """What the file says.

        Raises
        ------
        PageError
            If a change alters a kind that is not listed.
        """
        kinds = frozenset(content.record("kinds"))
        changes = []
        for entry in content.records("changes"):
            alters = frozenset(entry.texts("alters"))
            if not alters <= kinds:
                raise PageError(f"{content.file}: {entry['commit']} alters {_listed(alters - kinds)}, which is no kind")
            date = entry.text("date")
            moment = moment_of(date, content.file)
            changes.append(Change(entry.text("commit"), date, moment, entry.text("name"), entry.text("what"), alters))
        return Changes(tuple(sorted(changes, key=lambda change: change.moment)), kinds)

    def known(self, kinds: Iterable[str], where: str) -> frozenset[str]:
        """Kinds of figures, if they are listed."""
        asked = frozenset(kinds)
        if not asked <= self.kinds:
            raise PageError(f"{where}: {_listed(asked - self.kinds)} is no kind of figures that changes.json lists")
        return asked

    def after(self, moment: datetime.datetime, kinds: Iterable[str], where: str) -> tuple[Change, ...]:
        """The changes after a moment that alter figures of these kinds, the oldest first."""
        asked = self.known(kinds, where)
        return tuple(change for change in self.changes if change.moment > moment and change.alters & asked)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
