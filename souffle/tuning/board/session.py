"""One board for as long as a candidate is measured: its device, kernels that are loaded on it, and their launches."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import rpc

from souffle.errors import NoGpuError
from souffle.tuning.board.address import BoardAddress
from souffle.tuning.board.artifact import ENTRY, cuda_module, host_library
from souffle.tuning.board.kernel import BoardKernel
from souffle.tuning.board.line import BoardError, BoardLine
from souffle.tuning.board.tracker import taken_board

__all__ = ["BoardDevice", "BoardSession", "LoadedKernel", "board_session"]

_ENDING_SECONDS = 1.0
"""After our own end of a session that the server ends it by itself."""
_LEAST_SPACER_BYTES, _MOST_SPACER_BYTES = 32 << 20, 512 << 20
_CACHES = 2
"""As many second-level caches are read before a launch, and as many written."""


@dataclass(frozen=True)
class BoardDevice:
    """The GPU of a board, as the board says.

    Attributes
    ----------
    name : str
    arch : str
        Such as ``"sm_87"``.
    cache_bytes : int
        Of its second-level cache; 0 where it does not say.
    """

    name: str
    arch: str
    cache_bytes: int

    def require(self, arch: str) -> None:
        """Raise NoGpuError unless machine code for `arch` runs on it.

        Machine code runs on its own architecture and later ones of the same major number; with the suffix ``a``, on its
        own alone.
        """
        wanted, own = (re.fullmatch(r"sm_(\d+)(\d)([af]?)", text) for text in (arch, self.arch))
        if wanted is not None and own is not None:
            same = wanted[1] == own[1] and int(wanted[2]) <= int(own[2])
            if same and (wanted[3] != "a" or wanted[2] == own[2]):
                return
        raise NoGpuError(
            f"schedules are searched for {arch}, and the board's {self.name} is {self.arch}; "
            f'search with arch="{self.arch}"'
        )


class LoadedKernel:
    """A kernel on a board, with memory for its outputs.

    Attributes
    ----------
    kernel : BoardKernel
    """

    def __init__(self, kernel: BoardKernel, module: Any, tensors: Sequence[Any], spacer: Sequence[Any]) -> None:
        self.kernel = kernel
        self._module, self._tensors, self._spacer = module, tuple(tensors), tuple(spacer)

    def _arguments(self, copies: int, launches: int) -> tuple[Any, ...]:
        kernel = self.kernel
        counts = (copies, launches, kernel.grid, kernel.threads, kernel.shared_bytes)
        return (*self._tensors, *self._spacer, *counts)

    def outputs(self, pattern: int) -> dict[str, np.ndarray]:
        """What it computes where each byte of its outputs was `pattern` before."""
        written = [pair for pair in zip(self.kernel.tensors, self._tensors, strict=True) if pair[0].kind == "output"]
        for tensor, memory in written:
            memory.copyfrom(np.full(tensor.nbytes, pattern, np.uint8))
        self._module[ENTRY](*self._arguments(0, 1))
        return {
            tensor.name: memory.numpy().view(tensor.dtype)[: int(np.prod(tensor.shape))].reshape(tensor.shape)
            for tensor, memory in written
        }

    def seconds(self, device: Any, launches: int, repeats: int) -> list[float]:
        """Device time of copies of the spacer, each with so many launches behind it that are queued meanwhile."""
        measure = self._module.time_evaluator(ENTRY, device, number=1, repeat=repeats)
        return [float(one) for one in measure(*self._arguments(1, launches)).results]


class BoardSession:
    """What is done on a board; nobody else's work runs there meanwhile.

    Attributes
    ----------
    device : BoardDevice
    handle : object
        TVM's name of the device.
    """

    def __init__(self, line: BoardLine, remote: rpc.RPCSession, address: BoardAddress) -> None:
        self._line, self._remote, self._address = line, remote, address
        self.handle = remote.cuda(0)
        self._spacer: tuple[Any, ...] = ()
        self._inputs: dict[str, Any] = {}
        with line.doing("asking for the device"):
            if not self.handle.exist:
                raise BoardError("the board's TVM sees no CUDA device; its server wants a TVM with CUDA, and a driver")
            arch = "sm_" + str(self.handle.compute_version).replace(".", "")
            cache = int(self.handle.l2_cache_size_bytes or 0)
            self.device = BoardDevice(str(self.handle.device_name), arch, cache)

    def doing(self, what: str) -> contextlib.AbstractContextManager[None]:
        """See :meth:`BoardLine.doing`."""
        return self._line.doing(what)

    def give(self, values: Mapping[str, np.ndarray]) -> None:
        """Put inputs into the board's memory, for all kernels that are loaded from now on."""
        with self.doing("sending the inputs"):
            for name, value in values.items():
                raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                self._inputs[name] = self._memory(max(1, raw.size))
                if raw.size:
                    self._inputs[name].copyfrom(raw)

    def load(self, kernel: BoardKernel, label: str) -> LoadedKernel:
        """Send a kernel, and load it.

        Raises
        ------
        NoGpuError
            If it is for another architecture.
        CompilerNotFoundError, OptionError
            If its library cannot be made here.
        BoardError
            If the board does not take it.
        """
        self.device.require(kernel.arch)
        library = host_library(kernel, self._address.host)
        with self.doing(f"sending {label}"):
            self._remote.upload(bytearray(library), f"{label}.so")
        with self.doing(f"loading {label}"):
            module = self._remote.load_module(f"{label}.so")
            load_cuda = self._remote.get_function("ffi.Module.load_from_bytes.cuda")
            module.import_module(load_cuda(cuda_module(kernel)))
        with self.doing(f"taking memory for {label}"):
            if not self._spacer:
                room = min(max(_CACHES * self.device.cache_bytes, _LEAST_SPACER_BYTES), _MOST_SPACER_BYTES)
                self._spacer = (self._memory(room), self._memory(room))
            tensors = [self._inputs.get(tensor.name) or self._memory(tensor.nbytes) for tensor in kernel.tensors]
        return LoadedKernel(kernel, module, tensors, self._spacer)

    def _memory(self, nbytes: int) -> Any:
        return tvm.runtime.empty((nbytes,), "uint8", self.handle)


@contextlib.contextmanager
def board_session(address: BoardAddress) -> Iterator[BoardSession]:
    """Take a board, and give it back at the end of the block.

    Raises
    ------
    NoBoardError
        If there is no board, or none is free in time.
    BoardError
        If it does not answer.
    """
    host, port, key = taken_board(address)
    with BoardLine(host, port, address.seconds) as line:
        with line.doing(f"connecting to the board at {host}:{port}"):
            # Its server ends a session that goes on though nobody is there any more.
            limit = address.seconds + _ENDING_SECONDS
            remote = rpc.connect("127.0.0.1", line.port, key, limit)
        yield BoardSession(line, remote, address)
        with line.doing("ending the session"):
            remote.get_function("CloseRPCConnection")()
