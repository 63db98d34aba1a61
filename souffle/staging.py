"""From a transformed program to its stages and kernels: what is tried, at which level, and what of it is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import tvm

from souffle.analysis import Analysis, analyze
from souffle.choice import (
    JoinTrials,
    KernelPrices,
    KernelSchedules,
    PatternKernels,
    StationaryWeights,
    Trial,
    accepted,
    choose_kernels,
    ways_taken,
    with_parts,
)
from souffle.codegen.stage_meter import StageMeter
from souffle.cost import KernelForecast
from souffle.cost.device import device_of_arch
from souffle.cost.kernel import RELATIVE_ERROR, Figures, forecast_on
from souffle.cost.stage_price import price_on
from souffle.decision import Decision
from souffle.kernel.dependences import TileDependences
from souffle.options import LEVELS, SOUFFLE, Hook, Options, Progress, keep
from souffle.partition import ONE_KERNEL_PER_STAGE, Partition, PartitionRequest, planner_for
from souffle.placement import place_reductions, reduce_in_tiles
from souffle.program import Loop, TEProgram
from souffle.schedule.arrangement import Arrangements
from souffle.schedule.form_stages import JoinPolicy, form_stages
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.log import open_log
from souffle.schedule.lower.stages import lower_stages
from souffle.schedule.stage import LoopStage, Stage, Stages, Unit, flat_stages, map_stages
from souffle.schedule.tuned import KnownSchedule, TunedAnswers, known_schedules, tuned_stages
from souffle.stitching.fusion import fusion_of
from souffle.transform import absorb_ramps, roll, spread_reads

__all__ = ["Staged", "stage_program", "staged_ways"]


@dataclass(frozen=True, eq=False)
class Staged:
    """A program as far as its stages are known, each scheduled and lowered, and where its kernels end.

    ``request`` is what the planner looked at: the stages, the analysis of the transformed program, and the forecast.
    ``seconds`` is what the kernels are predicted to take, where they were chosen by it. ``on_chip`` are those of
    :data:`souffle.options.ON_CHIP` that the kernels may have.
    """

    target: tvm.target.Target
    request: PartitionRequest
    partition: Partition
    decisions: tuple[Decision, ...]
    dependences: TileDependences
    seconds: float = 0.0
    on_chip: frozenset[str] = frozenset()


def stage_program(
    program: TEProgram, decided: tuple[Decision, ...], options: Options, progress: Progress, hook: Hook
) -> Staged:
    """The stages and kernels of a transformed program, with those of its reductions placed elsewhere that pay.

    Parameters
    ----------
    program : TEProgram
    decided : tuple of Decision
        What its transformation decided.
    options : Options
    progress, hook
        See :func:`souffle.pipeline.compile_cuda`.
    """
    given = _Given(options, progress, hook)
    ways = given.ways(program, decided)
    found = {done: given.staged(*way) for done, way in ways.items()}
    seconds = {done: one.seconds for done, (_, one) in found.items()}
    best = min(seconds, key=seconds.__getitem__)
    # What a hook has seen last is what is compiled.
    staging, last = found[best] if best == list(found)[-1] or hook is keep else given.staged(*ways[best])
    return staging.with_schedules_of_kernels(replace(last, decisions=(*last.decisions, *ways_taken(seconds))))


def staged_ways(
    program: TEProgram, decided: tuple[Decision, ...], options: Options, progress: Progress
) -> tuple[Staged, ...]:
    """The ways to stages and kernels of which one may be the fastest when other schedules are known, the best first.

    Parameters
    ----------
    program, decided, options, progress
        See :func:`stage_program`.
    """
    given = _Given(options, progress, keep)
    found = sorted(
        (given.staged(*way)[1] for way in given.ways(program, decided).values()), key=lambda staged: staged.seconds
    )
    return tuple(staged for staged in found if staged.seconds <= RELATIVE_ERROR * found[0].seconds)


_Ways = dict[tuple[Decision, ...], tuple[TEProgram, tuple[Decision, ...]]]
"""For each way, by what was done, its program and all that was decided."""


class _Given:
    """What all ways of a program have in common: most stages of one are those of another, with the same schedules."""

    def __init__(self, options: Options, progress: Progress, hook: Hook) -> None:
        self.options, self.progress, self.hook = options, progress, hook
        self.described = device_of_arch(options.arch)
        self.price = price_on(self.described)
        self.scheduler = GpuScheduler(device_for(options.arch), self.price)
        self.logs = open_log(options.tuning_log, options.arch)
        self.dependences = TileDependences()

    def ways(self, program: TEProgram, decided: tuple[Decision, ...]) -> _Ways:
        """Where its reductions may be computed; the first way is that of the level below."""
        options, described, scheduler = self.options, self.described, self.scheduler
        # Where reductions are computed belongs to Souffle's own way to form stages; patterns have them as they are.
        if not (LEVELS[options.level].merge and options.reductions == "ordered" and options.fusion == SOUFFLE):
            return {(): (program, decided)}
        tuned = None
        if self.logs and self.price is not None:
            tuned = TunedAnswers(self.logs, device_for(options.arch), self.price)
        # As at V3, and with what is placed on chip, which may be the same.
        place = partial(place_reductions, device=described, scheduler=scheduler, tuned=tuned)
        both = tuple(dict.fromkeys((frozenset[str](), options.on_chip)))
        placements = [place(program, on_chip=on_chip) for on_chip in both]
        ways = {accepted(placed): (made, (*decided, *placed)) for several in placements for made, placed in several}
        made, placed = placements[-1][0]
        if "channels" in options.on_chip:
            parted, apart = reduce_in_tiles(made, described, scheduler)
            ways[accepted((*placed, *apart))] = (parted, (*decided, *placed, *apart))
        if "ramps" in options.on_chip:
            spread, apart = spread_reads(program)
            whole, absorbed = absorb_ramps(spread)
            for on_chip in both if whole is not program else ():
                for own, there in place(whole, on_chip=on_chip):
                    ways[accepted((*apart, *absorbed, *there))] = (own, (*decided, *apart, *absorbed, *there))
            # What is placed reads at multiples too: sums beside each other are of the rows that single steps read.
            spread, apart = spread_reads(made)
            if spread is not made:
                ways[accepted((*apart, *placed))] = (spread, (*decided, *apart, *placed))
            ways = {done: (made, (*before, *_refused(absorbed))) for done, (made, before) in ways.items()}
        return ways

    def staged(self, program: TEProgram, decided: tuple[Decision, ...]) -> tuple[_Staging, Staged]:
        """One way as far as its kernels."""
        staging = _Staging(self, self.hook("two_phase", program), decided)
        return staging, staging.best()


def _refused(decisions: Iterable[Decision]) -> tuple[Decision, ...]:
    return tuple(decision for decision in decisions if not decision.accepted)


class _Staging:
    """Makes the stages of a transformed program, with as many of its repetitions rolled into loops as is best."""

    def __init__(self, given: _Given, program: TEProgram, decided: tuple[Decision, ...]) -> None:
        self.program, self.decided, options, scheduler = program, decided, given.options, given.scheduler
        self.options, self.scheduler, self.progress, self.hook = options, scheduler, given.progress, given.hook
        self.logs, self.dependences = given.logs, given.dependences
        self.level, self.device = LEVELS[options.level], device_for(options.arch)
        self.fusion = fusion_of(options)
        self.on_chip = options.on_chip if self.fusion is None else self.fusion.on_chip
        self.planner = planner_for(options.partition) if self.level.merge else ONE_KERNEL_PER_STAGE
        measure = options.cubin and self.planner.measures
        self.meter = StageMeter(options.arch, scheduler.target, measure=measure, cache_dir=options.cache_dir)
        several = (one for log in self.logs for one in log.arrangements)
        self.arrangements = Arrangements(several, self.device.name)
        self.own: dict[str, Stage] = {}
        self.figures = Figures()
        self.given = frozenset(item.name for item in program.tes if isinstance(item, Loop))

    def best(self) -> Staged:
        """Of what was tried, what is predicted to take least; what no cost model knows is tried once.

        A loop that the planner would cut is taken apart: each of its kernels ends and begins as in one step.
        """
        waiting: list[dict[str, str]] = [{}]
        whole: list[tuple[Staged, dict[str, str]]] = []
        for unrolled in waiting:
            staged, wanted = self.tried(unrolled)
            if staged.partition.unroll.keys() <= unrolled.keys():
                whole.append((staged, unrolled))
            if not wanted.keys() <= unrolled.keys():
                waiting.append(unrolled | wanted)
        best, unrolled = min(whole, key=lambda one: one[0].seconds)
        # What a hook has seen last is what is compiled.
        return best if best is whole[-1][0] else self.tried(unrolled)[0]

    def tried(self, unrolled: Mapping[str, str]) -> tuple[Staged, Mapping[str, str]]:
        """The stages and kernels with some loops taken apart, and which others may be worth it."""
        level, hook = self.level, self.hook
        rolled, loops = roll(self.program, unrolled) if level.merge else (self.program, ())
        rolled = hook("roll", rolled)
        policy, planned = JoinPolicy(level.vertical, self.on_chip), ()
        if self.fusion is not None:
            self.progress(f"planning {len(rolled.tes)} TEs")
            patterns = hook("fusion", self.fusion.patterned(rolled))
            rolled, planned, policy = patterns.program, patterns.decisions, self.fusion.policy(patterns)
            if not level.merge:
                self.planner = PatternKernels(patterns.pattern_of, self.dependences)
        analysis = hook("analysis", analyze(rolled.expanded()))
        self.progress(f"scheduling {len(rolled.tes)} TEs")
        stages, joined = form_stages(rolled, analysis, self.scheduler, policy)
        stages, chosen = self.with_joins_that_pay(stages, analysis)
        stages = hook("schedule", Stages(stages))
        self.own |= {stage.draft.digest: stage for stage in flat_stages(stages)}
        stages, tuned = self.tuned(stages, analysis)
        self.progress(f"lowering {len(stages)} stages")
        stages = hook("lower", Stages(self.meter.measured(lower_stages(stages, self.scheduler.target))))
        predicted = self.predicted(analysis)
        forecast = predicted(stages)
        request = PartitionRequest(stages, self.device, analysis, forecast, self.arrangements)
        if level.reuse and forecast is not None:
            prices = self.prices(analysis)
            kernels = choose_kernels(self.planner, request, forecast, prices, self.given)
            partition, seconds, wanted = kernels.partition, kernels.seconds, kernels.worth_unrolling
            if "weights" in self.on_chip:
                weights = StationaryWeights(self.scheduler, prices, predicted, self.meter.measured)
                best = weights.best(Trial(request, partition, seconds))
                request, partition, seconds = best.request, best.partition, best.seconds
                chosen = (*chosen, *weights.decisions)
        else:
            partition, seconds = self.planner.plan(request), 0.0
            wanted = partition.unroll
        # A loop that the program was given with stays one.
        kept = {unit.name for unit in stages if isinstance(unit, LoopStage)}
        apart = [Decision("roll", name, False, reason) for name, reason in unrolled.items() if name not in kept]
        decisions = (*self.decided, *loops, *apart, *planned, *joined, *chosen, *tuned)
        staged = Staged(self.scheduler.target, request, partition, decisions, self.dependences, seconds, self.on_chip)
        return staged, wanted

    def with_joins_that_pay(
        self, stages: tuple[Unit, ...], analysis: Analysis
    ) -> tuple[tuple[Unit, ...], tuple[Decision, ...]]:
        """The stages with those joins that make the network faster."""
        every = with_parts(stages)
        if device_of_arch(self.options.arch) is None or len(flat_stages(every)) == len(flat_stages(stages)):
            return stages, ()
        ready = self.meter.measured(lower_stages(self.tuned(every, analysis)[0], self.scheduler.target))
        forecast, prices = self.predicted(analysis)(ready), self.prices(analysis)
        lowered = dict(zip(flat_stages(every), flat_stages(ready), strict=True))

        def predicted(units: Sequence[Unit], *, undo: bool) -> float:
            stages = map_stages(units, lowered.__getitem__)
            request = PartitionRequest(stages, self.device, analysis, forecast, self.arrangements)
            if not self.level.reuse:
                return prices.partition(self.planner.plan(request), request, forecast)
            return choose_kernels(self.planner, request, forecast, prices, self.given, undo=undo).seconds

        # From what is best with the planner's cuts, so that to undo them can only gain.
        cut = JoinTrials(analysis.program, stages, partial(predicted, undo=False)).found
        return JoinTrials(analysis.program, stages, partial(predicted, undo=True), cut.apart).best()

    def predicted(self, analysis: Analysis) -> Callable[[Sequence[Unit]], KernelForecast]:
        """What is predicted of stages of a program."""
        how = {"graph": self.options.graph, "ahead": self.level.reuse, "figures": self.figures}
        return partial(forecast_on, self.options.arch, analysis.program, **how)

    def prices(self, analysis: Analysis) -> KernelPrices:
        """What kernels of a program take."""
        return KernelPrices(analysis.program.constants, self.dependences, self.options.waiting)

    def with_schedules_of_kernels(self, staged: Staged) -> Staged:
        """Some stages with another of the schedules that logs hold, where the network is faster so."""
        request = staged.request
        if not self.logs or not self.level.reuse or request.forecast is None:
            return staged

        def known(stage: Stage) -> Sequence[KnownSchedule]:
            return known_schedules(stage, self.own[stage.draft.digest], self.logs, self.device)

        self.progress("trying schedules of logs in their kernels")
        prices, predicted = self.prices(request.analysis), self.predicted(request.analysis)
        schedules = KernelSchedules(known, prices, predicted, self.meter.measured)
        best = schedules.best(Trial(request, staged.partition, staged.seconds))
        decisions = (*staged.decisions, *schedules.decisions)
        return replace(
            staged, request=best.request, partition=best.partition, seconds=best.seconds, decisions=decisions
        )

    def tuned(self, stages: Sequence[Unit], analysis: Analysis) -> tuple[Sequence[Unit], tuple[Decision, ...]]:
        """The stages with the schedules that a log has for them."""
        if self.options.tuning_log is None:
            return stages, ()
        price = price_on(device_of_arch(self.options.arch), alone=not self.level.merge)
        return tuned_stages(stages, analysis, self.logs, self.device, merged=self.level.merge, price=price)
