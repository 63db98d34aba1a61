"""Loop nests as data: what the CPU schedules read a PrimFunc into, and the pieces they write it back with.

A TE becomes one block under one perfect nest of loops. Here such a block is a :class:`Nest`, which rules take apart and
emit as new loops, so that a schedule is built rather than found by transforming loops, and always exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce as fold
from typing import Any

import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.ir.expr import Call, TensorLoad
from tvm.s_tir.stmt import SBlockRealize
from tvm.tirx import ForKind

from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import PrimExpr, buffer_loads, cast, dtype_of, is_branch, statements_of

__all__ = [
    "Axis",
    "Nest",
    "ParsedFunction",
    "analyzer_of",
    "as_index",
    "decode",
    "distinct",
    "flat_index",
    "guarded_loads",
    "loop",
    "map_buffer_loads",
    "parse",
    "product",
    "replace_variables",
    "shape_of",
    "simplify",
    "stride_along",
    "uses",
    "without_casts",
]

_SPATIAL, _REDUCE = 0, 2


@dataclass(frozen=True, eq=False)
class Axis:
    """One loop: `var` runs over ``[0, extent)``."""

    var: tirx.Var
    extent: int

    @property
    def dtype(self) -> str:
        """The integer type of the variable."""
        return dtype_of(self.var)


@dataclass(frozen=True, eq=False)
class Nest:
    """One block and its loops.

    Attributes
    ----------
    name : str
        The block's name.
    spatial, reduce : tuple of Axis
        Data-parallel and reduction loops, in order.
    init : Stmt or None
        What a reduction starts with.
    body : Stmt
        A ``BufferStore``, or a sequence of ``Bind`` and ``BufferStore`` for a reduction of tuples.
    epilogue : BufferStore or None
        What is stored instead of the reduction's result: an expression of ``spatial`` in which loads of the buffer of
        ``body`` stand for that result.
    """

    name: str
    spatial: tuple[Axis, ...]
    reduce: tuple[Axis, ...]
    init: tirx.Stmt | None
    body: tirx.Stmt
    epilogue: tirx.BufferStore | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All loops: the data-parallel ones, then those of the reduction."""
        return (*self.spatial, *self.reduce)

    @property
    def single(self) -> bool:
        """Whether the body is one store."""
        return isinstance(self.body, tirx.BufferStore)

    @property
    def injective(self) -> bool:
        """Whether it is one store without reduction."""
        return self.single and not self.reduce and self.init is None

    @property
    def points(self) -> int:
        """Number of output elements."""
        return product(axis.extent for axis in self.spatial)

    @property
    def work(self) -> int:
        """How often the body runs."""
        return self.points * product(axis.extent for axis in self.reduce)

    @property
    def writes(self) -> list[Any]:
        """Buffers that are stored to; the reduction's own buffer is none of them when there is an epilogue."""
        statement = self.body if self.epilogue is None else self.epilogue
        found: list[Any] = []
        structural_walk(statement, (tirx.BufferStore, lambda store: found.append(store.buffer)))
        return distinct(found)

    @property
    def reads(self) -> list[Any]:
        """Buffers that are loaded, except those that the body itself accumulates in."""
        own: list[Any] = []
        structural_walk(self.body, (tirx.BufferStore, lambda store: own.append(store.buffer)))
        statements = [s for s in (self.init, self.body, self.epilogue) if s is not None]
        sources = [load.source for statement in statements for load in buffer_loads(statement)]
        return [buffer for buffer in distinct(sources) if not any(buffer.same_as(o) for o in own)]

    def bind(self, values: Mapping[tirx.Var, PrimExpr]) -> Nest:
        """The nest with some loop variables replaced by expressions, and those loops gone."""

        def keep(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
            return tuple(a for a in axes if not any(a.var.same_as(v) for v in values))

        return replace(
            self,
            spatial=keep(self.spatial),
            reduce=keep(self.reduce),
            init=None if self.init is None else replace_variables(self.init, values),
            body=replace_variables(self.body, values),
            epilogue=None if self.epilogue is None else replace_variables(self.epilogue, values),
        )

    def restrict(self, axis: Axis, start: PrimExpr, extent: int) -> Nest:
        """The nest over ``[start, start + extent)`` of one of its spatial loops."""
        part = Axis(tirx.Var(axis.var.name, axis.dtype), extent)
        bound = self.bind({axis.var: part.var + as_index(start, axis.dtype)})
        spatial = tuple(part if a.var.same_as(axis.var) else a for a in self.spatial)
        return replace(bound, spatial=spatial)

    def on_buffers(self, move: Callable[[Any, list[PrimExpr]], tuple[Any, list[PrimExpr]] | None]) -> Nest:
        """The nest with elements of buffers in the place of others: by buffer and indices, ``None`` where one stays."""

        def load(node: TensorLoad) -> PrimExpr:
            moved = move(node.source, list(node.indices))
            return node if moved is None else tirx.BufferLoad(*moved)

        def store(node: tirx.BufferStore) -> tirx.BufferStore:
            moved = move(node.buffer, list(node.indices))
            return node if moved is None else tirx.BufferStore(moved[0], node.value, moved[1])

        def changed(statement: Any) -> Any:
            if statement is None:
                return None
            return tvm_ffi.structural_map(statement, [(TensorLoad, load), (tirx.BufferStore, store)])

        return replace(self, init=changed(self.init), body=changed(self.body), epilogue=changed(self.epilogue))

    def finish(self, result: PrimExpr) -> tirx.Stmt:
        """The statement that stores a reduction's `result`, through the epilogue if there is one."""
        body = self.body
        if self.epilogue is None:
            return tirx.BufferStore(body.buffer, result, list(body.indices))
        own = body.buffer
        return map_buffer_loads(self.epilogue, lambda load: result if load.source.same_as(own) else load)


@dataclass(frozen=True, eq=False)
class ParsedFunction:
    """A PrimFunc taken apart.

    Attributes
    ----------
    func : PrimFunc
        Where it came from.
    items : tuple of Nest or Stmt
        Root-level nests in order; what is not a :class:`Nest` stays a statement.
    """

    func: tirx.PrimFunc
    items: tuple[Nest | tirx.Stmt, ...]


def as_index(value: int | PrimExpr, dtype: str) -> PrimExpr:
    """`value` as an index expression of an integer type."""
    if isinstance(value, int):
        return tirx.const(value, dtype)
    return cast(value, dtype)


def decode(value: PrimExpr, axes: Sequence[Axis]) -> dict[tirx.Var, PrimExpr]:
    """What each of `axes` is when they are counted together, the last fastest, and the count is `value`."""
    values: dict[tirx.Var, PrimExpr] = {}
    stride = 1
    for number, axis in reversed(list(enumerate(axes))):
        position = value if stride == 1 else tirx.floordiv(value, tirx.const(stride, dtype_of(value)))
        if number:
            position = tirx.floormod(position, tirx.const(axis.extent, dtype_of(value)))
        values[axis.var] = as_index(position, axis.dtype) if axis.extent > 1 else tirx.const(0, axis.dtype)
        stride *= axis.extent
    return values


def product(values: Iterable[int]) -> int:
    """Product of integers; 1 for none."""
    return fold(lambda a, b: a * b, values, 1)


def distinct(nodes: Iterable[Any]) -> list[Any]:
    """TVM nodes without repetitions, by identity."""
    kept: list[Any] = []
    for node in nodes:
        if not any(node.same_as(seen) for seen in kept):
            kept.append(node)
    return kept


def replace_variables(node: Any, values: Mapping[tirx.Var, PrimExpr]) -> Any:
    """`node` (expression or statement) with variables replaced, by identity."""
    table = list(values.items())

    def swap(variable: tirx.Var) -> PrimExpr:
        for old, new in table:
            if variable.same_as(old):
                return new
        return variable

    return structural_map(node, (tirx.Var, swap)) if table else node


def guarded_loads(node: Any) -> list[TensorLoad]:
    """The loads that happen only where the condition of an ``if_then_else`` holds, or does not."""
    found: list[TensorLoad] = []

    def see(call: Call) -> None:
        if is_branch(call):
            found.extend(load for branch in call.args[1:] for load in buffer_loads(branch))

    structural_walk(node, (Call, see))
    return found


def map_buffer_loads(node: Any, rewrite: Callable[[TensorLoad], PrimExpr]) -> Any:
    """Replace every load from a buffer."""
    return structural_map(node, (TensorLoad, rewrite))


def uses(node: Any, axes: Iterable[Axis]) -> list[Axis]:
    """Those of `axes` whose variable occurs in `node`."""
    seen: list[tirx.Var] = []
    structural_walk(node, (tirx.Var, lambda v: seen.append(v)))
    return [axis for axis in axes if any(axis.var.same_as(v) for v in seen)]


def shape_of(buffer: Any) -> tuple[int, ...]:
    """Extents of a buffer."""
    return tuple(int(extent) for extent in buffer.shape)


def analyzer_of(axes: Iterable[Axis]) -> sym.Analyzer:
    """TVM's analyzer, knowing the ranges of `axes`."""
    analyzer = sym.Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, tvm.ir.Range(tirx.const(0, axis.dtype), tirx.const(axis.extent, axis.dtype)))
    return analyzer


def simplify(expression: PrimExpr, axes: Iterable[Axis] = ()) -> PrimExpr:
    """`expression` simplified, knowing the ranges of `axes`."""
    return analyzer_of(axes).simplify(expression)


def without_casts(expression: PrimExpr) -> PrimExpr:
    """What conversions from type to type are made of."""
    while isinstance(expression, tirx.Cast):
        expression = expression.value
    return expression


def flat_index(buffer: Any, indices: Sequence[PrimExpr]) -> PrimExpr:
    """The row-major position of an element."""
    position: PrimExpr = tirx.const(0, "int64")
    for extent, index in zip(shape_of(buffer), indices, strict=True):
        position = position * extent + cast(index, "int64")
    return position


def stride_along(load: TensorLoad, axis: Axis, axes: Sequence[Axis]) -> int | None:
    """How many elements the position moves when `axis` moves by one; ``None`` where that is not a constant."""
    position = flat_index(load.source, list(load.indices))
    step = simplify(replace_variables(position, {axis.var: axis.var + 1}) - position, axes)
    return int(step.value) if isinstance(step, tirx.IntImm) else None


def loop(
    extent: int | PrimExpr,
    make: Callable[[PrimExpr], tirx.Stmt],
    kind: ForKind = ForKind.SERIAL,
    name: str = "i",
    dtype: str = "int32",
) -> tirx.Stmt:
    """A loop around ``make(variable)``; none for an extent of 1, unless it is parallel."""
    if isinstance(extent, int) and extent == 1 and kind != ForKind.PARALLEL:
        return make(tirx.const(0, dtype))
    variable = tirx.Var(name, dtype)
    bound = tirx.const(extent, dtype) if isinstance(extent, int) else extent
    return tirx.For(variable, tirx.const(0, dtype), bound, kind, make(variable))


def parse(func: tirx.PrimFunc) -> ParsedFunction:
    """Take a PrimFunc of ``te.create_prim_func`` apart."""
    root = func.body
    if not isinstance(root, SBlockRealize) or root.block.iter_vars:
        return ParsedFunction(func, (root,))
    items = tuple(_nest(statement) or statement for statement in statements_of(root.block.body))
    return ParsedFunction(func, items)


def _constant(expression: Any) -> int | None:
    return int(expression.value) if isinstance(expression, tirx.IntImm) else None


def _nest(statement: tirx.Stmt) -> Nest | None:
    loops: list[tuple[tirx.Var, int]] = []
    node = statement
    while isinstance(node, tirx.For):
        extent = _constant(node.extent)
        if extent is None or extent < 1 or _constant(node.min) != 0 or node.kind != ForKind.SERIAL:
            return None
        loops.append((node.loop_var, extent))
        node = node.body
    if not isinstance(node, SBlockRealize) or _constant(node.predicate) != 1:
        return None
    block = node.block
    if block.alloc_buffers or block.match_buffers or not _plain(block.body):
        return None
    spatial: list[Axis] = []
    reduce: list[Axis] = []
    taken: list[tirx.Var] = []
    for iteration, value in zip(block.iter_vars, node.iter_values, strict=True):
        extent = _constant(iteration.dom.extent)
        position = next((v for v, e in loops if v.same_as(value) and e == extent), None)
        if position is not None and not any(position.same_as(t) for t in taken):
            taken.append(position)
        elif not (extent == 1 and _constant(value) == 0):
            return None
        if iteration.iter_type not in (_SPATIAL, _REDUCE) or _constant(iteration.dom.min) != 0:
            return None
        (spatial if iteration.iter_type == _SPATIAL else reduce).append(Axis(iteration.var, extent))
    if len(taken) != len(loops):
        return None
    return Nest(block.name_hint, tuple(spatial), tuple(reduce), block.init, block.body)


def _plain(body: tirx.Stmt) -> bool:
    return all(isinstance(s, tirx.BufferStore | tirx.Bind) for s in statements_of(body))
