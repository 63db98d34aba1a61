"""A kernel of independent stages alone, side by side, with the blocks of the kernel that they are from."""

from __future__ import annotations

from collections.abc import Sequence

from souffle.kernel.block_parts import parts_together
from souffle.kernel.kernel_shape import ArgumentPlace, KernelShape, StageCall
from souffle.program import Tensor
from souffle.schedule.arrangement import BlockForm
from souffle.schedule.lower.fewer_threads import fit_functions
from souffle.schedule.lower.shares import Share
from souffle.schedule.stage import Stage

__all__ = ["group_tensors", "kernel_of_group"]


def group_tensors(stages: Sequence[Stage]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What independent stages read and what they write, each tensor once."""
    reads = dict.fromkeys(tensor for stage in stages for tensor in stage.inputs)
    return tuple(reads), tuple(tensor for stage in stages for tensor in stage.outputs)


def kernel_of_group(stages: Sequence[Stage], shares: Sequence[Share], block: BlockForm, bound: int) -> KernelShape:
    """The kernel; its parameters are what stages read, then what they write (:func:`group_tensors`).

    Parameters
    ----------
    stages : sequence of Stage
        Of one function each, at least one of as many threads as a team has.
    shares : sequence of Share
        Who computes the tiles of each.
    block : BlockForm
    bound : int
        Blocks that a multiprocessor must hold at once (:attr:`KernelShape.blocks_per_sm`).
    """
    form = fit_functions([function for stage in stages for function in stage.functions])
    reads, writes = group_tensors(stages)
    place = {tensor: ArgumentPlace(number) for number, tensor in enumerate((*reads, *writes))}
    calls = []
    for stage, share in zip(stages, shares, strict=True):
        functions = (share.part.function,) if share.part else tuple(form[one] for one in stage.functions)
        calls.append(StageCall(functions, tuple(place[t] for t in (*stage.inputs, *stage.outputs)), share=share))
    parameters = tuple((tensor.dtype, tensor.nbytes) for tensor in (*reads, *writes))
    shape = KernelShape(parts_together(calls), parameters, bound)
    return shape if block.teams == 1 else shape.in_teams(block.teams)
