"""Under what the papers' tables are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from souffle.evaluation.cells import Cell, absent, measured
from souffle.evaluation.gpu_records import latest_record

__all__ = ["A100", "V100", "Setting"]

A100 = "A100-SXM4-40GB"
V100 = "V100-PCIE-16GB"
"""The GPUs of the papers, as the cost model describes them."""


@dataclass(frozen=True)
class Setting:
    """What all tables are made under.

    Attributes
    ----------
    size : str
        Of the networks: ``"paper"``, or ``"tiny"`` to try the command out.
    arch : str
        What is compiled for: that of the papers' A100, or of the GPU at hand.
    cubin : bool
        Whether nvcc says what kernels ask for.
    gpu : str or None
        The name of the GPU at hand, on which everything is measured then; None where none is.
    date : str
        Of what is measured now.
    evaluations : int
        Of annealing, for orders of fusion.
    """

    size: str
    arch: str
    cubin: bool
    gpu: str | None
    date: str
    evaluations: int = 200

    @property
    def kernels_of(self) -> str:
        """Of what kernels are counted, in words."""
        return f"in what is compiled for {self.arch}{'' if self.cubin else ', without nvcc'}"

    def latency(self, row: Mapping[str, Any] | None, network: str, level: str, precision: str) -> Cell:
        """A latency in ms: of the GPU at hand, or the last that was recorded."""
        if self.gpu is not None:
            if row is None or row.get("latency_us") is None:
                return absent((row or {}).get("failed", "not measured in this run"))
            return measured(row["latency_us"] / 1e3, self.gpu, self.date)
        if self.size != "paper":
            return absent("no GPU here, and records are of paper size")
        found = latest_record(kind="network", model=network, level=level, precision=precision)
        if found is None:
            return absent(f"no GPU here, and no record of {precision} at this level")
        return measured(found["graph_us"] / 1e3, found["device"], found["date"], f"results/{found['file']}")

    def predicted_on(self, row: Mapping[str, Any]) -> str:
        """Of a prediction, in words."""
        return f"by the cost model, {row['predicted_on']}, {row['precision']}"
