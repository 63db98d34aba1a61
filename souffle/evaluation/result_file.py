"""Files of results: one header that says what made them, and rows that are kept as they are made.

A file is one JSON object. Its header is the same for all that writes such files (the form is :data:`FORMAT`):

``command``, ``date``
    How it was made, and when in UTC (ISO 8601).
``souffle``, ``commit``, ``source``
    The version; the commit of the checkout, with ``+`` behind it where files differ from it, or null; and a digest of
    what of the package decides about results.
``device``
    The GPU that times were measured on, or null where nothing was measured.
``python``, ``cores``, ``versions``
    Of the machine that compiled, and of the packages that results depend on.
``options``
    What holds for all rows.
``results``
    The rows. Each has ``key``, by which it is known, and of a model that was read from a file ``sha256``.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import souffle
from souffle.codegen.nvcc import compiler_version, find_nvcc
from souffle.errors import DeviceError, NoGpuError, SouffleError
from souffle.runtime.cuda import Cuda
from souffle.schedule.log import log_folders
from souffle.source import package_digest
from souffle.whole_files import replace_file

__all__ = ["FORMAT", "ResultFile", "device_name", "result_header", "source_digest", "write_whole"]

FORMAT = "souffle-results-1"

_PACKAGE = Path(__file__).resolve().parents[1]
_PACKAGES = ("apache-tvm", "islpy", "numpy", "onnx", "onnxruntime", "torch")
_SAME = ("souffle", "source", "device", "options")
"""Rows of a file are of one of each."""
_SAYS = {
    "souffle": "of another version of Souffle",
    "source": "of another state of the compiler",
    "device": "of another device",
    "options": "with other options",
}


def device_name() -> str | None:
    """The name of the GPU at hand; None where none is usable."""
    try:
        return Cuda().name
    except (NoGpuError, DeviceError):
        return None


def source_digest() -> str:
    """A digest of the package's files and of the tuning logs that compilations look into."""
    return package_digest(*log_folders("auto"))


def result_header(options: Mapping[str, Any], device: str | None) -> dict[str, Any]:
    """A header without rows.

    Parameters
    ----------
    options : mapping
        What holds for all rows, as JSON has it.
    device : str or None
        The GPU that times are measured on.
    """
    return {
        "format": FORMAT,
        "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "souffle"), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "souffle": souffle.__version__,
        "commit": _commit(),
        "source": source_digest(),
        "device": device,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": _versions(),
        "options": dict(options),
    }


def _is_installed(name: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=name))


def _versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in _PACKAGES if _is_installed(name)}
    nvcc = find_nvcc()
    if nvcc is not None:
        release = [line for line in compiler_version(nvcc).splitlines() if "release" in line]
        found |= {"nvcc": release[0].rpartition("V")[2]} if release else {}
    return found


@cache
def _commit() -> str | None:
    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", _PACKAGE, *words], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # The package may lie in another project's checkout.
    if git("ls-files", "--error-unmatch", "pipeline.py") is None:
        return None
    commit = git("rev-parse", "--short", "HEAD")
    return commit and commit + ("+" if git("status", "--porcelain", "--untracked-files=no", ".") else "")


def write_whole(path: Path, text: str) -> None:
    """Replace a file once its new content is complete, so that what is cut short leaves the old one."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise SouffleError(f"{path} cannot be written: {error.strerror}") from error


class ResultFile:
    """Rows of results that a file keeps as they come, and those that it had.

    Parameters
    ----------
    path : Path or None
        None keeps rows in memory alone.
    header : mapping
        From :func:`result_header`.
    models : mapping of str to str
        The digest of each model by the name that rows have it under; rows of another digest are not taken over.
    force : bool
        Take nothing over, and replace a file that is none of results.

    Raises
    ------
    SouffleError
        If the file holds something else, or cannot be read.

    Attributes
    ----------
    anew : str
        Why rows of the file were not taken over; empty where none was left.
    """

    def __init__(
        self, path: Path | None, header: Mapping[str, Any], models: Mapping[str, str] | None = None, force: bool = False
    ) -> None:
        self.path, self.header, self.anew = path, dict(header), ""
        self._rows: dict[str, dict[str, Any]] = {}
        models = models or {}
        before = self._read(force)
        if before is None:
            return
        rows = before["results"]
        different = [name for name in _SAME if before.get(name) != self.header[name]]
        of = [row for row in rows if "model" in row]
        changed = sorted({row["model"] for row in of if models.get(row["model"], row["sha256"]) != row["sha256"]})
        if force:
            self.anew = "as --force asks for"
        elif different:
            self.anew = f"{_SAYS[different[0]]}{_difference(before, self.header, different[0])}"
        else:
            self._rows = {row["key"]: row for row in rows if row.get("model") not in changed}
            self.anew = f"{', '.join(changed)} has changed" if changed else ""
        if self.anew and rows:
            # What was made is not lost by asking for something else.
            write_whole(self.path.with_name(self.path.name + ".before"), self.path.read_text())

    def _read(self, force: bool) -> dict[str, Any] | None:
        if self.path is None or not self.path.exists():
            return None
        try:
            content = json.loads(self.path.read_text())
        except (OSError, ValueError) as error:
            if force and not isinstance(error, OSError):
                return None
            raise SouffleError(f"{self.path} is there and holds no results: {error}; --force replaces it") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            if force:
                return None
            raise SouffleError(f"{self.path} is there and holds no results of this command; --force replaces it")
        return content

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """In the order in which they came, or of :meth:`arrange`."""
        return tuple(self._rows.values())

    def row(self, key: str) -> dict[str, Any] | None:
        """The row of a key, where it is there."""
        return self._rows.get(key)

    def add(self, key: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a row, on disk before this returns."""
        self._rows[key] = kept = {"key": key, **row}
        self.save()
        return kept

    def arrange(self, keys: Iterable[str]) -> None:
        """Bring rows into an order, on disk too; those of other keys come after them as they are."""
        before = list(self._rows)
        first = {key: self._rows[key] for key in keys if key in self._rows}
        self._rows = {**first, **self._rows}
        if list(self._rows) != before:
            self.save()

    def save(self) -> None:
        """Write the file as it is now."""
        if self.path is not None:
            write_whole(self.path, json.dumps(self.header | {"results": list(self._rows.values())}, indent=1) + "\n")


def _difference(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> str:
    old, new = before.get(name), now[name]
    if name != "options" or not isinstance(old, dict):
        return f" ({old} before, {new} now)"
    other = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    return f" ({', '.join(f'{key}={old.get(key)} before, {new.get(key)} now' for key in other)})"
