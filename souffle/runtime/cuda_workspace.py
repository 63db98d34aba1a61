"""What one call in flight has of a GPU: a stream, memory that kernels write, and launches with its addresses."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from souffle.codegen.plan import Launch, Plan
from souffle.errors import CompilerNotFoundError, DeviceError, InputError
from souffle.runtime.cuda import Cuda, LaunchTooLargeError, PreparedLaunch
from souffle.runtime.cuda_constants import constants_on
from souffle.runtime.cuda_grids import Grids, resident_blocks
from souffle.runtime.cuda_tensors import VECTOR_BYTES, input_on_gpu, on_gpu, outputs_on_gpu
from souffle.runtime.device_array import DeviceArray, Handle, MemoryBlock, Pool
from souffle.runtime.dlpack import DlpackTensor
from souffle.runtime.record_page import RecordPage
from souffle.runtime.shared_constants import SharedConstants
from souffle.runtime.signature import Destination, Signature

__all__ = ["FLUSH_BYTES", "CudaCode", "CudaWorkspace"]

_MAX_GRID = 2**31 - 1
FLUSH_BYTES = 256 << 20
"""More than the second-level cache of any GPU that is supported."""


def _unload(cuda: Cuda, modules: Sequence[Any]) -> None:
    for module in modules:
        cuda.unload_module(module)


class CudaCode:
    """A plan's kernels and constants on one GPU, which all its calls share.

    Parameters
    ----------
    plan : Plan
    cuda : Cuda
    shared : SharedConstants, optional
        Where the constants of other networks are, too.

    Attributes
    ----------
    plan : Plan
    cuda : Cuda
    constants : dict of int to int
        Addresses by the buffer's number.
    functions : tuple
        The loaded kernels.
    grids : Grids
    registers : tuple of int
        Of each kernel.

    Raises
    ------
    CompilerNotFoundError
        If the plan holds no machine code.
    NoGpuError
        If the device is of another architecture.
    DeviceError
        If the driver refuses a module, a kernel or an allocation.
    """

    def __init__(self, plan: Plan, cuda: Cuda, shared: SharedConstants | None = None) -> None:
        if any(not module.cubin for module in plan.modules):
            raise CompilerNotFoundError(
                f"{plan.name} was compiled without nvcc and holds no machine code; compile it again where nvcc "
                '(CUDA 13) is on PATH, or run it with device="cpu"'
            )
        cuda.require_arch(plan.options.arch)
        self.plan, self.cuda = plan, cuda
        modules: list[Any] = []
        weakref.finalize(self, _unload, cuda, modules).atexit = False
        modules.extend(cuda.load_module(module.cubin) for module in plan.modules)
        self._memory = constants_on(cuda, plan, shared or SharedConstants())
        self.constants = {index: memory.handle for index, memory in self._memory.items()}
        functions, grids = [], []
        for kernel in plan.kernels:
            function = cuda.function(modules[kernel.module], kernel.name, kernel.dynamic_shared_bytes)
            limit = _MAX_GRID
            if kernel.cooperative:
                limit = resident_blocks(cuda, kernel, function)
            functions.append(function)
            grids.append(max(1, min(kernel.tiles, limit, kernel.most_blocks or limit)))
        self.functions = tuple(functions)
        self.grids = Grids([kernel.name for kernel in plan.kernels], grids)
        self.registers = tuple(cuda.registers(function) for function in functions)

    def prepare(self, number: int, pointers: Sequence[int]) -> PreparedLaunch:
        """A launch of the kernel of a number, with the addresses of its parameters."""
        kernel, grid = self.plan.kernels[number], self.grids[number]
        return self.cuda.prepare(
            kernel.name,
            self.functions[number],
            grid=grid,
            threads=kernel.threads,
            pointers=pointers,
            integers=[grid],
            dynamic_shared_bytes=kernel.dynamic_shared_bytes,
            cooperative=kernel.cooperative,
        )


def _release(
    cuda: Cuda,
    stream: Handle,
    addresses: Sequence[int],
    graphs: Sequence[Any],
    pages: list[RecordPage],
    pool: Pool,
) -> None:
    cuda.settle(stream.handle)
    pages.clear()
    for graph in graphs:
        cuda.destroy_graph(graph)
    for address in addresses:
        cuda.free(address)
    pool.close()


class CudaWorkspace:
    """One call's stream, workspace, counters of grid barriers, landing places of host inputs, and prepared launches.

    All are taken once, and used by one call after the other. The calls of a workspace are in order on its stream; those
    of several run at the same time, as far as the device has room. Kernels that wait for their grid are launched
    cooperatively, so that the device starts such a grid only when the whole of it has room.

    Parameters
    ----------
    code : CudaCode
    poison : bool
        Set outputs and workspace to all ones (NaN) before each call, so that an element that nobody wrote is seen.

    Attributes
    ----------
    stream : Handle
    pool : Pool
        Where outputs lie.
    release : callable
        Waits for the stream and gives everything back, once; also called when nothing refers to the workspace.
    """

    def __init__(self, code: CudaCode, poison: bool) -> None:
        cuda, plan = code.cuda, code.plan
        self._code, self._cuda, self._plan, self._poison = code, cuda, plan, poison
        self.stream = Handle(cuda.stream(), cuda.destroy_stream)
        self.pool = Pool(cuda, self.stream.handle)
        # Of calls whose outputs stay on the device: when they end, what they read, and what may tell that they failed.
        self._pending: list[tuple[Handle, tuple[Any, ...], list[RecordPage]]] = []
        self._landing: dict[int, int] = {}
        self._fixed_outputs: dict[int, int] = {}
        self._flush_area = 0
        self._owned: list[int] = []
        self._graphs: list[Any] = []
        self._graph_grids: dict[int, int] = {}
        self._pages: list[RecordPage] = []
        held = (self.stream, self._owned, self._graphs, self._pages, self.pool)
        self.release = weakref.finalize(self, _release, cuda, *held)
        self.release.atexit = False
        self._inputs = tuple(index for index, buffer in enumerate(plan.buffers) if buffer.kind == "input")
        self._outputs = tuple(index for index, buffer in enumerate(plan.buffers) if buffer.kind == "output")
        self._scratch = self._own(plan.workspace_bytes, f"the workspace of {plan.workspace_bytes} bytes")
        addresses = [self._address(index) for index in range(len(plan.buffers))]
        self._launches = tuple(
            code.prepare(launch.kernel, [addresses[index] for index in launch.buffers]) for launch in plan.launches
        )

    def _own(self, nbytes: int, about: str) -> int:
        address = self._cuda.alloc(nbytes, about)
        self._owned.append(address)
        return address

    def _address(self, index: int) -> int:
        """Where a buffer lies; 0 for inputs and outputs, which each call places."""
        buffer = self._plan.buffers[index]
        if buffer.kind == "constant":
            return self._code.constants[index]
        if buffer.kind == "workspace":
            return self._scratch + buffer.offset
        if buffer.kind == "record":
            self._pages.append(RecordPage(self._plan, self._cuda, buffer.nbytes))
            return self._pages[-1].address
        if buffer.kind != "state":
            return 0
        # Of this workspace alone: launches of another one, or of another network, would count in it too.
        address = self._own(buffer.nbytes, f"{buffer.name} of {buffer.nbytes} bytes")
        self._cuda.fill(address, 0, buffer.nbytes, self.stream.handle)
        return address

    def _launch(self, prepared: PreparedLaunch, launch: Launch, placed: dict[int, int], stream: Any) -> bool:
        """Queue a launch; False where the device has refused its grid, which then is smaller the next time."""
        for slot, index in enumerate(launch.buffers):
            if index in placed:
                prepared.addresses[slot] = placed[index]
        grid = self._code.grids[launch.kernel]
        if prepared.integers[0] != grid:
            prepared.config.gridDimX = prepared.integers[0] = grid
        try:
            self._cuda.launch(prepared, stream)
        except LaunchTooLargeError as error:
            self._code.grids.halve({launch.kernel: grid}, error)
            return False
        return True

    def _queue(self, placed: dict[int, int], stream: Any) -> None:
        """Queue every launch with inputs and outputs at the given addresses."""
        for prepared, launch in zip(self._launches, self._plan.launches, strict=True):
            while not self._launch(prepared, launch, placed, stream):
                pass
        self._code.grids.report()

    # inputs

    def _landing_place(self, index: int) -> int:
        """Where an input goes that is not used in place; the same for every call."""
        if index not in self._landing:
            buffer = self._plan.buffers[index]
            self._landing[index] = self._own(buffer.nbytes, f"input {buffer.label}")
        return self._landing[index]

    def _place_input(self, signature: Signature, position: int, value: Any, fixed: bool) -> tuple[int, Any, bool]:
        """Address of one checked input, what must stay alive until it was read, and whether it was on this device."""
        index, spec, stream = self._inputs[position], signature.inputs[position], self.stream.handle
        if not on_gpu(value):
            array = signature.host_array(spec, value)
            address = self._landing_place(index)
            self._cuda.to_device(address, array, stream)
            return address, array, False
        tensor = input_on_gpu(signature, spec, value, self._cuda, stream)
        if not fixed and tensor.address % VECTOR_BYTES == 0:
            return tensor.address, tensor.owner, True
        address = self._landing_place(index)
        self._cuda.copy(address, tensor.address, self._plan.buffers[index].nbytes, stream)
        return address, tensor.owner, True

    def _place_inputs(
        self, signature: Signature, values: Sequence[Any], fixed: bool = False
    ) -> tuple[dict[int, int], list[Any], bool]:
        placed, held, device = {}, [], False
        try:
            for position, value in enumerate(values):
                placed[self._inputs[position]], owner, was = self._place_input(signature, position, value, fixed)
                held.append(owner)
                device = device or was
        except InputError:
            # Inputs that were right may be read still, and after this call they are the caller's to write to.
            self._cuda.settle(self.stream.handle)
            raise
        if device:
            self._check_capture()
        return placed, held, device

    def _check_capture(self) -> None:
        """Refuse a call whose tensors' owner has made this stream a part of its capture by making it wait for them."""
        if self._cuda.capturing(self.stream.handle):
            raise DeviceError(
                f"{self._plan.name} was called while another library captures a CUDA graph on its inputs' stream; the "
                "call cannot be a part of that graph, since later calls use its memory again; call it outside of the "
                "capture, or replay a graph of its own, which Network.capture() gives"
            )

    # outputs

    def _place_outputs(
        self, signature: Signature, wanted: Sequence[Destination | None], placed: dict[int, int], graph: bool
    ) -> tuple[dict[int, DlpackTensor], dict[int, MemoryBlock]]:
        """The caller's tensors by the output's buffer, and memory of the pool for outputs that cannot be written there.

        What is written while inputs are read does not overlap them; a graph writes to places of its own.
        """
        try:
            found = outputs_on_gpu(signature, wanted, self._cuda, self.stream.handle)
        except InputError:
            self._cuda.settle(self.stream.handle)
            raise
        if found:
            self._check_capture()
        tensors = {self._outputs[number]: tensor for number, tensor in found.items()}
        blocks = {}
        for index in self._outputs:
            tensor = tensors.get(index)
            direct = tensor is not None and not graph and tensor.address % VECTOR_BYTES == 0
            if not direct or any(tensor.overlaps(placed[i], self._plan.buffers[i].nbytes) for i in self._inputs):
                blocks[index] = self.pool.take(self._plan.buffers[index].nbytes)
        return tensors, blocks

    # calls

    def run(
        self, signature: Signature, values: Sequence[Any], wanted: Sequence[Destination | None], graph: bool
    ) -> tuple[Any, ...]:
        """Run once; see :meth:`souffle.runtime.cuda_runner.CudaRunner.run`."""
        cuda, stream, buffers = self._cuda, self.stream.handle, self._plan.buffers
        while self._pending and cuda.done(self._pending[0][0].handle):
            # A call that has ended, and kept its inputs. Its outputs are whole, whatever becomes of later ones.
            _, _, pages = self._pending.pop(0)
            if not any(page.written for page in pages):
                pages.clear()
        if graph:
            self.capture()
        placed, held, device = self._place_inputs(signature, values, fixed=graph)
        tensors, blocks = self._place_outputs(signature, wanted, placed, graph)
        addresses = {i: blocks[i].address if i in blocks else tensors[i].address for i in self._outputs}
        written = self._fixed_outputs if graph else addresses
        if self._poison:
            cuda.fill(self._scratch, 0xFF, self._plan.workspace_bytes, stream)
            for index in self._outputs:
                cuda.fill(written[index], 0xFF, buffers[index].nbytes, stream)
        if graph:
            self._replay(stream)
            for index in self._outputs:
                cuda.copy(addresses[index], written[index], buffers[index].nbytes, stream)
        else:
            placed.update(written)
            self._queue(placed, stream)
        for index, tensor in tensors.items():
            if tensor.address != addresses[index]:
                cuda.copy(tensor.address, addresses[index], buffers[index].nbytes, stream)
        ready, pages = Handle(cuda.event(), cuda.destroy_event), [*self._pages]
        cuda.record(ready.handle, stream)
        results: list[Any] = []
        for index, destination in zip(self._outputs, wanted, strict=True):
            shape, dtype = buffers[index].shape, buffers[index].element_type
            if destination is not None:
                if destination.array is not None:
                    cuda.to_host(destination.array, addresses[index], stream)
                results.append(destination.given)
            elif device:
                results.append(DeviceArray(cuda, self.stream, ready, blocks[index], shape, dtype, pages))
            else:
                results.append(np.empty(shape, dtype))
                cuda.to_host(results[-1], addresses[index], stream)
        if device and not any(wanted):
            self._pending.append((ready, tuple(held), pages))
        else:
            self._finish()
        return tuple(results)

    def _finish(self) -> None:
        self._cuda.synchronize(self.stream.handle)
        self.check()
        while self._pending:
            self._pending.pop()[2].clear()

    def check(self) -> None:
        """Raise KernelTimeoutError if a wait was over in what has run so far."""
        for page in self._pages:
            page.check()

    def spent(self) -> bool:
        """Whether a wait was over in an earlier call, so that counters and flags are of no use any more.

        Raises
        ------
        KernelTimeoutError
            If nobody was told: the call had left its outputs on the device.
        """
        for page in self._pages:
            if not page.reported:
                page.check()
        return any(page.written for page in self._pages)

    # CUDA graphs

    def capture(self) -> None:
        """Record all launches as one CUDA graph, once."""
        if self._graphs:
            return
        placed = {index: self._landing_place(index) for index in self._inputs}
        for index in self._outputs:
            if index not in self._fixed_outputs:
                buffer = self._plan.buffers[index]
                self._fixed_outputs[index] = self._own(buffer.nbytes, f"output {buffer.label}")
        placed.update(self._fixed_outputs)
        # On a stream of its own: another thread may copy an output meanwhile, which waits on the workspace's stream.
        stream = Handle(self._cuda.stream(), self._cuda.destroy_stream)
        while not self._graphs:
            self._graphs.extend(self._recorded(placed, stream.handle))

    def _recorded(self, placed: dict[int, int], stream: Any) -> tuple[Any, ...]:
        """The executable graph of all launches; nothing where the device has refused a grid, which then is smaller."""
        kernels = self._plan.kernels
        self._graph_grids = {
            launch.kernel: self._code.grids[launch.kernel]
            for launch in self._plan.launches
            if kernels[launch.kernel].cooperative
        }
        self._cuda.begin_capture(stream)
        whole = False
        try:
            whole = all(
                self._launch(prepared, launch, placed, stream)
                for prepared, launch in zip(self._launches, self._plan.launches, strict=True)
            )
        finally:
            if not whole:
                # What a refused launch leaves of a capture is nothing to rely on.
                self._cuda.abandon_capture(stream)
        if not whole:
            return ()
        try:
            return (self._cuda.end_capture(stream),)
        except LaunchTooLargeError as error:
            # Of which kernel it speaks, the driver does not say.
            self._code.grids.halve(self._graph_grids, error)
            return ()

    def _replay(self, stream: Any) -> None:
        """Queue the graph, captured again with smaller grids where the device refuses those that it has."""
        while True:
            try:
                self._cuda.launch_graph(self._graphs[0], stream)
            except LaunchTooLargeError as error:
                self._code.grids.halve(self._graph_grids, error)
                self._cuda.destroy_graph(self._graphs.pop())
                self.capture()
            else:
                self._code.grids.report()
                return

    # timing

    def samples(
        self,
        signature: Signature,
        values: Sequence[Any],
        *,
        repeats: int,
        warmup: int,
        mode: str,
        flush: bool,
        batch: int,
    ) -> list[float]:
        """Device time of each of ``repeats`` runs in µs, between two events, input and output copies left out.

        ``flush`` overwrites the second-level cache before each run, outside of the measured time. A run is the mean of
        ``batch`` in a row.
        """
        cuda, stream = self._cuda, self.stream.handle
        self.capture()
        placed, held, _ = self._place_inputs(signature, values, fixed=True)
        placed.update(self._fixed_outputs)
        if flush and not self._flush_area:
            self._flush_area = self._own(FLUSH_BYTES, "clearing the cache")
        pairs = []
        for index in range(warmup + repeats):
            if flush:
                cuda.fill(self._flush_area, index % 256, FLUSH_BYTES, stream)
            pair = None
            if index >= warmup:
                pair = tuple(Handle(cuda.event(timing=True), cuda.destroy_event) for _ in range(2))
                cuda.record(pair[0].handle, stream)
            for _ in range(batch):
                if mode == "graph":
                    self._replay(stream)
                else:
                    self._queue(placed, stream)
            if pair is not None:
                cuda.record(pair[1].handle, stream)
                pairs.append(pair)
        self._finish()
        held.clear()
        return [cuda.microseconds(start.handle, end.handle) / batch for start, end in pairs]
