"""Independent stages of a kernel computed at the same time: horizontal fusion (001, HFuse) inside one kernel.

::

    for it: tile of A; for it: tile of B      →      for it: tile of A, by some workers; for it: tile of B, by others
    (no barrier between: neither needs the other)

Legal for stages of one epoch that need nothing of each other, nor of any other stage there: all that depends on them,
or that they depend on, is beyond a barrier of the whole grid, so that it is the same which worker computes which tile
(:mod:`souffle.schedule.lower.shares`). A stage may also wait for an epoch after its first one, up to the last before
its readers, to meet a stage there that leaves idle what it needs.

Which stages, where, and how is decided by predicted time: in block space, so that the last turn of one is filled by the
next; or in thread space, with each split of a block's teams, or with parts of a block in steps of 128 threads
(:mod:`souffle.kernel.block_parts`), so that one computes while the other waits. All shares are
of workers that the kernel has in any case: threads, registers and shared memory of its blocks stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, combinations

from souffle.cost.kernel import KernelForecast, KernelTimes
from souffle.decision import Decision
from souffle.kernel.block_parts import Divisions
from souffle.kernel.calls import CallPlan, EpochOrder
from souffle.schedule.group import Group
from souffle.schedule.lower.shares import ALL_WORKERS, Share
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import Stage, Unit, flat_stages

__all__ = ["arrangements", "last_epoch", "side_by_side"]

_LONGEST = 4
"""Of an epoch's stages so many are tried in thread space, and of a kernel's so many in other epochs: the longest."""

_MOST_IN_THREADS = 3
"""Stages that share a block's teams."""

_NAMED = 6
"""Stages of a group that a decision names."""


def side_by_side(
    plan: CallPlan,
    forecast: KernelForecast | None,
    teams: int,
    planned: Callable[..., CallPlan],
    *,
    parts: bool = False,
) -> CallPlan:
    """The plan with independent stages side by side, where a launch is predicted to take less so.

    Parameters
    ----------
    plan : CallPlan
        With barriers, and not in teams yet.
    forecast : KernelForecast or None
        Nothing is changed where nobody knows the device.
    teams : int
        Of each block.
    planned : callable
        Gives the plan of the same stages with `groups` and `delayed`.
    parts : bool
        Whether a block may be divided in parts, too.
    """
    if forecast is None or not any(len(order.free) > 1 for order in plan.orders):
        return plan
    pricing = _Pricing(plan, forecast, teams, parts)
    delayed: dict[Stage, int] = {}
    groups: list[Group] = []
    for order in plan.orders:
        epochs = _epochs(order, pricing)
        delayed |= {s: e for s, e, first in zip(order.units, epochs, order.epochs, strict=True) if e != first}
        for epoch in range(max(epochs) + 1):
            members = tuple(u for u, e in zip(order.units, epochs, strict=True) if e == epoch and u in order.free)
            gain, shares = pricing.best(members)
            # The model does not resolve less.
            if gain > forecast.look_seconds:
                groups.append(Group(tuple(zip(members, shares, strict=True)), order.runs))
    if not groups:
        return replace(plan, decisions=(*plan.decisions, *pricing.refusals()))
    made = planned(groups=groups, delayed=delayed)
    free = {stage for order in made.orders for stage in order.free}
    if not free.issuperset(stage for group in groups for stage, _ in group.members):
        return plan
    before, after = pricing.times, pricing.of(made)
    taken = after.seconds < before.seconds
    kernel = f"{_us(after.seconds)} µs for the kernel, {_us(before.seconds)} µs with all one after the other"
    decisions = [
        Decision("hfuse", _names(group.members), taken, f"{pricing.compared(group)}; {kernel}") for group in groups
    ]
    return replace(made if taken else plan, decisions=(*plan.decisions, *decisions))


def arrangements(tiles: Sequence[int], longest: Sequence[int], teams: int) -> Iterator[tuple[Share, ...]]:
    """The ways to compute independent stages side by side.

    Parameters
    ----------
    tiles : sequence of int
        Of each stage.
    longest : sequence of int
        The stages that may be in thread space, by number; all others are then computed by all workers.
    teams : int
        Of each block.
    """
    starts = accumulate(tiles, initial=0)
    yield tuple(Share(shift=start) for start, _ in zip(starts, tiles, strict=False))
    for count in range(2, min(teams, _MOST_IN_THREADS, len(longest)) + 1):
        for chosen in combinations(sorted(longest), count):
            for cuts in combinations(range(1, teams), count - 1):
                shares = [ALL_WORKERS] * len(tiles)
                for stage, first, end in zip(chosen, (0, *cuts), (*cuts, teams), strict=True):
                    shares[stage] = Share(first, end - first)
                yield tuple(shares)


class _Pricing:
    """What stages of one kernel take side by side; each set of them once."""

    def __init__(self, plan: CallPlan, forecast: KernelForecast, teams: int, parts: bool) -> None:
        self.plan, self.forecast, self.teams = plan, forecast, teams
        self.block: StageResources = forecast.together(flat_stages(plan.stages))
        self.times = self.of(plan)
        self.divisions = Divisions(plan.shape, teams, forecast.device.limits.arch) if parts else None
        self._known: dict[tuple[Stage, ...], tuple[float, tuple[Share, ...]]] = {}

    def of(self, plan: CallPlan) -> KernelTimes:
        """The times of a launch."""
        shape, options = plan.shape, {"teams": self.teams, "groups": plan.groups}
        waits = shape.grid_syncs, shape.flag_waits
        return self.forecast.times(plan.stages, self.block, shape.tiles, *waits, fewer=True, **options)

    def seconds(self, stage: Stage) -> float:
        """Of a stage by itself."""
        launch = {"grid": self.times.grid, "teams": self.teams}
        return self.forecast.seconds(stage, self.block, self.times.blocks, **launch)

    def best(self, stages: tuple[Stage, ...]) -> tuple[float, tuple[Share, ...]]:
        """The seconds that the best way to compute stages side by side gains, and who computes which then."""
        shares = (ALL_WORKERS,) * len(stages)
        if len(stages) < 2 or not self.times.blocks:
            return 0.0, shares
        if stages not in self._known:
            tiles = [stage.schedule.tiles for stage in stages]
            longest = sorted(range(len(stages)), key=lambda n: -self.seconds(stages[n]))[:_LONGEST]
            parted = self.divisions.of(stages, longest) if self.divisions else ()
            ways = (arrangements(tiles, longest, self.teams), parted)
            found = [[(self.gain(stages, own), own) for own in several] for several in ways]
            best, *other = (max(several, key=lambda one: one[0]) for several in found if several)
            # Parts have code of their own, and the model does not resolve less.
            best = next((one for one in other if one[0] > best[0] + self.forecast.look_seconds), best)
            self._known[stages] = best if best[0] > 0.0 else (0.0, shares)
        return self._known[stages]

    def gain(self, stages: Sequence[Stage], shares: Sequence[Share]) -> float:
        """The seconds that a way to compute stages side by side gains."""
        tiles = max(stage.schedule.tiles + share.shift for stage, share in zip(stages, shares, strict=True))
        most = self.times.blocks
        blocks = max(1, min(max(tiles, self.plan.shape.tiles), most // self.teams))
        members = tuple(zip(stages, shares, strict=True))
        waits = self.times.grid > 0
        return self.forecast.gained_seconds(members, self.block, most, blocks, self.teams, waits=waits)

    def compared(self, group: Group) -> str:
        """What the stages of a group are predicted to take, in both ways."""
        stages, shares = zip(*group.members, strict=True)
        apart = sum(map(self.seconds, stages))
        beside = apart - self.gain(stages, shares)
        times = f", {group.runs} times" if group.runs > 1 else ""
        return f"predicted to take {_us(beside)} µs side by side, {_us(apart)} µs one after the other{times}"

    def refusals(self) -> Iterator[Decision]:
        """That nothing is gained by the stages that could be side by side."""
        for order in self.plan.orders:
            for epoch in range(max(order.epochs) + 1):
                members = [u for u, e in zip(order.units, order.epochs, strict=True) if e == epoch and u in order.free]
                if len(members) > 1:
                    names = _names([(stage, ALL_WORKERS) for stage in members])
                    yield Decision("hfuse", names, False, "predicted to take as long as one after the other")


def _epochs(order: EpochOrder, pricing: _Pricing) -> tuple[int, ...]:
    """The epochs of units where the longest of those that may wait are where they gain most."""
    epochs = dict(zip(order.units, order.epochs, strict=True))
    members: dict[int, list[Stage]] = {}
    for unit in order.units:
        if unit in order.free:
            members.setdefault(epochs[unit], []).append(unit)

    def gained(stages: Collection[Stage]) -> float:
        return pricing.best(tuple(unit for unit in order.units if unit in stages))[0]

    waiting = [stage for stage in order.units if stage in order.free and last_epoch(stage, epochs) > epochs[stage]]
    for stage in sorted(waiting, key=lambda stage: -pricing.seconds(stage))[:_LONGEST]:
        first, last = epochs[stage], last_epoch(stage, epochs)
        others = [other for other in members[first] if other is not stage]
        gains = {first: gained(members[first]) - gained(others)}
        for epoch in range(first + 1, last + 1):
            there = members.get(epoch, [])
            gains[epoch] = gained({*there, stage}) - gained(there)
        # The earliest of those where it gains as much.
        epochs[stage] = max(gains, key=lambda epoch: (gains[epoch], -epoch))
        members[first] = others
        members.setdefault(epochs[stage], []).append(stage)
    return tuple(epochs[unit] for unit in order.units)


def last_epoch(stage: Stage, epochs: Mapping[Unit, int]) -> int:
    """The last epoch in which a stage can be: the one before its first reader's."""
    made = {*stage.outputs}
    readers = [epoch for unit, epoch in epochs.items() if unit is not stage and made & {*unit.inputs}]
    return min(readers, default=max(epochs.values()) + 1) - 1


def _names(members: Sequence[tuple[Stage, Share]]) -> str:
    """The stages with who computes each, as many as one reads."""
    named = [f"{stage.name}{'' if share == ALL_WORKERS else f' ({share})'}" for stage, share in members[:_NAMED]]
    return " | ".join(named) + (f" | {len(members) - _NAMED} more" if len(members) > _NAMED else "")


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"
