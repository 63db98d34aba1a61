"""Runs a plan's machine code on a GPU: memory, launches and their order, CUDA graphs and timing."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from souffle.codegen.plan import Plan
from souffle.errors import CompilerNotFoundError, DeviceError, InputError
from souffle.runtime import dlpack
from souffle.runtime.cuda import Cuda, PreparedLaunch
from souffle.runtime.device_array import DeviceArray, Handle, Pool
from souffle.runtime.signature import Signature

__all__ = ["CudaRunner"]

_MAX_GRID = 2**31 - 1
_VECTOR_BYTES = 16
"""The widest load of one thread; an address that a kernel gets must be a multiple of it."""
_FLUSH_BYTES = 256 << 20
"""More than the second-level cache of any GPU that is supported."""


def _release(
    cuda: Cuda, stream: Handle, addresses: Sequence[int], modules: Sequence[Any], graphs: Sequence[Any], pool: Pool
) -> None:
    cuda.settle(stream.handle)
    for graph in graphs:
        cuda.destroy_graph(graph)
    for address in addresses:
        cuda.free(address)
    for module in modules:
        cuda.unload_module(module)
    pool.close()


class CudaRunner:
    """A plan made ready on one GPU.

    Workspace, constants and the landing places of host inputs are allocated once; outputs are fresh for each call. One
    call runs at a time.

    Parameters
    ----------
    plan
        The compiled network.
    cuda
        The device.
    poison
        Set outputs and workspace to all ones (NaN) before each call, so that an element that nobody wrote is seen.

    Raises
    ------
    CompilerNotFoundError
        If the plan holds no machine code.
    NoGpuError
        If the device is of another architecture.
    DeviceError
        If the driver refuses a module, a kernel or an allocation.
    """

    def __init__(self, plan: Plan, cuda: Cuda, *, poison: bool = False) -> None:
        if any(not module.cubin for module in plan.modules):
            raise CompilerNotFoundError(
                f"{plan.name} was compiled without nvcc and holds no machine code; compile it again where nvcc "
                '(CUDA 13) is on PATH, or run it with device="cpu"'
            )
        cuda.require_arch(plan.arch)
        cuda.make_current()
        self._plan, self._cuda, self._poison = plan, cuda, poison
        self._lock = threading.RLock()
        self._stream = Handle(cuda.stream(), cuda.destroy_stream)
        self._pool = Pool(cuda, self._stream.handle)
        self._pending: list[tuple[Handle, tuple[Any, ...]]] = []
        self._landing: dict[int, int] = {}
        self._fixed_outputs: dict[int, int] = {}
        self._graph: Any = None
        self._flush_area = 0
        self._owned: list[int] = []
        self._modules: list[Any] = []
        self._graphs: list[Any] = []
        weakref.finalize(
            self, _release, cuda, self._stream, self._owned, self._modules, self._graphs, self._pool
        ).atexit = False
        self._modules.extend(cuda.load_module(module.cubin) for module in plan.modules)
        self._inputs = tuple(index for index, buffer in enumerate(plan.buffers) if buffer.kind == "input")
        self._outputs = tuple(index for index, buffer in enumerate(plan.buffers) if buffer.kind == "output")
        self._states: list[tuple[int, int]] = []
        self._addresses = self._place_buffers()
        self.registers: tuple[int, ...] = ()
        self.grids: tuple[int, ...] = ()
        self._launches = self._prepare()

    def _own(self, nbytes: int, about: str) -> int:
        address = self._cuda.alloc(nbytes, about)
        self._owned.append(address)
        return address

    def _place_buffers(self) -> list[int]:
        """Addresses of constants (uploaded), workspace and state; 0 for inputs and outputs, which each call places."""
        plan, stream = self._plan, self._stream.handle
        workspace = self._own(plan.workspace_bytes, f"the workspace of {plan.workspace_bytes} bytes")
        self._workspace = workspace
        addresses, uploaded = [], []
        for buffer in plan.buffers:
            address = 0
            if buffer.kind == "workspace":
                address = workspace + buffer.offset
            elif buffer.kind == "constant":
                address = self._own(buffer.nbytes, f"constant {buffer.name} of {buffer.nbytes} bytes")
                uploaded.append(np.ascontiguousarray(plan.constants[buffer.name]))
                self._cuda.to_device(address, uploaded[-1], stream)
            elif buffer.kind == "state":
                # An allocation of this network's own: launches of another one would count in it too.
                address = self._own(buffer.nbytes, f"{buffer.name} of {buffer.nbytes} bytes")
                self._states.append((address, buffer.nbytes))
            addresses.append(address)
        self._clear_state()
        self._cuda.synchronize(stream, "the constants")
        return addresses

    def _clear_state(self) -> None:
        for address, nbytes in self._states:
            self._cuda.fill(address, 0, nbytes, self._stream.handle)

    def _prepare(self) -> tuple[PreparedLaunch, ...]:
        plan, cuda = self._plan, self._cuda
        functions, grids = [], []
        for kernel in plan.kernels:
            function = cuda.function(self._modules[kernel.module], kernel.name, kernel.dynamic_shared_bytes)
            limit = _MAX_GRID
            if kernel.cooperative:
                limit = cuda.resident_blocks(function, kernel.threads, kernel.dynamic_shared_bytes)
                if limit == 0:
                    raise DeviceError(
                        f"kernel {kernel.name} ({kernel.threads} threads, {cuda.registers(function)} registers, "
                        f"{kernel.dynamic_shared_bytes} bytes of dynamic shared memory) does not fit on a "
                        f"multiprocessor of {cuda.label}; compile for this device"
                    )
            functions.append(function)
            grids.append(max(1, min(kernel.tiles, limit)))
        self.grids = tuple(grids)
        self.registers = tuple(cuda.registers(function) for function in functions)
        return tuple(
            cuda.prepare(
                plan.kernels[launch.kernel].name,
                functions[launch.kernel],
                grid=grids[launch.kernel],
                threads=plan.kernels[launch.kernel].threads,
                pointers=[self._addresses[index] for index in launch.buffers],
                integers=[grids[launch.kernel]],
                dynamic_shared_bytes=plan.kernels[launch.kernel].dynamic_shared_bytes,
                cooperative=plan.kernels[launch.kernel].cooperative,
            )
            for launch in plan.launches
        )

    def _queue(self, placed: dict[int, int]) -> None:
        """Queue every launch with inputs and outputs at the given addresses."""
        for prepared, launch in zip(self._launches, self._plan.launches, strict=True):
            for slot, index in enumerate(launch.buffers):
                if index in placed:
                    prepared.addresses[slot] = placed[index]
            self._cuda.launch(prepared, self._stream.handle)

    # inputs

    def _landing_place(self, index: int) -> int:
        """Where an input goes that is not used in place; the same for every call."""
        if index not in self._landing:
            buffer = self._plan.buffers[index]
            self._landing[index] = self._own(buffer.nbytes, f"input {buffer.label}")
        return self._landing[index]

    def _place_input(self, signature: Signature, position: int, value: Any, fixed: bool) -> tuple[int, Any, bool]:
        """Address of one checked input, what must stay alive until it was read, and whether it was on this device."""
        index, spec, stream = self._inputs[position], signature.inputs[position], self._stream.handle
        on_device = not isinstance(value, (np.ndarray, np.generic)) and hasattr(value, "__dlpack_device__")
        if on_device:
            kind, ordinal = dlpack.device_of(value)
            on_device = kind in (dlpack.CUDA, dlpack.CUDA_MANAGED)
            if on_device and ordinal != self._cuda.ordinal:
                raise InputError(
                    f"input {spec.name!r} of {signature.network} is on GPU {ordinal} and the network is on "
                    f'{self._cuda.label}; move it, or choose device="cuda:{ordinal}"'
                )
        if not on_device:
            array = signature.host_array(spec, value)
            address = self._landing_place(index)
            self._cuda.to_device(address, array, stream)
            return address, array, False
        try:
            tensor = dlpack.read(value, int(stream))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"input {spec.name!r} of {signature.network} cannot be read through DLPack: {error}"
            ) from error
        signature.check(spec, tensor.shape, tensor.dtype)
        if not tensor.contiguous:
            raise InputError(
                f"input {spec.name!r} of {signature.network} is not contiguous on the GPU; call .contiguous() on it"
            )
        if not fixed and tensor.address % _VECTOR_BYTES == 0:
            return tensor.address, tensor.owner, True
        address = self._landing_place(index)
        self._cuda.copy(address, tensor.address, self._plan.buffers[index].nbytes, stream)
        return address, tensor.owner, True

    def _place_inputs(
        self, signature: Signature, values: Sequence[Any], fixed: bool = False
    ) -> tuple[dict[int, int], list[Any], bool]:
        placed, held, device = {}, [], False
        for position, value in enumerate(values):
            placed[self._inputs[position]], owner, was = self._place_input(signature, position, value, fixed)
            held.append(owner)
            device = device or was
        return placed, held, device

    # calls

    def run(self, signature: Signature, values: Sequence[Any], *, graph: bool = False) -> tuple[Any, ...]:
        """Run once.

        Parameters
        ----------
        signature
            What the inputs must be.
        values
            Arranged inputs: NumPy arrays, or objects with ``__dlpack__``, which are used in place on this GPU (a tensor
            whose address is no multiple of 16 is copied, since kernels load vectors).
        graph
            Replay the captured CUDA graph; inputs and outputs are then copied to and from its fixed places.

        Returns
        -------
        tuple
            NumPy arrays; where any input was on the GPU, :class:`DeviceArray` objects, without waiting for the device.
        """
        with self._lock, self._naming_kernels():
            cuda, stream = self._cuda, self._stream.handle
            cuda.make_current()
            self._forget_done()
            if graph:
                self.capture()
            placed, held, device = self._place_inputs(signature, values, fixed=graph)
            blocks = [self._pool.take(self._plan.buffers[index].nbytes) for index in self._outputs]
            if self._poison:
                cuda.fill(self._workspace, 0xFF, self._plan.workspace_bytes, stream)
            if graph:
                for index in self._outputs if self._poison else ():
                    cuda.fill(self._fixed_outputs[index], 0xFF, self._plan.buffers[index].nbytes, stream)
                cuda.launch_graph(self._graph, stream)
                for index, block in zip(self._outputs, blocks, strict=True):
                    cuda.copy(block.address, self._fixed_outputs[index], self._plan.buffers[index].nbytes, stream)
            else:
                for index, block in zip(self._outputs, blocks, strict=True):
                    if self._poison:
                        cuda.fill(block.address, 0xFF, self._plan.buffers[index].nbytes, stream)
                    placed[index] = block.address
                self._queue(placed)
            ready = Handle(cuda.event(), cuda.destroy_event)
            cuda.record(ready.handle, stream)
            outputs = tuple(
                DeviceArray(
                    cuda, self._stream, ready, block, self._plan.buffers[index].shape, self._plan.buffers[index].dtype
                )
                for index, block in zip(self._outputs, blocks, strict=True)
            )
            if device:
                self._pending.append((ready, tuple(held)))
                return outputs
            arrays = [np.empty(output.shape, output.dtype) for output in outputs]
            for array, block in zip(arrays, blocks, strict=True):
                cuda.to_host(array, block.address, stream)
            self._finish()
            return tuple(arrays)

    @contextlib.contextmanager
    def _naming_kernels(self) -> Iterator[None]:
        """Say with every failure which kernels it may come from: the driver reports a fault at any later call."""
        try:
            yield
        except DeviceError as error:
            # A launch that did not end may have left some of its blocks' arrivals at a barrier. Where a fault has taken
            # the context with it, nothing runs in it any more, and the first error is the one to report.
            with contextlib.suppress(DeviceError):
                self._clear_state()
            names = ", ".join(dict.fromkeys(prepared.name for prepared in self._launches))
            raise DeviceError(f"{self._plan.name} (kernels {names}): {error}") from error

    def _forget_done(self) -> None:
        """Let go of the inputs of calls that have ended."""
        while self._pending and self._cuda.done(self._pending[0][0].handle):
            self._pending.pop(0)

    def _finish(self) -> None:
        self._cuda.synchronize(self._stream.handle)
        self._pending.clear()

    # CUDA graphs

    def capture(self) -> None:
        """Record all launches as one CUDA graph, once."""
        with self._lock:
            if self._graph is not None:
                return
            cuda, stream = self._cuda, self._stream.handle
            cuda.make_current()
            placed = {index: self._landing_place(index) for index in self._inputs}
            for index in self._outputs:
                buffer = self._plan.buffers[index]
                self._fixed_outputs[index] = self._own(buffer.nbytes, f"output {buffer.label}")
            placed.update(self._fixed_outputs)
            cuda.begin_capture(stream)
            try:
                self._queue(placed)
            finally:
                graph = cuda.end_capture(stream)
            self._graphs.append(graph)
            self._graph = graph

    # timing

    def samples(
        self, signature: Signature, values: Sequence[Any], *, repeats: int, warmup: int, mode: str, flush: bool
    ) -> list[float]:
        """Device time of each of ``repeats`` runs in µs, between two events, input and output copies left out.

        ``flush`` overwrites the second-level cache before each run, outside of the measured time.
        """
        with self._lock, self._naming_kernels():
            cuda, stream = self._cuda, self._stream.handle
            cuda.make_current()
            self.capture()
            placed, held, _ = self._place_inputs(signature, values, fixed=True)
            placed.update(self._fixed_outputs)
            if flush and not self._flush_area:
                self._flush_area = self._own(_FLUSH_BYTES, "clearing the cache")
            pairs = []
            for index in range(warmup + repeats):
                if flush:
                    cuda.fill(self._flush_area, index % 256, _FLUSH_BYTES, stream)
                pair = None
                if index >= warmup:
                    pair = tuple(Handle(cuda.event(timing=True), cuda.destroy_event) for _ in range(2))
                    cuda.record(pair[0].handle, stream)
                if mode == "graph":
                    cuda.launch_graph(self._graph, stream)
                else:
                    self._queue(placed)
                if pair is not None:
                    cuda.record(pair[1].handle, stream)
                    pairs.append(pair)
            self._finish()
            held.clear()
            return [cuda.microseconds(start.handle, end.handle) for start, end in pairs]
