"""Words of the texts that people read."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, what: str, plural: str = "") -> str:
    """``1 tile``, ``12 tiles``; `plural` where it is not `what` with an s."""
    return f"{number} {what if number == 1 else plural or f'{what}s'}"
