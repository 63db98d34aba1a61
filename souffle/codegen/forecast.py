"""Predicted times of the kernels that were compiled, for the plan: what each stage takes, and what bounds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from souffle.codegen.plan import Kernel, Plan, PredictedKernel, PredictedStage
from souffle.cost import KernelForecast
from souffle.kernel.merged_program import MergedLaunch
from souffle.options import LEVELS
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import LoopStage, flat_stages

__all__ = ["with_predictions"]


def with_predictions(
    plan: Plan,
    launches: Sequence[MergedLaunch],
    forecast: KernelForecast | None,
) -> Plan:
    """The plan with the predicted times of its kernels, as far as the cost model knows the device.

    Merged kernels are launched with fewer blocks than fit where barriers then take less by more than stages take more.

    Parameters
    ----------
    plan : Plan
        Compiled.
    launches : sequence of MergedLaunch
        What each of its launches computes.
    forecast : KernelForecast or None
    """
    if forecast is None:
        return plan
    first = {launch.kernel: launch for launch in reversed(launches)}
    fewer = LEVELS[plan.options.level].merge
    fetches = forecast.fetches([unit for launch in launches for unit in launch.stages])
    kernels = [
        _predicted(kernel, first[number], forecast, fewer=fewer, fetches=fetches)
        for number, kernel in enumerate(plan.kernels)
    ]
    return replace(plan, kernels=tuple(kernels), predicted_on=forecast.product)


def _predicted(
    kernel: Kernel, launched: MergedLaunch, forecast: KernelForecast, *, fewer: bool, fetches: bool
) -> Kernel:
    """A kernel with its times, at the occupancy that it has as compiled, or that its stages ask for if it is not."""
    units = launched.stages
    block = forecast.together(flat_stages(units))
    if kernel.resources is not None:
        used = kernel.resources
        shared, threads = kernel.dynamic_shared_bytes // kernel.teams, kernel.threads // kernel.teams
        block = StageResources(used.registers, used.static_shared_bytes, shared, threads, 0, True)
    waits = kernel.grid_syncs, kernel.flag_waits
    options = {"fewer": fewer, "fetches": fetches, "teams": kernel.teams, "groups": launched.groups}
    times = forecast.times(units, block, kernel.tiles, *waits, **options, begun=launched.begun)
    if not times.blocks:
        return kernel
    launch = {"grid": times.grid, "teams": kernel.teams}
    stages: dict[str, PredictedStage] = {}
    for unit in units:
        runs = unit.loop.steps if isinstance(unit, LoopStage) else 1
        for stage in flat_stages([unit]):
            how = {**launch, "begun": stage in launched.begun}
            seconds, alone = runs * forecast.seconds(stage, block, times.blocks, **how), forecast.alone(stage)
            own = PredictedStage(
                stage.label,
                runs,
                stage.schedule.tiles,
                alone.registers,
                alone.shared_bytes,
                seconds,
                forecast.bound(stage, block, times.blocks, **how),
                alone.stack_bytes,
            )
            same = stages.get(own.name)
            if same is not None:
                # Equal stages may find their tensors in different places: the longest says what bounds them.
                longest = max(same, own, key=lambda one: one.seconds / one.runs)
                own = replace(longest, runs=same.runs + runs, seconds=same.seconds + seconds)
            stages[own.name] = own
    each, blocks = forecast.device.sm_count, times.blocks // kernel.teams
    fewer_than_fit = blocks < forecast.resident(block) // kernel.teams * each
    predicted = PredictedKernel(
        times.seconds, times.launch, times.waiting, -(-blocks // each), tuple(stages.values()), times.code
    )
    return replace(kernel, predicted=predicted, most_blocks=blocks if fewer_than_fit else None)
