"""Independent stages of a kernel computed at the same time: horizontal fusion (001, HFuse) inside one kernel.

::

    for it: tile of A; for it: tile of B      →      for it: tile of A, by some workers; for it: tile of B, by others
    (no barrier between: neither needs the other)

Legal for stages of one epoch that need nothing of each other, nor of any other stage there: all that depends on them,
or that they depend on, is beyond a barrier of the whole grid, so that it is the same which worker computes which tile
(:mod:`souffle.schedule.lower.shares`). A stage may also wait for an epoch after its first one, up to the last before
its readers, to meet a stage there that leaves idle what it needs.

Which stages, where, and how is decided by predicted time: in block space, so that the last turn of one is filled by the
next; or in thread space, with each split of a block's teams, or with parts of a block in steps of 128 threads and near
the best of them in whole warps (:mod:`souffle.kernel.block_parts`), so that one computes while the other waits. All
shares are of workers that the kernel has in any case: threads, registers and shared memory of its blocks stay what
they are.

What was measured of stages in such blocks stands in tuning logs (:mod:`souffle.schedule.arrangement`), and counts in
the place of what is predicted of them; :func:`considered` says of which it could be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from souffle.cost.kernel import KernelForecast
from souffle.decision import Decision
from souffle.kernel.calls import CallPlan, EpochOrder
from souffle.kernel.ways import Way, WayPrices
from souffle.schedule.arrangement import Arrangements, BlockForm
from souffle.schedule.group import Group
from souffle.schedule.lower.shares import ALL_WORKERS, Share
from souffle.schedule.stage import Stage, Unit

__all__ = ["Considered", "considered", "last_epoch", "side_by_side"]

_MOST_WAITING = 4
"""Of a kernel's stages so many are tried in other epochs: the longest."""

_NAMED = 6
"""Stages of a group that a decision names."""


@dataclass(frozen=True, eq=False)
class Considered:
    """Independent stages that a kernel could compute side by side.

    Attributes
    ----------
    stages : tuple of Stage
        In the order of the kernel's text.
    runs : int
        How often a launch computes them.
    block : BlockForm
        Of the kernel.
    bound : int
        Blocks that a multiprocessor must hold at once, which bounds the registers of a thread.
    apart : float
        Seconds that they are predicted to take one after the other.
    ways : tuple of Way
        As predicted, the best first.
    """

    stages: tuple[Stage, ...]
    runs: int
    block: BlockForm
    bound: int
    apart: float
    ways: tuple[Way, ...]


def side_by_side(
    plan: CallPlan,
    forecast: KernelForecast | None,
    teams: int,
    planned: Callable[..., CallPlan],
    *,
    parts: bool = False,
    arrangements: Arrangements | None = None,
) -> CallPlan:
    """The plan with independent stages side by side, where a launch is thought to take less so.

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
    arrangements : Arrangements, optional
        What stages were measured to take beside each other.
    """
    if forecast is None or not any(len(order.free) > 1 for order in plan.orders):
        return plan
    pricing = WayPrices(plan, forecast, teams, parts, arrangements)
    delayed: dict[Stage, int] = {}
    groups: dict[Group, Way] = {}
    for order in plan.orders:
        epochs = _epochs(order, pricing)
        delayed |= {s: e for s, e, first in zip(order.units, epochs, order.epochs, strict=True) if e != first}
        for members in _members(order, epochs):
            way = pricing.refined(members)
            # The model does not resolve less.
            if way.gain > forecast.look_seconds:
                groups[Group(tuple(zip(members, way.shares, strict=True)), order.runs)] = way
    if not groups:
        return replace(plan, decisions=(*plan.decisions, *_refusals(plan, pricing)))
    made = planned(groups=[*groups], delayed=delayed)
    free = {stage for order in made.orders for stage in order.free}
    if not free.issuperset(stage for group in groups for stage, _ in group.members):
        return plan
    before, after = pricing.times.seconds, pricing.of(made).seconds
    # Where a gain was measured, it counts in the place of what the kernel's time has of it.
    for group, way in groups.items():
        after -= group.runs * (way.gain - pricing.way([stage for stage, _ in group.members], way.shares).gain)
    taken = after < before
    kernel = f"; {_us(after)} µs for the kernel, {_us(before)} µs with all one after the other"
    kernel = "" if any(way.measured for way in groups.values()) else kernel
    decisions = [
        Decision("hfuse", _names(group.members), taken, f"{_compared(group, way, pricing)}{kernel}")
        for group, way in groups.items()
    ]
    return replace(made if taken else plan, decisions=(*plan.decisions, *decisions))


def considered(plan: CallPlan, forecast: KernelForecast | None, teams: int) -> Iterator[Considered]:
    """The stages of a kernel that could be side by side, with each way to do it.

    Parameters
    ----------
    plan, forecast, teams
        As for :func:`side_by_side`.
    """
    if forecast is None or not any(len(order.free) > 1 for order in plan.orders):
        return
    pricing = WayPrices(plan, forecast, teams, True, None)
    for order in plan.orders:
        for members in _members(order, _epochs(order, pricing)):
            if len(members) < 2 or not pricing.times.blocks:
                continue
            ways = pricing.predicted(members)
            parted = max((way for way in ways if way.parted), key=lambda way: way.gain, default=None)
            near = pricing.divisions.near(members, parted.shares) if parted and pricing.divisions else ()
            ways += [pricing.way(members, shares) for shares in near]
            ways.sort(key=lambda way: -way.gain)
            apart = sum(map(pricing.seconds, members))
            yield Considered(members, order.runs, pricing.form, plan.shape.blocks_per_sm, apart, tuple(ways))


def _compared(group: Group, way: Way, pricing: WayPrices) -> str:
    """What the stages of a group take in both ways."""
    times = f", {group.runs} times" if group.runs > 1 else ""
    found = way.measured
    if found is not None:
        beside, apart, said = found.seconds, found.origin.own_seconds, f"measured on {found.origin.device}"
    else:
        apart = sum(pricing.seconds(stage) for stage, _ in group.members)
        beside, said = apart - way.gain, "predicted"
    return f"{said} to take {_us(beside)} µs side by side, {_us(apart)} µs one after the other{times}"


def _refusals(plan: CallPlan, pricing: WayPrices) -> Iterator[Decision]:
    """That nothing is gained by the stages that could be side by side."""
    for order in plan.orders:
        for members in _members(order, order.epochs):
            if len(members) > 1:
                names = _names([(stage, ALL_WORKERS) for stage in members])
                found = next(pricing.measured(members), None)
                said = "predicted" if found is None else f"measured on {found.measured.origin.device}"
                yield Decision("hfuse", names, False, f"{said} to take as long as one after the other")


def _members(order: EpochOrder, epochs: Sequence[int]) -> Iterator[tuple[Stage, ...]]:
    """For each epoch the stages that may be side by side there."""
    for epoch in range(max(epochs) + 1):
        yield tuple(u for u, e in zip(order.units, epochs, strict=True) if e == epoch and u in order.free)


def _epochs(order: EpochOrder, pricing: WayPrices) -> tuple[int, ...]:
    """The epochs of units where the longest of those that may wait are where they gain most."""
    epochs = dict(zip(order.units, order.epochs, strict=True))
    members: dict[int, list[Stage]] = {}
    for unit in order.units:
        if unit in order.free:
            members.setdefault(epochs[unit], []).append(unit)

    def gained(stages: Collection[Stage]) -> float:
        return pricing.best(tuple(unit for unit in order.units if unit in stages)).gain

    waiting = [stage for stage in order.units if stage in order.free and last_epoch(stage, epochs) > epochs[stage]]
    for stage in sorted(waiting, key=lambda stage: -pricing.seconds(stage))[:_MOST_WAITING]:
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
    """The last epoch in which a stage can be: the one before its first reader's.

    What stays in shared memory has its place behind what the stages need that run meanwhile, in the order that there
    was: one that needs more has to be where it is.
    """
    starts = [window.start for unit in epochs if isinstance(unit, Stage) for _, window in unit.windows]
    if starts and stage.pool_bytes > min(starts):
        return epochs[stage]
    made = {*stage.outputs}
    readers = [epoch for unit, epoch in epochs.items() if unit is not stage and made & {*unit.inputs}]
    return min(readers, default=max(epochs.values()) + 1) - 1


def _names(members: Sequence[tuple[Stage, Share]]) -> str:
    """The stages with who computes each, as many as one reads."""
    named = [f"{stage.name}{'' if share == ALL_WORKERS else f' ({share})'}" for stage, share in members[:_NAMED]]
    return " | ".join(named) + (f" | {len(members) - _NAMED} more" if len(members) > _NAMED else "")


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"
