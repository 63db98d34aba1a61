"""What the files of GPU runs say of whole networks, in one plain form that ships with the package.

``python -m benchmarks.gpu_records`` reads ``docs/results/gpu-*.json``, of which those of three early runs have forms of
their own and all others are what ``benchmarks.gpu_host run`` writes, and makes
``souffle/evaluation/data/gpu_records.json``: one record for each network and peer that was timed, and for each kernel
and pair of HFuse's, with device, date and file. ``souffle reproduce`` shows the latest of each where no GPU is. A test
holds the shipped file equal to what this makes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_plan import ablation_labels, is_own
from souffle.benchmark.peer import GRAPH
from souffle.benchmark.report import OURS, BenchmarkReport, BenchmarkRow, report_of
from souffle.evaluation.gpu_records import RECORDS

__all__ = ["collected", "main"]

_FOLDER = Path(__file__).resolve().parents[1] / "docs" / "results"
_NETWORK = re.compile(
    r"(?P<model>[a-z0-9_]+(?:-train)?)(?:-paper)?-(?P<precision>fp32|mixed|tf32x3|tf32)-"
    r"(?P<what>V\d|eager|inductor|autotuned)(?:-(?P<variant>counter|flags))?$"
)
"""As the runs name what they time; other endings, such as ``-unasked``, are experiments of their own."""


def collected() -> list[dict[str, Any]]:
    """All records of all files, files in the order of their runs."""
    records: list[dict[str, Any]] = []
    for path in sorted(_FOLDER.glob("gpu-*.json"), key=lambda path: (json.loads(path.read_text())["date"], path.stem)):
        content = json.loads(path.read_text())
        date = content["date"].partition("T")[0]
        device = content["steps"]["device"]["result"]["name"] if "steps" in content else content["device"]
        about = {"device": device, "date": date, "file": path.name}
        found = _of_gpu_host(content) if "steps" in content else _records(content)
        records += [{**record, **about} for record in found]
    return records


def _of_gpu_host(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of a file as ``benchmarks.gpu_host run`` writes it: networks of paper size, and peers of ``souffle bench``.

    Raises
    ------
    ValueError
        If it is of a rehearsal, whose times mean nothing.
    """
    if content["rehearsal"]:
        raise ValueError(f"results of a rehearsal are no records: {content['command']}")
    built, steps = content.get("built") or {}, content["steps"]
    for name, case in content["cases"].items():
        # A variant is timed beside what it is a variant of. Who is wrong gets no number.
        labels = ["latency"] if is_own(case) else ablation_labels(steps)
        timed = next((steps[f"{label} {name}"] for label in labels if f"{label} {name}" in steps), {})
        right = steps.get(f"check {name}", {}).get("status") == timed.get("status") == "ok"
        if case["size"] != "paper" or not right:
            continue
        result = timed["result"]
        record = {"kind": "network", "level": case["level"], "model": case["model"], "precision": case["precision"]}
        record |= {"graph_us": round(result["graph"]["median_us"], 2)}
        record |= {key: result[key] for key in ("launches", "grid_syncs")}
        record |= {} if is_own(case) else {"variant": case["label"]}
        yield record | ({"commit": built["commit"]} if built.get("commit") else {})
    for key, entry in steps.items():
        case = content["cases"].get(key.rpartition(" ")[2], {})
        if key.startswith("bench ") and entry["status"] == "ok" and case.get("size") == "paper":
            yield from _peers(report_of(entry["result"]["report"]), case)


def _peers(report: BenchmarkReport, case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of each peer its CUDA graph, or its calls where it is timed as these alone."""
    rows: dict[str, dict[str, BenchmarkRow]] = {}
    for row in report.rows:
        if row.name != OURS and "warm" in row.times:
            rows.setdefault(row.name, {})[row.form] = row
    for peer, forms in rows.items():
        row = forms.get(GRAPH) or next(iter(forms.values()))
        record = {"kind": "peer", "peer": peer, "model": case["model"], "precision": case["precision"]}
        yield record | {"graph_us": round(row.times["warm"].median_us, 2), "form": row.form, "version": row.version}


def _records(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for phase in ("fp32", "mixed", "after"):
        for name, step in content.get(phase, {}).get("steps", {}).items():
            if name.startswith("latency ") and step["status"] == "ok":
                yield from _timed(name.removeprefix("latency ").removesuffix("-synthetic"), step["result"])
    for phase in ("before", "after"):
        timed = content.get(phase, {})
        for name, result in timed.get("latency", {}).items():
            yield from _timed(name, result, timed.get("commit"))
    for name, result in content.get("peers", {}).items():
        yield from _timed(name, result)
    commits = content.get("networks", {})
    for call in content.get("calls", ()):
        for state, part in call.items():
            for name, result in part.get("latency", {}).items():
                yield from _timed(name, result, commits.get(state, state))
            for name, result in part.get("peers", {}).items():
                yield from _timed(name, result)
    yield from _kernels(content.get("hfuse", {}))


def _timed(name: str, result: dict[str, Any], commit: str | None = None) -> Iterator[dict[str, Any]]:
    named = _NETWORK.match(name)
    graph = result["graph_us"] if "graph_us" in result else result.get("graph", {}).get("median_us")
    if named is None or graph is None:
        return
    what = named["what"]
    kind = {"kind": "network", "level": what} if what.startswith("V") else {"kind": "peer", "peer": what}
    record = {**kind, "model": named["model"], "precision": named["precision"], "graph_us": round(graph, 2)}
    record |= {key: result[key] for key in ("launches", "grid_syncs") if key in result}
    record |= {"torch": result["torch"]} if "torch" in result else {}
    record |= {"variant": named["variant"]} if named["variant"] else {}
    yield record | ({"commit": commit} if commit else {})


def _kernels(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, result in content.items():
        figure, _, rest = name.partition("/")
        if figure == "figure8" and "seconds" in result:
            counters = {key: round(value, 2) for key, value in result.get("ncu", {}).items()}
            yield {"kind": "kernel", "kernel": rest, "ms": round(result["seconds"] * 1e3, 4), **counters}
        elif figure == "figure7" and "speedup" in result:
            pair, _, ratio = rest.partition("/")
            speedup = {key: round(100 * value, 1) for key, value in result["speedup"].items()}
            yield {"kind": "pair", "pair": pair, "ratio": float(ratio), "percent": speedup, "best": result["best"]}


def text(records: list[dict[str, Any]]) -> str:
    """The file's text: a record a line, so that what changes is seen."""
    return "[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n"


def main() -> int:
    """Write the file."""
    RECORDS.write_text(text(collected()))
    print(f"{len(collected())} records in {RECORDS.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
