"""The rows of ``souffle ablate`` as its table has them; TVM is not needed for that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from souffle.cli.output import human_bytes

__all__ = ["ABLATION_HEADER", "ablation_cells"]

ABLATION_HEADER = (
    "variant",
    "launches",
    "kernels",
    "grid",
    "flags",
    "block",
    "read",
    "written",
    "registers",
    "spill B",
)
ABLATION_HEADER += ("shared B", "code B", "compile s", "predicted µs", "largest error", "latency µs")


def ablation_cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    """A row of :func:`souffle.evaluation.ablation.measured_row`, under :data:`ABLATION_HEADER`."""

    def shown(value: Any, form: str = "") -> str:
        return "-" if value is None else format(value, form)

    error = shown(row["error"], ".1e") + (" MISMATCH" if row["ok"] is False else "")
    return (
        row["label"],
        *(row[name] for name in ("launches", "kernels", "grid_syncs", "flag_arrivals", "block_syncs")),
        human_bytes(row["bytes_read"]),
        human_bytes(row["bytes_written"]),
        shown(row["registers"]),
        shown(row["spill_bytes"]),
        row["shared_bytes"],
        shown(row["code_bytes"]),
        row["compile_s"],
        shown(row["predicted_us"], ".1f"),
        error,
        shown(row["latency_us"], ".1f"),
    )
