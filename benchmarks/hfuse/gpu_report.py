"""Tables of what :mod:`benchmarks.hfuse.gpu` has measured: the paper's Figures 7 and 8."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from souffle.cli.output import format_table

__all__ = ["tables"]

_KINDS = ("vfuse", "hfuse", "naive")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f}"


def _references(done: Mapping[str, dict[str, Any]]) -> str:
    rows = []
    for task, result in done.items():
        for name, error in result["errors"].items():
            verdict = "equal" if not error else "contracted" if result["contracted"] else "WRONG"
            rows.append([task.partition("/")[2], name, verdict, f"{error:.3g}"])
    if not rows:
        return "Kernels alone were not compared with references."
    return "Kernels alone against references:\n\n" + format_table(("kernel", "output", "bits", "largest error"), rows)


def _checks(done: Mapping[str, dict[str, Any]]) -> str:
    rows = []
    for task, result in done.items():
        different = "; ".join(result["different"]) or "none"
        rows.append([task.partition("/")[2], result["kernels"], different])
    return "The same bits as the kernels alone:\n\n" + format_table(("kernels", "fused kernels", "different"), rows)


def _figure8(done: Mapping[str, dict[str, Any]]) -> str:
    header = (
        "kernel",
        "size",
        "threads",
        "registers",
        "ms",
        "issue slots %",
        "memory stalls %",
        "occupancy %",
        "most %",
    )
    rows, notes = [], []
    for task, result in done.items():
        kernel, counted = task.partition("/")[2], result["ncu"]
        if isinstance(counted, str):
            notes.append(f"{kernel}: no counters: {counted}")
        values = counted if isinstance(counted, dict) else {}
        names = ("issue_slot_utilization", "memory_stall", "achieved_occupancy")
        cells = [f"{values[name]:.1f}" if name in values else "-" for name in names]
        time = f"{1e3 * result['seconds']:.3f}"
        rows.append([kernel, result["size"], result["threads"], result["registers"], time, *cells])
        rows[-1].append(f"{result['occupancy']:.1f}")
    return "\n".join(["Figure 8, kernels alone:", "", format_table(header, rows), *notes])


def _figure7(done: Mapping[str, dict[str, Any]]) -> str:
    header = ("kernels", "ratio", "native ms", "serial ms", "VFuse %", "HFuse %", "naive %", "threads", "registers")
    rows, speedups = [], {}
    for task, result in sorted(done.items(), key=lambda item: (item[0].split("/")[1], item[1]["ratio"])):
        name, best = task.split("/")[1], result["best"]
        if result["starred"] is not None:
            name = name.replace(result["starred"], f"*{result['starred']}*")
        values = [result["speedup"].get(kind) for kind in _KINDS]
        speedups.setdefault(name, []).append(values)
        rows.append([name, f"{result['ratio']:.2f}", f"{1e3 * result['native']:.3f}", f"{1e3 * result['serial']:.3f}"])
        rows[-1] += [*map(_percent, values), " + ".join(map(str, best["splits"])), best["registers"] or "free"]
    averages = []
    for name, each in speedups.items():
        columns = [[value for value in column if value is not None] for column in zip(*each)]
        averages.append([name, *(_percent(statistics.mean(column) if column else None) for column in columns)])
    mean = format_table(("kernels", "VFuse %", "HFuse %", "naive %"), averages)
    title = "Figure 7, speedup over native (on streams side by side); ratio: the starred kernel's time to the other's:"
    return f"{title}\n\n{format_table(header, rows)}\n\nMeans over the ratios:\n\n{mean}"


def tables(record: Mapping[str, Any]) -> str:
    """All that a file of results has, as text for a person."""
    results: Mapping[str, dict[str, Any]] = record["results"]
    device = results.get("device", {}).get("result", {})
    rehearsal = "; a rehearsal without a GPU: times mean nothing" if record["rehearsal"] else ""
    sections = [f"{device.get('name', 'no GPU')} {device.get('arch', '')}{rehearsal}"]
    kinds = (("reference", _references), ("check", _checks), ("figure8", _figure8), ("figure7", _figure7))
    for kind, section in kinds:
        done = {
            task: entry["result"]
            for task, entry in results.items()
            if task.partition("/")[0] == kind and entry["status"] == "ok"
        }
        if done:
            sections.append(section(done))
    bad = [f"{task}: {entry['status']}: {entry['error']}" for task, entry in results.items() if entry["status"] != "ok"]
    return "\n\n".join([*sections, *bad]) + "\n"
