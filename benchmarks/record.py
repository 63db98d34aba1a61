"""Results as JSON, with the command that made them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

__all__ = ["kept_results", "save_results", "write_json"]


def kept_results(path: str | Path | None) -> list[dict[str, Any]]:
    """The results that a file holds, to go on with; none where there is no file."""
    return json.loads(Path(path).read_text())["results"] if path and Path(path).exists() else []


def save_results(path: str, program: str, results: list[dict[str, Any]], **about: Any) -> None:
    """Write results, the command, the date and the machine.

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
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **about,
        "results": results,
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def write_json(path: Path, content: Any) -> None:
    """Replace a file only once its new content is complete, so that a run cut short leaves a readable one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1))
    part.replace(path)
