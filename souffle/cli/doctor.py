"""``souffle doctor``: what is here, what is missing, and whether the default target works."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap

from souffle.cli.output import Progress, write_json
from souffle.doctor import Diagnosis, Finding, examine

__all__ = ["doctor"]

_WIDTH = 120


def doctor(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command; the exit status is 1 if the default target does not work."""
    progress("looking, and compiling a small network")
    found = examine()
    progress.done()
    if arguments.json:
        write_json(dataclasses.asdict(found))
    else:
        print(_text(found))
    return 0 if found.works else 1


def _text(found: Diagnosis) -> str:
    width = max(len(one.name) for one in found.findings)
    lines = [line for one in found.findings for line in _lines(one, width)]
    return "\n".join(
        [
            *lines,
            "",
            f'target="auto" is "{found.target}": {found.why}',
            f"{'It works' if found.works else 'It does not work'}: {found.trial}",
        ]
    )


def _lines(one: Finding, width: int) -> list[str]:
    mark = "ok" if one.there else "MISSING" if one.needed else "-"
    head = f"{one.name.ljust(width)}  {mark.ljust(7)}  "
    words = one.found if one.there else f"{one.found}. For: {one.brings}. To have it: {one.install}"
    return textwrap.wrap(
        words, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
