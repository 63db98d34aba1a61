"""Files under docs/results/ that no table shows, and why they are there: docs/results/unused.json."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results_page.files import read_source

__all__ = ["unused_files"]

_OWN = {"changes.json", "unused.json"}


def unused_files(folder: Path, used: set[str]) -> list[str]:
    """What is wrong: files that are neither shown nor listed, and entries of the list that no file needs."""
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*.json")} - _OWN
    listed = read_source(folder, "unused.json").content.record("files")
    wrong = [
        f"{name} is shown by no table: name it in unused.json, with the reason" for name in there - used - {*listed}
    ]
    wrong += [
        f"unused.json lists {name}, which {'a table shows' if name in used else 'is not there'}"
        for name in listed
        if name in used or name not in there
    ]
    return sorted(wrong)
