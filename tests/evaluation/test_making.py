"""Rows made by workers: kept one by one, whatever ends them, and in one order."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from souffle.evaluation.making import Row, make_rows
from souffle.evaluation.network_rows import Planned, Task, task_key
from souffle.evaluation.result_file import ResultFile, result_header
from souffle.workers import engine_for
from tests.thorough import some
from tests.workers.processes import marked, new_mark, wait_for

_WORK = "tests.evaluation.played_rows:make"


def tasks(count: int, planners: dict[int, str] | None = None) -> list[Planned]:
    names = {number: f"planner{number}" for number in range(count)} | (planners or {})
    return [Planned(f"net{number % 3}", "tiny", (names[number], str(number)), "a GPU") for number in range(count)]


def file(tmp_path: Path, device: str | None = None) -> ResultFile:
    return ResultFile(tmp_path / "rows.json", result_header({}, device))


def ignored(task: Task, row: Row, workers: int) -> None:
    pass


def made(tasks: list[Planned], kept: ResultFile, on: str = "here", heard: Any = ignored) -> dict[str, Row]:
    return make_rows(tasks, kept, partial(engine_for, on), _WORK, heard)


@pytest.mark.parametrize("on", some(["here", "local:2"], ["local:1"]))
def test_all_rows_are_made_once_and_are_in_order(on: str, tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []

    def hear(task: Task, row: Row, workers: int) -> None:
        heard.append((task.network, workers))

    rows = made([*tasks(7), *tasks(7)], file(tmp_path), on, hear)
    assert set(rows) == {task_key(task) for task in tasks(7)} and len(heard) == 7
    assert all(rows[task_key(task)]["network"] == task.network for task in tasks(7))
    assert {workers for _, workers in heard} == {2 if on == "local:2" else 1}
    if on != "local:2":
        assert [network for network, _ in heard] == ["net0"] * 3 + ["net1"] * 2 + ["net2"] * 2
    assert [row["key"] for row in file(tmp_path).rows] == [task_key(task) for task in tasks(7)]
    assert len({row["pid"] for row in rows.values()}) <= int(on.rpartition(":")[2].replace("here", "1"))


def test_an_interrupt_keeps_what_is_made_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = new_mark(monkeypatch)
    heard: list[Task] = []

    def interrupt(task: Task, row: Row, workers: int) -> None:
        heard.append(task)
        if len(heard) == 4:
            raise KeyboardInterrupt

    # Of which the last ones never end.
    slow = dict.fromkeys(range(5, 9), "slow")
    with pytest.raises(KeyboardInterrupt):
        made(tasks(9, slow), file(tmp_path), "local:2", interrupt)
    wait_for(lambda: not marked(mark))
    kept = file(tmp_path)
    assert len(kept.rows) == 4
    before = list(kept.rows)
    rows = made(tasks(9), kept)
    assert len(rows) == 9 and all(row in rows.values() for row in before)


def test_what_ends_its_worker_takes_one_row_with_it(tmp_path: Path) -> None:
    ways = {3: "abort", 4: "leave", 5: "raise", 6: "refuse", 7: "stale"}
    kept = file(tmp_path)
    rows = made(tasks(9, ways), kept, "local:2")
    failed = {task.planners[0]: rows[task_key(task)].get("failed") for task in tasks(9, ways)}
    assert {name: why for name, why in failed.items() if why} == {
        "abort": "its worker ended with signal SIGABRT: out of memory",
        "leave": failed["leave"],
        "raise": "ValueError: no such thing",
        "refuse": "ModelError: it is empty",
        "stale": "its worker has another state of Souffle, or other tuning logs, than this process",
    }
    assert failed["leave"].startswith("its worker ended with exit status 1")
    # They are tried again by the next call.
    assert len(rows) == 9 and len(kept.rows) == 4
    again: list[Task] = []
    made(tasks(9, {3: "planner3", 6: "refuse"}), kept, "here", lambda task, row, workers: again.append(task))
    assert [task.planners[1] for task in again] == ["3", "6", "4", "7", "5"] and len(kept.rows) == 8


def test_what_is_measured_is_of_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAYED_GPU", "a GPU")
    rows = made(tasks(4, {1: "elsewhere"}), file(tmp_path, "a GPU"), "local:2")
    failed = [row.get("failed") for row in rows.values()]
    assert [why for why in failed if why] == ["its worker has another GPU, and rows here are of a GPU"]
    # One worker has made them, so that none was measured beside another.
    assert len({row["pid"] for row in rows.values() if "pid" in row}) == 1


def test_nothing_is_started_where_all_is_there(tmp_path: Path) -> None:
    kept = file(tmp_path)
    for task in tasks(3):
        kept.add(task_key(task), {})
    assert len(made(tasks(3), kept, "no such engine")) == 3
