"""The table at the end of a run."""

from __future__ import annotations

from collections import Counter, defaultdict

from benchmarks.fuzz.targets import FAILURES, OUTCOMES, failure_class
from souffle.cli.output import format_table

__all__ = ["report"]

_EXAMPLES = 4


def report(records: list[dict]) -> str:
    """Outcomes for each target, failures by class, what certificates left open, refusals, operators and time."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    classes: dict[str, list[str]] = defaultdict(list)
    refusals: dict[str, list[str]] = defaultdict(list)
    unknown: dict[str, list[str]] = defaultdict(list)
    seconds: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    for record in records:
        operators.update(record["generate"].get("operators", {}).keys())
        seconds["generate"] += record["generate"].get("seconds", 0.0)
        for target, outcome in record["outcomes"].items():
            kind = outcome["kind"]
            counts[target][kind] += 1
            counts[target][outcome.get("verdict", "")] += 1
            seconds[target] += outcome.get("seconds", 0.0)
            where = f"{record['seed']}/{target}"
            if kind in FAILURES:
                classes[failure_class(target, kind, outcome["detail"])].append(where)
            elif kind == "refused":
                refusals[failure_class(target, kind, outcome["detail"])].append(where)
            for reason in outcome.get("undecided", ())[:1]:
                unknown[failure_class(target, "UNKNOWN", reason)].append(where)
    kinds = [kind for kind in (*OUTCOMES, "PROVEN", "UNKNOWN") if any(c[kind] for c in counts.values())]
    header = ("target", "networks", *kinds, "s each")
    rows = []
    for target, count in counts.items():
        total = sum(count[kind] for kind in OUTCOMES)
        rows.append((target, total, *(count[kind] for kind in kinds), f"{seconds[target] / max(total, 1):.2f}"))
    lines = [f"{len(records)} networks; {sum(seconds.values()):.0f} s in workers", "", format_table(header, rows)]
    for title, found in (("failures", classes), ("certificates UNKNOWN", unknown), ("refusals", refusals)):
        if found:
            lines += ["", f"{title}:"]
        for name, places in sorted(found.items(), key=lambda item: -len(item[1])):
            lines.append(f"  {len(places):5}  {name}  [{' '.join(places[:_EXAMPLES])}]")
    histogram = ", ".join(f"{name} {count}" for name, count in operators.most_common())
    lines += ["", f"networks with each of {len(operators)} operators: {histogram}"]
    return "\n".join(lines)
