"""Runs a plan on the CPU device where a mutant can do no harm: it may write anywhere in its process, wait for ever, or
end it. So each has a process of its own, a fork of :mod:`souffle.mutation.server`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from souffle.codegen.plan import Plan
from souffle.emulator import BarrierError, CheckError
from souffle.errors import CudaCompileError, DeviceError
from souffle.runtime.cpu_runner import CpuRunner

__all__ = [
    "LENGTH",
    "OTHER_BITS",
    "SHUFFLED_RUNS",
    "Job",
    "Outcome",
    "Sandbox",
    "grid_of_run",
    "receive",
    "run_job",
    "send",
]

SHUFFLED_RUNS = 20

_GRIDS = (64, 4, 2, 3)
"""Blocks of the runs, in turn: a block for each tile shows what blocks miss of each other, few blocks show what a
block's next tile does to the one before, and three share most numbers of tiles unevenly."""

OTHER_BITS = "other bits"

_MARGIN = 1 << 16
"""Bytes around each tensor: a mutant that reads a little outside of one finds the same wherever it runs."""

LENGTH = struct.Struct("<Q")
"""The length of a message, which stands before it."""


def grid_of_run(seed: int) -> int:
    """The largest grid of a shuffled run."""
    return _GRIDS[seed % len(_GRIDS)]


@dataclass(frozen=True, eq=False)
class Job:
    """What to run.

    Attributes
    ----------
    plan : Plan
    inputs : tuple of array
    expected : tuple of array or None
        Outputs to compare with, bit for bit; ``None`` to ask for those of a run in order.
    checked : bool
        Look at every access instead of at the outputs.
    runs : int
        Shuffled ones.
    base : Plan or None
        Whose texts are compiled once, for all jobs of a sandbox; of others only the functions that differ from them.
    """

    plan: Plan
    inputs: tuple[np.ndarray, ...]
    expected: tuple[np.ndarray, ...] | None
    checked: bool = False
    runs: int = SHUFFLED_RUNS
    base: Plan | None = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of it.

    Attributes
    ----------
    kind : str
        ``"same"``, ``"other bits"``, ``"barrier"`` (divergent, or a deadlock), ``"finding"`` (of a checked run),
        ``"error"`` (the launch failed, as by a fault), ``"crash"``, ``"hang"`` or ``"stillborn"`` (the text does not
        compile).
    detail : str
    outputs : tuple of array
        Where they were asked for.
    seconds : float
    """

    kind: str
    detail: str = ""
    outputs: tuple[np.ndarray, ...] = ()
    seconds: float = 0.0

    @property
    def changed(self) -> bool:
        """Whether the result is another, or there is none."""
        return self.kind not in ("same", "stillborn")


def run_job(job: Job, folder: Path) -> Outcome:
    """Run a job in this process.

    Parameters
    ----------
    job : Job
    folder : Path
        Of compiled texts.
    """
    try:
        # One thread runs all blocks: which of two that race comes first is the order's, not the system's.
        how = {"checked": job.checked, "margin": _MARGIN, "workers": 1}
        runner = CpuRunner(job.plan, cache_dir=folder, base=job.base, **how)
    except CudaCompileError as error:
        return Outcome("stillborn", str(error))
    where = "the run in order"
    try:
        outputs = runner.run(job.inputs)
        expected = outputs if job.expected is None else job.expected
        difference = _difference(outputs, expected)
        for seed in range(job.runs):
            if difference:
                break
            where = f"shuffled run {seed}"
            again = runner.reordered(seed=seed, blocks=grid_of_run(seed)).run(job.inputs)
            difference = _difference(again, expected)
    except BarrierError as error:
        return Outcome("barrier", f"{where}: {error}")
    except CheckError as error:
        return Outcome("finding", f"{where}: {error}")
    except DeviceError as error:
        return Outcome("error", f"{where}: {error}")
    if difference:
        return Outcome(OTHER_BITS, f"{where}: {difference}")
    return Outcome("same", outputs=tuple(o.copy() for o in outputs) if job.expected is None else ())


def _difference(outputs: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> str:
    for number, (one, other) in enumerate(zip(outputs, expected, strict=True)):
        bits = [np.ascontiguousarray(a).reshape(-1).view(np.uint8).reshape(a.size, -1) for a in (one, other)]
        wrong = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
        if wrong.size:
            at = int(wrong[0])
            values = f"{one.reshape(-1)[at]} for {other.reshape(-1)[at]}"
            return f"{wrong.size} of {one.size} elements of output {number}, such as element {at}: {values}"
    return ""


class Sandbox:
    """A server for jobs, to be used as a context.

    Parameters
    ----------
    timeout_seconds : float
        After which a job has hung, its compilation included.
    """

    def __init__(self, timeout_seconds: float = 120.0) -> None:
        self._timeout = timeout_seconds
        command = [sys.executable, "-m", "souffle.mutation.server"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        # In a session of its own, for Ctrl-C is not meant for it: it ends with its last job, or by close().
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)

    def close(self, *, at_once: bool = False) -> None:
        """End the server; `at_once`, its job too."""
        if at_once:
            self._server.terminate()
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.close()
        self._server.wait(timeout=30)
        self._server.stdout.close()

    def run(self, job: Job) -> Outcome:
        """Run a job in a process of its own.

        Parameters
        ----------
        job : Job

        Raises
        ------
        DeviceError
            If the server has ended.
        """
        began = time.monotonic()
        try:
            send(self._server.stdin, (job, self._timeout))
            outcome = receive(self._server.stdout)
        except (BrokenPipeError, EOFError) as error:
            raise DeviceError("the process that runs mutants has ended") from error
        return Outcome(outcome.kind, outcome.detail, outcome.outputs, time.monotonic() - began)


def send(stream: Any, value: object) -> None:
    """Write a message."""
    data = pickle.dumps(value)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: Any) -> Any:
    """Read a message.

    Raises
    ------
    EOFError
        If there is none any more.
    """
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(LENGTH.unpack(head)[0]))
