"""Nests of operations as loops over blocks: each block computes its unit of work, one nest after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm_ffi
from tvm import s_tir, tirx

from souffle.stitching.template_grid import Digit, HostGrid
from souffle.tvm_compat import PrimExpr, sequence, statements_of, substitute

__all__ = ["HOST", "in_grids"]

HOST = "souffle.host"
"""Annotation of the outermost loop of a nest: the number of its operation."""


def in_grids(func: tirx.PrimFunc, grids: Mapping[int, HostGrid], blocks: int | None) -> tirx.PrimFunc:
    """A scheduled function whose nests are in loops over the blocks of the grid, one loop for each group.

    Parameters
    ----------
    func : tirx.PrimFunc
        Its root-level nests begin with their ``GRID`` loops, in the order of :attr:`HostGrid.levels`, or with one of a
        single iteration; the outermost has the annotation :data:`HOST`.
    grids : mapping of int to HostGrid
    blocks : int, optional
        At most so many, which take several units in turn; as many as there are units where not given.
    """
    nests = [(grids[_host(nest)], nest) for nest in statements_of(func.body.block.body)]
    # Groups do not depend on each other; nests of one stay in their order.
    groups = sorted({grid.group for grid, _ in nests})
    done = [_in_blocks([(grid, nest) for grid, nest in nests if grid.group == group], blocks) for group in groups]
    root = func.body.block
    made = s_tir.SBlock([], [], [], root.name_hint, sequence(*done), root.init, list(root.alloc_buffers))
    return func.with_body(s_tir.SBlockRealize([], tirx.const(True, "bool"), made))


def _host(nest: tirx.For) -> int:
    return int(nest.annotations[HOST])


def _in_blocks(nests: Sequence[tuple[HostGrid, tirx.For]], most: int | None) -> tirx.Stmt:
    """The nests of a group: a block takes neighbouring units, which share what they read."""
    units = nests[0][0].units
    blocks = units if most is None else min(most, units)
    turns = -(-units // blocks)
    block, turn = tirx.Var("block", "int32"), tirx.Var("turn", "int32")
    unit: PrimExpr = block if turns == 1 else block * turns + turn
    inside = [unit < units] if blocks * turns > units else []
    body = sequence(*(_of_unit(grid, nest, unit, inside) for grid, nest in nests))
    if turns > 1:
        body = tirx.For(turn, 0, turns, tirx.ForKind.SERIAL, body)
    binding = tirx.IterVar(None, tirx.Var("blockIdx.x", "int32"), tirx.IterVar.ThreadIndex, "blockIdx.x")
    return tirx.For(block, 0, blocks, tirx.ForKind.THREAD_BINDING, body, binding)


def _of_unit(grid: HostGrid, nest: tirx.For, unit: PrimExpr, inside: Sequence[PrimExpr]) -> tirx.Stmt:
    """What a nest computes for a unit, on the condition that there is one."""
    body: tirx.Stmt = nest
    values: dict[tirx.Var, PrimExpr] = {}
    for value in [_value(digit, unit, grid.units) for _, digit in grid.levels] or [tirx.const(0, "int32")]:
        values[body.loop_var] = value
        body = body.body
    conditions = list(inside)
    if grid.stored:
        conditions += [tirx.EQ(_value(digit, unit, grid.units), tirx.const(0, "int32")) for digit in grid.others]
    return _only_if(substitute(body, values), conditions)


def _value(digit: Digit, unit: PrimExpr, units: int) -> PrimExpr:
    above = unit if digit.stride == 1 else tirx.floordiv(unit, digit.stride)
    # The first digit needs no remainder.
    return above if digit.stride * digit.count == units else tirx.floormod(above, digit.count)


def _only_if(body: tirx.Stmt, conditions: Sequence[PrimExpr]) -> tirx.Stmt:
    """Its blocks on more conditions."""

    def guard(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        predicate = realize.predicate
        for condition in conditions:
            predicate = tirx.And(predicate, condition)
        return s_tir.SBlockRealize(list(realize.iter_values), predicate, realize.block)

    return tvm_ffi.structural_map(body, (s_tir.SBlockRealize, guard)) if conditions else body
