"""Local arrays for what a statement computes on its way, so that its size grows linearly however deep its calls nest.

Before: ``y[v] = tanh(tanh(x[v]) * 2)`` in a vector loop; after, with arithmetic instead of calls::

    a[v] = x[v];  b[v] = tanh(a[v]);  c[v] = b[v] * 2;  d[v] = tanh(c[v]);  y[v] = d[v]

LLVM keeps such arrays in registers. ``Let`` would not do: TVM's LLVM code generator substitutes each bound value into
those that use it while it analyses them, which takes exponential time, and its vectorizer refuses a ``Let`` that it
meets twice.

This is right since a call is pure: it is evaluated where the statement evaluates it, under the same conditions, and
equal calls under equal conditions once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Call
from tvm.ir.expr import StringImm, TensorLoad
from tvm.tirx import Div, FloorDiv, FloorMod, ForKind, Mod

from souffle.schedule.cpu.nest import replace_variables
from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import PrimExpr, dtype_of, is_branch, sequence

__all__ = ["Bind", "bind_calls"]

Bind = Callable[[PrimExpr], PrimExpr]
"""Puts a value into a local array; the answer reads it, and may be repeated at no cost."""
Expand = Callable[[Call, Sequence[PrimExpr], Bind], PrimExpr]
"""``expand(call, arguments, bind)``: what stands for `call` of `arguments`, which may be repeated at no cost."""


@dataclass(frozen=True, eq=False)
class _Guard:
    """A condition under which an expression is evaluated."""

    condition: PrimExpr
    holds: bool
    branches: bool  # if_then_else, which does not evaluate the other side; not Select

    def resolved(self, table: dict[tirx.Var, PrimExpr]) -> PrimExpr:
        condition = replace_variables(self.condition, table)
        return condition if self.holds else tirx.Not(condition)


@dataclass(eq=False)
class _Site:
    """One occurrence of a call, which `variable` stands for, in the arguments of `outer`.

    `guards` are those between the two, from the inside out.
    """

    variable: tirx.Var
    call: Call
    guards: list[_Guard]
    outer: _Site | None = None


class _Table:
    """Structurally equal nodes have one number."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[object, int]]] = {}
        self._count = 0

    def number(self, node: object) -> int:
        bucket = self._known.setdefault(tvm_ffi.structural_hash(node), [])
        for known, number in bucket:
            if tvm_ffi.structural_equal(known, node):
                return number
        self._count += 1
        bucket.append((node, self._count))
        return self._count


def bind_calls(statement: tirx.Stmt, chosen: Callable[[Call], bool], expand: Expand) -> tirx.Stmt:
    """Replace the calls that `chosen` accepts, their arguments and results in local arrays.

    Parameters
    ----------
    statement : Stmt
    chosen : callable
        Accepts pure calls.
    expand : callable
        See :data:`Expand`.

    Returns
    -------
    Stmt
        `statement` itself where it holds no such call.
    """
    arrays: set[int] = set()
    ranges = _ranges(statement)

    def vectors(node: tirx.For) -> tirx.Stmt:
        if node.kind != ForKind.VECTORIZED or not isinstance(node.extent, tirx.IntImm):
            return node
        made = _Temporaries(chosen, expand, arrays, ranges, node.loop_var, int(node.extent.value))
        body = made.rewrite(node.body)
        if body.same_as(node.body):
            return node
        rewritten = tirx.For(node.loop_var, node.min, node.extent, node.kind, body, None, node.annotations)
        return sequence(*made.allocations, rewritten)

    def scalars(node: tirx.BufferStore | tirx.Bind) -> tirx.Stmt:
        if isinstance(node, tirx.BufferStore) and hash(node.buffer) in arrays:
            return node  # written in a vector loop, above
        made = _Temporaries(chosen, expand, arrays, ranges)
        body = made.leaf(node)
        return node if body.same_as(node) else sequence(*made.allocations, body)

    statement = structural_map(statement, [(tirx.For, vectors), (tirx.SeqStmt, _flat)])
    return structural_map(statement, [((tirx.BufferStore, tirx.Bind), scalars), (tirx.SeqStmt, _flat)])


def _ranges(statement: tirx.Stmt) -> sym.Analyzer:
    found: dict[tirx.Var, list[tvm.ir.Range]] = {}

    def note(node: tirx.For) -> None:
        found.setdefault(node.loop_var, []).append(tvm.ir.Range.from_min_extent(node.min, node.extent))

    structural_walk(statement, (tirx.For, note))
    analyzer = sym.Analyzer()
    for variable, ranges in found.items():
        if all(tvm_ffi.structural_equal(ranges[0], other) for other in ranges[1:]):
            analyzer.bind(variable, ranges[0])
    return analyzer


def _flat(node: tirx.SeqStmt) -> tirx.Stmt:
    return sequence(*node.seq) if any(isinstance(s, tirx.SeqStmt) for s in node.seq) else node


class _Temporaries:
    """The local arrays of one vector loop over `lane`, or of one scalar statement."""

    def __init__(
        self,
        chosen: Callable[[Call], bool],
        expand: Expand,
        arrays: set[int],
        ranges: sym.Analyzer,
        lane: tirx.Var | None = None,
        width: int = 1,
    ) -> None:
        self.chosen, self.expand, self.arrays, self.ranges = chosen, expand, arrays, ranges
        self.lane, self.width = lane, width
        self.allocations: list[tirx.AllocBuffer] = []

    def rewrite(self, body: tirx.Stmt) -> tirx.Stmt:
        return structural_map(body, [((tirx.BufferStore, tirx.Bind), self.leaf), (tirx.SeqStmt, _flat)])

    def leaf(self, statement: tirx.BufferStore | tirx.Bind) -> tirx.Stmt:
        """`statement` after those that compute its calls."""
        sites = _sites(statement.value, self.chosen)
        if sites is None:
            return statement
        value, calls = sites
        steps: list[tuple[tuple[int, ...], list[PrimExpr], tirx.Stmt]] = []
        table: dict[tirx.Var, PrimExpr] = {}
        numbers = _Table()
        done: dict[tuple[tuple[int, ...], int], PrimExpr] = {}
        for site, path in zip(calls, _paths(calls), strict=True):
            conditions = [guard.resolved(table) for guard in path]
            call = replace_variables(site.call, table)
            key = tuple(numbers.number(condition) for condition in conditions)
            own = numbers.number(call)
            # What was computed under fewer of the conditions has been computed here too.
            known = next((done[key[:n], own] for n in range(len(key) + 1) if (key[:n], own) in done), None)
            if known is None:
                shared = next((n for n, c in enumerate(conditions) if self._varies(c)), len(conditions))
                masks = [(g, c) for g, c in zip(path[shared:], conditions[shared:], strict=True)]

                def bind(
                    value: PrimExpr,
                    masks: Sequence[tuple[_Guard, PrimExpr]] = (),
                    key: tuple[int, ...] = key[:shared],
                    conditions: list[PrimExpr] = conditions[:shared],
                ) -> PrimExpr:
                    if self._is_bound(value):
                        return value
                    for guard, condition in () if self._is_safe(value) else reversed(masks):
                        choose = tirx.if_then_else if guard.branches else tirx.Select
                        value = choose(condition, value, tirx.const(1, dtype_of(value)))
                    store, load = self._stored(value)
                    steps.append((key, conditions, store))
                    return load

                # Only arguments read memory, which may not be there where a condition does not hold.
                arguments = [bind(argument, masks) for argument in call.args]
                known = bind(self.expand(call, arguments, bind))
                done[key, own] = known
            table[site.variable] = known
        result: list[tirx.Stmt] = []
        for _, group in groupby(steps, key=lambda step: step[0]):
            members = list(group)
            block = sequence(*(store for _, _, store in members))
            for condition in reversed(members[0][1]):
                block = tirx.IfThenElse(condition, block, None)
            result.append(block)
        value = structural_map(replace_variables(value, table), (Call, self._selected))
        return sequence(*result, _with_value(statement, value))

    def _selected(self, call: Call) -> PrimExpr:
        # With its calls gone, evaluating both sides costs less than a branch for each element of a vector.
        if not is_branch(call) or not self._varies(call.args[0]) or not all(map(self._is_safe, call.args[1:])):
            return call
        return tirx.Select(*call.args)

    def _is_safe(self, value: PrimExpr) -> bool:
        """Whether `value` can be evaluated for all places of the loops."""
        unsafe: list[object] = []

        def index(position: PrimExpr, extent: PrimExpr) -> bool:
            bound = self.ranges.const_int_bound(position)
            return int(bound.min_value) >= 0 and int(bound.max_value) < int(extent)

        def load(node: TensorLoad) -> None:
            if not all(map(index, node.indices, node.source.shape)):
                unsafe.append(node)

        def division(node: FloorDiv) -> None:
            if not dtype_of(node).startswith("float") and not isinstance(node.b, tirx.IntImm):
                unsafe.append(node)

        structural_walk(value, [(TensorLoad, load), ((Div, Mod, FloorDiv, FloorMod), division)])
        return not unsafe

    def _varies(self, node: PrimExpr) -> bool:
        return self.lane is not None and _mentions(node, self.lane)

    def _is_bound(self, value: PrimExpr) -> bool:
        if isinstance(value, tirx.IntImm | tirx.FloatImm | StringImm):
            return True
        return isinstance(value, TensorLoad) and hash(value.source) in self.arrays

    def _stored(self, value: PrimExpr) -> tuple[tirx.Stmt, PrimExpr]:
        varies = self._varies(value)
        buffer = tirx.decl_buffer((self.width if varies else 1,), dtype_of(value), "t")
        self.allocations.append(tirx.AllocBuffer(buffer))
        self.arrays.add(hash(buffer))
        index = [self.lane if varies else tirx.const(0, "int32")]
        return tirx.BufferStore(buffer, value, index), tirx.BufferLoad(buffer, index)


def _sites(value: PrimExpr, chosen: Callable[[Call], bool]) -> tuple[PrimExpr, list[_Site]] | None:
    """`value` with a variable for each outermost chosen call, and all such calls, arguments first."""
    found: list[bool] = []
    structural_walk(value, (Call, lambda call: found.append(True) if chosen(call) else None))
    if not found:
        return None
    sites: dict[int, _Site] = {}

    def under(node: object) -> list[_Site]:
        inside: list[_Site] = []

        def note(variable: tirx.Var) -> None:
            if hash(variable) in sites:
                inside.append(sites[hash(variable)])

        structural_walk(node, (tirx.Var, note))
        return inside

    def guard(condition: PrimExpr, sides: tuple[PrimExpr, PrimExpr], branches: bool) -> None:
        for side, holds in zip(sides, (True, False), strict=True):
            for site in under(side):
                site.guards.append(_Guard(condition, holds, branches))

    def select(node: tirx.Select) -> PrimExpr:
        guard(node.condition, (node.true_value, node.false_value), False)
        return node

    def call(node: Call) -> PrimExpr:
        if is_branch(node):
            guard(node.args[0], (node.args[1], node.args[2]), True)
        if not chosen(node):
            return node
        site = _Site(tirx.Var("call", dtype_of(node)), node, [])
        for inner in under(list(node.args)):
            inner.outer = site
        sites[hash(site.variable)] = site
        return site.variable

    rest = structural_map(_without_lets(value), [(Call, call), (tirx.Select, select)])
    return rest, list(sites.values())


def _paths(sites: Sequence[_Site]) -> list[list[_Guard]]:
    """All guards of each site, from the outside in."""
    paths: dict[int, list[_Guard]] = {}
    for site in reversed(sites):  # a call stands after those in its arguments
        outer = [] if site.outer is None else paths[hash(site.outer.variable)]
        paths[hash(site.variable)] = [*outer, *reversed(site.guards)]
    return [paths[hash(site.variable)] for site in sites]


def _without_lets(value: PrimExpr) -> PrimExpr:
    return structural_map(value, (tirx.Let, lambda let: replace_variables(let.body, {let.var: let.value})))


def _mentions(node: PrimExpr, variable: tirx.Var) -> bool:
    seen: list[bool] = []
    structural_walk(node, (tirx.Var, lambda v: seen.append(True) if v.same_as(variable) else None))
    return bool(seen)


def _with_value(statement: tirx.BufferStore | tirx.Bind, value: PrimExpr) -> tirx.Stmt:
    if isinstance(statement, tirx.Bind):
        return tirx.Bind(statement.var, value)
    return tirx.BufferStore(statement.buffer, value, list(statement.indices))
