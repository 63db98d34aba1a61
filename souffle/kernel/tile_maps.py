"""Which elements each tile of a scheduled stage reads and writes, as isl maps (paper §5.2, at the grain of tiles).

Taken from the schedule's own TensorIR before it is lowered, where tensors still have their dimensions: a map holds what
the threads of a tile touch in all turns of all loops, copies to shared memory and padding included. Where an index or a
condition is not quasi-affine, or a tensor is handed on as a whole, the map holds more than is touched, never less.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import tvm
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from souffle.analysis.access import relation, whole_relation
from souffle.index import isl
from souffle.index.expression import Expression, Node, NodeTable, Region, cone
from souffle.schedule.gpu.emit.async_copy import COPY_FUNCTION, COPY_OR_ZERO_FUNCTION
from souffle.schedule.gpu.forms.memory_access import bits_of
from souffle.schedule.gpu.rule import GpuSchedule
from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import Analyzer, PrimExpr, StatementVisitor, const_int

__all__ = ["TileMaps", "tile_maps"]

_TILE = 0
"""The axis of the tile's number in all expressions here."""
_COPY = re.compile(rf"(?:{COPY_FUNCTION}|{COPY_OR_ZERO_FUNCTION})<(\d+)>")
_WHOLE = "the stage hands the tensor on as a whole"
_UNKNOWN_BOUND = 2**31


class TileMaps:
    """What the tiles of a stage touch.

    Parameters
    ----------
    schedule : GpuSchedule

    Attributes
    ----------
    tiles : int
    """

    def __init__(self, schedule: GpuSchedule) -> None:
        self.tiles = schedule.tiles
        self._reader = _Reader(schedule)
        self._maps: dict[tuple[int, bool], isl.Map | None] = {}

    def reads(self, parameter: int) -> isl.Map | None:
        """``[tile] -> [index]`` of what is read of a parameter; None where nothing is."""
        return self._map(parameter, False)

    def writes(self, parameter: int) -> isl.Map | None:
        """``[tile] -> [index]`` of what is written of a parameter; None where nothing is."""
        return self._map(parameter, True)

    def read_by(self, parameter: int, tile: int) -> isl.Set | None:
        """What one tile reads of a parameter, which is found sooner than what each of them does."""
        found = self._reader.union(parameter, False, tile)
        return None if found is None else found.range()

    def _map(self, parameter: int, writes: bool) -> isl.Map | None:
        key = (parameter, writes)
        if key not in self._maps:
            self._maps[key] = self._reader.union(parameter, writes)
        return self._maps[key]


_known: WeakKeyDictionary[GpuSchedule, TileMaps] = WeakKeyDictionary()


def tile_maps(schedule: GpuSchedule) -> TileMaps:
    """The maps of a schedule; each is worked out when it is first asked for."""
    found = _known.get(schedule)
    if found is None:
        found = _known[schedule] = TileMaps(schedule)
    return found


class _Reader(StatementVisitor):
    """Walks the statements of one schedule, each with the nodes that hold where it runs."""

    def __init__(self, schedule: GpuSchedule) -> None:
        self.tiles = schedule.tiles
        self.parameters = list(schedule.func.params)
        self.shapes = [tuple(const_int(e) for e in p.ty.shape) for p in self.parameters]
        self.dtypes = [str(p.ty.dtype) for p in self.parameters]
        self.table = NodeTable(self.position)
        self.bounds: list[tuple[int, int]] = [(0, schedule.tiles)]
        self.analyzer = Analyzer()
        self.touched: dict[tuple[int, bool], dict[Expression, None]] = {}
        self.whole: set[tuple[int, bool]] = set()
        self.visit(schedule.func.body, ())

    def union(self, position: int, writes: bool, tile: int | None = None) -> isl.Map | None:
        """All that was seen of a parameter, in all tiles or in one."""
        tiles = (0, self.tiles) if tile is None else (tile, 1)
        everything = whole_relation((tiles,), (), self.shapes[position], _WHOLE).elements
        if (position, writes) in self.whole:
            return everything
        expressions = list(self.touched.get((position, writes), ()))
        if not expressions:
            return None
        parts = [_elements(replace(expression, axes=(tiles,)), position) for expression in expressions]
        if any(part is None for part in parts):
            return everything

        def together() -> isl.Map:
            result = parts[0]
            for part in parts[1:]:
                result = result.union(part)
            return result.coalesce()

        return isl.within_budget(together) or everything

    def position(self, load: TensorLoad) -> int:
        """The parameter that is read, -1 for other memory."""
        return self.position_of(load.source)

    def position_of(self, buffer: object) -> int:
        return next((i for i, p in enumerate(self.parameters) if p.same_as(buffer)), -1)

    # Statements

    def visit_alloc_buffer(self, node: tirx.AllocBuffer, conditions: tuple[int, ...]) -> None:
        """Memory of its own."""

    def visit_if_then_else(self, node: tirx.IfThenElse, conditions: tuple[int, ...]) -> None:
        self.values([node.condition], conditions)
        condition = self.table.visit(node.condition)
        self.visit(node.then_case, (*conditions, condition))
        if node.else_case is not None:
            self.visit(node.else_case, (*conditions, self.opposite(condition)))

    def visit_buffer_store(self, node: tirx.BufferStore, conditions: tuple[int, ...]) -> None:
        self.values([node.value, *node.indices], conditions)
        position = self.position_of(node.buffer)
        if position >= 0:
            self.touch(position, True, [self.table.visit(i) for i in node.indices], conditions)

    def visit_bind(self, node: tirx.Bind, conditions: tuple[int, ...]) -> None:
        self.values([node.value], conditions)
        self.table.bind(node.var, self.table.visit(node.value))

    def visit_for(self, node: tirx.For, conditions: tuple[int, ...]) -> None:
        tag = str(node.thread_binding.thread_tag) if node.thread_binding is not None else ""
        if tag == "blockIdx.x":
            axis = _TILE
        elif tag.startswith("blockIdx"):
            self.visit_other(node, conditions)
            return
        else:
            first, extent = self.range(node)
            axis = len(self.bounds)
            self.bounds.append((first, extent))
            self.analyzer.bind(node.loop_var, tvm.ir.Range.from_min_extent(first, extent))
        self.table.bind(node.loop_var, self.table.number(Node("axis", (), axis, "int32", False)))
        if tag == "blockIdx.x":
            self.analyzer.bind(node.loop_var, tvm.ir.Range.from_min_extent(0, self.tiles))
            if not (isinstance(node.extent, tirx.IntImm) and int(node.extent) == self.tiles):
                # Another nest of the stage has more tiles.
                conditions = (*conditions, self.table.visit(node.loop_var < node.extent))
        elif not (isinstance(node.min, tirx.IntImm) and isinstance(node.extent, tirx.IntImm)):
            bounds = (node.loop_var >= node.min, node.loop_var < node.min + node.extent)
            conditions = (*conditions, *(self.table.visit(b) for b in bounds))
        self.visit(node.body, conditions)

    def range(self, node: tirx.For) -> tuple[int, int]:
        """Constant bounds of a loop's variable, as far as they are known."""
        if isinstance(node.min, tirx.IntImm) and isinstance(node.extent, tirx.IntImm):
            return int(node.min), int(node.extent)
        low = int(self.analyzer.const_int_bound(node.min).min_value)
        high = int(self.analyzer.const_int_bound(node.min + node.extent).max_value)
        low, high = max(low, -_UNKNOWN_BOUND), min(high, _UNKNOWN_BOUND)
        return low, max(high - low, 1)

    def visit_block(self, node: s_tir.SBlockRealize, conditions: tuple[int, ...]) -> None:
        block = node.block
        for axis, value in zip(block.iter_vars, node.iter_values, strict=True):
            self.table.bind(axis.var, self.table.visit(value))
        if not isinstance(node.predicate, tirx.IntImm):
            conditions = (*conditions, self.table.visit(node.predicate))
        for match in block.match_buffers:
            position = self.position_of(match.source.buffer)
            if position >= 0:
                self.whole.update([(position, False), (position, True)])
        if block.init is not None:
            self.visit(block.init, conditions)
        self.visit(block.body, conditions)

    def visit_evaluate(self, node: tirx.Evaluate, conditions: tuple[int, ...]) -> None:
        """A call for its effect: of those that take pointers, asynchronous copies say how far they read."""
        value = node.value
        if not isinstance(value, tvm.ir.Call):
            return
        arguments = list(value.args)
        copied = _COPY.fullmatch(str(getattr(arguments[0], "value", ""))) if arguments else None
        if copied is None:
            self.values([value], conditions)
            return
        into, source, *rest = arguments[1:]
        load = source.args[0]
        position = self.position(load)
        if position < 0 or self.position(into.args[0]) >= 0:
            self.values([value], conditions)
            return
        lanes = int(copied[1]) * 8 // bits_of(self.dtypes[position])
        indices = [self.table.visit(i) for i in load.indices]
        if lanes > 1:
            lane = self.table.number(Node("axis", (), len(self.bounds), "int32", False))
            self.bounds.append((0, lanes))
            indices[-1] = self.table.number(Node("add", (indices[-1], lane), None, "int32", False))
        if rest:
            conditions = (*conditions, self.table.visit(tirx.NE(rest[0], tirx.IntImm("int32", 0))))
        self.touch(position, False, indices, conditions)
        self.values([*rest, *load.indices, *into.args[0].indices], conditions)

    def visit_other(self, node: tirx.Stmt, conditions: tuple[int, ...]) -> None:
        """A statement that is not known here may touch anything."""
        self.whole.update((i, w) for i in range(len(self.parameters)) for w in (False, True))

    # Values

    def values(self, roots: Sequence[PrimExpr], conditions: tuple[int, ...]) -> None:
        """What is read where these are evaluated."""
        named: dict[int, int] = {}

        def variable(node: tirx.Var) -> None:
            position = self.position_of(node)
            if position >= 0:
                named[position] = named.get(position, 0) + 1

        def load(node: TensorLoad) -> None:
            position = self.position(node)
            if position >= 0:
                loaded.add(position)
                named[position] = named.get(position, 0) - _walk_names_sources()

        def pointer(node: tvm.ir.Call) -> None:
            if str(getattr(node.op, "name", "")).rpartition(".")[2] == "address_of":
                position = self.position(node.args[0])
                if position >= 0:
                    self.whole.update([(position, False), (position, True)])

        loaded: set[int] = set()
        for root in roots:
            structural_walk(root, [(tirx.Var, variable), (TensorLoad, load), (tvm.ir.Call, pointer)])
        self.whole.update((p, w) for p, count in named.items() if count > 0 for w in (False, True))
        if not loaded:
            return
        expression = self.expression([self.table.visit(root) for root in roots], conditions)
        for position in loaded:
            self.touched.setdefault((position, False), {})[expression] = None

    def touch(self, position: int, writes: bool, indices: Sequence[int], conditions: tuple[int, ...]) -> None:
        """An access to one element at each point."""
        node = Node("load", tuple(indices), position, self.dtypes[position], True)
        expression = self.expression([self.table.number(node)], conditions)
        self.touched.setdefault((position, writes), {})[expression] = None

    def opposite(self, condition: int) -> int:
        return self.table.number(Node("not", (condition,), None, "bool", self.table.nodes[condition].data))

    def expression(self, roots: Sequence[int], conditions: tuple[int, ...]) -> Expression:
        """Nodes as an expression of their own, over the tile and the loops that matter to them."""
        nodes = self.table.nodes
        numbers = cone(nodes, [*roots, *conditions])
        axes = sorted({nodes[n].value for n in numbers if nodes[n].kind == "axis"} - {_TILE})
        place = {_TILE: 0} | {axis: i + 1 for i, axis in enumerate(axes)}
        renumbered = {number: i for i, number in enumerate(numbers)}
        own = []
        for number in numbers:
            node = nodes[number]
            value = place[node.value] if node.kind == "axis" else node.value
            own.append(node._replace(args=tuple(renumbered[a] for a in node.args), value=value))
        holds = tuple(dict.fromkeys(renumbered[c] for c in conditions))
        region = Region(tuple(dict.fromkeys(renumbered[r] for r in roots)), True, holds)
        bounds = tuple(self.bounds[axis] for axis in axes)
        inputs = tuple(zip(self.shapes, self.dtypes, strict=True))
        return Expression((self.bounds[_TILE],), bounds, inputs, tuple(own), (region,), ())


@lru_cache(maxsize=1)
def _walk_names_sources() -> int:
    """How often a walk over a load comes to the variable of what it reads."""
    buffer = tirx.decl_buffer((1,), "float32", "probe")
    found: list[object] = []
    load = tirx.BufferStore(buffer, buffer[0], [0]).value
    structural_walk(load, [(tirx.Var, found.append)])
    return int(bool(found))


@lru_cache(maxsize=8192)
def _elements(expression: Expression, position: int) -> isl.Map | None:
    """Tiles to elements of one parameter; ``None`` where they might leave it, or isl does not find out."""
    found = relation(expression, position).elements
    shape = expression.inputs[position][0]
    inside = isl.within_budget(lambda: found.range().is_subset(isl.box([(0, extent) for extent in shape])))
    return found if inside else None
