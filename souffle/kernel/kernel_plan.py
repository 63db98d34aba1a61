"""The kernel of a subprogram: what it is expected to find on the device, and what its blocks are, by price."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from souffle.cost.kernel import KernelTimes
from souffle.decision import Decision
from souffle.kernel.calls import CallPlan, plan_calls
from souffle.kernel.dependences import TileDependences
from souffle.kernel.side_by_side import Considered, considered, side_by_side
from souffle.kernel.waits import Expected
from souffle.options import Waiting
from souffle.partition import PartitionRequest, Subprogram
from souffle.program import Tensor
from souffle.schedule.lower.teams import team_counts
from souffle.schedule.stage import Stage, Unit, flat_stages

__all__ = ["expected_in", "independent_stages", "plan_kernel"]


def plan_kernel(
    subprogram: Subprogram,
    request: PartitionRequest,
    constants: Mapping[Tensor, object],
    waiting: Waiting,
    dependences: TileDependences | None = None,
    *,
    prefetch: bool,
    parts: bool = False,
) -> CallPlan:
    """The calls of a subprogram's kernel, with waits and teams as they are predicted to cost least.

    Parameters
    ----------
    subprogram : Subprogram
    request : PartitionRequest
    constants : mapping of Tensor
        Tensors that no kernel writes.
    waiting : Waiting
        What may stand between its stages.
    dependences : TileDependences, optional
        Those of other kernels of the network, which may be the same.
    prefetch : bool
        See :func:`souffle.kernel.calls.plan_calls`.
    parts : bool
        Whether blocks may be divided in parts: not before it is known what stays in their shared memory, where parts
        have theirs. So a price is never for what is not made then.
    """
    planned = partial(_planned, subprogram, request, constants, dependences, prefetch, waiting)
    plain, teams, decided = _in_order(subprogram, request, waiting, planned)
    if waiting.side_by_side and not plain.shape.ticks:
        beside = {"parts": parts, "arrangements": request.arrangements}
        plain = side_by_side(plain, request.forecast, teams, partial(planned, "barriers"), **beside)
    shape = plain.shape if teams == 1 else plain.shape.in_teams(teams)
    return replace(plain, shape=shape, decisions=(*decided, *plain.decisions))


def independent_stages(
    subprogram: Subprogram,
    request: PartitionRequest,
    constants: Mapping[Tensor, object],
    waiting: Waiting,
    dependences: TileDependences | None = None,
) -> Iterator[Considered]:
    """The stages of a subprogram's kernel that could be computed side by side; parameters as for `plan_kernel`."""
    planned = partial(_planned, subprogram, request, constants, dependences, False, waiting)
    plain, teams, _ = _in_order(subprogram, request, waiting, planned)
    if waiting.side_by_side and not plain.shape.ticks:
        yield from considered(plain, request.forecast, teams)


def _planned(
    subprogram: Subprogram,
    request: PartitionRequest,
    constants: Mapping[Tensor, object],
    dependences: TileDependences | None,
    prefetch: bool,
    waiting: Waiting,
    flags: str,
    **groups: object,
) -> CallPlan:
    return plan_calls(
        subprogram.stages,
        constants,
        prefetch=prefetch,
        blocks_per_sm=subprogram.blocks_per_sm,
        expected=expected_in(request, subprogram.stages, flags),
        dependences=dependences,
        prologues=waiting.prologues,
        **groups,
    )


def _in_order(
    subprogram: Subprogram, request: PartitionRequest, waiting: Waiting, planned: Callable[..., CallPlan]
) -> tuple[CallPlan, int, tuple[Decision, ...]]:
    """The calls with all stages one after the other, and of how many teams blocks are."""
    plain, teams = planned(waiting.flags), 1
    decided: tuple[Decision, ...] = ()
    # Flags are of blocks, and only barriers cost less with teams.
    if waiting.teams and waiting.flags != "flags" and plain.shape.waits:
        barriers = plain if waiting.flags == "barriers" else planned("barriers")
        teams, reason = _teams(plain, barriers, request)
        if reason:
            decided = (Decision("teams", f"several in each block for {subprogram.name}", teams > 1, reason),)
        plain = plain if teams == 1 else barriers
    return plain, teams, decided


def _teams(plain: CallPlan, barriers: CallPlan, request: PartitionRequest) -> tuple[int, str]:
    """Of how many teams blocks are with which barriers or stages take less by more than the model's error, and why.

    Nothing is said where blocks have no room for several, or nobody knows what barriers cost.
    """
    forecast = request.forecast
    if forecast is None:
        return 1, ""
    block = forecast.together(flat_stages(plain.stages))

    def times(plan: CallPlan, teams: int) -> KernelTimes:
        shape = plan.shape
        waits = shape.grid_syncs, shape.flag_waits
        return forecast.times(plan.stages, block, shape.tiles, *waits, fewer=True, teams=teams, begun=plan.begun)

    found = {n: times(barriers, n) for n in team_counts(block, request.device, barriers.shape.tiles)}
    if not found:
        return 1, ""
    best, before = min(found, key=lambda n: found[n].seconds), times(plain, 1)
    after = found[best]
    reason = (
        f"with {best} of {block.threads} threads its waits are predicted to take {_us(after.waiting)} and its stages "
        f"{_us(after.stages)}, with blocks of one {_us(before.waiting)} and {_us(before.stages)}"
    )
    gains = before.waiting - after.waiting, before.stages - after.stages
    saved, lost = (sum(max(0.0, sign * gain) for gain in gains) for sign in (1, -1))
    return (best if saved > forecast.error * lost else 1), reason


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"


def expected_in(request: PartitionRequest, units: Sequence[Unit], flags: str = "barriers") -> Expected:
    """What a kernel of these units is expected to find on the device.

    Where nobody knows the device, waits have no price, and there are barriers unless flags are asked for. Which tiles
    one block computes together must not depend on who asks: the kernel has to do as those believe who let tensors stay
    in its blocks' memory. So a barrier is taken to cost what it does for blocks without teams.

    Parameters
    ----------
    request : PartitionRequest
    units : sequence of Stage or LoopStage
    flags : str
        One of :data:`souffle.options.WAITS`.
    """
    blocks, forecast = request.blocks(units), request.forecast
    if forecast is None:
        return Expected(blocks, flags=flags)
    together = request.together(units)
    # Half of the predictions are off by more than the error: what is saved is taken for the least that it may be.
    grid = min(blocks, max(stage.schedule.tiles for stage in flat_stages(units)))
    saved = forecast.grid_sync_seconds(grid) / forecast.error

    def seconds(stage: Stage) -> float:
        return forecast.seconds(stage, together)

    waits = forecast.grid_sync_seconds, forecast.flag_wait_seconds, forecast.look_seconds
    return Expected(blocks, saved, seconds, flags, grid, *waits)
