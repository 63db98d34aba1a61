"""What tests have workers do: functions of a payload and shared data, most of which end their process one way or other.

Where a first try is to fail and a second one not, the payload names a file in which tries are written down.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from souffle.parallel import usable_cores

Shared = dict[str, bytes]


def double(payload: Any, shared: Shared) -> Any:
    return payload * 2


def lengths(payload: Any, shared: Shared) -> dict[str, int]:
    return {key: len(data) for key, data in shared.items()}


def whereabouts(payload: Any, shared: Shared) -> dict[str, Any]:
    print("a library says something", flush=True)
    return {
        "pid": os.getpid(),
        "deaf": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "alone": os.getsid(0) == os.getpid(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "cores": usable_cores(),
        "folder": os.environ.get("TMPDIR"),
    }


def refuse(payload: Any, shared: Shared) -> None:
    raise ValueError(f"no tile of {payload}\nfits")


def leave(payload: int, shared: Shared) -> None:
    os._exit(payload)


def give_what_cannot_travel(payload: Any, shared: Shared) -> Any:
    return lambda: payload


def crash(payload: str, shared: Shared) -> None:
    os.write(2, payload.encode())
    ctypes.string_at(0)


def sleep(payload: float, shared: Shared) -> float:
    time.sleep(payload)
    return payload


def wait_until_told(payload: str, shared: Shared) -> str:
    """Go on once there is a file of that name."""
    while not Path(payload).exists():
        time.sleep(0.01)
    return payload


def hold_lock(payload: int, shared: Shared) -> None:
    """C code that has Python's lock, for longer than anybody waits."""
    re.match(r"(a+)+$", "a" * payload + "b")


def stop(payload: Any, shared: Shared) -> None:
    """No thread of this process goes on."""
    os.kill(os.getpid(), signal.SIGSTOP)


def forget_the_time(payload: float, shared: Shared) -> None:
    faulthandler.cancel_dump_traceback_later()
    time.sleep(payload)


def allocate(payload: int, shared: Shared) -> int:
    return len(bytearray(payload * 10**6))


def chatter(payload: Any, shared: Shared) -> None:
    """What a library does that takes a descriptor for another."""
    for descriptor in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, b"warning: this is no message of anybody's")
        except OSError:
            continue
    time.sleep(payload)


def fork_and_leave(payload: tuple[str, float], shared: Shared) -> None:
    """A child that holds what a fork holds, in another group, where nobody looks for it."""
    path, seconds = payload
    if os.fork() == 0:
        os.setsid()
        _written(Path(path), os.getpid())
        time.sleep(seconds)
        os._exit(0)
    while not Path(path).exists():
        time.sleep(0.01)
    os._exit(3)


def child_and(payload: tuple[str, str, Any], shared: Shared) -> Any:
    """Start a process that lives for long, as nvcc may, then do something else."""
    path, then, what = payload
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    _written(Path(path), child.pid)
    return globals()[then](what, shared)


def tell_and(payload: tuple[str, str, Any], shared: Shared) -> Any:
    """Say who does this, then do something else."""
    path, then, what = payload
    _written(Path(path), os.getpid())
    return globals()[then](what, shared)


def _written(path: Path, number: int) -> None:
    beside = path.with_name(f"{path.name}.{number}")
    beside.write_text(str(number))
    beside.replace(path)


def at_first(payload: tuple[str, str], shared: Shared) -> list[int]:
    """Fail in some way, but for the second time. Gives the processes that tried."""
    path, way = payload
    tries = _tries(path)
    if len(tries) == 1:
        _WAYS[way]()
    return tries


def always(payload: tuple[str, str], shared: Shared) -> list[int]:
    """Fail in some way."""
    path, way = payload
    _tries(path)
    _WAYS[way]()
    return []


def _tries(path: str) -> list[int]:
    with open(path, "a+") as file:
        file.write(f"{os.getpid()}\n")
        file.seek(0)
        return [int(line) for line in file]


def _full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


_WAYS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "full disk": _full_disk,
    "refused": lambda: refuse(7, {}),
    "memory": lambda: bytearray(10**13),
    "nothing": lambda: None,
}


def interrupt(payload: Any, shared: Shared) -> None:
    """As a user does."""
    os.kill(os.getpid(), signal.SIGINT)


def memory_limit(payload: Any, shared: Shared) -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def allocate_in_a_library(payload: int, shared: Shared) -> None:
    """As C++ says it."""
    try:
        bytearray(payload * 10**6)
    except MemoryError:
        raise RuntimeError("InternalError: std::bad_alloc") from None


def allocate_in_a_child(payload: int, shared: Shared) -> str:
    """As nvcc may."""
    command = [sys.executable, "-c", f"bytearray({payload} * 10**6)"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr
