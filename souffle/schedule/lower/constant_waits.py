"""Waits for asynchronous copies whose number is known when a program is compiled.

MetaSchedule's pipelines end in a loop in which ever fewer copies are waited for. How many may still be under way is a
part of the instruction, and a number that a loop's turn decides is none::

    for turn in range(3):                       wait(2)
        wait(2 - turn)                     →    multiply(0)
        multiply(turn)                          wait(1)
                                                multiply(1)
                                                ...
"""

from __future__ import annotations

from tvm import tirx

from souffle.tvm_calls import structural_map
from souffle.tvm_compat import collect, const_int, sequence, variables

__all__ = ["with_constant_waits"]

_COUNT = "async_wait_inflight_count"
_MOST_TURNS = 8
"""Of a loop that is written out: of a pipeline's end there are fewer than it has stages."""


def with_constant_waits(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """`function` with the loops written out whose turns decide how many copies are waited for."""
    return function.with_body(structural_map(function.body, (tirx.For, _written_out)))


def _written_out(loop: tirx.For) -> tirx.Stmt:
    if not isinstance(loop.extent, tirx.IntImm) or const_int(loop.extent) > _MOST_TURNS or not _decides_wait(loop):
        return loop
    return sequence(*(_turn(loop, turn) for turn in range(const_int(loop.extent))))


def _decides_wait(loop: tirx.For) -> bool:
    counts = [attr.value for attr in collect(loop.body, tirx.AttrStmt) if attr.attr_key == _COUNT]
    return any(loop.loop_var.same_as(one) for count in counts for one in variables(count))


def _turn(loop: tirx.For, number: int) -> tirx.Stmt:
    """One turn, whose loops and names are its own."""
    body = loop.body
    bound = [one.loop_var for one in collect(body, tirx.For)] + [one.var for one in collect(body, tirx.Bind)]
    table = {old: tirx.Var(str(old.name), old.ty) for old in bound} | {loop.loop_var: loop.min + number}
    return structural_map(body, (tirx.Var, lambda var: table.get(var, var)))
