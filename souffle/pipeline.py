"""The whole compiler on one page: ONNX model → TE program → transformed → stages → subprograms → kernels → plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import tvm

from souffle.analysis import Analysis, analyze
from souffle.choice import JoinTrials, KernelPrices, accepted, choose_kernels, ways_taken, with_parts
from souffle.codegen.assemble import CompiledKernels, assemble
from souffle.codegen.forecast import with_predictions
from souffle.codegen.llvm import HostScheduler, assemble_host
from souffle.codegen.plan import Plan
from souffle.codegen.stage_meter import StageMeter, smaller_waves
from souffle.cost.device import device_of_arch
from souffle.cost.kernel import forecast_on
from souffle.cost.stage_price import price_on
from souffle.decision import Decision
from souffle.errors import OptionError
from souffle.kernel.dependences import TileDependences
from souffle.kernel.merged_program import merge_program
from souffle.kernel.resident import keep_on_chip
from souffle.options import LEVELS, Hook, Level, Options, keep, quiet
from souffle.partition import ONE_KERNEL_PER_STAGE, Partition, PartitionRequest, planner_for
from souffle.placement import place_reductions, reduce_in_tiles
from souffle.program import Loop, TEProgram
from souffle.schedule.form_stages import JoinPolicy, form_stages
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.log import TuningLog, open_log
from souffle.schedule.lower.stages import lower_stages
from souffle.schedule.stage import LoopStage, Stages, Unit, flat_stages, map_stages
from souffle.schedule.tuned import TunedAnswers, tuned_stages
from souffle.transform import horizontal, mixed_precision, narrow, roll, vertical
from souffle.verify.certified_step import certified

__all__ = ["LEVELS", "check_names", "compile_cuda", "compile_host", "stages_of", "transform_program"]

Progress = Callable[[str], None]


def check_names(options: Options) -> None:
    """Look up what the options name: a device and a planner.

    Raises
    ------
    OptionError
        If there is none of that name, listing those that there are.
    """
    device_for(options.arch)
    planner_for(options.partition)


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
    staged = _staged(program, options, progress, hook)
    request, partition = keep_on_chip(staged.request, hook("partition", staged.partition), options, staged.dependences)
    progress(f"merging into {len(partition.subprograms)} kernels")
    merged = hook("merge", merge_program(request, partition, options, staged.dependences))
    decisions = (*staged.decisions, *partition.decisions)
    compiled = assemble(merged, request, decisions, options, staged.target, progress, partial(hook, "text"))
    plan = with_predictions(compiled.plan, partition.subprograms, request.forecast)
    smaller = smaller_waves(plan, partition.subprograms, request)
    compiled = replace(compiled, plan=replace(plan, decisions=(*plan.decisions, *smaller)))
    return certified(compiled, options.verify, progress)


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


def transform_program(
    program: TEProgram, level: Level, precision: str, hook: Hook = keep
) -> tuple[TEProgram, tuple[Decision, ...]]:
    """The TE-level part of a level: precision, horizontal, vertical, then the types in which tensors are stored."""
    if precision == "mixed" and any(isinstance(item, Loop) for item in program.tes):
        raise OptionError("precision='mixed' does not reach into loops; give the program before transform.roll")
    decisions: list[Decision] = []
    for name, transformation, wanted in (
        ("precision", mixed_precision, precision == "mixed"),
        ("horizontal", horizontal, level.horizontal),
        ("vertical", vertical, level.vertical),
        ("narrow", partial(narrow, alike=level.merge), precision == "mixed" and level.vertical),
    ):
        if wanted:
            program, made = transformation(program)
            decisions.extend(made)
        program = hook(name, program)
    return program, tuple(decisions)


@dataclass(frozen=True, eq=False)
class _Staged:
    """A program as far as its stages are known, each scheduled and lowered, and where its kernels end.

    ``request`` is what the planner looked at: the stages, the analysis of the transformed program, and the forecast.
    ``seconds`` is what the kernels are predicted to take, where they were chosen by it.
    """

    target: tvm.target.Target
    request: PartitionRequest
    partition: Partition
    decisions: tuple[Decision, ...]
    dependences: TileDependences
    seconds: float = 0.0


def _staged(program: TEProgram, options: Options, progress: Progress, hook: Hook) -> _Staged:
    """Transform a program; schedule, lower and partition its stages, again while a loop has to be taken apart."""
    level, device, described = LEVELS[options.level], device_for(options.arch), device_of_arch(options.arch)
    program = hook("frontend", program)
    progress("transforming")
    program, decided = transform_program(program, level, options.precision, hook)
    price = price_on(described)
    scheduler = GpuScheduler(device, price)
    logs = open_log(options.tuning_log, options.arch)
    ways = {(): (program, decided)}
    if level.merge and options.reductions == "ordered":
        tuned = TunedAnswers(logs, device, price) if logs and price is not None else None
        # As at V3, and with what is placed on chip, which may be the same.
        place = partial(place_reductions, program, described, scheduler, tuned=tuned)
        placements = [place(on_chip) for on_chip in dict.fromkeys((frozenset[str](), options.on_chip))]
        ways = {accepted(placed): (made, (*decided, *placed)) for made, placed in placements}
        if "channels" in options.on_chip:
            made, before = ways[accepted(placements[-1][1])]
            parted, placed = reduce_in_tiles(made, described, scheduler)
            ways[accepted((*placements[-1][1], *placed))] = (parted, (*before, *placed))

    def staged(program: TEProgram, decided: tuple[Decision, ...]) -> _Staged:
        return _Staging(hook("two_phase", program), decided, options, scheduler, logs, progress, hook).best()

    found = {done: staged(*way) for done, way in ways.items()}
    best = min(found, key=lambda done: found[done].seconds)
    # What a hook has seen last is what is compiled.
    last = found[best] if best == list(found)[-1] or hook is keep else staged(*ways[best])
    return replace(last, decisions=(*last.decisions, *ways_taken({done: one.seconds for done, one in found.items()})))


class _Staging:
    """Makes the stages of a transformed program, with as many of its repetitions rolled into loops as is best."""

    def __init__(
        self,
        program: TEProgram,
        decided: tuple[Decision, ...],
        options: Options,
        scheduler: GpuScheduler,
        logs: Sequence[TuningLog],
        progress: Progress,
        hook: Hook,
    ) -> None:
        self.program, self.decided, self.options, self.scheduler = program, decided, options, scheduler
        self.logs, self.progress, self.hook = logs, progress, hook
        self.level, self.device = LEVELS[options.level], device_for(options.arch)
        self.planner = planner_for(options.partition) if self.level.merge else ONE_KERNEL_PER_STAGE
        measure = options.cubin and self.planner.measures
        self.meter = StageMeter(options.arch, scheduler.target, measure=measure, cache_dir=options.cache_dir)
        self.dependences = TileDependences()
        self.given = frozenset(item.name for item in program.tes if isinstance(item, Loop))

    def best(self) -> _Staged:
        """Of what was tried, what is predicted to take least; what no cost model knows is tried once.

        A loop that the planner would cut is taken apart: each of its kernels ends and begins as in one step.
        """
        waiting: list[dict[str, str]] = [{}]
        whole: list[tuple[_Staged, dict[str, str]]] = []
        for unrolled in waiting:
            staged, wanted = self.tried(unrolled)
            if staged.partition.unroll.keys() <= unrolled.keys():
                whole.append((staged, unrolled))
            if not wanted.keys() <= unrolled.keys():
                waiting.append(unrolled | wanted)
        best, unrolled = min(whole, key=lambda one: one[0].seconds)
        # What a hook has seen last is what is compiled.
        return best if best is whole[-1][0] else self.tried(unrolled)[0]

    def tried(self, unrolled: Mapping[str, str]) -> tuple[_Staged, Mapping[str, str]]:
        """The stages and kernels with some loops taken apart, and which others may be worth it."""
        level, options, hook = self.level, self.options, self.hook
        rolled, loops = roll(self.program, unrolled) if level.merge else (self.program, ())
        rolled = hook("roll", rolled)
        analysis = hook("analysis", analyze(rolled.expanded()))
        self.progress(f"scheduling {len(rolled.tes)} TEs")
        stages, joined = form_stages(rolled, analysis, self.scheduler, JoinPolicy(level.vertical, options.on_chip))
        stages, chosen = self.with_joins_that_pay(stages, analysis)
        stages = hook("schedule", Stages(stages))
        stages, tuned = self.tuned(stages, analysis)
        self.progress(f"lowering {len(stages)} stages")
        stages = hook("lower", Stages(self.meter.measured(lower_stages(stages, self.scheduler.target))))
        forecast = forecast_on(options.arch, analysis.program, stages, graph=options.graph)
        request = PartitionRequest(stages, self.device, analysis, forecast)
        if level.reuse and forecast is not None:
            prices = KernelPrices(analysis.program.constants, self.dependences)
            kernels = choose_kernels(self.planner, request, forecast, prices, self.given)
            partition, seconds, wanted = kernels.partition, kernels.seconds, kernels.worth_unrolling
        else:
            partition, seconds = self.planner.plan(request), 0.0
            wanted = partition.unroll
        # A loop that the program was given with stays one.
        kept = {unit.name for unit in stages if isinstance(unit, LoopStage)}
        apart = [Decision("roll", name, False, reason) for name, reason in unrolled.items() if name not in kept]
        decisions = (*self.decided, *loops, *apart, *joined, *chosen, *tuned)
        staged = _Staged(self.scheduler.target, request, partition, decisions, self.dependences, seconds)
        return staged, wanted

    def with_joins_that_pay(
        self, stages: tuple[Unit, ...], analysis: Analysis
    ) -> tuple[tuple[Unit, ...], tuple[Decision, ...]]:
        """The stages with those joins that make the network faster."""
        every = with_parts(stages)
        if device_of_arch(self.options.arch) is None or len(flat_stages(every)) == len(flat_stages(stages)):
            return stages, ()
        ready = self.meter.measured(lower_stages(self.tuned(every, analysis)[0], self.scheduler.target))
        forecast = forecast_on(self.options.arch, analysis.program, ready, graph=self.options.graph)
        prices = KernelPrices(analysis.program.constants, self.dependences)
        lowered = dict(zip(flat_stages(every), flat_stages(ready), strict=True))

        def predicted(units: Sequence[Unit], *, undo: bool) -> float:
            request = PartitionRequest(map_stages(units, lowered.__getitem__), self.device, analysis, forecast)
            return choose_kernels(self.planner, request, forecast, prices, self.given, undo=undo).seconds

        # From what is best with the planner's cuts, so that to undo them can only gain.
        cut = JoinTrials(analysis.program, stages, partial(predicted, undo=False)).found
        return JoinTrials(analysis.program, stages, partial(predicted, undo=True), cut.apart).best()

    def tuned(self, stages: Sequence[Unit], analysis: Analysis) -> tuple[Sequence[Unit], tuple[Decision, ...]]:
        """The stages with the schedules that a log has for them."""
        if self.options.tuning_log is None:
            return stages, ()
        price = price_on(device_of_arch(self.options.arch))
        return tuned_stages(stages, analysis, self.logs, self.device, merged=self.level.merge, price=price)


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
    program, decided = transform_program(program, level, options.precision, hook)
    analysis = hook("analysis", analyze(program.expanded()))
    policy = JoinPolicy(across_operators=level.vertical)
    stages, joined = form_stages(program, analysis, HostScheduler(), policy)
    stages = hook("schedule", Stages(stages))
    return assemble_host(analysis.program, analysis, stages, (*decided, *joined), options, progress)
