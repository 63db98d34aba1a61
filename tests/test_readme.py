"""README.md: its first Python block prints what stands below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_first_example_prints_what_it_says() -> None:
    text = README.read_text()
    code, printed = re.search(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", text, re.DOTALL).groups()
    found = io.StringIO()
    with contextlib.redirect_stdout(found):
        exec(compile(code, str(README), "exec"), {})
    assert found.getvalue() == printed
