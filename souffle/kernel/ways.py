"""The ways to compute independent stages of a kernel side by side, and what each gains: predicted, or measured before.

A gain is by the formula that everything else is priced with (:mod:`souffle.cost.side_by_side`), unless a tuning log has
a time of the same stages, with the same schedules and in such blocks (:mod:`souffle.schedule.arrangement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

from souffle.cost.kernel import KernelForecast, KernelTimes
from souffle.kernel.block_parts import Divisions
from souffle.kernel.calls import CallPlan
from souffle.schedule.arrangement import Arrangement, Arrangements, BlockForm
from souffle.schedule.lower import text_of
from souffle.schedule.lower.shares import ALL_WORKERS, Share
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import Stage, flat_stages

__all__ = ["Way", "WayPrices", "arrangements"]

_LONGEST = 4
"""Of an epoch's stages so many are tried in thread space: the longest."""

_MOST_IN_THREADS = 3
"""Stages that share a block's teams."""


@dataclass(frozen=True)
class Way:
    """A way to compute independent stages side by side.

    Attributes
    ----------
    shares : tuple of Share
        For each stage.
    gain : float
        Seconds that it takes less than the stages one after the other.
    grid : int
        Blocks of a launch.
    measured : Arrangement or None
        Whose figure that is; without, it is predicted.
    """

    shares: tuple[Share, ...]
    gain: float
    grid: int = 0
    measured: Arrangement | None = None

    @property
    def parted(self) -> bool:
        """Whether stages have parts of a block."""
        return any(share.part for share in self.shares)


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


class WayPrices:
    """What stages of one kernel take side by side; each set of them once.

    Parameters
    ----------
    plan : CallPlan
        With barriers, and not in teams yet.
    forecast : KernelForecast
    teams : int
        Of each block.
    parts : bool
        Whether a block may be divided in parts, too.
    arrangements : Arrangements, optional
        What was measured.

    Attributes
    ----------
    times : KernelTimes
        Of a launch with all one after the other.
    form : BlockForm
        Of the kernel.
    """

    def __init__(
        self, plan: CallPlan, forecast: KernelForecast, teams: int, parts: bool, arrangements: Arrangements | None
    ) -> None:
        self.plan, self.forecast, self.teams, self.arrangements = plan, forecast, teams, arrangements
        self.block: StageResources = forecast.together(flat_stages(plan.stages))
        self.times = self.of(plan)
        self.form = BlockForm(plan.shape.threads, teams, self.times.blocks // teams)
        self.divisions = Divisions(plan.shape, teams, forecast.device.limits.arch) if parts else None
        self._known: dict[tuple[Stage, ...], Way] = {}

    def of(self, plan: CallPlan) -> KernelTimes:
        """The times of a launch."""
        shape, options = plan.shape, {"teams": self.teams, "groups": plan.groups, "begun": plan.begun}
        waits = shape.grid_syncs, shape.flag_waits
        return self.forecast.times(plan.stages, self.block, shape.tiles, *waits, fewer=True, **options)

    def seconds(self, stage: Stage) -> float:
        """Of a stage by itself."""
        launch = {"grid": self.times.grid, "teams": self.teams}
        return self.forecast.seconds(stage, self.block, self.times.blocks, **launch)

    def best(self, stages: tuple[Stage, ...]) -> Way:
        """The best way to compute stages side by side; one after the other if none gains."""
        apart = Way((ALL_WORKERS,) * len(stages), 0.0)
        if len(stages) < 2 or not self.times.blocks:
            return apart
        if stages not in self._known:
            best = next(self.measured(stages), None) or self.best_predicted(stages)
            self._known[stages] = best if best.gain > 0.0 else apart
        return self._known[stages]

    def refined(self, stages: tuple[Stage, ...]) -> Way:
        """The same, with parts in whole warps: only of stages that will be side by side, for each size is scheduled."""
        best = self.best(stages)
        if best.measured or self.divisions is None:
            return best
        ways = [self.way(stages, shares) for shares in self.divisions.near(stages, best.shares)]
        near = max(ways, key=lambda way: way.gain, default=best)
        return near if near.gain > best.gain + self.forecast.look_seconds else best

    def predicted(self, stages: Sequence[Stage]) -> list[Way]:
        """The ways to compute stages side by side, those in parts behind the others."""
        tiles = [stage.schedule.tiles for stage in stages]
        longest = sorted(range(len(stages)), key=lambda n: -self.seconds(stages[n]))[:_LONGEST]
        several: list[Iterable[tuple[Share, ...]]] = [arrangements(tiles, longest, self.teams)]
        if self.divisions is not None:
            several.append(self.divisions.of(stages, longest))
        return [self.way(stages, shares) for ways in several for shares in ways]

    def best_predicted(self, stages: Sequence[Stage]) -> Way:
        """That gains most as predicted."""
        ways = self.predicted(stages)
        best = max((way for way in ways if not way.parted), key=lambda way: way.gain)
        parted = max((way for way in ways if way.parted), key=lambda way: way.gain, default=best)
        # Parts have code of their own, and the model does not resolve less.
        return parted if parted.gain > best.gain + self.forecast.look_seconds else best

    def measured(self, stages: tuple[Stage, ...]) -> Iterator[Way]:
        """The ways that were measured and that there are now, the best first."""
        if not self.arrangements:
            return
        texts = [text_of(stage.functions) for stage in stages]
        for one in self.arrangements.of(self.form, texts):
            shares = self.shares_of(stages, one)
            if shares:
                yield Way(shares, one.gain, self.grid(stages, shares), one)

    def shares_of(self, stages: Sequence[Stage], one: Arrangement) -> tuple[Share, ...]:
        """The shares that were measured; none where parts have no such schedules any more."""
        forms = [stage.share for stage in one.stages]
        if any(team + teams > self.teams or (team and not teams) for team, teams, *_ in forms):
            return ()
        chosen = [number for number, (*_, threads) in enumerate(forms) if threads]
        if not chosen:
            return tuple(Share(team, teams, shift) for team, teams, shift, _ in forms)
        sizes = [forms[number][-1] for number in chosen]
        shares = next(self.divisions.made(stages, chosen, sizes), ()) if self.divisions else ()
        parts = [text_of([share.part.function]) if share.part else "" for share in shares]
        return shares if parts == [stage.part for stage in one.stages] else ()

    def way(self, stages: Sequence[Stage], shares: tuple[Share, ...]) -> Way:
        """As it is predicted."""
        members = tuple(zip(stages, shares, strict=True))
        grid, launch = self.grid(stages, shares), (self.block, self.times.blocks)
        gain = self.forecast.gained_seconds(members, *launch, grid, self.teams, waits=self.times.grid > 0)
        return Way(shares, gain, grid)

    def grid(self, stages: Sequence[Stage], shares: Sequence[Share]) -> int:
        """Blocks of a launch with stages side by side."""
        tiles = max(stage.schedule.tiles + share.shift for stage, share in zip(stages, shares, strict=True))
        return max(1, min(max(tiles, self.plan.shape.tiles), self.form.resident))
