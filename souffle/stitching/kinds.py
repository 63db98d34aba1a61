"""What a TE is to a fusion planner, found from its expression and never from a name (003 §4.2, 000 §4).

The papers speak of XLA's operators; a TE says the same by its reduction axes, by what it sums, and by the axes that the
loads of each factor use:

    no reduction axis                                             light element-wise, expensive if it calls a function
    a window: one index runs over an output and a reduction axis  window (convolution, pooling)
    a sum of products of two factors, each of a reduction axis,
    of which one uses an output axis that the other does not      gemm; batched where both share one longer than 1
    any other reduction to one element                            scalar reduction
    any other along the last axis of what it reads                row reduction
    any other                                                     column reduction

Movement of data (transpose, slice, gather, concatenation) is light element-wise, as in both papers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import lru_cache

from souffle.analysis import Arithmetic, Expression, expression_of
from souffle.index.expression import cone
from souffle.program import TE, ExternTE, FusedTE, Loop

__all__ = ["CONTRACTIONS", "ELEMENTWISE", "REDUCTIONS", "Kind", "kind_of"]


class Kind(enum.Enum):
    """What a TE is to a planner."""

    LIGHT = "light"
    EXPENSIVE = "expensive"
    ROW = "row reduction"
    COLUMN = "column reduction"
    SCALAR = "scalar reduction"
    GEMM = "gemm"
    BATCHED_GEMM = "batched gemm"
    WINDOW = "window"
    EXTERN = "extern"

    def __str__(self) -> str:
        return self.value


ELEMENTWISE = frozenset([Kind.LIGHT, Kind.EXPENSIVE])
REDUCTIONS = frozenset([Kind.ROW, Kind.COLUMN, Kind.SCALAR])
CONTRACTIONS = frozenset([Kind.GEMM, Kind.BATCHED_GEMM])


def kind_of(item: TE | FusedTE | ExternTE | Loop) -> Kind:
    """The kind of an item of a program; a loop is what an operator without an expression is, a kernel of its own."""
    if not isinstance(item, TE):
        return Kind.EXTERN
    expression = expression_of(item)
    if not expression.reduce_axes:
        return Kind.EXPENSIVE if Arithmetic(item).calls_functions else Kind.LIGHT
    return _reduction_kind(expression)


@lru_cache(maxsize=4096)
def _reduction_kind(expression: Expression) -> Kind:
    loads = _loads(expression, (root for region in expression.regions if region.reduced for root in region.roots))
    reads = [index for load in loads for index in _index_axes(expression, load)]
    if any(_mixed(expression, axes) for axes in reads):
        return Kind.WINDOW
    product = _contraction(expression)
    if product is not None:
        return product
    if expression.points == 1:
        return Kind.SCALAR
    return Kind.ROW if any(_along_last(expression, load) for load in loads) else Kind.COLUMN


def _contraction(expression: Expression) -> Kind | None:
    """A gemm, where the expression is a sum of products whose factors have output axes of their own."""
    roots = next(region.roots for region in expression.regions if region.reduced)
    if len(roots) != 1 or expression.nodes[expression.combine[0]].kind != "add":
        return None
    uses = []
    for factor in _factors(expression, roots[0]):
        loads = _loads(expression, [factor])
        axes = {axis for load in loads for index in _index_axes(expression, load) for axis in index}
        if any(axis >= len(expression.axes) for axis in axes):
            uses.append(frozenset(axis for axis in axes if axis < len(expression.axes)))
    if len(uses) < 2 or all(use == uses[0] for use in uses):
        return None
    shared = frozenset.intersection(*uses)
    return Kind.BATCHED_GEMM if any(expression.axes[axis][1] > 1 for axis in shared) else Kind.GEMM


def _factors(expression: Expression, root: int) -> list[int]:
    """What a product multiplies, through casts."""
    node = expression.nodes[root]
    if node.kind == "mul":
        return [factor for arg in node.args for factor in _factors(expression, arg)]
    return _factors(expression, node.args[0]) if node.kind == "cast" else [root]


def _loads(expression: Expression, roots: Iterable[int]) -> list[int]:
    return [number for number in cone(expression.nodes, roots) if expression.nodes[number].kind == "load"]


def _index_axes(expression: Expression, load: int) -> list[frozenset[int]]:
    """The axes that each index of a load depends on."""
    nodes = expression.nodes
    return [
        frozenset(nodes[number].value for number in cone(nodes, [index]) if nodes[number].kind == "axis")
        for index in nodes[load].args
    ]


def _mixed(expression: Expression, axes: frozenset[int]) -> bool:
    """Whether an index runs over an output axis and a reduction axis, both longer than 1."""
    split, bounds = len(expression.axes), expression.axes + expression.reduce_axes
    long = [axis for axis in axes if bounds[axis][1] > 1]
    return any(axis < split for axis in long) and any(axis >= split for axis in long)


def _along_last(expression: Expression, load: int) -> bool:
    """Whether the last index of a load that is longer than 1 is that of a reduction axis."""
    shape = expression.inputs[expression.nodes[load].value][0]
    indices = _index_axes(expression, load)
    last = next((axes for axes, extent in zip(indices[::-1], shape[::-1], strict=True) if extent > 1), frozenset())
    return any(axis >= len(expression.axes) for axis in last)
