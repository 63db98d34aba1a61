"""An expression as plain data: numbered, deduplicated nodes that say nothing of TVM's objects or names.

Every analysis reads this form. Two TEs with the same :class:`Expression` have the same accesses and the same
arithmetic, so identical layers of a network are analysed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tvm import tirx
from tvm.runtime import Object

from souffle.index.operations import call_name, operands_of, operation_of

__all__ = ["UNKNOWN", "Expression", "Node", "NodeTable", "Path", "Region", "cone"]

_MOST_PATHS = 256
UNKNOWN = -1
"""Stands in a path for a condition that is not tracked: it may hold or not."""

_address = Object.__hash__
"""Of an object of TVM. The hash that Python asks a literal for is its value, and that of -1 is the one of -2."""

_NOT_OF_ONE_NUMBER = ("opaque", "ramp", "broadcast", "shuffle")


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


def cone(nodes: Sequence[Node], roots: Iterable[int]) -> list[int]:
    """What some nodes are computed from, themselves included, in the order of their numbers."""
    reached = set(roots)
    stack = list(reached)
    while stack:
        new = set(nodes[stack.pop()].args) - reached
        reached |= new
        stack.extend(new)
    return sorted(reached)


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
        # An object is kept beside its number, so that its address stays its own.
        self.seen: dict[int, tuple[Any, int]] = {}

    def bind(self, variable: Any, number: int) -> None:
        """A variable stands for a node."""
        self.seen[_address(variable)] = (variable, number)

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
            if _address(node) in self.seen:
                stack.pop()
                continue
            if isinstance(node, tirx.Let) and _address(node.var) not in self.seen:
                if _address(node.value) not in self.seen:
                    stack.append(node.value)
                    continue
                self.bind(node.var, self.seen[_address(node.value)][1])
            children = operands_of(node)
            waiting = [child for child in children if _address(child) not in self.seen]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            numbers = tuple(self.seen[_address(child)][1] for child in children)
            number = numbers[0] if isinstance(node, tirx.Let) else self.number(self._describe(node, numbers))
            self.seen[_address(node)] = (node, number)
        return self.seen[_address(root)][1]

    def _describe(self, node: Any, args: tuple[int, ...]) -> Node:
        kind, value = self._kind(node)
        data = kind == "load" or any(self.nodes[arg].data for arg in args)
        return Node(kind, args, value, str(node.ty) if kind != "text" else "", data)

    def _kind(self, node: Any) -> tuple[str, Any]:
        operation = operation_of(node)
        if operation == "int":
            return operation, int(node.value)
        if operation == "float":
            return operation, float(node.value)
        if operation == "load":
            return operation, self.input_of(node)
        if operation == "call":
            return operation, call_name(node)
        if operation == "variable":
            return "opaque", str(node.name)
        if operation in _NOT_OF_ONE_NUMBER:
            text = getattr(node, "value", None)
            return ("text", text) if isinstance(text, str) else ("opaque", str(node))
        return operation, None
