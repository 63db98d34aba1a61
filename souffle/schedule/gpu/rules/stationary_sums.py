"""Tilings of a sum for a loop in whose steps its constants stay with the blocks: a tile for each block, and no second.

What stays has to fit into a block's registers, so the tiles are as small as the blocks that are there at once allow, of
any number of outputs: as many threads as these take. Neighbouring threads share a sum, which needs a warp's shuffles
alone; how constants lie in memory does not matter, since they are read once, but what changes from step to step is read
in wide reads where it can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.gpu.emit.direct_emission import emit_direct
from souffle.schedule.gpu.forms.contraction_expressions import Axis, depends
from souffle.schedule.gpu.forms.memory_access import lanes_along, memory_step
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule
from souffle.schedule.gpu.tiling.direct_cost import tiling_refusal
from souffle.schedule.gpu.tiling.direct_tiling import WARP, DirectTiling, SumPlan, read_plan, split_refusal

__all__ = ["stationary_schedules"]

_RULE = "stationary_sums"

_MOST_ROWS = 8
"""Outputs of a thread along an axis on which its constants do not depend."""

_MOST_THREADS = 1024

_FEWEST_THREADS = 128
"""Below, a multiprocessor has no warp for each of its schedulers."""


def stationary_schedules(func: tirx.PrimFunc, request: GpuRequest, blocks: int) -> Iterator[GpuSchedule]:
    """Schedules of a stage that is one sum, each with a tile for each of at most so many blocks.

    Parameters
    ----------
    func : PrimFunc
        Of the stage, as :func:`souffle.schedule.stage.draft_stage` gives it.
    request : GpuRequest
        Its threads are not looked at.
    blocks : int
        That are on the device at once.
    """
    plan = StageForms(func).read(read_plan)
    if isinstance(plan, Refused) or not plan.long:
        return
    for stationary in _ways(plan):
        each = [_widths(stationary, axis) for axis in stationary.many]
        splits = (1 << bit for bit in range(WARP.bit_length()))
        for chosen, split, ends in product(product(*each), splits, ((False, False), (True, False), (True, True))):
            tiling = DirectTiling(chosen, _lanes(stationary), split, 1, *ends)
            if tiling.gathered and split == 1:
                continue
            threads = _threads(tiling.groups(stationary), split, blocks)
            asked = replace(request, threads=threads)
            if threads > _MOST_THREADS or split_refusal(stationary, split, asked):
                continue
            if tiling_refusal(stationary, tiling, asked) is None:
                kernel, tiles = emit_direct(stationary, tiling, threads)
                yield GpuSchedule(kernel, _RULE, tiles, threads)


def _threads(groups: int, split: int, blocks: int) -> int:
    """Of a block, as many warps as its share of the outputs takes."""
    return max(_FEWEST_THREADS, -(-(-(-groups // blocks) * split) // WARP) * WARP)


def _ways(plan: SumPlan) -> Iterator[SumPlan]:
    """The plan with neighbouring threads on one sum, and with reads along it where other leaves lie so in memory."""
    beside = replace(plan, sum_fast=True)
    yield (
        beside
        if plan.vector is None or not plan.vector_is_output or plan.is_slot(plan.vector)
        else replace(beside, vector=None)
    )
    last = plan.long[-1]
    others = [leaf for leaf in plan.problem.leaves if leaf is not plan.main]
    if any(memory_step(leaf.value, last) == 1 and lanes_along(leaf.value, last, leaf.dtype) > 1 for leaf in others):
        # What a slot had along which reads took several, a thread has one by one.
        slots = [axis for axis in plan.problem.slots if not any(axis is one for one in plan.many)]
        yield replace(beside, vector=last, many=(*slots, *plan.many))


def _lanes(plan: SumPlan) -> int:
    """Elements of a read: all of a slot, or as many as every leaf along the sum allows that is read so at all."""
    if plan.vector is None:
        return 1
    if plan.is_slot(plan.vector):
        return lanes_along(plan.main.value, plan.vector, plan.main.dtype)
    leaves = [leaf for leaf in plan.problem.leaves if memory_step(leaf.value, plan.vector) == 1]
    return min((lanes_along(leaf.value, plan.vector, leaf.dtype) for leaf in leaves), default=1)


def _widths(plan: SumPlan, axis: Axis) -> tuple[int, ...]:
    """Outputs of a thread along an axis: all of a slot, and of what its constants do not depend on."""
    if plan.is_slot(axis):
        return (axis.extent,)
    alike = not depends(plan.main.value, axis) and axis.extent <= _MOST_ROWS
    return (axis.extent,) if alike else (1,)
