"""What the tables of Souffle's paper have in common: which networks are compiled for them, and cells of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from souffle.evaluation.cells import Cell, absent, counted, predicted
from souffle.evaluation.network_rows import Compiled, Task
from souffle.evaluation.published import published
from souffle.evaluation.setting import Setting
from souffle.options import LEVELS, SOUFFLE

__all__ = ["LAST", "PAPERS_PRECISION", "Rows", "WAVEFRONTS", "compiled", "megabytes", "networks", "predicted_ms", "why"]

Rows = Callable[[Task], Mapping[str, Any] | None]
"""What was made of a task; None where it was not made, and ``failed`` with the reason where it could not be."""

PAPERS_PRECISION = "mixed"
"""Factors of products in fp16, the rest in fp32."""

LAST = list(LEVELS)[-1]
WAVEFRONTS = "V1"
"""The level that has, as Rammer, a kernel for what is independent, and nothing kept between kernels."""


def compiled(
    setting: Setting, network: str, level: str, precision: str = PAPERS_PRECISION, fusion: str = SOUFFLE
) -> Compiled:
    """The task of a network at a level; the same for all tables that ask for it."""
    of_rammer = level == WAVEFRONTS and network == published("table6")["network"]
    traffic = fusion == SOUFFLE and precision == PAPERS_PRECISION and (level == LAST or of_rammer)
    on_gpu = setting.gpu is not None
    return Compiled(network, setting.size, level, precision, setting.arch, fusion, setting.cubin, traffic, on_gpu)


def networks(name: str) -> list[tuple[str, str, list[Any]]]:
    """Name, network and cells of the rows of a published table."""
    return [(row["name"], row["network"], row["cells"]) for row in published(name)["rows"]]


def why(row: Mapping[str, Any] | None) -> Cell | None:
    """Why there is no figure of a row; None where there are."""
    if row is None:
        return absent("not made in this run")
    return absent(row["failed"]) if "failed" in row else None


def predicted_ms(setting: Setting, row: Mapping[str, Any] | None) -> Cell:
    """What the cost model says of a network."""
    if (bad := why(row)) is not None:
        return bad
    us = row["predicted_us"]
    return predicted(None if us is None else us / 1e3, setting.predicted_on(row))


def megabytes(row: Mapping[str, Any] | None, counting: str) -> Cell:
    """Bytes that a network reads, in millions."""
    if (bad := why(row)) is not None:
        return bad
    if counting not in row:
        return absent(row.get("not_counted", "not counted"))
    how = counting.replace("_", " ")
    return counted(row[counting]["read"] / 1e6, f"of the accesses of {row['level']}'s kernels, {how}")
