"""A TE's expression as plain data: numbered, deduplicated nodes that say nothing of TVM's objects or names.

Every analysis reads this form. Two TEs with the same :class:`Expression` have the same accesses and the same
arithmetic, so identical layers of a network are analysed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.program import TE, ProgramError
from souffle.program.shared import OncePer
from souffle.tvm_compat import bounded_analyzer, const_int, is_load, load_indices, load_tensor, reduce_node

__all__ = ["UNKNOWN", "Expression", "Node", "NodeTable", "Path", "Region", "expression_of"]

_BINARY = {
    tirx.Add: "add",
    tirx.Sub: "sub",
    tirx.Mul: "mul",
    tirx.Div: "div",
    tirx.Mod: "mod",
    tirx.FloorDiv: "floordiv",
    tirx.FloorMod: "floormod",
    tirx.Min: "min",
    tirx.Max: "max",
    tirx.LT: "lt",
    tirx.LE: "le",
    tirx.GT: "gt",
    tirx.GE: "ge",
    tirx.EQ: "eq",
    tirx.NE: "ne",
    tirx.And: "and",
    tirx.Or: "or",
    tirx.BitwiseAnd: "bitand",
    tirx.BitwiseOr: "bitor",
    tirx.BitwiseXor: "bitxor",
    tirx.LShift: "shl",
    tirx.RShift: "shr",
}
_UNARY = {tirx.Not: "not", tirx.BitwiseNot: "bitnot"}


_MOST_PATHS = 256
UNKNOWN = -1
"""Stands in a path for a condition that is not tracked: it may hold or not."""

_NO_LOWER_BOUND, _NO_UPPER_BOUND = -(2**31), 2**31


class Node(NamedTuple):
    """One operation.

    Attributes
    ----------
    kind : str
        ``"axis"`` (value: position among the data-parallel, then the reduction axes), ``"operand"`` (value: position
        among the reducer's arguments), ``"int"``, ``"float"``, ``"text"``, ``"load"`` (value: input index; args:
        indices), ``"cast"``, ``"choose"`` (args: condition, then, else), ``"call"`` (value: the function's name),
        ``"opaque"``, or the name of an arithmetic, comparison or logical operation.
    args : tuple of int
        Numbers of the nodes that it takes, all smaller than its own.
    value : object
    dtype : str
    data : bool
        Whether it depends on an element of a tensor.
    """

    kind: str
    args: tuple[int, ...]
    value: Any
    dtype: str
    data: bool


Path = frozenset[tuple[int, bool]]
"""Conditions (node number, and whether it holds) under which a node is evaluated."""


@dataclass(frozen=True)
class Region:
    """Roots that are evaluated at the same points: of the whole iteration space, or once for each output element.

    Attributes
    ----------
    roots : tuple of int
    reduced : bool
        Whether the reduction axes are part of its points.
    conditions : tuple of int
        All must hold at a point: a reduction's own condition, and the bounds of axes that vary with other axes.
    """

    roots: tuple[int, ...]
    reduced: bool
    conditions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Expression:
    """What a TE computes. Equal for TEs that differ in names only.

    Attributes
    ----------
    axes, reduce_axes : tuple of (int, int)
        First value and extent of each axis; the widest range for a reduction axis whose range varies (as in adaptive
        pooling).
    inputs : tuple of (shape, dtype)
    nodes : tuple of Node
    regions : tuple of Region
    combine : tuple of int
        A reducer's results over its operands; evaluated once for each point of the whole iteration space.
    """

    axes: tuple[tuple[int, int], ...]
    reduce_axes: tuple[tuple[int, int], ...]
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    nodes: tuple[Node, ...]
    regions: tuple[Region, ...]
    combine: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.reduce_axes, self.inputs, self.nodes, self.regions, self.combine))

    @cached_property
    def _reached(self) -> dict[Region, dict[int, frozenset[Path]]]:
        return {}

    @property
    def points(self) -> int:
        """Number of output elements (of one output)."""
        return _product(extent for _, extent in self.axes)

    @property
    def reduction_points(self) -> int:
        """Number of points of the reduction axes; 1 without any."""
        return _product(extent for _, extent in self.reduce_axes)

    def bounds(self, reduced: bool) -> tuple[tuple[int, int], ...]:
        """The axes of a region's points."""
        return self.axes + self.reduce_axes if reduced else self.axes

    def reach(self, region: Region) -> dict[int, frozenset[Path]]:
        """The nodes that `region` evaluates as values or indices, and under which conditions.

        A node that is always evaluated has the empty path among its paths. Conditions that a choice tests are
        evaluated too; only the chosen branch of a choice is, and the right side of a logical ``and`` or ``or`` only
        where the left side does not decide.
        """
        if region not in self._reached:
            self._reached[region] = self._reach(region)
        return self._reached[region]

    def _reach(self, region: Region) -> dict[int, frozenset[Path]]:
        start: Path = frozenset((condition, True) for condition in region.conditions)
        found: dict[int, set[Path]] = {}
        for roots, path in ((region.roots, start), (region.conditions, frozenset())):
            for root in roots:
                found.setdefault(root, set()).add(path)
        result: dict[int, frozenset[Path]] = {}
        # A node's number is larger than those of what it takes, so all its paths are known when its turn comes.
        for number in range(max(found, default=-1), -1, -1):
            if number not in found:
                continue
            paths = result[number] = _simplified(found.pop(number))
            node = self.nodes[number]
            for position, child in enumerate(node.args):
                added: Path = frozenset()
                if node.kind == "choose" and position > 0:
                    added = frozenset([(node.args[0], position == 1)])
                elif node.kind in ("and", "or") and position == 1:
                    added = frozenset([(node.args[0], node.kind == "and")])
                found.setdefault(child, set()).update(path | added for path in paths)
        return result


def _simplified(paths: set[Path]) -> frozenset[Path]:
    """The same alternatives, shorter: without conditions that do not matter, and without what another one covers."""
    kept: set[Path] = set()
    waiting = sorted(paths, key=len)
    while waiting:
        path = waiting.pop(0)
        if any(other <= path for other in kept):
            continue
        opposite = next((path ^ {c, (c[0], not c[1])} for c in path if path ^ {c, (c[0], not c[1])} in kept), None)
        if opposite is not None:
            waiting.insert(0, path & opposite)
            continue
        kept = {other for other in kept if not path < other}
        kept.add(path)
    if len(kept) > _MOST_PATHS:
        return frozenset([frozenset.intersection(*kept) | {(UNKNOWN, True)}])
    return frozenset(kept)


def _product(extents: Iterable[int]) -> int:
    total = 1
    for extent in extents:
        total *= extent
    return total


_once: OncePer[Expression] = OncePer()


def expression_of(te: TE) -> Expression:
    """The expression of `te`, found once for all TEs of one ``te.ComputeOp``."""
    return _once(te.op, lambda: _Builder(te).build())


class NodeTable:
    """Numbers the nodes of expressions; structurally equal subexpressions get one number.

    Parameters
    ----------
    input_of : callable
        The input that a load reads, as a number.

    Attributes
    ----------
    nodes : list of Node
    """

    def __init__(self, input_of: Callable[[Any], int]) -> None:
        self.input_of = input_of
        self.nodes: list[Node] = []
        self.numbers: dict[Node, int] = {}
        # By the address of a TVM object, which is kept beside its number so that the address stays its own.
        self.seen: dict[int, tuple[Any, int]] = {}

    def bind(self, variable: Any, number: int) -> None:
        """A variable stands for a node."""
        self.seen[hash(variable)] = (variable, number)

    def number(self, node: Node) -> int:
        """The number of a node."""
        number = self.numbers.get(node)
        if number is None:
            number = self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return number

    def visit(self, root: Any) -> int:
        """The number of an expression."""
        # A stack of its own: chains of fused operators are deeper than Python's.
        stack = [root]
        while stack:
            node = stack[-1]
            if hash(node) in self.seen:
                stack.pop()
                continue
            if isinstance(node, tirx.Let) and hash(node.var) not in self.seen:
                if hash(node.value) not in self.seen:
                    stack.append(node.value)
                    continue
                self.bind(node.var, self.seen[hash(node.value)][1])
            children = _children(node)
            waiting = [child for child in children if hash(child) not in self.seen]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            numbers = tuple(self.seen[hash(child)][1] for child in children)
            number = numbers[0] if isinstance(node, tirx.Let) else self.number(self._describe(node, numbers))
            self.seen[hash(node)] = (node, number)
        return self.seen[hash(root)][1]

    def _describe(self, node: Any, args: tuple[int, ...]) -> Node:
        kind, value = self._kind(node)
        data = kind == "load" or any(self.nodes[arg].data for arg in args)
        return Node(kind, args, value, str(node.ty) if kind != "text" else "", data)

    def _kind(self, node: Any) -> tuple[str, Any]:
        cls = type(node)
        if cls in _BINARY:
            return _BINARY[cls], None
        if cls in _UNARY:
            return _UNARY[cls], None
        if isinstance(node, tirx.IntImm):
            return "int", int(node.value)
        if isinstance(node, tirx.FloatImm):
            return "float", float(node.value)
        if isinstance(node, tirx.Cast):
            return "cast", None
        if isinstance(node, tirx.Select):
            return "choose", None
        if is_load(node) or isinstance(node, TensorLoad):
            return "load", self.input_of(node)
        if isinstance(node, Call):
            name = str(getattr(node.op, "name", node.op)).rpartition(".")[2]
            return ("choose", None) if name == "if_then_else" else ("call", name)
        if isinstance(node, tirx.Var):
            return "opaque", str(node.name)
        if isinstance(getattr(node, "value", None), str):
            return "text", node.value
        return "opaque", str(node)


class _Builder:
    """The expression of one TE."""

    def __init__(self, te: TE) -> None:
        self.te = te
        self.table = NodeTable(self.input_of)

    def input_of(self, load: Any) -> int:
        tensor = load_tensor(load)
        return next(i for i, known in enumerate(self.te.placeholders) if known.same_as(tensor))

    def build(self) -> Expression:
        te, table = self.te, self.table
        axes = te.axes + te.reduce_axes
        for position, axis in enumerate(axes):
            table.bind(axis.var, table.number(Node("axis", (), position, str(axis.var.ty), False)))
        regions: list[Region] = []
        combine: tuple[int, ...] = ()
        reduce = reduce_node(te.body)
        if reduce is None:
            regions.append(Region(tuple(table.visit(body) for body in te.op.body), False))
        else:
            conditions = [table.visit(reduce.condition), *self.varying_bounds()]
            holding = [c for c in conditions if not (table.nodes[c].kind == "int" and table.nodes[c].value)]
            regions.append(Region(tuple(table.visit(source) for source in reduce.source), True, tuple(holding)))
            if len(reduce.init):
                regions.append(Region(tuple(table.visit(init) for init in reduce.init), False))
            combiner = reduce.combiner
            for position, variable in enumerate([*combiner.lhs, *combiner.rhs]):
                table.bind(variable, table.number(Node("operand", (), position, str(variable.ty), True)))
            combine = tuple(table.visit(result) for result in combiner.result)
        extents = [self.range(axis) for axis in axes]
        split = len(te.axes)
        return Expression(
            tuple(extents[:split]),
            tuple(extents[split:]),
            tuple((tensor.shape, tensor.dtype) for tensor in te.inputs),
            tuple(table.nodes),
            tuple(regions),
            combine,
        )

    def range(self, axis: tirx.IterVar) -> tuple[int, int]:
        first, extent = axis.dom.min, axis.dom.extent
        if isinstance(first, tirx.IntImm) and isinstance(extent, tirx.IntImm):
            return const_int(first), const_int(extent)
        analyzer = bounded_analyzer(self.te.axes)
        low = analyzer.const_int_bound(first).min_value
        high = analyzer.const_int_bound(first + extent).max_value
        if low <= _NO_LOWER_BOUND or high >= _NO_UPPER_BOUND:
            raise ProgramError(
                f"TE {self.te.name} ({self.te.origin}) reduces {axis.var.name} over [{first}, {first + extent}), which "
                "has no constant bounds; a reduction's range may depend on its output index only"
            )
        return int(low), int(high - low)

    def varying_bounds(self) -> list[int]:
        """The bounds of the reduction axes whose range is not constant, as conditions."""
        conditions: list[int] = []
        for axis in self.te.reduce_axes:
            first, extent = axis.dom.min, axis.dom.extent
            if not isinstance(first, tirx.IntImm):
                conditions.append(self.table.visit(axis.var >= first))
            if not (isinstance(first, tirx.IntImm) and isinstance(extent, tirx.IntImm)):
                conditions.append(self.table.visit(axis.var < first + extent))
        return conditions


def _children(node: Any) -> tuple[Any, ...]:
    cls = type(node)
    if cls in _BINARY:
        return (node.a, node.b)
    if cls in _UNARY:
        return (node.a,)
    if isinstance(node, tirx.Cast):
        return (node.value,)
    if isinstance(node, tirx.Select):
        return (node.condition, node.true_value, node.false_value)
    if isinstance(node, tirx.Let):
        return (node.body,)
    if is_load(node):
        return load_indices(node)
    if isinstance(node, TensorLoad):
        return tuple(node.indices)
    if isinstance(node, Call):
        return tuple(node.args)
    return ()
