"""Which stages stay joined: what keeps tensors on chip is taken where the whole network is predicted to take less.

    stages joined, of parts that may be joined themselves  →  each stage, or its parts in its place

Legal because a stage computes what its parts do, one after another: any of them may be taken apart, and an order of all
stages exists in which each comes after those that it reads from. Whether a join pays is not known of its stages alone.
It saves a barrier only if the longest path of dependent stages gets shorter; and a kernel is on the device as a whole,
so that what a joined stage asks for leaves fewer blocks to all the others. So whole networks are priced
(:mod:`souffle.choice.prices`): with all stages joined, with none, and from the better of the two with one kind of stage
changed at a time. The result is never above the one with none. Equal stages are one kind, decided together: they stay
equal, and share their functions.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from souffle.decision import Decision
from souffle.program import TE, ExternTE, Loop, Tensor, TEProgram
from souffle.schedule.stage import LoopStage, Stage, Unit, flat_stages
from souffle.wording import counted

__all__ = ["JoinTrials", "with_parts"]

Kind = tuple[str, ...]
"""Joined stages that are equal: the digest of the stage, then those of its parts."""

_EQUAL = 1e-12
"""Seconds that are no difference."""

_ROUNDS = 2
"""How often each kind is tried: a kind may pay only once another is taken apart."""


def with_parts(units: Iterable[Unit]) -> tuple[Unit, ...]:
    """Some units, each joined stage followed by its parts and theirs, those of a loop in their loop."""
    found: list[Unit] = []
    for unit in units:
        if isinstance(unit, LoopStage):
            found.append(replace(unit, stages=tuple(one for stage in unit.stages for one in _with_parts(stage))))
        else:
            found += _with_parts(unit)
    return tuple(found)


def _with_parts(stage: Stage) -> list[Stage]:
    return [stage, *(inner for part in stage.parts for inner in _with_parts(part))]


def _joined_kinds(units: Iterable[Unit]) -> dict[Kind, list[Stage]]:
    """The kinds of joined stages among some units and their parts, each with its stages, in their order."""
    found: dict[Kind, list[Stage]] = {}
    for stage in flat_stages(with_parts(units)):
        if stage.parts:
            found.setdefault(_kind(stage), []).append(stage)
    return found


def _kind(stage: Stage) -> Kind:
    return (stage.draft.digest, *(part.draft.digest for part in stage.parts))


@dataclass(frozen=True)
class Trial:
    """What is predicted of the network with some kinds taken apart."""

    apart: frozenset[Kind]
    seconds: float


class JoinTrials:
    """Finds the kinds to take apart.

    Parameters
    ----------
    program : TEProgram
        Expanded, that the stages are of.
    units : sequence of Stage or LoopStage
        With every join that the rules of schedules allow.
    predicted : callable
        What some of the stages take as a network, in seconds.
    start : set of Kind, optional
        Kinds to take apart, from which to look too.
    """

    def __init__(
        self,
        program: TEProgram,
        units: Sequence[Unit],
        predicted: Callable[[Sequence[Unit]], float],
        start: frozenset[Kind] = frozenset(),
    ) -> None:
        self.start = start
        self.units = tuple(units)
        self.kinds = _joined_kinds(units)
        self._predicted = predicted
        self._position: dict[TE | ExternTE | Loop, int] = {}
        for item in program.tes:
            for te_ in item.body if isinstance(item, Loop) else ():
                self._position[te_] = len(self._position)
            self._position[item] = len(self._position)
        self._known: dict[frozenset[Kind], Trial] = {}

    def taken_apart(self, apart: frozenset[Kind]) -> tuple[Unit, ...]:
        """The stages with the parts of some kinds in their place, in topological order."""
        units: list[Unit] = []
        for unit in self.units:
            if isinstance(unit, LoopStage):
                stages = self._ordered([part for stage in unit.stages for part in _parts(stage, apart)])
                units.append(unit if stages == unit.stages else replace(unit, stages=stages))
            else:
                units += _parts(unit, apart)
        return self._ordered(units)

    def trial(self, apart: Iterable[Kind]) -> Trial:
        """What is predicted with some kinds taken apart."""
        kinds = frozenset(apart)
        if kinds not in self._known:
            self._known[kinds] = Trial(kinds, self._predicted(self.taken_apart(kinds)))
        return self._known[kinds]

    def best(self) -> tuple[tuple[Unit, ...], tuple[Decision, ...]]:
        """The stages of least predicted time, those with fewer joins among equal ones; and why each join is kept."""
        return self.taken_apart(self.found.apart), tuple(self._decisions(self.found))

    @cached_property
    def found(self) -> Trial:
        """The best that was found."""
        starts = (frozenset[Kind](), frozenset(self.kinds), self.start)
        found = min(map(self.trial, starts), key=lambda trial: trial.seconds)
        for _ in range(_ROUNDS):
            before = found
            for kind in self.kinds:
                other = self.trial(found.apart ^ {kind})
                least = found.seconds - _EQUAL if kind in found.apart else found.seconds + _EQUAL
                found = other if other.seconds <= least else found
            if found == before:
                break
        return found

    def _decisions(self, found: Trial) -> list[Decision]:
        decisions = []
        for kind, stages in self.kinds.items():
            together, apart = self.trial(found.apart - {kind}).seconds, self.trial(found.apart | {kind}).seconds
            kept = kind not in found.apart
            parts = ", ".join(part.name for part in stages[0].parts)
            subject = f"{stages[0].name} of {parts}" + (f", {counted(len(stages), 'time')}" if len(stages) > 1 else "")
            reason = f"the network is predicted to take {_us(together)} with it and {_us(apart)} with its parts"
            decisions.append(Decision("choice", subject, kept, reason))
        return decisions

    def _ordered(self, units: Sequence[Unit]) -> tuple[Unit, ...]:
        """Units in topological order, those first whose last TE is; the order in which stages are formed."""
        writer: dict[Tensor, int] = {t: n for n, unit in enumerate(units) for t in unit.outputs}
        readers: dict[int, list[int]] = {}
        missing = []
        for number, unit in enumerate(units):
            before = {writer[t] for t in unit.inputs if t in writer} - {number}
            missing.append(len(before))
            for producer in before:
                readers.setdefault(producer, []).append(number)
        ready = [(self._last(unit), number) for number, unit in enumerate(units) if not missing[number]]
        heapq.heapify(ready)
        order: list[Unit] = []
        while ready:
            _, number = heapq.heappop(ready)
            order.append(units[number])
            for reader in readers.get(number, ()):
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (self._last(units[reader]), reader))
        return tuple(order)

    def _last(self, unit: Unit) -> int:
        if isinstance(unit, LoopStage):
            return self._position[unit.loop]
        return max(self._position[te_] for te_ in unit.tes)


def _parts(stage: Stage, apart: frozenset[Kind]) -> list[Stage]:
    """A stage, or what it was joined of where its kind is taken apart."""
    if not stage.parts or _kind(stage) not in apart:
        return [stage]
    return [inner for part in stage.parts for inner in _parts(part, apart)]


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"
