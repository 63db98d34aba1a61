"""The figures of candidates: built together, then measured on the GPU at hand, or predicted with ptxas' report.

All candidates of a batch are emitted into as many files as there are cores, since a call of nvcc costs seconds whatever
it holds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tvm

from souffle.codegen.cuda import emit_cuda
from souffle.codegen.nvcc import compile_cubin, find_nvcc
from souffle.codegen.plan import Buffer, CudaModule, Kernel, Launch, Plan, Resources
from souffle.cost import CostDevice, cost_device, device_of_arch, product_names
from souffle.decision import Refused
from souffle.errors import CompilerNotFoundError, CudaCompileError, DeviceError, OptionError
from souffle.kernel import KernelShape
from souffle.kernel.kernel_shape import kernel_of_stage
from souffle.options import Options
from souffle.parallel import map_in_threads
from souffle.program import Tensor
from souffle.runtime import Network
from souffle.runtime.cuda import Cuda
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import StageDraft
from souffle.tuning.candidate import Candidate, predicted_seconds

__all__ = ["CandidateBench", "Figures", "MeasuringBench", "PredictingBench", "bench_for"]

_REPEATS, _WARMUP = 30, 3
"""Runs of which the median counts, and runs before them."""
_FEW = 4
"""Candidates that are not worth a second run of nvcc beside the first."""
_TOLERANCE = {"float16": 4e-3, "float32": 1e-3, "float64": 1e-9}
"""Of the largest value: candidates sum in another order and round to the same type; four units in the last place of
fp16, and fp32 sums whose products were rounded to fp16."""


@dataclass(frozen=True)
class Figures:
    """What is known of a candidate.

    Attributes
    ----------
    seconds : tuple of float
        With a cold and with a warm second-level cache; empty where it cannot be used.
    spill_bytes, registers : int
        0 registers where no compiler was asked.
    problem : str
        Why it cannot be used.
    """

    seconds: tuple[float, ...] = ()
    spill_bytes: int = 0
    registers: int = 0
    problem: str = ""


class CandidateBench(Protocol):
    """Gives figures."""

    figure: str
    """``"measured"`` or ``"predicted"``."""
    device: str
    """What it is measured on, or the product that is predicted."""

    def figures(self, draft: StageDraft, candidates: Sequence[Candidate], reference: Candidate | None) -> list[Figures]:
        """The figures of some candidates of a stage; `reference` says what its outputs must be."""
        ...


class PredictingBench:
    """Predicts with the cost model of a product.

    Parameters
    ----------
    device : CostDevice
    target : Target
    nvcc : bool
        Whether to ask ptxas for registers and spills; without a compiler they are estimated.
    """

    figure = "predicted"

    def __init__(self, device: CostDevice, target: tvm.target.Target, *, nvcc: bool = True) -> None:
        self.cost_device = device
        self.device = device.product
        self.target = target
        self.nvcc = nvcc and find_nvcc() is not None

    def figures(self, draft: StageDraft, candidates: Sequence[Candidate], reference: Candidate | None) -> list[Figures]:
        """See :class:`CandidateBench`."""
        if not self.nvcc:
            return [self._of(candidate, None) for candidate in candidates]
        built = _built(draft, candidates, self.cost_device.arch, self.target)
        return [
            Figures(problem=one.reason) if isinstance(one, Refused) else self._of(candidate, one.resources)
            for candidate, one in zip(candidates, built, strict=True)
        ]

    def _of(self, candidate: Candidate, used: Resources | None) -> Figures:
        pool = max(function.shared_bytes for function in candidate.functions)
        threads = max(function.threads for function in candidate.functions)
        resources = spilled = None
        if used is not None:
            spilled = used.spill_store_bytes
            resources = StageResources(used.registers, used.static_shared_bytes, pool, threads, spilled, True)
        try:
            seconds = predicted_seconds(candidate.functions, self.cost_device, resources)
            return Figures(seconds, spilled or 0, used.registers if used is not None else 0)
        except OptionError as error:
            return Figures(problem=str(error))


class MeasuringBench:
    """Measures on the GPU at hand.

    Parameters
    ----------
    arch : str
    target : Target
    driver : object, optional
        The CUDA driver's functions, for tests and rehearsals.
    """

    figure = "measured"

    def __init__(self, arch: str, target: tvm.target.Target, driver: Any = None) -> None:
        if find_nvcc() is None:
            raise CompilerNotFoundError("measuring on a GPU needs nvcc: pip install 'souffle-dl[cuda]'")
        self.arch = arch
        self.target = target
        self.driver = driver
        self.device = Cuda(0, driver).name
        self._expected: tuple[StageDraft, dict[str, np.ndarray]] | None = None

    def figures(self, draft: StageDraft, candidates: Sequence[Candidate], reference: Candidate | None) -> list[Figures]:
        """See :class:`CandidateBench`."""
        inputs = _random_inputs(draft)
        if self._expected is None or self._expected[0] is not draft:
            (first,) = _built(draft, [reference or candidates[0]], self.arch, self.target)
            if isinstance(first, Refused):
                return [Figures(problem=first.reason)] * len(candidates)
            self._expected = (draft, self._network(first)(inputs))
        built = _built(draft, candidates, self.arch, self.target)
        return [
            Figures(problem=one.reason) if isinstance(one, Refused) else self._measured(one, inputs) for one in built
        ]

    def _network(self, built: _Built) -> Network:
        return Network(built.plan, device="cuda", poison=True, driver=self.driver)

    def _measured(self, built: _Built, inputs: dict[str, np.ndarray]) -> Figures:
        try:
            problem = _difference(self._network(built)(inputs), self._expected[1])
            if problem is not None:
                return Figures(problem=problem)
            network = Network(built.plan, device="cuda", driver=self.driver)
            runs = [network.time(inputs, repeats=_REPEATS, warmup=_WARMUP, flush=flush) for flush in (True, False)]
        except DeviceError as error:
            return Figures(problem=str(error))
        used = built.resources
        return Figures(tuple(run["median_us"] * 1e-6 for run in runs), used.spill_store_bytes, used.registers)


def bench_for(
    arch: str, target: tvm.target.Target, product: str | None, present: str | None
) -> tuple[CostDevice, CandidateBench]:
    """The cost model that ranks candidates, and the bench that gives their figures.

    Parameters
    ----------
    arch : str
    target : Target
    product : str or None
        To predict for, where it was asked for.
    present : str or None
        Architecture of the GPU at hand.

    Raises
    ------
    OptionError
        If no product of the architecture is described.
    """
    device = cost_device(product) if product is not None else device_of_arch(arch)
    if device is None:
        described = ", ".join(f"{name} ({cost_device(name).arch})" for name in product_names())
        raise OptionError(f"no GPU of {arch} is described, to rank candidates with; described: {described}")
    if device.arch != arch:
        raise OptionError(f"device {device.product} is {device.arch}, and the schedules are for {arch}")
    if product is None and present == arch:
        return device, MeasuringBench(arch, target)
    return device, PredictingBench(device, target)


@dataclass(frozen=True, eq=False)
class _Built:
    plan: Plan
    resources: Resources


def _built(
    draft: StageDraft, candidates: Sequence[Candidate], arch: str, target: tvm.target.Target
) -> list[_Built | Refused]:
    """Each candidate compiled, or why it does not compile."""
    count = max(1, min(os.cpu_count() or 1, len(candidates) // _FEW))
    numbers = range(len(candidates))
    parts = [numbers[start::count] for start in range(count)]
    found: dict[int, _Built | Refused] = {}

    def part(chosen: Sequence[int], text: str) -> dict[int, _Built | Refused]:
        try:
            cubin, report = compile_cubin(text, arch)
        except CudaCompileError as error:
            if len(chosen) == 1:
                return {chosen[0]: Refused(str(error))}
            alone = ([number] for number in chosen)
            return {number: one for own in alone for number, one in part(own, texts_of(own)).items()}
        module = CudaModule(text, cubin)
        return {
            number: _Built(_plan(draft, shapes[number], f"trial{number}", module, report[f"trial{number}"], arch), used)
            for number in chosen
            for used in (report[f"trial{number}"],)
        }

    parameters = [(tensor.dtype, tensor.nbytes) for tensor in (*draft.inputs, *draft.outputs)]
    shapes = {
        number: kernel_of_stage(candidate.functions, parameters, f"trial{number}_part")
        for number, candidate in enumerate(candidates)
    }

    def texts_of(chosen: Sequence[int]) -> str:
        return emit_cuda([(f"trial{number}", shapes[number]) for number in chosen], target)[0]

    texts = [texts_of(chosen) for chosen in parts]
    for one in map_in_threads(count, part, parts, texts):
        found |= one
    return [found[number] for number in numbers]


def _plan(draft: StageDraft, shape: KernelShape, name: str, module: CudaModule, used: Resources, arch: str) -> Plan:
    def buffer(kind: str, number: int, tensor: Tensor) -> Buffer:
        return Buffer(f"{kind}{number}", tensor.shape, tensor.dtype, kind, f"{kind}{number}")

    inputs = [buffer("input", number, tensor) for number, tensor in enumerate(draft.inputs)]
    outputs = [buffer("output", number, tensor) for number, tensor in enumerate(draft.outputs)]
    buffers = (*inputs, *outputs)
    kernel = Kernel(name, 0, shape.tiles, shape.threads, shape.shared_bytes, 0, used, (name,), (draft.name,))
    launch = Launch(0, tuple(range(len(buffers))), (draft.name,))
    return Plan(name, Options(level="V3", arch=arch), buffers, {}, (module,), (kernel,), (launch,), 0, ())


def _random_inputs(draft: StageDraft) -> dict[str, np.ndarray]:
    """Values near 1 for floats; integers are 0 or 1, which every tensor can be indexed with that has two elements."""
    generator = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {}
    for number, tensor in enumerate(draft.inputs):
        if tensor.dtype.startswith("float"):
            value = generator.standard_normal(tensor.shape).astype(tensor.dtype)
        else:
            value = generator.integers(0, 2, tensor.shape).astype(tensor.dtype)
        values[f"input{number}"] = value
    return values


def _difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> str | None:
    for name, value in expected.items():
        other = np.asarray(found[name])
        if not np.issubdtype(value.dtype, np.floating):
            if not np.array_equal(other, value):
                return f"{name} differs from the rule's own schedule"
            continue
        scale = float(np.max(np.abs(value), initial=0.0, where=np.isfinite(value)))
        limit = _TOLERANCE[str(value.dtype)] * max(scale, 1e-6)
        same = np.isclose(other, value, rtol=0.0, atol=limit, equal_nan=True)
        if not same.all():
            return f"{name} differs from the rule's own schedule in {int((~same).sum())} of {value.size} elements"
    return None
