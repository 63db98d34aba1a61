"""Processes that end, and that must end: workers, those who look after them, and what they have started."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from souffle.workers import WorkersLostError
from souffle.workers.harness import Request, key_of
from souffle.workers.local import LocalPool, local_engine
from souffle.workers.process import BlockingWorker
from souffle.workers.retrying import RetryingEngine
from tests.workers.processes import alive, marked, new_mark, wait_for
from tests.workers.test_engines import OTHERS, first_line, job, outcome

pytestmark = pytest.mark.xdist_group("workers")

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import sys, time
from pathlib import Path
from souffle.workers import Job, engine_for

word, folder = sys.argv[1:]
job = lambda name, payload: Job(f"tests.workers.played_jobs:{name}", payload, name)
with engine_for(word) as engine:
    print(engine.submit(job("whereabouts", None)).result().value["folder"], flush=True)
    futures = [
        engine.submit(job("child_and", (f"{folder}/0", "sleep", SECONDS))),
        engine.submit(job("child_and", (f"{folder}/1", THEN))),
    ]
    for _ in range(2):
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            # What workers do is not interrupted.
            print(futures[0].result().value, flush=True)
"""


def driver(word: str, folder: Path, seconds: float, then: str) -> subprocess.Popen:
    """A process in a group of its own that has two jobs under way."""
    program = DRIVER.replace("SECONDS", str(seconds)).replace("THEN", then)
    process = subprocess.Popen(
        [sys.executable, "-c", program, word, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: process.poll() is not None or all((folder / str(n)).exists() for n in range(2)))
    assert process.poll() is None, process.stderr.read()
    return process


@pytest.mark.parametrize("word", OTHERS)
def test_a_driver_that_is_interrupted_and_killed(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is the driver's. When it is killed, nothing is left: neither workers, one of which holds Python's lock,
    nor what they have started, nor files.
    """
    mark = new_mark(monkeypatch)
    with driver(word, tmp_path, 1.0, '"hold_lock", 60') as process:
        folder = Path(process.stdout.readline().strip())
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "1.0\n"
        children = [int((tmp_path / str(n)).read_text()) for n in range(2)]
        assert folder.is_dir() and all(map(alive, children)) and set(children) < set(marked(mark))
        process.kill()
        wait_for(lambda: not marked(mark))
        wait_for(lambda: not folder.exists())
        if word.startswith("local"):
            wait_for(lambda: not folder.parent.exists())
        assert process.communicate(timeout=60) == ("", "")


def test_the_end_of_an_interpreter_is_that_of_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody has closed the engine; and a fork of the driver keeps nothing alive."""
    mark = new_mark(monkeypatch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = """
import os, sys, time
from souffle.workers import Job, engine_for
engine = engine_for("local:2")
future = engine.submit(Job("tests.workers.played_jobs:child_and", (sys.argv[1], "sleep", 600.0), "sleep"))
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
if os.fork() == 0:
    del os.environ["SOUFFLE_TEST_MARK"]
    os.execv("/bin/sleep", ["sleep", "300"]) if sys.argv[2] == "exec" else time.sleep(300)
if sys.argv[2] != "exec":
    os.kill(os.getpid(), 9)
"""
    for then in ("exec", "fork"):
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / then), then], cwd=ROOT)
        assert process.wait(timeout=60) == (0 if then == "exec" else -9)
        child = int((tmp_path / then).read_text())
        wait_for(lambda child=child: not alive(child))
        wait_for(lambda: not [*tmp_path.glob("souffle-workers-*")])
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not marked(mark))


def test_what_a_worker_has_started_ends_with_it(tmp_path: Path) -> None:
    """However it ends: by its time, by its own doing, or by our clock where it cannot end itself."""
    with RetryingEngine("impatient", LocalPool(1, grace_seconds=0.3)) as engine:
        for number, (then, options, why) in enumerate(
            (
                (("sleep", 600.0), {"seconds": 0.2}, "took longer than 0.2 s"),
                (("leave", 1), {}, "its worker ended with exit status 1"),
                (("stop", None), {"seconds": 0.2}, "took longer than 0.2 s"),
                (("forget_the_time", 600.0), {"seconds": 0.2}, "took longer than 0.2 s"),
                (("allocate", 300), {"memory_mb": 100}, "needed more memory than its 100 MB"),
            )
        ):
            path = tmp_path / str(number)
            assert first_line(outcome(engine, "child_and", (str(path), *then), **options)) == why
            wait_for(lambda path=path: not alive(int(path.read_text())))
        assert outcome(engine, "double", 1).value == 2


def test_workers_that_are_killed_from_outside(tmp_path: Path) -> None:
    """Between two jobs, which costs no job, and in the midst of one; and what has failed goes to another worker."""
    pool = LocalPool(2)
    with RetryingEngine("mine", pool) as engine:
        assert outcome(engine, "double", 1).value == 2
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: not alive(pid))
        # The pool may not have heard of it yet: then that costs an attempt.
        assert (found := outcome(engine, "double", 1)).value == 2 and found.attempts <= 2
        path = tmp_path / "pid"
        future = engine.submit(job("tell_and", (str(path), "sleep", 600.0)))
        for _ in range(2):
            wait_for(path.exists)
            pid = int(path.read_text())
            path.unlink()
            os.kill(pid, signal.SIGKILL)
        found = future.result(timeout=60)
        assert first_line(found).startswith("its worker ended with signal SIGKILL") and found.attempts == 2
        assert found.worker.endswith(f":{pid}")
        assert len(pool.pids) <= 2


def test_workers_that_are_killed_again_and_again() -> None:
    """Wherever they are then: as they begin, in a job, or in the midst of an answer that no pipe takes at once."""
    data, choice = os.urandom(10**6), random.Random(0)
    jobs = [("double", data, data * 2), ("double", 1, 2), ("sleep", 0.1, 0.1)] * 30
    pool = LocalPool(2)
    with RetryingEngine("mine", pool) as engine:
        futures = [engine.submit(job(name, payload, seconds=60)) for name, payload, _ in jobs]
        for _ in range(15):
            time.sleep(choice.uniform(0.0, 0.4))
            with contextlib.suppress(IndexError, ProcessLookupError):
                os.kill(choice.choice(pool.pids), choice.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV)))
        found = [future.result(timeout=60) for future in futures]
        for each, (_, _, value) in zip(found, jobs, strict=True):
            if each.failure:
                assert first_line(each).startswith("its worker ended with signal SIG") and each.attempts == 2
            else:
                assert each.value == value
        assert sum(not each.failure for each in found) >= len(jobs) - 10
        assert outcome(engine, "double", 1).value == 2 and len(pool.pids) <= 2


def test_gpu_jobs_have_a_worker_of_their_own() -> None:
    pool = LocalPool(1)
    with RetryingEngine("mine", pool) as engine:
        futures = [engine.submit(job("whereabouts", resource="gpu")) for _ in range(5)]
        owners = {future.result(timeout=60).value["pid"] for future in futures}
        assert len(owners) == 1 and outcome(engine, "whereabouts").value["pid"] not in owners
        assert len(pool.pids) == 2 and engine.workers == 1


def test_one_worker_has_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with local_engine(1) as engine:
        assert outcome(engine, "whereabouts").value["threads"] is None


def test_workers_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a system that gives no process, nor where they end as they begin. The futures say so."""
    monkeypatch.setattr("souffle.workers.process._START", "raise SystemExit('no such library')")
    with local_engine(2) as engine:
        futures = [engine.submit(job("double", n)) for n in range(3)]
        for future in futures:
            with pytest.raises(WorkersLostError, match=r"(?s)local:2 are lost: .* exit status 1\nno such library"):
                future.result(timeout=60)
        with pytest.raises(CancelledError):
            engine.submit(job("double", 1))
        assert engine.workers == 0
    monkeypatch.setattr("souffle.workers.process._START", "import time; time.sleep(600)")
    monkeypatch.setattr("souffle.workers.local._START_SECONDS", 0.1)
    with local_engine(2) as engine, pytest.raises(WorkersLostError, match=r"the last with no word in 0.1 s"):
        engine.submit(job("double", 1)).result(timeout=60)
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with local_engine(2) as engine, pytest.raises(WorkersLostError, match=r"no process can be started: .*No such file"):
        engine.submit(job("double", 1)).result(timeout=60)


def test_callbacks_may_submit_and_close(tmp_path: Path) -> None:
    """They run in the pool's own thread."""
    engine = local_engine(1)
    more = []
    first = engine.submit(job("tell_and", (str(tmp_path / "pid"), "sleep", 0.2)))
    first.add_done_callback(lambda done: more.append(engine.submit(job("sleep", done.result().value))))
    wait_for(lambda: more)
    more[0].add_done_callback(lambda done: more.append(engine.close()))
    assert more[0].result(timeout=60).value == 0.2
    wait_for(lambda: more[1:] == [None])
    wait_for(lambda: not alive(int((tmp_path / "pid").read_text())))
    assert engine.workers == 0


def test_a_worker_for_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray's workers have it. While there is no process, there are no files that one would have to remove."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    worker = BlockingWorker()

    def ask(name: str, payload: object, seconds: float | None = None, shared: tuple[str, ...] = ()) -> str:
        request = Request(f"tests.workers.played_jobs:{name}", pickle.dumps(payload), shared, seconds, None)
        answer = worker.ask(request)
        assert bool([*tmp_path.iterdir()]) is (not answer.failure) and alive(worker.pid) is (not answer.failure)
        return answer.failure.partition("\n")[0] or str(pickle.loads(answer.value))

    assert ask("double", 1) == "2"
    with monkeypatch.context() as patch:
        patch.setattr("souffle.workers.process.GRACE_SECONDS", 0.5)
        assert ask("stop", None, 0.2) == "took longer than 0.2 s"
    for wrong, what in (
        (("leave", 3), "its worker ended with exit status 3"),
        (("chatter", 60.0), "its worker wrote what is no message"),
        (("allocate", 10**6), "needed more memory than there is"),
    ):
        assert ask(*wrong).startswith(what)
    data = b"data"
    for _ in range(2):
        worker.share(key_of(data), lambda: data)
    assert ask("lengths", None, shared=(key_of(data),)) == str({key_of(data): 4})
    worker.close()
    worker.close()
    assert not alive(worker.pid) and not [*tmp_path.iterdir()]
    monkeypatch.setattr("souffle.workers.process._START", "raise SystemExit('no such library')")
    assert ask("double", 1) == "its worker cannot begin: exit status 1"
    monkeypatch.setattr("souffle.workers.process._START", "import time; time.sleep(600)")
    monkeypatch.setattr("souffle.workers.process.GRACE_SECONDS", 0.5)
    assert ask("double", 1) == "its worker cannot begin: timed out"
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert ask("double", 1).startswith("its worker cannot begin: [Errno 2]")
