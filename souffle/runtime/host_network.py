"""A network compiled for ``target="cpu"``: LLVM code of the transformed program, called function by function."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from souffle.codegen.plan import Buffer, Plan
from souffle.errors import ArtifactError
from souffle.options import checked_threads
from souffle.runtime import artifact
from souffle.runtime.bound import BoundNetwork, Buffers, aligned_bytes, buffers_of
from souffle.runtime.explain import explain
from souffle.runtime.host_threads import ThreadsOfCalls, share_pool
from souffle.runtime.network import KernelInfo, signature_of
from souffle.runtime.shared_constants import SharedConstants
from souffle.runtime.signature import Destination, Signature, TensorSpec
from souffle.runtime.stage_table import StageTable, stages_of_plan

__all__ = ["HostNetwork"]

_ALIGNMENT = 64
"""Bytes; what LLVM's code relies on of every tensor, and TVM gives its own."""
_TIMED_CALLS = 5
_SHORT_SECONDS = 20e-6
"""A thread that waits for Python's lock asks for it after 5 ms."""
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


def _view(memory: np.ndarray, shape: Sequence[int], dtype: str) -> tvm.runtime.Tensor:
    """A tensor in the bytes of an array."""
    if not memory.size:
        return tvm.runtime.empty(shape, dtype)
    # Not a view at an offset, which LLVM's code would not see.
    return tvm_ffi.from_dlpack(memory)._create_view(shape, dtype)


class _Place:
    """The tensor of an input or output in a workspace, and the calls that take it.

    Attributes
    ----------
    array : array
        Of the same memory.
    """

    def __init__(self, index: int, buffer: Buffer) -> None:
        self._index = index
        self.tensor, self.array = _empty(buffer)
        self._users: list[tuple[list[Any], int]] = []

    def find_users(self, calls: Sequence[tuple[Any, list[Any]]], plan: Plan) -> None:
        """Look for the calls that take the tensor."""
        self._users = [
            (parameters, slot)
            for (_, parameters), launch in zip(calls, plan.launches, strict=True)
            for slot, used in enumerate(launch.buffers)
            if used == self._index
        ]

    def lend(self, array: np.ndarray) -> None:
        """Let the calls work on a caller's array in the tensor's place."""
        self._give(_view(array.reshape(-1).view(np.uint8), self.tensor.shape, self.tensor.dtype))

    def take_back(self) -> None:
        """Let the calls work on the tensor again."""
        self._give(self.tensor)

    def _give(self, tensor: tvm.runtime.Tensor) -> None:
        for parameters, slot in self._users:
            parameters[slot] = tensor


def _lendable(array: np.ndarray) -> bool:
    """Whether the functions can work on an array where it is; one that is read-only has no DLPack form."""
    return array.nbytes > 0 and array.flags.writeable and array.ctypes.data % _ALIGNMENT == 0


def _apart(array: np.ndarray, others: Sequence[np.ndarray]) -> bool:
    """Whether an output may be written while others are read: LLVM's code takes tensors not to overlap."""
    return not any(np.may_share_memory(array, other) for other in others)


class _Locking:
    """Which functions run without letting go of Python's lock: those that are over before another thread has it.

    A thread that lets go of it has to wait for its turn again; of networks of some microseconds, threads that call at
    the same time do little else. The first calls are timed, and the median says what is short.

    Parameters
    ----------
    functions : sequence of Function
        Of the network's launches, in order; a function may be there several times.
    """

    def __init__(self, functions: Sequence[Any]) -> None:
        self.calls_left = _TIMED_CALLS
        self._functions = functions
        self._seconds: list[list[float]] = [[] for _ in functions]
        self._lock = threading.Lock()

    def learn(self, times: Sequence[float]) -> None:
        """Take in when each function of a call began, and when the last one ended."""
        with self._lock:
            if not self.calls_left:
                return
            for known, (begin, end) in zip(self._seconds, pairwise(times), strict=True):
                known.append(end - begin)
            self.calls_left -= 1
            if self.calls_left:
                return
            longest: dict[int, float] = {}
            for function, known in zip(self._functions, self._seconds, strict=True):
                longest[id(function)] = max(longest.get(id(function), 0.0), float(np.median(known)))
            for function in self._functions:
                function.release_gil = longest[id(function)] > _SHORT_SECONDS


class _Workspace:
    """What one call writes: where its inputs are put, what lies between in one allocation, and its outputs."""

    def __init__(
        self, plan: Plan, functions: Sequence[Any], constants: dict[int, tvm.runtime.Tensor], locking: _Locking
    ) -> None:
        self._locking = locking
        tensors = dict(constants)
        between = aligned_bytes(plan.workspace_bytes)
        self.inputs: list[_Place] = []
        self.outputs: list[_Place] = []
        self._types = [buffer.element_type for buffer in plan.buffers if buffer.kind == "output"]
        for index, buffer in enumerate(plan.buffers):
            if buffer.kind == "workspace":
                tensors[index] = _view(between[buffer.offset :][: buffer.nbytes], buffer.shape, buffer.dtype)
            elif buffer.kind != "constant":
                place = _Place(index, buffer)
                tensors[index] = place.tensor
                (self.inputs if buffer.kind == "input" else self.outputs).append(place)
        self._calls = [(functions[c.kernel], [tensors[i] for i in c.buffers]) for c in plan.launches]
        for place in (*self.inputs, *self.outputs):
            place.find_users(self._calls, plan)

    def run(
        self, given: Sequence[np.ndarray], wanted: Sequence[Destination | None], times: list[float] | None = None
    ) -> list[Any]:
        """Run all functions: checked inputs in; outputs in their destinations, new arrays where they have none.

        Into `times` comes when each function began, and when the last one ended.
        """
        lent = []
        for place, array in zip(self.inputs, given, strict=True):
            if array.nbytes >= _WORTH_LENDING and _lendable(array):
                place.lend(array)
                lent.append(place)
            else:
                np.copyto(place.array, array)
        for place, destination in zip(self.outputs, wanted, strict=True):
            array = None if destination is None else destination.array
            if array is not None and array.nbytes >= _WORTH_LENDING and _lendable(array) and _apart(array, given):
                place.lend(array)
                lent.append(place)
        if times is None:
            self._run()
        else:
            self._run_timed(times)
        results = []
        for place, destination, dtype in zip(self.outputs, wanted, self._types, strict=True):
            if destination is None:
                results.append(place.array.view(dtype).copy())
                continue
            if place not in lent:
                np.copyto(destination.array, place.array)
            results.append(destination.given)
        for place in lent:
            place.take_back()
        return results

    def bound(self, given: Sequence[np.ndarray], wanted: Sequence[Destination]) -> Callable[[], None]:
        """A call of these buffers, for which this workspace is kept."""
        before, after = [], []
        for place, array in zip(self.inputs, given, strict=True):
            if _lendable(array):
                place.lend(array)
            else:
                before.append((place.array, array))
        for place, destination in zip(self.outputs, wanted, strict=True):
            if _lendable(destination.array) and _apart(destination.array, given):
                place.lend(destination.array)
            else:
                after.append((destination.array, place.array))

        def run() -> None:
            for target, source in before:
                np.copyto(target, source)
            self._run()
            for target, source in after:
                np.copyto(target, source)

        return run

    def _run(self) -> None:
        if self._locking.calls_left:
            times: list[float] = []
            self._run_timed(times)
            self._locking.learn(times)
            return
        for function, parameters in self._calls:
            function(*parameters)

    def _run_timed(self, times: list[float]) -> None:
        for function, parameters in self._calls:
            times.append(time.perf_counter())
            function(*parameters)
        times.append(time.perf_counter())


class _Loaded:
    """The machine code and the constants, and the workspaces that wait for a call."""

    def __init__(self, plan: Plan, shared: SharedConstants, threads: int | None) -> None:
        self._plan = plan
        with tempfile.TemporaryDirectory(prefix="souffle-host-") as folder:
            library = Path(folder) / "network.so"
            library.write_bytes(plan.modules[0].cubin)
            try:
                module = tvm.runtime.load_module(str(library))
                pooled = share_pool(library)
            except (RuntimeError, OSError) as error:
                raise ArtifactError(
                    f"the machine code of {plan.name} was made for {plan.options.arch} and cannot be loaded here; "
                    f"compile the model on this machine: {error}"
                ) from error
        self._functions = [module.get_function(kernel.name, query_imports=True) for kernel in plan.kernels]
        self._locking = _Locking([self._functions[launch.kernel] for launch in plan.launches])
        self._constants = {
            index: shared.placed("host", array, buffer.shape, partial(_tensor_of, array, buffer.shape))
            for index, buffer in enumerate(plan.buffers)
            if buffer.kind == "constant"
            for array in (plan.constants[buffer.name],)
        }
        self._cores = ThreadsOfCalls(threads, pooled=pooled)
        self._idle: list[_Workspace] = []

    def run(
        self, given: Sequence[np.ndarray], wanted: Sequence[Destination | None], times: list[float] | None = None
    ) -> list[Any]:
        """Run once, in a workspace that no other call has."""
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = _Workspace(self._plan, self._functions, self._constants, self._locking)
        with self._cores:
            outputs = workspace.run(given, wanted, times)
        # Not reached where the call was stopped: its workspace is given up, whatever it holds.
        self._idle.append(workspace)
        return outputs

    def bound(self, buffers: Buffers) -> Callable[[], None]:
        """A call of these buffers, in a workspace of its own."""
        workspace = _Workspace(self._plan, self._functions, self._constants, self._locking)
        call, cores = workspace.bound(buffers.values, buffers.destinations), self._cores

        def run() -> None:
            with cores:
                call()

        return run


class HostNetwork:
    """A compiled network that runs on this machine's processor.

    Called and saved as :class:`souffle.runtime.Network`. The machine code is loaded by the first call.

    One network may be called from any number of threads at the same time, and each call gives what it would give alone.
    Calls run in parallel, on the cores that they divide among them. Each has a workspace of its own; these are kept for
    later calls, as many as calls were ever in flight at once, until the network is let go of. Constants are there once.
    Outputs are new arrays, or those of ``out=``, which no other call may have meanwhile. An input must not be written
    to during the call: one that is large and aligned to 64 bytes is read where it is. A call that an exception ends
    leaves the network as it was.

    A copy of a network, or one from a pickle, shares nothing with it but the plan.

    Parameters
    ----------
    plan : Plan
        From :func:`souffle.codegen.llvm.assemble_host`.
    shared : SharedConstants, optional
        Where the constants of other networks are, too.
    threads : int, optional
        With how many threads a call computes at most, in the place of what it was compiled with.
    """

    def __init__(self, plan: Plan, *, shared: SharedConstants | None = None, threads: int | None = None) -> None:
        self._plan = plan
        self._threads = plan.options.threads if threads is None else checked_threads(threads)
        self._shared = shared or SharedConstants()
        self._signature = signature_of(plan)
        self._opening = threading.Lock()
        self._loaded: _Loaded | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(HostNetwork, threads=self._threads), (self._plan,)

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
    def threads(self) -> int:
        """With how many threads a call computes that is alone: no more than the cores that this process may use."""
        return ThreadsOfCalls(self._threads, pooled=True).most

    @property
    def signature(self) -> Signature:
        """The inputs and outputs."""
        return self._signature

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Names, shapes and dtypes of the inputs."""
        return self._signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Names, shapes and dtypes of the outputs."""
        return self._signature.outputs

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
        return HostNetwork(self._plan, shared=shared, threads=self._threads)

    def open(self) -> None:
        """Load the machine code and place the constants now instead of at the first call."""
        if self._loaded is None:
            with self._opening:
                if self._loaded is None:
                    self._loaded = _Loaded(self._plan, self._shared, self._threads)

    def __call__(self, /, *args: Any, out: Any = None, **named: Any) -> dict[str, Any]:
        """Run once (:meth:`souffle.runtime.Network.__call__`).

        Raises
        ------
        InputError
            If an input or an array of `out` has an unknown name, or another shape or dtype than it must; nothing is
            cast.
        """
        arrays = self._signature.host_arrays(args, named)
        wanted = self._signature.destinations(out)
        self.open()
        return self._signature.results(self._loaded.run(arrays, wanted))

    def bind(self, inputs: Any = None, outputs: Any = None) -> BoundNetwork:
        """A call with settled buffers (:meth:`souffle.runtime.Network.bind`).

        Arrays that are aligned to 64 bytes are read and written where they are, and others copied by each call.
        """
        buffers = buffers_of(self._signature, inputs, outputs)
        self.open()
        return BoundNetwork(buffers, self._loaded.bound(buffers))

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
        self._loaded.run(arrays, self._signature.destinations(None), times)
        return tuple(times)
