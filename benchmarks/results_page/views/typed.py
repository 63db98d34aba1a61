"""Tables whose cells were taken from what a program printed: docs/results/tables/."""

from __future__ import annotations

from benchmarks.results_page.files import PageError, Source
from benchmarks.results_page.tables import Table

__all__ = ["notes", "typed"]


def typed(source: Source) -> Table:
    """The cells of the file as they are."""
    columns, rows, right = (source.content[key] for key in ("columns", "rows", "right"))
    if not all(isinstance(cell, str) for row in [columns, *rows] for cell in row):
        raise PageError(f"{source.name}: cells are texts")
    for number, row in enumerate(rows, 1):
        if len(row) != len(columns):
            raise PageError(f"{source.name}: row {number} has {len(row)} cells for {len(columns)} columns")
    return Table(tuple(columns), tuple(name in right for name in range(len(columns))), tuple(map(tuple, rows)))


def notes(source: Source, keys: int = 1) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Of a typed table the cells behind the first `keys` ones, by those."""
    return {row[:keys]: row[keys:] for row in typed(source).rows}
