"""Rows that are made at once, or end their process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from souffle.evaluation.result_file import source_digest

Shared = Mapping[str, bytes]


def make(payload: Mapping[str, Any], shared: Shared) -> dict[str, Any]:
    """What a row is depends on the planner that its task names."""
    task = payload["task"]
    ((planner, *_), network) = task["planners"], task["network"]
    row: dict[str, Any] = {"network": network, "pid": os.getpid()}
    if planner == "abort":
        os.write(2, b"out of memory\n")
        os.abort()
    if planner == "leave":
        os._exit(1)
    if planner == "raise":
        raise ValueError("no such thing")
    if planner == "refuse":
        row = {"failed": "ModelError: it is empty"}
    if planner == "slow":
        time.sleep(60)
    source = "another" if planner == "stale" else source_digest()
    device = "another GPU" if planner == "elsewhere" else os.environ.get("PLAYED_GPU")
    return {"row": row, "source": source, "device": device if payload["measures"] else None}


def order(payload: Mapping[str, Any], shared: Shared) -> dict[str, Any]:
    """A row of orders of fusion; if a file says so, its owner is interrupted beside it."""
    interrupts = Path(os.environ.get("PLAYED_INTERRUPT", "/nowhere"))
    if interrupts.exists() and payload["task"]["network"] != interrupts.read_text():
        # The row before is on its way to its file: whether it arrives first is not what is asked.
        rows, end = interrupts.parent / "tables" / "rows.json", time.monotonic() + 60
        while not (rows.exists() and interrupts.read_text() in rows.read_text()) and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    us = {"none": 12.0, "default": 10.0, "annealing": 8.0, "learned": "PyTorch is not installed"}
    return {"row": {"us": us}, "source": source_digest(), "device": None}
