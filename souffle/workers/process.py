"""Processes of ours that talk with us by a stream, as we see them: they end with us, in whatever way that happens."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from souffle.workers.framing import FramingError, framed, receive
from souffle.workers.harness import Answer, Request
from souffle.workers.watch import remove
from souffle.workers.worker import LATE, READY

__all__ = ["GRACE_SECONDS", "ONE_THREAD", "BlockingWorker", "ChildProcess", "Workplace", "answer_of_death", "worker_in"]

GRACE_SECONDS = 60.0
"""After the time of a job, for its worker to end itself, and for what a first job imports; then we end it."""

ONE_THREAD = dict.fromkeys(
    (
        *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TBB_NUM_THREADS", "TVM_NUM_THREADS"),
        "SOUFFLE_CORES",
    ),
    "1",
)
"""The environment of a worker that shares the cores with others."""

_START = (
    "import sys; sys.path[:] = sys.argv[4:]; from importlib import import_module; "
    "import_module(sys.argv[1]).main(*map(int, sys.argv[2].split()), *sys.argv[3].split('\\n'))"
)
"""What such a process runs: modules are looked for where this process does, and its ``__main__`` is not run again."""

_PREFIX = "souffle-workers-"

_END_SECONDS = 2.0
"""For a process that has closed its stream to end."""

_SHOWN_CHARACTERS = 2000
"""Of what a process said, the last."""


class Workplace:
    """The folder of processes of ours, and the pipe by which they see that we are gone, and remove it.

    Parameters
    ----------
    most_characters : int, optional
        Of the folder's path. Where the folder for temporary files has a longer one, ``/tmp`` is taken.

    Attributes
    ----------
    folder : Path
    lifeline : int
        The end to read from, which is given to them.
    """

    def __init__(self, most_characters: int | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if most_characters is not None and len(str(self.folder)) > most_characters:
            self.folder.rmdir()
            self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        self.shared.mkdir()
        self.lifeline, self._ours = os.pipe()
        self._numbers = itertools.count()
        self._owner = os.getpid()
        _WORKPLACES.add(self)

    @property
    def shared(self) -> Path:
        """The folder of shared data."""
        return self.folder / "shared"

    def put(self, key: str, data: bytes) -> None:
        """Make shared data known to all processes."""
        path = self.shared / key
        if not path.exists():
            # Whole or not there.
            beside = path.with_name(f"{key}.{next(self._numbers)}")
            beside.write_bytes(data)
            beside.replace(path)

    def new_folder(self) -> Path:
        """For one process."""
        folder = self.folder / str(next(self._numbers))
        folder.mkdir()
        return folder

    def close(self) -> None:
        """End the processes and take their files away."""
        if self._ours >= 0:
            self._close_pipe()
            if self._owner == os.getpid():
                remove(self.folder, _END_SECONDS)

    def _close_pipe(self) -> None:
        os.close(self.lifeline)
        os.close(self._ours)
        self._ours = -1

    def forget(self) -> None:
        """In a fork of this process, which is not to keep alive what is not its own."""
        if self._ours >= 0:
            self._close_pipe()


_WORKPLACES: weakref.WeakSet[Workplace] = weakref.WeakSet()


def _forget_all() -> None:
    for workplace in list(_WORKPLACES):
        workplace.forget()


def _close_all() -> None:
    for workplace in list(_WORKPLACES):
        workplace.close()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(_close_all)


class ChildProcess:
    """A Python process that runs ``main`` of a module, in a session and a group of its own: Ctrl-C is not for it.

    Parameters
    ----------
    module : str
        Its ``main(stream, lifeline, folder, workplace, shared, *arguments)`` calls
        :func:`souffle.workers.watch.end_with_owner` first; ``stream`` is the number of a socket.
    workplace : Workplace
    arguments : tuple of str
        Without line breaks.
    environment : mapping of str to str
        Beside this process's.

    Attributes
    ----------
    stream : socket
    pid : int
    folder : Path
        Of this process; everything temporary of it lies there.

    Raises
    ------
    OSError
        If it cannot be started.
    """

    def __init__(
        self, module: str, workplace: Workplace, arguments: tuple[str, ...] = (), environment: Mapping[str, str] = {}
    ) -> None:
        self.folder = workplace.new_folder()
        self.stream, theirs = socket.socketpair()
        words = (self.folder, workplace.folder, workplace.shared, *arguments)
        numbers = (theirs.fileno(), workplace.lifeline)
        with theirs, (self.folder / "said.txt").open("ab") as said:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _START, module),
                    *(" ".join(map(str, numbers)), "\n".join(map(str, words)), *sys.path),
                ],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, **environment, "TMPDIR": str(self.folder)},
                start_new_session=True,
                pass_fds=numbers,
            )
        self.pid = self._process.pid

    def kill(self) -> None:
        """End it with all that it has started. Its number is its own until :meth:`end`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, *, at_once: bool = True, seconds: float = _END_SECONDS) -> str:
        """End it with all that it has started, take its files away, and say how it went.

        Parameters
        ----------
        at_once : bool
            False for one that has closed its stream, to see how it ends by itself.
        seconds : float
            For that.

        Returns
        -------
        str
            Such as ``"signal SIGSEGV"``; a second line and what follow are the last that it said.
        """
        if not at_once:
            self._wait_for_end(seconds)
        self.kill()
        status = -signal.SIGKILL
        with contextlib.suppress(subprocess.TimeoutExpired):  # as in the midst of a read from a disk that is gone
            status = self._process.wait(_END_SECONDS)
        self.stream.close()
        said = self.said
        shutil.rmtree(self.folder, ignore_errors=True)
        return _status(status) + (f"\n{said}" if said else "")

    def _wait_for_end(self, seconds: float) -> None:
        """Without taking its number from it, which its group has."""
        until = time.monotonic() + seconds
        pause = 0.0005
        with contextlib.suppress(ChildProcessError):
            while (
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
                and time.monotonic() < until
            ):
                time.sleep(pause)
                pause = min(2 * pause, 0.05)

    @property
    def said(self) -> str:
        """The last of what it wrote to its standard output and error."""
        return self.text("said.txt").strip()[-_SHOWN_CHARACTERS:]

    def text(self, name: str) -> str:
        """Of a file in its folder; empty if there is none."""
        with contextlib.suppress(OSError):
            return (self.folder / name).read_text(errors="replace")
        return ""


def _status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name if -status in {*signal.Signals} else str(-status)
    return f"signal {name}" + (", as where memory runs out" if -status == signal.SIGKILL else "")


def worker_in(workplace: Workplace, environment: Mapping[str, str]) -> ChildProcess:
    """A process that takes jobs: it says :data:`souffle.workers.worker.READY`, then an answer to each request."""
    return ChildProcess("souffle.workers.worker", workplace, environment=environment)


def answer_of_death(process: ChildProcess, request: Request, *, overdue: bool = False, fault: str = "") -> Answer:
    """End a worker that gives no answer to a request, and say why.

    Parameters
    ----------
    process : ChildProcess
        It has closed its stream, or we end it.
    request : Request
    overdue : bool
        We end it since it is past its time by our clock.
    fault : str
        We end it since it did this.
    """
    late = process.text(LATE)
    ending = process.end(at_once=overdue or bool(fault))
    if request.seconds is not None and (overdue or late.startswith("Timeout")):
        where = late or "its worker did not even end itself"
        return Answer(b"", f"took longer than {request.seconds:g} s\n{where}", True, request.seconds)
    how, _, said = ending.partition("\n")
    limit = "" if request.memory_mb is None else f" (it had {request.memory_mb} MB)"
    said = f"; it said\n{said}" if said else ""
    return Answer(b"", f"its worker {fault or f'ended with {how}'}{limit}{said}", elsewhere=True)


class BlockingWorker:
    """One worker, and another one after it has ended: for who has nothing to do but to wait for it.

    Parameters
    ----------
    environment : mapping of str to str
        Of its processes.
    """

    def __init__(self, environment: Mapping[str, str] = ONE_THREAD) -> None:
        self._environment = environment
        # There is a folder while there is a process, which removes it if we are killed.
        self._workplace: Workplace | None = None
        self._process: ChildProcess | None = None
        self.pid = 0

    def share(self, key: str, read: Callable[[], bytes]) -> None:
        """Make data known to it, which are read if they are not there."""
        workplace = self._opened()
        if not (workplace.shared / key).exists():
            workplace.put(key, read())

    def ask(self, request: Request) -> Answer:
        """Have one job done. :attr:`pid` is the process that did it, or did not."""
        failure = self._begin()
        if failure:
            return Answer(b"", f"its worker cannot begin: {failure}", elsewhere=True)
        process, message, overdue, fault = self._process, None, False, ""
        process.stream.settimeout(None if request.seconds is None else request.seconds + GRACE_SECONDS)
        try:
            process.stream.sendall(framed(pickle.dumps(tuple(request), pickle.HIGHEST_PROTOCOL)))
            message = receive(process.stream)
        except TimeoutError:
            overdue = True
        except FramingError as error:
            fault = f"wrote what is no message: {error}"
        except ConnectionError:
            pass
        if message is None:
            answer = answer_of_death(process, request, overdue=overdue, fault=fault)
            self.close()
            return answer
        answer = Answer(*pickle.loads(message))
        if answer.spent:
            self.close()
        return answer

    def close(self) -> None:
        """End its process, if there is one, and take its files away."""
        if self._process is not None and self._process.stream.fileno() >= 0:
            self._process.end()
        self._process = None
        if self._workplace is not None:
            self._workplace.close()
            self._workplace = None

    def _opened(self) -> Workplace:
        self._workplace = self._workplace or Workplace()
        return self._workplace

    def _begin(self) -> str:
        """Start a process if there is none. Why there is none, or nothing."""
        if self._process is not None:
            return ""
        try:
            self._process = worker_in(self._opened(), self._environment)
            self.pid = self._process.pid
            self._process.stream.settimeout(GRACE_SECONDS)
            began = receive(self._process.stream) == READY
        except OSError as error:
            began, failure = False, str(error)
        else:
            failure = "" if began else self._process.end(at_once=False)
        if not began:
            self.close()
        return failure
