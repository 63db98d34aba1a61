"""What a transformation changed, as text: the listings before and after, line by line, and the decisions."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

from souffle.decision import Decision
from souffle.program import TEProgram

__all__ = ["compare"]


def compare(
    before: TEProgram, after: TEProgram, decisions: Iterable[Decision] = (), *, context: int | None = None
) -> str:
    """Two listings as one: lines of both, of `before` only (``-``) and of `after` only (``+``).

    Parameters
    ----------
    before, after : TEProgram
    decisions : iterable of Decision, optional
        Written below, each with its reason.
    context : int, optional
        How many lines that both have are shown around a difference; all of them where not given.

    Returns
    -------
    str
        Begins with the numbers of TEs; the listings are left out where they are equal. The same for the same programs
        in every run.
    """
    old, new = str(before).splitlines(), str(after).splitlines()
    lines = [f"{_count(before)} → {_count(after)}"]
    if old == new:
        return "\n".join([f"{lines[0]}, unchanged", *map(str, decisions)])
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    for number, (kind, start, end, new_start, new_end) in enumerate(blocks):
        if kind == "equal":
            near = old[start:end]
            if context is not None:
                near = _near(near, context if number else 0, context if number < len(blocks) - 1 else 0)
            lines += [f"  {line}" for line in near]
            continue
        lines += [f"- {line}" for line in old[start:end]]
        lines += [f"+ {line}" for line in new[new_start:new_end]]
    return "\n".join([*lines, *map(str, decisions)])


def _count(program: TEProgram) -> str:
    count = len(program.tes)
    return f"{count} TE" if count == 1 else f"{count} TEs"


def _near(same: list[str], head: int, tail: int) -> list[str]:
    """The first and last of lines that both listings have."""
    if len(same) <= head + tail + 1:
        return same
    return [*same[:head], f"… {len(same) - head - tail} lines alike", *same[len(same) - tail :]]
