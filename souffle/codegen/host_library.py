"""The library of a network on a processor: its functions, and threads that share their loops (``host_pool.cpp``)."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tvm.support import cc

from souffle.errors import CompilerNotFoundError

__all__ = ["linked_library"]

_SOURCE = Path(__file__).with_name("host_pool.cpp")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-pthread")


def linked_library(objects: Sequence[bytes]) -> bytes:
    """Link object files with the pool of threads, by the compiler that TVM links libraries with.

    Raises
    ------
    CompilerNotFoundError
        If there is none, or it does not do it.
    """
    with tempfile.TemporaryDirectory(prefix="souffle-llvm-") as folder:
        paths = [Path(folder) / f"{number}.o" for number in range(len(objects) + 1)]
        for path, content in zip(paths, (_pool(), *objects), strict=True):
            path.write_bytes(content)
        library = Path(folder) / "network.so"
        try:
            cc.create_shared(str(library), [str(path) for path in paths], options=["-pthread"])
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            raise _missing(str(error)) from error
        return library.read_bytes()


@cache
def _pool() -> bytes:
    with tempfile.TemporaryDirectory(prefix="souffle-pool-") as folder:
        target = Path(folder) / "pool.o"
        try:
            command = [cc.get_cc(), *_FLAGS, "-c", str(_SOURCE), "-o", str(target)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except (OSError, ValueError, TypeError) as error:
            raise _missing(str(error)) from error
        if done.returncode:
            raise _missing(done.stderr)
        return target.read_bytes()


def _missing(why: str) -> CompilerNotFoundError:
    last = (why.strip().splitlines() or ["it said nothing"])[-1]
    return CompilerNotFoundError(
        f'target="cpu" links its code with a C++ compiler, g++ or the one named in $CXX, and none works here: {last}'
    )
