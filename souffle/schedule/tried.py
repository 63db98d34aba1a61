"""What searches tried of a stage and a shortened log has no record of, so that none tries it again.

A recipe is four bytes here, its mark. A new one has that of one of a hundred others once in forty million times; a
search then leaves out a recipe that it has not tried.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from souffle.schedule.record import check_arch, json_line

__all__ = ["KnownRecipes", "Tried", "mark_of", "tried_line", "tried_of", "united"]

_BYTES = 4
_FIELDS = ("workload", "figure", "device")


@dataclass(frozen=True)
class Tried:
    """Recipes of one stage that have a figure of one kind.

    Attributes
    ----------
    workload : str
        The stage's digest.
    figure, device : str
        As in :class:`souffle.schedule.record.RecordOrigin`.
    marks : frozenset of bytes
    """

    workload: str
    figure: str
    device: str
    marks: frozenset[bytes]

    @property
    def place(self) -> tuple[str, str, str]:
        """The stage, the kind and the device."""
        return self.workload, self.figure, self.device


def mark_of(key: str) -> bytes:
    """The mark of a recipe, by its key."""
    return hashlib.blake2b(key.encode(), digest_size=_BYTES).digest()


def united(several: Iterable[Tried]) -> list[Tried]:
    """One of each stage, kind and device, in their order."""
    found: dict[tuple[str, str, str], frozenset[bytes]] = {}
    for one in several:
        found[one.place] = found.get(one.place, frozenset()) | one.marks
    return [Tried(*place, found[place]) for place in sorted(found)]


def tried_line(tried: Tried, arch: str) -> bytes:
    """A line of the table, its end too."""
    marks = base64.b85encode(b"".join(sorted(tried.marks))).decode()
    data = {**dict(zip(_FIELDS, tried.place, strict=True)), "arch": arch, "marks": marks}
    return json_line(data)


def tried_of(data: Mapping[str, Any], arch: str) -> Tried:
    """A line of the table, as JSON.

    Raises
    ------
    ValueError, LookupError, TypeError
        If it is none, or of another architecture.
    """
    check_arch(data, arch)
    marks = base64.b85decode(data["marks"])
    if len(marks) % _BYTES:
        raise ValueError(f"{len(marks)} bytes are no marks of {_BYTES}")
    each = frozenset(marks[start : start + _BYTES] for start in range(0, len(marks), _BYTES))
    return Tried(*(str(data[name]) for name in _FIELDS), each)


class KnownRecipes:
    """The recipes of a stage that need not be tried: by their keys, or by marks alone."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._marks: frozenset[bytes] = frozenset()

    def __contains__(self, key: object) -> bool:
        return key in self._keys or (bool(self._marks) and mark_of(str(key)) in self._marks)

    def has_key(self, key: str) -> bool:
        """Whether it is known by its key: more is known of it than its mark."""
        return key in self._keys

    def with_keys(self, keys: Collection[str]) -> KnownRecipes:
        """These and some more."""
        more = KnownRecipes()
        more._keys, more._marks = self._keys | set(keys), self._marks
        return more

    def add(self, key: str) -> None:
        """One more."""
        self._keys.add(key)

    def add_marks(self, marks: Collection[bytes]) -> int:
        """Recipes of which no more is known; how many of them were not known by their keys."""
        new = frozenset(marks) - {mark_of(key) for key in self._keys}
        self._marks |= new
        return len(new)
