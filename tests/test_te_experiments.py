"""docs/te-experiments.md: each Python block prints the text block below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "te-experiments.md"
_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def test_the_notebook_prints_what_it_says(request: pytest.FixtureRequest) -> None:
    text = DOCUMENT.read_text()
    blocks = list(_BLOCK.finditer(text))
    assert len(blocks) == text.count("```python") > 10
    assert len([b for b in blocks if b["output"] is not None]) == text.count("```text") or _updates(request)
    namespace: dict[str, object] = {}
    pieces, end = [], 0
    for block in blocks:
        line = text.count("\n", 0, block.start()) + 1
        printed = io.StringIO()
        # Line numbers of an error are those of the document.
        code = compile("\n" * line + block["code"], str(DOCUMENT), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        found = "\n".join(part.rstrip() for part in printed.getvalue().splitlines())
        found += "\n" if found else ""
        pieces += [text[end : block.start()], f"```python\n{block['code']}```\n"]
        pieces += [f"\n```text\n{found}```\n"] if found else []
        end = block.end()
        if not _updates(request):
            assert found == (block["output"] or ""), f"line {line}: if that is meant, run pytest with --update-golden"
    if _updates(request):
        DOCUMENT.write_text("".join([*pieces, text[end:]]))


def _updates(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--update-golden")
