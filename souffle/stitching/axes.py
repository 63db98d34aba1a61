"""Which axes of a tensor's producer are axes of its reader: what blocks can divide between them (000 §4.1).

A consumer ``C`` reads producer ``P`` at ``P[f(c)]``. Where

    f_d(c) // (extent_d / parts)  =  c_a // (extent_a / parts)        at every point at which it is read,

both can be cut into `parts` equal chunks along ``d`` and ``a`` so that a chunk of the one needs no other chunk of the
other. That holds with as many parts as there are elements for a plain index, and with fewer for a reshape that splits
an axis or joins two. isl decides it; without an answer, axes are taken not to be aligned.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from souffle.analysis import expression_of
from souffle.analysis.access import Read, reads
from souffle.index import isl
from souffle.index.expression import Expression
from souffle.index.quasi_affine import AffineView
from souffle.program import TE

__all__ = ["Alignment", "alignments"]


class Alignment(NamedTuple):
    """An axis of a producer's output, the axis of the reader (reduction axes after the others), and the parts."""

    dimension: int
    axis: int
    parts: int


def alignments(te: TE, position: int) -> tuple[Alignment, ...]:
    """How the axes of input `position` lie along those of `te`, for axes longer than 1."""
    return _alignments(expression_of(te), position)


@lru_cache(maxsize=8192)
def _alignments(expression: Expression, position: int) -> tuple[Alignment, ...]:
    shape = expression.inputs[position][0]
    axes = expression.axes + expression.reduce_axes
    found = reads(expression, position)
    view = AffineView(expression)
    aligned = []
    for dimension, extent in enumerate(shape):
        for axis, (first, length) in enumerate(axes):
            parts = math.gcd(extent, length)
            if first == 0 and parts > 1 and all(_aligned(view, r, dimension, axis, extent, parts) for r in found):
                aligned.append(Alignment(dimension, axis, parts))
    return tuple(aligned)


def _aligned(view: AffineView, read: Read, dimension: int, axis: int, extent: int, parts: int) -> bool:
    number = read.indices[dimension]
    node = view.expression.nodes[number]
    length = view.bounds[axis][1]
    if node.data:
        return False
    if node.kind == "axis":
        return node.value == axis and length == extent
    used = {view.expression.nodes[n].value for n in _axes_below(view.expression, number)}
    if axis not in used:
        return False
    return bool(isl.within_budget(lambda: _chunks_agree(view, read, number, axis, extent // parts, length // parts)))


def _chunks_agree(view: AffineView, read: Read, number: int, axis: int, chunk: int, own_chunk: int) -> bool:
    value = view.value(number)
    if value is None:
        return False
    own = isl.divide_floor(isl.axis(view.dimensions, axis), own_chunk)
    difference = isl.divide_floor(value, chunk).sub(own)
    for path in read.paths:
        limits = isl.extremes(difference, view.domain(path)[0])
        if limits is not None and limits != (0, 0):
            return False
    return True


@lru_cache(maxsize=8192)
def _axes_below(expression: Expression, number: int) -> frozenset[int]:
    """The nodes that are axes among those that one is computed from."""
    node = expression.nodes[number]
    if node.kind == "axis":
        return frozenset([number])
    return frozenset().union(*(_axes_below(expression, arg) for arg in node.args))
