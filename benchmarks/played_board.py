"""A board without a GPU: TVM's own RPC tracker and server on this machine, with a CUDA that the emulator plays.

TVM's CUDA runtime is the real one; it finds ``libcuda`` and ``libcudart`` of ``played_cuda.cpp`` in place of NVIDIA's.
Kernels are those that :func:`souffle.emulator.compile_text` makes of the same text that the machine code was compiled
of. Times are those of two played clocks and mean nothing about a GPU.

``python -m benchmarks.played_board FOLDER`` serves until it is interrupted and says how to tune on it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tvm import rpc

from souffle.codegen.nvcc import find_nvcc
from souffle.emulator import compile_text
from souffle.emulator.text_scan import blank_comments, uses_atomics
from souffle.emulator.toolchain import build_runtime_library, find_gxx

__all__ = ["PlayedBoard", "played_board"]

_SOURCE = Path(__file__).with_name("played_cuda.cpp")
_VERSIONS = "libcudart.so.13 { global: *; };\n"
_KEY_BYTES = 17
"""Of a key and its end."""
_STARTING_SECONDS = 60.0
_WITH_US = """"$@" </dev/null & read -r line; kill -KILL 0"""
"""Ends the group when standard input ends."""
_COMPILE = """#!/bin/sh
cd {root} && exec {python} -m benchmarks.played_board {folder} --compile "$1"
"""
_NVCC = """#!/bin/sh
{nvcc} "$@" && exec {python} {script} {folder} "$@"
"""
_KEEP_TEXT = '''
import ctypes, shutil, sys

folder, arguments = sys.argv[1], sys.argv[2:]
if "-cubin" in arguments and "-o" in arguments:
    key = ctypes.create_string_buffer(17)
    with open(arguments[arguments.index("-o") + 1], "rb") as image:
        ctypes.CDLL(folder + "/lib/libcuda.so.1").played_key(image.read(), key)
    source = next(one for one in arguments if one.endswith(".cu"))
    shutil.copy(source, f"{folder}/texts/{key.value.decode()}")
'''


class PlayedBoard:
    """The folder of a played board: its CUDA, the texts of machine code, what is to go wrong, and what was launched.

    Parameters
    ----------
    folder : Path
        An empty one.
    device : mapping of str to object, optional
        ``name``, ``major``, ``minor``, ``multiprocessors``, ``l2`` (bytes), ``shared`` (bytes of a block), and
        ``drift``: by which part the device is slower after each second of its own clock.
    """

    def __init__(self, folder: Path, device: Mapping[str, object] | None = None) -> None:
        self.folder = folder
        for name in ("lib", "kernels", "texts", "faults", "toolkit/bin"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "device").write_text("".join(f"{key}={value}\n" for key, value in (device or {}).items()))
        library = folder / "lib" / "libcuda.so.1"
        library.write_bytes(_played_cuda())
        (folder / "lib" / "libcudart.so.13").symlink_to(library.name)
        self._library = ctypes.CDLL(str(library))
        words = {"root": Path(__file__).parents[1], "python": sys.executable, "folder": folder.resolve()}
        self._script(folder / "compile", _COMPILE, words)
        (folder / "keep_text.py").write_text(_KEEP_TEXT)
        if find_nvcc() is not None:
            words |= {"nvcc": find_nvcc(), "script": folder.resolve() / "keep_text.py"}
            self._script(folder / "toolkit" / "bin" / "nvcc", _NVCC, words)

    @staticmethod
    def _script(path: Path, text: str, words: Mapping[str, object]) -> None:
        path.write_text(text.format(**{name: shlex.quote(str(value)) for name, value in words.items()}))
        path.chmod(0o755)

    @property
    def toolkit(self) -> Path:
        """For ``CUDA_HOME``: nvcc, which leaves the text of all that it compiles with the board."""
        return self.folder / "toolkit"

    def environment(self) -> dict[str, str]:
        """Of the server."""
        path = f"{self.folder.resolve() / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        return {**os.environ, "LD_LIBRARY_PATH": path, "PLAYED_BOARD": str(self.folder.resolve())}

    def add(self, image: bytes, text: str) -> None:
        """Say what text some machine code was compiled of."""
        key = ctypes.create_string_buffer(_KEY_BYTES)
        self._library.played_key(image, key)
        (self.folder / "texts" / key.value.decode()).write_text(text)
        keep_kernels(self.folder, key.value.decode())

    def costs(self, **kernels: tuple[float, float]) -> None:
        """Set the times of kernels in µs, with a cold and a warm second-level cache."""
        lines = (f"{name} {cold} {warm}\n" for name, (cold, warm) in kernels.items())
        (self.folder / "costs").write_text("".join(lines))

    def fault(self, kind: str, kernel: str = "", *, always: bool = False) -> None:
        """Have something go wrong at the next launch, or at each one.

        `kind` is one of ``die``, ``hang``, ``fault`` (an illegal access), ``lost`` (the kernel does nothing), ``nan``
        and ``wrong`` (of its last argument), ``slow``, ``nan-time`` and ``no-time``.
        """
        name = f"{kind}@{kernel}" if kernel else kind
        (self.folder / "faults" / (f"{name}.always" if always else name)).touch()

    def mend(self) -> None:
        """Nothing is to go wrong any more."""
        for path in (self.folder / "faults").iterdir():
            path.unlink()

    def launches(self) -> list[tuple[str, tuple[int, ...]]]:
        """What was launched: the kernel; process, grid, block, shared bytes, those allowed, launch attributes."""
        path = self.folder / "log"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(line[1], (int(line[0]), *map(int, line[2:]))) for line in lines]


@functools.cache
def _played_cuda() -> bytes:
    with tempfile.TemporaryDirectory(prefix="souffle-played-") as folder:
        versions, library = Path(folder) / "versions", Path(folder) / "libcuda.so.1"
        versions.write_text(_VERSIONS)
        command = [find_gxx(), "-std=c++17", "-O1", "-fPIC", "-shared", f"-Wl,--version-script={versions}"]
        subprocess.run([*command, str(_SOURCE), "-ldl", "-o", str(library)], check=True)
        return library.read_bytes()


def keep_kernels(folder: Path, key: str) -> None:
    """Compile the text of a key for the CPU, and say where the played CUDA finds it."""
    text = (folder / "texts" / key).read_text()
    module = compile_text(text)
    workers = 1 if uses_atomics(blank_comments(text, strings=False)) else len(os.sched_getaffinity(0))
    lines = (build_runtime_library(), module.library, len(module.kernels), workers)
    part = folder / "kernels" / f"{key}.part"
    part.write_text("".join(f"{line}\n" for line in lines))
    part.rename(folder / "kernels" / key)


@contextlib.contextmanager
def serving(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[tuple[int, int]]:
    """One of TVM's own commands, ended with all of its processes, also where this one is killed.

    Yields
    ------
    port : int
    group : int
        Of its processes.

    Raises
    ------
    RuntimeError
        If it does not begin to serve.
    """
    command = ["sh", "-c", _WITH_US, "sh", sys.executable, "-m", module, "--host", "127.0.0.1", *arguments]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=said, stderr=said, env=environment, start_new_session=True
        )
        try:
            yield _port(module, said.fileno()), process.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _port(module: str, said: int) -> int:
    end = time.monotonic() + _STARTING_SECONDS
    while True:
        text = os.pread(said, 1 << 20, 0).decode()
        bound = re.search(r"bind to \S*:(\d+)", text)
        if bound:
            return int(bound[1])
        if "Error" in text or time.monotonic() > end:
            raise RuntimeError(f"{module} does not serve:\n{text}")
        time.sleep(0.05)


@contextlib.contextmanager
def played_board(board: PlayedBoard, key: str, tracker: int | None = None) -> Iterator[tuple[str, int]]:
    """Serve a board.

    Parameters
    ----------
    board : PlayedBoard
    key : str
    tracker : int, optional
        Port of one that is there; one is started where not given.

    Yields
    ------
    address : str
        For ``souffle tune --measure``.
    group : int
        Of the server's processes.
    """
    with contextlib.ExitStack() as stack:
        if tracker is None:
            tracker, _ = stack.enter_context(serving("tvm.exec.rpc_tracker", "--port", "9190", "--port-end", "9999"))
        places = ("--port", "9090", "--port-end", "9999", "--tracker", f"127.0.0.1:{tracker}", "--key", key)
        port, group = stack.enter_context(serving("tvm.exec.rpc_server", *places, environment=board.environment()))
        known = rpc.connect_tracker("127.0.0.1", tracker)
        while not any(server["addr"][1] == port for server in known.summary()["server_info"]):
            time.sleep(0.02)
        known.close()
        yield f"rpc://127.0.0.1:{tracker}/{key}", group


def main() -> None:
    """Serve until interrupted, or compile what the played CUDA asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--key", default="played")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--compile", metavar="KEY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        keep_kernels(options.folder, options.compile)
        return
    major, minor = re.fullmatch(r"sm_(\d+)(\d)", options.arch).groups()
    board = PlayedBoard(options.folder, {"major": major, "minor": minor})
    with played_board(board, options.key) as (address, _), contextlib.suppress(KeyboardInterrupt):
        print(f"CUDA_HOME={board.toolkit.resolve()} souffle tune MODEL --arch {options.arch} --measure {address}")
        signal.pause()


if __name__ == "__main__":
    main()
