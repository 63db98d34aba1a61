"""A network compiled for ``target="cpu"``: LLVM code of the transformed program, called function by function."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from souffle.codegen.plan import Buffer, Plan
from souffle.errors import ArtifactError
from souffle.runtime import artifact
from souffle.runtime.explain import explain
from souffle.runtime.network import KernelInfo, outputs_of, signature_of
from souffle.runtime.shared_constants import SharedConstants
from souffle.runtime.signature import Signature, TensorSpec
from souffle.runtime.stage_table import StageTable, stages_of_plan
from souffle.schedule.cpu import SharedCores, host_target, machine_of

__all__ = ["HostNetwork"]

_ALIGNMENT = 64
"""Bytes; what LLVM's code relies on of every tensor, and TVM gives its own."""
_WORTH_LENDING = 1 << 16
"""Bytes of an input from which on lending it is worth the look at its address."""


def _empty(buffer: Buffer) -> tuple[tvm.runtime.Tensor, np.ndarray]:
    """A new tensor, and an array of the same memory (through bytes: DLPack knows fewer types than NumPy)."""
    tensor = tvm.runtime.empty(buffer.shape, buffer.dtype)
    if not buffer.nbytes:
        return tensor, np.empty(buffer.shape, buffer.dtype)
    array = np.from_dlpack(tensor._create_view((buffer.nbytes,), "uint8"))
    return tensor, array.view(buffer.dtype).reshape(buffer.shape)


def _tensor_of(array: np.ndarray, shape: tuple[int, ...]) -> tvm.runtime.Tensor:
    # ascontiguousarray makes a scalar one-dimensional
    return tvm.runtime.tensor(np.ascontiguousarray(array).reshape(shape))


class _Workspace:
    """What one call writes: where its inputs are put, what lies between, and its outputs.

    Buffers that share an offset, a shape and a type are one tensor. TVM's tensors are whole allocations, so overlapping
    buffers of different shapes are kept apart.
    """

    def __init__(self, plan: Plan, functions: Sequence[Any], constants: dict[int, tvm.runtime.Tensor]) -> None:
        tensors, shared = dict(constants), {}
        self.inputs: list[tuple[tvm.runtime.Tensor, np.ndarray, list[tuple[list[Any], int]]]] = []
        self.outputs: list[tuple[str, np.ndarray]] = []
        arrays = {}
        for index, buffer in enumerate(plan.buffers):
            if buffer.kind == "workspace":
                key = (buffer.offset, buffer.shape, buffer.dtype)
                if key not in shared:
                    shared[key] = tvm.runtime.empty(buffer.shape, buffer.dtype)
                tensors[index] = shared[key]
            elif buffer.kind != "constant":
                tensors[index], arrays[index] = _empty(buffer)
        self.calls = [(functions[c.kernel], [tensors[i] for i in c.buffers]) for c in plan.launches]
        for index, buffer in enumerate(plan.buffers):
            if buffer.kind == "input":
                readers = [
                    (parameters, slot)
                    for (_, parameters), launch in zip(self.calls, plan.launches, strict=True)
                    for slot, read in enumerate(launch.buffers)
                    if read == index
                ]
                self.inputs.append((tensors[index], arrays[index], readers))
            elif buffer.kind == "output":
                self.outputs.append((buffer.label, arrays[index].view(buffer.element_type)))

    def run(self, given: Sequence[np.ndarray], times: list[float] | None = None) -> dict[str, np.ndarray]:
        """Run all functions: checked inputs in, copies of the outputs out; into `times` when each began and ended."""
        lent = []
        for (tensor, place, readers), array in zip(self.inputs, given, strict=True):
            if array.nbytes >= _WORTH_LENDING and array.flags.writeable and array.ctypes.data % _ALIGNMENT == 0:
                lent.append((tensor, readers))
                of_bytes = tvm_ffi.from_dlpack(array.reshape(-1).view(np.uint8))
                borrowed = of_bytes._create_view(tensor.shape, tensor.dtype)
                for parameters, slot in readers:
                    parameters[slot] = borrowed
            else:
                np.copyto(place, array)
        if times is None:
            for function, parameters in self.calls:
                function(*parameters)
        else:
            for function, parameters in self.calls:
                times.append(time.perf_counter())
                function(*parameters)
            times.append(time.perf_counter())
        for tensor, readers in lent:
            for parameters, slot in readers:
                parameters[slot] = tensor
        return {label: array.copy() for label, array in self.outputs}


class _Loaded:
    """The machine code and the constants, and the workspaces that wait for a call."""

    def __init__(self, plan: Plan, shared: SharedConstants) -> None:
        self._plan = plan
        with tempfile.TemporaryDirectory(prefix="souffle-host-") as folder:
            library = Path(folder) / "network.so"
            library.write_bytes(plan.modules[0].cubin)
            try:
                module = tvm.runtime.load_module(str(library))
            except (RuntimeError, OSError) as error:
                raise ArtifactError(
                    f"the machine code of {plan.name} was made for {plan.options.arch} and cannot be loaded here; "
                    f"compile the model on this machine: {error}"
                ) from error
        self._functions = [module.get_function(kernel.name, query_imports=True) for kernel in plan.kernels]
        self._constants = {
            index: shared.placed("host", array, buffer.shape, partial(_tensor_of, array, buffer.shape))
            for index, buffer in enumerate(plan.buffers)
            if buffer.kind == "constant"
            for array in (plan.constants[buffer.name],)
        }
        self._cores = SharedCores(machine_of(host_target()).cores)
        self._idle: list[_Workspace] = []

    def run(self, given: Sequence[np.ndarray], times: list[float] | None = None) -> dict[str, np.ndarray]:
        """Run once, in a workspace that no other call has."""
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = _Workspace(self._plan, self._functions, self._constants)
        with self._cores:
            outputs = workspace.run(given, times)
        # Not reached where the call was stopped: its workspace is given up, whatever it holds.
        self._idle.append(workspace)
        return outputs


class HostNetwork:
    """A compiled network that runs on this machine's processor.

    Called and saved as :class:`souffle.runtime.Network`. The machine code is loaded by the first call.

    One network may be called from any number of threads at the same time, and each call gives what it would give alone.
    Calls run in parallel, on the cores that they divide among them. Each has a workspace of its own; these are kept for
    later calls, as many as calls were ever in flight at once, until the network is let go of. Constants are there once.
    Outputs are new arrays. An input must not be written to during the call: one that is large and aligned to 64 bytes
    is read where it is. A call that an exception ends leaves the network as it was.

    A copy of a network, or one from a pickle, shares nothing with it but the plan.

    Parameters
    ----------
    plan : Plan
        From :func:`souffle.codegen.llvm.assemble_host`.
    shared : SharedConstants, optional
        Where the constants of other networks are, too.
    """

    def __init__(self, plan: Plan, *, shared: SharedConstants | None = None) -> None:
        self._plan = plan
        self._shared = shared or SharedConstants()
        self._signature = signature_of(plan)
        self._opening = threading.Lock()
        self._loaded: _Loaded | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return HostNetwork, (self._plan,)

    def __repr__(self) -> str:
        return f"HostNetwork({self._plan.name!r}, {self._plan.options.level}, {self._plan.options.arch})"

    @property
    def plan(self) -> Plan:
        """What was compiled, as data."""
        return self._plan

    @property
    def certificate(self) -> None:
        """None: what is proven is CUDA kernels (:attr:`souffle.runtime.Network.certificate`), and this is LLVM code."""
        return None

    @property
    def device(self) -> str:
        """``"host"``: LLVM code, not CUDA text."""
        return "host"

    @property
    def signature(self) -> Signature:
        """The inputs."""
        return self._signature

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Names, shapes and dtypes of the outputs."""
        return outputs_of(self._plan)

    @property
    def kernels(self) -> tuple[KernelInfo, ...]:
        """The functions, in order of their first call."""
        counts = [0] * len(self._plan.kernels)
        for launch in self._plan.launches:
            counts[launch.kernel] += 1
        return tuple(
            KernelInfo(k.name, "", (1, 1, 1), (1, 1, 1), None, 0, None, None, 0, k.stages, k.tes, counts[i])
            for i, k in enumerate(self._plan.kernels)
        )

    @property
    def stages(self) -> StageTable:
        """The stages, each a function of the library; ``print`` it for a table."""
        return stages_of_plan(self._plan)

    def explain(self) -> str:
        """What was compiled and every decision with its reason."""
        return explain(self._plan)

    def save(self, path: str | Path, *, constants: str = "stored") -> None:
        """Write a ``.souffle`` file (:func:`souffle.runtime.artifact.save`)."""
        artifact.save(self._plan, path, constants=constants)

    def sharing(self, shared: SharedConstants) -> HostNetwork:
        """The same network, whose constants are where those of other networks are, too."""
        return HostNetwork(self._plan, shared=shared)

    def open(self) -> None:
        """Load the machine code and place the constants now instead of at the first call."""
        if self._loaded is None:
            with self._opening:
                if self._loaded is None:
                    self._loaded = _Loaded(self._plan, self._shared)

    def __call__(self, *args: Any) -> dict[str, np.ndarray]:
        """Run once: one dict of inputs by name, or inputs by position.

        Raises
        ------
        InputError
            If an input has an unknown name, or another shape or dtype than it must; nothing is cast.
        """
        arrays = self._signature.host_arrays(args)
        self.open()
        return self._loaded.run(arrays)

    def launch_times(self, *args: Any) -> tuple[float, ...]:
        """Run once, as a call does: when each launch of the plan began, and when the last one ended, in seconds.

        Of one clock, which counts from anywhere (:func:`time.perf_counter`).

        Raises
        ------
        InputError
            As a call.
        """
        arrays = self._signature.host_arrays(args)
        self.open()
        times: list[float] = []
        self._loaded.run(arrays, times)
        return tuple(times)
