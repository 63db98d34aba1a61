"""How long a stage takes inside a kernel, which gives it the occupancy of the kernel's most demanding stage.

A kernel is on the device as a whole: its blocks hold the registers, the shared memory and the threads of the stage that
asks for the most of each, so that fewer of them are resident while the others run. And a stage inside a network finds
what the stages before it wrote in the L2 cache, as far as it fits there; weights and the network's inputs come from
device memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from souffle.cost.code import fetching_runs, fits
from souffle.cost.counting import Work
from souffle.cost.device import CostDevice, device_of_arch
from souffle.cost.predict import Terms, estimated_registers, predict_work, registers_with_constants, tile_clocks
from souffle.cost.side_by_side import clocks_side_by_side, in_rows, multiprocessor_queues, worker_of
from souffle.cost.work import work_of
from souffle.program import Tensor, TEProgram
from souffle.schedule.gpu.device import GpuDevice
from souffle.schedule.group import Group, Members
from souffle.schedule.lower import DeviceFunction
from souffle.schedule.lower.shares import ALL_WORKERS
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import LoopStage, Stage, Unit, flat_stages

__all__ = [
    *("ASKED_TOGETHER", "MEDIAN_ERROR", "RELATIVE_ERROR"),
    *("Figures", "KernelForecast", "KernelTimes", "forecast_on"),
]

MEDIAN_ERROR = 1.21
"""Half of the kernels measured on an A100 were predicted within this factor while ours were tiled like them, as
``docs/results/cost_against_measured.json`` records. What a decision gains must exceed it."""

RELATIVE_ERROR = 1.12
"""The same of two ways to compute one sum, of which the model errs alike: half of the pairs of 281 tilings of products
that an H100 ran, as ``docs/results/tiling_choice.json`` records."""

ASKED_TOGETHER = 1 << 16
"""Bytes up to which a constant of which each step of a loop has its own part is asked for as a whole before the loop
where weights are asked for ahead (level V4)."""

_WIDE_STAGES = 4
"""Grids of as many blocks as a stage has tiles are tried for so many stages, those of the most tiles."""


@dataclass(eq=False)
class Figures:
    """What is worked out about stages on a device, shared by forecasts of several ways to make them of one program.

    Attributes
    ----------
    terms, fills, gains : dict
        Of :meth:`KernelForecast.terms`, of constants that are read ahead, and of stages side by side, each by all that
        it comes of.
    """

    terms: dict[object, tuple[Terms, ...]] = field(default_factory=dict)
    fills: dict[object, tuple[float, float]] = field(default_factory=dict)
    gains: dict[object, float] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelTimes:
    """Predicted seconds of a launch of a kernel.

    Attributes
    ----------
    launch, waiting, stages : float
        Of the launch or graph node, of all barriers, of all runs of its stages.
    code : float
        Of the stages: what they take longer for machine code that is not in the instruction cache.
    blocks : int
        With which it is launched at most, or teams of them; 0 where none fits, and the times are infinite.
    grid : int
        Blocks of the launch where all must be there at once; 0 where nobody waits.
    """

    launch: float
    waiting: float
    stages: float
    blocks: int
    code: float = 0.0
    grid: int = 0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.launch + self.waiting + self.stages


class KernelForecast:
    """Predicts the stages of one program.

    Parameters
    ----------
    device : CostDevice
    units : sequence of Stage or LoopStage
        The program's, lowered, and with what each asks for alone.
    distant : collection of Tensor
        The program's constants and inputs, which no stage has brought into the cache.
    graph : bool
        Whether kernels are the nodes of a CUDA graph. Otherwise each is launched.
    ahead : bool
        Whether kernels ask for weights ahead of barriers (level V4).

    Attributes
    ----------
    product, error, launch_seconds
        See :class:`souffle.partition.Forecast`.
    moved_bytes : dict of Stage to (int, int)
        Those in device memory, and all.
    """

    def __init__(
        self,
        device: CostDevice,
        units: Sequence[Unit],
        distant: Collection[Tensor],
        *,
        graph: bool = False,
        ahead: bool = False,
        figures: Figures | None = None,
    ) -> None:
        self.device = device
        self.product = device.product
        self.error = MEDIAN_ERROR
        self.launch_seconds = device.graph_node_seconds if graph else device.launch_seconds
        far = frozenset(distant)
        self.moved_bytes = {}
        for unit in units:
            self.moved_bytes |= _bytes_moved(unit, far, device.l2_bytes, ASKED_TOGETHER if ahead else 0)
        self._resources = {stage: _estimated(stage, device.limits) for stage in self.moved_bytes}
        self._works: dict[DeviceFunction, Work] = {}
        self._code: dict[DeviceFunction, float] = {}
        self._figures = figures or Figures()

    def alone(self, stage: Stage) -> StageResources:
        """What a stage asks for alone: measured, or with registers estimated from its arrays."""
        return self._resources[stage]

    def together(self, stages: Collection[Stage]) -> StageResources:
        """What a kernel of some stages asks for."""
        return StageResources.together(self.alone(stage) for stage in stages)

    def grid_sync_seconds(self, blocks: int | np.ndarray) -> float | np.ndarray:
        """See :meth:`souffle.partition.Forecast.grid_sync_seconds`."""
        return self.device.grid_sync_seconds(blocks)

    def flag_wait_seconds(self, others: int, blocks: int) -> float:
        """See :meth:`souffle.partition.Forecast.flag_wait_seconds`."""
        return self.device.flag_wait_seconds(others, blocks)

    @property
    def look_seconds(self) -> float:
        """See :meth:`souffle.partition.Forecast.look_seconds`: a load that the L2 cache answers."""
        return self.device.l2_latency_clocks / self.device.clock_hz

    def seconds(self, stage: Stage, kernel: StageResources, most: int | None = None, **launch: int) -> float:
        """See :meth:`souffle.partition.Forecast.seconds`; in a grid of `most` blocks where more would fit.

        `launch` is the `grid` of a cooperative launch, its `teams`, and whether the stage's first copies are `begun`
        before it, for :func:`souffle.cost.predict.predict_work`.
        """
        terms = self.terms(stage, kernel, most, **launch)
        return sum(_seconds(one) for one in terms) if terms else math.inf

    def times(
        self,
        units: Sequence[Unit],
        block: StageResources,
        tiles: int,
        grid_syncs: int,
        flag_waits: Sequence[tuple[int, int, int]] = (),
        *,
        fewer: bool,
        fetches: bool = False,
        teams: int = 1,
        groups: Sequence[Group] = (),
        begun: Collection[Stage] = (),
    ) -> KernelTimes:
        """The times of a kernel of some units.

        Parameters
        ----------
        units : sequence of Stage or LoopStage
        block : StageResources
            What a block of it asks for, or a team of one.
        tiles : int
            That its widest stage has.
        grid_syncs : int
            Barriers of one launch.
        flag_waits : sequence of (int, int, int)
            How often tiles of a stage wait for tiles, for how many blocks at most, 0 where they have been waited for
            before, and before how many slots. One for what has been waited for takes as long as a look at a flag.
        fewer : bool
            Whether it may be launched with fewer blocks than fit: barriers take less then, and stages more. That is
            done where it is worth it though both may be wrong by the model's error.
        fetches : bool
            Whether the kernel's code is not in the instruction cache as it begins (:meth:`fetches`).
        teams : int
            Of each block: stages take what they do with as many blocks as there are teams, barriers less.
        groups : sequence of Group
            Stages that are computed side by side.
        begun : collection of Stage
            Those whose first copies of constants are made while blocks wait before them.
        """
        runs = [(s, u.loop.steps if isinstance(u, LoopStage) else 1) for u in units for s in flat_stages([u])]
        fetching = self._fetching(units) if fetches else [(0,) * len(stage.functions) for stage, _ in runs]

        def with_blocks(most: int) -> KernelTimes:
            blocks = max(1, min(tiles, most // teams))
            grid = blocks if grid_syncs or flag_waits else 0
            launch = {"grid": grid, "teams": teams}
            stages = sum(
                count * self.seconds(stage, block, most, begun=stage in begun, **launch) for stage, count in runs
            )
            stages += sum(self.fill_seconds(stage, block, most, count) for stage, count in runs)
            for group in groups:
                gained = self.gained_seconds(group.members, block, most, blocks, teams, waits=bool(grid))
                stages -= group.runs * gained
            waiting = grid_syncs * self.grid_sync_seconds(blocks)
            for count, others, slots in flag_waits:
                looks = -(-slots // blocks) - bool(others)
                waiting += count * (self.flag_wait_seconds(others, blocks) if others else 0.0)
                waiting += count * looks * self.look_seconds
            code = 0.0
            for (stage, _), counts in zip(runs, fetching, strict=True):
                if any(counts):
                    warm, late = (
                        self.terms(stage, block, most, fetched=fetched, begun=stage in begun, **launch)
                        for fetched in (False, True)
                    )
                    code += sum(n * (_seconds(b) - _seconds(a)) for n, a, b in zip(counts, warm, late, strict=True))
            return KernelTimes(self.launch_seconds, waiting, stages + code, most, code, grid)

        fit = self.resident(block) // teams * teams * self.device.sm_count
        if not fit:
            return KernelTimes(self.launch_seconds, 0.0, math.inf, 0)
        found = with_blocks(fit)
        for most in self._fewer_blocks(runs, fit, tiles, teams) if fewer and (grid_syncs or flag_waits) else ():
            other = with_blocks(most)
            if found.waiting - other.waiting > self.error * max(0.0, other.stages - found.stages):
                found = other
        return found

    def gained_seconds(
        self, members: Members, kernel: StageResources, most: int, blocks: int, teams: int, *, waits: bool
    ) -> float:
        """What stages take less side by side than one after the other, with the same workers.

        Parameters
        ----------
        members : sequence of (Stage, Share)
            Of one function each.
        kernel : StageResources
        most : int
            Workers of the kernel.
        blocks, teams : int
            Of the launch, and of each block.
        waits : bool
            Whether it is a cooperative launch.
        """
        spills = (self._resources[stage].spill_bytes for stage, _ in members)
        key = tuple((stage.functions, self.moved_bytes[stage], share) for stage, share in members)
        key = (key, *spills, kernel.shared_bytes, kernel.threads, kernel.registers, most, blocks, teams, waits)
        known = self._figures.gains
        if key not in known:
            launch = (kernel, most, blocks, teams, waits)
            apart = sum(self.side_by_side_seconds(((stage, ALL_WORKERS),), *launch) for stage, _ in members)
            known[key] = apart - self.side_by_side_seconds(members, *launch)
        return known[key]

    def side_by_side_seconds(
        self, members: Members, kernel: StageResources, most: int, blocks: int, teams: int, waits: bool
    ) -> float:
        """The seconds of stages whose tiles are on the device at the same time; parameters as for `gained_seconds`."""
        tiles, had, parts = [], [], [share.part is not None for _, share in members]
        for stage, share in members:
            own = replace(kernel, spill_bytes=self._resources[stage].spill_bytes)
            function, own, workers = worker_of(stage.functions[0], share, own, most, teams, sum(parts))
            (cold, every), work, count = self.moved_bytes[stage], self._work(function), function.tiles
            tiles.append(tile_clocks(work, count, own, self.device, cold or every, warm=not cold, most=workers))
            had.append(share.tiles_of(count, blocks, teams))
        first = self.device.crowded_multiprocessors if waits else 0
        queues = multiprocessor_queues(in_rows(had, parts), self.device.sm_count, first)
        slowest = max(clocks_side_by_side(tiles, queues_of_one) for queues_of_one in queues)
        # All of a block wait before its parts and behind them.
        slowest += 2 * self.device.barrier_clocks * any(parts)
        moved = sum(own.l2_seconds for own in tiles), sum(own.memory_seconds for own in tiles)
        return max(slowest / self.device.clock_hz, *moved)

    def fill_seconds(self, stage: Stage, kernel: StageResources, most: int, runs: int) -> float:
        """What a stage takes in all its runs to have its constants in registers: once where each tile has a block."""
        if stage.kept is None:
            return 0.0
        fill = stage.kept.fill
        cold = sum(stage.inputs[number].nbytes for number in stage.kept.reads)
        key, known = (fill, cold, most, kernel.shared_bytes, kernel.threads), self._figures.fills
        if key not in known:
            work, own = self._work(fill), replace(kernel, spill_bytes=0)
            once, again = (
                _seconds(predict_work(work, fill.tiles, own, self.device, cold, warm=warm, most=most))
                for warm in (False, True)
            )
            known[key] = once, again
        once, again = known[key]
        return once if most >= fill.tiles else once + (runs - 1) * again

    def _fewer_blocks(self, runs: Sequence[tuple[Stage, int]], fit: int, tiles: int, teams: int) -> list[int]:
        """Grids that may be worth it: as many blocks on each multiprocessor, or one for each tile of a wide stage."""
        each, blocks = self.device.sm_count, min(fit, tiles)
        if teams > 1:
            # One with a team for each tile need not be one with fewer blocks.
            return [*range(each * teams, fit, each * teams)][::-1]
        wide = sorted({stage.schedule.tiles for stage, _ in runs if each < stage.schedule.tiles < blocks})
        return sorted({*range(each, blocks, each), *wide[-_WIDE_STAGES:]}, reverse=True)

    def fetches(self, units: Sequence[Unit]) -> bool:
        """Whether the code of a network of some units is more than the instruction cache of a multiprocessor holds."""
        return not fits(self._code_of(flat_stages(units)), self.device.code_cache_bytes)

    def _code_of(self, stages: Collection[Stage]) -> dict[DeviceFunction, float]:
        """Bytes of the functions of some stages: measured, or as counted where nothing is."""
        for stage in stages:
            if not self._code.keys() >= {*stage.functions}:
                counted = [self._work(function).code_bytes for function in stage.functions]
                measured = self._resources[stage].code_bytes
                scale = 1.0 if measured is None else measured / sum(counted)
                self._code.update((f, own * scale) for f, own in zip(stage.functions, counted, strict=True))
        return {function: self._code[function] for stage in stages for function in stage.functions}

    def _fetching(self, units: Sequence[Unit]) -> list[list[int]]:
        """For each stage of a kernel, how many runs of each of its functions fetch its code."""
        steps = [unit.loop.steps if isinstance(unit, LoopStage) else 1 for unit in units]
        pieces = [[f for stage in flat_stages([unit]) for f in stage.functions] for unit in units]
        executed = zip(pieces, steps, strict=True)
        found = fetching_runs(executed, self._code_of(flat_stages(units)), self.device.code_cache_bytes)
        each = iter([count for counts in found for count in counts])
        return [[next(each) for _ in stage.functions] for stage in flat_stages(units)]

    def terms(
        self,
        stage: Stage,
        kernel: StageResources,
        most: int | None = None,
        *,
        fetched: bool = False,
        grid: int = 0,
        teams: int = 1,
        begun: bool = False,
    ) -> tuple[Terms, ...]:
        """What :meth:`seconds` is made of, for each function of the stage; none where no block of the kernel fits.

        `fetched` says whether the code of each is fetched; `grid` and `teams` are of a cooperative launch, before which
        the stage's first copies may be `begun`.
        """
        fit = self.resident(kernel) * self.device.sm_count
        if not fit:
            return ()
        blocks = fit if most is None else min(most, fit)
        functions, spills = stage.functions, self._resources[stage].spill_bytes
        code = self._code_of([stage]) if fetched else dict.fromkeys(functions, 0.0)
        cold, every = self.moved_bytes[stage]
        how = *(code[f] for f in functions), grid, teams, begun
        key = (functions, cold, every, blocks, kernel.shared_bytes, kernel.threads, spills, *how)
        known = self._figures.terms
        if key not in known:
            own = replace(kernel, spill_bytes=spills)
            known[key] = tuple(
                predict_work(
                    self._work(f), f.tiles, own, self.device, cold or every,
                    warm=not cold, most=blocks, fetched_code=code[f], grid=grid, teams=teams, begun=begun,
                )
                for f in functions
            )  # fmt: skip
        return known[key]

    def bound(self, stage: Stage, kernel: StageResources, most: int | None = None, **launch: int) -> str:
        """What bounds a stage that fits: the deciding term of its longest function."""
        return max(self.terms(stage, kernel, most, **launch), key=_seconds).bound

    def resident(self, kernel: StageResources) -> int:
        """Blocks of a kernel on one multiprocessor."""
        fits = self.device.limits.resident_blocks(kernel.threads, kernel.shared_bytes, kernel.registers)
        return min(fits.values())

    def _work(self, function: DeviceFunction) -> Work:
        if function not in self._works:
            self._works[function] = work_of(function)
        return self._works[function]


def forecast_on(
    arch: str,
    program: TEProgram,
    units: Sequence[Unit],
    *,
    graph: bool = False,
    ahead: bool = False,
    figures: Figures | None = None,
) -> KernelForecast | None:
    """The cost model of a program's stages on the product that stands for an architecture, if one is described.

    Parameters
    ----------
    arch : str
        Such as ``"sm_90"``.
    program : TEProgram
        That the stages are of.
    units : sequence of Stage or LoopStage
        Lowered, and with what each asks for.
    graph, ahead : bool
        See :class:`KernelForecast`.
    figures : Figures, optional
        Of other forecasts on this architecture, and for them.
    """
    device = device_of_arch(arch)
    if device is None:
        return None
    distant = {*program.inputs, *program.constants}
    return KernelForecast(device, units, distant, graph=graph, ahead=ahead, figures=figures)


def _estimated(stage: Stage, limits: GpuDevice) -> StageResources:
    if stage.resources.measured or stage.schedule.registers:
        return stage.resources
    registers = max(map(estimated_registers, stage.functions))
    if stage.kept is not None:
        registers = registers_with_constants(stage.kept, limits) - stage.kept.registers
    return replace(stage.resources, registers=registers + stage.resources.kept_registers)


def _seconds(terms: Terms) -> float:
    return terms.start + max(terms.multiprocessors, terms.l2, terms.memory)


def _bytes_moved(unit: Unit, distant: frozenset[Tensor], l2_bytes: int, small: int) -> dict[Stage, tuple[int, int]]:
    """For each stage, the bytes of the tensors that it finds in or leaves to device memory, and of all its tensors.

    In a loop, tensors that a step has its own part of come from far in each step, but for those of no more than `small`
    bytes in all, which are asked for before it; what every step reads is near after the first. What stays in a block's
    shared memory or registers is none of them.
    """
    if isinstance(unit, LoopStage):
        far = {p.tensor for p in unit.loop.indexed if p.source in distant and p.source.nbytes > small}
        stages: Sequence[Stage] = unit.stages
    else:
        far, stages = distant.intersection((*unit.inputs, *unit.outputs)), (unit,)
    found = {}
    for stage in stages:
        near = {tensor for tensor, _ in stage.windows}
        near |= {stage.inputs[number] for number in stage.kept.reads} if stage.kept else set()
        tensors = [tensor for tensor in (*stage.inputs, *stage.outputs) if tensor not in near]
        cold = sum(tensor.nbytes for tensor in tensors if tensor in far or tensor.nbytes > l2_bytes)
        found[stage] = (cold, sum(tensor.nbytes for tensor in tensors))
    return found
