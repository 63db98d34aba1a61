"""Constants that lie beside each other in memory, read together into registers that are kept (see ``kept_loads.py``).

::

    for k in unrolled(n):                            for k in unrolled(n):
      for g in unrolled(4):                      →     kept[4 * k .. 4 * k + 3] = w[a + 1024 * k .. a + 1024 * k + 3]
        kept[4 * k + g] = w[a + 1024 * k + g]

Which register a constant is in does not matter: they are given out so that those of one read are neighbours, whatever
the order in which they are used. Legal where one turn of a loop moves the read by one element, `a` is a multiple of the
read's elements for every tile and thread, and no condition around it or in it depends on the turn: all of its elements
are read then, or none. Stores of one fill are to registers of their own, from memory that nobody writes, so that their
order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.tvm_calls import structural_map
from souffle.tvm_compat import (
    Analyzer,
    PrimExpr,
    StatementVisitor,
    choice_like,
    choice_parts,
    collect,
    const_int,
    dtype_of,
    is_choice,
    sequence,
    substitute,
)

__all__ = ["WideRead", "needed", "wide_read", "widened"]

_WIDEST_BYTES = 16
"""Of a thread's load instruction."""

_BITS = (16, 32)
"""Of elements that have vectors of every width up to the widest load."""


@dataclass(frozen=True, eq=False)
class WideRead:
    """A read of neighbours in memory.

    Attributes
    ----------
    loop : For
        Whose turns read them one by one.
    lanes : int
        Neighbours that are read together.
    value : expression
        All of them, in the turn in which the first is read.
    """

    loop: tirx.For
    lanes: int
    value: PrimExpr


def wide_read(node: PrimExpr, loops: Sequence[tirx.For], conditions: Sequence[PrimExpr]) -> WideRead | None:
    """What takes the place of a constant's read in several turns of a loop, if anything does.

    Parameters
    ----------
    node : expression
        A read of a constant, or one where a condition holds and a number elsewhere, in which every name is written out.
    loops : sequence of For
        Around it, all of them unrolled, each counting from 0.
    conditions : sequence of expression
        Under which it is read, with their names written out.
    """
    load, inside = node, tuple(conditions)
    if is_choice(node):
        condition, load, _ = choice_parts(node)
        inside = (*inside, condition)
    kind = tvm.DataType(dtype_of(load))
    (index,) = load.indices
    if kind.lanes > 1 or kind.bits not in _BITS or str(kind).startswith("bool"):
        return None
    analyzer = Analyzer()
    for loop in loops:
        turn = loop.loop_var
        step = analyzer.simplify(substitute(index, {turn: turn + 1}) - index)
        varies = any(v.same_as(turn) for condition in inside for v in collect(condition, tirx.Var))
        if varies or not isinstance(step, tirx.IntImm) or step.value != 1:
            continue
        lanes = _WIDEST_BYTES * 8 // kind.bits
        while lanes > 1 and (const_int(loop.extent) % lanes or not _at_multiples(index, turn, lanes, analyzer)):
            lanes //= 2
        if lanes > 1:
            return WideRead(loop, lanes, _neighbours(node, load, lanes))
    return None


def _at_multiples(index: PrimExpr, turn: tirx.Var, lanes: int, analyzer: Analyzer) -> bool:
    """Whether an index is a multiple of a number in each turn that is one."""
    known = analyzer.modular_set(analyzer.simplify(substitute(index, {turn: turn * lanes})))
    return int(known.coeff) % lanes == 0 and int(known.base) % lanes == 0


def _neighbours(node: PrimExpr, load: TensorLoad, lanes: int) -> PrimExpr:
    wide = tirx.BufferLoad(load.source, [tirx.Ramp(load.indices[0], 1, lanes)])
    if not is_choice(node):
        return wide
    condition, _, other = choice_parts(node)
    return choice_like(node, condition, wide, tirx.Broadcast(other, lanes))


def widened(loop: tirx.For, body: tirx.Stmt, reads: Sequence[tuple[tirx.BufferStore, WideRead]]) -> tirx.Stmt:
    """The unrolled loop around what a fill does in each turn, its stores that several turns share on their own.

    Parameters
    ----------
    loop : For
    body : statement
        Of the fill, in each turn.
    reads : sequence
        Stores of wide reads, and these, of this loop and of others.
    """
    own = [(store, read) for store, read in reads if read.loop.same_as(loop)]
    parts: list[tirx.Stmt | None] = []
    for lanes in sorted({read.lanes for _, read in own}, reverse=True):
        stores = [store for store, read in own if read.lanes == lanes]
        part = _Only(lambda store, stores=stores: _among(store, stores)).visit(body)
        parts.append(None if part is None else _rarer(loop, part, lanes))
    wide = [store for store, _ in own]
    rest = _Only(lambda store: not _among(store, wide)).visit(body) if wide else body
    if rest is not None:
        parts.append(tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.UNROLLED, rest))
    return sequence(*parts)


def _rarer(loop: tirx.For, body: tirx.Stmt, lanes: int) -> tirx.Stmt:
    """A loop with one turn for so many, with names of its own."""
    turns = const_int(loop.extent) // lanes
    variable = tirx.Var(str(loop.loop_var.name), loop.loop_var.ty)
    own = [one.loop_var for one in collect(body, tirx.For)] + [one.var for one in collect(body, tirx.Bind)]
    table = {one: tirx.Var(str(one.name), one.ty) for one in own}
    table[loop.loop_var] = variable * lanes if turns > 1 else tirx.IntImm(dtype_of(variable), 0)
    renamed = structural_map(body, (tvm.ir.Var, lambda var: table.get(var, var)))
    if turns == 1:
        return structural_map(renamed, (tirx.Add, _without_zero))
    return tirx.For(variable, loop.min, tirx.IntImm(dtype_of(variable), turns), tirx.ForKind.UNROLLED, renamed)


def _without_zero(node: tirx.Add) -> PrimExpr:
    return node.a if isinstance(node.b, tirx.IntImm) and not node.b.value else node


def needed(statements: Sequence[tirx.Stmt]) -> list[tirx.Stmt]:
    """Statements in order, without names that none behind them needs."""
    found: list[tirx.Stmt] = []
    used: set[tirx.Var] = set()
    for one in reversed(statements):
        if not isinstance(one, tirx.Bind) or one.var in used:
            used.update(collect(one, tirx.Var))
            found.append(one)
    return found[::-1]


@dataclass(frozen=True)
class _Only(StatementVisitor):
    """A fill's statements with some of its stores alone; ``None`` where none is."""

    chosen: Callable[[tirx.BufferStore], bool]

    def visit_sequence(self, node: tirx.SeqStmt) -> tirx.Stmt | None:
        parts = needed([part for part in map(self.visit, node.seq) if part is not None])
        return sequence(*parts) if parts else None

    def visit_buffer_store(self, node: tirx.BufferStore) -> tirx.Stmt | None:
        return node if self.chosen(node) else None

    def visit_for(self, node: tirx.For) -> tirx.Stmt | None:
        body = self.visit(node.body)
        return None if body is None else tirx.For(node.loop_var, node.min, node.extent, node.kind, body)

    def visit_if_then_else(self, node: tirx.IfThenElse) -> tirx.Stmt | None:
        """Without another case: a fill has none."""
        body = self.visit(node.then_case)
        return None if body is None else tirx.IfThenElse(node.condition, body, None)

    def visit_other(self, node: tirx.Stmt) -> tirx.Stmt | None:
        """Names, which may be needed."""
        return node


def _among(store: tirx.BufferStore, stores: Sequence[tirx.BufferStore]) -> bool:
    return any(store.same_as(one) for one in stores)
