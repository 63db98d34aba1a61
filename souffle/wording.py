"""Words of the texts that people read."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

__all__ = ["counted", "did_you_mean", "minutes_and_seconds"]


def counted(number: int, what: str, plural: str = "") -> str:
    """``1 tile``, ``12 tiles``; `plural` where it is not `what` with an s."""
    return f"{number} {what if number == 1 else plural or f'{what}s'}"


def minutes_and_seconds(seconds: float) -> str:
    """``2 min 5 s``."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole} min {rest} s"


def did_you_mean(name: object, known: Sequence[str], most: int = 3) -> str:
    """``; did you mean 'a' or 'b'?``, of at most so many that are known and look alike; empty where none does."""
    near = difflib.get_close_matches(str(name), known, n=most, cutoff=0.4)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
