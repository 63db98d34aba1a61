"""A table as Markdown, and numbers as tables have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

__all__ = ["Table", "decimal", "maybe", "percent", "scientific", "slashed", "table"]


_ENDS_A_CELL = re.compile(r"(?<!\\)\||\n")


@dataclass(frozen=True)
class Table:
    """Cells as they are shown.

    Attributes
    ----------
    columns : tuple of str
    right : tuple of bool
        Which columns stand at the right.
    rows : tuple of tuples of str
    """

    columns: tuple[str, ...]
    right: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for cell in (cell for row in (self.columns, *self.rows) for cell in row):
            if _ENDS_A_CELL.search(cell):
                raise ValueError(f"{cell!r} ends a cell of a table; a bar within one is written \\\\|")

    def markdown(self) -> list[str]:
        """Its lines."""
        ruler = "|".join("---:" if right else "---" for right in self.right)
        cells = [self.columns, *self.rows]
        lines = ["| " + " | ".join(row) + " |" for row in cells]
        return [lines[0], f"|{ruler}|", *lines[1:]]


def table(columns: str, rows: Iterable[Sequence[object]], right: Iterable[int] = ()) -> Table:
    """A table of a head such as ``"model | V0 | V1"``; the columns numbered in `right` stand at the right."""
    names = tuple(name.strip() for name in columns.split("|"))
    at_right = set(right)
    cells = tuple(tuple("" if cell is None else str(cell) for cell in row) for row in rows)
    if any(len(row) != len(names) for row in cells):
        raise ValueError(f"a row has other columns than {columns!r}")
    return Table(names, tuple(place in at_right for place in range(len(names))), cells)


def decimal(value: float | None, digits: int = 0) -> str:
    """A number with so many digits behind the point, halves away from zero, thousands apart; empty for None."""
    if value is None:
        return ""
    # As it stands in the file: 0.15 is a half there, and a hair less as binary.
    return f"{Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):,}"


def scientific(value: float | None, digits: int = 1) -> str:
    """Such as 2.2e-07; empty for None."""
    return "" if value is None else f"{value:.{digits}e}"


def percent(ratio: float, digits: int = 1) -> str:
    """A change by its ratio, with its sign."""
    return f"{(ratio - 1) * 100:+.{digits}f} %".replace(f"-{0:.{digits}f} %", f"+{0:.{digits}f} %")


def slashed(*values: object) -> str:
    """Several in one cell."""
    return " / ".join(map(str, values))


def maybe(condition: object, text: object) -> str:
    """A cell that is empty where there is nothing to say."""
    return str(text) if condition else ""
