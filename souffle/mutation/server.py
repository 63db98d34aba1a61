"""The process that runs mutants: it forks one for each job, knows no TVM, and runs nothing itself.

So a fork is cheap and clean. Started by :class:`souffle.mutation.sandbox.Sandbox`; it speaks pickles over its standard
input and output.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import tempfile
import time
from pathlib import Path

from souffle.emulator import SHARED_STEMS
from souffle.mutation.sandbox import LENGTH, Job, Outcome, receive, run_job, send

__all__ = ["serve"]


def _in_child(job: Job, folder: Path, timeout: float, owner: int) -> Outcome:
    """Run a job in a fork; EOFError if the owner, who asks for one after the other, ends meanwhile."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(source)
        os.setsid()
        try:
            outcome = run_job(job, folder)
            with os.fdopen(sink, "wb") as stream:
                send(stream, outcome)
        finally:
            os._exit(0)
    os.close(sink)
    deadline = time.monotonic() + timeout
    data = b""
    part: bytes | None = None
    try:
        with os.fdopen(source, "rb", buffering=0) as stream:
            while True:
                ready, _, _ = select.select([stream, owner], [], [], max(0.0, deadline - time.monotonic()))
                if owner in ready:
                    raise EOFError
                part = stream.read(1 << 20) if ready else None
                if not part:
                    break
                data += part
    finally:
        hung = part is None or part != b""
        if hung:
            os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if len(data) > LENGTH.size and len(data) == LENGTH.size + LENGTH.unpack(data[: LENGTH.size])[0]:
        return pickle.loads(data[LENGTH.size :])
    if hung:
        return Outcome("hang", f"nothing after {timeout:.0f} s")
    ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
    return Outcome("crash", f"the process ended with {ended}")


def serve() -> None:
    """Answer jobs until there are no more; the end of who asks, or a signal, ends this process and its job."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a mutant prints
    with tempfile.TemporaryDirectory(prefix="souffle-mutants-") as name:
        folder = Path(name)
        while True:
            try:
                job, timeout = receive(source)
                send(sink, _in_child(job, folder, timeout, source.fileno()))
            except (EOFError, BrokenPipeError):
                return
            for path in folder.iterdir():
                if path.is_file() and not path.name.startswith(SHARED_STEMS):
                    path.unlink()


if __name__ == "__main__":
    serve()
