"""docs/operators.md, from docs/results/onnx_suite.json and the operators that the frontend has code for.

``python -m benchmarks.onnx_suite.operators_page`` writes the page again; ``python -m benchmarks.onnx_suite --record``
runs the suite, writes the results, and then the page.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from benchmarks.onnx_suite.cases import KINDS, SEVERAL
from benchmarks.onnx_suite.outcomes import BAD, OUTCOMES, PASSED, CaseResult, Subject
from benchmarks.onnx_suite.results import WORDS, by_operator, totals
from benchmarks.record import checkout_state
from souffle.errors import Refusal
from souffle.frontend.operators import own_operators

__all__ = ["PAGE", "RECORD", "operators_page", "record_part", "record_run", "write_page"]

_DOCS = Path(__file__).resolve().parents[2] / "docs"
RECORD = _DOCS / "results" / "onnx_suite.json"
PAGE = _DOCS / "operators.md"
_TARGETS = {"cpu": "CPU", "cuda": "CUDA text"}


def record_run(
    target: str,
    setting: Mapping[str, Any],
    results: Mapping[str, Mapping[str, CaseResult]],
    subjects: Mapping[str, Subject],
) -> None:
    """Put a run of all cases into the record, in the place of an earlier one for the target."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"runs": {}, "operators": {}}
    own = results["souffle"]
    folded = sum(result.folded for result in own.values() if result.outcome == "constants")
    today = datetime.date.today().isoformat()
    if target == "cpu":
        # The run that docs/results.md shows says what the file is of.
        record = {"date": today, **checkout_state(), "runs": record["runs"], "operators": record["operators"]}
    record["runs"][target] = {
        "date": today,
        "onnx": onnx.__version__,
        **setting,
        "folded": folded,
        "totals": totals(own, subjects),
    }
    if "ort" in results:
        record["runs"]["ort"] = {"onnxruntime": onnxruntime.__version__, "totals": totals(results["ort"], subjects)}
    operators = record["operators"]
    for entry in operators.values():
        entry.pop(target, None)
    for label, counts in by_operator(results, subjects).items():
        entry = operators.setdefault(label, {})
        ort = counts.pop("ort", None)
        entry[target] = counts
        if ort is not None:
            entry["ort"] = ort
    _write_record(record)


def record_part(
    target: str, results: Mapping[str, Mapping[str, CaseResult]], subjects: Mapping[str, Subject]
) -> list[str]:
    """Put a run of some cases into the record: of the operators of which it has all, and which are of one kind.

    Parameters
    ----------
    target : str
    results : mapping
    subjects : mapping
        Of all cases.

    Returns
    -------
    list of str
        The operators whose figures were replaced.
    """
    record, own = json.loads(RECORD.read_text()), results["souffle"]
    replaced = []
    cases: dict[tuple[str, str], set[str]] = {}
    for name in subjects:
        cases.setdefault((subjects[name].domain, subjects[name].operator), set()).add(name)
    for (domain, operator), names in cases.items():
        label, kinds = f"{domain}::{operator}" if domain else operator, {subjects[name].kind for name in names}
        entry = record["operators"].get(label, {}).get(target)
        if entry is None or not names <= own.keys() or len(kinds) > 1 or entry["cases"] != len(names):
            continue
        part = {"souffle": {name: own[name] for name in names}}
        (kind,) = kinds
        total, counts = Counter(record["runs"][target]["totals"][kind]), by_operator(part, subjects)[label]
        total.subtract({outcome: entry.get(outcome, 0) for outcome in OUTCOMES})
        total.update({outcome: counts.get(outcome, 0) for outcome in OUTCOMES})
        record["runs"][target]["totals"][kind] = {key: total[key] for key in OUTCOMES if total[key]}
        record["operators"][label][target] = counts
        replaced.append(label)
    _write_record(record)
    return replaced


def _write_record(record: Mapping[str, Any]) -> None:
    operators = record["operators"]
    operators = {label: operators[label] for label in sorted(operators) if operators[label].keys() & _TARGETS.keys()}
    lines = [f"  {json.dumps(label)}: {json.dumps(entry)}" for label, entry in operators.items()]
    runs = json.dumps(record["runs"], indent=1).replace("\n", "\n ")
    header = [key for key in record if key not in ("runs", "operators")]
    about = [f" {json.dumps(key)}: {json.dumps(record[key])},\n" for key in header]
    about.append(f' "runs": {runs},\n "operators": {{\n')
    RECORD.write_text("{\n" + "".join(about) + ",\n".join(lines) + "\n }\n}\n")


def write_page() -> None:
    """Write docs/operators.md."""
    PAGE.write_text(operators_page(json.loads(RECORD.read_text()), own_operators()))


def operators_page(record: Mapping[str, Any], own: Mapping[str, tuple[bool, bool]]) -> str:
    """The page's text.

    Parameters
    ----------
    record : mapping
        What docs/results/onnx_suite.json holds.
    own : mapping
        As :func:`souffle.frontend.operators.own_operators` gives it.
    """
    runs, operators = record["runs"], record["operators"]
    targets = [target for target in _TARGETS if target in runs]
    parts = [_INTRODUCTION, _sums(runs, targets), _refusals(operators, targets), _externs(operators, targets)]
    return "\n\n".join([*filter(None, parts), _operators(operators, targets, own, "ort" in runs)]) + "\n"


_INTRODUCTION = """# ONNX's operators

This page is written by `python -m benchmarks.onnx_suite --against ort --record` (and with `--target cuda` for the other
column), which runs the conformance suite that the onnx package brings: cases of single operators (`node`), of a few
(`simple`, `pytorch-operator`), and of whole networks (`pytorch-converted`, `light`). A case passes if every output is
right by ONNX's own comparison and tolerance. CUDA text runs on the CPU, thread by thread.

Some cases give axes, sizes, conditions and other things on which a program depends as inputs. A network has fixed
shapes, so these are refused as they are, with the names of the inputs that are needed, and pass *with parameters as
constants*: `souffle.compile(model, constants={"axes": ...})`.

## Results that are as long as data makes them

NonZero, Compress, Unique and NonMaxSuppression select something, and nobody knows how much before the network runs.
Inside it the result has room for all that there may be, and a count says how many positions along an axis are there.
What the network returns is cut to that, on every target; `net.outputs` shows the room, as in `<=12`. Where outputs stay
on a GPU, the call reads the counts, and so waits for the device. Such an output lies in a part of its memory: one that
is shorter along an axis that is not its first has strides, as DLPack says them, and must be made contiguous before
another network takes it.

- NonZero has room for all elements, of which there may be 65536.
- Compress has room for the axis, or all elements without one, or for the condition where that is shorter.
- Unique has room for the axis, or all elements without one; of rows there may be 8192. NaN is equal to itself, and the
  largest, as in NumPy.
- NonMaxSuppression has room for images x classes x boxes, or `max_output_boxes_per_class` where that is less. It takes
  a step for each box of a class, at most 1024, from V3 on as a loop. A score that is NaN selects nothing.

An operator reads such a result where what is behind the end cannot reach what is there:

- element by element, with values of the same count or an extent of one: arithmetic, comparisons, activations, Cast,
  Where, Clip, Expand;
- Transpose, Unsqueeze, Squeeze of other axes, Flatten, and Reshape where -1 or 0 tells the axis and what is there stays
  in front; Slice from the front on, Concat, Split and Tile along other axes;
- Gather, GatherElements and GatherND by such indices, and along other axes;
- MatMul and Gemm on rows and columns; Softmax, LayerNormalization, TopK and OneHot along other axes; CumSum from the
  front;
- ReduceSum, ReduceMean, ReduceMax, ReduceMin, ReduceProd, ReduceL1, ReduceL2, ReduceSumSquare, ReduceLogSum, ArgMax and
  ArgMin, over this axis too. The mean of nothing is NaN, and the index of the largest of nothing 0;
- Shape and Size, which give the count, and NonZero, Compress, Unique and NonMaxSuppression again;
- functions, of the model or of ONNX's definition, that are made of these.

All others are refused by name: none reads what is behind the end. Two selections by one tensor have the same count;
others may not meet."""


def _sums(runs: Mapping[str, Any], targets: Sequence[str]) -> str:
    found = [outcome for outcome in OUTCOMES if any(_count(run["totals"], "all", outcome) for run in runs.values())]
    outcomes = sorted({*found, *PASSED, "refused", "wrong"}, key=OUTCOMES.index)
    rows = [
        [f"{_engine(runs, engine)}, {kind}", *(str(_count(runs[engine]["totals"], kind, o)) for o in outcomes)]
        for engine in [*targets, *(["ort"] if "ort" in runs else [])]
        for kind in _kinds(runs, engine)
    ]
    lines = ["## In sum", "", *_table(["", *(WORDS.get(o, o) for o in outcomes)], rows), ""]
    for target in targets:
        run = runs[target]
        lines.append(
            f"{_TARGETS[target]}: {run['date']}, onnx {run['onnx']}, level {run['level']}. Of the cases with "
            f"parameters as constants {run['folded']} have nothing left to compute when they run."
        )
    if "inexact" in outcomes:
        lines.append(
            "*Inexact* are cases whose expected values are: by an evaluation in double precision the outputs are right "
            "and what was to be expected is not, by the same tolerance; it is off by no more than one rounding of the "
            "largest value in single precision."
        )
    if "ort" in runs:
        lines.append(
            "What ONNX Runtime raises an error about counts as refused; types that NumPy lacks are fed as weights."
        )
    return "\n".join(lines)


def _kinds(runs: Mapping[str, Any], target: str) -> list[str]:
    kinds = [kind for kind in KINDS if kind in runs[target]["totals"]]
    return [*kinds, "all"] if len(kinds) > 1 else kinds


def _count(counts: Mapping[str, Mapping[str, int]], kind: str, outcome: str) -> int:
    return sum(found.get(outcome, 0) for name, found in counts.items() if kind in (name, "all"))


def _engine(runs: Mapping[str, Any], target: str) -> str:
    return f"ONNX Runtime {runs['ort']['onnxruntime']}" if target == "ort" else _TARGETS[target]


def _refusals(operators: Mapping[str, Any], targets: Sequence[str]) -> str:
    rows = []
    for kind in Refusal:
        counts = {
            target: {label: _refused(entry, target, kind) for label, entry in operators.items()} for target in targets
        }
        labels = [label for label in operators if any(counts[target][label] for target in targets)]
        if labels:
            sums = [str(sum(counts[target].values())) for target in targets]
            rows.append([kind.value, *sums, ", ".join(labels)])
    rows.sort(key=lambda row: -int(row[1]))
    header = ["why", *(_TARGETS[target] for target in targets), "operators"]
    return "\n".join(["## What is refused, and why", "", *_table(header, rows)])


def _refused(entry: Mapping[str, Any], target: str, kind: Refusal) -> int:
    return entry.get(target, {}).get("refusals", {}).get(kind.name, 0)


def _externs(operators: Mapping[str, Any], targets: Iterable[str]) -> str:
    found = sorted({label for label, entry in operators.items() for t in targets if entry.get(t, {}).get("extern")})
    if not found:
        return ""
    words = (
        "No tensor expression gives these, in some of their forms or in all, and TVM's own implementation of them is a "
        "kernel of its own (paper, §9): "
    )
    return f"## Kernels of their own\n\n{words}{', '.join(found)}."


def _operators(
    operators: Mapping[str, Any], targets: Sequence[str], own: Mapping[str, tuple[bool, bool]], ort: bool
) -> str:
    lines = [
        "## Operator by operator",
        "",
        "*n + m of k*: n pass, m more with parameters as constants, of k cases. Types are those of a case's first "
        "input (of its first output, where it has none), in cases that pass. *here*: an operator has a tensor "
        "expression of our own, or its nodes are taken apart into others; without, TVM's importer or ONNX's definition "
        "gives it.",
        "",
    ]
    header = [
        "operator",
        "here",
        "types",
        *(_TARGETS[target] for target in targets),
        *(["ONNX Runtime"] if ort else []),
    ]
    names = sorted({*operators, *own}, key=lambda label: (label == SEVERAL, "::" in label, label))
    rows = [_row(label, operators.get(label, {}), targets, own, ort) for label in names]
    return "\n".join([*lines, *_table(header, rows)])


def _row(
    label: str, entry: Mapping[str, Any], targets: Sequence[str], own: Mapping[str, tuple[bool, bool]], ort: bool
) -> list[str]:
    expression, taken_apart = own.get(label, (False, False))
    here = " and ".join(["expression"] * expression + ["others"] * taken_apart)
    types = dict.fromkeys(name for target in targets for name in entry.get(target, {}).get("types", ()))
    counts = [_passed(entry.get(target)) for target in targets]
    return [label, here, ", ".join(types), *counts, *([str(entry.get("ort", ""))] if ort else [])]


def _passed(counts: Mapping[str, Any] | None) -> str:
    if counts is None:
        return "no case"
    more = f" + {counts['constants']}" if "constants" in counts else ""
    bad = "".join(f", {counts[outcome]} {outcome}" for outcome in BAD if outcome in counts)
    return f"{counts.get('passed', 0)}{more} of {counts['cases']}{bad}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
    write_page()
