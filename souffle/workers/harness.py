"""What happens around a job's function, whatever engine runs it: its name, its data, its limits, what came of it."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import hashlib
import importlib
import pickle
import resource
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

from souffle.errors import SouffleError

__all__ = ["Answer", "Caught", "Harness", "Request", "SharedFiles", "key_of", "reason"]

_MB = 10**6
_PAGE = resource.getpagesize()
_SHOWN_CHARACTERS = 4000
"""Of a traceback, the last."""


class Request(NamedTuple):
    """A job as it travels (:class:`souffle.workers.job.Job`): its payload is pickled once, for all attempts."""

    function: str
    payload: bytes
    shared: tuple[str, ...]
    seconds: float | None
    memory_mb: int | None


class Answer(NamedTuple):
    """What came of one attempt.

    Attributes
    ----------
    value : bytes
        Pickled; empty if it failed.
    failure : str
        Its first line says why and is the same wherever it runs; the lines below it are for who looks into it.
    elsewhere : bool
        Whether it may succeed elsewhere. What the function itself raised would come again.
    seconds : float
        That the function ran.
    spent : bool
        Whether the worker is to take no further job.
    """

    value: bytes
    failure: str = ""
    elsewhere: bool = False
    seconds: float = 0.0
    spent: bool = False


class Caught(contextlib.AbstractContextManager["Caught"]):
    """Keeps what the body raises, whatever it is: a job may be anything, and no job ends its worker by an exception.

    An interrupt is not the job's and goes on.
    """

    error: BaseException | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        self.error = error
        return isinstance(error, (Exception, SystemExit))


def reason(error: BaseException) -> str:
    """An exception in words: what it says on the first line, then where it was raised."""
    said = "".join(traceback.format_exception_only(type(error), error)).strip().partition("\n")[0]
    found = traceback.TracebackException.from_exception(error)
    ours = (__file__, "<frozen importlib._bootstrap>", importlib.__file__)
    found.stack = traceback.StackSummary.from_list([frame for frame in found.stack if frame.filename not in ours])
    return f"{said}\n{''.join(found.format()).rstrip()[-_SHOWN_CHARACTERS:]}"


def key_of(data: bytes) -> str:
    """The key that shared data has, by its content."""
    return hashlib.sha256(data).hexdigest()


class SharedFiles:
    """Shared data that lie in a folder, each in a file that its key names; what was read last is kept.

    Parameters
    ----------
    folder : Path
    most_bytes : int
        Kept in all; the one read last is kept however large it is.
    """

    def __init__(self, folder: Path, most_bytes: int = 512 * _MB) -> None:
        self._folder, self._most = folder, most_bytes
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def read(self, key: str) -> bytes:
        """The data of a key.

        Raises
        ------
        SouffleError
            If there is no such file, or what it holds is not what the key says.
        """
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        path = self._folder / key
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SouffleError(f"shared data {key[:12]} cannot be read: {error.strerror}") from error
        if key_of(data) != key:
            raise SouffleError(f"shared data {key[:12]} are damaged: {path} holds {len(data)} bytes of something else")
        self._held[key] = data
        self._bytes += len(data)
        while self._bytes > self._most and len(self._held) > 1:
            self._bytes -= len(self._held.popitem(last=False)[1])
        return data


class Harness:
    """Runs jobs in this process.

    Parameters
    ----------
    read : callable
        Gives shared data for their key.
    late : file, optional
        Where it is written that a job took too long, and where in its code it was; the process then ends. Without it,
        limits of time and memory are not looked at.
    """

    def __init__(self, read: Callable[[str], bytes], late: TextIO | None = None) -> None:
        self._read, self._late = read, late

    def run(self, request: Request) -> Answer:
        """Run one job. What it raises is part of the answer."""
        with Caught() as before:
            function = _function(request.function)
            payload = pickle.loads(request.payload)
            shared = {key: self._read(key) for key in request.shared}
        if before.error is not None:
            return Answer(b"", f"its worker cannot begin: {reason(before.error)}", elsewhere=True)
        limits = contextlib.nullcontext() if self._late is None else _limits(request, self._late)
        value = b""
        begin = time.perf_counter()
        with Caught() as during, limits:
            value = pickle.dumps(function(payload, shared), pickle.HIGHEST_PROTOCOL)
        seconds = time.perf_counter() - begin
        if during.error is None:
            return Answer(value, seconds=seconds)
        limit = None if self._late is None else request.memory_mb
        return _failed(during.error, seconds, limit)


def _failed(error: BaseException, seconds: float, memory_mb: int | None) -> Answer:
    out_of_memory = (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (memory_mb is not None and "bad_alloc" in str(error))
    )
    if out_of_memory:
        most = "there is" if memory_mb is None else f"its {memory_mb} MB"
        # Who catches the lack of memory within a library may leave anything half done.
        return Answer(b"", f"needed more memory than {most}\n{reason(error)}", True, seconds, spent=True)
    # A disk that is full and a library that is missing are of this machine.
    return Answer(b"", reason(error), isinstance(error, (OSError, ImportError)), seconds)


@functools.lru_cache(maxsize=256)
def _function(name: str) -> Callable[[Any, dict[str, bytes]], Any]:
    module, _, path = name.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


@contextlib.contextmanager
def _limits(request: Request, late: TextIO) -> Iterator[None]:
    """The time and the memory that a job may take, while it runs.

    The time is watched by a thread of its own that needs no lock of Python's, so that it is over in the midst of C
    code too. The memory is what this process and each that it starts may map for itself; what it has already, such as
    libraries and what they keep, does not count.
    """
    with contextlib.ExitStack() as stack:
        if request.seconds is not None:
            faulthandler.dump_traceback_later(request.seconds, exit=True, file=late)
            stack.callback(faulthandler.cancel_dump_traceback_later)
        if request.memory_mb is not None:
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            most = _mapped_bytes() + request.memory_mb * _MB
            most = min([most, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)])
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
            stack.callback(resource.setrlimit, resource.RLIMIT_DATA, (soft, hard))
        yield


def _mapped_bytes() -> int:
    """Of memory that is this process's own and can be written to."""
    return int(Path("/proc/self/statm").read_bytes().split()[5]) * _PAGE
