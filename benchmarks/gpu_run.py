"""Runs the steps of ``benchmarks.gpu_host`` on the GPU host: processes bounded in time, results kept after each."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.gpu_plan import Phase, Step

__all__ = ["run_phases", "run_steps"]

_ROOT = Path(__file__).resolve().parent.parent
_FINDINGS = 9
"""The exit status that compute-sanitizer is told to give where it finds something."""
_LEAVING_SECONDS = 5.0
"""For a process that was interrupted to write down what it has."""
_ENDING_SECONDS = 20.0
"""For a process that was killed to leave the driver; one that does not holds the GPU."""
_MOST_TIMEOUTS = 2
"""In a row: what hangs twice hangs again, and the time is gone."""
_log = logging.getLogger("gpu_host")


# one process


def _sanitizer() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")


def _short(text: str, size: int = 1600) -> str:
    """Beginning and end: a sanitizer's first finding stands first, a traceback's message last."""
    text = text.strip()
    return text if len(text) <= size else f"{text[: size // 2]}\n[...]\n{text[-size // 2 :]}"


class _Stuck(Exception):
    """A process was killed and does not end."""


def _bounded(command: list[str], log: Path, timeout: float) -> int | None:
    """Exit status, or None where it was ended after ``timeout`` seconds together with all that it had started.

    It is interrupted first, as by Ctrl-C: a benchmark keeps what it has measured then.

    Raises
    ------
    _Stuck
        If it does not end then either, as a process in the driver's own teardown may not.
    """
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVING_SECONDS)
        # What it has started may be left, where it is gone itself.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise _Stuck(
                f"it was killed after {timeout:.0f} s and has not ended {_ENDING_SECONDS:.0f} s later"
            ) from error
        return None


def _task(name: str, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    files = ("artifact", "io", "weights", "graph", "clocks")
    return {"name": name} | {key: str((folder / case[key]).resolve()) if case.get(key) else None for key in files}


def _rehearsal_arguments(options: argparse.Namespace) -> list[str]:
    """Of the command, for a step: none on a GPU."""
    if not options.rehearse:
        return []
    deferred = ["--deferred"] if options.deferred else []
    return ["--rehearse", *deferred, *(["--fault", options.fault] if options.fault else [])]


class _Runner:
    """Runs a step's cases and gives each one's entry to ``keep``."""

    def __init__(
        self,
        cases: dict[str, dict[str, Any]],
        options: argparse.Namespace,
        end: float,
        keep: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._cases, self._options, self._end, self._keep = cases, options, end, keep
        self._timeouts = 0
        self.stuck = False

    def left(self) -> float:
        """Seconds of the budget."""
        return self._end - time.monotonic()

    def run(self, step: Step, names: tuple[str, ...]) -> None:
        """Run the cases, in a new process after one that did not come to its end."""
        while names and self.left() >= 5 and not self.stuck:
            if self._timeouts >= _MOST_TIMEOUTS:
                skipped = {"status": "skipped", "seconds": 0.0, "error": "the cases before it ran out of time"}
                done = dict.fromkeys(names, skipped)
            else:
                done = self._process(step, names)
            for name, entry in done.items():
                self._keep(step.key(name), entry)
                if entry["status"] == "timeout":
                    self._timeouts += 1
                elif entry["status"] != "skipped":
                    self._timeouts = 0
            names = tuple(name for name in names if name not in done)

    def _command(self, step: Step, folder: Path, names: tuple[str, ...]) -> list[str]:
        command = [sys.executable, "-m", "benchmarks.gpu_steps", step.kind, "--json", str(folder / "answer.json")]
        tasks = [_task(name, self._cases[name], self._options.input) for name in names if name in self._cases]
        if tasks:
            (folder / "tasks.json").write_text(json.dumps(tasks))
            command += ["--tasks", str(folder / "tasks.json")]
        command += ["--in", str(self._options.input.resolve())]
        command += [*step.arguments, *_rehearsal_arguments(self._options)]
        if step.tool and not self._options.rehearse:
            tool = [str(_sanitizer()), "--tool", step.tool, "--error-exitcode", str(_FINDINGS)]
            command = [*tool, "--target-processes", "all", *command]
        return command

    def _process(self, step: Step, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Entries of the cases that were done, at least one."""
        if step.tool and not self._options.rehearse and _sanitizer() is None:
            return {name: {"status": "missing", "error": "compute-sanitizer is not on PATH"} for name in names}
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gpu-host-") as temporary:
            folder = Path(temporary)
            limit = min(step.timeout, self.left())
            try:
                status, stuck = _bounded(self._command(step, folder, names), folder / "log", limit), ""
            except _Stuck as error:
                status, stuck = None, str(error)
                self.stuck = True
            answer = folder / "answer.json"
            found = json.loads(answer.read_text()) if answer.exists() else {"done": {}, "now": None}
            log = _short((folder / "log").read_text(errors="replace"))
        entries: dict[str, dict[str, Any]] = {}
        for name, result in found["done"].items():
            ok = result["ok"] and not (step.tool and status != 0)
            state = "ok" if ok else result.pop("status", "failed")
            entry = {"status": state, "seconds": result.pop("seconds", None), "result": result}
            said = {"log": log} if log else {}
            entries[name] = entry | said if ok else {**entry, "error": result.get("error") or log}
        if found["now"] is not None or not entries:
            name = found["now"] or names[0]
            seconds = round(time.monotonic() - began, 1)
            state = "stuck" if stuck else "timeout" if status is None else "failed"
            ended = f"it was ended after {seconds:.0f} s\n{log}".strip() if status is None else ""
            entries[name] = {"status": state, "seconds": seconds, "error": stuck or ended or log or f"exit {status}"}
        return entries


# all steps


def run_steps(
    steps: Sequence[Step],
    cases: dict[str, dict[str, Any]],
    options: argparse.Namespace,
    results: dict[str, Any],
    write: Callable[[], None],
    budget: float | None = None,
) -> bool:
    """Run what ``results`` does not have yet, until all is done or the budget is spent.

    Parameters
    ----------
    steps
        Where the first is of kind ``"device"`` and fails, nothing else is run.
    cases
        By name.
    options
        ``budget``, ``jobs``, ``retry``, ``rehearse`` and ``input`` of the command.
    results
        Gets ``results["steps"][key]`` for each case: ``status`` (``ok``, ``failed``, ``timeout``, ``skipped`` after two
        time-outs in a row, ``stuck`` where a process cannot be ended, or ``missing``), ``seconds``, ``result``,
        ``error``.
    write
        Called after each change of ``results``.
    budget
        Seconds, in place of the command's.

    Returns
    -------
    bool
        Whether the GPU can be used further.
    """
    lock, entries = threading.Lock(), results["steps"]
    settled = ("ok",) if options.retry else ("ok", "failed")
    total = sum(len(step.names) for step in steps)
    done = 0

    def keep(key: str, entry: dict[str, Any]) -> None:
        nonlocal done
        with lock:
            entries[key] = entry
            done += 1
            write()
            _log.info("%d/%d %s: %s, %s s", done, total, key, entry["status"], entry.get("seconds"))

    runner = _Runner(cases, options, time.monotonic() + (options.budget if budget is None else budget), keep)

    def run(step: Step) -> None:
        pending = tuple(n for n in step.names if entries.get(step.key(n), {}).get("status") not in settled)
        if step.kind == "device":
            pending = step.names
        runner.run(step, pending)

    others = list(steps)
    while others and others[0].kind == "device":
        first = others.pop(0)
        run(first)
        outcome = entries.get(first.key(first.names[0]), {})
        if outcome.get("status") != "ok":
            _log.error("%s", outcome.get("error"))
            return False
    for together, group in groupby(others, key=lambda step: step.together):
        with ThreadPoolExecutor(options.jobs if together else 1) as pool:
            for future in [pool.submit(run, step) for step in group]:
                future.result()
    if runner.stuck:
        _log.error("a process cannot be ended: the GPU is not used further")
    elif runner.left() < 5:
        _log.warning("the budget is spent: give the same command again to go on")
    return not runner.stuck


def run_phases(
    phases: Sequence[Phase],
    cases: dict[str, dict[str, Any]],
    options: argparse.Namespace,
    results: dict[str, Any],
    write: Callable[[], None],
) -> None:
    """Run one phase after the other, each within its bound and all within ``options.budget``.

    ``results["phases"][name]`` gets the seconds that a phase took, over all calls.
    """
    end = time.monotonic() + options.budget
    taken = results.setdefault("phases", {})
    for phase in phases:
        left = end - time.monotonic()
        if left < 5:
            _log.warning("the budget is spent before %s: give the same command again to go on", phase.name)
            return
        began = time.monotonic()
        usable = run_steps(phase.steps, cases, options, results, write, min(left, phase.bound))
        taken[phase.name] = round(taken.get(phase.name, 0.0) + time.monotonic() - began, 1)
        write()
        if not usable:
            return
