"""What a worker process does."""

from __future__ import annotations

import os

from benchmarks.onnx_suite.cases import model_and_data, subject_of, suite_cases
from benchmarks.onnx_suite.engines import run_case
from benchmarks.onnx_suite.outcomes import Job

__all__ = ["serve"]


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
