"""Reading a reduction as a contraction: which loops are rows, columns and batch of a matrix product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import Add, FloorDiv, Max, Min, Mul

from souffle.schedule.cpu.nest import Axis, Nest, product, simplify, stride_along, uses
from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import PrimExpr, buffer_loads

__all__ = [
    "Combiner",
    "CpuContraction",
    "Followers",
    "Packed",
    "Side",
    "combiner_of",
    "contraction_of",
    "contractions_of",
    "known_combiner",
    "split_groups",
    "without_units",
]

Packed = Literal["none", "rows", "columns"]
"""Which factor of a product is packed ahead of time: the one whose elements are broadcast, or that of vectors."""

_FEW_ROWS = 16
"""Below this, packing the columns costs more than it saves if they can be read as vectors where they are."""
_MIN_ROWS = 4


@dataclass(frozen=True, eq=False)
class Combiner:
    """A reduction ``c = operation(c, value)``."""

    operation: type
    value: PrimExpr
    identity: PrimExpr

    def apply(self, left: PrimExpr, right: PrimExpr) -> PrimExpr:
        """Combine two partial results."""
        return self.operation(left, right)


@dataclass(frozen=True, eq=False)
class Side:
    """One factor of the product under the sum: its expression and the axes that it depends on alone."""

    value: PrimExpr
    private: tuple[Axis, ...]


class Dot(Protocol):
    """Multiplies words."""

    @property
    def numbers(self) -> int:
        """In a word."""
        ...

    @property
    def lanes(self) -> int:
        """Words of a vector."""
        ...

    def apply(self, total: PrimExpr, scalar: PrimExpr, vector: PrimExpr) -> PrimExpr:
        """The new totals of a vector of them."""
        ...


@dataclass(frozen=True, eq=False)
class Followers:
    """What is computed of a product's columns in equal groups, as soon as there is a part of each group.

    Attributes
    ----------
    nests : tuple of Nest
        Functions of elements, over the product's rows, with its variables, and over `units`.
    units : Axis
        The columns of one group.
    part : int
        How many of them a panel has of each group.
    """

    nests: tuple[Nest, ...]
    units: Axis
    part: int

    def of(self, row: Mapping[tirx.Var, PrimExpr], panel: PrimExpr) -> list[Nest]:
        """What is computed behind a panel of this number in one row."""
        return [nest.bind(row).restrict(self.units, panel * self.part, self.part) for nest in self.nests]


@dataclass(frozen=True, eq=False)
class CpuContraction:
    """``C[batch, rows, columns] += scalar(batch, rows, k) * vector(batch, k, columns)``.

    Attributes
    ----------
    nest : Nest
        Without unit loops, group loops split.
    scalar, vector : Side
        The factor whose elements are broadcast, and the one that is read in vectors.
    batch, rows, columns : tuple of Axis
    identity : expression
        What the sum starts with.
    dot : WordDot, optional
        What multiplies elements that are words of several numbers (:mod:`souffle.schedule.cpu.words`).
    in_numbers : CpuContraction, optional
        The same before its elements were words.
    panels : Buffer, optional
        The vector factor, packed ahead of time (:mod:`souffle.schedule.cpu.packed_constants`).
    row_tiles : Buffer, optional
        The scalar factor, packed so.
    vectors : int, optional
        Of a panel that is packed ahead of time, where it is settled.
    followers : Followers, optional
        What is computed behind each panel.
    in_parts : bool
        Whether the first axis of the sum numbers its parts: each of these is summed by itself, and their totals are
        added up. Rounding errors grow with the longer of the two sums.
    """

    nest: Nest
    scalar: Side
    vector: Side
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    identity: PrimExpr
    dot: Dot | None = None
    in_numbers: CpuContraction | None = None
    panels: tirx.Buffer | None = None
    row_tiles: tirx.Buffer | None = None
    vectors: int | None = None
    followers: Followers | None = None
    in_parts: bool = False

    @property
    def packed(self) -> Packed:
        """Which factor is packed ahead of time."""
        return "columns" if self.panels is not None else "rows" if self.row_tiles is not None else "none"

    @property
    def packed_factor(self) -> tirx.Buffer | None:
        """The factor that is packed ahead of time, if one is."""
        return self.panels if self.row_tiles is None else self.row_tiles

    @property
    def height(self) -> int:
        """Rows of a matrix of the batch."""
        return product(axis.extent for axis in self.rows)

    @property
    def width(self) -> int:
        """Columns."""
        return product(axis.extent for axis in self.columns)

    @property
    def steps(self) -> int:
        """Products that are added for an element."""
        return product(axis.extent for axis in self.nest.reduce)

    @property
    def batches(self) -> int:
        """Matrices of the batch."""
        return product(axis.extent for axis in self.batch)

    @property
    def by_rows(self) -> bool:
        """Whether the last loop of the nest is one of the rows, so that results of a vector lie apart."""
        return bool(self.nest.spatial) and self.nest.spatial[-1] not in self.columns


def combiner_of(nest: Nest) -> Combiner | None:
    """The sum, product, maximum or minimum that a nest reduces with; ``None`` for others and for tuples."""
    if not nest.single or not isinstance(nest.init, tirx.BufferStore):
        return None
    store = nest.body
    value = store.value
    if not isinstance(value, Add | Mul | Max | Min):
        return None
    for own, other in ((value.a, value.b), (value.b, value.a)):
        if isinstance(own, TensorLoad) and own.source.same_as(store.buffer):
            matches = all(tvm_ffi.structural_equal(a, b) for a, b in zip(own.indices, store.indices, strict=True))
            if matches and not any(load.source.same_as(store.buffer) for load in buffer_loads(other)):
                return Combiner(type(value), other, nest.init.value)
    return None


def known_combiner(nest: Nest) -> Combiner:
    """:func:`combiner_of` a nest that has one, as it has in all loops that are made of it."""
    combiner = combiner_of(nest)
    assert combiner is not None  # the caller has read it before; loops do not change the body's form
    return combiner


def without_units(nest: Nest) -> Nest:
    """The nest without loops of extent 1."""
    units = [axis for axis in nest.axes if axis.extent == 1]
    return nest.bind({axis.var: tirx.const(0, axis.dtype) for axis in units}) if units else nest


def split_groups(nest: Nest) -> Nest:
    """Split a loop whose variable is read as a group number somewhere, as in a grouped convolution.

    Before: ``for f: C[f] += X[f // 4 * 8 + k] * W[f, k]``; after: ``for g, i`` with ``f = 4 * g + i``.
    """
    if not nest.single:
        return nest
    for axis in nest.spatial:
        divisors: list[int] = []

        def note(division: FloorDiv, axis: Axis = axis, divisors: list[int] = divisors) -> None:
            if division.a.same_as(axis.var) and isinstance(division.b, tirx.IntImm):
                divisors.append(int(division.b.value))

        structural_walk(nest.body, (FloorDiv, note))
        size = divisors[0] if divisors else 0
        if not 1 < size < axis.extent or axis.extent % size or any(d != size for d in divisors):
            continue
        outer = Axis(tirx.Var(f"{axis.var.name}_g", axis.dtype), axis.extent // size)
        inner = Axis(tirx.Var(f"{axis.var.name}_i", axis.dtype), size)
        at = next(i for i, a in enumerate(nest.spatial) if a is axis)
        spatial = (*nest.spatial[:at], outer, inner, *nest.spatial[at + 1 :])
        bound = nest.bind({axis.var: outer.var * size + inner.var})
        store = bound.body
        axes = (*spatial, *nest.reduce)
        indices = [simplify(index, axes) for index in store.indices]
        body = tirx.BufferStore(store.buffer, simplify_loads(store.value, axes), indices)
        return replace(bound, spatial=spatial, body=body)
    return nest


def simplify_loads(expression: PrimExpr, axes: Sequence[Axis]) -> PrimExpr:
    """`expression` with the indices of its loads simplified."""
    return structural_map(
        expression,
        (TensorLoad, lambda load: tirx.BufferLoad(load.source, [simplify(i, axes) for i in load.indices])),
    )


def contraction_of(nest: Nest) -> CpuContraction | None:
    """Read a nest as a contraction that is worth packing for; ``None`` if it is none."""
    forms = contractions_of(nest)
    if not forms or forms[0].by_rows:
        return None
    form, other = forms[0], forms[1] if len(forms) > 1 else None
    rows, columns = form.height, form.width
    if columns < _MIN_ROWS and rows >= _FEW_ROWS and other is not None:
        form = other
    elif rows < _FEW_ROWS and _readable_in_place(form.vector, form.columns, form.nest):
        return None
    if form.height < _MIN_ROWS and (form.width < _FEW_ROWS or form.height < 2):
        return None
    return form


def contractions_of(nest: Nest) -> tuple[CpuContraction, ...]:
    """All ways to read a nest as a contraction: with vectors along its last loop first, then along the other factor.

    Empty where it is no sum of products, or a factor does not depend on all loops of the sum.
    """
    first = combiner_of(nest)
    if first is None or first.operation is not Add or not isinstance(first.value, Mul):
        return ()
    nest = split_groups(without_units(nest))
    combiner = combiner_of(nest)
    if combiner is None or not nest.reduce or not isinstance(combiner.value, Mul):
        return ()
    left, right = combiner.value.a, combiner.value.b
    if len(uses(left, nest.reduce)) < len(nest.reduce) or len(uses(right, nest.reduce)) < len(nest.reduce):
        return ()
    in_left, in_right = uses(left, nest.spatial), uses(right, nest.spatial)
    sides = (
        Side(left, tuple(a for a in in_left if a not in in_right)),
        Side(right, tuple(a for a in in_right if a not in in_left)),
    )
    last = nest.spatial[-1] if nest.spatial else None
    found = []
    for vector, scalar in (sides, sides[::-1]):
        along_last = last in vector.private
        columns = _suffix(nest.spatial, vector.private) if along_last else vector.private
        if not columns:
            continue
        batch = tuple(a for a in nest.spatial if a not in columns and a not in scalar.private)
        form = CpuContraction(nest, scalar, vector, batch, scalar.private, columns, combiner.identity)
        found.insert(0 if along_last else len(found), form)
    return tuple(found)


def _suffix(spatial: Sequence[Axis], private: Sequence[Axis]) -> tuple[Axis, ...]:
    taken: list[Axis] = []
    for axis in reversed(spatial):
        if axis not in private:
            break
        taken.append(axis)
    return tuple(reversed(taken))


def _readable_in_place(side: Side, columns: Sequence[Axis], nest: Nest) -> bool:
    if not columns or columns[-1].extent < 8:
        return False
    axes = nest.axes
    return all(
        stride_along(load, columns[-1], axes) in (1, 2)
        for load in buffer_loads(side.value)
        if uses(load, [columns[-1]])
    )
