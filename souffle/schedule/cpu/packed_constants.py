"""Constants laid out ahead of time as the micro-kernel reads them: panels of columns, of which each step is one run.

What :mod:`souffle.schedule.cpu.contraction` packs in every call where the factor is only known then, is here packed
once. A product of few rows, such as a step of a recurrent layer, reads each weight once: in panels memory is read from
end to end, where rows of a matrix would be touched a few vectors at a time. And a convolution can take its vectors
along the channels that it computes, of which there are many where images are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import IntImm

from souffle.schedule.cpu.contraction_form import CpuContraction, contraction_of, contractions_of
from souffle.schedule.cpu.contraction_tiling import panel_vectors, product_cycles, reduction_cycles
from souffle.schedule.cpu.host import Machine
from souffle.schedule.cpu.nest import (
    Nest,
    flat_index,
    product,
    replace_variables,
    shape_of,
    simplify,
    stride_along,
    uses,
    without_casts,
)
from souffle.tvm_compat import PrimExpr, buffer_loads

__all__ = ["PackedLayout", "with_packed_constant"]

_MAX_GROWTH = 2
"""A constant whose elements are read in several places, as in windows, is not copied more often than that."""

_Strided = tuple[tuple[int, int], ...]
"""Extents of axes, and how many elements the position moves along each."""


@dataclass(frozen=True)
class PackedLayout:
    """Where the elements of a constant go.

    Attributes
    ----------
    offset : int
        The element at the beginning of all axes, counted in the constant as one run.
    batch, steps, columns : tuple of (int, int)
        Extent and stride of each axis.
    width : int
        Columns of a panel; the last one is filled up with zeros.
    """

    offset: int
    batch: _Strided
    steps: _Strided
    columns: _Strided
    width: int

    @property
    def panels(self) -> int:
        """How many there are."""
        return -(-product(extent for extent, _ in self.columns) // self.width)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the packed constant: the batch, panels, steps of the sum, columns of a panel."""
        return (*(e for e, _ in self.batch), self.panels, *(e for e, _ in self.steps), self.width)

    def pack(self, array: np.ndarray) -> np.ndarray:
        """A new array of :attr:`shape` with the elements of a constant."""
        axes = (*self.batch, *self.steps, *self.columns)
        places = sorted((extent - 1) * stride for extent, stride in axes)
        low = self.offset + sum(place for place in places if place < 0)
        high = self.offset + sum(place for place in places if place > 0)
        if low < 0 or high >= array.size:
            raise ValueError(f"elements {low} to {high} are read of a constant of {array.size}")
        flat = np.ascontiguousarray(array).reshape(-1)
        shape, strides = [extent for extent, _ in axes], [stride * flat.itemsize for _, stride in axes]
        seen = np.lib.stride_tricks.as_strided(flat[self.offset :], shape, strides, writeable=False)
        before, steps = [e for e, _ in self.batch], [e for e, _ in self.steps]
        columns = product(extent for extent, _ in self.columns)
        packed = np.zeros((*before, self.panels, *steps, self.width), array.dtype)
        seen = seen.reshape((*before, *steps, columns))
        at = len(before)
        whole = columns // self.width
        if whole:
            inside = seen[..., : whole * self.width].reshape((*before, *steps, whole, self.width))
            packed[(*(slice(None),) * at, slice(whole))] = np.moveaxis(inside, -2, at)
        if columns % self.width:
            packed[(*(slice(None),) * at, whole, ..., slice(columns % self.width))] = seen[..., whole * self.width :]
        return packed


def with_packed_constant(
    nest: Nest, constants: Sequence[tirx.Buffer], machine: Machine
) -> tuple[CpuContraction, tirx.Buffer, PackedLayout] | None:
    """A contraction that reads one of its factors in packed form, where that is predicted to take less time.

    Parameters
    ----------
    nest : Nest
    constants : sequence of Buffer
        Those that hold the same in every call.
    machine : Machine

    Returns
    -------
    tuple or None
        The contraction, the constant, and how it is packed. The packed buffer is what the vector factor reads.
    """
    known = contraction_of(nest)
    best: tuple[float, CpuContraction, tirx.Buffer, PackedLayout] | None = None
    for form in contractions_of(nest):
        loads = buffer_loads(form.vector.value)
        if len(loads) != 1 or not any(loads[0].source.same_as(constant) for constant in constants):
            continue
        layout = _layout_of(form, loads[0], machine)
        if layout is None:
            continue
        cycles = product_cycles(form, machine, packed=True)
        if best is None or cycles < best[0]:
            best = (cycles, form, loads[0].source, layout)
    if best is None:
        return None
    cycles, form, constant, layout = best
    otherwise = reduction_cycles(form, machine) if known is None else product_cycles(known, machine, packed=False)
    if otherwise <= cycles:
        return None
    packed = tirx.decl_buffer(layout.shape, str(constant.dtype), f"{constant.name}_panels")
    return replace(form, panels=packed), constant, layout


def _layout_of(form: CpuContraction, load: TensorLoad, machine: Machine) -> PackedLayout | None:
    """The layout of what a form reads along vectors; ``None`` where it is no element at a sum of multiples of loops."""
    value = without_casts(form.vector.value)
    if not isinstance(value, TensorLoad) or not form.nest.body.buffer.dtype.startswith("float"):
        return None
    axes = form.nest.axes
    if any(buffer_loads(index) for index in load.indices):
        return None
    zeros: dict[tirx.Var, PrimExpr] = {axis.var: tirx.const(0, axis.dtype) for axis in axes}
    offset = simplify(replace_variables(flat_index(load.source, list(load.indices)), zeros))
    if not isinstance(offset, IntImm):
        return None
    batch = [axis for axis in form.batch if uses(load, [axis])]
    strides: list[_Strided] = []
    for group in (batch, form.nest.reduce, form.columns):
        along = [stride_along(load, axis, axes) for axis in group]
        if any(stride is None for stride in along):
            return None
        strides.append(tuple((axis.extent, stride) for axis, stride in zip(group, along, strict=True)))
    if product(extent for extent, _ in (*strides[0], *strides[1], *strides[2])) > _MAX_GROWTH * product(
        shape_of(load.source)
    ):
        return None
    lanes = machine.lanes(str(form.nest.body.buffer.dtype))
    return PackedLayout(int(offset.value), *strides, panel_vectors(form.width, lanes, machine.vector_registers) * lanes)
