"""The threads of a network on a processor, as an object file to be linked with its functions (``host_pool.cpp``)."""

from __future__ import annotations

import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tvm.support import cc

from souffle.errors import CompilerNotFoundError

__all__ = ["pool_object"]

_SOURCE = Path(__file__).with_name("host_pool.cpp")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-pthread")


@cache
def pool_object() -> bytes:
    """Compile it, once for each process, with the compiler that TVM links libraries with.

    Raises
    ------
    CompilerNotFoundError
        If there is none, or it does not compile this.
    """
    with tempfile.TemporaryDirectory(prefix="souffle-pool-") as folder:
        target = Path(folder) / "pool.o"
        try:
            command = [cc.get_cc(), *_FLAGS, "-c", str(_SOURCE), "-o", str(target)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except (OSError, ValueError, TypeError) as error:
            raise _missing(str(error)) from error
        if done.returncode:
            raise _missing((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
        return target.read_bytes()


def _missing(why: str) -> CompilerNotFoundError:
    return CompilerNotFoundError(
        f'target="cpu" links its code with a C++ compiler, g++ or the one named in $CXX, and none works here: {why}'
    )
