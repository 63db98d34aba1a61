"""The tables of ``souffle bench``, of a report; TVM is not needed for them."""

from __future__ import annotations

from souffle.benchmark.report import CACHES, BenchmarkReport, BenchmarkRow
from souffle.cli.output import format_table

__all__ = ["bench_text"]


def bench_text(report: BenchmarkReport) -> str:
    """A table for each state of the caches, and why some have no figures."""
    setting = report.setting
    threads = f", {setting.threads} thread{'s' if setting.threads > 1 else ''} each" if setting.device == "cpu" else ""
    lines = [
        f"{report.model} on {report.machine}{threads}, {setting.precision}, level {report.level}",
        f"Outputs were compared with {report.reference}, before anything was timed.",
    ]
    for cache in CACHES:
        lines += ["", f"caches {cache}: {_ORDERS[cache]}"]
        lines.append(format_table(_HEADER, [_row(row, cache) for row in report.rows]))
    lines += ["", f"{report.runs} rounds after {report.warmup} of warm-up; a round runs each once, in this order."]
    lines.append("us: median and quartiles. times ours: median over rounds of peer / souffle, and its 95 % interval.")
    lines += [f"{row.name}{f' {row.form}' if row.form else ''}: {row.reason}" for row in report.rows if row.reason]
    if report.interrupted:
        lines.append("Interrupted: what is above is of the rounds that were whole.")
    return "\n".join(lines)


_ORDERS = {
    "warm": "the same has run right before, untimed",
    "cold": "overwritten before each run",
}
_HEADER = ("", "version", "as", "clock", "error", "runs", "us", "quartiles", "times ours", "95 %")


def _row(row: BenchmarkRow, cache: str) -> tuple:
    times, ratio = row.times.get(cache), row.ratios.get(cache)
    error = "-" if row.error is None else f"{row.error:.1e}"
    measured = ("-", "-", "-") if times is None else (
        times.runs, f"{times.median_us:.1f}", f"{times.lower_us:.1f} .. {times.upper_us:.1f}"
    )  # fmt: skip
    beside = ("-", "-") if ratio is None else (f"{ratio.median:.3g}", f"{ratio.low:.3g} .. {ratio.high:.3g}")
    return (row.name, row.version or "-", row.form or "-", row.clock or "-", error, *measured, *beside)
