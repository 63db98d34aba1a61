"""What a benchmark found, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from souffle.benchmark.peer import Setting
from souffle.benchmark.rounds import Figures, Ratio

__all__ = ["CACHES", "OURS", "BenchmarkReport", "BenchmarkRow", "report_of"]

CACHES = ("warm", "cold")
"""What the keys of times are."""

OURS = "souffle"
"""The name that our own rows have."""


@dataclass
class BenchmarkRow:
    """One way to run the model.

    Attributes
    ----------
    name, version : str
        :data:`OURS` or the peer's.
    form, clock : str
        See :class:`souffle.benchmark.peer.Way`; empty of a peer that did not get so far.
    prepare_seconds : float or None
        To compile the model, from ONNX; of a peer that compiles in its first run, that too.
    error : float or None
        Largest difference from the reference over the output's largest magnitude
        (:class:`souffle.runtime.comparison.OutputComparison`).
    passed : bool or None
        Whether that is within the contract of the precision; None where nothing was compared.
    reason : str
        Why there are no times; empty where there are.
    times : dict of str to Figures
        With ``"warm"`` and ``"cold"`` caches.
    ratios : dict of str to Ratio
        Of a peer to our row of the same form: how many times as long it takes.
    """

    name: str
    version: str = ""
    form: str = ""
    clock: str = ""
    prepare_seconds: float | None = None
    error: float | None = None
    passed: bool | None = None
    reason: str = ""
    times: dict[str, Figures] = field(default_factory=dict)
    ratios: dict[str, Ratio] = field(default_factory=dict)


@dataclass
class BenchmarkReport:
    """What a benchmark found; also of one that was interrupted, as far as it came.

    Attributes
    ----------
    model : str
    machine : str
        The GPU, or the processor.
    setting : Setting
    level, reference : str
        The level that we compiled for, and whose outputs all were compared with.
    runs, warmup : int
        Of each row and cache that were asked for, and before them.
    rows : list of BenchmarkRow
        Ours first, then peers in the order in which they were given.
    interrupted : bool
    """

    model: str
    machine: str
    setting: Setting
    level: str
    reference: str
    runs: int
    warmup: int
    rows: list[BenchmarkRow] = field(default_factory=list)
    interrupted: bool = False

    @property
    def wrong(self) -> bool:
        """Whether our own outputs were not those of the reference."""
        return any(row.name == OURS and row.passed is False for row in self.rows)


def report_of(content: Mapping[str, Any]) -> BenchmarkReport:
    """A report from what ``dataclasses.asdict`` gave of it, as ``souffle bench --out`` writes it."""
    rows = [
        BenchmarkRow(
            **{
                **row,
                "times": {cache: Figures(**found) for cache, found in row["times"].items()},
                "ratios": {cache: Ratio(**found) for cache, found in row["ratios"].items()},
            }
        )
        for row in content["rows"]
    ]
    return BenchmarkReport(**{**content, "setting": Setting(**content["setting"]), "rows": rows})
