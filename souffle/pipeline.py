"""The whole compiler on one page: ONNX model → TE program → transformed → stages → subprograms → kernels → plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from souffle.alone import one_at_a_time
from souffle.analysis import Analysis, analyze
from souffle.codegen.assemble import CompiledKernels, assemble
from souffle.codegen.forecast import with_predictions
from souffle.codegen.llvm import HostScheduler, assemble_host, host_joins
from souffle.codegen.plan import Plan
from souffle.codegen.stage_meter import smaller_waves
from souffle.decision import Decision
from souffle.errors import OptionError
from souffle.kernel.kernel_plan import independent_stages
from souffle.kernel.merged_program import merge_program
from souffle.kernel.resident import keep_on_chip
from souffle.kernel.side_by_side import Considered
from souffle.options import GATHERED, LEVELS, Hook, LateHook, Level, Options, Progress, keep, quiet
from souffle.partition import planner_for
from souffle.placement import gathered_products
from souffle.program import Loop, TEProgram
from souffle.schedule.form_stages import JoinPolicy, form_stages
from souffle.schedule.gpu.device import device_for
from souffle.schedule.stage import Stages
from souffle.staging import Staged, stage_program, staged_ways
from souffle.stitching.fusion import fusion_of
from souffle.transform import horizontal, mixed_precision, narrow, tensor_float, vertical
from souffle.verify.certified_step import certified

__all__ = [
    "LEVELS",
    "check_names",
    "compile_cuda",
    "compile_host",
    "independent_stages_of",
    "stages_of",
    "stages_of_ways",
    "transform_program",
]


def check_names(options: Options) -> None:
    """Look up what the options name: a device and planners.

    Raises
    ------
    OptionError
        If there is none of that name, listing those that there are.
    """
    device_for(options.arch)
    planner_for(options.partition)
    fusion_of(options)


@one_at_a_time
def compile_cuda(
    program: TEProgram,
    options: Options | None = None,
    *,
    progress: Progress = quiet,
    hook: Hook = keep,
    **fields: object,
) -> CompiledKernels:
    """Compile a TE program to CUDA kernels.

    Parameters
    ----------
    program : TEProgram
        From the frontend, or built by hand.
    options : Options, optional
    progress : callable, optional
        Told in a few words what is being done.
    hook : callable, optional
        Called between stages, see ``docs/debugging.md``.
    fields
        In the place of `options`: its fields by their names.

    Raises
    ------
    OptionError
        If an option is not valid.
    CertificateError
        If the result is refuted.
    """
    options = Options(**fields) if options is None else options
    staged = _staged(program, options, progress, keep if isinstance(hook, LateHook) else hook)
    request, partition = staged.request, hook("partition", staged.partition)
    if "resident" in staged.on_chip:
        request, partition = keep_on_chip(request, partition, options, staged.dependences)
    progress(f"merging into {len(partition.subprograms)} kernels")
    merged = hook("merge", merge_program(request, partition, options, staged.dependences))
    decisions = (*staged.decisions, *partition.decisions, *merged.decisions)
    compiled = assemble(merged, request, decisions, options, staged.target, progress, partial(hook, "text"))
    plan = with_predictions(compiled.plan, merged.launches, request.forecast)
    smaller = smaller_waves(plan, partition.subprograms, request)
    compiled = replace(compiled, plan=replace(plan, decisions=(*plan.decisions, *smaller)))
    return certified(compiled, options.verify, progress)


@one_at_a_time
def stages_of(
    program: TEProgram, options: Options | None = None, *, progress: Progress = quiet, **fields: object
) -> tuple[Stages, Analysis]:
    """The stages that a program is compiled to, as the rules schedule them, and the analysis of the program.

    Parameters
    ----------
    program : TEProgram
    options, progress, fields
        See :func:`compile_cuda`.
    """
    request = _staged(program, Options(**fields) if options is None else options, progress, keep).request
    return Stages(request.stages), request.analysis


@one_at_a_time
def stages_of_ways(
    program: TEProgram, options: Options, *, progress: Progress = quiet
) -> list[tuple[Stages, Analysis]]:
    """As :func:`stages_of`, for each way that may be the fastest when other schedules are known, the best first."""
    ways = staged_ways(*_transformed(program, options, progress, keep), options, progress)
    return [(Stages(staged.request.stages), staged.request.analysis) for staged in ways]


@one_at_a_time
def independent_stages_of(
    program: TEProgram, options: Options | None = None, *, progress: Progress = quiet, **fields: object
) -> tuple[Considered, ...]:
    """The stages of a program's kernels that could be computed side by side, and what is predicted of each way.

    Parameters
    ----------
    program : TEProgram
    options, progress, fields
        See :func:`compile_cuda`.
    """
    options = Options(**fields) if options is None else options
    staged = _staged(program, options, progress, keep)
    request, partition = staged.request, staged.partition
    if "resident" in staged.on_chip:
        request, partition = keep_on_chip(request, partition, options, staged.dependences)
    progress("pricing independent stages")
    constants = request.analysis.program.constants
    given = request, constants, options.waiting, staged.dependences
    return tuple(one for subprogram in partition.subprograms for one in independent_stages(subprogram, *given))


@one_at_a_time
def transform_program(
    program: TEProgram, level: Level, precision: str, hook: Hook = keep, *, apart: bool = True
) -> tuple[TEProgram, tuple[Decision, ...]]:
    """The TE-level part of a level: precision, horizontal, vertical, then the types in which tensors are stored.

    `apart` is of :func:`souffle.transform.horizontal`.
    """
    if precision == "mixed" and any(isinstance(item, Loop) for item in program.tes):
        raise OptionError("precision='mixed' does not reach into loops; give the program before transform.roll")
    decisions: list[Decision] = []
    for name, transformation, wanted in (
        ("precision", *_precision(precision)),
        ("horizontal", partial(horizontal, apart=apart), level.horizontal),
        ("vertical", vertical, level.vertical),
        ("narrow", partial(narrow, alike=level.merge), precision == "mixed" and level.vertical),
    ):
        if wanted:
            program, made = transformation(program)
            decisions.extend(made)
        program = hook(name, program)
    return program, tuple(decisions)


def _precision(name: str) -> tuple[Callable[[TEProgram], tuple[TEProgram, tuple[Decision, ...]]], bool]:
    """What makes a program of fp32 one of another precision, and whether it is another."""
    return (mixed_precision if name == "mixed" else partial(tensor_float, products=name)), name != "fp32"


def _staged(program: TEProgram, options: Options, progress: Progress, hook: Hook) -> Staged:
    """Transform a program, then schedule, lower and partition its stages."""
    return stage_program(*_transformed(program, options, progress, hook), options, progress, hook)


def _transformed(
    program: TEProgram, options: Options, progress: Progress, hook: Hook
) -> tuple[TEProgram, tuple[Decision, ...]]:
    """The TE-level part of a compilation."""
    program = hook("frontend", program)
    progress("transforming")
    return transform_program(program, LEVELS[options.level], options.precision, hook)


@one_at_a_time
def compile_host(
    program: TEProgram,
    options: Options | None = None,
    *,
    progress: Progress = quiet,
    hook: Hook = keep,
    **fields: object,
) -> Plan:
    """Compile a TE program to LLVM code for this machine; parameters as for :func:`compile_cuda`."""
    options = Options(**fields) if options is None else options
    level = LEVELS[options.level]
    program = hook("frontend", program)
    if any(isinstance(item, Loop) for item in program.tes):
        raise OptionError("loops run on target='cuda' only; for target='cpu' give the program before transform.roll")
    progress("transforming")
    gathered: tuple[Decision, ...] = ()
    if level.horizontal and GATHERED not in options.disable:
        program, gathered = gathered_products(program, options.processor)
    program = hook("gathered", program)
    program, decided = transform_program(program, level, options.precision, hook, apart=False)
    analysis = hook("analysis", analyze(program.expanded()))
    compose = host_joins(options) if level.vertical and "interleaving" not in options.disable else None
    policy = JoinPolicy(across_operators=level.vertical, compose=compose)
    stages, joined = form_stages(program, analysis, HostScheduler(), policy)
    stages = hook("schedule", Stages(stages))
    return assemble_host(analysis.program, analysis, stages, (*gathered, *decided, *joined), options, progress)
