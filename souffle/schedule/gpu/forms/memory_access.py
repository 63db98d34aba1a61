"""Where the reads of an expression lie in memory: offsets, steps along an axis, and how wide one read may be."""

from __future__ import annotations

from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.index.operations import COMPARISONS
from souffle.schedule.gpu.forms.contraction_expressions import Axis, depends, substitute_axes
from souffle.tvm_compat import PrimExpr, buffer_loads, const_int, dtype_of

__all__ = ["aligned_lanes", "bits_of", "has_condition_on", "lanes_along", "memory_step", "offset_of"]

_WIDEST_BYTES = 16
"""Bytes of the widest load and store instruction of a thread."""


def bits_of(dtype: str) -> int:
    """Bits of one element as stored: a bool takes a byte."""
    return 8 if dtype == "bool" else tvm.DataType(dtype).bits


def offset_of(load: TensorLoad) -> PrimExpr:
    """Elements from the start of a tensor to what is read of it."""
    offset: PrimExpr = tirx.IntImm("int32", 0)
    for index, extent in zip(load.indices, load.source.shape, strict=True):
        offset = offset * const_int(extent) + index
    return offset


def _step(indices: PrimExpr, axis: Axis) -> int | None:
    """By how much an index grows with one step along `axis`, if that is constant."""
    shifted = substitute_axes(indices, {axis.var: axis.var + 1})
    difference = tvm.sym.Analyzer().simplify(shifted - indices)
    return int(difference.value) if isinstance(difference, tirx.IntImm) else None


def memory_step(value: PrimExpr, axis: Axis) -> int | None:
    """The step in memory of the largest tensor in `value` that depends on `axis`, along `axis`; ``None`` if unknown."""
    best: tuple[int, int | None] | None = None
    for load in buffer_loads(value):
        offset = offset_of(load)
        if depends(offset, axis):
            size = prod(const_int(e) for e in load.source.shape)
            if best is None or size > best[0]:
                best = (size, _step(offset, axis))
    return None if best is None else best[1]


def has_condition_on(value: PrimExpr, axis: Axis) -> bool:
    """Whether a comparison in `value` depends on `axis`."""
    found = False

    def see(node: Any) -> None:
        nonlocal found
        found = found or depends(node, axis)

    tvm_ffi.structural_walk(value, (COMPARISONS, see))
    return found


def lanes_along(value: PrimExpr, axis: Axis, dtype: str) -> int:
    """How many neighbours along `axis` one instruction can take: the widest power of two that divides the axis.

    1 if a condition in `value` depends on the axis, or a read moves by other than 0 or 1 elements along it.
    """
    if has_condition_on(value, axis):
        return 1
    for load in buffer_loads(value):
        if _step(offset_of(load), axis) not in (0, 1):
            return 1
    # A narrow value made of a wide one is read in the wide one's vectors.
    bits = max(bits_of(dtype), *(bits_of(dtype_of(load)) for load in buffer_loads(value)), 8)
    # CUDA's own vectors of bytes end at four elements.
    lanes = 4 if bits == 8 and dtype != "bool" else 1 if dtype == "bool" else max(1, _WIDEST_BYTES * 8 // bits)
    while axis.extent % lanes:
        lanes //= 2
    for load in buffer_loads(value):
        lanes = aligned_lanes(load, axis, lanes)
    return lanes


def aligned_lanes(load: TensorLoad, axis: Axis, most: int) -> int:
    """How many neighbours along `axis`, at most `most`, begin at a multiple of their number in memory.

    So does the tensor's size: it may be one of several that are laid one behind the other. What does not move along
    the axis is one element for all of them.
    """
    if most == 1 or _step(offset_of(load), axis) == 0:
        return most
    size = prod(const_int(extent) for extent in load.source.shape)
    analyzer = tvm.sym.Analyzer()
    lanes = most
    while lanes > 1:
        start = substitute_axes(offset_of(load), {axis.var: axis.var * lanes})
        known = analyzer.modular_set(analyzer.simplify(start))
        if size % lanes == 0 and int(known.coeff) % lanes == 0 and int(known.base) % lanes == 0:
            break
        lanes //= 2
    return lanes
