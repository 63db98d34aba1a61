"""A Markdown table as a file of docs/results/tables/: for what a program printed and wrote nowhere."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence

from benchmarks.results_page.files import PageError

__all__ = ["taken"]

_BAR = re.compile(r"(?<!\\)\|")


def taken(text: str, kinds: Sequence[str], command: str | None, device: str | None, state: Mapping[str, str]) -> str:
    """The text of a file with the cells of a table as they are.

    Parameters
    ----------
    text : str
        The table, in Markdown.
    kinds : sequence of str
        The kinds of its figures, as changes.json lists them.
    command, device : str or None
        What made the figures, and on what.
    state : mapping
        ``commit`` and ``committed`` of the checkout.

    Raises
    ------
    PageError
        If it is no table.
    """
    lines = [_cells(line) for line in text.strip().splitlines()]
    if len(lines) < 3 or any(re.fullmatch(":?-+:?", cell) is None for cell in lines[1]):
        raise PageError("a Markdown table has a head, a line of dashes, and rows")
    columns, ruler, *rows = lines
    for number, row in enumerate(rows, 1):
        if len(row) != len(columns):
            raise PageError(f"row {number} has {len(row)} cells for {len(columns)} columns; a bar within one is \\|")
    about = {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **state,
        "device": device,
        "versions": None,
        "kinds": list(kinds),
        "columns": columns,
        "right": [place for place, dashes in enumerate(ruler) if dashes.endswith(":")],
    }
    header = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)},\n" for key, value in about.items()]
    body = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return "{\n" + "".join(header) + f' "rows": [\n  {body}\n ]\n}}\n'


def _cells(line: str) -> list[str]:
    line = line.strip()
    inner = line[1:-1] if line.startswith("|") and line.endswith("|") else line
    return [cell.strip() for cell in _BAR.split(inner)]
