"""Searches of schedules: what more workers bring."""

from __future__ import annotations

from benchmarks.results_page.files import Source
from benchmarks.results_page.tables import Table, table

__all__ = ["played_clusters", "searched", "workers"]


def workers(source: Source) -> Table:
    """Searches on engines of one machine."""
    rows = (
        [
            f"`{one['engine']}`",
            *(one[key] for key in ("stages", "candidates")),
            f"{one.number('seconds'):.1f}",
            f"{one.number('per_second'):.2f}",
            f"{one.number('ratio'):.2f}",
            f"{one.number('busy'):.2f}",
            "yes" if one["same"] else "no",
        ]
        for one in source.results
        if one["kind"] == "real"
    )
    return table("engine | stages | candidates | s | candidates/s | times the first | busy | the same log", rows)


def searched(source: Source) -> Table:
    """What schedules of logs bring whole models."""
    rows = (
        [
            *(one[key] for key in ("model", "arch", "precision", "stages", "tried", "taken")),
            *(f"{one.number(key):,.1f}" for key in ("own_us", "log_us")),
            f"{one.number('ratio'):.3f}",
        ]
        for one in source.results
    )
    return table(
        "model | arch | precision | stages | candidates | schedules of the log that V4 takes | "
        "rules' own, µs | with the log, µs | ratio",
        rows,
    )


def played_clusters(source: Source) -> Table:
    """Searches on played clusters."""
    rows = (
        [
            *(one[key] for key in ("workers", "candidates")),
            *(f"{one.number(key):.0f}" for key in ("seconds", "busy_ms")),
            f"{one.number('efficiency'):.3f}",
            f"{one.number('driver_ms'):.2f}",
            f"{one.number('saturated_at'):,.0f}",
        ]
        for one in source.results
        if one["kind"] == "played"
    )
    return table(
        "workers | candidates | s | a candidate takes workers, ms | efficiency | the driver, ms of processor | "
        "workers that keep the driver busy",
        rows,
    )
