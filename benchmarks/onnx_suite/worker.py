"""Processes that run cases, and are replaced where a case kills one or takes too long."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.onnx_suite.outcomes import CaseResult, Job, Subject

__all__ = ["SuiteWorker"]


class SuiteWorker:
    """A process that runs cases.

    Parameters
    ----------
    job : Job
    serving : callable
        What the process does (:func:`benchmarks.onnx_suite.serving.serve`).

    Attributes
    ----------
    subjects : dict of str to Subject
        The cases that there are, by name.
    absent : int
        How many the onnx package only names.
    """

    def __init__(self, job: Job, serving: Callable[..., None]) -> None:
        self._job, self._serving = job, serving
        self._log = Path(tempfile.mkdtemp(prefix="souffle-suite-")) / "worker.log"
        self._log.touch()
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._connection, far = self._context.Pipe()
        self._process = self._context.Process(target=self._serving, args=(far, self._job, str(self._log)), daemon=True)
        self._process.start()
        far.close()
        found: tuple[dict[str, Subject], int] = self._connection.recv()
        self.subjects, self.absent = found
        self._before: list[str] = []

    def run(self, name: str) -> CaseResult:
        """The result of a case; one after which the process dies is a crash, by itself or with those before it."""
        start = time.monotonic()
        self._connection.send(name)
        try:
            if self._connection.poll(self._job.limit):
                result: CaseResult = self._connection.recv()
                self._before.append(name)
                return result
            outcome, words = "timeout", f"more than {self._job.limit:g} s"
        except (EOFError, ConnectionResetError):
            self._process.join()
            tail = " ".join(self._log.read_text(errors="replace").split())[-300:]
            after = f"; after {', '.join(self._before[-3:])}" if self._before else ""
            outcome, words = "crash", f"exit code {self._process.exitcode}{after}; {tail}"
        self.close()
        self._start()
        return CaseResult(name, outcome, words, time.monotonic() - start)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._connection.close()
