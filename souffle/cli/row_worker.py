"""The process in which rows of ``souffle reproduce`` are made: tasks come as JSON on stdin, rows go as JSON to stdout.

A line for each thing: one for all tasks, ``{"key", "says"}`` for what is being done, ``{"key", "row"}`` for a row.
Networks are large, so those of one worker are of one model, and its memory goes with it. It ends with the process that
started it, whose end closes its stdin.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from souffle.cli.compare import onnxruntime_outputs
from souffle.cli.interruption import INTERRUPTED
from souffle.evaluation.network_rows import made_row, task_of

__all__ = ["main"]


def main() -> int:
    """Make the rows of all tasks; an interrupt ends it without a word, for who started it says one."""
    try:
        tasks = json.loads(sys.stdin.readline())
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        for item in tasks:
            _write({"key": item["key"], "says": "starting"})
            row = made_row(task_of(item["task"]), _telling(item["key"]), onnxruntime_outputs)
            _write({"key": item["key"], "row": row})
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(INTERRUPTED)
    return 0


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(INTERRUPTED)


def _telling(key: str) -> Callable[[str], None]:
    return lambda message: _write({"key": key, "says": message})


def _write(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
