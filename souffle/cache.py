"""Where compiled code is kept between runs, and how: a cache that cannot be used is none, and never an error."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from pathlib import Path

__all__ = ["cache_root", "most_bytes", "read_entry", "trim", "write_entry", "write_whole"]

_LOG = logging.getLogger(__name__)
_GIGABYTES = 5
_SEAL = b"\nsouffle sha256 "
_SEAL_BYTES = len(_SEAL) + hashlib.sha256().digest_size

_warned: set[Path | None] = set()


def _warn(folder: Path | None, why: object) -> None:
    """Say once for each folder that nothing is kept there."""
    if folder not in _warned:
        _warned.add(folder)
        _LOG.warning(
            "nothing compiled is kept in %s: %s; choose another folder by SOUFFLE_CACHE, or none by SOUFFLE_CACHE=off",
            folder or "a cache",
            why,
        )


def cache_root() -> Path | None:
    """``$SOUFFLE_CACHE``, or ``souffle`` in the user's cache folder.

    ``None`` where ``SOUFFLE_CACHE=off``, and with a warning where nothing says which folder is the user's.
    """
    chosen = os.environ.get("SOUFFLE_CACHE", "")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if caches:
        return Path(caches) / "souffle"
    try:
        home = Path.home()
    except RuntimeError as error:
        _warn(None, error)
        return None
    if not home.is_absolute():
        _warn(None, f"the home folder is {str(home)!r}")
        return None
    return home / ".cache" / "souffle"


def read_entry(path: Path) -> bytes | None:
    """What :func:`write_entry` wrote; ``None`` where there is nothing, or something else, as half an entry."""
    try:
        sealed = path.read_bytes()
    except OSError:
        return None
    content = sealed[:-_SEAL_BYTES]
    return content if sealed[-_SEAL_BYTES:] == _seal(content) else None


def write_entry(path: Path, content: bytes) -> bool:
    """Keep an entry, so that a reader finds the whole of it or nothing, whoever else writes the same.

    The file is the content and a seal behind it, which loaders of libraries do not look at. Where it cannot be written,
    a warning says so, once for each folder.

    Returns
    -------
    bool
        Whether it is there.
    """
    return write_whole(path, content, _seal(content))


def write_whole(path: Path, *parts: bytes | memoryview) -> bool:
    """Write a file as :func:`write_entry` does, without a seal."""
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
        partial = Path(name)
        with os.fdopen(number, "wb") as file:
            for part in parts:
                file.write(part)
        partial.replace(path)
        partial = None
    except OSError as error:
        _warn(path.parent, error)
        return False
    finally:
        if partial is not None:
            with contextlib.suppress(OSError):
                partial.unlink()
    return True


def most_bytes() -> int:
    """How much of what can be large is kept: ``$SOUFFLE_CACHE_GB``, or 5 GB, as much as ccache keeps by itself."""
    said = os.environ.get("SOUFFLE_CACHE_GB", "")
    try:
        return int(float(said or _GIGABYTES) * 1e9)
    except (ValueError, OverflowError):
        _LOG.warning("SOUFFLE_CACHE_GB is %r, which is no number of gigabytes; %d are kept", said, _GIGABYTES)
        return _GIGABYTES * 10**9


def trim(folder: Path, most: int) -> None:
    """Remove the files of a folder that were used longest ago, until no more than so many bytes are left.

    Files of writers that were ended count as others do.
    """
    files = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process may be trimming, too
                if entry.is_file():
                    said = entry.stat()
                    files.append((said.st_mtime, entry.name, said.st_size))
    left = sum(size for _, _, size in files)
    for _, name, size in sorted(files):
        if left <= most:
            return
        with contextlib.suppress(OSError):
            (folder / name).unlink()
        left -= size


def _seal(content: bytes) -> bytes:
    return _SEAL + hashlib.sha256(content).digest()
