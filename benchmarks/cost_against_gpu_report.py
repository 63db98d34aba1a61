"""What the cost model's predictions are worth: rank correlations by TE, the plot, and what lies farthest off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.ranks import rank_correlation, scatter

__all__ = ["MODES", "joined", "outliers", "plot", "summary", "table"]

MODES = ("warm", "cold")
"""Tensors in the L2 cache as far as they fit, as in the middle of a kernel; all in memory."""

_FEWEST = 5
"""Schedules of a TE below which a correlation says nothing."""

_COLORS = (
    *("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
    *("#393b79", "#637939", "#8c6d31", "#843c39", "#7b4173"),
)


def joined(manifest: Mapping[str, Any], times: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each schedule that was timed.

    Parameters
    ----------
    manifest : mapping
        Of the build.
    times : mapping
        ``{schedule: {"warm_us": [...], "cold_us": [...]}}``, a value for each round.
    """
    rows = []
    for case_name, case in manifest["cases"].items():
        for name, entry in case["schedules"].items():
            if name not in times:
                continue
            row = {"case": case_name, "name": name, "rule": entry["rule"], "default": entry["default"]}
            for mode in MODES:
                samples = times[name][f"{mode}_us"]
                low, high = np.quantile(samples, (0.25, 0.75))
                row[f"{mode}_us"] = statistics.median(samples)
                row[f"{mode}_spread"] = round(float(high - low) / max(row[f"{mode}_us"], 1e-9), 4)
                row[f"{mode}_predicted_us"] = entry["predicted"][f"{mode}_us"]
                row[f"{mode}_bound"] = entry["predicted"][f"{mode}_bound"]
            rows.append(row)
    return rows


def summary(rows: Sequence[Mapping[str, Any]], mode: str) -> list[dict[str, Any]]:
    """For each TE and for all: rank correlation, median of predicted over measured, and the cost of the model's choice.

    ``choice`` is how many times longer the schedule takes that the model finds fastest than the one that is;
    ``default`` the same for the rules' own schedule.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["case"], []).append(row)
    found = []
    for case, members in groups.items():
        measured = [row[f"{mode}_us"] for row in members]
        predicted = [row[f"{mode}_predicted_us"] for row in members]
        best = min(measured)
        default = [row[f"{mode}_us"] for row in members if row["default"]]
        enough = len(members) >= _FEWEST
        found.append(
            {
                "te": case,
                "schedules": len(members),
                "spearman": round(rank_correlation(measured, predicted), 3) if enough else float("nan"),
                "ratio": round(statistics.median(p / m for p, m in zip(predicted, measured, strict=True)), 3),
                "best_us": round(best, 3),
                "choice": round(measured[predicted.index(min(predicted))] / best, 3),
                "default": round(default[0] / best, 3) if default else float("nan"),
            }
        )
    if not rows:
        return found
    every = [row["spearman"] for row in found if not math.isnan(row["spearman"])]
    measured, predicted = ([row[f"{mode}{kind}"] for row in rows] for kind in ("_us", "_predicted_us"))

    def mean(name: str) -> float:
        values = [row[name] for row in found if not math.isnan(row[name])]
        return round(math.exp(statistics.fmean(math.log(v) for v in values)), 3) if values else float("nan")

    found.append(
        {
            "te": "all together",
            "schedules": len(rows),
            "spearman": round(rank_correlation(measured, predicted), 3),
            "ratio": round(statistics.median(p / m for p, m in zip(predicted, measured, strict=True)), 3),
            "best_us": float("nan"),
            "choice": mean("choice"),
            "default": mean("default"),
        }
    )
    found.append({**found[-1], "te": "mean of the TEs",
                  "spearman": round(statistics.fmean(every), 3) if every else float("nan")})  # fmt: skip
    return found


def outliers(rows: Sequence[Mapping[str, Any]], mode: str, count: int) -> list[Mapping[str, Any]]:
    """The schedules whose predicted over measured is farthest from the median of their TE."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["case"], []).append(math.log(row[f"{mode}_predicted_us"] / row[f"{mode}_us"]))
    middle = {case: statistics.median(values) for case, values in ratios.items()}

    def distance(row: Mapping[str, Any]) -> float:
        return abs(math.log(row[f"{mode}_predicted_us"] / row[f"{mode}_us"]) - middle[row["case"]])

    return sorted(rows, key=distance, reverse=True)[:count]


def plot(rows: Sequence[Mapping[str, Any]], mode: str, title: str) -> str:
    """An SVG: predicted over measured, one mark for each schedule, a colour for each TE."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    colors = {case: _COLORS[number % len(_COLORS)] for number, case in enumerate(cases)}
    marks = []
    for row in rows:
        measured, predicted = row[f"{mode}_us"], row[f"{mode}_predicted_us"]
        label = f"{row['name']} ({row['rule']}): measured {measured:.2f}, predicted {predicted:.2f}"
        marks.append((measured, predicted, row["case"], label))
    return scatter(marks, colors, title, "measured, us", "predicted, us")


def _cells(values: Sequence[object]) -> list[str]:
    return ["-" if isinstance(v, float) and math.isnan(v) else str(v) for v in values]


def table(results: Mapping[str, Any]) -> str:
    """What was found, short.

    Parameters
    ----------
    results : mapping
        The content of ``results.json``.
    """
    lines = ["rehearsal without a GPU: times mean nothing"] if results["rehearsal"] else []
    checks = results["checks"]
    wrong = {name: check for name, check in checks.items() if not check["ok"]}
    lines.append(
        f"{results['name']}: {len(checks)} schedules checked, {len(wrong)} wrong, {len(results['failed'])} failed; "
        f"{len(results['schedules'])} timed in {results['rounds']} rounds; predicted for {results['predicted_for']}"
    )
    for mode in MODES:
        rows = results["correlation"].get(mode, [])
        if not rows:
            continue
        lines += ["", f"{mode:26}" + "".join(f"{name:>11}" for name in list(rows[0])[1:])]
        for row in rows:
            first, *others = _cells(list(row.values()))
            lines.append(f"{first:26}" + "".join(f"{cell:>11}" for cell in others))
        for row in results["outliers"][mode][:3]:
            lines.append(
                f"  farthest off: {row['name']} ({row['rule']}), measured {row[f'{mode}_us']:.1f} us, predicted "
                f"{row[f'{mode}_predicted_us']:.1f} by {row[f'{mode}_bound']}"
            )
    for name, check in list(wrong.items())[:5]:
        lines.append(f"WRONG {name}: {check}")
    for name, error in list(results["failed"].items())[:5]:
        lines.append(f"FAILED {name}: {error[-200:]}")
    return "\n".join(lines) + "\n"
