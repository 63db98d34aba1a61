"""The library of a network on a processor: its functions, what calls them in turn, and threads that share loops."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tvm.support import cc

from souffle.errors import CompilerNotFoundError

__all__ = ["linked_library"]

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("host_pool.cpp", "host_calls.cpp"))
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-pthread")


def linked_library(objects: Sequence[bytes]) -> bytes:
    """Link object files with what runs them, ``host_calls.cpp`` and ``host_pool.cpp``.

    Raises
    ------
    CompilerNotFoundError
        If there is none, or it does not do it.
    """
    with tempfile.TemporaryDirectory(prefix="souffle-llvm-") as folder:
        contents = (*map(_compiled, _SOURCES), *objects)
        paths = [Path(folder) / f"{number}.o" for number in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        library = Path(folder) / "network.so"
        try:
            cc.create_shared(str(library), [str(path) for path in paths], options=["-pthread"])
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            raise _missing(str(error)) from error
        return library.read_bytes()


@cache
def _compiled(source: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="souffle-host-") as folder:
        target = Path(folder) / "source.o"
        try:
            command = [cc.get_cc(), *_FLAGS, "-c", str(source), "-o", str(target)]
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
