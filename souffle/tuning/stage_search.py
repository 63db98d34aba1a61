"""The search for one stage: what is known of it, what is tried next, and what its log is given."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from souffle.decision import Refused
from souffle.schedule.gpu.device import device_for
from souffle.schedule.recipe import Recipe
from souffle.schedule.record import Record
from souffle.schedule.tried import KnownRecipes
from souffle.schedule.tuned import crowding
from souffle.tuning.bench import CandidateBench, Figures
from souffle.tuning.evolution import Look, next_candidates
from souffle.tuning.report import TaskReport
from souffle.tuning.shared_stage import SharedStage, lacks_seconds
from souffle.tuning.space import Space
from souffle.tuning.store import LogWriter, NewRecord, origin_now
from souffle.tuning.tasks import Task
from souffle.tuning.transfer import fitted_recipe
from souffle.workers.cases import Asking

__all__ = ["BATCH", "LearnedRanker", "StageSearch"]

_OF_A_LOOK = frozenset(["recipe", "tiles", "shared_bytes", "text", "candidate", "features"])
"""What a worker says of a candidate that lowers, beside its times."""

BATCH = 16
"""About so many candidates are chosen together, knowing the figures of all before them. Ansor and MetaSchedule measure
64: the fewer, the sooner a search learns, and the more often workers wait for each other."""
_WORK = "souffle.tuning.stage_work"


class LearnedRanker(Protocol):
    """Ranks candidates of one stage by what is told of them; :class:`souffle.tuning.learned.Ranker` does."""

    def scores(self, features: Sequence[Sequence[float]]) -> Sequence[float]:
        """A number for each; the smaller, the better it is thought to be."""
        ...


@dataclass(frozen=True, eq=False)
class _Found:
    """A candidate with figures."""

    recipe: Recipe
    seconds: float
    wasteful: bool
    """Whether it leaves other stages no room, or spills registers and was not measured: predictions flatter spills."""

    @property
    def order(self) -> tuple:
        """The best first; the same however they are come by."""
        return (self.wasteful, self.seconds, self.recipe.key)


@dataclass(eq=False)
class StageSearch:
    """One task under way.

    Attributes
    ----------
    task : Task
    arch : str
    threads : int
        Of a block.
    bench : CandidateBench
    writer : LogWriter
    shared : SharedStage
        What workers know of it.
    seed : int
    ranker : LearnedRanker, optional
        Ranks candidates that are not built yet; the cost model without.
    """

    task: Task
    arch: str
    threads: int
    bench: CandidateBench
    writer: LogWriter
    shared: SharedStage
    seed: int
    ranker: LearnedRanker | None = None
    own_seconds: float | None = None
    trials: int = 0
    old_trials: int = 0
    exhausted: bool = False
    seconds_spent: float = 0.0
    spaces: tuple[Space, ...] = ()
    _known: KnownRecipes = field(default_factory=KnownRecipes)
    _found: list[_Found] = field(default_factory=list)
    _near: list[Recipe] = field(default_factory=list)
    _looks: dict[str, Look | Refused] = field(default_factory=dict)
    _own: Recipe | None = None
    _lost: list[NewRecord] = field(default_factory=list)
    _problem: str = ""

    @property
    def best_seconds(self) -> float | None:
        """Of the best candidate so far; of the rule's own schedule where that is faster than all that waste nothing."""
        first = self._found[0].seconds if self._found else None
        return self.own_seconds if self._own_stands else first

    @property
    def _own_stands(self) -> bool:
        """Whether compilation would keep the rule's own schedule, which may spill and yet take less time."""
        own, first = self.own_seconds, self._found[0] if self._found else None
        return own is not None and (first is None or own < first.seconds)

    def begin(
        self, records: Sequence[Record], near: Sequence[Recipe], tried: Collection[bytes] = ()
    ) -> Asking[None]:
        """Have the sketches made, and take in what logs hold.

        Parameters
        ----------
        records : sequence of Record
            Of the stage.
        near : sequence of Recipe
            Of stages like it, where it has no records.
        tried : collection of bytes
            Marks of what a log has no record of any more.
        """
        seed = self.seed % (2**31 - 2) + 1
        job = self.shared.job(f"{_WORK}:sketches", "sketches", {"seed": seed, "rule": self.task.stage.schedule.rule})
        (outcome,) = yield [(job, None)]
        if outcome.failure:
            self._problem = outcome.reason
            self.exhausted = True
            return
        self.spaces = tuple(Space.of_data(data) for data in outcome.value["spaces"])
        own = outcome.value["own"]
        self._own = None if own is None else Recipe.of_data(own)
        for record in records:
            if record.origin.figure == self.bench.figure and record.origin.device == self.bench.device:
                self._recall(record)
        self.trials += self._known.add_marks(tried)
        self.old_trials = self.trials
        fitted = (fitted_recipe(recipe, self.spaces) for recipe in near)
        self._near = [recipe for recipe in fitted if recipe is not None]
        if not self.spaces:
            self.exhausted = True

    def _recall(self, record: Record) -> None:
        recipe = record.recipe
        if recipe.key in self._known:
            return
        self._known.add(recipe.key)
        self.trials += 1
        if self.own_seconds is None and record.origin.own_seconds > 0:
            self.own_seconds = record.origin.own_seconds
        if record.failed or self._space_of(recipe) is None:
            return
        origin = record.origin
        used = Figures((record.seconds,), origin.spill_bytes, origin.registers)
        self._note(recipe, used, origin.tiles, origin.shared_bytes)

    def _space_of(self, recipe: Recipe) -> Space | None:
        return next((space for space in self.spaces if space.offers(recipe)), None)

    def _note(self, recipe: Recipe, figures: Figures, tiles: int, shared_bytes: int) -> None:
        mean = sum(figures.seconds) / len(figures.seconds)
        if self._own is not None and recipe.key == self._own.key:
            self.own_seconds = mean
        used = (tiles, figures.registers, shared_bytes)
        alone = crowding(*used, self.task.stage.schedule.tiles, device_for(self.arch)) is not None
        spills = figures.spill_bytes > 0 and self.bench.figure != "measured"
        self._found.append(_Found(recipe, mean, spills or alone))
        self._found.sort(key=lambda one: one.order)

    def batch(self, count: int) -> Asking[None]:
        """Choose some candidates, have their figures found, and append them to the log."""
        rng = random.Random(f"{self.seed}:{self.task.stage.draft.digest}:{self.trials}")
        chosen: list[Look] = []
        own = yield from self._own_look()
        if own is not None and not self._known.has_key(own.recipe.key):
            chosen.append(own)
        if count > len(chosen):
            chosen += yield from self._next(count - len(chosen), {look.recipe.key for look in chosen}, rng)
        if not chosen:
            self._write([], [])
            self.exhausted = True
            return
        found = yield from self.bench.figures(self.shared, chosen, own)
        self._write(chosen, found)

    def _own_look(self) -> Asking[Look | None]:
        if self._own is None:
            return None
        space = self._space_of(self._own)
        if space is None:
            return None
        (look,) = yield from self._looked([(space, self._own)])
        return look

    def _next(self, count: int, taken: set[str], rng: random.Random) -> Asking[list[Look]]:
        """Runs the evolution, which asks for looks."""
        best = [one.recipe for one in self._found] or self._near
        parents = [(space, recipe) for recipe in best if (space := self._space_of(recipe)) is not None]
        evolution = next_candidates(
            self.spaces, parents, self._known.with_keys(taken), count, self.threads, rng, self._ranked
        )
        try:
            asked = next(evolution)
            while True:
                asked = evolution.send((yield from self._looked(asked)))
        except StopIteration as stop:
            return stop.value

    def _ranked(self, looks: Sequence[Look]) -> Sequence[float]:
        if self.ranker is None or not looks:
            return [look.seconds for look in looks]
        return self.ranker.scores([look.features for look in looks])

    def _looked(self, asked: Sequence[tuple[Space, Recipe]]) -> Asking[list[Look | None]]:
        new = [(space, recipe) for space, recipe in asked if recipe.key not in self._looks]
        told = self.ranker is not None
        payloads = [{"recipe": recipe.data(), "features": told} for _, recipe in new]
        jobs = [self.shared.job(f"{_WORK}:look", "a look", payload) for payload in payloads]
        outcomes = (yield [(job, _lacks) for job in jobs]) if jobs else []
        for (space, recipe), outcome in zip(new, outcomes, strict=True):
            if outcome.failure:
                # Written down with its reason, so that no search loses a worker by it again.
                self._looks[recipe.key] = Refused(outcome.reason)
                if recipe.key not in self._known:
                    self._known.add(recipe.key)
                    self._lost.append(self._record(recipe, Figures(problem=outcome.reason), 0, 0, "", 0.0))
                continue
            value = outcome.value
            self._looks[recipe.key] = (
                Refused(value["problem"])
                if value["problem"]
                else Look(
                    space,
                    Recipe.of_data(value["recipe"]),
                    tuple(value["seconds"]),
                    value["tiles"],
                    value["shared_bytes"],
                    value["text"],
                    value["candidate"],
                    tuple(value["features"]),
                )
            )
        looks = [self._looks[recipe.key] for _, recipe in asked]
        return [look if isinstance(look, Look) else None for look in looks]

    def _write(self, chosen: Sequence[Look], found: Sequence[Figures]) -> None:
        """Append a batch to the log, in one piece."""
        own_seconds, own_key = self.own_seconds, None if self._own is None else self._own.key
        for look, figures in zip(chosen, found, strict=True):
            if not figures.problem and look.recipe.key == own_key:
                own_seconds = sum(figures.seconds) / len(figures.seconds)
        lost, self._lost = self._lost, []
        records = list(lost)
        for number, (look, figures) in enumerate(zip(chosen, found, strict=True), self.trials + len(lost)):
            own = own_seconds or 0.0
            records.append(self._record(look.recipe, figures, look.tiles, look.shared_bytes, look.text, own, number))
        self.writer.append(self.task.stage.draft.func, records, self.task.name)
        # The rule's own may have been tried before, of which no more than that was known.
        self.trials += len(records) - sum(look.recipe.key in self._known for look in chosen)
        for look, figures in zip(chosen, found, strict=True):
            self._known.add(look.recipe.key)
            if look.recipe.key != own_key:
                # It is compiled once, but for the rule's own, and searches hold thousands.
                self._looks[look.recipe.key] = replace(look, candidate=b"")
            if not figures.problem:
                self._note(look.recipe, figures, look.tiles, look.shared_bytes)

    def _record(
        self,
        recipe: Recipe,
        figures: Figures,
        tiles: int,
        shared_bytes: int,
        text: str,
        own_seconds: float,
        trial: int | None = None,
    ) -> NewRecord:
        origin = origin_now(
            self.bench.figure,
            figures.device or self.bench.device,
            own_seconds,
            spill_bytes=figures.spill_bytes,
            registers=figures.registers,
            shared_bytes=shared_bytes,
            tiles=tiles,
            text=text,
            trial=self.trials + len(self._lost) if trial is None else trial,
            problem=figures.problem,
        )
        return NewRecord(recipe, figures.seconds, origin)

    def report(self) -> TaskReport:
        """What was found."""
        if self._own_stands:
            best = f"the rule's own, {self.task.stage.schedule.rule}"
        elif self._found:
            best = self._found[0].recipe.summary
        else:
            best = self._problem
        return TaskReport(
            name=self.task.name,
            weight=self.task.weight,
            own_seconds=self.own_seconds,
            best_seconds=self.best_seconds,
            best=best,
            trials=self.trials,
            new_trials=self.trials - self.old_trials,
            drawn=len(self._looks),
            fitting=sum(isinstance(look, Look) for look in self._looks.values()),
            seconds=self.seconds_spent,
        )


def _lacks(value: Any) -> str:
    """Why what a worker says of a recipe cannot be true; empty where it can."""
    reason = lacks_seconds(value)
    if reason or value["problem"]:
        return reason
    missing = sorted(_OF_A_LOOK - set(value))
    return f"its worker gave no {missing[0]}" if missing else ""
