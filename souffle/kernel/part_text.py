"""The statements of a stage that a part of each block computes (:mod:`souffle.schedule.lower.parts`)."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import tirx

from souffle.schedule.lower.device_function import LoweringError
from souffle.schedule.lower.parts import Part
from souffle.tvm_compat import PrimExpr, sequence

__all__ = ["of_a_part"]


def of_a_part(
    part: Part,
    called: tvm.ir.GlobalVar,
    arguments: Sequence[PrimExpr],
    launch: tuple[tirx.Var, tirx.Var, tirx.Var],
    room: tuple[int, int],
) -> list[tirx.Stmt]:
    """A loop over the tiles that are a block's, by the part's threads, between the barriers of its division.

    Parameters
    ----------
    part : Part
    called : GlobalVar
        Its function, as the module calls it.
    arguments : sequence of PrimExpr
        The stage's.
    launch : (Var, Var, Var)
        The block, the thread, and how many blocks there are.
    room : (int, int)
        Threads of a block, and bytes of shared memory.
    """
    (block, tid, blocks), function = launch, part.function
    end = part.first + function.threads
    if end > room[0] or part.end > room[1]:
        raise LoweringError(
            f"stage {function.name} has {part} and shared memory up to byte {part.end} of a block of {room[0]} threads "
            f"and {room[1]} bytes"
        )
    it, own = tirx.Var("it", "int32"), tirx.Var("part_tid", "int32")
    tile = it * blocks + block
    body: tirx.Stmt = tirx.Evaluate(tvm.ir.Call(called, [tile, own, *arguments]))
    if function.shared_bytes or function.has_barrier:
        # The next tile writes the memory that this one reads.
        body = sequence(body, part.barrier())
    turns = tirx.truncdiv(tirx.IntImm("int32", function.tiles - 1) + blocks, blocks)
    loop = tirx.For(it, 0, turns, tirx.ForKind.SERIAL, tirx.IfThenElse(tile < function.tiles, body, None))
    among = tirx.all(tid >= part.first, tid < end)
    inside = tirx.IfThenElse(among, sequence(tirx.Bind(own, tid - part.first), loop), None)
    whole = tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))
    return [*([whole] if part.opens else []), inside, *([whole] if part.closes else [])]
