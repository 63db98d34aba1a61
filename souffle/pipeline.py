"""The whole compiler on one page: ONNX model → TE program → transformed → stages → subprograms → kernels → plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from souffle.analysis import analyze
from souffle.codegen.assemble import CompiledKernels, Options, assemble, lower_stages
from souffle.codegen.llvm import assemble_host, host_scheduler
from souffle.codegen.plan import Plan
from souffle.codegen.resources import StageMeter, smaller_waves
from souffle.decision import Decision
from souffle.errors import OptionError
from souffle.kernel import cuda_target, lowering_problem
from souffle.partition import PLANNERS, PartitionRequest, one_kernel_per_stage, planner_for
from souffle.program import Loop, TEProgram
from souffle.schedule.drafts import cached_scheduler
from souffle.schedule.form import JoinPolicy, form_stages
from souffle.schedule.gpu.answer import gpu_scheduler
from souffle.schedule.gpu.device import device_for
from souffle.schedule.stage import LoopStage, flat_stages
from souffle.transform import horizontal, mixed_precision, roll, vertical

__all__ = ["LEVELS", "Level", "check_options", "compile_cuda", "compile_host", "transform_program"]


@dataclass(frozen=True)
class Level:
    """What an optimization level does (paper, Table 4). Each adds one thing to the last.

    Attributes
    ----------
    name : str
    horizontal : bool
        Independent isomorphic TEs become one (§6.1).
    vertical : bool
        One-relies-on-one chains become one, and join their neighbours' stages across operators (§6.2).
    merge : bool
        One kernel per subprogram, with grid syncs (§5.4, §6.4); repeated layers and steps are loops in it.
    reuse : bool
        Tensors stay on chip across operators, weights are loaded ahead of barriers (§6.5).
    summary : str
    """

    name: str
    horizontal: bool
    vertical: bool
    merge: bool
    reuse: bool
    summary: str


LEVELS = {
    level.name: level
    for level in (
        Level("V0", False, False, False, False, "TVM's operator fusion, one kernel for each fused operator"),
        Level("V1", True, False, False, False, "V0 + horizontal transformation of independent TEs"),
        Level("V2", True, True, False, False, "V1 + vertical transformation of one-relies-on-one TEs"),
        Level("V3", True, True, True, False, "V2 + one kernel per subprogram, with grid-wide barriers and loops"),
        Level("V4", True, True, True, True, "V3 + on-chip tensor reuse and loads ahead of barriers"),
    )
}

PRECISIONS = ("fp32", "mixed")

Hook = Callable[[str, object], object]
"""Called between stages with the stage's name and its result; what it returns replaces the result."""


def _keep(stage: str, result: object) -> object:
    return result


def transform_program(
    program: TEProgram, level: Level, precision: str, hook: Hook = _keep
) -> tuple[TEProgram, tuple[Decision, ...]]:
    """The TE-level part of a level: precision, horizontal, vertical."""
    if precision == "mixed" and any(isinstance(item, Loop) for item in program.tes):
        raise OptionError("precision='mixed' does not reach into loops; give the program before transform.roll")
    decisions: list[Decision] = []
    passes = [("precision", mixed_precision, precision == "mixed")]
    passes += [("horizontal", horizontal, level.horizontal), ("vertical", vertical, level.vertical)]
    for name, transformation, wanted in passes:
        if wanted:
            program, made = transformation(program)
            decisions.extend(made)
        program = hook(name, program)
    return program, tuple(decisions)


def compile_cuda(
    program: TEProgram,
    *,
    level: str = "V4",
    arch: str = "sm_90",
    precision: str = "fp32",
    partition: str = "souffle",
    cubin: bool = True,
    cache_dir: Path | None = None,
    progress: Callable[[str], None] = lambda message: None,
    hook: Hook = _keep,
) -> CompiledKernels:
    """Compile a TE program to CUDA kernels.

    Parameters
    ----------
    program : TEProgram
        From the frontend, or built by hand.
    level, arch, precision, partition : str
        See :func:`souffle.compile`.
    cubin : bool
        Whether to run nvcc. Without, the result has CUDA text only, enough for the CPU device.
    cache_dir : Path, optional
        Where cubins are kept by their text's hash.
    progress : callable, optional
        Told in a few words what is being done.
    hook : callable, optional
        Called between stages, see ``docs/debugging.md``.

    Raises
    ------
    OptionError
        If an option is not valid.
    """
    chosen = check_options(level, precision, partition, arch)
    device, target = device_for(arch), cuda_target(arch)
    program = hook("frontend", program)
    progress("transforming")
    program, decided = transform_program(program, chosen, precision, hook)
    scheduler = cached_scheduler(gpu_scheduler(device, lambda schedule: lowering_problem(schedule, target)))
    policy = JoinPolicy(across_operators=chosen.vertical, rowwise_across_operators=chosen.reuse)
    planner = planner_for(partition)
    meter = StageMeter(arch, target, measure=cubin and chosen.merge and planner.measures, cache_dir=cache_dir)
    unwanted: dict[str, str] = {}
    while True:
        rolled, loops = roll(program, unwanted) if chosen.merge else (program, ())
        rolled = hook("roll", rolled)
        analysis = hook("analysis", analyze(rolled.expanded()))
        progress(f"scheduling {len(rolled.tes)} TEs")
        stages, joined = form_stages(rolled, analysis, scheduler, policy)
        stages = hook("schedule", stages)
        progress(f"lowering {len(stages)} stages")
        functions, names = lower_stages(flat_stages(stages), target)
        resources = meter.measure(flat_stages(stages), functions)
        request = PartitionRequest(stages, device, resources, analysis)
        # A loop that the planner would cut is taken apart: each of its kernels ends and begins as in one step.
        beyond = planner.loops_to_take_apart(request) if chosen.merge else {}
        if beyond.keys() <= unwanted.keys():
            break
        unwanted |= beyond
    program = analysis.program
    # A loop that the program was given with stays one.
    whole = {unit.name for unit in stages if isinstance(unit, LoopStage)}
    unrolled = [Decision("roll", name, False, reason) for name, reason in unwanted.items() if name not in whole]
    decided = (*decided, *loops, *unrolled)
    subprograms, cuts = hook("partition", planner.plan(request) if chosen.merge else one_kernel_per_stage(stages))
    progress(f"merging into {len(subprograms)} kernels")
    options = Options(level, precision, partition, arch, chosen.reuse, cubin, cache_dir)
    decisions = (*decided, *joined, *cuts)
    compiled = assemble(
        program, analysis, subprograms, functions, names, decisions, options, target, progress, partial(hook, "text")
    )
    smaller = smaller_waves(compiled.plan, subprograms, request) if chosen.merge and planner.measures else ()
    late = tuple((d.stage, d.subject, d.accepted, d.reason) for d in smaller)
    return replace(compiled, plan=replace(compiled.plan, decisions=(*compiled.plan.decisions, *late)))


def compile_host(
    program: TEProgram,
    *,
    level: str = "V4",
    precision: str = "fp32",
    progress: Callable[[str], None] = lambda message: None,
    hook: Hook = _keep,
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
    stages, joined = form_stages(program, analysis, host_scheduler, policy)
    stages = hook("schedule", stages)
    program = analysis.program
    return assemble_host(program, analysis, stages, (*decided, *joined), level, precision, progress)


def check_options(level: str, precision: str, partition: str = "souffle", arch: str | None = None) -> Level:
    """The level asked for.

    Raises
    ------
    OptionError
        If an option is not valid, naming those that are.
    """
    for name, value, allowed in (
        ("level", level, tuple(LEVELS)),
        ("precision", precision, PRECISIONS),
        ("partition", partition, tuple(PLANNERS)),
    ):
        if value not in allowed:
            raise OptionError(f"{name}={value!r} is not valid; choose one of {', '.join(allowed)}")
    if arch is not None:
        device_for(arch)
    return LEVELS[level]
