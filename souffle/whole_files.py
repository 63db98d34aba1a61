"""Files that are whole whenever they are read, whatever becomes of who writes them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["append_lines", "replace_file"]


def append_lines(file: int, lines: bytes) -> None:
    """Append whole lines, behind the end of a line that was cut off; all of them, or nothing.

    Parameters
    ----------
    file : int
        Open to be read and appended to.
    lines : bytes
        With their ends.

    Raises
    ------
    OSError
        If there is no room; the file is as it was then.
    """
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        lines = b"\n" + lines
    try:
        # In one piece as a rule, so that an interrupt comes before it or after it.
        while lines:
            lines = lines[os.write(file, lines) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, size)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Give a file another content: whoever reads finds the old one or the new one.

    Raises
    ------
    OSError
        If it cannot be written; the file is as it was then.
    """
    if path.is_file() and path.read_bytes() == content:
        return
    beside = path.with_name(f"{path.name}.new")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
