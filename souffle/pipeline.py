"""The whole compiler on one page: ONNX model → TE program → transformed → stages → subprograms → kernels → plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import tvm

from souffle.analysis import Analysis, analyze
from souffle.codegen.assemble import CompiledKernels, Options, assemble
from souffle.codegen.forecast import forecast_on, with_predictions
from souffle.codegen.llvm import HostScheduler, assemble_host
from souffle.codegen.plan import Plan
from souffle.codegen.resources import StageMeter, smaller_waves
from souffle.cost.device import device_of_arch
from souffle.cost.stage_price import price_on
from souffle.decision import Decision
from souffle.errors import OptionError
from souffle.options import LEVELS, REDUCTIONS, CudaOptions, Hook, Level, check_options, keep
from souffle.partition import PartitionRequest, Planner, one_kernel_per_stage, planner_for
from souffle.placement.reductions import place_reductions
from souffle.program import Loop, TEProgram
from souffle.schedule.form_stages import JoinPolicy, form_stages
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.log import open_log
from souffle.schedule.lower.stages import lower_stages
from souffle.schedule.stage import LoopStage, Unit
from souffle.schedule.tuned import tuned_stages
from souffle.transform import horizontal, mixed_precision, narrow, roll, vertical
from souffle.verify.compiled import certified

__all__ = [
    "LEVELS",
    "REDUCTIONS",
    "CudaOptions",
    "Level",
    "check_options",
    "compile_cuda",
    "compile_host",
    "stages_of",
    "transform_program",
]


def transform_program(
    program: TEProgram, level: Level, precision: str, hook: Hook = keep
) -> tuple[TEProgram, tuple[Decision, ...]]:
    """The TE-level part of a level: precision, horizontal, vertical, then the types in which tensors are stored."""
    if precision == "mixed" and any(isinstance(item, Loop) for item in program.tes):
        raise OptionError("precision='mixed' does not reach into loops; give the program before transform.roll")
    decisions: list[Decision] = []
    passes = [("precision", mixed_precision, precision == "mixed")]
    passes += [("horizontal", horizontal, level.horizontal), ("vertical", vertical, level.vertical)]
    passes += [("narrow", partial(narrow, alike=level.merge), precision == "mixed" and level.vertical)]
    for name, transformation, wanted in passes:
        if wanted:
            program, made = transformation(program)
            decisions.extend(made)
        program = hook(name, program)
    return program, tuple(decisions)


@dataclass(frozen=True, eq=False)
class _Staged:
    """A program as far as its stages are known, each scheduled and lowered.

    ``request`` is what a planner looks at: the stages, the analysis of the transformed program, and the forecast.
    """

    level: Level
    target: tvm.target.Target
    planner: Planner
    request: PartitionRequest
    decisions: tuple[Decision, ...]


def compile_cuda(program: TEProgram, **options: object) -> CompiledKernels:
    """Compile a TE program to CUDA kernels.

    Parameters
    ----------
    program : TEProgram
        From the frontend, or built by hand.
    options
        See :class:`CudaOptions`.

    Raises
    ------
    OptionError
        If an option is not valid.
    CertificateError
        If the result is refuted.
    """
    chosen = CudaOptions(**options)
    staged = _staged(program, chosen)
    level, planner, request = staged.level, staged.planner, staged.request
    planned = planner.plan(request) if level.merge else one_kernel_per_stage(request.stages)
    subprograms, cuts = chosen.hook("partition", planned)
    chosen.progress(f"merging into {len(subprograms)} kernels")
    how = (chosen.level, chosen.precision, chosen.partition, chosen.arch, level.reuse, chosen.cubin, chosen.cache_dir)
    how += (chosen.grid_barrier,)
    decisions, edit = (*staged.decisions, *cuts), partial(chosen.hook, "text")
    parts = (request, subprograms, decisions, Options(*how), staged.target)
    compiled = assemble(*parts, chosen.progress, edit)
    plan = with_predictions(compiled.plan, subprograms, request.forecast)
    smaller = smaller_waves(plan, subprograms, request) if level.merge and planner.measures else ()
    late = tuple((d.stage, d.subject, d.accepted, d.reason) for d in smaller)
    compiled = replace(compiled, plan=replace(plan, decisions=(*plan.decisions, *late)))
    return certified(compiled, chosen.verify, chosen.progress)


def stages_of(program: TEProgram, **options: object) -> tuple[tuple[Unit, ...], Analysis]:
    """The stages that a program is compiled to, as the rules schedule them, and the analysis of the program.

    Parameters
    ----------
    program : TEProgram
    options
        See :class:`CudaOptions`.
    """
    request = _staged(program, CudaOptions(**options)).request
    return tuple(request.stages), request.analysis


def _staged(program: TEProgram, options: CudaOptions) -> _Staged:
    """Transform a program, form, schedule and lower its stages, and say what each asks of the device."""
    arch, hook, progress = options.arch, options.hook, options.progress
    wanted = (options.level, options.precision, options.partition, arch, options.reductions, options.verify)
    level = check_options(*wanted, options.grid_barrier)
    device, described, planner = device_for(arch), device_of_arch(arch), planner_for(options.partition)
    program = hook("frontend", program)
    progress("transforming")
    program, decided = transform_program(program, level, options.precision, hook)
    scheduler = GpuScheduler(device, price_on(described))
    if level.merge and options.reductions == "ordered":
        program, placed = place_reductions(program, described, scheduler)
        decided += placed
    program = hook("two_phase", program)
    policy = JoinPolicy(level.vertical, level.reuse)
    measure = options.cubin and level.merge and planner.measures
    meter = StageMeter(arch, scheduler.target, measure=measure, cache_dir=options.cache_dir)
    logs = open_log(options.tuning_log, arch)
    unwanted: dict[str, str] = {}
    while True:
        rolled, loops = roll(program, unwanted) if level.merge else (program, ())
        rolled = hook("roll", rolled)
        analysis = hook("analysis", analyze(rolled.expanded()))
        progress(f"scheduling {len(rolled.tes)} TEs")
        stages, joined = form_stages(rolled, analysis, scheduler, policy)
        stages = hook("schedule", stages)
        if options.tuning_log is not None:
            stages, found = tuned_stages(stages, analysis, logs, device, merged=level.merge)
            joined += found
        progress(f"lowering {len(stages)} stages")
        stages = meter.measured(lower_stages(stages, scheduler.target))
        request = PartitionRequest(stages, device, analysis, forecast_on(arch, analysis.program, stages))
        # A loop that the planner would cut is taken apart: each of its kernels ends and begins as in one step.
        beyond = planner.loops_to_take_apart(request) if level.merge else {}
        if beyond.keys() <= unwanted.keys():
            break
        unwanted |= beyond
    # A loop that the program was given with stays one.
    whole = {unit.name for unit in stages if isinstance(unit, LoopStage)}
    unrolled = [Decision("roll", name, False, reason) for name, reason in unwanted.items() if name not in whole]
    return _Staged(level, scheduler.target, planner, request, (*decided, *loops, *unrolled, *joined))


def compile_host(
    program: TEProgram,
    *,
    level: str = "V4",
    precision: str = "fp32",
    progress: Callable[[str], None] = lambda message: None,
    hook: Hook = keep,
) -> Plan:
    """Compile a TE program to LLVM code for this machine; parameters as for :func:`compile_cuda`."""
    chosen = check_options(level, precision)
    program = hook("frontend", program)
    if any(isinstance(item, Loop) for item in program.tes):
        raise OptionError("loops run on target='cuda' only; for target='cpu' give the program before transform.roll")
    progress("transforming")
    program, decided = transform_program(program, chosen, precision, hook)
    analysis = hook("analysis", analyze(program.expanded()))
    policy = JoinPolicy(across_operators=chosen.vertical, rowwise_across_operators=False)
    stages, joined = form_stages(program, analysis, HostScheduler(), policy)
    stages = hook("schedule", stages)
    program = analysis.program
    return assemble_host(program, analysis, stages, (*decided, *joined), level, precision, progress)
