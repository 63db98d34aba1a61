"""Tables, JSON and the one progress line.

Rich knows the terminal: how wide it is, whether it moves its cursor, and what takes how many columns. Where there is no
terminal, what is printed are plain lines of any width, and JSON is never touched by it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

__all__ = ["Progress", "format_table", "human_bytes", "print_table", "write_json"]

_BETWEEN = 3
"""Columns of a terminal from one of a table to the next."""


class Progress:
    """One line on stderr: what is being done, and for how long already; plain lines where it is no terminal.

    Attributes
    ----------
    prefix : str
        What the next messages are about.
    interrupted : bool
        Whether there was a Ctrl-C; the next message raises it again.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.start = time.perf_counter()
        self.prefix = ""
        self.interrupted = False
        self._console = Console(stderr=True)
        self.live = _is_terminal(sys.stderr, self._console)
        self._message = ""
        self._line: Live | None = None

    def __call__(self, message: str) -> None:
        if self.interrupted:
            raise KeyboardInterrupt  # once more, for the first was swallowed on its way
        if self.quiet:
            return
        self._message = f"{self.prefix}{message}"
        if not self.live:
            sys.stderr.write(f"{self}\n")
            sys.stderr.flush()
        elif self._line is None:
            # What else is written goes its own way: a table may be on its way into a pipe.
            streams = {"redirect_stdout": False, "redirect_stderr": False}
            self._line = Live(self, console=self._console, transient=True, refresh_per_second=4, **streams)
            self._line.start(refresh=True)
        else:
            self._line.refresh()

    def __str__(self) -> str:
        return f"[{time.perf_counter() - self.start:6.1f} s] {self._message}"

    def __rich__(self) -> Text:
        return Text(str(self), no_wrap=True, overflow="ellipsis")

    def note(self, message: str) -> None:
        """A line that stays, on stderr."""
        self.done()
        if not self.quiet:
            sys.stderr.write(f"{message}\n")

    def done(self) -> None:
        """End the line."""
        line, self._line = self._line, None
        if line is not None:
            try:
                line.stop()
            finally:  # an interrupt may have ended the line half
                self._console.show_cursor(True)


def _is_terminal(stream: TextIO, console: Console) -> bool:
    """Whether a stream is a terminal that moves its cursor; Rich alone believes the environment, too."""
    return stream.isatty() and not console.is_dumb_terminal


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print a table: in a terminal in parts that are as wide as that is, elsewhere as :func:`format_table` has it.

    Each part begins with the first column.
    """
    console = Console()
    if not _is_terminal(sys.stdout, console):
        print(*([title] if title else []), format_table(header, rows), sep="\n")
        return
    if title:
        console.print(Text(title))
    cells = [[str(cell) for cell in row] for row in rows]
    for columns in _parts(header, cells, console.width):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for index in columns:
            right = bool(cells) and all(_numeric(row[index]) for row in cells)
            table.add_column(Text(header[index]), justify="right" if right else "left")
        for row in cells:
            table.add_row(*(Text(row[index]) for index in columns))
        console.print(table)


def _parts(header: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> Iterator[list[int]]:
    """The columns of each part: as many as fit, at least one beside the first."""
    widths = [max(cell_len(line[index]) for line in (header, *cells)) for index in range(len(header))]
    part = [0]
    for index in range(1, len(header)):
        if len(part) > 1 and sum(widths[i] + _BETWEEN for i in (*part, index)) > width:
            yield part
            part = [0]
        part.append(index)
    yield part


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in fixed-width columns; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    right = [all(_numeric(row[i]) for row in cells) and bool(cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *(line(row) for row in cells)])


def _numeric(cell: str) -> bool:
    return cell in ("-", "") or cell[0].isdigit() or (cell[0] in "-+" and cell[1:2].isdigit())


def human_bytes(count: int) -> str:
    """Bytes with a unit: ``"1.5 MB"`` (10^6)."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def write_json(value: Any) -> None:
    """Print as JSON, which escapes what a name may hold of control characters."""
    print(json.dumps(value, indent=2))
