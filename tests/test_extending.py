"""docs/extending.md: its blocks, followed literally; each prints the text block below it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from souffle.errors import OptionError
from souffle.schedule.gpu import RULES, register_rule

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "extending.md"
_BLOCK = re.compile(
    r"^```(?P<language>python|sh)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE
)


def section(title: str) -> list[re.Match[str]]:
    """The Python and shell blocks below a heading that starts so, where they stand in the document."""
    text = DOCUMENT.read_text()
    (found,) = re.finditer(rf"^## {title}.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return list(_BLOCK.finditer(text, found.start(), found.end()))


def test_a_rule_from_outside_of_the_package() -> None:
    before, text = dict(RULES), DOCUMENT.read_text()
    blocks = section("A rule")
    assert len(blocks) >= 3
    namespace: dict[str, object] = {}
    try:
        for block in blocks:
            line = text.count("\n", 0, block.start()) + 1
            printed = io.StringIO()
            # Line numbers of an error are those of the document.
            code = compile("\n" * line + block["code"], str(DOCUMENT), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
            assert printed.getvalue() == (block["output"] or ""), f"line {line}"
        assert list(RULES) == list(before)
    finally:
        RULES.clear()
        RULES.update(before)


def test_a_rule_has_a_name_of_its_own_and_a_place() -> None:
    rule = RULES["window"]
    with pytest.raises(OptionError, match="already"):
        register_rule(rule, before="contraction")
    with pytest.raises(OptionError, match="is no rule; the rules are channel_owned, mma_contraction"):
        register_rule(rule, before="convolution")


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
    """In an empty folder, from the command line."""
    module, commands = section("A planner")
    (tmp_path / "quarters.py").write_text(module["code"])
    printed = run(commands["code"], tmp_path)
    level, _, launches, *_, result = next(line.split() for line in printed.splitlines() if line.startswith("V3"))
    assert (level, launches, result) == ("V3", "5", "ok"), printed


def test_a_fusion_planner_from_outside_of_the_package(tmp_path: Path) -> None:
    module, commands = section("A fusion planner")
    (tmp_path / "pairs.py").write_text(module["code"])
    printed = run(commands["code"], tmp_path)
    level, _, launches, *_, result = next(line.split() for line in printed.splitlines() if line.startswith("V0"))
    assert (level, launches, result) == ("V0", "7", "ok"), printed
