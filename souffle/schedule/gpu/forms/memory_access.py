"""Where the reads of an expression lie in memory: offsets, steps along an axis, and how wide one read may be."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.index.operations import COMPARISONS
from souffle.schedule.gpu.forms.contraction_expressions import Axis, depends, substitute_axes
from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import PrimExpr, buffer_loads, const_int, dtype_of

__all__ = ["aligned_lanes", "bits_of", "has_condition_on", "lanes_along", "memory_step"]

_WIDEST_BYTES = 16
"""Bytes of the widest load and store instruction of a thread."""


def bits_of(dtype: str) -> int:
    """Bits of one element as stored: a bool takes a byte."""
    return 8 if dtype == "bool" else tvm.DataType(dtype).bits


Terms = list[tuple[tirx.Var, int]]
"""Variables, each with what it is multiplied by."""


def _linear(index: PrimExpr) -> tuple[Terms, int] | None:
    """An index as the sum of some variables times numbers, and of a number; ``None`` if it is something else.

    Most indices are, and TVM's analyzer takes fifty times as long to say how they grow.
    """
    if isinstance(index, tirx.Var):
        return [(index, 1)], 0
    if isinstance(index, tirx.IntImm):
        return [], int(index.value)
    if not isinstance(index, (tirx.Add, tirx.Sub, tirx.Mul)):
        return None
    left, right = _linear(index.a), _linear(index.b)
    if left is None or right is None:
        return None
    if isinstance(index, tirx.Mul):
        if left[0] and right[0]:
            return None
        (terms, number), factor = (left, right[1]) if not right[0] else (right, left[1])
        return [(var, by * factor) for var, by in terms], number * factor
    sign = 1 if isinstance(index, tirx.Add) else -1
    return _sum(left[0], right[0], sign), left[1] + sign * right[1]


def _sum(terms: Terms, others: Terms, factor: int) -> Terms:
    """Some terms, and others times a number."""
    total = list(terms)
    for var, by in others:
        place = next((n for n, (known, _) in enumerate(total) if known.same_as(var)), None)
        if place is None:
            total.append((var, by * factor))
        else:
            total[place] = (var, total[place][1] + by * factor)
    return total


class _Place:
    """Where a read lies in the memory of its tensor."""

    def __init__(self, load: TensorLoad) -> None:
        self._load = load
        self._extents = [const_int(extent) for extent in load.source.shape]
        self.size = prod(self._extents)

    @cached_property
    def offset(self) -> PrimExpr:
        """Elements from the start of the tensor."""
        offset: PrimExpr = tirx.IntImm("int32", 0)
        for index, extent in zip(self._load.indices, self._extents, strict=True):
            offset = offset * extent + index
        return offset

    @cached_property
    def linear(self) -> tuple[Terms, int] | None:
        """The offset, as :func:`_linear` reads an index."""
        terms: Terms = []
        number = 0
        for index, extent in zip(self._load.indices, self._extents, strict=True):
            read = _linear(index)
            if read is None:
                return None
            terms = _sum(read[0], terms, extent)
            number = number * extent + read[1]
        return terms, number

    def depends(self, axis: Axis) -> bool:
        """Whether it is another place along `axis`."""
        if self.linear is not None:
            return any(var.same_as(axis.var) for var, _ in self.linear[0])
        return depends(self.offset, axis)

    def step(self, axis: Axis) -> int | None:
        """By how much it grows with one step along `axis`, if that is constant."""
        if self.linear is not None:
            return next((by for var, by in self.linear[0] if var.same_as(axis.var)), 0)
        shifted = substitute_axes(self.offset, {axis.var: axis.var + 1})
        difference = tvm.sym.Analyzer().simplify(shifted - self.offset)
        return int(difference.value) if isinstance(difference, tirx.IntImm) else None

    def begins_at_multiples(self, axis: Axis, lanes: int) -> bool:
        """Whether each `lanes` neighbours along `axis` begin at a multiple of their number."""
        if self.linear is not None:
            terms, number = self.linear
            starts = [by * lanes if var.same_as(axis.var) else by for var, by in terms]
            return all(start % lanes == 0 for start in (*starts, number))
        analyzer = tvm.sym.Analyzer()
        start = substitute_axes(self.offset, {axis.var: axis.var * lanes})
        known = analyzer.modular_set(analyzer.simplify(start))
        return int(known.coeff) % lanes == 0 and int(known.base) % lanes == 0


def memory_step(value: PrimExpr, axis: Axis) -> int | None:
    """The step in memory of the largest tensor in `value` that depends on `axis`, along `axis`; ``None`` if unknown."""
    places = [place for place in map(_Place, buffer_loads(value)) if place.depends(axis)]
    largest = max(places, key=lambda place: place.size, default=None)
    return None if largest is None else largest.step(axis)


def has_condition_on(value: PrimExpr, axis: Axis) -> bool:
    """Whether a comparison in `value` depends on `axis`."""
    found = False

    def see(node: Any) -> None:
        nonlocal found
        found = found or depends(node, axis)

    structural_walk(value, (COMPARISONS, see))
    return found


def lanes_along(value: PrimExpr, axis: Axis, dtype: str) -> int:
    """How many neighbours along `axis` one instruction can take: the widest power of two that divides the axis.

    1 if a condition in `value` depends on the axis, or a read moves by other than 0 or 1 elements along it.
    """
    if has_condition_on(value, axis):
        return 1
    loads = buffer_loads(value)
    places = [_Place(load) for load in loads]
    if any(place.step(axis) not in (0, 1) for place in places):
        return 1
    # A narrow value made of a wide one is read in the wide one's vectors.
    bits = max(bits_of(dtype), *(bits_of(dtype_of(load)) for load in loads), 8)
    # CUDA's own vectors of bytes end at four elements.
    lanes = 4 if bits == 8 and dtype != "bool" else 1 if dtype == "bool" else max(1, _WIDEST_BYTES * 8 // bits)
    while axis.extent % lanes:
        lanes //= 2
    for place in places:
        lanes = _aligned_lanes(place, axis, lanes)
    return lanes


def aligned_lanes(load: TensorLoad, axis: Axis, most: int) -> int:
    """How many neighbours along `axis`, at most `most`, begin at a multiple of their number in memory.

    So does the tensor's size: it may be one of several that are laid one behind the other. What does not move along
    the axis is one element for all of them.
    """
    return _aligned_lanes(_Place(load), axis, most)


def _aligned_lanes(place: _Place, axis: Axis, most: int) -> int:
    if most == 1 or place.step(axis) == 0:
        return most
    lanes = most
    while lanes > 1 and not (place.size % lanes == 0 and place.begins_at_multiples(axis, lanes)):
        lanes //= 2
    return lanes
