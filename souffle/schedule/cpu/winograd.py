"""Convolutions of 3 x 3 weights by Winograd's minimal filtering, where that is predicted to take less time.

(Lavin and Gray, *Fast Algorithms for Convolutional Neural Networks*, 2015.) With tiles of m x m results and n = m + 2::

    V[t] = B' d[t] B,   M[a, b, t, f] = Σ_c V[a, b, t, c] U[a, b, c, f],   Y[t] = A' M[t] A,   U = G g G'

So n² products of matrices take the place of the sum over 3 x 3 places: n² / m² multiplications for a result in place
of 9. What is multiplied with, U, is made of the weights ahead of time. Vectors run along channels in V and along
filters in M, so that the size of images does not matter to them.

Tiles have 2 x 2 or 4 x 4 results (:mod:`souffle.schedule.cpu.filtering`), whichever are predicted to take less time. A
NaN or an infinity reaches all results of the tiles that read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import ForKind

from souffle.aligned import aligned_array
from souffle.schedule.cpu.contraction import emit_contraction
from souffle.schedule.cpu.contraction_form import CpuContraction, Side
from souffle.schedule.cpu.contraction_tiling import CACHE_BYTES, product_cycles
from souffle.schedule.cpu.filtering import FOUR, TAPS, TWO, Filtering, Matrix
from souffle.schedule.cpu.host import Machine
from souffle.schedule.cpu.loop_emission import pieces
from souffle.schedule.cpu.nest import (
    Axis,
    Nest,
    as_index,
    decode,
    loop,
    product,
    replace_variables,
    stride_along,
    without_casts,
)
from souffle.schedule.cpu.packed_constants import PackedContraction, PackedLayout
from souffle.schedule.cpu.sharing import kind_of_loop
from souffle.tvm_compat import PrimExpr, sequence

__all__ = ["FilteredConvolution", "WinogradLayout", "by_winograd"]

_ELEMENT = 2.0
"""Cycles for an element that is read or written by itself."""
_VECTOR_OF_CACHE = 2.0
_FROM_MEMORY = 4.0
"""Bytes a cycle of weights that come from memory, as measured of a product of one row."""
_OF_GROWTH = 0.1
"""Weights of twice the size are to take so much less time, about, that they are worth their memory."""


@dataclass(frozen=True)
class WinogradLayout:
    """Weights as the products of transformed tiles take them.

    Attributes
    ----------
    weights : PackedLayout
        Their layout with both places in the window as its batch.
    matrix : matrix
        What either side of a window is multiplied with.
    parts : int
        Of the sum over channels.
    """

    weights: PackedLayout
    matrix: Matrix
    parts: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the transformed weights: a matrix for each element of a tile, in panels."""
        panels, channels, width = self.weights.shape[2:]
        return (len(self.matrix) ** 2, panels, self.parts, channels // self.parts, width)

    def pack(self, array: np.ndarray) -> np.ndarray:
        """The transformed weights of a constant, in float32, rounded once."""
        matrix = np.array(self.matrix)
        weights = self.weights.pack(array).astype(np.float64)
        transformed = np.einsum("ai,bj,ij...->ab...", matrix, matrix, weights, optimize=True)
        packed = aligned_array(self.shape, np.float32)
        packed[...] = transformed.reshape(self.shape)
        return packed


@dataclass(frozen=True, eq=False)
class _Window:
    """A convolution of 3 x 3 places with a stride of one.

    Attributes
    ----------
    form : CpuContraction
        Its vectors are along filters, of weights that are packed ahead of time.
    value : expression
        The element of the image in float32.
    images, y, x : Axis
        Of results: all axes but the last two, and those.
    ry, rx, channel : Axis
        Of the sum.
    """

    form: CpuContraction
    value: PrimExpr
    images: tuple[Axis, ...]
    y: Axis
    x: Axis
    ry: Axis
    rx: Axis
    channel: Axis

    @property
    def filters(self) -> Axis:
        return self.form.columns[0]


@dataclass(frozen=True, eq=False)
class FilteredConvolution:
    """A convolution by minimal filtering.

    Attributes
    ----------
    steps : tuple of (Nest or Stmt, CpuContraction or None)
        What takes its place: nests, contractions and statements.
    panels : Buffer
        The transformed weights.
    layout : WinogradLayout
        How they are made of the constant.
    """

    steps: tuple[tuple[Nest | tirx.Stmt, CpuContraction | None], ...]
    panels: tirx.Buffer
    layout: WinogradLayout


def by_winograd(ways: Sequence[PackedContraction], machine: Machine) -> FilteredConvolution | None:
    """A convolution in three steps, or ``None`` where it is none of this kind, or is not predicted to gain.

    Parameters
    ----------
    ways : sequence of PackedContraction
        To compute it with packed weights, the quickest first.
    machine : Machine
    """
    for way in ways:
        window = _window_of(way.form) if way.form.panels is not None else None
        if window is None or str(way.form.nest.body.buffer.dtype) != "float32":
            continue
        convolution = min(_convolutions(window, machine), key=lambda each: each.cycles * each.growth**_OF_GROWTH)
        if convolution.cycles < ways[0].cycles:
            strides = {id(axis): stride for axis, stride in zip(way.form.nest.reduce, way.layout.steps, strict=True)}
            batch = (strides[id(window.ry)], strides[id(window.rx)])
            weights = replace(way.layout, batch=batch, steps=(strides[id(window.channel)],))
            return FilteredConvolution(convolution.steps, convolution.panels, convolution.layout(weights))
    return None


def _convolutions(window: _Window, machine: Machine) -> list[_Convolution]:
    parts = [(filtering, filtering.parts(window.channel.extent)) for filtering in (TWO, FOUR)]
    return [_Convolution(window, filtering, count, machine) for filtering, count in parts if count is not None]


def _window_of(form: CpuContraction) -> _Window | None:
    load = without_casts(form.scalar.value)
    if not isinstance(load, TensorLoad) or form.batch or len(form.columns) != 1 or len(form.rows) < 2:
        return None
    axes = form.nest.axes
    strides = {id(axis): stride_along(load, axis, axes) for axis in axes}
    if len(form.nest.reduce) != 3 or any(strides[id(axis)] is None for axis in axes):
        return None
    *images, y, x = form.rows
    taps = [axis for axis in form.nest.reduce if axis.extent == TAPS]
    ry = next((axis for axis in taps if strides[id(axis)] == strides[id(y)]), None)
    rx = next((axis for axis in taps if axis is not ry and strides[id(axis)] == strides[id(x)]), None)
    if ry is None or rx is None:
        return None
    channel = next(axis for axis in form.nest.reduce if axis is not ry and axis is not rx)
    return _Window(form, form.scalar.value, tuple(images), y, x, ry, rx, channel)


class _Convolution:
    """The steps of one convolution.

    Parameters
    ----------
    window : _Window
    filtering : Filtering
    parts : int
        Of the sums over channels.
    machine : Machine
    """

    def __init__(self, window: _Window, filtering: Filtering, parts: int, machine: Machine) -> None:
        self.window, self._filtering, self._parts, self._machine = window, filtering, parts, machine
        form = window.form
        size, points = filtering.size, filtering.points
        self._lanes = machine.lanes("float32")
        self._index = form.nest.spatial[-1].dtype
        self._across = (-(-window.y.extent // size), -(-window.x.extent // size))
        self._images = product(axis.extent for axis in window.images)
        down, right = self._across
        tile_rows = _rows_of_block(self._images * down, right, window.channel.extent, window.filters.extent, points)
        self._blocks, self._tiles = self._images * down // tile_rows, tile_rows * right
        name, channels, filters = form.nest.name, window.channel.extent, window.filters.extent
        rows, columns = (count * size + TAPS - 1 for count in self._across)
        self._data = tirx.decl_buffer((self._images, rows, columns, channels), "float32", f"{name}_data")
        self._tile_data = tirx.decl_buffer((points**2, self._tiles, channels), "float32", f"{name}_tile_data")
        self._products = tirx.decl_buffer((points**2, self._tiles, filters), "float32", f"{name}_products")
        panels, width = form.panels.shape[0], form.panels.shape[-1]
        shape = (points**2, panels, parts, channels // parts, width)
        self.panels = tirx.decl_buffer(shape, "float32", f"{form.panels.name}_transformed")

    def layout(self, weights: PackedLayout) -> WinogradLayout:
        """Of the transformed weights, by that of the weights."""
        return WinogradLayout(weights, self._filtering.weights, self._parts)

    @property
    def growth(self) -> float:
        """How much larger transformed weights are."""
        return (self._filtering.points / TAPS) ** 2

    @property
    def cycles(self) -> float:
        """Of one core: the products, and what is done for each element before and after them."""
        window, points = self.window, self._filtering.points
        _, rows, columns, channels = (int(extent) for extent in self._data.shape)
        filters = window.filters.extent
        copied = self._images * rows * columns * channels * _ELEMENT
        before = self._tiles * channels / self._lanes * self._operations_before
        after = self._tiles * filters / self._lanes * self._operations_after
        moved = 2 * points**2 * self._tiles * (channels + filters) / self._lanes * _VECTOR_OF_CACHE
        stored = self._images * window.y.extent * window.x.extent * filters * _ELEMENT
        multiplied = self._blocks * product_cycles(self._multiplied, self._machine, packed="columns")
        multiplied = max(multiplied, 4 * points**2 * channels * filters / _FROM_MEMORY)
        return self._blocks * (before + after + moved) + multiplied + copied + stored

    @property
    def _operations_before(self) -> int:
        """On a vector of channels of a tile."""
        points = self._filtering.points
        terms = sum(1 for row in self._filtering.data for factor in row if factor)
        return 2 * points * terms + 2 * points**2

    @property
    def _operations_after(self) -> int:
        """On a vector of filters of a tile."""
        points = self._filtering.points
        terms = sum(1 for row in self._filtering.results for factor in row if factor)
        return (points + self._filtering.size) * terms + points**2

    @property
    def steps(self) -> tuple[tuple[Nest | tirx.Stmt, CpuContraction | None], ...]:
        """What computes the convolution, in order."""

        def block(number: PrimExpr) -> tirx.Stmt:
            first = number * self._tiles
            products = emit_contraction(self._multiplied, self._machine)
            return sequence(self._transformed(first), products, self._results(first))

        return (self._by_channels(), None), (loop(self._blocks, block, name="block", dtype=self._index), None)

    @property
    def _multiplied(self) -> CpuContraction:
        """The products of a block's tiles with the weights, one for each element of a tile."""
        index = self._index
        each = self.window.channel.extent // self._parts
        point, tile, filters, part, channel = (
            Axis(tirx.Var(name, index), extent)
            for name, extent in (
                ("point", self._filtering.points**2),
                ("tile", self._tiles),
                ("f", self.window.filters.extent),
                ("part", self._parts),
                ("c", each),
            )
        )
        place = [point.var, tile.var, filters.var]
        factor = tirx.BufferLoad(self._tile_data, [point.var, tile.var, part.var * each + channel.var])
        # Stands for the panels, which are read in its place.
        weight = tirx.BufferLoad(self.panels, [point.var, filters.var, part.var, channel.var, filters.var])
        zero = tirx.const(0, "float32")
        nest = Nest(
            f"{self.window.form.nest.name}_products",
            (point, tile, filters),
            (part, channel),
            tirx.BufferStore(self._products, zero, place),
            tirx.BufferStore(self._products, tirx.BufferLoad(self._products, place) + factor * weight, place),
        )
        scalar, vector = Side(factor, (tile,)), Side(weight, (filters,))
        in_parts = self._parts > 1
        return CpuContraction(
            nest, scalar, vector, (point,), (tile,), (filters,), zero, panels=self.panels, in_parts=in_parts
        )

    def _by_channels(self) -> Nest:
        """A copy of the images with their channels last, so that vectors run along these.

        Tiles may reach beyond the images. There are zeros: results that are kept do not depend on them, but would be
        NaN where they were.
        """
        window, index = self.window, self._index
        images, rows, columns, channels = (int(extent) for extent in self._data.shape)
        image, y, x, channel = (
            Axis(tirx.Var(name, index), extent)
            for name, extent in (("image", images), ("y", rows), ("x", columns), ("c", channels))
        )
        zero = tirx.const(0, index)
        values = {
            **decode(image.var, window.images),
            window.y.var: as_index(y.var, window.y.dtype),
            window.x.var: as_index(x.var, window.x.dtype),
            window.ry.var: as_index(zero, window.ry.dtype),
            window.rx.var: as_index(zero, window.rx.dtype),
            window.channel.var: as_index(channel.var, window.channel.dtype),
        }
        place = [image.var, y.var, x.var, channel.var]
        value = replace_variables(window.value, values)
        for place_along, read, extent in ((x.var, window.x, columns), (y.var, window.y, rows)):
            if (there := read.extent + TAPS - 1) < extent:
                inside = place_along < tirx.const(there, index)
                value = tirx.if_then_else(inside, value, tirx.const(0, "float32"))
        copied = tirx.BufferStore(self._data, value, place)
        return Nest(f"{window.form.nest.name}_data", (image, y, x, channel), (), None, copied)

    def _transformed(self, first: PrimExpr) -> tirx.Stmt:
        """B' d B of a block's tiles. The elements behind the last row and column are of no result that is kept."""
        size, points, matrix = self._filtering.size, self._filtering.points, self._filtering.data

        def work(tile: PrimExpr, start: PrimExpr, width: int) -> tirx.Stmt:
            image, ty, tx = self._tile(first + tile)

            def element(i: int, j: int, v: PrimExpr) -> PrimExpr:
                return tirx.BufferLoad(self._data, [image, ty * size + i, tx * size + j, start + v])

            def store(a: int, b: int, value: PrimExpr, v: PrimExpr) -> tirx.Stmt:
                place = [tirx.const(a * points + b, self._index), tile, start + v]
                return tirx.BufferStore(self._tile_data, value, place)

            return self._both_sides(matrix, points, element, store, width)

        return self._over_tiles(self.window.channel.extent, self._operations_before, work)

    def _results(self, first: PrimExpr) -> tirx.Stmt:
        """A' M A of a block's tiles, stored through the convolution's epilogue."""
        size, points, matrix = self._filtering.size, self._filtering.points, self._filtering.results
        window, index = self.window, self._index

        def work(tile: PrimExpr, start: PrimExpr, width: int) -> tirx.Stmt:
            image, ty, tx = self._tile(first + tile)

            def element(a: int, b: int, v: PrimExpr) -> PrimExpr:
                return tirx.BufferLoad(self._products, [tirx.const(a * points + b, index), tile, start + v])

            kept = [tirx.decl_buffer((size, width), "float32", f"row{p}") for p in range(size)]

            def store(p: int, q: int, value: PrimExpr, v: PrimExpr) -> tirx.Stmt:
                return tirx.BufferStore(kept[p], value, [tirx.const(q, index), v])

            statements = [*(tirx.AllocBuffer(row) for row in kept)]
            statements.append(self._both_sides(matrix, points, element, store, width))
            for p in range(size):
                for q in range(size):
                    y, x = ty * size + p, tx * size + q

                    def result(v: PrimExpr, p: int = p, q: int = q, y: PrimExpr = y, x: PrimExpr = x) -> tirx.Stmt:
                        values: dict[Any, PrimExpr] = {
                            **decode(image, window.images),
                            window.y.var: as_index(y, window.y.dtype),
                            window.x.var: as_index(x, window.x.dtype),
                            window.filters.var: as_index(start + v, window.filters.dtype),
                        }
                        done = window.form.nest.bind(values)
                        return done.finish(tirx.BufferLoad(kept[p], [tirx.const(q, index), v]))

                    stored = _vector(width, result, index)
                    inside = [
                        place < tirx.const(axis.extent, index)
                        for place, axis, number in ((y, window.y, p), (x, window.x, q))
                        if axis.extent % size and number >= axis.extent % size
                    ]
                    for condition in inside:
                        stored = tirx.IfThenElse(condition, stored, None)
                    statements.append(stored)
            return sequence(*statements)

        return self._over_tiles(window.filters.extent, self._operations_after, work)

    def _tile(self, tile: PrimExpr) -> tuple[PrimExpr, PrimExpr, PrimExpr]:
        """The image of a tile, and its row and column there."""
        down, right = self._across
        index = self._index
        row = tirx.floordiv(tile, tirx.const(right, index))
        column = tirx.floormod(tile, tirx.const(right, index))
        return tirx.floordiv(row, tirx.const(down, index)), tirx.floormod(row, tirx.const(down, index)), column

    def _both_sides(
        self,
        matrix: Matrix,
        points: int,
        element: Callable[[int, int, PrimExpr], PrimExpr],
        store: Callable[[int, int, PrimExpr, PrimExpr], tirx.Stmt],
        width: int,
    ) -> tirx.Stmt:
        """``matrix x matrix'`` of tiles in vectors: first the rows, which are kept, then the columns."""
        index = self._index
        rows = [tirx.decl_buffer((points, width), "float32", f"half{a}") for a in range(len(matrix))]
        statements = [*(tirx.AllocBuffer(row) for row in rows)]
        for a, factors in enumerate(matrix):
            for j in range(points):
                statements.append(
                    _vector(
                        width,
                        lambda v, a=a, j=j, factors=factors: tirx.BufferStore(
                            rows[a],
                            _sum([(factor, element(i, j, v)) for i, factor in enumerate(factors)]),
                            [tirx.const(j, index), v],
                        ),
                        index,
                    )
                )
        for a in range(len(matrix)):
            for b, factors in enumerate(matrix):
                statements.append(
                    _vector(
                        width,
                        lambda v, a=a, b=b, factors=factors: store(
                            a,
                            b,
                            _sum(
                                [
                                    (factor, tirx.BufferLoad(rows[a], [tirx.const(j, index), v]))
                                    for j, factor in enumerate(factors)
                                ]
                            ),
                            v,
                        ),
                        index,
                    )
                )
        return sequence(*statements)

    def _over_tiles(
        self, extent: int, cycles: int, work: Callable[[PrimExpr, PrimExpr, int], tirx.Stmt]
    ) -> tirx.Stmt:
        """A loop over a block's tiles, and vectors along the last axis inside."""

        def task(tile: PrimExpr) -> tirx.Stmt:
            return sequence(
                *(
                    loop(
                        piece.count,
                        lambda o, piece=piece: work(tile, o * piece.width + piece.start, piece.width),
                        name="o",
                        dtype=self._index,
                    )
                    for piece in pieces(extent, self._lanes)
                )
            )

        kind = kind_of_loop(self._tiles * extent / self._lanes * cycles)
        return loop(self._tiles, task, kind, name="tile", dtype=self._index)


def _rows_of_block(rows: int, right: int, channels: int, filters: int, points: int) -> int:
    """How many rows of tiles are a block: what is between its steps stays in a core's cache, if weights are not more.

    A block reads all weights, so that with more of them than of that larger blocks move less.
    """
    bytes_of_tile = 4 * points**2 * (channels + filters)
    wanted = max(CACHE_BYTES / bytes_of_tile, channels * filters / (channels + filters)) / right
    return next(count for count in range(1, rows + 1) if rows % count == 0 and (count >= wanted or count == rows))


def _vector(width: int, make: Callable[[PrimExpr], tirx.Stmt], index: str) -> tirx.Stmt:
    return loop(width, make, ForKind.VECTORIZED if width > 1 else ForKind.SERIAL, name="v", dtype=index)


def _sum(terms: Sequence[tuple[float, PrimExpr]]) -> PrimExpr:
    """A sum of products with constants, of which 0, 1 and -1 are no multiplications."""
    total: PrimExpr | None = None
    for factor, value in terms:
        if not factor:
            continue
        term = value if abs(factor) == 1 else value * tirx.const(abs(factor), "float32")
        if total is None:
            total = term if factor > 0 else tirx.const(0, "float32") - term
        else:
            total = total + term if factor > 0 else total - term
    assert total is not None  # no row of the matrices is empty
    return total
