"""Many rows, made by processes side by side and kept one by one."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from souffle.evaluation.network_rows import Task, task_data, task_key
from souffle.evaluation.result_file import ResultFile

__all__ = ["Said", "make_rows", "worker_command"]

_GRACE_SECONDS = 2.0
"""For threads whose processes were ended, to read what these have written."""


@dataclass(frozen=True)
class Said:
    """What one of the processes says of a task: what is being done, or its row.

    Attributes
    ----------
    task : Task
    message : str
    row : dict or None
    """

    task: Task
    message: str = ""
    row: dict[str, Any] | None = None


def make_rows(
    tasks: Iterable[Task],
    file: ResultFile,
    worker: Sequence[str],
    jobs: int,
    heard: Callable[[Said, int, int], None],
) -> dict[str, dict[str, Any]]:
    """Make the rows that a file lacks.

    A row that fails is given and not kept, so that the next call tries it again.

    Parameters
    ----------
    tasks : iterable of Task
        Those of one network go to one process, in their order; the first network's are begun first.
    file : ResultFile
    worker : sequence of str
        The command that takes tasks on stdin.
    jobs : int
        Processes at a time.
    heard : callable
        Told what is said, how many rows there are, and how many there will be.

    Returns
    -------
    dict
        All rows by :func:`~souffle.evaluation.network_rows.task_key`.
    """
    wanted = {task_key(task): task for task in tasks}
    rows = {key: row for key in wanted if (row := file.row(key)) is not None}
    batches: dict[str, list[str]] = {}
    for key, task in wanted.items():
        if key not in rows:
            batches.setdefault(task.network, []).append(key)
    if not batches:
        return rows
    waiting: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for batch in batches.values():
        waiting.put(batch)
    said = _Said()
    crew = _Crew(wanted, worker, waiting, said)
    threads = [threading.Thread(target=crew.work, daemon=True) for _ in range(max(1, min(jobs, len(batches))))]
    try:
        for thread in threads:
            thread.start()
        left = len(threads)
        while left:
            item = said.first()
            if item is None:
                left -= 1
            else:
                key, line = item
                row = line.get("row")
                if row is not None:
                    rows[key] = row if "failed" in row else file.add(key, row)
                heard(Said(wanted[key], line.get("says", ""), row), len(rows), len(wanted))
            said.done()
    finally:
        crew.end()
        _keep_the_rest(threads, said, file)
    return rows


class _Said:
    """What was said and is not done with: an interrupt between the two loses nothing."""

    def __init__(self) -> None:
        self._items: deque[tuple[str, dict[str, Any]] | None] = deque()
        self._count = threading.Semaphore(0)

    def put(self, item: tuple[str, dict[str, Any]] | None) -> None:
        """Say something; None where a thread is done."""
        self._items.append(item)
        self._count.release()

    def first(self) -> tuple[str, dict[str, Any]] | None:
        """Wait for something; it stays until :meth:`done`."""
        self._count.acquire()
        return self._items[0]

    def done(self) -> None:
        """The first is done with."""
        self._items.popleft()

    def rows(self) -> list[tuple[str, dict[str, Any]]]:
        """Those that are left."""
        lines = [item for item in self._items if item is not None and "row" in item[1]]
        return [(key, line["row"]) for key, line in lines if "failed" not in line["row"]]


def _keep_the_rest(threads: Sequence[threading.Thread], said: _Said, file: ResultFile) -> None:
    """Keep rows that were made before an interrupt and not heard of yet."""
    for thread in threads:
        if thread.is_alive():
            thread.join(_GRACE_SECONDS)
    for key, row in said.rows():
        file.add(key, row)


class _Crew:
    """Threads that each have one process at a time."""

    def __init__(self, wanted: dict[str, Task], worker: Sequence[str], waiting: queue.SimpleQueue, said: _Said) -> None:
        self.wanted, self.worker, self.waiting, self.said = wanted, list(worker), waiting, said
        self.processes: set[subprocess.Popen] = set()
        self.over = False

    def work(self) -> None:
        """Make rows while there are batches."""
        try:
            while not self.over:
                keys = self.waiting.get_nowait()
                while keys and not self.over:
                    keys = self._batch(keys)
        except queue.Empty:
            pass
        finally:
            self.said.put(None)

    def _batch(self, keys: list[str]) -> list[str]:
        """Make the rows of a batch; what is left behind one whose process ended without it."""
        with tempfile.TemporaryFile("w+") as told:
            process = subprocess.Popen(
                self.worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told, text=True, env=dict(os.environ)
            )
            self.processes.add(process)
            left = list(keys)
            try:
                tasks = [{"key": key, "task": task_data(self.wanted[key])} for key in keys]
                # Its stdin stays open: once this process is no more, it is closed, and the worker ends.
                process.stdin.write(json.dumps(tasks) + "\n")
                process.stdin.flush()
                for text in process.stdout:
                    line = json.loads(text)
                    if "row" in line:
                        left.remove(line["key"])
                    self.said.put((line["key"], line))
                    if not left:
                        break
            except BrokenPipeError:
                pass
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            status = process.wait()
            self.processes.discard(process)
            if left and not self.over:
                told.seek(0)
                last = (told.read().strip().splitlines() or [""])[-1]
                why = f"its process ended with status {status}{': ' + last if last else ''}"
                self.said.put((left.pop(0), {"row": {"failed": why}}))
            return left

    def end(self) -> None:
        """End all processes."""
        self.over = True
        for process in tuple(self.processes):
            process.kill()


def worker_command(module: str) -> list[str]:
    """How a module of the package is started as a process."""
    return [sys.executable, "-m", module]
