"""Rows made by processes side by side: kept one by one, whatever ends them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from souffle.evaluation.making import Said, make_rows
from souffle.evaluation.network_rows import Planned, task_key
from souffle.evaluation.result_file import ResultFile, result_header

_WORKER = """
import json, os, sys, threading, time
tasks = json.loads(sys.stdin.readline())
def watch():
    sys.stdin.read()
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
open({log!r}, "a").write(f"{{os.getpid()}} {{len(tasks)}}\\n")
for item in tasks:
    print(json.dumps({{"key": item["key"], "says": "working"}}), flush=True)
    {act}
    print(json.dumps({{"key": item["key"], "row": {{"network": item["task"]["network"]}}}}), flush=True)
"""


def tasks(count: int) -> list[Planned]:
    return [Planned(f"net{number % 3}", "tiny", (f"planner{number}",), "a GPU") for number in range(count)]


def worker(tmp_path: Path, act: str = "pass") -> list[str]:
    script = tmp_path / "worker.py"
    script.write_text(_WORKER.format(log=str(tmp_path / "log"), act=act))
    return [sys.executable, str(script)]


def file(tmp_path: Path) -> ResultFile:
    return ResultFile(tmp_path / "rows.json", result_header({}, None))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def ignored(said: Said, there: int, wanted: int) -> None:
    pass


@pytest.mark.parametrize("jobs", [1, 2, 8])
def test_all_rows_are_made_once(tmp_path: Path, jobs: int) -> None:
    heard: list[tuple[int, int]] = []

    def hear(said: Said, there: int, wanted: int) -> None:
        heard.append((there, wanted))

    rows = make_rows([*tasks(7), *tasks(7)], file(tmp_path), worker(tmp_path), jobs, hear)
    assert set(rows) == {task_key(task) for task in tasks(7)} and heard[-1] == (7, 7)
    assert all(rows[task_key(task)]["network"] == task.network for task in tasks(7))
    # A process for each network.
    assert sorted(int(line.split()[1]) for line in (tmp_path / "log").read_text().splitlines()) == [2, 2, 3]


def test_an_interrupt_keeps_what_is_made_and_leaves_no_process(tmp_path: Path) -> None:
    def interrupt(said: Said, there: int, wanted: int) -> None:
        if there == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_rows(tasks(9), file(tmp_path), worker(tmp_path, "time.sleep(0.05)"), 2, interrupt)
    kept = file(tmp_path)
    there = len(kept.rows)
    assert 4 <= there < 9
    pids = [int(line.split()[0]) for line in (tmp_path / "log").read_text().splitlines()]
    end = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
    (tmp_path / "log").unlink()
    rows = make_rows(tasks(9), kept, worker(tmp_path), 2, ignored)
    assert len(rows) == 9
    assert sum(int(line.split()[1]) for line in (tmp_path / "log").read_text().splitlines()) == 9 - there


def test_a_process_that_ends_takes_one_row_with_it(tmp_path: Path) -> None:
    act = "sys.exit('out of memory') if 'planner3' in item['key'] else None"
    kept = file(tmp_path)
    rows = make_rows(tasks(9), kept, worker(tmp_path, act), 1, ignored)
    failed = {key: row["failed"] for key, row in rows.items() if "failed" in row}
    assert failed == {task_key(tasks(9)[3]): "its process ended with status 1: out of memory"}
    # It is tried again by the next call.
    assert len(rows) == 9 and len(kept.rows) == 8


def test_nothing_is_started_where_all_is_there(tmp_path: Path) -> None:
    kept = file(tmp_path)
    for task in tasks(3):
        kept.add(task_key(task), {})
    assert len(make_rows(tasks(3), kept, ["no such program"], 2, ignored)) == 3
