"""Names that nothing has yet."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["NameSupply"]


class NameSupply:
    """Hands out names, each once.

    Parameters
    ----------
    taken : iterable of str
        Names that it does not hand out.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    def fresh(self, wanted: str) -> str:
        """`wanted`, or `wanted` with a number behind where it is taken."""
        name = wanted
        while name in self._taken:
            count = self._next.get(wanted, 0) + 1
            self._next[wanted] = count
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name
