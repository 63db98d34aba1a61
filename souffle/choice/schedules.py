"""Which schedule a stage has in its kernel: of those that are known for it, the one with which the network takes least.

What a search finds, and what a rule estimates, is best for a stage that is alone on the device, or shares each
multiprocessor with one more block. What a kernel leaves it is known once there is one: where another stage takes all
registers, 256 tiles on 132 multiprocessors are two waves, and 112 that take longer each are one. A stage that asks for
less may also leave all others more blocks. So the schedules that logs hold for a stage, and the one of the rules, are
tried in its kernel, one kind of stage after another, and whole networks are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from souffle.choice.prices import KernelPrices
from souffle.choice.trial import Trial, exchanged, pays, saved_alike
from souffle.cost import KernelForecast
from souffle.decision import Decision
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import Stage, Unit, flat_stages, map_stages
from souffle.schedule.tuned import KnownSchedule

__all__ = ["KernelSchedules"]

_ROUNDS = 2
"""How often each kind is tried: a schedule may pay only once another stage has changed its own."""


class KernelSchedules:
    """Tries the schedules that are known for stages in the kernels that these are in.

    Parameters
    ----------
    known : callable
        What is known for a stage; nothing where its schedule is not to be changed.
    prices : KernelPrices
    forecast : callable
        What is predicted of stages, each with what it asks for.
    measured : callable
        Stages with what they ask for, as :meth:`souffle.codegen.stage_meter.StageMeter.measured` gives them.

    Attributes
    ----------
    decisions : list of Decision
        One for each kind of stage that has another schedule now.
    """

    def __init__(
        self,
        known: Callable[[Stage], Sequence[KnownSchedule]],
        prices: KernelPrices,
        forecast: Callable[[Sequence[Unit]], KernelForecast],
        measured: Callable[[Sequence[Unit]], tuple[Unit, ...]],
    ) -> None:
        self.known, self.prices, self.forecast, self.measured = known, prices, forecast, measured
        self.decisions: list[Decision] = []

    def best(self, trial: Trial) -> Trial:
        """The network with those schedules that make it faster."""
        found = trial
        told: dict[str, Decision] = {}
        kinds = dict.fromkeys(s.draft.digest for s in flat_stages(trial.request.stages) if s.kept is None)
        known = {kind: self.known(_of_kind(trial, kind)[0]) for kind in kinds}
        for _ in range(_ROUNDS):
            before = found
            for kind in (kind for kind in kinds if known[kind]):
                made, schedule = self._with_best(found, kind, known[kind])
                if schedule is not None:
                    told[kind] = _decision(_of_kind(made, kind), schedule, made, found)
                    found = made
            if found is before:
                break
        self.decisions += told.values()
        return found

    def _with_best(
        self, trial: Trial, kind: str, known: Sequence[KnownSchedule]
    ) -> tuple[Trial, KnownSchedule | None]:
        """The network with the best schedule of a kind of stage, and which it is if it is another."""
        stages = _of_kind(trial, kind)
        priced = {}
        for schedule in known:
            if schedule.functions[0].func is not stages[0].functions[0].func:
                units = self._units(trial, _assumed(stages, schedule))
                forecast = self.forecast(units)
                if saved_alike(trial, units, self.prices, forecast) > 0:
                    priced[schedule] = exchanged(trial, units, self.prices, forecast)
        for schedule in sorted(priced, key=lambda one: priced[one].seconds):
            if not pays(priced[schedule], trial):
                break
            # What it asks for was assumed, or is what a record says of it alone.
            ready = flat_stages(self.measured(_assumed(stages, schedule)))
            units = self._units(trial, [_beside(one, before) for one, before in zip(ready, stages, strict=True)])
            made = exchanged(trial, units, self.prices, self.forecast(units))
            if pays(made, trial):
                return made, schedule
        return trial, None

    def _units(self, trial: Trial, stages: Sequence[Stage]) -> tuple[Unit, ...]:
        """The network's units with some stages in the place of those of the same drafts."""
        new = {stage.draft: stage for stage in stages}
        return map_stages(trial.request.stages, lambda stage: new.get(stage.draft, stage))


def _of_kind(trial: Trial, kind: str) -> list[Stage]:
    """The stages of a kind, but for those that keep constants in tiles made for it."""
    return [s for s in flat_stages(trial.request.stages) if s.draft.digest == kind and s.kept is None]


def _assumed(stages: Sequence[Stage], known: KnownSchedule) -> list[Stage]:
    """Stages of one kind with another schedule, as if no compiler were asked about it; they share its functions."""
    first = stages[0]
    label = first.label.removesuffix("_0") if len(first.functions) > 1 else first.label
    labels = [label] if len(known.functions) == 1 else [f"{label}_{n}" for n in range(len(known.functions))]
    functions = tuple(replace(f, name=name) for f, name in zip(known.functions, labels, strict=True))
    shared, threads = max(f.shared_bytes for f in functions), max(f.threads for f in functions)
    used = StageResources.assumed(shared, threads, known.schedule.registers)
    return [_beside(replace(one, schedule=known.schedule, functions=functions, resources=used), one) for one in stages]


def _beside(stage: Stage, before: Stage) -> Stage:
    """A stage in another's place, beside the constants that other stages of its loop keep on chip."""
    kept = before.resources.kept_registers, before.resources.kept_shared_bytes
    return replace(stage, resources=stage.resources.keeping(*kept))


def _decision(stages: Sequence[Stage], known: KnownSchedule, made: Trial, before: Trial) -> Decision:
    schedule = known.schedule
    reason = (
        f"{known.told} ({schedule.rule}, {schedule.tiles} tiles): the network is predicted to take "
        f"{_us(made.seconds)} with it and {_us(before.seconds)} with the one that it had"
    )
    return Decision("choice", f"schedule of {stages[0].name}", True, reason)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"
