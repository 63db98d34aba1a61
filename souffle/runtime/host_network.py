"""A network compiled for ``target="cpu"``: LLVM code of the transformed program, called function by function."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from souffle.aligned import aligned_array, aligned_bytes
from souffle.codegen.plan import Plan
from souffle.errors import ArtifactError
from souffle.options import checked_threads
from souffle.runtime import artifact
from souffle.runtime.bound import BoundNetwork, Buffers, buffers_of
from souffle.runtime.explain import explain
from souffle.runtime.host_calls import CallSequence, LoadedFunctions, Pace
from souffle.runtime.host_threads import ThreadsOfCalls, share_pool
from souffle.runtime.network import KernelInfo, signature_of
from souffle.runtime.shared_constants import SharedConstants
from souffle.runtime.signature import Destination, Signature, TensorSpec
from souffle.runtime.stage_table import StageTable, stages_of_plan
from souffle.schedule.cpu import best_processor, missing_instructions

__all__ = ["HostNetwork"]

_ALIGNMENT = 64
"""Bytes; what LLVM's code relies on of every tensor."""
_WORTH_LENDING = 1 << 16
"""Bytes of an input from which on lending it is worth the look at its address."""


def _placed(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A constant where functions can read it: itself, if it is aligned and nobody can write to it."""
    content = np.ascontiguousarray(array).reshape(shape)
    if content.ctypes.data % _ALIGNMENT == 0 and not array.flags.writeable:
        return content
    placed = aligned_array(shape, content.dtype)
    np.copyto(placed, content)
    return placed


def _lendable(array: np.ndarray) -> bool:
    """Whether the functions can work on an array where it is."""
    return array.nbytes > 0 and array.ctypes.data % _ALIGNMENT == 0


def _apart(array: np.ndarray, others: Sequence[np.ndarray]) -> bool:
    """Whether an output may be written while others are read: LLVM's code takes tensors not to overlap."""
    return not any(np.may_share_memory(array, other) for other in others)


class _Tensor(NamedTuple):
    """An input or output: its buffer's number, the workspace's own memory, and whether another's is worth a look."""

    index: int
    own: np.ndarray
    large: bool


class _Workspace:
    """What one call writes: where its inputs are put, what lies between in one allocation, and its outputs."""

    def __init__(self, plan: Plan, functions: LoadedFunctions, constants: dict[int, np.ndarray], pace: Pace) -> None:
        arrays = dict(constants)
        between = aligned_bytes(plan.workspace_bytes)
        self._inputs: list[_Tensor] = []
        self._outputs: list[_Tensor] = []
        self._produced: list[np.ndarray] = []  # the outputs as callers see them
        for index, buffer in enumerate(plan.buffers):
            if buffer.kind == "workspace":
                arrays[index] = between[buffer.offset :][: buffer.nbytes]
            elif buffer.kind != "constant":
                own = arrays[index] = aligned_array(buffer.shape, buffer.dtype)
                tensor = _Tensor(index, own, own.nbytes >= _WORTH_LENDING)
                if buffer.kind == "input":
                    self._inputs.append(tensor)
                else:
                    self._outputs.append(tensor)
                    self._produced.append(own.view(buffer.element_type))
        self._calls = CallSequence(plan, functions, arrays, pace)

    def run(
        self, given: Sequence[np.ndarray], wanted: Sequence[Destination | None], run: Callable[[CallSequence], None]
    ) -> list[Any]:
        """Make all calls, by `run`, with checked inputs; outputs are in their destinations, or are new arrays."""
        calls = self._calls
        lent: list[_Tensor] = []
        for tensor, array in zip(self._inputs, given):
            if tensor.large and _lendable(array):
                calls.place(tensor.index, array)
                lent.append(tensor)
            else:
                tensor.own[...] = array
        if not any(wanted):
            run(calls)
            results = [produced.copy() for produced in self._produced]
        else:
            late = self._lend_outputs(given, wanted, lent)
            run(calls)
            for array, own in late:
                array[...] = own
            results = [
                produced.copy() if destination is None else destination.given
                for produced, destination in zip(self._produced, wanted, strict=True)
            ]
        for tensor in lent:
            calls.place(tensor.index, tensor.own)
        return results

    def _lend_outputs(
        self, given: Sequence[np.ndarray], wanted: Sequence[Destination | None], lent: list[_Tensor]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Let calls write to destinations, where they can; the others, with what is to be copied to them afterwards."""
        late = []
        for tensor, destination in zip(self._outputs, wanted, strict=True):
            if destination is None:
                continue
            if tensor.large and _lendable(destination.array) and _apart(destination.array, given):
                self._calls.place(tensor.index, destination.array)
                lent.append(tensor)
            else:
                late.append((destination.array, tensor.own))
        return late

    def bound(self, given: Sequence[np.ndarray], wanted: Sequence[Destination]) -> Callable[[], None]:
        """A call of these buffers, for which this workspace is kept."""
        before, after = [], []
        for tensor, array in zip(self._inputs, given, strict=True):
            if _lendable(array):
                self._calls.place(tensor.index, array)
            else:
                before.append((tensor.own, array))
        for tensor, destination in zip(self._outputs, wanted, strict=True):
            if _lendable(destination.array) and _apart(destination.array, given):
                self._calls.place(tensor.index, destination.array)
            else:
                after.append((destination.array, tensor.own))
        calls = self._calls

        def run() -> None:
            for target, source in before:
                target[...] = source
            calls.run()
            for target, source in after:
                target[...] = source

        return run


def _check_processor(plan: Plan) -> None:
    """Refuse machine code that would end the process where it has an instruction that there is none of."""
    missing = missing_instructions(plan.processor)
    if missing:
        raise ArtifactError(
            f"{plan.name} was compiled for {plan.processor} and may have instructions that this processor lacks "
            f"({', '.join(missing)}); compile the model on this machine, or with processor= for the oldest that it is "
            'to run on, such as "x86-64-v3"'
        )


def _suited(plan: Plan) -> Plan:
    """The plan for the processor that suits, of all those that there are, with the others."""
    if not plan.others:
        return plan
    plans = [replace(plan, others=()), *plan.others]
    chosen = best_processor([each.processor for each in plans])
    return replace(plans[chosen], others=tuple(each for number, each in enumerate(plans) if number != chosen))


class _Loaded:
    """The machine code and the constants, and the workspaces that wait for a call."""

    def __init__(self, plan: Plan, shared: SharedConstants, threads: int | None) -> None:
        self._plan = plan
        _check_processor(plan)
        with tempfile.TemporaryDirectory(prefix="souffle-host-") as folder:
            library = Path(folder) / "network.so"
            library.write_bytes(plan.modules[0].cubin)
            try:
                self._functions = LoadedFunctions(library, [kernel.name for kernel in plan.kernels])
                pooled = share_pool(library)
            except (RuntimeError, OSError, AttributeError) as error:
                raise ArtifactError(
                    f"the machine code of {plan.name} was made for {plan.options.arch} and cannot be loaded here; "
                    f"compile the model on this machine: {error}"
                ) from error
        self._pace = Pace()
        self._constants = {
            index: shared.placed("host", array, buffer.shape, partial(_placed, array, buffer.shape))
            for index, buffer in enumerate(plan.buffers)
            if buffer.kind == "constant"
            for array in (plan.constants[buffer.name],)
        }
        self._cores = ThreadsOfCalls(threads, pooled=pooled)
        self._idle: list[_Workspace] = []

    def run(
        self,
        given: Sequence[np.ndarray],
        wanted: Sequence[Destination | None],
        run: Callable[[CallSequence], None] = CallSequence.run,
    ) -> list[Any]:
        """Run once, in a workspace that no other call has."""
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = _Workspace(self._plan, self._functions, self._constants, self._pace)
        with self._cores:
            outputs = workspace.run(given, wanted, run)
        # Not reached where the call was stopped: its workspace is given up, whatever it holds.
        self._idle.append(workspace)
        return outputs

    def bound(self, buffers: Buffers) -> Callable[[], None]:
        """A call of these buffers, in a workspace of its own."""
        workspace = _Workspace(self._plan, self._functions, self._constants, self._pace)
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
        From :func:`souffle.codegen.llvm.assemble_host`. Where it has others, for other processors, the one that suits
        this machine runs, and all are saved.
    shared : SharedConstants, optional
        Where the constants of other networks are, too.
    threads : int, optional
        With how many threads a call computes at most, in the place of what it was compiled with.
    """

    def __init__(self, plan: Plan, *, shared: SharedConstants | None = None, threads: int | None = None) -> None:
        self._plan = plan = _suited(plan)
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
        self._loaded.run(arrays, self._signature.destinations(None), lambda calls: times.extend(calls.run_timed()))
        return tuple(times)
