"""What a kernel is predicted to take, with the barriers that it really has.

A kernel waits as often as the longest path of its dependent stages has edges that leave their block
(:mod:`souffle.kernel.waits`): stages that do not depend on each other share a barrier, and tiles that stay on one block
need none. So a stage has no barrier of its own, and what a barrier costs is known of whole kernels only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from souffle.cost import KernelForecast
from souffle.cost.kernel import KernelTimes
from souffle.kernel.dependences import TileDependences
from souffle.kernel.kernel_plan import plan_kernel
from souffle.options import BARRIERS, Waiting
from souffle.partition import Partition, PartitionRequest, Subprogram
from souffle.program import Tensor
from souffle.schedule.stage import LoopStage, Stage, Unit, flat_stages

__all__ = ["KernelPrice", "KernelPrices", "runs_of"]


@dataclass(frozen=True)
class KernelPrice:
    """What one launch of a kernel takes.

    Attributes
    ----------
    times : KernelTimes
    grid_syncs : int
        Its barriers of the whole grid.
    teams : int
        Of a block.
    begun : frozenset of int
        Its stages whose first copies are made while blocks wait, by their numbers among all.
    """

    times: KernelTimes
    grid_syncs: int
    teams: int = 1
    begun: frozenset[int] = frozenset()

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.times.seconds


class KernelPrices:
    """Prices the kernels of one forecast, each distinct one once.

    Parameters
    ----------
    constants : mapping of Tensor
        Of the program.
    dependences : TileDependences
        What is found out about the tiles of stages is kept in it.
    waiting : Waiting
        What may stand between the stages of a kernel.
    """

    def __init__(
        self, constants: Mapping[Tensor, object], dependences: TileDependences, waiting: Waiting = BARRIERS
    ) -> None:
        self.constants = constants
        self.waiting = waiting
        self.dependences = dependences
        self._known: dict[tuple[object, ...], KernelPrice] = {}
        self._alone: dict[tuple[Stage, bool], KernelTimes] = {}
        self._fetches: tuple[tuple[Unit, ...], bool] = (), False

    def kernel(self, subprogram: Subprogram, request: PartitionRequest, forecast: KernelForecast) -> KernelPrice:
        """The price of a subprogram as one kernel."""
        units, fetches = subprogram.stages, self.fetches(request, forecast)
        key = (fetches, *((unit.loop, *unit.stages) if isinstance(unit, LoopStage) else unit for unit in units))
        if key not in self._known:
            self._known[key] = self._priced(subprogram, request, forecast, fetches)
        return self._known[key]

    def partition(self, partition: Partition, request: PartitionRequest, forecast: KernelForecast) -> float:
        """The seconds of all kernels of a partition."""
        return sum(self.kernel(subprogram, request, forecast).seconds for subprogram in partition.subprograms)

    def apart(self, unit: Unit, request: PartitionRequest, forecast: KernelForecast) -> float:
        """The seconds of a unit where each of its stages is a kernel of its own, in each step of a loop."""
        return runs_of(unit) * sum(self.alone(stage, request, forecast).seconds for stage in flat_stages([unit]))

    def alone(self, stage: Stage, request: PartitionRequest, forecast: KernelForecast) -> KernelTimes:
        """The times of a stage as a kernel of its own, once."""
        fetches = self.fetches(request, forecast)
        if (stage, fetches) not in self._alone:
            block = forecast.together([stage])
            times = forecast.times([stage], block, stage.schedule.tiles, 0, fewer=False, fetches=fetches)
            self._alone[stage, fetches] = times
        return self._alone[stage, fetches]

    def like(
        self, price: KernelPrice, units: Sequence[Unit], request: PartitionRequest, forecast: KernelForecast
    ) -> float:
        """Seconds of some units in a kernel with the barriers, teams and prologues of one whose price is known.

        Nothing is planned: where tiles wait for tiles and stages run side by side is left out, so that it compares
        only with what it says of other units.
        """
        block = forecast.together(flat_stages(units))
        tiles, fetches = max(stage.schedule.tiles for stage in flat_stages(units)), self.fetches(request, forecast)
        begun = {stage for number, stage in enumerate(flat_stages(units)) if number in price.begun}
        how = {"fewer": True, "fetches": fetches, "teams": price.teams, "begun": begun}
        return forecast.times(units, block, tiles, price.grid_syncs, **how).seconds

    def fetches(self, request: PartitionRequest, forecast: KernelForecast) -> bool:
        """Whether the code of the network's stages is more than an instruction cache holds."""
        if self._fetches[0] is not request.stages:
            self._fetches = request.stages, forecast.fetches(request.stages)
        return self._fetches[1]

    def _priced(
        self, subprogram: Subprogram, request: PartitionRequest, forecast: KernelForecast, fetches: bool
    ) -> KernelPrice:
        units = subprogram.stages
        block = forecast.together(flat_stages(units))
        if not forecast.resident(block) or _is_one_stage(units):
            tiles = max(stage.schedule.tiles for stage in flat_stages(units))
            return KernelPrice(forecast.times(units, block, tiles, 0, fewer=True, fetches=fetches), 0)
        plan = plan_kernel(subprogram, request, self.constants, self.waiting, self.dependences, prefetch=False)
        shape, options = plan.shape, {"teams": plan.shape.team_count, "groups": plan.groups, "begun": plan.begun}
        waits = shape.grid_syncs, shape.flag_waits
        times = forecast.times(units, block, shape.tiles, *waits, fewer=True, fetches=fetches, **options)
        begun = (number for number, stage in enumerate(flat_stages(units)) if stage in plan.begun)
        return KernelPrice(times, shape.grid_syncs, shape.team_count, frozenset(begun))


def runs_of(unit: Unit) -> int:
    """How often a kernel runs each stage of a unit."""
    return unit.loop.steps if isinstance(unit, LoopStage) else 1


def _is_one_stage(units: Sequence[Unit]) -> bool:
    return len(units) == 1 and isinstance(units[0], Stage)
