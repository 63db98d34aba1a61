"""A compilation in a process of its own, as the process that asked for it sees it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from souffle.background.worker import ARTIFACT
from souffle.codegen.plan import Plan
from souffle.errors import BackgroundError
from souffle.program.packed import pack
from souffle.request import CompileRequest
from souffle.runtime import artifact
from souffle.schedule.gpu.registry import RULES

__all__ = ["CompileProcess"]

_LOG = logging.getLogger(__name__)

WORKER = (
    "import sys; sys.path[:] = sys.argv[3:]; from souffle.garbage import collect_rarely; collect_rarely(); "
    "from souffle.background.worker import main; main(*sys.argv[1:3])"
)
"""What the process runs: modules are looked for where this process does."""

_SAID = "stderr.txt"
_SHOWN_CHARACTERS = 4000
"""Of what a process said, the last."""


class CompileProcess:
    """A process that compiles, and its folder. It is in a session of its own: Ctrl-C is not meant for it.

    It ends, and its folder with all in it is gone, when it has answered (:meth:`plan`), when it is killed, and when
    this process ends in any way.

    Parameters
    ----------
    request : CompileRequest

    Raises
    ------
    BackgroundError
        If it cannot be started.
    """

    def __init__(self, request: CompileRequest) -> None:
        self._pieces = pack((request, tuple(RULES)))
        self._name = f"{request.program.name} ({request.options.level})"
        self._owner = os.getpid()
        # Reentrant: a finalizer that kills may come in the midst of it.
        self._lock = threading.RLock()
        self._ended = False
        self._folder: Path | None = None
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="souffle-background-"))
            self._connection, self._process = self._started(self._folder)
        except OSError as error:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            raise BackgroundError(f"no process can be started to compile {self._name}: {error}") from error

    @property
    def pid(self) -> int:
        """Of the process, which leads a group of this number."""
        return self._process.pid

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return self._folder

    def _started(self, folder: Path) -> tuple[Connection, subprocess.Popen]:
        ours, theirs = Pipe()
        command = [sys.executable, "-c", WORKER, str(theirs.fileno()), str(folder), *sys.path]
        with theirs, (folder / _SAID).open("wb") as said:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, "TMPDIR": str(folder)},
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        return ours, process

    def plan(self, progress: Callable[[str], None]) -> Plan:
        """Wait for what is compiled, and end the process.

        Parameters
        ----------
        progress : callable
            Told in a few words what the process does.

        Raises
        ------
        SouffleError
            What the compiler raised; :class:`~souffle.errors.BackgroundError` where the process ended in another way.
        """
        try:
            error = self._answer(progress)
            if error is not None:
                raise error
            said = self._said()
            if said:
                _LOG.warning("while %s was compiled in the background, its process said\n%s", self._name, said)
            return artifact.load(self._folder / ARTIFACT)
        finally:
            self.give_up()

    def _answer(self, progress: Callable[[str], None]) -> Exception | None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(len(self._pieces))
            while self._pieces:
                self._connection.send_bytes(self._pieces.pop(0))
        while True:
            try:
                kind, content = self._connection.recv()
            except (EOFError, OSError):
                return self._death()
            if kind == "end":
                return content
            progress(content)

    def _death(self) -> BackgroundError:
        """Why there is no answer, of a process that has ended."""
        with contextlib.suppress(ChildProcessError):
            # It stays a zombie, so that its number is no other's when its group is killed.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        said = self._said()
        self._kill_and_wait()
        status = self._process.returncode
        how = f"status {status}"
        if status is not None and status < 0:
            name = signal.Signals(-status).name if -status in {*signal.Signals} else str(-status)
            how = f"signal {name}" + (", as where memory runs out" if -status == signal.SIGKILL else "")
        message = f"the process that compiled {self._name} in the background has ended with {how}"
        return BackgroundError(f"{message}; it said\n{said}" if said else message)

    def _said(self) -> str:
        """The last of what it wrote to its standard output and error."""
        with contextlib.suppress(OSError):
            return (self._folder / _SAID).read_text(errors="replace").strip()[-_SHOWN_CHARACTERS:]
        return ""

    def kill(self) -> None:
        """End it and the compilers that it runs; the thread that waits for its answer does the rest of giving up."""
        with self._lock:
            if not self._ended and self._owner == os.getpid():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)

    def _kill_and_wait(self) -> None:
        with self._lock:
            self.kill()
            self._ended = True
            self._process.wait()

    def give_up(self) -> None:
        """End it, wait for its end and take its files away."""
        self._kill_and_wait()
        self._connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def forget(self) -> None:
        """Have nothing to do with it: for a fork of this process, whose end is not to be waited for."""
        self._lock = threading.RLock()
        self._connection.close()
