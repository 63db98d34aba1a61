"""The functions of a network for ``target="cpu"``, and calls of them that are put down once and made in one go.

A function takes descriptors of tensors (DLPack's ``DLTensor``) by the calling convention of TVM's FFI. The calls of a
network are tables of both, through which a function of its library goes (``souffle/codegen/host_calls.cpp``).
"""

from __future__ import annotations

import _ctypes
import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import tvm_ffi

from souffle.codegen.plan import Plan
from souffle.errors import DeviceError
from souffle.tvm_compat import function_symbol

__all__ = ["CallSequence", "LoadedFunctions", "Pace"]

_RUN = "souffle_calls_1_run"
_SIGNATURE = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
_FUNCTION = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)

_DESCRIPTOR = np.dtype(
    [
        ("data", "u8"),
        ("device_type", "i4"),
        ("device_id", "i4"),
        ("ndim", "i4"),
        ("type_code", "u1"),
        ("bits", "u1"),
        ("lanes", "u2"),
        ("shape", "u8"),
        ("strides", "u8"),
        ("byte_offset", "u8"),
    ]
)
_ARGUMENT = np.dtype([("type", "i4"), ("padding", "u4"), ("value", "u8")])
_CALL = np.dtype([("function", "u8"), ("arguments", "u8"), ("count", "i8")])
_ON_CPU = 1  # kDLCPU
_IS_DESCRIPTOR = 7  # kTVMFFIDLTensorPtr

_UNINTERRUPTED_NS = 50_000_000
"""A call of a network looks for signals, such as that of Ctrl-C, so often."""
_TIMED_CALLS = 5
_SHORT_SECONDS = 20e-6
"""A thread that waits for Python's lock asks for it after 5 ms."""

_Runner = Callable[[int, int, int, int, "int | None"], int]


class LoadedFunctions:
    """The machine code of a network, loaded.

    Parameters
    ----------
    library : Path
        May be removed afterwards.
    names : sequence of str
        Of the functions, in order.

    Attributes
    ----------
    addresses : array of uint64
        Of the functions.

    Raises
    ------
    RuntimeError, OSError
        If it cannot be loaded here.
    """

    def __init__(self, library: Path, names: Sequence[str]) -> None:
        # Tells it where TVM's own functions are, and keeps it open: as long as this, not until the process ends.
        self._module = tvm_ffi.load_module(library, keep_module_alive=False)
        self._free = self._locked = _one_after_another
        opened = ctypes.CDLL(str(library))
        try:
            self.addresses = np.array([_address(opened, function_symbol(name)) for name in names], np.uint64)
            if hasattr(opened, _RUN):
                run = _address(opened, _RUN)
                self._free = ctypes.CFUNCTYPE(*_SIGNATURE)(run)
                self._locked = ctypes.PYFUNCTYPE(*_SIGNATURE)(run)
        finally:
            _ctypes.dlclose(opened._handle)  # TVM has it open; what ctypes opens it never closes

    def runner(self, *, locked: bool) -> _Runner:
        """What goes through a table of calls, with Python's lock or without."""
        return self._locked if locked else self._free

    def whole(self, table: int, end: int, nanoseconds: int, *, locked: bool) -> Callable[[], int]:
        """The same with settled arguments, which ctypes then has not to convert in each call."""
        run = self.runner(locked=locked)
        settled = (table, 0, end, nanoseconds, None)
        kinds = getattr(run, "argtypes", None)
        if kinds is None:
            return partial(run, *settled)
        return partial(run, *(kind(value) for kind, value in zip(kinds, settled, strict=True)))


def _address(library: ctypes.CDLL, symbol: str) -> int:
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value


def _one_after_another(calls: int, begin: int, end: int, nanoseconds: int, times: int | None) -> int:
    """What ``souffle_calls_1_run`` does, for libraries of before it."""
    table = np.ctypeslib.as_array((ctypes.c_uint8 * (end * _CALL.itemsize)).from_address(calls)).view(_CALL)
    stamps = None if times is None else (ctypes.c_int64 * (end + 1)).from_address(times)
    last = time.monotonic_ns() + nanoseconds
    for i in range(begin, end):
        function, arguments, count = (int(each) for each in table[i])
        if stamps is not None:
            stamps[i] = time.monotonic_ns()
        result = np.zeros(1, _ARGUMENT)
        if ctypes.CFUNCTYPE(*_FUNCTION)(function)(None, arguments, count, result.ctypes.data):
            return -1 - i
        if nanoseconds and time.monotonic_ns() >= last and i + 1 < end:
            return i + 1
    if stamps is not None:
        stamps[end] = time.monotonic_ns()
    return end


class Pace:
    """Whether calls of a network keep Python's lock: those that are over before another thread has it.

    A thread that lets go of it has to wait for its turn again; of networks of some microseconds, threads that call at
    the same time do little else. The first calls are timed, and their median decides.
    """

    def __init__(self) -> None:
        self.calls_left = _TIMED_CALLS
        self.short = False
        self._seconds: list[float] = []
        self._lock = threading.Lock()

    def learn(self, seconds: float) -> None:
        """Take in what a call took."""
        with self._lock:
            if self.calls_left:
                self._seconds.append(seconds)
                self.short = self.calls_left == 1 and float(np.median(self._seconds)) <= _SHORT_SECONDS
                self.calls_left -= 1


class CallSequence:
    """The calls of a plan's functions with the buffers of one workspace.

    Parameters
    ----------
    plan : Plan
    functions : LoadedFunctions
    arrays : mapping of int to array
        Where each buffer of the plan that a call takes lies, by its number.
    pace : Pace
    """

    def __init__(self, plan: Plan, functions: LoadedFunctions, arrays: Mapping[int, np.ndarray], pace: Pace) -> None:
        self._plan, self._functions, self._pace = plan, functions, pace
        self._memory = dict(arrays)
        self._tensors = np.zeros(len(plan.buffers), _DESCRIPTOR)
        self._extents = [np.zeros((2, max(1, len(buffer.shape))), np.int64) for buffer in plan.buffers]
        for index, (buffer, extents) in enumerate(zip(plan.buffers, self._extents, strict=True)):
            dtype, rank = tvm_ffi.dtype(buffer.dtype), len(buffer.shape)
            extents[0, :rank] = buffer.shape
            extents[1, :rank] = [int(np.prod(buffer.shape[axis + 1 :], dtype=np.int64)) for axis in range(rank)]
            shape, strides = extents.ctypes.data, extents[1].ctypes.data
            self._tensors[index] = (
                arrays[index].ctypes.data if index in arrays else 0,
                *(_ON_CPU, 0, rank, dtype.type_code, dtype.bits, dtype.lanes, shape, strides, 0),
            )
        used = np.array([index for launch in plan.launches for index in launch.buffers], np.uint64)
        self._arguments = np.zeros(len(used), _ARGUMENT)
        self._arguments["type"] = _IS_DESCRIPTOR
        self._arguments["value"] = self._tensors.ctypes.data + used * np.uint64(_DESCRIPTOR.itemsize)
        counts = np.array([len(launch.buffers) for launch in plan.launches], np.int64)
        self._calls = np.zeros(len(counts), _CALL)
        self._calls["function"] = functions.addresses[[launch.kernel for launch in plan.launches]]
        self._calls["arguments"] = self._arguments.ctypes.data + (np.cumsum(counts) - counts) * _ARGUMENT.itemsize
        self._calls["count"] = counts
        self._table, self._end = self._calls.ctypes.data, len(counts)
        self._free = functions.whole(self._table, self._end, _UNINTERRUPTED_NS, locked=False)
        self._locked = functions.whole(self._table, self._end, 0, locked=True)

    def place(self, index: int, array: np.ndarray) -> None:
        """Let the calls find a buffer in another array, of the same shape and type and aligned as they need it."""
        self._memory[index] = array
        self._tensors["data"][index] = array.ctypes.data

    def run(self) -> None:
        """Make the calls.

        Raises
        ------
        DeviceError
            If one fails.
        """
        pace = self._pace
        if pace.calls_left:
            begin = time.perf_counter()
            self._finish(self._free())
            pace.learn(time.perf_counter() - begin)
            return
        at = self._locked() if pace.short else self._free()
        if at != self._end:
            self._finish(at)

    def run_timed(self) -> tuple[float, ...]:
        """Make the calls: when each of them began, and when the last one ended, in seconds of one clock.

        Raises
        ------
        DeviceError
            If one fails.
        """
        times = np.zeros(self._end + 1, np.int64)
        self._finish(0, times.ctypes.data)
        return tuple(float(each) * 1e-9 for each in times)

    def _finish(self, at: int, times: int | None = None) -> None:
        """Make the calls from one on; a number below 0 says which has failed."""
        run = self._functions.runner(locked=False)
        while 0 <= at < self._end:
            at = run(self._table, at, self._end, _UNINTERRUPTED_NS, times)
        if at < 0:
            name = self._plan.kernels[self._plan.launches[-1 - at].kernel].name
            raise DeviceError(f"function {name} of {self._plan.name} failed: {_raised()}")


class _Object(ctypes.Structure):  # TVMFFIObject
    _fields_ = (("references", ctypes.c_uint64), ("type", ctypes.c_int64), ("deleter", ctypes.c_void_p))


class _Bytes(ctypes.Structure):  # TVMFFIByteArray
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Error(ctypes.Structure):  # an error of TVM's, as far as its message
    _fields_ = (("object", _Object), ("kind", _Bytes), ("message", _Bytes))


def _raised() -> str:
    """What the function of TVM's that has just failed in this thread said; it is forgotten then."""
    handle = ctypes.c_void_p()
    tvm_ffi.LIB.TVMFFIErrorMoveFromRaised(ctypes.byref(handle))
    if not handle:
        return "it did not say why"
    message = _Error.from_address(handle.value).message
    text = ctypes.string_at(message.data, message.size).decode(errors="replace")
    tvm_ffi.LIB.TVMFFIObjectDecRef(handle)
    return text
