"""The tables of a run on a GPU host, in the forms of ``souffle ablate`` and ``souffle bench``.

``python -m benchmarks.gpu_table results.json`` prints them of a file that has come back.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_plan import TOOLS, Phase, ablation_labels, is_own
from souffle.benchmark.report import report_of
from souffle.cli.ablation_table import ABLATION_HEADER, ablation_cells
from souffle.cli.bench_table import bench_text
from souffle.cli.output import format_table

__all__ = ["across_barriers", "failures", "main", "phase_table", "row_of", "table"]

_MOST_FAILURES = 12
_BESIDE = ("least µs", "in a row µs", "launched µs", "of tolerance", "same bits")
"""Columns behind those of an ablation: of the latency as a graph the least, and other ways to run; of a check, the
largest error over what is allowed, and how many runs gave the bits of the first."""


def _micro(micro: dict[str, Any]) -> list[str]:
    if not micro.get("ok"):
        return []
    described = micro["description"]
    more, value = described["more"], {name: figure["value"] for name, figure in described["figures"].items()}

    def microseconds(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e6:.2f}"

    waits = [(microseconds(one["seconds"]), f"{one['blocks']}x{one['threads']}") for one in more["grid_syncs"]]
    syncs = ", ".join(f"{time} ({shape})" for time, shape in waits)
    rates = {
        "copy {} by the driver": more["driver_copy_bytes_per_second"],
        "{} by a kernel": more["kernel_copy_bytes_per_second"],
        "read {}": value["memory_bytes_per_second"],
        "within the L2 cache {}": value["l2_bytes_per_clock"] * value["clock_hz"],
    }
    node = microseconds(value["graph_node_seconds"])
    return [
        f"grid sync µs (blocks x threads): {syncs}",
        f"launch {microseconds(value['launch_seconds'])} µs, graph node {node} µs; GB/s: "
        + ", ".join(text.format(f"{rate / 1e9:.0f}") for text, rate in rates.items()),
    ]


def across_barriers(cases: Mapping[str, Mapping[str, Any]], found: Mapping[str, Any]) -> tuple[int, list[str]]:
    """How many networks were checked with several grid barriers, and those whose outputs were not the same bits."""
    digests: dict[tuple[str, ...], dict[str, str]] = {}
    for name, case in cases.items():
        digest = found.get(f"check {name}", {}).get("result", {}).get("digest")
        # With flags, without teams and the like, kernels may add in another order.
        if digest and (is_own(case) or case["label"] == f"{case['level']}, grid_barrier={case['grid_barrier']}"):
            key = tuple(case[part] for part in ("model", "size", "precision", "level", "constants"))
            digests.setdefault(key, {})[case["grid_barrier"]] = digest
    compared = {key: of for key, of in digests.items() if len(of) > 1}
    return len(compared), [" ".join(key[:4]) for key, of in compared.items() if len(set(of.values())) > 1]


def row_of(name: str, case: Mapping[str, Any], found: Mapping[str, Any], label: str = "latency") -> dict[str, Any]:
    """A case as a row of an ablation: what was counted as it was built, its error and its latency as a graph.

    Parameters
    ----------
    name : str
    case : mapping
    found : mapping
        The steps of the results.
    label : str
        Of the step that timed it: ``"latency"``, or one of :func:`benchmarks.gpu_plan.ablation_labels`.
    """
    check, latency = (found.get(f"{kind} {name}", {}) for kind in ("check", label))
    timed = latency.get("result", {}) if latency.get("status") == "ok" else {}
    difference = check.get("result", {}).get("difference")
    ok = None if "status" not in check else check["status"] == "ok"
    return {**case, "error": difference, "ok": ok, "latency_us": timed.get("graph", {}).get("median_us")}


def _beside(name: str, found: Mapping[str, Any], label: str) -> tuple[str, ...]:
    check, timed = (found.get(f"{kind} {name}", {}).get("result", {}) for kind in ("check", label))

    def shown(way: str, figure: str) -> str:
        return f"{timed[way][figure]:.1f}" if way in timed else "-"

    worst = max((item.get("of_tolerance", 0.0) for item in check.get("outputs", {}).values()), default=None)
    runs = f"{check['identical_runs']}/{check['runs']}" if "runs" in check else "-"
    allowed = "-" if worst is None else f"{worst:.3f}"
    return shown("graph", "min_us"), shown("graphs", "median_us"), shown("launch", "median_us"), allowed, runs


def _networks(cases: Mapping[str, Mapping[str, Any]], found: Mapping[str, Any]) -> list[str]:
    """Tables for each model, size and precision: of the levels, and of variants with what they are timed beside."""
    groups: dict[tuple[str, str], list[str]] = {}
    labels = ablation_labels(found)
    for name, case in cases.items():
        group = f"{case['model']} {case['size']} {case['precision']}"
        timed = [label for label in labels if f"{label} {name}" in found]
        if is_own(case) and (f"latency {name}" in found or f"check {name}" in found):
            timed.append("latency")
        elif not timed and f"check {name}" in found:
            timed.append("ablation")
        for label in timed:
            groups.setdefault((group, label), []).append(name)
    lines = []
    for (group, label), names in groups.items():
        rows = [(*ablation_cells(row_of(n, cases[n], found, label)), *_beside(n, found, label)) for n in names]
        lines += ["", f"{group}{'' if label == 'latency' else ', variants'}"]
        lines.append(format_table((*ABLATION_HEADER, *_BESIDE), rows))
    return lines


def _peers(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, entry in found.items():
        if key.startswith("bench ") and entry["status"] == "ok":
            lines += ["", key, bench_text(report_of(entry["result"]["report"]))]
        elif key.startswith("bench ") and entry["status"] == "missing":
            lines += ["", f"{key}: {entry['error']}"]
    return lines


def table(results: Mapping[str, Any]) -> str:
    """What was found, of the content of ``results.json``."""
    found, cases = results["steps"], results["cases"]
    lines = ["rehearsal without a GPU: times mean nothing"] if results["rehearsal"] else []
    device = found.get("device", {}).get("result", {})
    driver = device.get("driver_and_clocks")
    lines.append(f"{device.get('name')} {device.get('arch')}, driver {driver}, {results['date']}")
    lines += _micro(found.get("micro", {}).get("result", {}))
    lines += _networks(cases, found)
    compared, different = across_barriers(cases, found)
    if compared:
        lines.append(f"grid barriers: {compared - len(different)} of {compared} networks give the same bits with each")
    lines += [f"FAILED {name}: its outputs depend on the grid barrier" for name in different]
    lines += [f"{name}: the same as {other['to']}" for name, other in results.get("equal", {}).items()]
    lines += [f"{name}: not built: {why}" for name, why in results.get("not_built", {}).items()]
    lines += _peers(found)
    lines.append("")
    for tool in TOOLS:
        states = [entry["status"] for key, entry in found.items() if key.startswith(f"{tool} ")]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        lines += [f"{tool}: {counts}"] if counts else []
    bad = failures(found)
    for key, entry in list(bad.items())[:_MOST_FAILURES]:
        lines.append(f"FAILED {key}: {entry['status']}, {str(entry.get('error', '')).strip()[-200:]}")
    if len(bad) > _MOST_FAILURES:
        lines.append(f"and {len(bad) - _MOST_FAILURES} more")
    return "\n".join(lines) + "\n"


def failures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What did not go well; a peer that is missing is no failure of ours."""
    return {
        key: entry
        for key, entry in found.items()
        if entry["status"] != "ok" and not (entry["status"] == "missing" and key.startswith("bench "))
    }


def phase_table(results: Mapping[str, Any], phases: Sequence[Phase]) -> str:
    """What was asked of the GPU, and the answers in words."""
    found, taken = results["steps"], results.get("phases", {})
    lines = [f"{'phase':10} {'verdict':9} {'cases':>9} {'seconds':>8} {'of':>4}  question, and what failed"]
    for phase in phases:
        of = {step.key(name): step for step in phase.steps for name in step.names}
        keys = list(of)
        states = [found.get(key, {}).get("status", "not run") for key in keys]
        passed = sum(state in of[key].accepted for key, state in zip(keys, states, strict=True))
        lost = [key for key, state in zip(keys, states, strict=True) if state not in ("ok", "not run", "skipped")]
        # A peer's compilation that takes too long is no failure of ours.
        spared = {key for key in lost if of[key].optional and found[key]["status"] in ("missing", "timeout")}
        bad = [key for key in lost if key not in spared]
        verdict = "FAIL" if bad else "nothing" if not keys else "pass" if passed == len(keys) else "not whole"
        seconds = taken.get(phase.name, 0.0)
        lines.append(
            f"{phase.name:10} {verdict:9} {f'{passed}/{len(keys)}':>9} {seconds:>8.1f} {phase.bound:>4.0f}  "
            f"{phase.question}"
        )
        lines += _notes(phase, found, bad, [key for key in lost if key in spared])
    return "\n".join(lines) + "\n"


def _notes(phase: Phase, found: Mapping[str, Any], bad: Sequence[str], spared: Iterable[str]) -> list[str]:
    """Under a phase: what failed, what is missing, and what was said."""
    of = {step.key(name): step for step in phase.steps for name in step.names}
    lines = [f"{found[key]['status']}: {key}: {_line(found[key].get('error', ''))}" for key in bad[:_MOST_FAILURES]]
    reasons = {(found[key]["status"], _line(found[key].get("error", ""))): key for key in spared}
    lines += [f"{state}: {key}: {text}" for (state, text), key in reasons.items()]
    if skipped := sum(found.get(key, {}).get("status") == "skipped" for key in of):
        lines.append(f"{skipped} skipped, for two in a row had run out of time")
    # Such as that a device has refused a grid, and what was launched in its place.
    said = {_line(found[key]["log"]): key for key in of if found.get(key, {}).get("log") and not of[key].optional}
    lines += [f"said: {key}: {text}" for text, key in list(said.items())[:_MOST_FAILURES]]
    return [f"{'':45}{line}" for line in lines]


def _line(text: str) -> str:
    return " ".join(str(text).split())[:300]


def main(argv: list[str] | None = None) -> int:
    """Print the tables of files of results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_table", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    for path in parser.parse_args(argv).results:
        sys.stdout.write(table(json.loads(path.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
