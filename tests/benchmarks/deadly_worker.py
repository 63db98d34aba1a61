"""A worker of ONNX's suite that dies. It stands alone, so that a process of it begins soon."""

from __future__ import annotations

import os

from benchmarks.onnx_suite.outcomes import CaseResult, Subject

__all__ = ["serve_or_die"]


def serve_or_die(connection, job, log) -> None:
    """A worker whose second case kills it, and whose third never ends."""
    connection.send(({name: Subject("node", "", "Abs", "") for name in ("fine", "deadly", "endless")}, 1))
    while True:
        name = connection.recv()
        if name == "deadly":
            os.abort()
        if name == "fine":
            connection.send(CaseResult(name, "passed"))
