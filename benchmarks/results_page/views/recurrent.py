"""Recurrent networks of many sizes: predicted times, and the weights that stay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.results_page.files import Record, Source
from benchmarks.results_page.tables import Table, decimal, table

__all__ = ["bytes_that_stay", "in_short", "loops_of_cells", "weights_that_stay", "why_not"]

_SHORT = (
    (r"(?:.*;)? ?the network is predicted to take ([\d,.]+) µs with and ([\d,.]+) µs without", r"\1 µs, \2 without"),
    (r"the constants of a tile take (\d+) registers of each thread, of (\d+) at most[^;]*", r"\1 registers of \2"),
    (r"of its (\d+) tiles (\d+) are on the device at once[^;]*", r"\1 tiles, \2 at once"),
    (r"its (\d+) bytes of constants are in the L1 cache in any case", r"\1 bytes"),
    (r"[^;]* reads no constants at places that tile, thread and turn alone decide", "places that data decide"),
)
"""Of reasons why a stage's constants do not stay: their form, and what a table says."""


def in_short(reason: str) -> str:
    """A reason why a stage's constants do not stay, for a table."""
    for form, short in _SHORT:
        found = re.fullmatch(form, reason)
        if found:
            return found.expand(short)
    parts = reason.split("; ")
    return reason if len(parts) == 1 else "; ".join(map(in_short, parts))


def bytes_that_stay(row: Mapping[str, Any]) -> str:
    """KiB that stay, and that each step of the loop reads."""
    return f"{row['kept_bytes'] / 2**10:.0f} / {row['loop_constant_bytes'] / 2**10:.0f}" if row["loop"] else ""


def why_not(row: Mapping[str, Any]) -> str:
    """Why the other constants do not stay."""
    if not row["loop"]:
        return "no loop"
    return "; ".join(f"{n} x {in_short(why)}" if n > 1 else in_short(why) for why, n in row["refused"].items())


def _networks(source: Source) -> dict[str, dict[str, Record]]:
    """Rows of an H200 by network, and by variant."""
    found: dict[str, dict[str, Record]] = {}
    for one in source.results:
        if one["arch"] == "sm_90":
            found.setdefault(one.text("network").rpartition(",")[0], {})[one["variant"]] = one
    return found


def _timed(one: Record) -> str:
    return f"{decimal(one.number('us'), 1)} ({one['syncs']})"


def loops_of_cells(source: Source) -> Table:
    """Levels of eight steps, and whether there is a loop for them."""
    variants = ("V3", "V4 without interleaving", "V4")
    rows = (
        [name, *(_timed(of[variant]) for variant in variants), "yes" if of["V4"]["loop"] else "no"]
        for name, of in _networks(source).items()
        if of.keys() >= set(variants)
    )
    return table(" | ".join(["network", *variants, "a loop"]), rows, right=(1, 2, 3))


def weights_that_stay(source: Source) -> Table:
    """Levels of sixteen steps, what stays, and why not the others."""
    rows = (
        [name, _timed(of["V3"]), _timed(of["V4"]), bytes_that_stay(of["V4"]), why_not(of["V4"])]
        for name, of in _networks(source).items()
        if of.keys() >= {"V3", "V4"}
    )
    columns = "network | V3 | V4 | KiB that stay / that each step reads | why not the others"
    return table(columns, rows, right=(1, 2, 3))
