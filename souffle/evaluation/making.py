"""Many rows, made by workers and kept one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from souffle.evaluation.network_rows import Task, task_data, task_key
from souffle.evaluation.result_file import ResultFile
from souffle.workers import Engine, Job, WorkersLostError
from souffle.workers.cases import Asking, Cases

__all__ = ["Row", "make_rows"]

Row = dict[str, Any]

_SAID = "; it said"


def make_rows(
    tasks: Iterable[Task],
    file: ResultFile,
    engine: Callable[[], Engine],
    work: str,
    heard: Callable[[Task, Row, int], None],
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Row]:
    """Make the rows that a file lacks.

    A row that fails is given and not kept, so that the next call tries it again. In the end rows are in the order of
    their tasks, whoever made them.

    Parameters
    ----------
    tasks : iterable of Task
        Those of one network are begun one after the other, the first network's first.
    file : ResultFile
        If its header has a device, each row is made by a worker that owns such a one.
    engine : callable
        Makes the engine, if there is anything to make.
    work : str
        The function that makes a row (:func:`souffle.cli.row_work.make`).
    heard : callable
        Told each task that is done, its row, and how many workers there are.
    interrupted : callable
        See :class:`souffle.workers.cases.Cases`.

    Returns
    -------
    dict
        All rows by :func:`~souffle.evaluation.network_rows.task_key`.

    Raises
    ------
    WorkersLostError, KeyboardInterrupt
        What was made is kept.
    """
    wanted = {task_key(task): task for task in tasks}
    rows = {key: row for key in wanted if (row := file.row(key)) is not None}
    networks: dict[str, list[str]] = {}
    for key, task in wanted.items():
        if key not in rows:
            networks.setdefault(task.network, []).append(key)
    if not networks:
        return rows
    cases = [(key, _ask(work, key, wanted[key], file.header)) for keys in networks.values() for key in keys]

    def keep(key: str, row: Row) -> None:
        rows[key] = row if "failed" in row else file.add(key, row)

    with engine() as workers:
        running = Cases(workers, cases, interrupted)
        try:
            for key, row in running:
                keep(key, row)
                heard(wanted[key], rows[key], workers.workers)
        except (KeyboardInterrupt, WorkersLostError):
            for key, row in running.rest():
                keep(key, row)
            raise
        finally:
            file.arrange(wanted)
    return rows


def _ask(work: str, key: str, task: Task, header: Mapping[str, Any]) -> Asking[Row]:
    measures = header["device"] is not None
    # What is measured is not disturbed by what is not: one worker makes all.
    payload = {"task": task_data(task), "measures": measures}
    job = Job(work, payload, key, resource="gpu" if measures else "cpu")
    (answer,) = yield [(job, partial(_lacks_row, header))]
    if not answer.failure:
        return answer.value["row"]
    why, _, said = answer.failure.partition("\n")
    last = (said.splitlines() or [""])[-1] if why.endswith(_SAID) else ""
    return {"failed": why.removesuffix(_SAID) + (f": {last}" if last else "")}


def _lacks_row(header: Mapping[str, Any], value: Any) -> str:
    """Why what a worker gave is no row of this file; empty where it is."""
    if not isinstance(value, Mapping) or not isinstance(value.get("row"), Mapping):
        return f"its worker gave {str(value)[:80]!r} for a row"
    if value.get("source") != header["source"]:
        return "its worker has another state of Souffle, or other tuning logs, than this process"
    if value.get("device") != header["device"]:
        return f"its worker has {value.get('device')}, and rows here are of {header['device']}"
    return ""
