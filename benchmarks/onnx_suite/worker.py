"""Processes that run cases, and are replaced where a case kills one or takes too long."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.onnx_suite.cases import Subject, model_and_data, subject_of, suite_cases
from benchmarks.onnx_suite.engines import CaseResult, run_case

__all__ = ["Job", "SuiteWorker", "serve"]


@dataclass(frozen=True)
class Job:
    """What a worker does.

    Attributes
    ----------
    engine : str
    kinds : tuple of str
        Of the cases (:data:`benchmarks.onnx_suite.cases.KINDS`).
    options : mapping
        Of the engine.
    limit : float
        Seconds for a case.
    """

    engine: str
    kinds: tuple[str, ...]
    options: Mapping[str, Any]
    limit: float


def serve(connection, job: Job, log: str) -> None:
    """The worker: cases by name in, results out. What libraries print goes to the file `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    cases, absent = suite_cases(job.kinds)
    subjects = {name: subject_of(name, cases, model_and_data(case)[0]) for name, case in cases.items()}
    connection.send((subjects, absent))
    while True:
        name = connection.recv()
        os.ftruncate(descriptor, 0)
        connection.send(run_case(cases[name], job.engine, job.options))


class SuiteWorker:
    """A process that runs cases.

    Attributes
    ----------
    subjects : dict of str to Subject
        The cases that there are, by name.
    absent : int
        How many the onnx package only names.
    """

    def __init__(self, job: Job, serving: Callable[..., None] = serve) -> None:
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

