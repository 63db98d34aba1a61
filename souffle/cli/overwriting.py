"""What a command may write over.

An output replaces an earlier one of its own kind without a question, as compilers do and scripts rely on: the same
command given again gives the same file. A file of another kind, such as the model itself where two arguments changed
places, is refused before anything is done, unless ``--force`` is given.
"""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from souffle.errors import OptionError

__all__ = ["ARCHIVE", "PICTURE", "FileKind", "add_force", "check_output"]


@dataclass(frozen=True)
class FileKind:
    """What a command writes.

    Attributes
    ----------
    name : str
        For messages, such as ``"an SVG picture"``.
    holds : callable
        Whether a file is one.
    """

    name: str
    holds: Callable[[Path], bool]


ARCHIVE = FileKind("a .souffle or .npz archive", zipfile.is_zipfile)
PICTURE = FileKind("an SVG picture", lambda path: b"<svg" in path.read_bytes()[:4096])


def add_force(parser: argparse.ArgumentParser) -> None:
    """The option ``--force``."""
    parser.add_argument("--force", action="store_true", help="write over a file that is something else")


def check_output(path: str | Path | None, kind: FileKind, force: bool) -> None:
    """Refuse to write over a file of another kind; one that cannot be read is left to who writes it.

    Parameters
    ----------
    path : path or None
        None where nothing is to be written.
    kind : FileKind
        What is to be written.
    force : bool

    Raises
    ------
    OptionError
        Saying what is there.
    """
    if path is None or force:
        return
    try:
        size = Path(path).stat().st_size if Path(path).is_file() else 0
        other = size > 0 and not kind.holds(Path(path))
    except OSError:
        return
    if other:
        raise OptionError(
            f"{path} is there, {size:,} bytes that are not {kind.name}; give another name, or --force to write over it"
        )
