"""Runs the steps of ``benchmarks.gpu_host`` on the GPU host: processes bounded in time, results kept after each."""

from __future__ import annotations

import argparse
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

__all__ = ["TOOLS", "Step", "barrier_of", "chosen_cases", "run_steps", "steps_for"]

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
"""Of compute-sanitizer."""
_ROOT = Path(__file__).resolve().parent.parent
_TASK_KEYS = ("model", "size", "level")
_FINDINGS = 9
"""The exit status that compute-sanitizer is told to give where it finds something."""
_log = logging.getLogger("gpu_host")


@dataclass(frozen=True)
class Step:
    """One process, or more where a case crashes and the others go on without it.

    Attributes
    ----------
    kind : str
        Of ``benchmarks.gpu_steps``.
    label : str
        The first word of its entries in the results: ``"check NAME"`` for each case.
    names : tuple of str
        The cases; the results are kept and resumed by case.
    arguments : tuple of str
    timeout : float
        Seconds for each process.
    tool : str
        Of compute-sanitizer, under which it runs.
    together : bool
        Whether it may run beside other such steps: nothing is timed in it.
    """

    kind: str
    label: str
    names: tuple[str, ...]
    arguments: tuple[str, ...]
    timeout: float
    tool: str = ""
    together: bool = False

    def key(self, name: str) -> str:
        """A case's name in the results."""
        return name if name == self.label else f"{self.label} {name}"


def chosen_cases(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One case of each model, size, precision, level and barrier: that with stored constants where there are two."""
    chosen: dict[tuple[str, ...], str] = {}
    for name, case in cases.items():
        key = (*(case[part] for part in ("model", "size", "precision", "level")), barrier_of(case))
        if key not in chosen or case["constants"] == "stored":
            chosen[key] = name
    return {name: cases[name] for name in cases if name in chosen.values()}


def barrier_of(case: dict[str, Any]) -> str:
    """How the blocks of a case's kernels wait for each other; cases of before there was a choice lack it."""
    return case.get("grid_barrier", "cooperative")


def steps_for(cases: dict[str, dict[str, Any]], options: argparse.Namespace) -> list[Step]:
    """All steps, the ones that matter most first."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, case in cases.items():
        groups.setdefault((case["size"], case["model"], case["precision"]), []).append(name)

    def quiet(size: str) -> tuple[str, ...]:
        # Without a GPU a paper model's kernels would take hours.
        return ("--no-execute",) if options.rehearse and size != "tiny" else ()

    def latencies(wanted: Callable[[str], bool]) -> list[Step]:
        figures = ("--repeats", str(options.latency_repeats), "--rounds", str(options.rounds))
        figures += ("--warmup", "1" if options.rehearse else "10", "--seconds", str(options.timeout / 4))
        found = []
        for (size, _, _), names in groups.items():
            if wanted(size):
                # Several paper models at once would fill the memory of a small machine.
                alone = options.rehearse and size != "tiny"
                parts = [(name,) for name in names] if alone else [tuple(names)]
                found += [Step("latency", "latency", part, (*figures, *quiet(size)), options.timeout) for part in parts]
        return found

    def checks(wanted: Callable[[str], bool]) -> list[Step]:
        return [
            Step("check", "check", tuple(names), ("--repeats", str(options.repeats), *quiet(size)), options.timeout,
                 together=True)
            for (size, _, _), names in groups.items() if wanted(size)
        ]  # fmt: skip

    steps = [Step("device", "device", ("device",), (), 60)]
    steps.append(Step("micro", "micro", ("micro",), ("--repeats", "25"), 120))
    steps += checks(lambda size: size == "tiny")
    steps += latencies(lambda size: size != "tiny")
    steps += checks(lambda size: size != "tiny")
    steps += latencies(lambda size: size == "tiny")
    for tool in TOOLS:
        for name, case in cases.items():
            if case["size"] == "tiny" and case["level"] in options.sanitize:
                steps.append(Step("once", tool, (name,), (), options.timeout, tool, together=True))
    return [step for step in steps if step.kind == "device" or options.only is None or step.kind in options.only]


# one process


def _sanitizer() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")


def _short(text: str, size: int = 1600) -> str:
    """Beginning and end: a sanitizer's first finding stands first, a traceback's message last."""
    text = text.strip()
    return text if len(text) <= size else f"{text[: size // 2]}\n[...]\n{text[-size // 2 :]}"


def _bounded(command: list[str], log: Path, timeout: float) -> int | None:
    """Exit status, or None where it was ended after ``timeout`` seconds together with all that it had started."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def _task(name: str, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    task = {"name": name, **{key: case[key] for key in _TASK_KEYS}}
    for key in ("artifact", "io", "weights"):
        task[key] = str((folder / case[key]).resolve()) if case.get(key) else None
    return task | {"steps": case.get("steps")}


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

    def left(self) -> float:
        """Seconds of the budget."""
        return self._end - time.monotonic()

    def run(self, step: Step, names: tuple[str, ...]) -> None:
        """Run the cases, in a new process after one that did not come to its end."""
        while names and self.left() >= 5:
            done = self._process(step, names)
            for name, entry in done.items():
                self._keep(step.key(name), entry)
            names = tuple(name for name in names if name not in done)

    def _command(self, step: Step, folder: Path, names: tuple[str, ...]) -> list[str]:
        command = [sys.executable, "-m", "benchmarks.gpu_steps", step.kind, "--json", str(folder / "answer.json")]
        tasks = [_task(name, self._cases[name], self._options.input) for name in names if name in self._cases]
        if tasks:
            (folder / "tasks.json").write_text(json.dumps(tasks))
            command += ["--tasks", str(folder / "tasks.json")]
        command += [*step.arguments, *(["--rehearse"] if self._options.rehearse else [])]
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
            status = _bounded(self._command(step, folder, names), folder / "log", limit)
            answer = folder / "answer.json"
            found = json.loads(answer.read_text()) if answer.exists() else {"done": {}, "now": None}
            log = _short((folder / "log").read_text(errors="replace"))
        entries: dict[str, dict[str, Any]] = {}
        for name, result in found["done"].items():
            ok = result["ok"] and not (step.tool and status != 0)
            entry = {"status": "ok" if ok else "failed", "seconds": result.pop("seconds", None), "result": result}
            entries[name] = entry if ok else {**entry, "error": result.get("error") or log}
        if found["now"] is not None or not entries:
            name = found["now"] or names[0]
            seconds = round(time.monotonic() - began, 1)
            state = "timeout" if status is None else "failed"
            entries[name] = {"status": state, "seconds": seconds, "error": log or f"exit status {status}"}
        return entries


# all steps


def run_steps(
    steps: list[Step],
    cases: dict[str, dict[str, Any]],
    options: argparse.Namespace,
    results: dict[str, Any],
    write: Callable[[], None],
) -> None:
    """Run what ``results`` does not have yet, until all is done or the budget is spent.

    Parameters
    ----------
    steps
        Of :func:`steps_for`; where the first fails, nothing else is run.
    cases
        By name.
    options
        ``budget``, ``jobs``, ``retry``, ``rehearse`` and ``input`` of the command.
    results
        Gets ``results["steps"][key]`` for each case: ``status`` (``ok``, ``failed``, ``timeout`` or ``missing``),
        ``seconds``, ``result``, ``error``.
    write
        Called after each change of ``results``.
    """
    lock, entries = threading.Lock(), results["steps"]
    settled = ("ok",) if options.retry else ("ok", "failed")
    total = sum(len(step.names) for step in steps)

    def keep(key: str, entry: dict[str, Any]) -> None:
        with lock:
            entries[key] = entry
            write()
            _log.info("%d/%d %s: %s, %s s", len(entries), total, key, entry["status"], entry.get("seconds"))

    runner = _Runner(cases, options, time.monotonic() + options.budget, keep)

    def run(step: Step) -> None:
        pending = tuple(n for n in step.names if entries.get(step.key(n), {}).get("status") not in settled)
        if step.kind == "device":
            pending = step.names
        runner.run(step, pending)

    first, *others = steps
    run(first)
    outcome = entries.get(first.key(first.names[0]), {})
    if outcome.get("status") != "ok":
        _log.error("%s", outcome.get("error"))
        return
    for together, group in groupby(others, key=lambda step: step.together):
        with ThreadPoolExecutor(options.jobs if together else 1) as pool:
            for future in [pool.submit(run, step) for step in group]:
                future.result()
    if runner.left() < 5:
        _log.warning("the budget is spent: give the same command again to go on")
