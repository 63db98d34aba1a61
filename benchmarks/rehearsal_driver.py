"""A CUDA driver without a GPU: it records calls, refuses what a real one refuses, and runs kernels on the CPU.

It stands in for the module ``cuda.bindings.driver``. Device addresses are host addresses, streams are integers, and
work runs when it is queued, or when its graph is launched. Times between events are host times and mean nothing.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from souffle.errors import DeviceError
from souffle.runtime.cpu_device import compile_text

__all__ = ["RehearsalDriver"]


class CUresult(enum.IntEnum):
    """The statuses that are given, with the real ones' numbers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


_STAND_INS = SimpleNamespace(
    CUresult=CUresult,
    CUdevice_attribute=enum.IntEnum(
        "CUdevice_attribute",
        {
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75,
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76,
            "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 16,
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 97,
            "CU_DEVICE_ATTRIBUTE_CLOCK_RATE": 13,
            "CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE": 38,
            "CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR": 39,
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 81,
            "CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR": 82,
            "CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR": 106,
        },
    ),
    CUfunction_attribute=enum.IntEnum(
        "CUfunction_attribute",
        {
            "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": 1,
            "CU_FUNC_ATTRIBUTE_NUM_REGS": 4,
            "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8,
            "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT": 9,
        },
    ),
    CUstream_flags=enum.IntEnum("CUstream_flags", {"CU_STREAM_NON_BLOCKING": 1}),
    CUevent_flags=enum.IntEnum("CUevent_flags", {"CU_EVENT_DEFAULT": 0, "CU_EVENT_DISABLE_TIMING": 2}),
    CUstreamCaptureMode=enum.IntEnum("CUstreamCaptureMode", {"CU_STREAM_CAPTURE_MODE_RELAXED": 2}),
    CUlaunchAttributeID=enum.IntEnum("CUlaunchAttributeID", {"CU_LAUNCH_ATTRIBUTE_COOPERATIVE": 2}),
    CUlaunchConfig=SimpleNamespace,
    CUlaunchAttribute=lambda: SimpleNamespace(id=None, value=SimpleNamespace(cooperative=0)),
)


_ALWAYS = ("cuGetErrorString", "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent")
"""What works after a fault, too."""
_WITHOUT_CONTEXT = (
    *("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute"),
    *("cuDevicePrimaryCtxRetain", *_ALWAYS),
)
"""What needs no context."""


class RehearsalDriver:
    """The stand-in.

    Parameters
    ----------
    texts
        The CUDA text of each module, by its machine code.
    types
        Where enumerations and structures come from: ``cuda.bindings.driver`` where it is installed (it needs no GPU for
        these), which shows that they are filled in as it wants; plain ones where not given.
    execute
        Run the kernels on the CPU device; without, a launch is only checked and recorded.
    capability, multiprocessors, blocks_each, shared_bytes, devices
        The device that is played; every kernel fits ``blocks_each`` times on a multiprocessor.
    fault
        What goes wrong: ``"too-large:N"`` for cooperative launches of more than N blocks (1) that are refused, though
        the driver has said before that they fit. Empty: nothing.

    Each thread has a stack of contexts. Work without a context is refused, and so is what belongs to another device's
    context than the one on top.

    Attributes
    ----------
    calls : list of (str, tuple)
        Every call with its arguments.
    launches : list of dict
        Every kernel that was queued: name, grid, block, shared, cooperative, pointers, integers, captured.
    """

    def __init__(
        self,
        texts: Mapping[bytes, str],
        *,
        types: Any = None,
        capability: tuple[int, int] = (9, 0),
        multiprocessors: int = 2,
        blocks_each: int = 2,
        shared_bytes: int = 232448,
        devices: int = 1,
        execute: bool = True,
        fault: str = "",
    ) -> None:
        self._texts, self._execute = dict(texts), execute
        self._capability, self._multiprocessors, self._blocks_each = capability, multiprocessors, blocks_each
        self._shared_bytes, self._devices = shared_bytes, devices
        kind, _, number = fault.partition(":")
        if kind not in ("", "too-large"):
            raise ValueError(f"fault {fault!r} is not of the form too-large:N")
        self._most_blocks = int(number or 1) if kind == "too-large" else multiprocessors * blocks_each
        for name in vars(_STAND_INS):
            setattr(self, name, getattr(types if types is not None else _STAND_INS, name))
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.launches: list[dict[str, Any]] = []
        self._thread = threading.local()
        self._owners: dict[int, int] = {}
        self._memory: dict[int, np.ndarray] = {}
        self._modules: dict[int, Any] = {}
        self._functions: dict[int, dict[str, Any]] = {}
        self._events: dict[int, float | None] = {}
        self._streams: set[int] = set()
        self._capturing: dict[int, list[Callable[[], Any]]] = {}
        self._graphs: dict[int, list[Callable[[], Any]]] = {}
        self._fault: Any = None
        self._fault_text = ""
        # No size and no address is such a number, so that arguments which are handles can be told from others.
        self._handles = itertools.count(1 << 40)

    def _new(self) -> int:
        handle = next(self._handles)
        self._owners[handle] = self.contexts[-1]
        return handle

    @property
    def contexts(self) -> list[int]:
        """This thread's stack of contexts, which a test may fill as another library would."""
        if not hasattr(self._thread, "contexts"):
            self._thread.contexts = []
        return self._thread.contexts

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        action = getattr(type(self), f"_{name}", None)
        if action is None:
            raise AttributeError(f"the rehearsal driver has no {name}")

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, args))
            if self._fault is not None and name not in _ALWAYS:
                return (self._fault, None)
            if name not in _WITHOUT_CONTEXT:
                if not self.contexts:
                    return (self.CUresult.CUDA_ERROR_INVALID_CONTEXT, None)
                if any(isinstance(arg, int) and self._owners.get(arg, self.contexts[-1]) != self.contexts[-1]
                       for arg in args):  # fmt: skip
                    return (self.CUresult.CUDA_ERROR_INVALID_HANDLE, None)
            result = action(self, *args)
            if isinstance(result, self.CUresult):
                return (result, None)
            return (self.CUresult.CUDA_SUCCESS,) if result is None else (self.CUresult.CUDA_SUCCESS, result)

        return call

    # the device

    def _cuInit(self, flags: int) -> None:
        return None

    def _cuGetErrorString(self, status: Any) -> bytes:
        return (self._fault_text or "rehearsed").encode()

    def _cuDriverGetVersion(self) -> int:
        return 13000

    def _cuDeviceGetCount(self) -> int:
        return self._devices

    def _cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def _cuDeviceGetName(self, length: int, device: int) -> bytes:
        return b"rehearsal (no GPU)".ljust(length, b"\0")

    def _cuDeviceGetAttribute(self, which: Any, device: int) -> int:
        return {
            75: self._capability[0],
            76: self._capability[1],
            16: self._multiprocessors,
            97: self._shared_bytes,
            13: 1_000_000,
            38: 1 << 20,
            39: 2048,
            81: self._shared_bytes + 1024,
            82: 65536,
            106: 32,
        }[int(which)]

    def _cuDevicePrimaryCtxRetain(self, device: int) -> int:
        return 1 + device

    def _cuCtxSetCurrent(self, context: int) -> None:
        self.contexts[-1:] = [context]

    def _cuCtxPushCurrent(self, context: int) -> None:
        self.contexts.append(context)

    def _cuCtxPopCurrent(self) -> Any:
        return self.contexts.pop() if self.contexts else self.CUresult.CUDA_ERROR_INVALID_CONTEXT

    # modules

    def _cuModuleLoadData(self, image: bytes) -> Any:
        if bytes(image) not in self._texts:
            return self.CUresult.CUDA_ERROR_INVALID_IMAGE
        handle = self._new()
        text = self._texts[bytes(image)]
        self._modules[handle] = (bytes(image), text, compile_text(text) if self._execute else None)
        return handle

    def _cuModuleUnload(self, module: int) -> Any:
        return None if self._modules.pop(module, None) else self.CUresult.CUDA_ERROR_INVALID_HANDLE

    def _cuModuleGetFunction(self, module: int, name: bytes) -> Any:
        image, text, compiled = self._modules[module]
        if image.startswith(b"\x7fELF") and name not in image:
            return self.CUresult.CUDA_ERROR_NOT_FOUND
        pattern = rf"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?{re.escape(name.decode())}\s*\(([^)]*)\)"
        match = re.search(pattern, text)
        if match is None:
            return self.CUresult.CUDA_ERROR_NOT_FOUND
        kinds = ["*" in parameter for parameter in match[1].split(",") if parameter.strip()]
        handle = self._new()
        self._functions[handle] = {"name": name.decode(), "kinds": kinds, "module": compiled, "shared": 48 * 1024}
        return handle

    def _cuFuncGetAttribute(self, which: Any, function: int) -> int:
        return {1: 0, 4: 32, 8: self._functions[function]["shared"]}[int(which)]

    def _cuFuncSetAttribute(self, function: int, which: Any, value: int) -> Any:
        if int(which) == 9 and -1 <= value <= 100:
            return None
        if int(which) != 8 or value > self._shared_bytes:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE
        self._functions[function]["shared"] = value
        return None

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared: int) -> int:
        return self._blocks_each if shared <= self._functions[function]["shared"] else 0

    # memory

    def _cuMemAlloc(self, nbytes: int) -> Any:
        if nbytes < 1:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE
        raw = np.full(nbytes + 256, 0xA5, np.uint8)
        start = -raw.ctypes.data % 256
        piece = raw[start : start + nbytes]
        self._memory[piece.ctypes.data] = piece
        self._owners[piece.ctypes.data] = self.contexts[-1]
        return piece.ctypes.data

    def _cuMemFree(self, address: int) -> Any:
        self._owners.pop(address, None)
        return None if self._memory.pop(address, None) is not None else self.CUresult.CUDA_ERROR_INVALID_VALUE

    def _range(self, address: int, nbytes: int | None = None) -> np.ndarray | None:
        for start, piece in list(self._memory.items()):
            if start <= address < start + len(piece) or (address == start and not nbytes):
                tail = piece[address - start :]
                return tail if nbytes is None else (tail[:nbytes] if nbytes <= len(tail) else None)
        return None

    def live_bytes(self) -> int:
        """Bytes of device memory that were not given back."""
        return sum(len(piece) for piece in list(self._memory.values()))

    def _queue(self, stream: Any, work: Callable[[], Any]) -> Any:
        if int(stream) not in self._streams and int(stream) not in (0, 1, 2):
            return self.CUresult.CUDA_ERROR_INVALID_HANDLE
        if self._owners.get(int(stream), self.contexts[-1]) != self.contexts[-1]:
            return self.CUresult.CUDA_ERROR_INVALID_HANDLE
        if int(stream) in self._capturing:
            self._capturing[int(stream)].append(work)
            return None
        return work()

    def _move(self, target: np.ndarray | None, source: np.ndarray | None, stream: Any) -> Any:
        if target is None or source is None:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE
        return self._queue(stream, lambda: np.copyto(target, source))

    @staticmethod
    def _host(address: int, nbytes: int) -> np.ndarray:
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)

    def _cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: Any) -> Any:
        return self._move(self._range(target, nbytes), self._host(source, nbytes), stream)

    def _cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: Any) -> Any:
        return self._move(self._host(target, nbytes), self._range(source, nbytes), stream)

    def _cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: Any) -> Any:
        return self._move(self._range(target, nbytes), self._range(source, nbytes), stream)

    def _cuMemsetD8Async(self, target: int, byte: int, nbytes: int, stream: Any) -> Any:
        piece = self._range(target, nbytes)
        if piece is None:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE
        return self._queue(stream, lambda: piece.fill(byte))

    # streams, events, graphs

    def _cuStreamCreate(self, flags: int) -> int:
        handle = self._new()
        self._streams.add(handle)
        return handle

    def _cuStreamDestroy(self, stream: int) -> None:
        self._streams.discard(stream)

    def _cuStreamSynchronize(self, stream: int) -> Any:
        return self.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED if stream in self._capturing else None

    def _cuStreamWaitEvent(self, stream: Any, event: int, flags: int) -> Any:
        return None if event in self._events else self.CUresult.CUDA_ERROR_INVALID_HANDLE

    def _cuEventCreate(self, flags: int) -> int:
        handle = self._new()
        self._events[handle] = None
        return handle

    def _cuEventDestroy(self, event: int) -> None:
        self._events.pop(event, None)

    def _cuEventRecord(self, event: int, stream: Any) -> Any:
        if event not in self._events:
            return self.CUresult.CUDA_ERROR_INVALID_HANDLE
        self._events[event] = time.perf_counter()
        return None

    def _cuEventQuery(self, event: int) -> Any:
        return None if event in self._events else self.CUresult.CUDA_ERROR_INVALID_HANDLE

    def _cuEventElapsedTime(self, start: int, end: int) -> Any:
        first, last = self._events.get(start), self._events.get(end)
        if first is None or last is None:
            return self.CUresult.CUDA_ERROR_INVALID_HANDLE
        return (last - first) * 1e3

    def _cuStreamBeginCapture(self, stream: int, mode: Any) -> None:
        self._capturing[stream] = []

    def _cuStreamEndCapture(self, stream: int) -> int:
        handle = self._new()
        self._graphs[handle] = self._capturing.pop(stream)
        return handle

    def _cuGraphInstantiate(self, graph: int, flags: int) -> int:
        handle = self._new()
        self._graphs[handle] = self._graphs[graph]
        return handle

    def _cuGraphDestroy(self, graph: int) -> None:
        self._graphs.pop(graph, None)

    def _cuGraphExecDestroy(self, graph: int) -> None:
        self._graphs.pop(graph, None)

    def _cuGraphLaunch(self, graph: int, stream: Any) -> Any:
        for work in self._graphs[graph]:
            status = self._queue(stream, work)
            if status is not None:
                return status
        return None

    # launches

    def _cuLaunchKernelEx(self, config: Any, function: int, parameters: int, extra: int) -> Any:
        held = self._functions[function]
        kinds: Sequence[bool] = held["kinds"]
        table = (ctypes.c_void_p * max(1, len(kinds))).from_address(parameters)
        pointers, integers, args = [], [], []
        for index, pointer in enumerate(kinds):
            if pointer:
                address = ctypes.c_uint64.from_address(table[index]).value
                pointers.append(address)
                args.append(self._range(address))
            else:
                integers.append(ctypes.c_int32.from_address(table[index]).value)
                args.append(np.int32(integers[-1]))
        attributes = list(config.attrs)[: config.numAttrs] if config.numAttrs else []
        cooperative = any(bool(attribute.value.cooperative) for attribute in attributes)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        if config.sharedMemBytes > held["shared"]:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE
        if cooperative and grid[0] > self._most_blocks:
            return self.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
        self.launches.append(
            {
                "name": held["name"],
                "grid": grid[0],
                "block": block[0],
                "shared": config.sharedMemBytes,
                "cooperative": cooperative,
                "pointers": tuple(pointers),
                "integers": tuple(integers),
                "captured": int(config.hStream) in self._capturing,
            }
        )
        shared = config.sharedMemBytes

        def work() -> Any:
            if any(arg is None for arg in args):
                self._fault = self.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
                return None
            if not self._execute:
                return None
            try:
                held["module"].launch(
                    held["name"], grid=grid, block=block, args=args, shared_bytes=shared, cooperative=cooperative
                )
            except DeviceError as error:
                self._fault, self._fault_text = self.CUresult.CUDA_ERROR_LAUNCH_FAILED, str(error)
            return None

        return self._queue(config.hStream, work)
