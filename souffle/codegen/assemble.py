"""Put a network together: stages lowered once each, kernels of equal shape shared, text, cubins, buffers, launches."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tvm

from souffle.analysis import Access, Analysis, distinct_elements
from souffle.codegen.cuda import emit_cuda
from souffle.codegen.definitions import StageDefinition, dataflow_of, stage_definitions
from souffle.codegen.memory import place_buffers, with_barrier_state
from souffle.codegen.nvcc import compile_cubin, compiler_version, find_nvcc
from souffle.codegen.plan import CudaModule, Kernel, Launch, Plan, Resources
from souffle.codegen.tensor_ir import pack
from souffle.decision import Barrier, Decision
from souffle.kernel import CallPlan, KernelShape, MergedKernel, plan_calls
from souffle.kernel.dependences import TileDependences
from souffle.kernel.grid_barrier import barrier_for
from souffle.kernel.waits import Expected
from souffle.parallel import map_in_threads
from souffle.partition import PartitionRequest, Subprogram
from souffle.program import Tensor
from souffle.schedule.lower import DeviceFunction, Lowering, LoweringError, partial_function
from souffle.schedule.lower.fewer_threads import PARTIAL_SUFFIX
from souffle.schedule.stage import LoopStage, Stage, Unit
from souffle.tvm_compat import structural_digest

__all__ = ["CompiledKernels", "Options", "assemble", "lower_stages", "traffic"]


@dataclass(frozen=True)
class Options:
    """How to compile.

    Attributes
    ----------
    level, precision, partition, arch : str
        See :func:`souffle.compile`.
    prefetch : bool
        Whether weights of the next stage are prefetched before a grid sync (V4).
    cubin : bool
        Whether nvcc is run. Without, the network has CUDA text only, which the CPU device runs.
    cache_dir : Path or None
        Where cubins are kept by their text's hash.
    grid_barrier : str
        How blocks of a kernel wait for each other.
    """

    level: str
    precision: str
    partition: str
    arch: str
    prefetch: bool
    cubin: bool
    cache_dir: Path | None
    grid_barrier: str = "cooperative"


@dataclass(frozen=True, eq=False)
class CompiledKernels:
    """A plan, with the TensorIR of its kernels, and of what their stages are to compute, for those who look at it."""

    plan: Plan
    merged: tuple[MergedKernel, ...]
    definitions: tuple[StageDefinition, ...]


def lower_stages(
    stages: Sequence[Stage], lowering: Lowering
) -> tuple[dict[Stage, tuple[DeviceFunction, ...]], dict[DeviceFunction, str]]:
    """The functions of each stage.

    Parameters
    ----------
    stages : sequence of Stage
    lowering : Lowering
        Knows the schedules that it was asked about before.

    Returns
    -------
    functions : dict of Stage to tuple of DeviceFunction
        Stages of equal structure share their functions.
    names : dict of DeviceFunction to str
        Unique names, after the first stage that needs the function.

    Raises
    ------
    LoweringError
        If a stage cannot be lowered.
    """
    lowered: dict[tuple[str, str], tuple[DeviceFunction, ...]] = {}
    names: dict[DeviceFunction, str] = {}
    functions: dict[Stage, tuple[DeviceFunction, ...]] = {}
    # Equal stages may have been given different schedules.
    schedules: dict[object, str] = {}
    for stage in stages:
        if stage.schedule not in schedules:
            schedules[stage.schedule] = structural_digest(stage.schedule.func)
        digest = (stage.draft.digest, schedules[stage.schedule])
        if digest not in lowered:
            label = f"stage{len(lowered)}_{_identifier(stage.name)}"
            lowered[digest] = own = lowering.functions(stage.schedule)
            for number, function in enumerate(own):
                names.setdefault(function, label if len(own) == 1 else f"{label}_{number}")
        functions[stage] = lowered[digest]
    if len({function.threads for function in names}) > 1:
        for function, name in list(names.items()):
            # One that has no such form may still be in a kernel of its own size.
            with suppress(LoweringError):
                names.setdefault(partial_function(function), f"{name}{PARTIAL_SUFFIX}")
    return functions, names


def assemble(
    request: PartitionRequest,
    subprograms: Sequence[Subprogram],
    functions: Mapping[Stage, tuple[DeviceFunction, ...]],
    names: Mapping[DeviceFunction, str],
    decisions: Sequence[Decision],
    options: Options,
    target: tvm.target.Target,
    progress: Callable[[str], None],
    edit: Callable[[str], str] = lambda text: text,
) -> CompiledKernels:
    """Merge, emit, compile, and place buffers.

    Parameters
    ----------
    request : PartitionRequest
        The stages, what they ask of the device, and the analysis of the transformed program.
    subprograms : sequence of Subprogram
        Its partition, in order of execution.
    functions, names
        From :func:`lower_stages`.
    decisions : sequence of Decision
    options : Options
    target : Target
    progress : callable
        Told what is being done.
    edit : callable
        Sees each module's text, and may replace it, before it is compiled.
    """
    analysis, program = request.analysis, request.analysis.program
    dependences = TileDependences()
    shapes: dict[KernelShape, int] = {}
    reasons: dict[int, tuple[Barrier, ...]] = {}
    launches: list[tuple[int, tuple[Tensor, ...], Subprogram]] = []
    live = _Liveness()
    for subprogram in subprograms:
        calls = plan_calls(
            subprogram.stages,
            functions,
            program.constants,
            prefetch=options.prefetch,
            blocks_per_sm=subprogram.blocks_per_sm,
            expected=_expected(request, subprogram.stages),
            dependences=dependences,
        )
        number = shapes.setdefault(calls.shape, len(shapes))
        reasons.setdefault(number, calls.barriers)
        launches.append((number, calls.tensors, Subprogram(calls.stages)))
        live.kernel(calls)
    kernel_names = _kernel_names(list(shapes), launches)
    modules, merged, resources = _compile(list(shapes), kernel_names, names, options, target, progress, edit)
    module_of = {kernel.name: index for index, (_, kernels) in enumerate(modules) for kernel in kernels}
    first = {number: subprogram for number, _, subprogram in reversed(launches)}
    kernels = tuple(
        Kernel(
            name=kernel_names[i],
            module=module_of[kernel_names[i]],
            tiles=shape.tiles,
            threads=shape.threads,
            dynamic_shared_bytes=shape.shared_bytes,
            grid_syncs=shape.grid_syncs,
            resources=resources.get(kernel_names[i]),
            stages=tuple(names[f] for f in shape.functions),
            tes=tuple(te.name for stage in first[i].stages for te in stage.tes),
            barriers=reasons[i],
        )
        for shape, i in shapes.items()
    )
    buffers, index, workspace = place_buffers(program, live.first, live.last)
    buffers, state = with_barrier_state(buffers, merged)
    called = {f: names[f] for k in merged for f in k.shape.functions}
    definitions = stage_definitions(functions, names, called)
    plan = Plan(
        name=program.name,
        level=options.level,
        precision=options.precision,
        partition=options.partition,
        arch=options.arch,
        buffers=buffers,
        constants={tensor.name: array for tensor, array in program.constants.items()},
        modules=tuple(module for module, _ in modules),
        kernels=kernels,
        launches=tuple(
            Launch(
                number,
                (*(index[t] for t in tensors), *state[kernel_names[number]]),
                tuple(te.name for s in sub.stages for te in s.tes),
                *traffic(sub.stages, analysis),
            )
            for number, tensors, sub in launches
        ),
        workspace_bytes=workspace,
        decisions=tuple((d.stage, d.subject, d.accepted, d.reason) for d in decisions),
        grid_barrier=options.grid_barrier,
        tensor_ir=pack({k.name: k.func for k in merged}, {n: f.func for f, n in called.items()}, definitions),
        compiler=_compiler() if options.cubin else "",
        dataflow=dataflow_of(program, request.stages, functions, called),
    )
    return CompiledKernels(plan, merged, definitions)


def _expected(request: PartitionRequest, units: Sequence[Unit]) -> Expected:
    """What a kernel of these units is expected to find on the device."""
    blocks, forecast = request.blocks(units), request.forecast
    if forecast is None:
        return Expected(blocks)
    together = request.together(units)
    # Half of the predictions are off by more than the error: what is saved is taken for the least that it may be.
    saved = forecast.grid_sync_seconds / forecast.error
    return Expected(blocks, saved, lambda stage: forecast.seconds(stage, together))


def traffic(stages: Sequence[Unit], analysis: Analysis) -> tuple[int, int]:
    """Bytes of global memory that stages read and write: distinct elements of each tensor, counted for each stage.

    The stages of a loop count as often as they run.
    """
    read = written = 0
    for stage in stages:
        if isinstance(stage, LoopStage):
            inner = traffic(stage.stages, analysis.inside(stage.loop))
            read, written = read + stage.loop.steps * inner[0], written + stage.loop.steps * inner[1]
            continue
        accesses: dict[Tensor, list[Access]] = {}
        for te_ in stage.tes:
            for access in analysis.accesses(te_):
                accesses.setdefault(access.tensor, []).append(access)
        read += sum(distinct_elements(accesses[t]) * t.itemsize for t in stage.inputs)
        written += sum(t.nbytes for t in stage.outputs)
    return read, written


class _Liveness:
    """First and last epoch of each tensor, over all kernels of a network."""

    def __init__(self) -> None:
        self.epoch = 0
        self.first: dict[Tensor, int] = {}
        self.last: dict[Tensor, int] = {}

    def kernel(self, calls: CallPlan) -> None:
        for touch in calls.touches:
            if touch.writes:
                begins = self.epoch + touch.first
                self.first[touch.tensor] = min(begins, self.first.get(touch.tensor, begins))
            if touch.tensor in self.first:
                self.last[touch.tensor] = max(self.epoch + touch.last, self.last.get(touch.tensor, 0))
        # What a kernel only reads nvcc may load with ld.global.nc, past the coherent cache: PTX wants such memory
        # unwritten until the kernel ends, under whatever name.
        written = {touch.tensor for touch in calls.touches if touch.writes}
        for tensor in {touch.tensor for touch in calls.touches} & self.first.keys() - written:
            self.last[tensor] = self.epoch + calls.length - 1
        self.epoch += calls.length


def _kernel_names(shapes: Sequence[KernelShape], launches) -> list[str]:
    """Names that say what the kernel computes: after the last stage of its first launch."""
    names = [""] * len(shapes)
    for number, _, subprogram in launches:
        names[number] = names[number] or f"kernel{number}_{_identifier(subprogram.name)}"
    return names


def _compile(
    shapes: Sequence[KernelShape],
    kernel_names: Sequence[str],
    names: Mapping[DeviceFunction, str],
    options: Options,
    target: tvm.target.Target,
    progress: Callable[[str], None],
    edit: Callable[[str], str],
) -> tuple[list[tuple[CudaModule, tuple[MergedKernel, ...]]], tuple[MergedKernel, ...], dict[str, Resources]]:
    """Emit and compile all kernels: one file for each core, since a call of nvcc costs seconds whatever it holds."""
    workers = min(os.cpu_count() or 1, len(shapes))
    order = sorted(range(len(shapes)), key=lambda i: -_weight(shapes[i]))
    parts: list[list[int]] = [[] for _ in range(workers)]
    for i in order:
        min(parts, key=lambda part: sum(_weight(shapes[j]) for j in part)).append(i)
    barrier = barrier_for(options.grid_barrier)
    named = [[(kernel_names[i], shapes[i]) for i in sorted(part)] for part in parts]
    emitted = [emit_cuda(kernels, names, target, barrier) for kernels in named]
    texts = [(edit(text), kernels) for text, kernels in emitted]
    edited = [text != before for (text, _), (before, _) in zip(texts, emitted, strict=True)]
    if not options.cubin:
        images = [(b"", {}) for _ in texts]
    else:
        progress(f"nvcc: {len(shapes)} kernels in {len(texts)} files for {options.arch}")
        images = map_in_threads(
            workers, lambda text: compile_cubin(text, options.arch, cache_dir=options.cache_dir), [t for t, _ in texts]
        )
    resources = {name: used for _, report in images for name, used in report.items()}
    modules = [
        (CudaModule(text, cubin, changed), kernels)
        for (text, kernels), (cubin, _), changed in zip(texts, images, edited, strict=True)
    ]
    return modules, tuple(k for _, kernels in texts for k in kernels), resources


def _compiler() -> str:
    """What made the cubins; their keys in the cache hold its version."""
    nvcc = find_nvcc()
    return compiler_version(nvcc).strip() if nvcc else ""


def _weight(shape: KernelShape) -> int:
    return len(set(shape.functions)) + len(shape.functions) // 8


def _identifier(name: str) -> str:
    """The last words of a name, as much as keeps the text readable."""
    clean = re.sub(r"\W+", "_", name).strip("_")
    return clean if len(clean) <= 40 else clean[-40:].partition("_")[2].strip("_") or clean[-40:]
