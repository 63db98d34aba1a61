"""What became of the cases: kept in a file to go on from, in sum, and by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.campaign import Record, RecordFile
from benchmarks.onnx_suite.cases import KINDS
from benchmarks.onnx_suite.outcomes import BAD, OUTCOMES, PASSED, CaseResult, Subject
from souffle.cli.output import format_table
from souffle.errors import Refusal

__all__ = ["WORDS", "by_operator", "result_file", "results_in", "summary", "totals"]

WORDS = {"constants": "passed with parameters as constants"}
"""Outcomes whose names are not what people say."""


def result_file(path: Path | None, setting: Mapping[str, Any], again: Sequence[str] = ()) -> RecordFile:
    """The results of the engines, in a file where one is given.

    Parameters
    ----------
    path : path or None
    setting : mapping
        How the cases are run; results of another setting are not gone on with.
    again : sequence of str
        Outcomes that are forgotten, so that these cases run again.
    """
    file = RecordFile(path, lambda record: (record["engine"], record["name"]), setting)
    file.forget(lambda record: record["outcome"] in again)
    return file


def results_in(
    records: Mapping[tuple[str, str], Record], engines: Iterable[str], names: Sequence[str]
) -> dict[str, dict[str, CaseResult]]:
    """By engine and name, in the order of the names, those that there are."""
    return {
        engine: {name: _result(records[engine, name]) for name in names if (engine, name) in records}
        for engine in engines
    }


def _result(record: Record) -> CaseResult:
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
    del fields["engine"]
    return CaseResult(**fields)


def summary(results: Mapping[str, Mapping[str, CaseResult]], subjects: Mapping[str, Subject], *, refusals: bool) -> str:
    """A table of the outcomes, why cases were refused, and all cases that are wrong or worse."""
    rows = []
    for engine, found in results.items():
        counts = Counter((subjects[name].kind, result.outcome) for name, result in found.items())
        for kind in _kinds(subjects):
            rows.append([f"{engine}, {kind}", *(counts[kind, outcome] for outcome in OUTCOMES)])
        sums = Counter(result.outcome for result in found.values())
        rows.append([f"{engine}, all", *(sums[outcome] for outcome in OUTCOMES)])
    lines = [format_table(["", *OUTCOMES], rows)]
    own = results.get("souffle", {}).values()
    folded = sum(result.folded for result in own if result.outcome == "constants")
    lines += [f"Of those with parameters as constants, {folded} have nothing left to compute when they run."]
    proven = Counter(result.certificate.partition(":")[0] for result in own if result.certificate)
    lines += [f"certificates: {', '.join(f'{count} {verdict}' for verdict, count in proven.items())}"] * bool(proven)
    lines += [f"{result.name}: {result.certificate}" for result in own if ":" in result.certificate]
    kinds = Counter(result.refusal for result in own if result.outcome == "refused")
    lines += [f"refused: {count:4} {Refusal[kind].value}" for kind, count in kinds.most_common()]
    for engine, found in results.items():
        shown = ("inexact", *BAD, *(("refused",) if refusals else ())) if engine == "souffle" else ()
        lines += [f"{o}: {r.name}: {r.message}" for o in shown for r in found.values() if r.outcome == o]
    return "\n".join(lines)


def _kinds(subjects: Mapping[str, Subject]) -> list[str]:
    return [kind for kind in KINDS if any(subject.kind == kind for subject in subjects.values())]


def by_operator(
    results: Mapping[str, Mapping[str, CaseResult]], subjects: Mapping[str, Subject]
) -> dict[str, dict[str, Any]]:
    """Counts of each operator, by its name with its domain: what a run says of it.

    Returns
    -------
    dict of str to dict
        ``cases``; how many have each outcome; ``refusals``, how many of each kind; ``types``, the element types that
        pass; ``extern``, whether it was a kernel of its own; ``ort``, how many ONNX Runtime passes.
    """
    names: dict[str, list[str]] = {}
    for name in results["souffle"]:
        subject = subjects[name]
        label = f"{subject.domain}::{subject.operator}" if subject.domain else subject.operator
        names.setdefault(label, []).append(name)
    return {label: _record(results, subjects, names[label]) for label in sorted(names)}


def _record(
    results: Mapping[str, Mapping[str, CaseResult]], subjects: Mapping[str, Subject], names: Sequence[str]
) -> dict[str, Any]:
    own = [results["souffle"][name] for name in names]
    outcomes = Counter(result.outcome for result in own)
    types = {subjects[result.name].element_type for result in own if result.outcome in PASSED}
    record: dict[str, Any] = {"cases": len(own)} | {key: outcomes[key] for key in OUTCOMES if outcomes[key]}
    refusals = Counter(result.refusal for result in own if result.outcome == "refused")
    if refusals:
        record["refusals"] = dict(sorted(refusals.items()))
    if types - {""}:
        record["types"] = _sorted_types(types - {""})
    if any(result.extern for result in own):
        record["extern"] = True
    if "ort" in results:
        record["ort"] = sum(results["ort"][name].outcome == "passed" for name in names if name in results["ort"])
    return record


def _sorted_types(types: Iterable[str]) -> list[str]:
    """NumPy's own first, by kind and size."""
    return sorted(types, key=lambda name: (not _is_usual(name), name.rstrip("0123456789"), len(name), name))


def _is_usual(name: str) -> bool:
    return name == "string" or np.dtype(name).isbuiltin == 1


def totals(results: Mapping[str, CaseResult], subjects: Mapping[str, Subject]) -> dict[str, dict[str, int]]:
    """How many cases of each kind have each outcome."""
    counts: dict[str, Counter[str]] = {}
    for name, result in results.items():
        counts.setdefault(subjects[name].kind, Counter())[result.outcome] += 1
    return {kind: {key: counts[kind][key] for key in OUTCOMES if counts[kind][key]} for kind in KINDS if kind in counts}
