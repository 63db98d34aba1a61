"""Put a network together: stages lowered once each, kernels of equal shape shared, text, cubins, buffers, launches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from souffle.options import LEVELS, Options
from souffle.parallel import map_in_threads
from souffle.partition import PartitionRequest, Subprogram
from souffle.program import Tensor
from souffle.schedule.lower.stages import readable_name
from souffle.schedule.stage import LoopStage, Unit

__all__ = ["CompiledKernels", "assemble", "traffic"]


@dataclass(frozen=True, eq=False)
class CompiledKernels:
    """A plan, with the TensorIR of its kernels, and of what their stages are to compute, for those who look at it."""

    plan: Plan
    merged: tuple[MergedKernel, ...]
    definitions: tuple[StageDefinition, ...]


def assemble(
    request: PartitionRequest,
    subprograms: Sequence[Subprogram],
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
            program.constants,
            prefetch=LEVELS[options.level].reuse,
            blocks_per_sm=subprogram.blocks_per_sm,
            expected=_expected(request, subprogram.stages),
            dependences=dependences,
        )
        number = shapes.setdefault(calls.shape, len(shapes))
        reasons.setdefault(number, calls.barriers)
        launches.append((number, calls.tensors, Subprogram(calls.stages)))
        live.kernel(calls)
    kernel_names = _kernel_names(list(shapes), launches)
    modules, merged, resources = _compile(list(shapes), kernel_names, options, target, progress, edit)
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
            stages=tuple(f.name for f in shape.functions),
            tes=tuple(te.name for stage in first[i].stages for te in stage.tes),
            barriers=reasons[i],
        )
        for shape, i in shapes.items()
    )
    buffers, index, workspace = place_buffers(program, live.first, live.last)
    buffers, state = with_barrier_state(buffers, merged)
    called = dict.fromkeys(f for k in merged for f in k.shape.functions)
    definitions = stage_definitions(request.stages, called)
    plan = Plan(
        name=program.name,
        options=options,
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
        decisions=tuple(decisions),
        tensor_ir=pack({k.name: k.func for k in merged}, {f.name: f.func for f in called}, definitions),
        compiler=_compiler() if options.cubin else "",
        dataflow=dataflow_of(program, request.stages, called),
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
        names[number] = names[number] or f"kernel{number}_{readable_name(subprogram.name)}"
    return names


def _compile(
    shapes: Sequence[KernelShape],
    kernel_names: Sequence[str],
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
    emitted = [emit_cuda(kernels, target, barrier) for kernels in named]
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
