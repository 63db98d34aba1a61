"""Constants laid out ahead of time as the micro-kernel reads them: panels of columns, or tiles of rows.

Of either, each step of the sum is one run of memory. What :mod:`souffle.schedule.cpu.contraction` packs in every call
where the factor is only known then, is here packed once. A product of few rows, such as a step of a recurrent layer,
reads each weight once: in panels memory is read from end to end, where rows of a matrix would be touched a few vectors
at a time. A convolution of small images can take its vectors along the channels that it computes, of which there are
many, and one of large images along the images, with its weights as rows.

Short integers that an instruction multiplies by words (:mod:`souffle.schedule.cpu.words`) are packed as these words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import IntImm

from souffle.aligned import aligned_array
from souffle.schedule.cpu.column_groups import GroupedProduct
from souffle.schedule.cpu.contraction_form import CpuContraction, Packed, Side, contraction_of, contractions_of
from souffle.schedule.cpu.contraction_tiling import panel_vectors, product_cycles, reduction_cycles, row_tile
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
from souffle.schedule.cpu.words import WordDot, in_words
from souffle.tvm_compat import PrimExpr, buffer_loads

__all__ = ["PackedContraction", "PackedLayout", "packed_contractions"]

_MAX_GROWTH = 2
"""A constant whose elements are read in several places, as in windows, is not copied more often than that."""

_WORD_BYTES = 4

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
    numbers : (int, int)
        How many numbers a word of 32 bits has, the first one lowest, and their stride; (1, 0) where elements are none.
    """

    offset: int
    batch: _Strided
    steps: _Strided
    columns: _Strided
    width: int
    numbers: tuple[int, int] = (1, 0)

    @property
    def panels(self) -> int:
        """How many there are."""
        return -(-product(extent for extent, _ in self.columns) // self.width)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the packed constant: the batch, panels, steps of the sum, columns of a panel."""
        return (*(e for e, _ in self.batch), self.panels, *(e for e, _ in self.steps), self.width)

    def pack(self, array: np.ndarray) -> np.ndarray:
        """A new array of :attr:`shape` with the elements of a constant, which functions can read where it is."""
        axes = (*self.batch, *self.steps, *self.columns, self.numbers)
        places = sorted((extent - 1) * stride for extent, stride in axes)
        low = self.offset + sum(place for place in places if place < 0)
        high = self.offset + sum(place for place in places if place > 0)
        if low < 0 or high >= array.size:
            raise ValueError(f"elements {low} to {high} are read of a constant of {array.size}")
        flat = np.ascontiguousarray(array).reshape(-1)
        shape, strides = [extent for extent, _ in axes], [stride * flat.itemsize for _, stride in axes]
        seen = np.lib.stride_tricks.as_strided(flat[self.offset :], shape, strides, writeable=False)
        before, steps = [e for e, _ in self.batch], [e for e, _ in self.steps]
        # The numbers of a word are columns of their own here.
        count, _ = self.numbers
        columns, width = count * product(extent for extent, _ in self.columns), count * self.width
        dtype = array.dtype if count == 1 or count * array.dtype.itemsize == _WORD_BYTES else np.dtype(np.int16)
        packed = aligned_array((*before, self.panels, *steps, width), dtype, 0)
        seen = seen.reshape((*before, *steps, columns))
        at = len(before)
        whole = columns // width
        if whole:
            inside = seen[..., : whole * width].reshape((*before, *steps, whole, width))
            packed[(*(slice(None),) * at, slice(whole))] = np.moveaxis(inside, -2, at)
        if columns % width:
            packed[(*(slice(None),) * at, whole, ..., slice(columns % width))] = seen[..., whole * width :]
        return packed if count == 1 else packed.view(np.int32)


@dataclass(frozen=True, eq=False)
class PackedContraction:
    """A contraction of which one factor is a constant, packed ahead of time.

    Attributes
    ----------
    form : CpuContraction
        With the packed buffer.
    constant : Buffer
    layout : PackedLayout
    cycles : float
        Predicted, of one core.
    """

    form: CpuContraction
    constant: tirx.Buffer
    layout: PackedLayout
    cycles: float


def packed_contractions(
    nest: Nest,
    constants: Sequence[tirx.Buffer],
    machine: Machine,
    *,
    grouped: GroupedProduct | None = None,
    dots: Sequence[WordDot] = (),
) -> tuple[PackedContraction, ...]:
    """The ways to compute a contraction of a packed constant, if one is predicted to take less time than without.

    Parameters
    ----------
    nest : Nest
    constants : sequence of Buffer
        Those that hold the same in every call.
    machine : Machine
    grouped : GroupedProduct, optional
        Has `nest` with what is to be computed behind its panels. Then the constant is what these columns are of.
    dots : sequence of WordDot
        What multiplies words of short integers.

    Returns
    -------
    tuple of PackedContraction
        The quickest first.
    """
    known = contraction_of(nest)
    if known is not None:
        known = in_words(known, dots) or known
    found: list[PackedContraction] = []
    for form in contractions_of(nest):
        form = in_words(form, dots) or form
        if grouped is not None:
            if form.by_rows or form.width != grouped.width:
                continue  # its panels are of other columns
            form = replace(form, vectors=grouped.vectors, followers=grouped.followers)
        # Results of a vector lie apart where the last loop is one of rows, which a constant in vectors is worth alone.
        alone = form.by_rows or grouped is not None
        sides = [("columns", form.vector), *([] if alone else [("rows", form.scalar)])]
        for packed, side in sides:
            constant = _constant_of(side, constants)
            layout = None if constant is None else _layout_of(form, packed, machine)
            if layout is not None:
                found.append(_packed(form, packed, constant, layout, machine))
    found.sort(key=lambda each: each.cycles)
    if not found:
        return ()
    otherwise = (
        reduction_cycles(found[0].form, machine) if known is None else product_cycles(known, machine, packed="none")
    )
    return tuple(found) if found[0].cycles < otherwise else ()


def _constant_of(side: Side, constants: Sequence[tirx.Buffer]) -> tirx.Buffer | None:
    """The constant that is all that a factor reads."""
    loads = buffer_loads(side.value)
    return next((c for c in constants if loads and all(load.source.same_as(c) for load in loads)), None)


def _packed(
    form: CpuContraction, packed: Packed, constant: tirx.Buffer, layout: PackedLayout, machine: Machine
) -> PackedContraction:
    dtype = str(constant.dtype) if form.dot is None else "int32"
    if packed == "columns":
        form = replace(form, panels=tirx.decl_buffer(layout.shape, dtype, f"{constant.name}_panels"))
    else:
        form = replace(form, row_tiles=tirx.decl_buffer(layout.shape, dtype, f"{constant.name}_tiles"))
    return PackedContraction(form, constant, layout, product_cycles(form, machine, packed=packed))


def _layout_of(form: CpuContraction, packed: Packed, machine: Machine) -> PackedLayout | None:
    """The layout of one factor of a form; ``None`` where it is no element at a sum of multiples of loops."""
    numbers = form if form.in_numbers is None else form.in_numbers
    load = _element_of(numbers, packed)
    if not isinstance(load, TensorLoad) or not (form.dot or form.nest.body.buffer.dtype.startswith("float")):
        return None
    axes = numbers.nest.axes
    if any(buffer_loads(index) for index in load.indices):
        return None
    zeros: dict[tirx.Var, PrimExpr] = {axis.var: tirx.const(0, axis.dtype) for axis in axes}
    offset = simplify(replace_variables(flat_index(load.source, list(load.indices)), zeros))
    if not isinstance(offset, IntImm):
        return None
    batch = [axis for axis in form.batch if uses(load, [axis])]
    strides: list[_Strided] = []
    for group in (batch, numbers.nest.reduce, form.columns if packed == "columns" else form.rows):
        along = [stride_along(load, axis, axes) for axis in group]
        if any(stride is None for stride in along):
            return None
        strides.append(tuple((axis.extent, stride) for axis, stride in zip(group, along, strict=True)))
    before, steps, columns = strides
    divided = (steps, (1, 0)) if form.dot is None else _divided_into_words(form, steps)
    if divided is None:
        return None
    steps, word = divided
    size = product(extent for extent, _ in (*before, *steps, *columns, word))
    if size > _MAX_GROWTH * product(shape_of(load.source)):
        return None
    if packed == "rows":
        width = row_tile(form, machine)
    else:
        lanes = machine.lanes(str(form.nest.body.buffer.dtype)) if form.dot is None else form.dot.lanes
        width = lanes * (form.vectors or panel_vectors(form.width, lanes, machine.vector_registers))
    return PackedLayout(int(offset.value), before, steps, columns, width, word)


def _element_of(numbers: CpuContraction, packed: Packed) -> PrimExpr:
    """What a factor is converted from; integers by one conversion alone, since words are made of them as they lie."""
    value = (numbers.vector if packed == "columns" else numbers.scalar).value
    if numbers.nest.body.buffer.dtype.startswith("float"):
        return without_casts(value)
    return value.value if isinstance(value, tirx.Cast) else value


def _divided_into_words(form: CpuContraction, steps: _Strided) -> tuple[_Strided, tuple[int, int]] | None:
    """The strides of words, and of the numbers in them, along the loops of a sum of numbers; ``None`` where words go
    through several loops, or the last one is filled up."""
    reduce, count = form.in_numbers.nest.reduce, form.dot.numbers
    parted = [place for place, axis in enumerate(reduce) if axis not in form.nest.reduce]
    if len(parted) != 1 or len(reduce) != len(form.nest.reduce) or steps[parted[0]][0] % count:
        return None
    (place,) = parted
    extent, stride = steps[place]
    return (*steps[:place], (extent // count, stride * count), *steps[place + 1 :]), (count, stride)
