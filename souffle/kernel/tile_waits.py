"""Which barriers of a kernel become flags: tiles then wait for the tiles that they need, and not all blocks for all.

A *site* is where a grid barrier stands (:mod:`souffle.kernel.waits`): before an epoch, or between the steps of a loop.
A dependence crosses the sites between its two stages. A grid barrier at one of them is enough for it; if flags are at
all of them, the later stage's tiles wait for the earlier one's, at the first site crossed. So flags may be at a site if
each dependence that crosses no grid barrier then is between two stages, and they are where that is
predicted to take less: a wait for ``n`` blocks takes what a barrier of ``n`` blocks does, and one for flags that have
been waited for before a look at them.

Around loops all blocks wait. Memory is reused across grid barriers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from souffle.kernel.tile_bands import TileBand, band_around
from souffle.schedule.stage import Stage, Unit

__all__ = [
    "Crossing",
    "PlacedFlags",
    "SiteWait",
    "WaitPrices",
    "crossed_sites",
    "place_flags",
]

Site = int


@dataclass(frozen=True)
class WaitPrices:
    """What waits cost, in seconds.

    Attributes
    ----------
    blocks : int
        Of the kernel.
    barrier : callable
        Of so many blocks for each other.
    awaited : callable
        Of a block for the flags of so many blocks of so many.
    look : float
        At a flag that is there.
    turns : callable
        How many slots of a stage the busiest block computes: it waits before each.
    """

    blocks: int
    barrier: Callable[[int], float]
    awaited: Callable[[int, int], float]
    look: float
    turns: Callable[[Stage], int]


@dataclass(frozen=True, eq=False)
class Crossing:
    """`later` must come after `earlier`, on blocks that may differ.

    Attributes
    ----------
    earlier, later : Unit
    sites : tuple of (int, int)
        Those between the two, in order: the site, and how many steps of the loop before the later stage's.
    ends : pair of ndarray, or None
        For each slot of `later` the first and the last of `earlier` that it needs; ``None`` where nobody knows.
    slots : int
        Of `earlier`.
    """

    earlier: Unit
    later: Unit
    sites: tuple[tuple[Site, int], ...]
    ends: tuple[np.ndarray, np.ndarray] | None
    slots: int = 0


@dataclass(frozen=True)
class SiteWait:
    """Tiles of a stage wait for those of a band to have arrived at a site, so many steps ago."""

    site: Site
    ago: int
    band: TileBand


@dataclass(frozen=True, eq=False)
class PlacedFlags:
    """Where flags are, and who waits for which.

    Attributes
    ----------
    sites : frozenset of int
        Those that have no grid barrier any more.
    waits : mapping of Stage to tuple of SiteWait
    """

    sites: frozenset[Site] = frozenset()
    waits: Mapping[Unit, tuple[SiteWait, ...]] = field(default_factory=dict)

    @property
    def heard(self) -> frozenset[Site]:
        """Those at which somebody waits for an arrival; at the others the threads of a block wait for each other."""
        return frozenset(wait.site for waits in self.waits.values() for wait in waits)


def place_flags(
    sites: Mapping[Site, int], crossings: Sequence[Crossing], prices: WaitPrices, *, runs: int = 1, always: bool
) -> PlacedFlags:
    """Where flags take less than barriers, or wherever they can be.

    Parameters
    ----------
    sites : mapping of int to int
        Those at which all blocks wait, with how often.
    crossings : sequence of Crossing
    prices : WaitPrices
    runs : int
        How often each stage runs, and waits for flags.
    always : bool
        Wherever they can be.
    """
    return _Chooser(sites, crossings, prices, runs).best(always=always)


class _Chooser:
    def __init__(self, sites: Mapping[Site, int], crossings: Sequence[Crossing], prices: WaitPrices, runs: int) -> None:
        self.sites, self.crossings, self.prices, self.runs = sites, crossings, prices, runs
        self.at: dict[Site, list[Crossing]] = {}
        for crossing in crossings:
            for site in dict.fromkeys(site for site, _ in crossing.sites):
                self.at.setdefault(site, []).append(crossing)
        self._bands: dict[tuple[Crossing, ...], TileBand | None] = {}

    def best(self, *, always: bool) -> PlacedFlags:
        found: frozenset[Site] = frozenset()
        seconds = self.seconds(found)
        for site in sorted(self.sites):
            tried = found | {site}
            if not self.legal(tried, self.at.get(site, ())):
                continue
            after = seconds if always else self.seconds(tried)
            if always or after < seconds:
                found, seconds = tried, after
        return PlacedFlags(found, self.waits(found))

    def legal(self, flags: frozenset[Site], crossings: Iterable[Crossing]) -> bool:
        return all(crossing.ends is not None or not self.bare(crossing, flags) for crossing in crossings)

    def bare(self, crossing: Crossing, flags: frozenset[Site]) -> bool:
        """Whether all sites that a dependence crosses have flags."""
        return all(site in flags for site, _ in crossing.sites)

    def waits(self, flags: frozenset[Site]) -> dict[Unit, tuple[SiteWait, ...]]:
        """What each stage waits for: once for each arrival that it needs."""
        needed: dict[Unit, dict[tuple[Site, int], list[Crossing]]] = {}
        for crossing in self.crossings:
            if crossing.sites and self.bare(crossing, flags):
                needed.setdefault(crossing.later, {}).setdefault(crossing.sites[0], []).append(crossing)
        found: dict[Unit, tuple[SiteWait, ...]] = {}
        for stage, parts in needed.items():
            bands = ((site, ago, self.band(tuple(own))) for (site, ago), own in parts.items())
            found[stage] = tuple(SiteWait(site, ago, band) for site, ago, band in bands if band is not None)
        return {stage: waits for stage, waits in found.items() if waits}

    def band(self, crossings: tuple[Crossing, ...]) -> TileBand | None:
        """The slots that any of some dependences needs."""
        if crossings not in self._bands:
            firsts = [np.where(c.ends[0] <= c.ends[1], c.ends[0], 2**31) for c in crossings]
            first, last = np.minimum.reduce(firsts), np.maximum.reduce([c.ends[1] for c in crossings])
            self._bands[crossings] = band_around(first, last, max(c.slots for c in crossings))
        return self._bands[crossings]

    def seconds(self, flags: frozenset[Site]) -> float:
        """What all blocks, and tiles, wait."""
        prices = self.prices
        barrier = prices.barrier(prices.blocks)
        total = sum(runs * barrier for site, runs in self.sites.items() if site not in flags)
        first: set[Site] = set()
        for stage, waits in self.waits(flags).items():
            for wait in waits:
                looks = prices.turns(stage)
                if wait.site not in first:
                    first.add(wait.site)
                    looks -= 1
                    total += self.runs * prices.awaited(wait.band.width, prices.blocks)
                total += self.runs * looks * prices.look
        return total


def crossed_sites(earlier: int, later: int, distance: int, last: int, *, between: bool) -> tuple[tuple[Site, int], ...]:
    """Sites between an epoch of a step and one of a step `distance` later; each but site 0 stands before its epoch.

    Outside of loops the distance is 0. Site 0 stands between steps, if `between`.

    Parameters
    ----------
    earlier, later : int
        Epochs in a step, of which `last` is the last.
    distance : int
    last : int
    between : bool
    """
    found: list[tuple[Site, int]] = []
    for ago in range(distance, -1, -1):
        begin = earlier + 1 if ago == distance else 0 if between else 1
        end = later if ago == 0 else last
        found += [(site, ago) for site in range(begin, end + 1)]
    return tuple(found)
