"""A CUDA driver without a GPU: it records calls, refuses what a real one refuses, and runs kernels on the CPU.

It stands in for the module ``cuda.bindings.driver``. Device addresses are host addresses, streams are integers, and
times between events are host times and mean nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.rehearsal_streams import UNSAFE, RehearsalStreams
from benchmarks.rehearsal_types import STAND_INS
from souffle.emulator import compile_text
from souffle.errors import DeviceError

__all__ = ["RehearsalDriver"]


_ALWAYS = (
    *("cuGetErrorString", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent"),
    "cuThreadExchangeStreamCaptureMode",
)
"""What works after a fault, too."""
_WITHOUT_CONTEXT = (
    *("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute"),
    *("cuDevicePrimaryCtxRetain", *_ALWAYS),
)
"""What needs no context."""


_NEW, _FREED, _NOT_COPIED = 0xA5, 0xDD, 0xC9
"""Bytes of device memory that nothing has written, and that was given back; of a host array before its copy has run."""
_REGISTERS_EACH, _THREADS_EACH, _SLOTS_EACH = 65536, 2048, 32
"""What a multiprocessor has: registers, resident threads and blocks."""
_FAULTS = ("", "too-large", "sticky", "hang", "wrong")


class RehearsalDriver(RehearsalStreams):
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
    capability, multiprocessors, blocks_each, shared_bytes, devices, cooperative
        The device that is played, and whether it has cooperative launches; a kernel of which nothing is known fits
        ``blocks_each`` times on a multiprocessor, if its shared memory does.
    resources
        By kernel, registers of a thread and bytes of static shared memory, as the CUDA compiler reports them. Such a
        kernel fits as often as these and its threads leave room, by the rules of CUDA's occupancy calculator.
    deferred
        Work does not run when it is queued, but when something waits for it (:class:`RehearsalStreams`). What a host
        array holds is read by then, and a change since it was queued, or memory that is no longer there, is a fault;
        an array that is copied into holds a pattern until then.
    fault
        What goes wrong, of which N is 1 where not given. Empty: nothing.

        - ``"too-large:N"``: cooperative launches of more than N blocks are refused, though the driver has said before
          that they fit.
        - ``"sticky:N"``: the Nth kernel that runs has an illegal access, and every later call fails.
        - ``"hang:N"``: the Nth kernel that runs never ends, until its process is killed.
        - ``"wrong:N:KERNEL"``: when the kernel (any, where not given) has run for the Nth time, an element of floating
          point that it has written has another value.

    Each thread has a stack of contexts. Work without a context is refused, and so is what belongs to another device's
    context than the one on top. Memory that is given back is overwritten.

    Attributes
    ----------
    calls : list of (str, tuple)
        Every call with its arguments.
    launches : list of dict
        Every kernel that was queued: name, grid, block, shared, cooperative, pointers, integers, captured.

    Raises
    ------
    ValueError
        If there is no such fault.
    """

    def __init__(
        self,
        texts: Mapping[bytes, str],
        *,
        types: Any = None,
        capability: tuple[int, int] = (9, 0),
        multiprocessors: int = 2,
        blocks_each: int = 2,
        resources: Mapping[str, tuple[int, int]] | None = None,
        shared_bytes: int = 232448,
        devices: int = 1,
        cooperative: bool = True,
        execute: bool = True,
        deferred: bool = False,
        fault: str = "",
    ) -> None:
        super().__init__(deferred)
        self._texts, self._execute = dict(texts), execute
        self._capability, self._multiprocessors, self._blocks_each = capability, multiprocessors, blocks_each
        self._resources = dict(resources or {})
        self._shared_bytes, self._devices, self._cooperative = shared_bytes, devices, cooperative
        self._fault_kind, number, self._fault_kernel = (*fault.split(":", 2), "", "")[:3]
        if self._fault_kind not in _FAULTS or not (number or "1").isdecimal():
            raise ValueError(f"fault {fault!r} is none of too-large:N, sticky:N, hang:N and wrong:N:KERNEL")
        self._fault_number = int(number or 1)
        self._most_blocks = self._fault_number if self._fault_kind == "too-large" else 2**31 - 1
        self._kernels_run = itertools.count(1)
        self._written: dict[str, tuple[int, int] | None] = {}
        for name in vars(STAND_INS):
            setattr(self, name, getattr(types if types is not None else STAND_INS, name))
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.launches: list[dict[str, Any]] = []
        self._memory: dict[int, np.ndarray] = {}
        self._modules: dict[int, Any] = {}
        self._functions: dict[int, dict[str, Any]] = {}

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
            result = self._forbidden() if name in UNSAFE else None
            if result is None:
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
            95: int(self._cooperative),
            13: 1_000_000,
            38: 1 << 20,
            39: _THREADS_EACH,
            81: self._shared_bytes + 1024,
            82: _REGISTERS_EACH,
            106: _SLOTS_EACH,
        }[int(which)]

    def _cuDevicePrimaryCtxRetain(self, device: int) -> int:
        return 1 + device

    def _cuCtxSetCurrent(self, context: int) -> None:
        self.contexts[-1:] = [context] if context else []

    def _cuCtxGetCurrent(self) -> int:
        return self.contexts[-1] if self.contexts else 0

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
        kinds = [
            (re.search(r"\b(?:float|double|half|__nv_bfloat16)\b", parameter) or ["other"])[0]
            if "*" in parameter
            else ""
            for parameter in match[1].split(",")
            if parameter.strip()
        ]
        handle = self._new()
        self._functions[handle] = {"name": name.decode(), "kinds": kinds, "module": compiled, "shared": 48 * 1024}
        return handle

    def _cuFuncGetAttribute(self, which: Any, function: int) -> int:
        held = self._functions[function]
        registers, static = self._resources.get(held["name"], (32, 0))
        return {1: static, 4: registers, 8: held["shared"]}[int(which)]

    def _cuFuncSetAttribute(self, function: int, which: Any, value: int) -> Any:
        if int(which) == 9 and -1 <= value <= 100:
            return None
        if int(which) != 8 or value > self._shared_bytes:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE
        self._functions[function]["shared"] = value
        return None

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared: int) -> int:
        held = self._functions[function]
        return self._fitting(held["name"], threads, shared) if shared <= held["shared"] else 0

    def _fitting(self, kernel: str, threads: int, shared: int) -> int:
        """Blocks that a multiprocessor holds at once; the system takes a KiB of shared memory for each."""
        if kernel not in self._resources:
            return min(self._blocks_each, (self._shared_bytes + 1024) // (shared + 1024))
        registers, static = self._resources[kernel]
        warps = -(-threads // 32)
        # Each of four schedulers has a quarter of the registers, and gives a warp eight at a time of each thread.
        warps_each = 4 * (_REGISTERS_EACH // 4 // (-(-max(registers, 1) // 8) * 8 * 32))
        granules = -(-(static + shared) // 128)
        of_shared = (self._shared_bytes + 1024) // (128 * granules + 1024)
        return min(_SLOTS_EACH, _THREADS_EACH // threads, warps_each // warps, of_shared)

    # memory

    def _cuMemAlloc(self, nbytes: int) -> Any:
        if nbytes < 1:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE
        raw = np.full(nbytes + 256, _NEW, np.uint8)
        start = -raw.ctypes.data % 256
        piece = raw[start : start + nbytes]
        self._memory[piece.ctypes.data] = piece
        self._owners[piece.ctypes.data] = self.contexts[-1]
        return piece.ctypes.data

    def _cuMemFree(self, address: int) -> Any:
        if address not in self._memory:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE

        def free() -> None:
            self._run_all()
            self._owners.pop(address, None)
            self._memory.pop(address).fill(_FREED)

        return self._wait(free, later=True)

    def _cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:
        # A kernel reaches it only where it is mapped.
        return self._cuMemAlloc(nbytes) if flags & 2 else self.CUresult.CUDA_ERROR_INVALID_VALUE

    def _cuMemHostGetDevicePointer(self, host: int, flags: int) -> Any:
        return host if host in self._memory and not flags else self.CUresult.CUDA_ERROR_INVALID_VALUE

    def _cuMemFreeHost(self, host: int) -> Any:
        return self._cuMemFree(host)

    def _range(self, address: int, nbytes: int | None = None) -> np.ndarray | None:
        # A copy: making the pairs of a list may collect garbage, whose finalizers give memory back in the midst of it.
        for start, piece in self._memory.copy().items():
            if start <= address < start + len(piece) or (address == start and not nbytes):
                tail = piece[address - start :]
                return tail if nbytes is None else (tail[:nbytes] if nbytes <= len(tail) else None)
        return None

    def live_bytes(self) -> int:
        """Bytes of device memory that were not given back."""
        return sum(len(piece) for piece in list(self._memory.values()))

    def _break(self, text: str) -> None:
        self._fault, self._fault_text = self.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, text

    @staticmethod
    def _host(address: int, nbytes: int) -> np.ndarray:
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)

    @staticmethod
    def _host_bytes(address: int, nbytes: int) -> bytes | None:
        """What is at a host address that may not be there any more."""
        try:
            with open("/proc/self/mem", "rb", buffering=0) as memory:
                return os.pread(memory.fileno(), nbytes, address)
        except OSError:
            return None

    def _cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: Any) -> Any:
        if self._range(target, nbytes) is None:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE
        queued = zlib.crc32(self._host(source, nbytes)) if self._deferred else 0

        def work() -> None:
            held = self._host_bytes(source, nbytes) if self._deferred else self._host(source, nbytes)
            if held is None or (self._deferred and zlib.crc32(held) != queued):
                self._break("a host array was freed or overwritten before the copy from it had run")
            else:
                self._range(target, nbytes)[:] = np.frombuffer(held, np.uint8)

        return self._queue(stream, work)

    def _cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: Any) -> Any:
        if self._range(source, nbytes) is None:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE
        if self._deferred:
            self._host(target, nbytes)[:] = _NOT_COPIED

        def work() -> None:
            if self._deferred and self._host_bytes(target, nbytes) != bytes([_NOT_COPIED]) * nbytes:
                self._break("a host array was freed or written before the copy into it had run")
            else:
                self._host(target, nbytes)[:] = self._range(source, nbytes)

        return self._queue(stream, work)

    def _cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: Any) -> Any:
        if self._range(target, nbytes) is None or self._range(source, nbytes) is None:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE

        def work() -> None:
            pieces = self._range(target, nbytes), self._range(source, nbytes)
            if pieces[0] is None or pieces[1] is None:
                self._break("a copy between addresses that were given back")
            else:
                np.copyto(*pieces)

        return self._queue(stream, work)

    def _cuMemsetD8Async(self, target: int, byte: int, nbytes: int, stream: Any) -> Any:
        if self._range(target, nbytes) is None:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE
        return self._queue(stream, lambda: self._range(target, nbytes).fill(byte))

    # launches

    def _cuLaunchKernelEx(self, config: Any, function: int, parameters: int, extra: int) -> Any:
        held = self._functions[function]
        kinds: Sequence[str] = held["kinds"]
        table = (ctypes.c_void_p * max(1, len(kinds))).from_address(parameters)
        values = [
            (ctypes.c_uint64 if kind else ctypes.c_int32).from_address(table[index]).value
            for index, kind in enumerate(kinds)
        ]
        attributes = list(config.attrs)[: config.numAttrs] if config.numAttrs else []
        cooperative = any(bool(attribute.value.cooperative) for attribute in attributes)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        if config.sharedMemBytes > held["shared"]:
            return self.CUresult.CUDA_ERROR_INVALID_VALUE
        fitting = self._fitting(held["name"], block[0], config.sharedMemBytes)
        if held["name"] in self._resources and not fitting:
            return self.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        if cooperative and grid[0] > min(self._most_blocks, self._multiprocessors * fitting):
            return self.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
        stream = self._stream(config.hStream)
        if isinstance(stream, self.CUresult):
            return stream
        shared = config.sharedMemBytes
        self.launches.append(
            {
                "name": held["name"],
                "grid": grid[0],
                "block": block[0],
                "shared": shared,
                "cooperative": cooperative,
                "pointers": tuple(value for value, kind in zip(values, kinds, strict=True) if kind),
                "integers": tuple(value for value, kind in zip(values, kinds, strict=True) if not kind),
                "captured": stream.capture is not None,
            }
        )

        def work() -> None:
            args = [self._range(value) if kind else np.int32(value) for value, kind in zip(values, kinds, strict=True)]
            if any(arg is None for arg in args):
                self._break(f"kernel {held['name']} got an address where no memory is")
                return
            watched, spoil = self._fault_kind == "wrong", self._played_fault(held["name"])
            if not self._execute:
                return
            before = [arg.copy() if kind else None for arg, kind in zip(args, kinds, strict=True)] if watched else []
            try:
                held["module"].launch(
                    held["name"], grid=grid, block=block, args=args, shared_bytes=shared, cooperative=cooperative
                )
            except DeviceError as error:
                self._fault, self._fault_text = self.CUresult.CUDA_ERROR_LAUNCH_FAILED, str(error)
            if watched:
                # A later run may write what is there already.
                self._written[held["name"]] = _written(kinds, before, args) or self._written.get(held["name"])
            if spoil and self._written[held["name"]]:
                which, byte = self._written[held["name"]]
                args[which][byte] ^= 0x40

        return self._queue(config.hStream, work)

    def _played_fault(self, kernel: str) -> bool:
        """Do what is to go wrong with a kernel that runs now; whether its result is to be changed."""
        if self._fault_kind in ("", "too-large") or self._fault_kernel not in ("", kernel):
            return False
        if next(self._kernels_run) != self._fault_number:
            return False
        if self._fault_kind == "sticky":
            self._break("an illegal memory access was encountered")
        while self._fault_kind == "hang":
            time.sleep(60)
        return self._fault_kind == "wrong"


def _written(kinds: Sequence[str], before: Sequence[Any], after: Sequence[Any]) -> tuple[int, int] | None:
    """The last argument of floating point that a kernel has changed, and the highest byte of an element of it."""
    sizes = {"float": 4, "double": 8, "half": 2, "__nv_bfloat16": 2}
    for index, kind in reversed(list(enumerate(kinds))):
        changed = np.flatnonzero(before[index] != after[index]) if kind in sizes else ()
        if len(changed):
            return index, int(changed[0]) // sizes[kind] * sizes[kind] + sizes[kind] - 1
    return None
