"""Certificates and mutants."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.results_page.files import Record, Source
from benchmarks.results_page.tables import Table, scientific, slashed, table

__all__ = [
    "certificates",
    "mutants",
    "mutants_of_flags",
    "mutants_of_prologues",
    "mutants_of_residence",
    "mutants_of_teams",
    "switches",
]


def certificates(*sources: Source) -> Table:
    """Verdicts, what was compared, and the seconds of it."""

    def row(one: Record) -> list[object]:
        facts = one.record("facts")
        return [
            *(one[key] for key in ("model", "size", "level", "precision", "verdict")),
            f"{one['proven']} of {one['kernels']}",
            *(facts[key] for key in ("grid barriers", "pairs of accesses compared")),
            *(f"{one.number(key):.1f}" for key in ("compile_seconds", "proof_seconds")),
        ]

    columns = (
        "model | size | level | precision | verdict | kernels proven | grid barriers | pairs of accesses | compile s | "
        "proof s"
    )
    return table(columns, (row(one) for source in sources for one in source.results))


def mutants(source: Source) -> Table:
    """Mutants of the tiny models by kind."""
    columns = (
        "mutation", "mutants", "change the result", "refuted", "by values alone", "unknown", "changed, not refuted",
        "grid barrier missing", "of these found",
    )  # fmt: skip
    kinds = source.content.records("by kind")
    rows = [[one[column] for column in columns] for one in kinds]
    if all(one["mutation"] != "all" for one in kinds):
        rows.append(["all", *(sum(int(one.number(column)) for one in kinds) for column in columns[1:])])
    return table(" | ".join(columns), rows)


_PARTS = {
    "flags: arrivals, waits, flags left": ("flags",),
    "calls that fill registers, and statements around them": ("calls that fill", "around calls that fill"),
    "functions that fill": ("functions that fill",),
    "functions that use": ("functions that use",),
    "residence (`mutation/residence.py`)": ("residence",),
}
_NETWORKS = {"a batch of rows": "rows"}


def mutants_of_flags(source: Source) -> Table:
    """Mutants of flags and of constants that stay, of those whose text compiles."""
    rows = []
    for name, parts in _PARTS.items():
        own = [one for one in source.results if one["part"] in parts and one["outcome"] != "stillborn"]
        networks = dict.fromkeys(_NETWORKS.get(one["network"], one["network"]) for one in own)
        changes = [one for one in own if one["outcome"] != "same"]
        verdicts = [one["verdict"] for one in own]
        missed = [one for one in changes if one["verdict"] != "REFUTED"]
        counts = (len(own), len(changes), verdicts.count("REFUTED"), verdicts.count("UNKNOWN"), len(missed))
        rows.append([name, ", ".join(networks), *counts])
    columns = "mutants of | networks | mutants | change the result | refuted | unknown | changed, not refuted"
    return table(columns, rows, right=range(2, 7))


def mutants_of_residence(source: Source) -> Table:
    """Recurrent networks whose constants stay."""
    same = ("same_refuted", "same_unknown", "same_proven")
    counted = ("mutants", "changing", "changing_refuted")
    rows: list[Sequence[object]] = [
        [
            one["network"],
            *(", ".join(map(str, one[key])) for key in ("tiles", "registers")),
            *(one[key] for key in counted),
            slashed(*(one[key] for key in same)),
        ]
        for one in source.results
    ]
    total = {key: sum(int(one.number(key)) for one in source.results) for key in (*counted, *same)}
    rows.append(["all", "", "", *(total[key] for key in counted), slashed(*(total[key] for key in same))])
    columns = (
        "network | tiles | registers | mutants | change the result | refuted of these | same bits: refuted / unknown / "
        "proven"
    )
    return table(columns, rows, right=range(3, 6))


def mutants_of_teams(source: Source) -> Table:
    """Blocks of several teams."""
    rows = []
    for one in source.results:
        if one["part"] != "mutants":
            continue
        counts = one.record("counts")
        name, _, teams = one.text("network").rpartition(", ")
        changes = sum(count for what, count in counts.items() if what.startswith("changed"))
        same = [counts.get(f"same, {verdict}", 0) for verdict in ("REFUTED", "PROVEN")]
        rows.append((name, int(teams), sum(counts.values()), changes, counts.get("changed, REFUTED", 0), *same))
    total = [sum(row[place] for row in rows) for place in range(2, 7)]
    cells = [(*row[:5], slashed(*row[5:])) for row in [*rows, ("all", "", *total)]]
    columns = "mutants of | teams | mutants | change the result | refuted of these | same bits: refuted / proven"
    return table(columns, cells, right=range(1, 5))


def mutants_of_prologues(source: Source) -> Table:
    """Copies that blocks start while they wait."""
    rows = []
    for one in source.results:
        if one["part"] != "mutants":
            continue
        counts = one.record("counts")
        changes = sum(count for what, count in counts.items() if what.startswith("changed"))
        same = [counts.get(f"same, {verdict}", 0) for verdict in ("REFUTED", "UNKNOWN", "PROVEN")]
        name = one.text("network")
        rows.append((name, sum(counts.values()), changes, counts.get("changed, REFUTED", 0), *same))
    total = [sum(row[place] for row in rows) for place in range(1, 7)]
    cells = [(*row[:4], slashed(*row[4:])) for row in [*rows, ("all", *total)]]
    columns = "mutants of | mutants | change the result | refuted of these | same bits: refuted / unknown / proven"
    return table(columns, cells, right=range(1, 4))


_MECHANISMS = ("chains", "running", "hidden panels", "normalizations", "with copies", "channel chains", "resident")


def switches(source: Source) -> Table:
    """V4 with each switch off: texts, what they hold at most, errors, mutants."""
    rows = []
    for name in dict.fromkeys(one["network"] for one in source.results):
        own = [one for one in source.results if one["network"] == name]
        ran = [one for one in own if "as" not in one]
        most = [max(one.get(mechanism, 0) for one in own) for mechanism in _MECHANISMS]
        held = f"{most[0]}, {most[1]}, {most[2]}, {most[3]} ({most[4]}), {most[5]}, {most[6]}"
        error = scientific(max(one.number("error") for one in ran if "error" in one))
        made, refuted = (sum(one.get(what, 0) for one in ran) for what in ("mutants", "refuted"))
        rows.append([name, f"{len(ran)} of {len(own)}", held, error, f"{refuted} of {made}"])
    columns = (
        "network | texts of configurations | chains, running, hidden panels, normalizations (with copies), "
        "channel chains, "
        "resident, at most | largest error | mutants refuted"
    )
    return table(columns, rows, right=(3,))
