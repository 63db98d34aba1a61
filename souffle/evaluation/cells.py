"""A paper's table with ours beside it: every cell says how it was had, or why it cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from souffle.evaluation.published import PublishedTable

__all__ = ["ABSENT", "EMPTY", "Cell", "Line", "PaperTable", "absent", "counted", "measured", "predicted", "reported"]

PUBLISHED, MEASURED, COUNTED, PREDICTED, ABSENT = "published", "measured", "counted", "predicted", "absent"


@dataclass(frozen=True)
class Cell:
    """One figure.

    Attributes
    ----------
    value : float, int, str or None
        As printed; None where there is none.
    how : str
        ``"published"``, ``"measured"``, ``"counted"``, ``"predicted"`` or ``"absent"``; empty where a line has no such
        figure.
    note : str
        On which device and when it was measured, of what it was counted, for what it was predicted, or why it cannot be
        had.
    """

    value: float | int | str | None = None
    how: str = ""
    note: str = ""


EMPTY = Cell()
"""Where a line has no such figure."""


def reported(value: Any) -> Cell:
    """What the paper has."""
    return EMPTY if value is None else Cell(value, PUBLISHED)


def measured(value: float, device: str, date: str, note: str = "") -> Cell:
    """What a GPU took."""
    return Cell(value, MEASURED, f"on {device}, {date}" + (f", {note}" if note else ""))


def counted(value: float, note: str) -> Cell:
    """What was counted of programs, plans or kernels."""
    return Cell(value, COUNTED, note)


def predicted(value: float | None, note: str) -> Cell:
    """What a cost model says; absent where it says nothing."""
    return Cell(value, PREDICTED, note) if value is not None else absent("the model has no figure for it")


def absent(why: str) -> Cell:
    """What cannot be had here."""
    return Cell(None, ABSENT, why)


@dataclass(frozen=True)
class Line:
    """One line of a table.

    Attributes
    ----------
    row : str
        What it is about, such as a network.
    whose : str
        ``"paper"``, or how ours was made.
    cells : tuple of Cell
        One for each column.
    """

    row: str
    whose: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper, with ours beside it.

    Attributes
    ----------
    name : str
        As ``souffle reproduce`` names it.
    about : PublishedTable
    columns : tuple of str
        The paper's, and ours that it does not have.
    lines : tuple of Line
    remarks : tuple of str
        What holds for the whole.
    """

    name: str
    about: PublishedTable
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    remarks: tuple[str, ...] = field(default=())

    @property
    def heading(self) -> str:
        """What it is, in one line."""
        paper, about = self.about["paper"], self.about
        where = f"{about['where']} (section {about['section']})"
        return f"{paper['title']} ({paper['venue']}), {where}: {about['title']}, {about['unit']}"

    def text_rows(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Header, rows and notes for printing: behind each cell of ours stands the letter of its note."""
        letters: dict[tuple[str, str], str] = {}
        rows = []
        for line in self.lines:
            cells = [line.row, line.whose]
            for cell in line.cells:
                text = "" if not cell.how else _shown(cell.value)
                if cell.how and cell.how != PUBLISHED:
                    mark = letters.setdefault((cell.how, cell.note), _letter(len(letters)))
                    text = f"{text} {mark}"
                cells.append(text)
            rows.append(cells)
        notes = [f"{mark}  {how}: {note}" for (how, note), mark in letters.items()]
        return ["", "", *self.columns], rows, [*notes, *self.remarks]

    def data(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "table": self.name,
            "paper": self.about["paper"]["title"],
            "where": self.about["where"],
            "unit": self.about["unit"],
            "columns": list(self.columns),
            "lines": [
                {
                    "row": line.row,
                    "whose": line.whose,
                    "cells": [{"value": c.value, "how": c.how, "note": c.note} if c.how else None for c in line.cells],
                }
                for line in self.lines
            ],
            "remarks": list(self.remarks),
        }

    def markdown(self) -> str:
        """The table for a page."""
        header, rows, notes = self.text_rows()
        lines = [f"### {self.name}", "", self.heading, ""]
        lines += [_row(header), _row(["---"] * len(header)), *map(_row, rows), ""]
        return "\n".join([*lines, *(f"- {note}" for note in notes), ""])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _shown(value: float | int | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.1f}"


def _letter(number: int) -> str:
    """a to z, then aa, ab, ..."""
    first, last = divmod(number, 26)
    return (chr(96 + first) if first else "") + chr(97 + last)
