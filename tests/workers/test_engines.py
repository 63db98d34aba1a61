"""What all engines have in common: the same jobs give the same outcomes, whatever happens to who does them."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, as_completed
from pathlib import Path
from typing import Any

import pytest

from souffle.errors import OptionError
from souffle.workers import ENGINES, Engine, EngineKind, Job, Outcome, engine_for
from souffle.workers.here import here_engine
from tests.workers.processes import alive, marked, new_mark, wait_for

pytestmark = pytest.mark.xdist_group("workers")

NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
OTHERS = [pytest.param("local:2"), pytest.param("ray:2", marks=NEEDS_RAY)]


@pytest.fixture(scope="package")
def made() -> Iterator[dict[str, Engine]]:
    engines: dict[str, Engine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def engine(made: dict[str, Engine], request: pytest.FixtureRequest) -> Engine:
    """One that lives through all tests, whatever they do to it."""
    word = request.param
    if word not in made:
        made[word] = engine_for(word)
    return made[word]


ALL = pytest.mark.parametrize("engine", [pytest.param("here"), *OTHERS], indirect=True)
APART = pytest.mark.parametrize("engine", OTHERS, indirect=True)


def job(name: str, payload: Any = None, **options: Any) -> Job:
    return Job(f"tests.workers.played_jobs:{name}", payload, f"{name} of {payload}", **options)


def outcome(engine: Engine, name: str, payload: Any = None, **options: Any) -> Outcome:
    return engine.submit(job(name, payload, **options)).result(timeout=120)


def first_line(outcome: Outcome) -> str:
    assert outcome.value is None
    return outcome.failure.partition("\n")[0]


@ALL
def test_many_jobs_and_shared_data(engine: Engine) -> None:
    futures = {engine.submit(job("double", [n, "text", None])): n for n in range(40)}
    for future in as_completed(futures):
        found, n = future.result(), futures[future]
        assert (found.value, found.failure, found.attempts) == ([n, "text", None] * 2, "", 1)
        assert found.worker and found.seconds > 0
    assert engine.workers == (1 if engine.name == "here" else 2)
    large, small = os.urandom(3 * 10**6), b""
    keys = engine.share(large), engine.share(small)
    assert engine.share(bytes(large)) == keys[0] != keys[1]
    assert outcome(engine, "lengths", shared=keys).value == {keys[0]: len(large), keys[1]: 0}
    assert outcome(engine, "lengths").value == {}
    # A payload and a value that no pipe takes at once.
    assert outcome(engine, "double", large).value == large * 2
    payload = [1]
    future = engine.submit(job("double", payload))
    assert payload == [1] and future.result(timeout=120).value == [1, 1]


@ALL
def test_what_a_function_raises_comes_once(engine: Engine, tmp_path: Path) -> None:
    found = outcome(engine, "refuse", 5)
    assert first_line(found) == "ValueError: no tile of 5" and "in refuse" in found.failure and found.attempts == 1
    assert outcome(engine, "at_first", (str(tmp_path / "tries"), "refused")).attempts == 1
    found = outcome(engine, "give_what_cannot_travel")
    assert "pickle" in first_line(found) and found.attempts == 1
    for name, why in (("no_such_function", "AttributeError"), ("double.no.such", "AttributeError")):
        found = outcome(engine, name)
        assert first_line(found).startswith(f"its worker cannot begin: {why}") and found.attempts == 2
    found = engine.submit(Job("no.such.module:double", 1, "of nobody")).result(timeout=120)
    assert first_line(found).startswith("its worker cannot begin: ModuleNotFoundError")
    assert outcome(engine, "double", 3).value == 6


@ALL
def test_nonsense_is_asked_for_again(engine: Engine, tmp_path: Path) -> None:
    """By a check, which may fail itself; it sees what has travelled."""
    path, seen = str(tmp_path / "tries"), []

    def check(value: list[int]) -> str:
        seen.append(value)
        return "" if len(value) > 1 else "one try is no try"

    found = engine.submit(job("at_first", (path, "nothing")), check).result(timeout=120)
    assert (found.attempts, found.failure) == (2, "") and [len(value) for value in seen] == [1, 2]
    found = engine.submit(job("double", 1), lambda value: f"{value} is not odd").result(timeout=120)
    assert (first_line(found), found.attempts) == ("2 is not odd", 2)
    found = engine.submit(job("double", 1), lambda value: value["no"]).result(timeout=120)
    assert first_line(found).startswith("the check of what it gave failed: TypeError") and found.attempts == 2


@ALL
@pytest.mark.parametrize(("way", "why"), [("full disk", "No space left"), ("memory", "needed more memory than there")])
def test_errors_of_the_machine_are_tried_again(engine: Engine, way: str, why: str, tmp_path: Path) -> None:
    found = outcome(engine, "at_first", (str(tmp_path / "tries"), way))
    assert (found.failure, found.attempts, len(found.value)) == ("", 2, 2)
    if engine.name == "local:2" or (engine.name == "ray:2" and way == "memory"):
        assert len(set(found.value)) == 2, "the second try is another process's"
    found = outcome(engine, "always", (str(tmp_path / "others"), way))
    assert why in first_line(found) and found.attempts == 2


@APART
@pytest.mark.parametrize(("way", "why"), [("killed", "signal SIGKILL"), ("terminated", "signal SIGTERM")])
def test_a_worker_that_ends_costs_a_try(engine: Engine, way: str, why: str, tmp_path: Path) -> None:
    others = [engine.submit(job("double", n)) for n in range(20)]
    found = outcome(engine, "at_first", (str(tmp_path / "tries"), way))
    assert (found.failure, found.attempts, len(set(found.value))) == ("", 2, 2)
    found = outcome(engine, "always", (str(tmp_path / "others"), way))
    assert first_line(found).startswith(f"its worker ended with {why}") and found.attempts == 2
    assert [(f.result(timeout=120).value, f.result().attempts) for f in others] == [(2 * n, 1) for n in range(20)]


@APART
def test_a_worker_says_how_it_ended(engine: Engine, tmp_path: Path) -> None:
    assert first_line(outcome(engine, "leave", 7)) == "its worker ended with exit status 7"
    found = outcome(engine, "crash", "LLVM ERROR: out of tiles\n")
    assert first_line(found) == "its worker ended with signal SIGSEGV; it said"
    assert found.failure.splitlines()[1] == "LLVM ERROR: out of tiles"
    found = outcome(engine, "chatter", 60.0)
    assert first_line(found).startswith("its worker wrote what is no message: b'warning: thi")
    # A process in another group that outlives the worker, and has what a fork has.
    path = tmp_path / "pid"
    found = outcome(engine, "fork_and_leave", (str(path), 600.0))
    os.kill(int(path.read_text()), signal.SIGKILL)
    assert first_line(found) == "its worker ended with exit status 3" and found.attempts == 2


@APART
def test_limits_of_time(engine: Engine) -> None:
    """Also where no thread but one without Python's lock can end it, and where it is not the worker that does."""
    found = [
        engine.submit(job(*what, seconds=0.3))
        for what in (("sleep", 600.0), ("hold_lock", 60), ("tell_and", ("/dev/null/no", "sleep", 1)))
    ]
    slept, held, failed = (future.result(timeout=120) for future in found)
    for late, where in ((slept, "in sleep"), (held, "in hold_lock")):
        assert first_line(late) == "took longer than 0.3 s" and where in late.failure and late.attempts == 2
    assert "NotADirectoryError" in first_line(failed)
    assert outcome(engine, "sleep", 0.01, seconds=60).value == 0.01


@APART
def test_limits_of_memory(engine: Engine) -> None:
    assert outcome(engine, "allocate", 100, memory_mb=200).value == 10**8
    for _ in range(2):
        found = outcome(engine, "allocate", 300, memory_mb=200)
        assert first_line(found) == "needed more memory than its 200 MB" and found.attempts == 2
    # The limit was the job's, not its worker's.
    assert [engine.submit(job("allocate", 300)).result(timeout=120).value for _ in range(4)] == [3 * 10**8] * 4


@APART
def test_workers_keep_to_themselves(engine: Engine, capfd: pytest.CaptureFixture) -> None:
    found = outcome(engine, "whereabouts").value
    assert found["deaf"] and found["alone"] and found["pid"] != os.getpid()
    assert (found["threads"], found["cores"]) == ("1", 1)
    assert capfd.readouterr() == ("", "")


@APART
def test_jobs_are_cancelled(engine: Engine, tmp_path: Path) -> None:
    """What waits is not begun, and what runs is not tried again."""
    told = str(tmp_path / "told")
    blocking = [engine.submit(job("tell_and", (str(tmp_path / str(n)), "wait_until_told", told))) for n in range(2)]
    wait_for(lambda: all((tmp_path / str(n)).exists() for n in range(2)))
    # More than an engine hands on ahead of time.
    waiting = [engine.submit(job("tell_and", (str(tmp_path / f"w{n}"), "sleep", 0.0))) for n in range(40)]
    assert all(future.cancel() for future in [*reversed(waiting), blocking[0]])
    Path(told).touch()
    assert blocking[1].result(timeout=120).value == told
    assert outcome(engine, "double", 1).value == 2
    assert sum((tmp_path / f"w{n}").exists() for n in range(40)) <= 12
    with pytest.raises(CancelledError):
        blocking[0].result()


@APART
def test_threads_submit_together(engine: Engine) -> None:
    found: list[int] = []

    def submit(begin: int) -> None:
        futures = [engine.submit(job("double", begin + n)) for n in range(25)]
        found.extend(future.result(timeout=120).value for future in futures)

    threads = [threading.Thread(target=submit, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(2 * (100 * n + k) for n in range(4) for k in range(25))


@pytest.mark.parametrize("word", OTHERS)
def test_closing_ends_all(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = new_mark(monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with engine_for(word) as engine:
        folder = Path(outcome(engine, "whereabouts").value["folder"])
        assert folder.is_dir()
        paths = [tmp_path / str(n) for n in range(2)]
        futures = [
            engine.submit(job("child_and", (str(path), *then)))
            for path, then in zip(paths, [("sleep", 600.0), ("hold_lock", 60)], strict=True)
        ]
        futures += [engine.submit(job("double", n)) for n in range(50)]
        wait_for(lambda: all(path.exists() for path in paths))
        assert all(alive(int(path.read_text())) for path in paths)
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(timeout=0)
    wait_for(lambda: not marked(mark))
    wait_for(lambda: not folder.exists())
    assert not [*tmp_path.glob("souffle-*")] and engine.workers == 0
    engine.close()
    with pytest.raises(OptionError, match="is closed"):
        engine.submit(job("double", 1))
    with pytest.raises(OptionError, match="is closed"):
        engine.share(b"")


def test_a_job_that_cannot_be_is_refused() -> None:
    with here_engine() as engine:
        for wrong, why in (
            (Job("double", 1, "mine"), 'mine: the function .* "module:name"'),
            (job("double", 1, seconds=0.0), "seconds=0.0 is not valid"),
            (job("double", 1, seconds=float("nan")), "seconds=nan is not valid"),
            (job("double", 1, memory_mb=-1), "memory_mb=-1 is not valid"),
            (job("double", 1, resource="tpu"), "'tpu' is neither"),
            (job("double", 1, shared=("abc",)), "no shared data 'abc'"),
        ):
            with pytest.raises(OptionError, match=why):
                engine.submit(wrong)
        with pytest.raises(KeyboardInterrupt):
            engine.submit(job("interrupt"))
        assert outcome(engine, "double", 1).value == 2


def test_here_says_that_it_looks_at_no_limits(caplog: pytest.LogCaptureFixture) -> None:
    with here_engine() as engine:
        assert [outcome(engine, "sleep", 0.002, seconds=0.001).value for _ in range(2)] == [0.002] * 2
    assert [record.message for record in caplog.records] == [
        "sleep of 0.002 has a limit of time or memory, which is not looked at in this process"
    ]


def test_engines_by_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("here:2", "local:0", "local:-1", "local:two", "ray:0", "ray:nowhere", "ray://", "slurm:4", ""):
        with pytest.raises(OptionError) as raised:
            engine_for(word)
        assert word in str(raised.value)
    assert "local:N, ray, ray:N, ray:auto, ray:HOST:PORT, ray://HOST:PORT" in str(raised.value)
    monkeypatch.setitem(ENGINES, "mine", EngineKind(("mine",), lambda rest: here_engine()))
    with engine_for("mine") as engine:
        assert outcome(engine, "double", 1).value == 2
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'souffle-dl\[cluster\]'"):
        engine_for("ray://there:1")
