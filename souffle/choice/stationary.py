"""Constants that stay in a block for all steps of a loop: which stages keep theirs, where, and in which tiles.

::

    for s in 0 .. n-1:                       kept = what W holds for the block's tile
      h = f(W · h)                     →     for s in 0 .. n-1:
      wait for all blocks                      h = f(kept · h)
                                               wait for all blocks

A stage of a loop reads the same constants in each step, and where each of its tiles has a block of its own, a block
reads the same ones in each. How a function is parted says :mod:`souffle.schedule.lower.kept_loads`. Tiles as they are
may be too many or hold too much; sums have some that are made for it (``schedule/gpu/rules/stationary_sums.py``). What
is kept takes registers or shared memory from every stage of the loop, and so blocks from the kernel, which is priced as
a whole. Registers cost nothing to read; what does not pay there may still be read faster from shared memory than from
the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from souffle.choice.prices import KernelPrices, runs_of
from souffle.choice.trial import Trial, exchanged, pays, same_kernel
from souffle.cost import KernelForecast
from souffle.cost.predict import registers_with_constants
from souffle.decision import Decision, Refused, TooMany
from souffle.schedule.gpu.rules.stationary_sums import stationary_schedules
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.lower import DeviceFunction, KeptLoads, LoweringError, keep_loads, lower_stage
from souffle.schedule.lower.kept_arrays import SCOPES
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import LoopStage, Stage, Unit, flat_stages, map_stages

__all__ = ["StationaryWeights"]

_PRICED = 3
"""Tilings of a stage for which the whole kernel is priced, those of the fastest runs."""

_LEAST_BYTES = 1 << 12
"""Of the constants of a stage: less is in the L1 cache in any case."""

_SMALL = 64
"""So much less than the largest constant of a stage is a small one."""


@dataclass(eq=False)
class _Pass:
    """The stages of all loops, decided one after the other.

    Attributes
    ----------
    trial : Trial
        What it has come to.
    most_tiles : int or None
        More no stage may have that keeps its constants.
    together : bool
        Whether each stage keeps its constants that can, whatever the network takes until all do.
    decisions : list of Decision
    lacks_room : bool
        Whether something is not kept that other tiles of what is kept might leave room for.
    left : bool
        Whether something is not kept that could be.
    """

    trial: Trial
    most_tiles: int | None = None
    together: bool = False
    decisions: list[Decision] = field(default_factory=list)
    lacks_room: bool = False
    left: bool = False


class StationaryWeights:
    """Tries which stages of loops keep their constants.

    Parameters
    ----------
    scheduler : GpuScheduler
    prices : KernelPrices
    forecast : callable
        What is predicted of stages; each with what it asks for.
    measured : callable
        Stages with what they ask for, as :meth:`souffle.codegen.stage_meter.StageMeter.measured` gives them.
    """

    def __init__(
        self,
        scheduler: GpuScheduler,
        prices: KernelPrices,
        forecast: Callable[[Sequence[Unit]], KernelForecast],
        measured: Callable[[Sequence[Unit]], tuple[Unit, ...]],
    ) -> None:
        self.scheduler, self.prices, self.forecast, self.measured = scheduler, prices, forecast, measured
        self.decisions: list[Decision] = []
        self._made: dict[str, tuple[DeviceFunction | Refused, ...]] = {}
        self._kept_loads: dict[tuple[DeviceFunction, tuple[int, ...], str], KeptLoads | Refused] = {}
        self._names: dict[str, int] = {}

    def best(self, trial: Trial) -> Trial:
        """The network with as many stages that keep their constants as make it faster."""
        passes = [self._greedily(_Pass(trial))]
        if passes[0].lacks_room:
            # Tiles that are fast for one stage may leave no room for the next: of one for each multiprocessor all may.
            passes.append(self._greedily(_Pass(trial, trial.request.device.sm_count)))
        found = min(passes, key=lambda one: one.trial.seconds)
        if found.left:
            # What is lost where one stage does it, such as others beside it, may be lost once for all of them.
            every = self._greedily(_Pass(trial, together=True))
            if pays(every.trial, found.trial):
                all_, some = _us(every.trial.seconds), _us(found.trial.seconds)
                reason = f"the network is predicted to take {all_} so, {some} with those alone that pay one by one"
                found = every
                found.decisions.append(Decision("weights", "all stages that can", True, reason))
        best = found.trial
        self.decisions += found.decisions
        for unit in (unit for sub in best.partition.subprograms for unit in sub.stages if isinstance(unit, LoopStage)):
            self._in_all(best, unit)
        return best

    def _greedily(self, run: _Pass) -> _Pass:
        """The stages with most constants first, each as is best then."""
        for subprogram in run.trial.partition.subprograms:
            for unit in subprogram.stages:
                if isinstance(unit, LoopStage):
                    for number in sorted(range(len(unit.stages)), key=lambda n: -self._bytes(run.trial, unit, n)):
                        self._kept(run, unit.name, number)
        return run

    def _in_all(self, trial: Trial, unit: LoopStage) -> None:
        """Say how much of the constants that each step of a loop reads stays."""
        read = {stage.inputs[n]: None for stage in unit.stages for n in _constants(trial, unit, stage)}
        left = {
            stage.inputs[n]
            for stage in unit.stages
            for n in _constants(trial, unit, stage)
            if stage.kept is None or n not in stage.kept.reads
        }
        whole, kept = sum(one.nbytes for one in read), sum(one.nbytes for one in read if one not in left)
        if whole:
            reason = f"of {whole} bytes of constants that each of its {unit.loop.steps} steps reads {kept} stay"
            self.decisions.append(Decision("weights", unit.name, kept > 0, reason))

    def _bytes(self, trial: Trial, unit: LoopStage, number: int) -> int:
        stage = unit.stages[number]
        return sum(stage.inputs[n].nbytes for n in _constants(trial, unit, stage))

    def _kept(self, run: _Pass, loop: str, number: int) -> None:
        """Let a stage of a loop keep its constants, if that is faster."""
        made, reasons = None, []
        for scope in SCOPES:
            made, reason = self._kept_in(run, loop, number, scope)
            reasons += [reason] if reason and reason not in reasons else []
            if made is not None:
                break
        stage = self._found(run.trial, loop)[1].stages[number]
        told = reasons[-1] if made is not None else "; ".join(reasons)
        run.decisions += [Decision("weights", stage.name, made is not None, told)] if told else []
        run.trial = made or run.trial

    def _found(self, trial: Trial, loop: str) -> tuple[int, LoopStage]:
        """A loop with the number of its kernel."""
        return next(
            (kernel, unit)
            for kernel, sub in enumerate(trial.partition.subprograms)
            for unit in sub.stages
            if unit.name == loop
        )

    def _kept_in(self, run: _Pass, loop: str, number: int, scope: str) -> tuple[Trial | None, str]:
        """The network with a stage of a loop that keeps its constants in some memory, if that is faster; and why."""
        trial = run.trial
        kernel, unit = self._found(trial, loop)
        stage = unit.stages[number]
        nbytes = self._bytes(trial, unit, number)
        if nbytes < _LEAST_BYTES:
            return None, f"its {nbytes} bytes of constants are in the L1 cache in any case" if nbytes else ""
        found: list[tuple[float, Stage]] = []
        refused: list[Refused] = []
        for kept in self._ways(run, unit, stage, scope):
            if isinstance(kept, Refused):
                refused.append(kept)
                continue
            seconds = self._seconds(trial, kernel, unit, stage, kept)
            if isinstance(seconds, Refused):
                refused.append(seconds)
            else:
                found.append((seconds, kept))
        tried = [self._priced(trial, unit, stage, kept) for _, kept in sorted(found, key=_first)[:_PRICED]]
        run.lacks_room |= any(isinstance(one, TooMany) for one in refused) and not tried
        if not tried:
            return None, _why(refused) or "no tiles of it fit"
        best = min(tried, key=lambda one: one.seconds)
        taken = run.together or pays(best, trial)
        run.lacks_room |= not taken
        run.left |= not taken
        kept = _of_draft(best.request.stages, stage)
        what = f"{kept.kept.nbytes} bytes of constants a block stay in {kept.kept.where}"
        tiles = f"{kept.schedule.tiles} tiles of {kept.schedule.threads} threads"
        figures = f"the network is predicted to take {_us(best.seconds)} with and {_us(trial.seconds)} without"
        return best if taken else None, f"{what} for {unit.loop.steps} steps, {tiles}; {figures}"

    def _seconds(self, trial: Trial, kernel: int, unit: LoopStage, stage: Stage, kept: Stage) -> float | Refused:
        """What a run of the stage takes in its kernel, with its share of the time to read what stays."""
        units = _with_kept(trial.request.stages, unit, stage, kept)
        forecast = self.forecast(units)
        block = forecast.together(flat_stages(same_kernel(trial, units, kernel)))
        blocks = forecast.resident(block) * forecast.device.sm_count
        if blocks < kept.schedule.tiles:
            held = f"{block.threads} threads of {block.registers} registers"
            held += f" and {block.shared_bytes} bytes of shared memory" if kept.kept.shared_bytes else ""
            reason = f"of its {kept.schedule.tiles} tiles {blocks} are on the device at once, with {held}"
            return TooMany(reason, "tiles", kept.schedule.tiles, blocks)
        runs, kept = runs_of(unit), _of_draft(units, stage)
        return forecast.seconds(kept, block) + forecast.fill_seconds(kept, block, blocks, runs) / runs

    def _priced(self, trial: Trial, unit: LoopStage, stage: Stage, kept: Stage) -> Trial:
        """The network with a stage in the place of another."""
        (ready,) = self.measured([kept])
        if ready.resources.measured:
            kept = replace(ready, resources=replace(ready.resources, kept_registers=kept.kept.registers))
        units = _with_kept(trial.request.stages, unit, stage, kept)
        return exchanged(trial, units, self.prices, self.forecast(units))

    def _ways(self, run: _Pass, unit: LoopStage, stage: Stage, scope: str) -> Iterator[Stage | Refused]:
        """The stage with its constants on chip: in the tiles that it has, and in such as are made for it."""
        constants = _constants(run.trial, unit, stage)
        # Small ones may be left in memory, which is in the L1 cache, for registers that the others need.
        largest = max(stage.inputs[number].nbytes for number in constants)
        chosen = (constants, tuple(n for n in constants if stage.inputs[n].nbytes * _SMALL >= largest))
        functions = list(stage.functions) if len(stage.functions) == 1 and not stage.windows else []
        for function in (*functions, *self._stationary(run.trial, stage)):
            if isinstance(function, Refused):
                yield function
                continue
            if run.most_tiles and function.tiles > run.most_tiles:
                continue
            for kept in dict.fromkeys(chosen):
                yield self._parted(stage, function, kept, run.trial, scope)

    def _stationary(self, trial: Trial, stage: Stage) -> tuple[DeviceFunction | Refused, ...]:
        """Its function in tiles that are made for it; equal stages have the same."""
        if stage.draft.digest not in self._made:
            found: list[DeviceFunction | Refused] = []
            request, blocks = self.scheduler.request, trial.request.device.sm_count
            for schedule in stationary_schedules(stage.draft.func, request, blocks):
                try:
                    functions = lower_stage(stage.label, schedule, self.scheduler.target)
                except LoweringError as error:
                    found.append(Refused(str(error)))
                    continue
                found += functions if len(functions) == 1 else []
            self._made[stage.draft.digest] = tuple(found)
        return self._made[stage.draft.digest]

    def _parted(
        self, stage: Stage, function: DeviceFunction, constants: tuple[int, ...], trial: Trial, scope: str
    ) -> Stage | Refused:
        key, device = (function, constants, scope), trial.request.device
        if key not in self._kept_loads:
            room = device.shared_per_block - function.shared_bytes
            most = device.most_registers(function.threads) if scope == "local" else room
            made = keep_loads(function, constants, most, scope)
            if isinstance(made, KeptLoads):
                # Each has a name of its own in the text.
                number = self._names[function.name] = self._names.get(function.name, -1) + 1
                made = made.named(f"{function.name}_{number}") if number else made
            self._kept_loads[key] = made
        kept = self._kept_loads[key]
        if isinstance(kept, Refused):
            return kept
        registers = registers_with_constants(kept, device)
        used = StageResources.assumed(function.shared_bytes, function.threads, registers)
        used = replace(used, kept_registers=kept.registers)
        return replace(stage, schedule=function.schedule, functions=(kept.use,), kept=kept, resources=used)


def _why(refused: Iterable[Refused]) -> str:
    """Why no way is one, each reason once; of what needs too many of something, the way that needs least."""
    reasons: dict[str, list[Refused]] = {}
    for one in refused:
        reasons.setdefault(one.what if isinstance(one, TooMany) else one.reason, []).append(one)
    told = []
    for ways in reasons.values():
        best = min(ways, key=lambda one: one.needed / max(1, one.most) if isinstance(one, TooMany) else 0.0)
        several = isinstance(best, TooMany) and len(ways) > 1
        told.append(f"{best.reason}, in the best of {len(ways)} ways" if several else best.reason)
    return "; ".join(told)


def _constants(trial: Trial, unit: LoopStage, stage: Stage) -> tuple[int, ...]:
    """Of a stage's tensors, the constants that are the same in each step, by their numbers."""
    fixed = trial.request.analysis.program.constants.keys() & {*unit.loop.invariants}
    return tuple(number for number, tensor in enumerate(stage.inputs) if tensor in fixed)


def _with_kept(units: Sequence[Unit], loop: LoopStage, stage: Stage, kept: Stage) -> tuple[Unit, ...]:
    """Some units with a stage of a loop exchanged; what its constants stay in is taken from all stages of the loop."""
    keep = [kept.kept, *(one.kept for one in loop.stages if one.kept is not None and one is not stage)]
    registers, nbytes = sum(one.registers for one in keep), sum(one.shared_bytes for one in keep)
    new = {one: kept if one is stage else one for one in loop.stages}
    changed = {
        one: replace(own, resources=own.resources.keeping(registers, nbytes)) for one, own in new.items()
    }
    return map_stages(units, lambda one: changed.get(one, one))


def _of_draft(units: Sequence[Unit], stage: Stage) -> Stage:
    """The stage in another's place."""
    return next(one for one in flat_stages(units) if one.draft is stage.draft)


def _first(pair: tuple[float, Stage]) -> float:
    return pair[0]


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"
