"""Nests of operations as loops over blocks: each block computes its unit of work, one nest after another.

Groups of as many units share a loop, and so do nests that stand behind each other, store results of the pattern and
have the same loops: their elements are then computed by the same thread (kernel packing of equal domains, 2019 §5.1).
That is legal since nothing that is stored is read in the pattern.
"""

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
    groups = [[(grid, nest) for grid, nest in nests if grid.group == group] for group in _in_order(nests)]
    together: dict[int, list[tuple[HostGrid, tirx.For]]] = {}
    for group in groups:
        together.setdefault(group[0][0].units, []).extend(group)
    done = [_in_blocks(own, blocks) for own in together.values()]
    root = func.body.block
    made = s_tir.SBlock([], [], [], root.name_hint, sequence(*done), root.init, list(root.alloc_buffers))
    return func.with_body(s_tir.SBlockRealize([], tirx.const(True, "bool"), made))


def _host(nest: tirx.For) -> int:
    return int(nest.annotations[HOST])


def _in_order(nests: Sequence[tuple[HostGrid, tirx.For]]) -> list[int]:
    """The groups, those last that store everything, so that these stand behind each other."""
    keep = {grid.group for grid, _ in nests if not grid.stored}
    return sorted({grid.group for grid, _ in nests}, key=lambda group: (group not in keep, group))


def _in_blocks(nests: Sequence[tuple[HostGrid, tirx.For]], most: int | None) -> tirx.Stmt:
    """The nests of a group: a block takes neighbouring units, which share what they read."""
    units = nests[0][0].units
    blocks = units if most is None else min(most, units)
    turns = -(-units // blocks)
    block, turn = tirx.Var("block", "int32"), tirx.Var("turn", "int32")
    unit: PrimExpr = block if turns == 1 else block * turns + turn
    inside = [unit < units] if blocks * turns > units else []
    body = sequence(*_joined([(grid.stored, _of_unit(grid, nest, unit, inside)) for grid, nest in nests]))
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


def _joined(nests: Sequence[tuple[bool, tirx.Stmt]]) -> list[tirx.Stmt]:
    """Nests that store, and have the same loops as the one before, in these."""
    found: list[tirx.Stmt] = []
    before: tuple[object, ...] | None = None
    for stored, nest in nests:
        loops, body = _loops(nest)
        shape = tuple((int(loop.extent), loop.kind, _tag(loop)) for loop in loops)
        if stored and shape == before:
            others, inner = _loops(found[-1])
            values = {loop.loop_var: other.loop_var for loop, other in zip(loops, others, strict=True)}
            found[-1] = _around(others, sequence(inner, substitute(body, values)))
        else:
            found.append(nest)
        before = shape if stored and loops else None
    return found


def _loops(nest: tirx.Stmt) -> tuple[list[tirx.For], tirx.Stmt]:
    """The loops that have nothing beside them, as long as they begin at 0, and what is in the innermost."""
    loops: list[tirx.For] = []
    while isinstance(nest, tirx.For) and isinstance(nest.extent, tirx.IntImm) and not int(nest.min):
        loops.append(nest)
        nest = nest.body
    return loops, nest


def _tag(loop: tirx.For) -> str:
    return "" if loop.thread_binding is None else str(loop.thread_binding.thread_tag)


def _around(loops: Sequence[tirx.For], body: tirx.Stmt) -> tirx.Stmt:
    for loop in reversed(loops):
        body = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)
    return body


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
