"""A thin, typed layer over the CUDA driver (through ``cuda.bindings.driver``): every failure is a ``DeviceError``.

The driver's functions come in as an object, so that tests and rehearsals give a recording one in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from souffle.errors import DeviceError, NoGpuError

try:
    from cuda.bindings import driver as _bindings
except ImportError:
    _bindings = None

__all__ = ["Cuda", "LaunchTooLargeError", "PreparedLaunch"]

_ON_CPU = 'device="cpu" runs the same emitted text on the CPU'


class LaunchTooLargeError(DeviceError):
    """The device has no room for all blocks of a cooperative launch at once, and has started none of them."""


@dataclass(frozen=True, eq=False)
class PreparedLaunch:
    """A launch with room for its parameters, built once: only addresses change from call to call.

    Attributes
    ----------
    name : str
        The kernel's name, for messages.
    function : object
    config : object
        The driver's launch configuration.
    addresses : ctypes array of 64-bit integers
        One device address for each buffer.
    integers : ctypes array of 32-bit integers
    parameters : int
        Address of the array of pointers to the parameters.
    keep : tuple
        What those pointers point into.
    """

    name: str
    function: Any
    config: Any
    addresses: Any
    integers: Any
    parameters: int
    keep: tuple[Any, ...]


class Cuda:
    """One GPU: its primary context, memory, modules, streams, events and graphs.

    Everything that works with the device wants :meth:`current` around it. What gives something back has that itself,
    since the garbage collector may call it on any thread.

    Parameters
    ----------
    ordinal
        The device's number.
    driver
        The driver's functions; ``cuda.bindings.driver`` where not given.

    Raises
    ------
    NoGpuError
        If cuda-bindings, the driver's library or the device is missing.
    """

    def __init__(self, ordinal: int = 0, driver: Any = None) -> None:
        self.api = driver if driver is not None else _bindings
        if self.api is None:
            raise NoGpuError(
                "the Python package cuda-bindings is not installed (pip install 'souffle-dl[cuda]'), so no GPU can be "
                f"used; {_ON_CPU}"
            )
        self.ordinal = ordinal
        try:
            status = self.api.cuInit(0)[0]
        except RuntimeError as error:
            raise NoGpuError(f"NVIDIA's driver library libcuda was not found ({error}); {_ON_CPU}") from error
        if int(status) != 0:
            raise NoGpuError(f"NVIDIA's driver did not start ({status.name}); {_ON_CPU}")
        count = self._call("cuDeviceGetCount")
        if not 0 <= ordinal < count:
            raise NoGpuError(f"there is no GPU {ordinal}: the driver sees {count}; {_ON_CPU}")
        self._device = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        attribute = self.api.CUdevice_attribute
        self.name: str = self._call("cuDeviceGetName", 256, self._device).split(b"\0")[0].decode()
        self.driver_version: int = self._call("cuDriverGetVersion")
        self.capability = (
            self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        self.multiprocessors = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.max_shared_bytes = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)

    def _attribute(self, which: Any) -> int:
        return int(self._call("cuDeviceGetAttribute", which, self._device))

    def attribute(self, name: str) -> int:
        """What the driver says of the device; `name` is CUDA's without ``CU_DEVICE_ATTRIBUTE_``."""
        return self._attribute(getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"))

    def _call(self, function: str, *args: Any, about: str = "") -> Any:
        """Call a driver function; its single result, a tuple of several, or None. Raises DeviceError where it fails."""
        status, *results = getattr(self.api, function)(*args)
        if int(status) != 0:
            self._fail(status, function, about)
        if len(results) == 1:
            return results[0]
        return tuple(results) if results else None

    def _fail(self, status: Any, function: str, about: str) -> None:
        found, text = self.api.cuGetErrorString(status)
        meaning = f" ({text.decode()})" if int(found) == 0 and text else ""
        too_large = int(status) == int(self.api.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)
        raise (LaunchTooLargeError if too_large else DeviceError)(
            f"{status.name}{meaning} from {function}{' for ' + about if about else ''} on {self.label}"
        )

    def _release(self, function: str, handle: Any) -> None:
        """Give something back, from whatever thread lets go of it.

        The status is not looked at: once a kernel has faulted every call fails, and the fault itself was reported.
        """
        with contextlib.suppress(DeviceError), self.current():
            getattr(self.api, function)(handle)

    @property
    def label(self) -> str:
        """The device's name and number, for messages."""
        return f"GPU {self.ordinal} {getattr(self, 'name', '')}".rstrip()

    @property
    def arch(self) -> str:
        """The device's architecture, such as ``"sm_90"``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    def require_arch(self, arch: str) -> None:
        """Raise NoGpuError unless machine code for ``arch`` (such as ``"sm_90"`` or ``"sm_90a"``) runs on this device.

        Machine code runs on its own architecture and later ones of the same major number; with the suffix ``a``, on its
        own alone.
        """
        match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
        if match is not None:
            wanted = (int(match[1]), int(match[2]))
            same = wanted[0] == self.capability[0] and wanted[1] <= self.capability[1]
            if same and (match[3] != "a" or wanted == self.capability):
                return
        raise NoGpuError(
            f"the network was compiled for {arch} and {self.label} is {self.arch}; compile it with "
            f'arch="{self.arch}", or {_ON_CPU}'
        )

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's primary context this thread's inside of the block, and then the one that was before.

        Other libraries keep their device in the same place: PyTorch on ``cuda:1`` would go on on ``cuda:0`` in silence.

        The thread's capture mode is the relaxed one meanwhile. Another library may be recording a CUDA graph, on this
        thread or, in the global mode, on any; outside of the relaxed mode, memory that is taken or given back and
        events that are asked would make its graph invalid. They cannot belong to it: our work is on streams of our own.
        """
        # Set and set back, and not pushed and popped: a signal's exception that comes between a push and the try that
        # undoes it would leave the context there.
        before = self._call("cuCtxGetCurrent")
        other = int(before) != int(self._context)
        try:
            if other:
                self._call("cuCtxSetCurrent", self._context)
            relaxed = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            mode = self._call("cuThreadExchangeStreamCaptureMode", relaxed)
            try:
                yield
            finally:
                self.api.cuThreadExchangeStreamCaptureMode(mode)
        finally:
            if other:
                self.api.cuCtxSetCurrent(before)

    def make_current(self) -> None:
        """Make the device's primary context this thread's for good: for a program that uses no other library."""
        self._call("cuCtxSetCurrent", self._context)

    # modules and kernels

    def load_module(self, cubin: bytes) -> Any:
        """Load machine code; give it back with :meth:`unload_module`."""
        return self._call("cuModuleLoadData", cubin, about=f"{len(cubin)} bytes of machine code")

    def unload_module(self, module: Any) -> None:
        """Unload a module; its kernels cannot be launched any more."""
        self._release("cuModuleUnload", module)

    def function(self, module: Any, name: str, dynamic_shared_bytes: int = 0) -> Any:
        """A kernel of a module by name, allowed the dynamic shared memory that it asks for."""
        function = self._call("cuModuleGetFunction", module, name.encode(), about=f"kernel {name}")
        attribute = self.api.CUfunction_attribute
        static = self.static_shared_bytes(function)
        if static + dynamic_shared_bytes > self.max_shared_bytes:
            raise DeviceError(
                f"kernel {name} needs {static + dynamic_shared_bytes} bytes of shared memory a block and {self.label} "
                f"has {self.max_shared_bytes}; compile for this device"
            )
        if dynamic_shared_bytes + static > 48 * 1024:
            which = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, which, dynamic_shared_bytes, about=f"kernel {name}")
        return function

    def prefer_l1(self, function: Any) -> None:
        """Ask for as little shared memory beside a kernel's L1 cache as it can run with."""
        which = self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        self._call("cuFuncSetAttribute", function, which, 0)

    def static_shared_bytes(self, function: Any) -> int:
        """Shared memory of each block of a kernel that its text declares with a size."""
        which = self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        return int(self._call("cuFuncGetAttribute", which, function))

    def registers(self, function: Any) -> int:
        """Registers of each thread of a kernel, as loaded."""
        return int(self._call("cuFuncGetAttribute", self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function))

    def resident_blocks(self, function: Any, threads: int, dynamic_shared_bytes: int) -> int:
        """How many blocks of a kernel the whole device holds at once."""
        each = self._call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, dynamic_shared_bytes)
        return int(each) * self.multiprocessors

    def prepare(
        self,
        name: str,
        function: Any,
        *,
        grid: int,
        threads: int,
        pointers: Sequence[int],
        integers: Sequence[int] = (),
        dynamic_shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> PreparedLaunch:
        """Build a launch of one-dimensional grid and block: parameters are pointers, then 32-bit integers."""
        addresses = (ctypes.c_uint64 * max(1, len(pointers)))(*pointers)
        scalars = (ctypes.c_int32 * max(1, len(integers)))(*integers)
        at = [ctypes.addressof(addresses) + 8 * index for index in range(len(pointers))]
        at += [ctypes.addressof(scalars) + 4 * index for index in range(len(integers))]
        table = (ctypes.c_void_p * max(1, len(at)))(*at)
        config = self.api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = dynamic_shared_bytes
        if cooperative:
            attribute = self.api.CUlaunchAttribute()
            attribute.id = self.api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        else:
            config.numAttrs = 0
        return PreparedLaunch(name, function, config, addresses, scalars, ctypes.addressof(table), (table,))

    def launch(self, prepared: PreparedLaunch, stream: Any) -> None:
        """Queue a prepared launch on a stream.

        Raises
        ------
        LaunchTooLargeError
            If it is cooperative and the device has no room for its grid; nothing was queued.
        DeviceError
            If it, or work before it, failed.
        """
        prepared.config.hStream = stream
        status = self.api.cuLaunchKernelEx(prepared.config, prepared.function, prepared.parameters, 0)[0]
        if int(status) != 0:
            # The driver reports a fault of earlier work at whatever call comes next.
            self._fail(status, "cuLaunchKernelEx", f"kernel {prepared.name} or work queued before it")

    # memory

    def alloc(self, nbytes: int, about: str = "") -> int:
        """Address of new device memory, aligned to 256 bytes; at least one byte is taken."""
        return int(self._call("cuMemAlloc", max(1, nbytes), about=about or f"{nbytes} bytes"))

    def free(self, address: int) -> None:
        """Give device memory back; waits for the work that uses it."""
        self._release("cuMemFree", address)

    def map_host_memory(self, nbytes: int, about: str) -> tuple[int, int, np.ndarray]:
        """Memory of the host, zero at first, that kernels of this device can write.

        Returns
        -------
        host : int
            For :meth:`unmap_host_memory`.
        address : int
            For kernels.
        words : array of uint32
            Its content, as long as it is not given back.
        """
        host = int(self._call("cuMemHostAlloc", nbytes, self.api.CU_MEMHOSTALLOC_DEVICEMAP, about=about))
        words = np.frombuffer((ctypes.c_uint32 * (nbytes // 4)).from_address(host), np.uint32)
        words[...] = 0
        return host, int(self._call("cuMemHostGetDevicePointer", host, 0, about=about)), words

    def unmap_host_memory(self, host: int) -> None:
        """Give memory of :meth:`map_host_memory` back."""
        self._release("cuMemFreeHost", host)

    def to_device(self, address: int, source: np.ndarray, stream: Any) -> None:
        """Queue a copy of a C-contiguous host array to the device; keep the array until the stream has done it."""
        if source.nbytes:
            self._call("cuMemcpyHtoDAsync", address, source.ctypes.data, source.nbytes, stream)

    def to_host(self, target: np.ndarray, address: int, stream: Any) -> None:
        """Queue a copy of device memory into a C-contiguous host array."""
        if target.nbytes:
            self._call("cuMemcpyDtoHAsync", target.ctypes.data, address, target.nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Queue a copy from device memory to device memory."""
        if nbytes:
            self._call("cuMemcpyDtoDAsync", target, source, nbytes, stream)

    def fill(self, address: int, byte: int, nbytes: int, stream: Any) -> None:
        """Queue the setting of every byte of device memory to one value."""
        if nbytes:
            self._call("cuMemsetD8Async", address, byte, nbytes, stream)

    # streams and events

    def stream(self) -> Any:
        """A new stream that does not wait for the default stream."""
        return self._call("cuStreamCreate", self.api.CUstream_flags.CU_STREAM_NON_BLOCKING.value)

    def destroy_stream(self, stream: Any) -> None:
        """Give a stream back once its work is done."""
        self._release("cuStreamDestroy", stream)

    def settle(self, stream: Any) -> None:
        """Wait for a stream before giving back what it uses, whether its work failed or not."""
        self._release("cuStreamSynchronize", stream)

    def synchronize(self, stream: Any, about: str = "") -> None:
        """Wait for a stream; faults of the kernels on it surface here."""
        self._call("cuStreamSynchronize", stream, about=about)

    def event(self, timing: bool = False) -> Any:
        """A new event, with or without a time stamp."""
        flags = self.api.CUevent_flags
        return self._call("cuEventCreate", (flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING).value)

    def destroy_event(self, event: Any) -> None:
        """Give an event back."""
        self._release("cuEventDestroy", event)

    def record(self, event: Any, stream: Any) -> None:
        """Mark the present end of a stream's work."""
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work on a stream wait for an event."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def wait_on_host(self, event: Any) -> None:
        """Wait for the work before an event."""
        self._call("cuEventSynchronize", event)

    def done(self, event: Any) -> bool:
        """Whether the work before an event has ended."""
        status = self.api.cuEventQuery(event)[0]
        if int(status) == int(self.api.CUresult.CUDA_ERROR_NOT_READY):
            return False
        if int(status) != 0:
            self._fail(status, "cuEventQuery", "")
        return True

    def microseconds(self, start: Any, end: Any) -> float:
        """Time between two timed events that have ended."""
        return float(self._call("cuEventElapsedTime", start, end)) * 1e3

    # graphs

    def capturing(self, stream: Any) -> bool:
        """Whether work on a stream is recorded into a graph, or would break one that is recorded on another stream."""
        status, *held = self.api.cuStreamIsCapturing(stream)
        if int(status) == int(self.api.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT):
            return True  # the default stream, beside a capture on a stream that waits for it
        if int(status) != 0:
            self._fail(status, "cuStreamIsCapturing", "")
        return int(held[0]) != int(self.api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def begin_capture(self, stream: Any) -> None:
        """From here on, work queued on the stream is recorded and not run.

        The mode is the relaxed one, for other threads, and what the garbage collector calls, may take and free memory
        meanwhile.
        """
        self._call("cuStreamBeginCapture", stream, self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)

    def end_capture(self, stream: Any) -> Any:
        """The executable graph of what was recorded; give it back with :meth:`destroy_graph`."""
        graph = self._call("cuStreamEndCapture", stream)
        try:
            return self._call("cuGraphInstantiate", graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)

    def abandon_capture(self, stream: Any) -> None:
        """End a capture of which nothing is wanted."""
        status, graph = self.api.cuStreamEndCapture(stream)
        if int(status) == 0:
            self.api.cuGraphDestroy(graph)

    def launch_graph(self, graph: Any, stream: Any) -> None:
        """Queue an executable graph on a stream."""
        self._call("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: Any) -> None:
        """Give an executable graph back."""
        self._release("cuGraphExecDestroy", graph)
