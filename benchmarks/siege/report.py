"""The tables of a siege."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from benchmarks.siege.trial import BAD, Trial
from souffle.cli.output import format_table

__all__ = ["report"]

_EXAMPLES = 6
_NUMBERS = re.compile(r"\d+")


def report(trials: Sequence[Trial]) -> str:
    """Cases by class, by mistake and by form; the share of right ones that are not proven, and why."""
    kinds = Counter(trial.kind for trial in trials)
    lines = [f"{len(trials)} cases, {sum(t.seconds for t in trials):.0f} s", ""]
    lines.append(format_table(("class", "cases"), sorted(kinds.items(), key=lambda item: -item[1])))
    right = [t for t in trials if t.right and t.kind not in ("generator", "slow", "stillborn")]
    rejected = [t for t in right if t.kind == "false reject"]
    lines += ["", f"right and not proven: {len(rejected)} of {len(right)}, {_share(len(rejected), len(right))}"]
    other = [t for t in right if t.kind == "values reject"]
    lines += [f"right, proven, and values not: {len(other)} of {len(right)}, {_share(len(other), len(right))}"]
    lines += _reasons("false rejects", [(t.reason, t.seed) for t in rejected])
    lines += _reasons("values rejects", [(t.values_reason, t.seed) for t in other])
    for kind in (*BAD, "undefined, refuted by values", "slow"):
        lines += _reasons(
            kind, [(f"{' '.join(t.mistakes)}: {t.detail or t.reason}", t.seed) for t in trials if t.kind == kind]
        )
    rows: dict[str, Counter[str]] = {}
    for trial in trials:
        if len(trial.mistakes) == 1:
            rows.setdefault(trial.mistakes[0].split("/")[0], Counter())[trial.kind] += 1
    if rows:
        columns = list(dict.fromkeys(k for c in rows.values() for k in c))
        table = [(kind, sum(c.values()), *(c[k] for k in columns)) for kind, c in sorted(rows.items())]
        lines += ["", format_table(("one mistake", "cases", *columns), table)]
    return "\n".join(lines)


def _share(count: int, of: int) -> str:
    return f"{100 * count / max(of, 1):.1f} %"


def _reasons(title: str, found: Sequence[tuple[str, int]]) -> list[str]:
    if not found:
        return []
    classes: dict[str, list[int]] = {}
    for reason, seed in found:
        classes.setdefault(_NUMBERS.sub("#", reason)[:160].replace("\n", " "), []).append(seed)
    lines = ["", f"{title}:"]
    for reason, seeds in sorted(classes.items(), key=lambda item: -len(item[1])):
        lines.append(f"  {len(seeds):5}  {reason}  [{' '.join(map(str, seeds[:_EXAMPLES]))}]")
    return lines
