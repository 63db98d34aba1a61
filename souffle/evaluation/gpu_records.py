"""What was measured on GPUs before, for tables that are made where none is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["RECORDS", "gpu_records", "latest_record"]

RECORDS = Path(__file__).parent / "data" / "gpu_records.json"
"""Made of the files of all runs by ``python -m benchmarks.gpu_records``, oldest first."""


@cache
def gpu_records() -> tuple[dict[str, Any], ...]:
    """All records.

    Returns
    -------
    tuple of dict
        Each with ``kind`` (``"network"``, ``"peer"``, ``"kernel"`` or ``"pair"``), what it is of, what was measured,
        and ``device``, ``date`` and ``file``.
    """
    return tuple(json.loads(RECORDS.read_text()))


def latest_record(**wanted: object) -> Mapping[str, Any] | None:
    """The last record with these entries, of what the compiler chose by itself; None where there is none."""
    wanted = {"variant": None, **wanted}
    found = (record for record in reversed(gpu_records()) if all(record.get(k) == v for k, v in wanted.items()))
    return next(found, None)
