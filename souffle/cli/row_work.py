"""What workers do for ``souffle reproduce``: each job is one row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from souffle.cli.compare import onnxruntime_outputs
from souffle.evaluation.network_rows import made_row, task_of
from souffle.evaluation.result_file import device_name, source_digest

__all__ = ["make"]


def make(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> dict[str, Any]:
    """Make a row.

    Parameters
    ----------
    payload : mapping
        ``task``, of :func:`souffle.evaluation.network_rows.task_data`; ``measures``, whether on a GPU.
    shared : mapping
        Not looked at.

    Returns
    -------
    dict
        ``row``, and by which ``source`` (:func:`souffle.evaluation.result_file.source_digest`) and ``device``.
    """
    row = made_row(task_of(payload["task"]), lambda message: None, onnxruntime_outputs)
    device = device_name() if payload["measures"] else None
    # As files have it, which other rows come from.
    return {"row": json.loads(json.dumps(row)), "source": _source(), "device": device}


_source = cache(source_digest)
