"""Results as JSON, with the command and the state of the checkout that made them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["checkout_state", "kept_results", "save_results", "write_json"]


_TAKEN_OVER: dict[Path, dict[str, Any]] = {}
"""Of files whose results a campaign goes on with, the state of the checkout that the file names."""


def kept_results(
    path: str | Path | None, keep: Callable[[dict[str, Any]], bool] = lambda row: True
) -> list[dict[str, Any]]:
    """The results that a file holds, to go on with; none where there is no file.

    Parameters
    ----------
    path : path or None
    keep : callable
        Which of them stay; where none does, the file becomes one of this commit.
    """
    if not path or not Path(path).exists():
        return []
    content = json.loads(Path(path).read_text())
    rows = [row for row in content["results"] if keep(row)]
    if rows:
        _TAKEN_OVER[Path(path)] = {key: content[key] for key in ("commit", "committed", "recorded") if key in content}
    return rows


def save_results(path: str, program: str, results: list[dict[str, Any]], **about: Any) -> None:
    """Write results, the command, the date, the commit and the machine.

    Where a campaign goes on with results that the file had, it stays of the commit that it was of: a table is as old
    as its oldest row.

    Parameters
    ----------
    path : str
        The file to write.
    program : str
        How the program is called, such as ``"benchmarks.check_all"``.
    results : list of dict
    about : anything that JSON holds
        More facts of this run.
    """
    record = {
        "command": " ".join(["python -m", program, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        **_TAKEN_OVER.get(Path(path), checkout_state()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **about,
        "results": results,
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


@cache
def checkout_state() -> dict[str, str]:
    """The commit of this checkout, with ``+`` behind it where files differ from it, and when it was committed."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", Path(__file__).parent, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        commit, committed = git("log", "-1", "--format=%h %cI").split()
        return {
            "commit": commit + "+" * bool(git("status", "--porcelain", "--untracked-files=no")),
            "committed": committed,
        }
    except (OSError, subprocess.CalledProcessError):
        return {}


def write_json(path: Path, content: Any) -> None:
    """Replace a file only once its new content is complete, so that a run cut short leaves a readable one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1))
    part.replace(path)
