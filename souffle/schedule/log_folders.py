"""Where tuning logs are looked for; known without importing TVM."""

from __future__ import annotations

import os
from pathlib import Path

from souffle.errors import OptionError

__all__ = [
    "ARRANGEMENTS",
    "LOG_VARIABLE",
    "METASCHEDULE_FILES",
    "RECORDS",
    "TRIED",
    "WORKLOADS",
    "log_folders",
    "shipped_log",
]

LOG_VARIABLE = "SOUFFLE_TUNING_LOGS"
"""The environment variable with folders of logs, separated as in ``PATH``."""

WORKLOADS, RECORDS, TRIED, ARRANGEMENTS = "workloads.jsonl", "records.jsonl", "tried.jsonl", "arrangements.jsonl"
"""The files of an architecture's folder."""

METASCHEDULE_FILES = ("database_workload.json", "database_tuning_record.json")
"""The names that ``meta_schedule.database.JSONDatabase(work_dir=...)`` gives its tables of the same."""


def shipped_log() -> Path:
    """The folder of the logs that come with Souffle: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "tuning_logs"
    return inside if inside.is_dir() else package.parent / "tuning_logs"


def log_folders(option: str | os.PathLike | None) -> tuple[Path, ...]:
    """The folders that the option ``tuning_log`` means.

    Parameters
    ----------
    option : path, "auto" or None
        ``"auto"`` for those of ``$SOUFFLE_TUNING_LOGS`` and the one that ships; ``None`` for none.

    Raises
    ------
    OptionError
        If a folder was named that is not there.
    """
    if option is None:
        return ()
    if option != "auto":
        folder = Path(option)
        if not folder.is_dir():
            raise OptionError(f"tuning_log={str(folder)!r} is no folder; souffle tune MODEL --log {folder} makes one")
        return (folder,)
    named = [Path(part) for part in os.environ.get(LOG_VARIABLE, "").split(os.pathsep) if part]
    return (*(folder for folder in named if folder.is_dir()), *(f for f in (shipped_log(),) if f.is_dir()))
