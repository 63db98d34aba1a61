"""A network as far as it is decided, and what it is predicted to take with other stages in the place of some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from souffle.choice.prices import KernelPrices
from souffle.cost import KernelForecast
from souffle.partition import Partition, PartitionRequest, Subprogram
from souffle.schedule.stage import Unit, flat_stages

__all__ = ["Trial", "exchanged", "pays", "same_kernel", "saved_alike"]


@dataclass(frozen=True, eq=False)
class Trial:
    """Stages and kernels, and what they are predicted to take.

    Attributes
    ----------
    request : PartitionRequest
    partition : Partition
    seconds : float
    """

    request: PartitionRequest
    partition: Partition
    seconds: float


def pays(made: Trial, before: Trial) -> bool:
    """Whether a network is predicted to take less than it did."""
    return made.seconds < before.seconds


def same_kernel(trial: Trial, units: Sequence[Unit], kernel: int) -> tuple[Unit, ...]:
    """The units of a kernel among others of the same program: a loop that is in both is one."""
    same = dict(zip(trial.request.stages, units, strict=True))
    return tuple(same.get(unit, unit) for unit in trial.partition.subprograms[kernel].stages)


def exchanged(trial: Trial, units: Sequence[Unit], prices: KernelPrices, forecast: KernelForecast) -> Trial:
    """The network with other units in the place of its own, in the kernels that it has.

    Kernels all of whose stages are as they were take as long as they did.

    Parameters
    ----------
    trial : Trial
    units : sequence of Stage or LoopStage
        One for each of the trial's, in the same order.
    prices : KernelPrices
    forecast : KernelForecast
        Of the units.
    """
    request = replace(trial.request, stages=tuple(units), forecast=forecast)
    subprograms, seconds = [], trial.seconds
    for number, sub in enumerate(trial.partition.subprograms):
        stages = same_kernel(trial, units, number)
        if not _changed(sub, stages):
            subprograms.append(replace(sub, stages=stages))
            continue
        most = max(1, forecast.resident(forecast.together(flat_stages(stages))))
        subprograms.append(replace(sub, stages=stages, blocks_per_sm=min(sub.blocks_per_sm, most)))
        before = prices.kernel(sub, trial.request, trial.request.forecast).seconds
        seconds += prices.kernel(subprograms[-1], request, forecast).seconds - before
    return Trial(request, replace(trial.partition, subprograms=tuple(subprograms)), seconds)


def saved_alike(trial: Trial, units: Sequence[Unit], prices: KernelPrices, forecast: KernelForecast) -> float:
    """Seconds that a network would save with other units if its kernels waited as they do; parameters as above.

    To plan where a kernel waits is most of the work of a price.
    """
    request = replace(trial.request, stages=tuple(units), forecast=forecast)
    saved = 0.0
    for number, sub in enumerate(trial.partition.subprograms):
        stages = same_kernel(trial, units, number)
        if _changed(sub, stages):
            price = prices.kernel(sub, trial.request, trial.request.forecast)
            saved += prices.like(price, sub.stages, trial.request, trial.request.forecast)
            saved -= prices.like(price, stages, request, forecast)
    return saved


def _changed(sub: Subprogram, stages: Sequence[Unit]) -> bool:
    return any(new is not old for new, old in zip(flat_stages(stages), flat_stages(sub.stages), strict=True))
