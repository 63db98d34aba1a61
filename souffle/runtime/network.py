"""A compiled network as a callable object: on a GPU, or its emitted CUDA text on the CPU."""

from __future__ import annotations

import re
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from souffle.certificate import Certificate
from souffle.codegen.plan import Plan
from souffle.emulator import LaunchReport
from souffle.errors import OptionError
from souffle.runtime import artifact
from souffle.runtime.bound import BoundNetwork, buffers_of
from souffle.runtime.cpu_runner import CpuRunner
from souffle.runtime.cuda import Cuda
from souffle.runtime.cuda_runner import CudaRunner
from souffle.runtime.device_array import first_of, read_count
from souffle.runtime.explain import explain, launch_counts, shared_bytes, spilled_bytes, stack_bytes
from souffle.runtime.shared_constants import SharedConstants
from souffle.runtime.signature import Destination, Signature, TensorSpec
from souffle.runtime.stage_table import StageTable, stages_of_plan

__all__ = ["KernelInfo", "Network", "check_device", "signature_of"]

_ORDERS = ("fixed", "shuffled")


@dataclass(frozen=True)
class KernelInfo:
    """One kernel, for people and for the ablation table.

    Attributes
    ----------
    name : str
    text : str
        The CUDA text of its module.
    grid, block : tuple of int
        Of a launch. Until a device was opened, the grid is the largest that has work; a cooperative launch takes no
        more blocks than the device holds at once.
    registers : int or None
        Per thread; None where no CUDA compiler was run.
    shared_bytes : int
        Of a block, static and dynamic.
    spill_bytes : int or None
        Stores and loads of spilled registers.
    stack_bytes : int or None
        Local memory of a thread: spilled registers, and arrays that are indexed at run time.
    grid_syncs : int
    stages : tuple of str
    tes : tuple of str
        The TEs that all its launches compute.
    launches : int
        How often one run of the network launches it.
    """

    name: str
    text: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int | None
    shared_bytes: int
    spill_bytes: int | None
    stack_bytes: int | None
    grid_syncs: int
    stages: tuple[str, ...]
    tes: tuple[str, ...]
    launches: int


def signature_of(plan: Plan) -> Signature:
    """The inputs and outputs of a plan, under the model's own names."""
    inputs, outputs = (
        tuple(
            TensorSpec(b.label, b.shape, b.element_type, tuple(axis for axis, _ in b.counts))
            for b in plan.buffers
            if b.kind == kind
        )
        for kind in ("input", "output")
    )
    return Signature(plan.name, inputs, outputs, plan.counts)


def check_device(device: str) -> int:
    """The number of the GPU that a device names, 0 where it names none.

    Raises
    ------
    OptionError
        If it is no device.
    """
    match = re.fullmatch(r"cpu|(?:cuda|auto)(?::(\d+))?", device)
    if match is None:
        raise OptionError(f'device {device!r} is not one of "cuda", "cuda:N", "cpu" and "auto"')
    return int(match[1] or 0)


class Network:
    """A compiled network.

    ``net({"input": x})``, ``net(x, y)`` or ``net(x, mask=y)`` runs it and gives a dict of outputs under the model's
    names: NumPy arrays for NumPy arrays. On a GPU, tensors with ``__dlpack__`` that lie on it are used in place, and
    where any input is one, the outputs are objects that ``torch.from_dlpack`` and its like take without a copy. An
    output whose extent depends on data (:attr:`TensorSpec.counted`) is as long as the run made it; where it stays on
    the GPU, the call waits until the device has counted.

    Nothing is opened before the first call, so that a network can be built, looked at and saved without a GPU.

    One network may be called from any number of threads at the same time, and each call gives what it would give alone.
    Each call in flight has a workspace of its own, and on a GPU a stream; these are kept for later calls, as many as
    calls were ever in flight at once, until the network is let go of. Constants are there once (on the CPU with
    ``checked=True``, in each workspace). Outputs are new for each call, or lie in the arrays of ``out=``, which no
    other call may have meanwhile; what :meth:`bind` gives has one call at a time. An input must not be written to
    before the call has returned or, where outputs stay on the GPU, before they are there. A call that an exception ends
    gives up its workspace and leaves the network as it was. :attr:`counts` are those of the call that ended last.

    A copy of a network, or one from a pickle, shares nothing with it but the plan; what :meth:`capture` gives shares
    all.

    Parameters
    ----------
    plan
        What was compiled.
    device
        ``"cuda"`` or ``"cuda:N"`` for a GPU, which ``"auto"`` means too; ``"cpu"`` for the emitted text on the CPU.
    graph
        On a GPU, replay one CUDA graph instead of launching each kernel; inputs and outputs are then copied there.
        Where not given, as the network was compiled for.
    poison
        On a GPU, set outputs and workspace to NaN before each call. The CPU device always does.
    blocks
        On the CPU, the largest grid.
    order, seed
        On the CPU, the order of threads between barriers: ``"fixed"``, or ``"shuffled"`` by a seed.
    cache_dir
        On the CPU, the folder of compiled texts.
    checked
        On the CPU, look at every access to global and shared memory: out of bounds, reads of what nothing has written,
        races of blocks. What is wrong is raised as a :class:`~souffle.emulator.CheckError`; accesses are
        counted (:attr:`counts`).
    driver
        The CUDA driver's functions, for tests and rehearsals; those of cuda-bindings where not given.
    shared
        Where the constants of other networks are, too, so that those that they have in common are on the device once.

    Raises
    ------
    OptionError
        If an argument is not valid.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        device: str = "auto",
        graph: bool | None = None,
        poison: bool = False,
        blocks: int = 4,
        order: str = "fixed",
        seed: int = 0,
        cache_dir: str | Path | None = None,
        checked: bool = False,
        driver: Any = None,
        shared: SharedConstants | None = None,
    ) -> None:
        ordinal = check_device(device)
        if order not in _ORDERS:
            raise OptionError(f"order {order!r} is not one of {', '.join(map(repr, _ORDERS))}")
        if blocks < 1:
            raise OptionError(f"blocks is {blocks}; a grid has at least one block")
        if graph and device == "cpu":
            raise OptionError('graph=True is for a GPU; device="cpu" has no CUDA graphs')
        if checked and device != "cpu":
            raise OptionError(f'checked=True is for device="cpu", not {device!r}; a GPU has compute-sanitizer')
        graph = (plan.options.graph and device != "cpu") if graph is None else graph
        self._plan = plan
        self._on_cpu = device == "cpu"
        self._ordinal = ordinal
        self._options = {"graph": graph, "poison": poison, "blocks": blocks, "order": order, "seed": seed}
        self._options |= {"cache_dir": cache_dir, "checked": checked, "driver": driver}
        self._signature = signature_of(plan)
        self._shared = shared
        self._opening = threading.Lock()
        self._runner: CpuRunner | CudaRunner | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Network, device=self.device, **self._options), (self._plan,)

    def __repr__(self) -> str:
        plan = self._plan
        return (
            f"Network({plan.name!r}, {plan.options.level}, {plan.options.arch}, device={self.device!r}, "
            f"{len(plan.launches)} launches)"
        )

    @property
    def plan(self) -> Plan:
        """What was compiled, as data."""
        return self._plan

    @property
    def certificate(self) -> Certificate | None:
        """What the compiler proved of the kernels; ``print`` it for a table with each verdict and counterexample.

        Of a network from a file, what was recorded when it was compiled; ``souffle verify FILE`` proves it again. None
        where nothing was proven: compiled with ``verify="off"``, or saved before there were certificates.
        """
        return self._plan.certificate

    @property
    def device(self) -> str:
        """``"cpu"``, or ``"cuda:N"``."""
        return "cpu" if self._on_cpu else f"cuda:{self._ordinal}"

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
        """All kernels, in the order of their first launch."""
        plan = self._plan
        counts = launch_counts(plan)
        tes: list[dict[str, None]] = [{} for _ in plan.kernels]
        order: dict[int, None] = {}
        for launch in plan.launches:
            order.setdefault(launch.kernel)
            tes[launch.kernel].update(dict.fromkeys(launch.tes))
        infos = []
        for index in [*order, *(index for index in range(len(plan.kernels)) if index not in order)]:
            kernel = plan.kernels[index]
            resources = kernel.resources
            registers = resources.registers if resources else None
            if isinstance(self._runner, CudaRunner):
                registers = self._runner.registers[index]
            infos.append(
                KernelInfo(
                    name=kernel.name,
                    text=plan.modules[kernel.module].text,
                    grid=(self._runner.grids[index] if self._runner else max(1, kernel.tiles), 1, 1),
                    block=(kernel.threads, 1, 1),
                    registers=registers,
                    shared_bytes=shared_bytes(kernel),
                    spill_bytes=spilled_bytes(kernel),
                    stack_bytes=stack_bytes(kernel),
                    grid_syncs=kernel.grid_syncs,
                    stages=kernel.stages,
                    tes=tuple(tes[index]) or kernel.tes,
                    launches=counts[index],
                )
            )
        return tuple(infos)

    @property
    def stages(self) -> StageTable:
        """The stages that the kernels call, as the plan has them; ``print`` it for a table."""
        return stages_of_plan(self._plan)

    @property
    def counts(self) -> tuple[LaunchReport, ...]:
        """What each launch of the last run did, in order: bytes of each buffer, shared bytes, barriers, atomics.

        Raises
        ------
        OptionError
            If the network has not run on the CPU with ``checked=True``.
        """
        reports = self._runner.reports if isinstance(self._runner, CpuRunner) else ()
        if not self._options["checked"] or not reports:
            raise OptionError('counts are those of the last run; run the network with device="cpu", checked=True first')
        return reports

    def explain(self) -> str:
        """What was compiled and every decision with its reason, grouped by the compiler's stages."""
        return explain(self._plan)

    def save(self, path: str | Path, *, constants: str = "stored") -> None:
        """Write a ``.souffle`` file (:func:`souffle.runtime.artifact.save`)."""
        artifact.save(self._plan, path, constants=constants)

    def on(self, device: str, **options: Any) -> Network:
        """The same network on another device or with other options."""
        kept = {**self._options, "graph": None, "checked": self._options["checked"] and device == "cpu"}
        return Network(self._plan, device=device, **{**kept, **options})

    def sharing(self, shared: SharedConstants) -> Network:
        """The same network, whose constants are where those of other networks are, too."""
        return Network(self._plan, device=self.device, **self._options, shared=shared)

    def open(self) -> None:
        """Load the code and upload the constants now instead of at the first call.

        Raises
        ------
        NoGpuError
            If no usable GPU is there; the message says what is missing.
        CompilerNotFoundError
            If the network holds no machine code, or no compiler for the CPU device is found.
        """
        if self._runner is None:
            with self._opening:
                if self._runner is None:
                    self._runner = self._opened()

    def _opened(self) -> CpuRunner | CudaRunner:
        options = self._options
        if not self._on_cpu:
            cuda = Cuda(self._ordinal, options["driver"])
            return CudaRunner(self._plan, cuda, poison=options["poison"], shared=self._shared)
        cache = options["cache_dir"]
        return CpuRunner(
            self._plan,
            blocks=options["blocks"],
            order=options["order"],
            seed=options["seed"],
            cache_dir=Path(cache) if cache is not None else None,
            checked=options["checked"],
            shared=self._shared,
        )

    def __call__(self, /, *args: Any, out: Any = None, **named: Any) -> dict[str, Any]:
        """Run once.

        Parameters
        ----------
        args, named
            One dict of inputs by name; or inputs by position, and by keyword where names are identifiers.
        out : mapping, sequence or array, optional
            Where outputs are wanted: contiguous arrays by name, of which any may be missing, or one for each output in
            order, of which any may be None. They may overlap inputs, and not each other. On a GPU also tensors with
            ``__dlpack__`` that lie there; such a call returns when they are whole. If the call fails, what they hold is
            not defined.

        Returns
        -------
        dict
            The outputs by name: the objects of `out`, and new ones for the rest.

        Raises
        ------
        InputError
            If an input or an array of `out` has an unknown name, or another shape, dtype or device than it must;
            nothing is cast.
        NoGpuError, CompilerNotFoundError
            As :meth:`open`.
        KernelTimeoutError
            If a wait in a kernel takes longer than the network's ``watchdog_ms``. Where outputs stay on the GPU, nobody
            waits for them here: their ``numpy()`` says so, or the next call.
        DeviceError
            If a kernel fails, or another library captures a CUDA graph on the stream of an input.
        """
        values = self._signature.arrange(args, named)
        if self._on_cpu:
            values = self._signature.host_arrays(values)
        wanted = self._signature.destinations(out, gpu=not self._on_cpu)
        self.open()
        return self._signature.results(self._run(values, wanted), read_count, first_of)

    def _run(self, values: Sequence[Any], wanted: Sequence[Destination | None]) -> Sequence[Any]:
        """Run the opened network with arranged inputs."""
        if isinstance(self._runner, CudaRunner):
            return self._runner.run(self._signature, values, wanted, graph=self._options["graph"])
        return [
            array.view(spec.dtype) if destination is None and str(array.dtype) != spec.dtype else array
            for array, destination, spec in zip(
                self._runner.run(values, wanted), wanted, self._signature.produced, strict=True
            )
        ]

    def bind(self, inputs: Any = None, outputs: Any = None) -> BoundNetwork:
        """Settle the buffers of calls, whose checks are made now: ``bound = net.bind(); bound()``.

        Parameters
        ----------
        inputs : mapping or sequence, optional
            Contiguous arrays by name, or one for each input in order. Those that are missing are made, as zeros.
        outputs : mapping, sequence or array, optional
            As `out` of a call. Those that are missing are made.

        Returns
        -------
        BoundNetwork
            Its :attr:`~souffle.runtime.BoundNetwork.inputs` are to be filled before each of its calls. It has one call
            at a time; threads bind buffers of their own. Tensors on a GPU are looked at by each call, which has to wait
            for whoever writes them.

        Raises
        ------
        InputError
            As a call, if an input is not contiguous, and where data decides how long an output is.
        NoGpuError, CompilerNotFoundError
            As :meth:`open`.
        """
        buffers = buffers_of(self._signature, inputs, outputs, gpu=not self._on_cpu)
        self.open()
        return BoundNetwork(buffers, partial(self._run, buffers.values, buffers.destinations))

    def capture(self) -> Network:
        """The same network replaying one CUDA graph, which is captured now."""
        captured = self.on(self.device, graph=True)
        self.open()
        # Both share one runner, so that the constants are on the device once.
        captured._runner = self._runner
        captured._runner.capture()
        return captured

    def time(
        self,
        *args: Any,
        repeats: int = 100,
        warmup: int = 10,
        mode: str = "launch",
        flush: bool = False,
        batch: int = 1,
    ) -> dict[str, Any]:
        """Latency on the GPU by CUDA events, copies of inputs and outputs left out.

        Parameters
        ----------
        args
            Inputs, as in a call.
        repeats, warmup
            Runs that are measured, and runs before them that are not.
        mode
            ``"launch"`` for one launch per kernel, ``"graph"`` for one CUDA graph.
        flush
            Overwrite the second-level cache before each run.
        batch
            Runs in a row between one pair of events, whose time is divided by their number: what the host does for one
            is hidden behind the one before.

        Returns
        -------
        dict
            ``median_us``, ``min_us``, ``p90_us``, ``mode``, ``repeats``, ``flush``, ``batch``.

        Raises
        ------
        OptionError
            If an argument is not valid or the network is on the CPU, whose fibers say nothing about a GPU's time.
        """
        if mode not in ("launch", "graph"):
            raise OptionError(f'mode {mode!r} is not one of "launch" and "graph"')
        if repeats < 1 or warmup < 0:
            raise OptionError(f"repeats is {repeats} and warmup {warmup}; they must be at least 1 and 0")
        if batch < 1 or (flush and batch > 1):
            raise OptionError(
                f"batch is {batch}; it must be at least 1, and 1 where flush overwrites the cache each time"
            )
        if self._on_cpu:
            raise OptionError('time() needs device="cuda": the CPU device says nothing about the time on a GPU')
        values = self._signature.arrange(args)
        self.open()
        samples = sorted(
            self._runner.samples(
                self._signature, values, repeats=repeats, warmup=warmup, mode=mode, flush=flush, batch=batch
            )
        )
        return {
            "median_us": statistics.median(samples),
            "min_us": samples[0],
            "p90_us": samples[min(len(samples) - 1, int(0.9 * len(samples)))],
            "mode": mode,
            "repeats": repeats,
            "flush": flush,
            "batch": batch,
        }
