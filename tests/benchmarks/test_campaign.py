"""A campaign: the same records from whoever runs it and however often it is stopped; what dies costs its case."""

from __future__ import annotations

import fcntl
import json
import resource
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.campaign import RecordFile, count_of, read_records, seeds, without_times
from benchmarks.campaign.__main__ import main as compare
from souffle.cli.interruption import INTERRUPTED
from souffle.errors import OptionError
from souffle.workers import ENGINES, EngineKind, engine_for
from souffle.workers.cases import Cases
from souffle.workers.here import HerePool
from souffle.workers.retrying import Attempt, RetryingEngine
from tests.benchmarks.played_campaign import main
from tests.workers.processes import marked, new_mark, wait_for

ROOT = Path(__file__).resolve().parents[2]


def test_seeds_that_are_done_are_left_out() -> None:
    assert list(seeds("3:7", None, {4, 5})) == [3, 6] and count_of("3:7", None, {4, 5, 9}) == 2
    assert list(seeds("3", None, {})) == [3] and count_of("3", None, {}) == 1
    assert list(seeds(None, 3, {0, 2})) == [1, 3, 4] and count_of(None, 3, {0, 2}) == 3
    assert list(islice(seeds(None, None, {0}), 2)) == [1, 2] and count_of(None, None, {0}) is None


def seed_of(record: dict) -> int:
    return record["seed"]


def test_a_line_that_was_not_finished_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "out.jsonl"
    assert read_records(path) == read_records(None) == []
    file = RecordFile(path, seed_of)
    file.add({"seed": 4})
    with path.open("a") as cut:
        cut.write('{"seed": 2, "no')
    file.add({"seed": 3})
    file.add({"seed": 1})
    assert [record["seed"] for record in read_records(path)] == [4, 3, 1] and len(path.read_bytes().splitlines()) == 4
    file.close()
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [{"seed": 1}, {"seed": 3}, {"seed": 4}]


def test_a_file_of_records_is_in_order_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with RecordFile(path, seed_of, {"level": "V4"}) as file:
        for seed in (5, 10, 2):
            file.add({"seed": seed, "of": (1,)})
        assert [json.loads(line).get("seed") for line in path.read_text().splitlines()] == [None, 5, 10, 2]
        with path.open("a") as cut:
            cut.write('{"seed": 3, "no')
        file.add({"seed": 5, "of": "the last one counts"})
    first = path.read_bytes()
    assert [json.loads(line).get("seed") for line in first.splitlines()] == [None, 2, 5, 10]
    with RecordFile(path, seed_of, {"level": "V4"}) as file:
        assert {seed: record["of"] for seed, record in file.records.items()} == {
            2: [1],
            5: "the last one counts",
            10: [1],
        }
    assert path.read_bytes() == first
    with RecordFile(path, seed_of, {"level": "V4"}) as file:
        file.forget(lambda record: record["seed"] > 2)
        file.add({"seed": 10, "of": "again"})
    assert [record.get("of") for record in read_records(path)] == [None, [1], "again"]
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]
    with RecordFile(None, seed_of) as file:
        file.add({"seed": 1})
    assert file.records == {1: {"seed": 1}}


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for content, why in (
        ('{\n "results": []\n}\n', "holds no records"),
        ("my own\nwords\n", "holds no records"),
        ('{"name": 3}\n', "something else"),
        ('{"setting": {"level": "V3"}}\n{"seed": 1}\n', "level"),
    ):
        path.write_text(content)
        with pytest.raises(OptionError, match=why):
            RecordFile(path, seed_of, {"level": "V4"} if why == "level" else None)
        assert path.read_text() == content
    # A line that was cut in the very beginning is none of these.
    path.write_text('{"sett')
    with RecordFile(path, seed_of, {"level": "V4"}) as file:
        file.add({"seed": 1})
    assert len(read_records(path)) == 2
    with pytest.raises(OptionError, match="cannot be written"):
        RecordFile(tmp_path / "out.jsonl" / "below", seed_of)


def test_one_campaign_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with RecordFile(path, seed_of) as file:
        file.add({"seed": 2})
        with pytest.raises(OptionError, match="another campaign is writing"):
            RecordFile(path, seed_of)
        assert main(["--out", str(path), "--count", "1", "--on", "here"]) == 2
        file.add({"seed": 1})
    with RecordFile(path, seed_of) as file:
        assert list(file.records) == [1, 2]
    with path.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OptionError, match="another campaign"):
            RecordFile(path, seed_of)


def test_a_full_disk_is_said_and_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        file = RecordFile(path, seed_of)
        file.add({"seed": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, limits[1]))
        with pytest.raises(OptionError, match="cannot be written: File too large"):
            file.add({"seed": 2, "words": "x" * 40})
        with pytest.raises(OptionError, match="cannot be written"):
            file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_text() == '{"seed": 1}\n'
    RecordFile(path, seed_of).close()


def lines_of(path: Path) -> list[dict]:
    return [without_times(record) for record in read_records(path)]


def test_all_workers_give_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In whatever order they answer, also where the campaign finds its cases on the way, and with workers renewed."""
    paths = []
    ways = {"here": [], "local:1": ["--more"], "local:2": ["--each", "4"], "local:3": ["--more", "--each", "1"]}
    for word, options in ways.items():
        paths.append(tmp_path / f"{word}.jsonl")
        assert main(["--seeds", "0:17", "--on", word, "--out", str(paths[-1]), *options]) == 0
    assert [record["seed"] for record in lines_of(paths[0])[1:]] == list(range(17))
    for path in paths[1:]:
        assert compare([str(paths[0]), str(path)]) == 0
    assert "18 and 18 lines: the same, times aside" in capsys.readouterr().out
    with paths[1].open("a") as file:
        file.write('{"seed": 99}\n')
    assert compare([str(paths[0]), str(paths[1])]) == 1
    out = capsys.readouterr().out
    assert "only in" in out and "18 and 19 lines: not the same" in out


def test_what_dies_costs_its_case(tmp_path: Path) -> None:
    found = []
    for number in (1, 2):
        path = tmp_path / f"{number}.jsonl"
        assert main(["--seeds", "0:12", "--deadly", "--workers", str(number), "--out", str(path)]) == 0
        found.append({record["seed"]: record for record in lines_of(path) if "seed" in record})
    assert found[0] == found[1]
    others = {seed: (one["kind"], one.get("detail")) for seed, one in found[0].items() if one["kind"] != "right"}
    assert others == {
        3: ("crash", "its worker ended with signal SIGABRT (it had 8192 MB)"),
        7: ("timeout", "took longer than 0.7 s"),
        9: ("crash", "it gave nonsense"),
    }


def test_new_workers_take_over(tmp_path: Path) -> None:
    pids = {}
    for each in (None, 3):
        path = tmp_path / f"{each}.jsonl"
        options = [] if each is None else ["--each", str(each)]
        assert main(["--seeds", "0:10", "--pids", "--out", str(path), *options]) == 0
        pids[each] = [record["pid"] for record in lines_of(path)[1:]]
    assert len(set(pids[None])) == 1
    assert [pids[3].index(pid) for pid in pids[3]] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]


def test_what_is_asked_for_and_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--count", "1", "--out", str(tmp_path / "out.jsonl")]
    assert main([*out, "--on", "here", "--workers", "2"]) == 2
    assert main([*out, "--on", "there"]) == 2
    assert main([*out, "--workers", "0"]) == 2
    complaints = capsys.readouterr().err
    assert all(words in complaints for words in ("says already which workers", "no engine 'there'", "at least one"))
    # Where nothing is to be done, nobody is asked.
    assert main(["--count", "0", "--on", "there", "--out", str(tmp_path / "other.jsonl")]) == 0


@pytest.mark.parametrize("word", ["here", "local:1"])
def test_a_swallowed_interrupt_ends_it_and_gives_no_record(word: str, tmp_path: Path) -> None:
    """In this process only; workers do not hear of it, and their answers are true."""
    path = tmp_path / "out.jsonl"
    options = ["--seeds", "0:5", "--interrupt", "2", "--on", word, "--out", str(path)]
    assert main(options) == (INTERRUPTED if word == "here" else 0)
    assert [record["seed"] for record in read_records(path)[1:]] == ([0, 1] if word == "here" else [0, 1, 2, 3, 4])
    assert main(options[:2] + options[4:]) == 0
    assert [record["seed"] for record in read_records(path)[1:]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("word", ["here", "local:2"])
def test_a_stopped_campaign_goes_on(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, then killed, then to its end: the same as of one that nobody has stopped."""
    mark = new_mark(monkeypatch)
    path, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    command = [sys.executable, "-m", "tests.benchmarks.played_campaign", "--seeds", "0:40", "--sleep", "0.02"]
    for number, how in ((6, signal.SIGINT), (14, signal.SIGKILL)):
        process = subprocess.Popen([*command, "--on", word, "--out", str(path)], cwd=ROOT, stderr=subprocess.PIPE)
        wait_for(lambda number=number: len(read_records(path)) > number)
        process.send_signal(how)
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == (INTERRUPTED if how == signal.SIGINT else -signal.SIGKILL)
        assert b"Traceback" not in complaints and (how == signal.SIGKILL or b"souffle: interrupted" in complaints)
        wait_for(lambda: not marked(mark))
        with path.open("a") as file:
            file.write('{"seed": 39, "kin')
    there = len(read_records(path))
    assert 14 < there < 41
    done = subprocess.run([*command, "--on", word, "--out", str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and f" of {41 - there} cases, " in done.stderr, done.stderr
    assert main([*command[3:], "--on", "here", "--out", str(whole)]) == 0
    assert compare([str(path), str(whole)]) == 0


class LosingPool(HerePool):
    """One whose workers are gone after some jobs."""

    def open(self, lost) -> None:
        self._left, self._lost = 7, lost

    def start(self, attempt: Attempt) -> None:
        self._left -= 1
        if self._left < 0:
            self._lost("the head is gone")
        else:
            super().start(attempt)


def test_workers_that_are_lost_are_said_and_what_is_done_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ENGINES, "losing", EngineKind(("losing",), lambda rest: RetryingEngine("losing", LosingPool())))
    out = tmp_path / "out.jsonl"
    assert main(["--count", "5", "--on", "losing", "--out", str(out)]) == 2
    assert "the workers of losing are lost: the head is gone" in capsys.readouterr().err
    # Three jobs are a case.
    assert [record["seed"] for record in read_records(out)[1:]] == [0, 1]


def test_time_that_is_up_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    options = ["--on", "here", "--out", str(path), "--sleep", "0.01"]
    assert main([*options, "--minutes", "0.005"]) == 0
    there = len(read_records(path))
    assert main([*options, "--count", "2", "--minutes", "60"]) == 0
    assert len(read_records(path)) == there + 2


def test_cases_are_taken_as_there_is_room_and_fail_as_they_do() -> None:
    taken = []

    def cases():
        for number in range(10**9):
            taken.append(number)
            yield f"{number}", one(number)

    def one(number: int):
        yield []
        if number == 3:
            raise ZeroDivisionError
        return number

    with engine_for("here") as engine:
        running = Cases(engine, cases())
        results = iter(running)
        assert [next(results) for _ in range(3)] == [("0", 0), ("1", 1), ("2", 2)] and len(taken) == 3
        with pytest.raises(ZeroDivisionError):
            next(results)
