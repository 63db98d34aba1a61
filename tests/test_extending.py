"""docs/extending.md: each Python block runs, in order, and prints the text block below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from souffle.errors import OptionError
from souffle.schedule.gpu import RULES, register_rule

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "extending.md"
_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def test_the_tutorial_does_what_it_says() -> None:
    before, text = dict(RULES), DOCUMENT.read_text()
    blocks = list(_BLOCK.finditer(text))
    assert len(blocks) == text.count("```python") >= 3
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
    with pytest.raises(OptionError, match="is no rule; the rules are mma_contraction"):
        register_rule(rule, before="convolution")
