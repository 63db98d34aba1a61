"""Predicted times of a run of stages in every kernel that could be made of consecutive ones, and the best cuts.

A stage's time in a kernel depends on what the kernel's blocks ask for, which is the most that any of its stages does.
So there are few distinct kernels in this sense (classes): one for each number of blocks that registers leave resident,
times one for each amount of shared memory. For a run of ``n`` stages

    cost(a..b) = sum over s in a..b of believed(s, class(a..b)) + barriers(a..b) × sync(blocks(a..b)) / error
    best(b)    = min over a of best(a - 1) + launch + cost(a..b)

is exact, with ``believed(s, c) = max(0, seconds(s, c) / error - seconds(s alone))``: what a stage loses in a kernel
counts as far as it exceeds what the model may be wrong by. A stage that loses nothing that is worth believing speaks
for no cut, so equal costs give none. A barrier costs by the kernel's blocks: as many as are resident, and no more than
its widest stage has tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from souffle.multiprocessor import MOST_REGISTERS
from souffle.partition.planner import Demand, Forecast, PartitionRequest, breadth_first, depths
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import LoopStage, Unit, flat_stages

__all__ = ["PricedRun", "Segment"]

_NEVER = 1e3
"""Seconds, for a kernel of which no block fits: more than any run, and little enough to be summed exactly."""

_EQUAL = 1e-12
"""Seconds that are no difference."""


@dataclass(frozen=True)
class Segment:
    """Units `first` to `last`, both inclusive, as one kernel."""

    first: int
    last: int

    @property
    def numbers(self) -> range:
        """Of its units."""
        return range(self.first, self.last + 1)


class PricedRun:
    """Consecutive units, none of which is an operator that is no TE, with their predicted times.

    Parameters
    ----------
    units : sequence of Stage or LoopStage
        In any topological order.
    request : PartitionRequest
    forecast : Forecast

    Attributes
    ----------
    units : tuple of Stage or LoopStage
        Breadth first: the barriers of consecutive ones are then the levels that they span, or one fewer where a
        segment's first level is not whole.
    """

    def __init__(self, units: Sequence[Unit], request: PartitionRequest, forecast: Forecast) -> None:
        self.units = breadth_first(units)
        self.request = request
        self.forecast = forecast
        self.demands = [request.demand(unit) for unit in self.units]
        self.depth = np.array(depths(self.units))
        self.threads = max(demand.threads for demand in self.demands)
        self._inner = np.array([_barriers_inside(unit) for unit in self.units])
        self._tiles = np.array([max(stage.schedule.tiles for stage in flat_stages([unit])) for unit in self.units])
        # Registers matter by the blocks that they leave resident: the most of each such level stand for it.
        levels = [self.resident(demand.registers, 0) for demand in self.demands]
        most: dict[int, int] = {}
        for level, demand in zip(levels, self.demands, strict=True):
            most[level] = max(demand.registers, most.get(level, 0))
        falling = sorted(most, reverse=True)
        self._registers = [most[level] for level in falling]
        self._shared = sorted({demand.shared_bytes for demand in self.demands})
        self._row = np.array([falling.index(level) for level in levels])
        self._column = np.array([self._shared.index(demand.shared_bytes) for demand in self.demands])

    @property
    def whole(self) -> Segment:
        """All units as one kernel."""
        return Segment(0, len(self.units) - 1)

    def demand(self, segment: Segment) -> Demand:
        """What a segment asks for."""
        return reduce(Demand.joined, self.demands[segment.first : segment.last + 1])

    def resident(self, registers: int, shared_bytes: int) -> int:
        """Blocks of such a kernel on one multiprocessor."""
        return min(self.request.device.resident_blocks(self.threads, shared_bytes, registers).values())

    def unit_seconds(self, number: int, segment: Segment) -> float:
        """The time of a unit, without barriers, in the kernel of a segment that holds it."""
        here = slice(segment.first, segment.last + 1)
        return float(self._seconds[self._row[here].max(), self._column[here].max(), number])

    def seconds(self, segments: Sequence[Segment]) -> float:
        """The predicted time of all: stages, barriers and launches."""
        stages = sum(self.unit_seconds(number, segment) for segment in segments for number in segment.numbers)
        barriers = sum(map(self._barrier_seconds, segments))
        return stages + barriers + len(segments) * self.forecast.launch_seconds

    def sync_seconds(self, segment: Segment) -> float:
        """The time of a grid sync in the kernel of a segment."""
        here = slice(segment.first, segment.last + 1)
        row, column = self._row[here].max(), self._column[here].max()
        return float(self._sync(row, column, self._tiles[here].max()))

    def _sync(self, row: np.ndarray, column: np.ndarray, tiles: np.ndarray) -> np.ndarray:
        return self.forecast.grid_sync_seconds(np.maximum(1, np.minimum(tiles, self._blocks[row, column])))

    def _barrier_seconds(self, segment: Segment) -> float:
        """Of all barriers in the kernel of a segment."""
        count = (
            self._inner[segment.first : segment.last + 1].sum() + self.depth[segment.last] - self.depth[segment.first]
        )
        return float(count) * self.sync_seconds(segment)

    def best(self) -> tuple[Segment, ...]:
        """The segments of least cost, the fewest among equals."""
        count = len(self.units)
        row, column, tiles = np.zeros(count, int), np.zeros(count, int), np.zeros(count, int)
        least = np.zeros(count + 1)
        start = [0] * count
        sums = _sums(self._believed())
        inner = np.concatenate([[0], np.cumsum(self._inner)])
        for last in range(count):
            here = slice(0, last + 1)
            row[here] = np.maximum(row[here], self._row[last])
            column[here] = np.maximum(column[here], self._column[last])
            tiles[here] = np.maximum(tiles[here], self._tiles[last])
            lost = sums[row[here], column[here], last + 1] - sums[row[here], column[here], np.arange(last + 1)]
            barriers = self.depth[last] - self.depth[here] + inner[last + 1] - inner[here]
            waits = barriers * self._sync(row[here], column[here], tiles[here]) / self.forecast.error
            cost = least[here] + lost + waits + self.forecast.launch_seconds
            start[last] = int(np.argmax(cost <= cost.min() + _EQUAL))
            least[last + 1] = cost[start[last]]
        segments: list[Segment] = []
        last = count - 1
        while last >= 0:
            segments.append(Segment(start[last], last))
            last = start[last] - 1
        return tuple(reversed(segments))

    def best_split(self, segments: Sequence[Segment]) -> tuple[Segment, Segment] | None:
        """The best cut, or least bad, of one of some segments in two as predicted; None if none has two units."""
        sums = _sums(self._seconds)
        found: tuple[float, Segment, Segment] | None = None
        for segment in segments:
            here = slice(segment.first, segment.last + 1)
            row, column = np.maximum.accumulate(self._row[here]), np.maximum.accumulate(self._column[here])
            back = (np.maximum.accumulate(axis[here][::-1])[::-1] for axis in (self._row, self._column))
            row_after, column_after = back
            whole = self.unit_sum(segment) + self._barrier_seconds(segment)
            for at in segment.numbers[1:]:
                k = at - segment.first
                before = sums[row[k - 1], column[k - 1], [at, segment.first]]
                after = sums[row_after[k], column_after[k], [segment.last + 1, at]]
                parts = Segment(segment.first, at - 1), Segment(at, segment.last)
                waits = sum(map(self._barrier_seconds, parts))
                gain = whole - waits - (before[0] - before[1] + after[0] - after[1])
                if found is None or gain > found[0] + _EQUAL:
                    found = (gain, *parts)
        return None if found is None else found[1:]

    def unit_sum(self, segment: Segment) -> float:
        """The time of all units of a segment in its kernel, without barriers."""
        return sum(self.unit_seconds(number, segment) for number in segment.numbers)

    def blocks(self, segment: Segment) -> tuple[int, int]:
        """Resident blocks to ask for, and the most that the stages leave room for.

        Asked for are the fewest with which the stages are predicted to take no longer than with the most: a kernel held
        to more would spill registers for nothing. The most is what the stages' own registers leave, so that only those
        that merging adds are ever spilled, where a stage is called.

        Returns
        -------
        asked, most : int
        """
        demand = self.demand(segment)
        most = max(1, self.resident(demand.registers, demand.shared_bytes))
        units = [self.units[number] for number in segment.numbers]
        if len(flat_stages(units)) == 1:
            return 1, most  # nothing is merged
        full = sum(self._time(unit, demand.registers, demand.shared_bytes) for unit in units)
        for asked in range(1, most):
            registers = max(r for r in range(1, MOST_REGISTERS + 1) if self.resident(r, 0) >= asked)
            if sum(self._time(unit, registers, demand.shared_bytes) for unit in units) <= full + _EQUAL:
                return asked, most
        return most, most

    @cached_property
    def _blocks(self) -> np.ndarray:
        """That are resident on the device, of a kernel of each class."""
        sms = self.request.device.sm_count
        return np.array([[sms * self.resident(r, s) for s in self._shared] for r in self._registers])

    @cached_property
    def _seconds(self) -> np.ndarray:
        """Of each unit in each class that can hold it: by registers, by shared memory, by unit."""
        found = np.zeros((len(self._registers), len(self._shared), len(self.units)))
        for number, unit in enumerate(self.units):
            for row in range(self._row[number], len(self._registers)):
                for column in range(self._column[number], len(self._shared)):
                    found[row, column, number] = self._time(unit, self._registers[row], self._shared[column])
        return found

    def _believed(self) -> np.ndarray:
        """What each unit loses in each class, beyond the model's error, against its own class."""
        numbers = np.arange(len(self.units))
        alone = self._seconds[self._row, self._column, numbers]
        return np.maximum(0.0, self._seconds / self.forecast.error - alone)

    def _time(self, unit: Unit, registers: int, shared_bytes: int) -> float:
        kernel = StageResources(registers, 0, shared_bytes, self.threads, 0, True)
        steps = unit.loop.steps if isinstance(unit, LoopStage) else 1
        return min(_NEVER, steps * sum(self.forecast.seconds(stage, kernel) for stage in flat_stages([unit])))


def _sums(values: np.ndarray) -> np.ndarray:
    """Those before each unit, in each class."""
    return np.concatenate([np.zeros((*values.shape[:2], 1)), values.cumsum(2)], 2)


def _barriers_inside(unit: Unit) -> int:
    """Grid syncs of a unit: a loop has one for each level of each step, before the first of which it needs none."""
    if not isinstance(unit, LoopStage):
        return 0
    return unit.loop.steps * (max(depths(unit.stages)) + 1) - 1
