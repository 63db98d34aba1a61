"""Tables and the progress line: for terminals of any width, and plain where there is none."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.cells import cell_len

from souffle.cli.output import Progress, format_table, print_table

HEADER = ["variant", "launches", "predicted µs", "what it is", "written"]
ROWS = [["V4 without teams", 12, "1.5", "[bold]not markup[/]", "3 kB"], ["V0, xla-rules", 3, "-", "\x1b[31m→\x07", "-"]]
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize("width", [45, 60, 200])
def test_a_table_fits_its_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(HEADER, ROWS, "a title")
    text = _ESCAPE.sub("", screen.getvalue())
    assert all(cell_len(line) <= width for line in text.splitlines())
    for word in (*HEADER, "[bold]not markup[/]", "3 kB"):
        assert word in text
    # Each part of a table that was cut begins with the first column.
    parts = text.count("variant")
    assert parts == text.count("V4 without teams") == text.count("V0, xla-rules") and (parts == 1) == (width == 200)
    assert "\x07" not in text


def test_what_is_no_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    # Even where the environment asks for colours.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    print_table(HEADER, ROWS[:1])
    progress = Progress()
    progress.prefix = "model V0: "
    progress("lowering")
    progress.done()
    captured = capsys.readouterr()
    assert captured.out == format_table(HEADER, ROWS[:1]) + "\n"
    assert re.fullmatch(r"\[ +\d+\.\d s\] model V0: lowering\n", captured.err)


def test_the_line_of_a_terminal_moves_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "40")
    progress = Progress()
    for message in ("transforming", "a message that is longer than the terminal is wide"):
        progress(message)
    progress.done()
    shown = screen.getvalue()
    lines = [part for part in re.split(r"[\r\n]", _ESCAPE.sub("", shown)) if part.strip()]
    assert any("transforming" in line for line in lines) and all(cell_len(line) <= 40 for line in lines)
    assert shown.rstrip("\r\n").endswith(("\x1b[?25h", "\x1b[2K")) and "\x1b[?25h" in shown
    progress.done()


def test_an_interrupt_is_raised_again_by_the_next_message() -> None:
    progress = Progress(quiet=True)
    progress.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        progress("going on")
