"""Put a network together: the text of its kernels, cubins, buffers and launches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tvm

from souffle.analysis import Access, Analysis, distinct_elements
from souffle.codegen.cuda import module_text
from souffle.codegen.definitions import StageDefinition, dataflow_of, stage_definitions
from souffle.codegen.nvcc import compile_cubin, compiler_version, find_nvcc
from souffle.codegen.plan import CudaModule, Kernel, Launch, Plan, Resources, Touched
from souffle.codegen.tensor_ir import pack
from souffle.codegen.workspace_layout import place_buffers, with_barrier_state
from souffle.decision import Decision
from souffle.kernel import KernelShape, MergedKernel
from souffle.kernel.merged_program import MergedLaunch, MergedProgram
from souffle.options import Options
from souffle.parallel import map_in_threads
from souffle.partition import PartitionRequest
from souffle.program import Loop, Tensor
from souffle.schedule.stage import LoopStage, Stage, Unit

__all__ = ["CompiledKernels", "assemble", "traffic"]


@dataclass(frozen=True, eq=False)
class CompiledKernels:
    """A plan, with the TensorIR of its kernels, and of what their stages are to compute, for those who look at it."""

    plan: Plan
    merged: tuple[MergedKernel, ...]
    definitions: tuple[StageDefinition, ...]


def assemble(
    merged: MergedProgram,
    request: PartitionRequest,
    decisions: Sequence[Decision],
    options: Options,
    target: tvm.target.Target,
    progress: Callable[[str], None],
    edit: Callable[[str], str] = lambda text: text,
) -> CompiledKernels:
    """Emit and compile kernels, and place buffers.

    Parameters
    ----------
    merged : MergedProgram
    request : PartitionRequest
        The stages, and the analysis of the transformed program.
    decisions : sequence of Decision
    options : Options
    target : Target
    progress : callable
        Told what is being done.
    edit : callable
        Sees each module's text, and may replace it, before it is compiled.
    """
    analysis, program = request.analysis, request.analysis.program
    modules, module_of, resources = _compile(merged.kernels, options, target, progress, edit)
    first = {launch.kernel: launch for launch in reversed(merged.launches)}
    kernels = tuple(
        Kernel(
            name=kernel.name,
            module=module_of[kernel.name],
            tiles=kernel.shape.tiles,
            threads=kernel.shape.threads,
            teams=kernel.shape.team_count,
            dynamic_shared_bytes=kernel.shape.shared_bytes,
            grid_syncs=kernel.shape.grid_syncs,
            arrivals=kernel.shape.ticks,
            flag_waits=kernel.shape.flag_waits,
            resources=resources.get(kernel.name),
            stages=tuple(f.name for f in kernel.shape.functions),
            tes=_names_of_tes(first[number]),
            barriers=reasons,
        )
        for number, (kernel, reasons) in enumerate(zip(merged.kernels, merged.barriers, strict=True))
    )
    buffers, index, workspace = place_buffers(program, merged.first, merged.last)
    buffers, state = with_barrier_state(buffers, merged.kernels)
    called = dict.fromkeys(f for k in merged.kernels for f in k.shape.called)
    definitions = stage_definitions(request.stages, called)
    plan = Plan(
        name=program.name,
        options=options,
        buffers=buffers,
        constants={tensor.name: array for tensor, array in program.constants.items()},
        modules=modules,
        kernels=kernels,
        launches=tuple(
            Launch(
                launch.kernel,
                (*(index[t] for t in launch.tensors), *state[merged.kernels[launch.kernel].name]),
                _names_of_tes(launch),
                *traffic(launch.stages, analysis),
            )
            for launch in merged.launches
        ),
        workspace_bytes=workspace,
        decisions=tuple(decisions),
        tensor_ir=pack({k.name: k.func for k in merged.kernels}, {f.name: f.func for f in called}, definitions),
        compiler=_compiler() if options.cubin else "",
        dataflow=dataflow_of(program, request.stages, called),
    )
    return CompiledKernels(plan, merged.kernels, definitions)


def _names_of_tes(launch: MergedLaunch) -> tuple[str, ...]:
    return tuple(te.name for unit in launch.stages for te in unit.tes)


def traffic(stages: Sequence[Unit], analysis: Analysis) -> tuple[int, int, tuple[Touched, ...]]:
    """Bytes of global memory that stages read and write: distinct elements of each tensor, counted for each stage.

    The stages of a loop count as often as they run; what stays in the shared memory of a block is none of them, and
    what stays in its registers is read once.

    Returns
    -------
    read, written : int
    touched : tuple of Touched
        What they are the sums of.
    """
    found: list[Touched] = []
    for unit in stages:
        if isinstance(unit, LoopStage):
            inner, outer, steps = analysis.inside(unit.loop), _outer_names(unit.loop), unit.loop.steps
            found += [touched for stage in unit.stages for touched in _touched(stage, inner, steps, outer)]
        else:
            found += _touched(unit, analysis, 1, {})
    read, written = (sum(one.nbytes for one in found if one.written is way) for way in (False, True))
    return read, written, tuple(found)


def _touched(stage: Stage, analysis: Analysis, runs: int, outer: Mapping[Tensor, str]) -> Iterator[Touched]:
    """What so many runs of a stage do with each of its tensors."""
    accesses: dict[Tensor, list[Access]] = {}
    for te_ in stage.tes:
        for access in analysis.accesses(te_):
            accesses.setdefault(access.tensor, []).append(access)
    in_windows = {tensor for tensor, _ in stage.windows}
    kept = {stage.inputs[number] for number in stage.kept.reads} if stage.kept else set()
    for tensor in stage.inputs:
        where, read = "global", 0
        if tensor in kept:
            where, read = stage.kept.scope, tensor.nbytes
        elif tensor in in_windows:
            where = "shared"
        else:
            read = runs * distinct_elements(accesses[tensor]) * tensor.itemsize
        yield Touched(stage.name, outer.get(tensor, tensor.name), where, False, read)
    for tensor in stage.outputs:
        near = tensor in in_windows
        written = 0 if near else runs * tensor.nbytes
        yield Touched(stage.name, outer.get(tensor, tensor.name), "shared" if near else "global", True, written)


def _outer_names(loop: Loop) -> dict[Tensor, str]:
    """What the tensors of a loop's body are called outside, and those that are carried as they are made."""
    found = {collected.value: collected.tensor.name for collected in loop.collected}
    found |= {carried.tensor: found.get(carried.value, carried.value.name) for carried in loop.carried}
    return found | {indexed.tensor: indexed.source.name for indexed in loop.indexed}


def _compile(
    kernels: Sequence[MergedKernel],
    options: Options,
    target: tvm.target.Target,
    progress: Callable[[str], None],
    edit: Callable[[str], str],
) -> tuple[tuple[CudaModule, ...], dict[str, int], dict[str, Resources]]:
    """Emit and compile all kernels: one file for each core, since a call of nvcc costs seconds whatever it holds.

    Returns
    -------
    modules : tuple of CudaModule
    module_of : dict of str to int
        By the kernels' names.
    resources : dict of str to Resources
        By the kernels' names; empty where nothing is compiled for a GPU.
    """
    workers = min(os.cpu_count() or 1, len(kernels))
    parts: list[list[int]] = [[] for _ in range(workers)]
    for number in sorted(range(len(kernels)), key=lambda number: -_weight(kernels[number].shape)):
        min(parts, key=lambda part: sum(_weight(kernels[n].shape) for n in part)).append(number)
    emitted = [_emitted([kernels[number] for number in sorted(part)], target) for part in parts]
    texts = [edit(text) for text in emitted]
    if not options.cubin:
        images = [(b"", {}) for _ in texts]
    else:
        progress(f"nvcc: {len(kernels)} kernels in {len(texts)} files for {options.arch}")
        images = map_in_threads(
            workers, lambda text: compile_cubin(text, options.arch, cache_dir=options.cache_dir), texts
        )
    modules = tuple(
        CudaModule(text, cubin, text != before) for text, before, (cubin, _) in zip(texts, emitted, images, strict=True)
    )
    module_of = {kernels[number].name: index for index, part in enumerate(parts) for number in part}
    return modules, module_of, {name: used for _, report in images for name, used in report.items()}


def _emitted(kernels: Sequence[MergedKernel], target: tvm.target.Target) -> str:
    functions = {function.name: function.func for kernel in kernels for function in kernel.shape.called}
    return module_text(kernels, functions, target)


def _compiler() -> str:
    """What made the cubins; their keys in the cache hold its version."""
    nvcc = find_nvcc()
    return compiler_version(nvcc).strip() if nvcc else ""


def _weight(shape: KernelShape) -> int:
    return len(set(shape.functions)) + len(shape.functions) // 8
