"""docs/extending.md: its blocks, followed literally from an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "extending.md"
_BLOCK = re.compile(r"^```(?P<language>python|sh)\n(?P<code>.*?)^```\n", re.DOTALL | re.MULTILINE)


def section(title: str) -> list[tuple[str, str]]:
    """The blocks of a section, each with its language."""
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    return [(block["language"], block["code"]) for block in _BLOCK.finditer(text)]


def run(commands: str, folder: Path) -> str:
    """What the commands of a block print; they find Souffle as it is installed for these tests."""
    printed = ""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in commands.splitlines():
        words = command.split()
        assert words[0] == "python"
        done = subprocess.run(
            [sys.executable, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=250
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        printed += done.stdout
    return printed


def test_a_planner_from_outside_of_the_package(tmp_path: Path) -> None:
    (_, module), (_, commands), *_ = section("A planner of your own")
    (tmp_path / "quarters.py").write_text(module)
    printed = run(commands, tmp_path)
    level, _, launches, *_, result = next(line.split() for line in printed.splitlines() if line.startswith("V3"))
    assert (level, launches, result) == ("V3", "9", "ok"), printed
