"""Tables, JSON and the one progress line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["Progress", "format_table", "human_bytes", "write_json"]


class Progress:
    """One line on stderr: what is being done, and for how long already; plain lines where it is no terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.start = time.perf_counter()
        self.prefix = ""
        self.live = sys.stderr.isatty()
        self.interrupted = False

    def __call__(self, message: str) -> None:
        if self.interrupted:
            raise KeyboardInterrupt  # once more, for the first was swallowed on its way
        if self.quiet:
            return
        text = f"[{time.perf_counter() - self.start:6.1f} s] {self.prefix}{message}"
        end = "" if self.live else "\n"
        sys.stderr.write(("\r\x1b[K" if self.live else "") + text + end)
        sys.stderr.flush()

    def done(self) -> None:
        """End the line."""
        if self.live and not self.quiet:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


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
    """Print as JSON."""
    print(json.dumps(value, indent=2))
