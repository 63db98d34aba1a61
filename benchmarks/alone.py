"""A row of results from a process of its own, which neither a crash nor an endless search takes the others with it."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from typing import Any

__all__ = ["made_alone"]


def made_alone(program: str, arguments: list[str], seconds: float) -> dict[str, Any]:
    """What a program of this folder prints as JSON, or why there is nothing.

    Parameters
    ----------
    program : str
        How it is called, such as ``"benchmarks.workloads"``.
    arguments : list of str
    seconds : float
        Processor time that it may take, whatever else the machine does.

    Returns
    -------
    dict
        With ``failed`` alone where it ended otherwise.
    """
    most = max(1, int(seconds))

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))

    command = [sys.executable, "-m", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=bounded)
    if done.returncode == -signal.SIGXCPU:
        return {"failed": f"not within {most} s of a processor"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"failed": f"exit status {done.returncode}: {last}"}
    return json.loads(done.stdout)
