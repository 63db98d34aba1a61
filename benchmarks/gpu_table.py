"""The short table at the end of a run on a GPU host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_plan import PEERS, TOOLS, Phase, Step, barrier_of, peer_name

__all__ = ["across_barriers", "phase_table", "table"]

_MOST_FAILURES = 12
_GRID_BARRIERS = ("counter", "cooperative")


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


def _checks(names: list[str], found: dict[str, Any]) -> list[str]:
    lines = ["", f"{'check':44} {'status':8} {'constants':9} {'of tolerance':>12} {'same bits':>9}"]
    for name in names:
        entry = found.get(f"check {name}", {})
        result = entry.get("result", {})
        worst = max((item.get("of_tolerance", 0.0) for item in result.get("outputs", {}).values()), default=None)
        runs = f"{result['identical_runs']}/{result['runs']}" if "runs" in result else "-"
        shown = "-" if worst is None else f"{worst:.3f}"
        lines.append(
            f"{name:44} {entry.get('status', 'not run'):8} {result.get('constants', '-'):9} {shown:>12} {runs:>9}"
        )
    return lines if names else []


def across_barriers(cases: dict[str, dict[str, Any]], found: dict[str, Any]) -> tuple[int, list[str]]:
    """How many networks were checked with both grid barriers, and those whose outputs were not the same bits."""
    digests: dict[tuple[str, ...], dict[str, str]] = {}
    for name in cases:
        digest = found.get(f"check {name}", {}).get("result", {}).get("digest")
        # With flags, and without teams, kernels may add in another order.
        if digest and barrier_of(cases[name]) in _GRID_BARRIERS:
            key = tuple(cases[name][part] for part in ("model", "size", "precision", "level", "constants"))
            digests.setdefault(key, {})[barrier_of(cases[name])] = digest
    compared = {key: of for key, of in digests.items() if len(of) > 1}
    return len(compared), [" ".join(key[:4]) for key, of in compared.items() if len(set(of.values())) > 1]


def _latencies(names: list[str], cases: dict[str, dict[str, Any]], found: dict[str, Any], rehearsal: bool) -> list[str]:
    head = f"{'latency µs, median (min)':30} {'level':10} {'launches':>8} {'syncs':>5} {'graph':>20} {'in a row':>20}"
    head += f" {'launched':>20}"
    lines = ["", head]
    groups: dict[str, list[str]] = {}
    for name in names:
        case = cases[name]
        groups.setdefault(f"{case['model']} {case['size']} {case['precision']}", []).append(name)
    for group, members in groups.items():
        rows: dict[str, dict[str, Any]] = {}
        for name in members:
            entry, level = found.get(f"latency {name}", {}), cases[name]["level"]
            if barrier_of(cases[name]) != "counter":
                level += f" {barrier_of(cases[name])}"
            if entry.get("status") != "ok":
                lines.append(f"{group:30} {level:10} {entry.get('status', 'not run')}")
                continue
            row = rows[level] = entry["result"]
            lines.append(f"{group:30} {level:10} {row['launches']:>8} {row['grid_syncs']:>5} {_medians(row)}")
        if "V2" in rows and "V3" in rows and not rehearsal:
            # V2's stages are V3's, one kernel each: what is left once a graph has made launches cheap.
            ratio = rows["V2"]["graph"]["median_us"] / max(rows["V3"]["graph"]["median_us"], 1e-9)
            lines.append(f"{group:30} V2 takes {ratio:.2f} times as long as V3, both as graphs")
        lines += [f"{group:30} {line}" for line in _peers(cases[members[0]], rows, found, rehearsal)]
    return lines if names else []


def _medians(row: dict[str, Any]) -> str:
    """Median and least of each way to run; a rehearsal on the CPU has no graphs."""
    shown = [
        f"{row[way]['median_us']:.1f} ({row[way]['min_us']:.1f})" if way in row else "-"
        for way in ("graph", "graphs", "launch")
    ]
    return " ".join(f"{text:>20}" for text in shown)


def _peers(case: dict[str, Any], rows: dict[str, dict[str, Any]], found: dict[str, Any], rehearsal: bool) -> list[str]:
    """Lines on the peers with one model, beside its levels' rows."""
    lines, ratios, lacking = [], [], {}
    levels = [row["graph"]["median_us"] for level, row in rows.items() if level.startswith("V4")]
    for peer in PEERS:
        entry = found.get(f"peers {peer_name(case['io'], case['precision'], peer)}")
        if entry is None:
            continue
        if entry["status"] == "missing":
            lacking.setdefault(entry["error"], []).append(peer)
        elif entry["status"] != "ok":
            lines.append(f"{peer:10} {entry['status']}")
        else:
            row = entry["result"]
            lines.append(f"{peer:10} {'':>8} {'':>5} {_medians(row)}")
            if levels and "graph" in row and not rehearsal:
                ratios.append(f"{peer} {row['graph']['median_us'] / max(min(levels), 1e-9):.2f}")
    lines += [f"{', '.join(names)} missing: {error}" for error, names in lacking.items()]
    # With several grid barriers, V4 is the faster one.
    return lines + ([f"times as long as V4, as graphs: {', '.join(ratios)}"] if ratios else [])


def table(results: dict[str, Any], steps: Sequence[Step], cases: dict[str, dict[str, Any]]) -> str:
    """What was found, short.

    Parameters
    ----------
    results
        The content of ``results.json``.
    steps
        All that should be in it.
    cases
        By name.
    """
    found = results["steps"]
    lines = ["rehearsal without a GPU: times mean nothing"] if results["rehearsal"] else []
    device = found.get("device", {}).get("result", {})
    driver = device.get("driver_and_clocks")
    lines.append(f"{device.get('name')} {device.get('arch')}, driver {driver}, {results['date']}")
    lines += _micro(found.get("micro", {}).get("result", {}))

    def names(kind: str) -> list[str]:
        return [name for step in steps if step.kind == kind for name in step.names]

    lines += _checks(names("check"), found)
    compared, different = across_barriers(cases, found)
    if compared:
        lines.append(f"grid barriers: {compared - len(different)} of {compared} networks give the same bits with each")
    lines += [f"FAILED {name}: its outputs depend on the grid barrier" for name in different]
    lines += _latencies(names("latency"), cases, found, results["rehearsal"])
    if as_fp32 := results.get("as_fp32"):
        models = ", ".join(dict.fromkeys(name.rpartition("-V")[0] for name in as_fp32))
        lines.append(f"mixed precision changes nothing in {models}: see fp32")
    lines.append("")
    for tool in TOOLS:
        keys = [step.key(name) for step in steps if step.tool == tool for name in step.names]
        states = [found.get(key, {}).get("status", "not run") for key in keys]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        lines.append(f"{tool}: {counts or 'nothing to do'}")
    accepted = {step.key(name): step.accepted for step in steps for name in step.names}
    failures = [(key, entry) for key, entry in found.items() if entry["status"] not in accepted.get(key, ("ok",))]
    for key, entry in failures[:_MOST_FAILURES]:
        lines.append(f"FAILED {key}: {entry['status']}, {str(entry.get('error', '')).strip()[-200:]}")
    if len(failures) > _MOST_FAILURES:
        lines.append(f"and {len(failures) - _MOST_FAILURES} more")
    return "\n".join(lines) + "\n"


def phase_table(results: dict[str, Any], phases: Sequence[Phase]) -> str:
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
        for key in bad[:_MOST_FAILURES]:
            lines.append(f"{'':45}{found[key]['status']}: {key}: {_line(found[key].get('error', ''))}")
        reasons = {(found[key]["status"], _line(found[key].get("error", ""))): key for key in lost if key in spared}
        lines += [f"{'':45}{state}: {key}: {text}" for (state, text), key in reasons.items()]
        if skipped := states.count("skipped"):
            lines.append(f"{'':45}{skipped} skipped, for two in a row had run out of time")
        # Such as that a device has refused a grid, and what was launched in its place.
        said = {_line(found[key]["log"]): key for key in keys if found.get(key, {}).get("log") and not of[key].optional}
        lines += [f"{'':45}said: {key}: {text}" for text, key in list(said.items())[:_MOST_FAILURES]]
    return "\n".join(lines) + "\n"


def _line(text: str) -> str:
    return " ".join(str(text).split())[:300]
