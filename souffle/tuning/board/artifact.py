"""What travels to a board: machine code in the form of TVM's CUDA modules, and a small library that launches it.

The library is LLVM code for the board's processor, linked here. It holds no kernel: it calls one by its name in the
modules that it imports, so that it is the same for all kernels of a name and a number of tensors.
"""

from __future__ import annotations

import functools
import platform
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tvm
from tvm import tirx

from souffle.errors import CompilerNotFoundError, OptionError
from souffle.tuning.board.kernel import BoardKernel

__all__ = ["ENTRY", "cuda_module", "host_library"]

ENTRY = "measured_stage"
"""The library's function. It takes the kernel's tensors and two of one size, all as bytes; a number of copies of the
second last to the last; and a number of launches behind them, with its grid, threads and dynamic shared bytes."""
_COPY = "runtime.TVMTensorCopyFromTo"
"""A function of every TVM runtime, which queues the copy and does not wait."""
_LAUNCH = ("blockIdx.x", "threadIdx.x", "tirx.use_dyn_shared_memory")
"""What a launch is given behind the kernel's own parameters."""
_HANDLE, _INT32 = struct.pack("<BBH", 3, 64, 1), struct.pack("<BBH", 0, 32, 1)
"""DLPack's types: code, bits, lanes."""
_LIBRARIES_KEPT = 256


def cuda_module(kernel: BoardKernel) -> bytes:
    """The machine code of a kernel as ``ffi.Module.load_from_bytes.cuda`` of TVM's runtime reads it.

    TVM gives this form to what it compiles itself, and has no function that gives it to machine code from elsewhere
    where there is no GPU (``SaveToBytes`` in its ``cuda_fallback_module.cc``).
    """
    pointers = len(kernel.tensors)
    parameters = [_HANDLE] * pointers + [_INT32]
    ordinary = struct.pack("<i", 0)
    described = _bytes(kernel.name) + _sequence(parameters) + _sequence([_bytes(tag) for tag in _LAUNCH])
    described += _sequence([ordinary] * len(parameters))
    return _bytes("cubin") + _sequence([_bytes(kernel.name) + described]) + _bytes(kernel.code)


def _bytes(data: str | bytes) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return struct.pack("<Q", len(data)) + data


def _sequence(parts: Sequence[bytes]) -> bytes:
    return struct.pack("<Q", len(parts)) + b"".join(parts)


def host_library(kernel: BoardKernel, triple: str) -> bytes:
    """The library that launches a kernel.

    Parameters
    ----------
    kernel : BoardKernel
    triple : str
        LLVM's name of the processor that it runs on, such as ``"aarch64-linux-gnu"``; empty for that of this machine.

    Raises
    ------
    OptionError
        If LLVM generates no code for such a processor.
    CompilerNotFoundError
        If nothing here links for it.
    """
    return _host_library(kernel.name, len(kernel.tensors), triple)


@functools.lru_cache(maxsize=_LIBRARIES_KEPT)
def _host_library(name: str, tensors: int, triple: str) -> bytes:
    linker = _linker(triple)
    host = {"kind": "llvm", **({"mtriple": triple} if triple else {})}
    try:
        target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host=host)
        module = tvm.compile(tvm.IRModule({ENTRY: _entry(name, tensors, target)}), target=target)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise OptionError(f"LLVM makes no code for a board's host {triple!r}: {reason}") from error
    with tempfile.TemporaryDirectory(prefix="souffle-board-") as folder:
        path = Path(folder) / "host.so"
        module.export_library(str(path), cc=linker, options=["-shared", "-fPIC", "-nostdlib"])
        return path.read_bytes()


def _entry(name: str, tensors: int, target: tvm.target.Target) -> tirx.PrimFunc:
    def integer(label: str) -> tirx.Var:
        return tirx.Var(label, "int32")

    # Bytes, so that it needs to know nothing of shapes and types.
    buffers = [tirx.decl_buffer((integer(f"bytes{i}"),), "uint8", f"tensor{i}") for i in range(tensors)]
    room = integer("room")
    source, sink = (tirx.decl_buffer((room,), "uint8", label) for label in ("source", "sink"))
    copies, launches, grid, threads, shared = map(integer, ("copies", "launches", "grid", "threads", "shared"))
    pointers = [buffer.data for buffer in buffers]
    copy = tirx.call_packed(_COPY, source, sink)
    launch = tirx.call_packed(name, *pointers, grid, grid, threads, shared)
    body = tirx.SeqStmt(
        [
            tirx.For(integer(f"{label}_index"), 0, count, tirx.ForKind.SERIAL, tirx.Evaluate(call))
            for label, count, call in (("copy", copies, copy), ("launch", launches, launch))
        ]
    )
    parameters = [*buffers, source, sink, copies, launches, grid, threads, shared]
    return tirx.PrimFunc(parameters, body).with_attrs({"global_symbol": ENTRY, "target": target})


def _linker(triple: str) -> str:
    """A compiler that links for a processor."""
    machine = triple.split("-")[0]
    if not triple or machine == platform.machine():
        names = ["g++", "gcc", "c++", "cc", "clang++", "clang"]
    else:
        names = [f"{triple}-{compiler}" for compiler in ("g++", "gcc", "clang++", "clang")]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        other = f"; install {names[0]} (on Debian and Ubuntu, the package g++-{triple})" if names[0] != "g++" else ""
        raise CompilerNotFoundError(
            f"nothing on the PATH links a library for a board's host {triple or platform.machine()}: none of "
            f"{', '.join(names)} is there{other}"
        )
    return found
