"""A panel of columns of a product: how it is packed, and the micro-kernel that multiplies a tile of rows with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm import DataType, tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import ForKind

from souffle.schedule.cpu.contraction_form import CpuContraction
from souffle.schedule.cpu.contraction_tiling import CpuTiling, reads_in_vectors, stores_in_vectors
from souffle.schedule.cpu.loop_emission import pieces
from souffle.schedule.cpu.nest import (
    Axis,
    as_index,
    decode,
    loop,
    map_buffer_loads,
    product,
    replace_variables,
    shape_of,
    uses,
)
from souffle.schedule.cpu.prefetch import prefetch
from souffle.tvm_compat import PrimExpr, dtype_of, sequence

__all__ = ["Panel"]

_TRANSPOSE_BLOCK = 32
"""Elements along k that are transposed together, so that both sides stay in the first-level cache."""
_FIRST_LEVEL, _LINE = 32 << 10, 64
"""Bytes of a first-level cache, and of one of its lines."""
_MAX_STACK_BYTES = 1008
"""TVM puts smaller buffers on the stack, where LLVM turns them into registers; larger ones it allocates by a call."""

_Step = dict[tirx.Var, PrimExpr]
"""Values of the axes that are summed over."""


@dataclass(frozen=True, eq=False)
class Panel:
    """As many columns of the vector factor as a tile has, packed for all steps of the sum.

    Attributes
    ----------
    form : CpuContraction
    tiling : CpuTiling
    valid : int
        Columns that there are; zeros fill the rest of the panel.
    batch : dict
        Values of the batch axes.
    first : expression
        Its first column.
    packed : Buffer
        Shape: `place`, then the steps of the sum, then the columns.
    place : tuple of expression
        Where the panel is among those of the block, or among those that were packed ahead of time.
    turned : bool
        Whether the panel before is the next one.
    behind : callable
        What is computed of a row of results when they are stored, by the values of its axes.
    """

    form: CpuContraction
    tiling: CpuTiling
    valid: int
    batch: dict[tirx.Var, PrimExpr]
    first: PrimExpr
    packed: tirx.Buffer
    place: tuple[PrimExpr, ...]
    turned: bool
    behind: Callable[[Mapping[tirx.Var, PrimExpr]], tirx.Stmt]

    @property
    def index(self) -> str:
        """The type of loop variables."""
        return self.form.nest.spatial[-1].dtype

    def pack(self) -> tirx.Stmt:
        """Fill the panel: in vectors along the columns, or along memory, which is then transposed."""
        return self._packed_by_vectors() if reads_in_vectors(self.form) else self._packed_transposed()

    def _packed_by_vectors(self) -> tirx.Stmt:
        def row(k: _Step) -> tirx.Stmt:
            asked = self._next_columns(k)
            return sequence(*asked, *self._valid_columns(lambda c: self._packed_element(k, c)), *self._zeros(k))

        return _over(self.form.nest.reduce, row)

    def _next_columns(self, k: _Step) -> list[tirx.Stmt]:
        """Asks for what the next panel has at one step of the sum."""
        value, width = self.form.vector.value, self.tiling.width
        if not isinstance(value, TensorLoad) or _is_small(value.source):
            return []
        asked = []
        for column in _lines(value.source, width):
            values = {**self.batch, **k, **decode(self.first + width + column, self.form.columns)}
            asked.append(prefetch(replace_variables(value, values)))
        return asked

    def _packed_transposed(self) -> tirx.Stmt:
        *others, last = self.form.nest.reduce
        block = _TRANSPOSE_BLOCK if last.extent % _TRANSPOSE_BLOCK == 0 else last.extent

        def run(k: _Step, outer: PrimExpr) -> tirx.Stmt:
            def column(c: PrimExpr) -> tirx.Stmt:
                return loop(
                    block,
                    lambda i: self._packed_element({**k, last.var: outer * block + i}, c),
                    name=last.var.name,
                    dtype=last.dtype,
                )

            return loop(self.valid, column, name="c", dtype=self.index)

        filled = _over(
            tuple(others),
            lambda k: loop(last.extent // block, lambda o: run(k, o), name=last.var.name, dtype=last.dtype),
        )
        if self.valid == self.tiling.width:
            return filled
        return sequence(filled, _over(self.form.nest.reduce, lambda k: sequence(*self._zeros(k))))

    def _packed_element(self, k: _Step, column: PrimExpr) -> tirx.Stmt:
        values = {**self.batch, **k, **decode(self.first + column, self.form.columns)}
        stored = replace_variables(self.form.vector.value, values)
        return tirx.BufferStore(self.packed, stored, [*self._position(k), column])

    def _zeros(self, k: _Step) -> list[tirx.Stmt]:
        """What fills the panel up at one step of the sum."""
        if self.valid == self.tiling.width:
            return []
        zero = tirx.const(0, str(self.packed.dtype))
        return [
            loop(
                self.tiling.width - self.valid,
                lambda v: tirx.BufferStore(self.packed, zero, [*self._position(k), v + self.valid]),
                name="z",
                dtype=self.index,
            )
        ]

    def _position(self, k: _Step) -> list[PrimExpr]:
        return [*self.place, *(k[axis.var] for axis in self.form.nest.reduce)]

    def _column(self, k: _Step, column: PrimExpr) -> PrimExpr:
        """The vector factor at one step."""
        element = tirx.BufferLoad(self.packed, [*self._position(k), column])
        # A constant keeps its own type.
        return element if self.form.panels is None else map_buffer_loads(self.form.vector.value, lambda _: element)

    def _valid_columns(self, make: Callable[[PrimExpr], tirx.Stmt]) -> list[tirx.Stmt]:
        """A statement for each column that there is, in vectors."""
        statements = []
        for piece in pieces(self.valid, self.tiling.lanes):
            kind = ForKind.VECTORIZED if piece.width > 1 else ForKind.SERIAL
            statements.append(
                loop(
                    piece.count,
                    lambda o, piece=piece, kind=kind: loop(
                        piece.width,
                        lambda v: make(o * piece.width + v + piece.start),
                        kind,
                        name="v",
                        dtype=self.index,
                    ),
                    ForKind.UNROLLED if piece.width > 1 else ForKind.SERIAL,
                    name="o",
                    dtype=self.index,
                )
            )
        return statements

    def _all_columns(self, make: Callable[[PrimExpr], tirx.Stmt]) -> tirx.Stmt:
        """A statement for each column of the panel, in whole vectors."""
        lanes = self.tiling.lanes
        return loop(
            self.tiling.vectors,
            lambda u: loop(lanes, lambda v: make(u * lanes + v), ForKind.VECTORIZED, name="v", dtype=self.index),
            ForKind.UNROLLED,
            name="u",
            dtype=self.index,
        )

    def _dots(self, tile: tirx.Buffer, row: PrimExpr, factor: PrimExpr, k: _Step) -> tirx.Stmt:
        """A row of totals with the products of a word and those of the panel at one step, in whole vectors."""
        lanes = self.tiling.lanes

        def vector(u: PrimExpr) -> tirx.Stmt:
            across = tirx.Ramp(u * lanes, tirx.const(1, self.index), lanes)
            total, words = tirx.BufferLoad(tile, [row, across]), [*self._position(k), across]
            added = self.form.dot.apply(total, tirx.Broadcast(factor, lanes), tirx.BufferLoad(self.packed, words))
            return tirx.BufferStore(tile, added, [row, across])

        return loop(self.tiling.vectors, vector, ForKind.UNROLLED, name="u", dtype=self.index)

    def _broadcast(self, k: _Step, number: PrimExpr, row: PrimExpr, place: PrimExpr) -> PrimExpr:
        """The scalar factor of a row at one step; `place` is the row's in the tile of this number."""
        value, tiles = self.form.scalar.value, self.form.row_tiles
        if tiles is None:
            return replace_variables(value, {**self.batch, **k, **decode(row, self.form.rows)})
        batch = [self.batch[axis.var] for axis in uses(value, self.form.batch)]
        steps = [k[axis.var] for axis in self.form.nest.reduce]
        element = tirx.BufferLoad(tiles, [*batch, number, *steps, place])
        # A constant keeps its own type, but for what is packed as words.
        return element if self.form.dot is not None else map_buffer_loads(value, lambda _: element)

    def _ahead(self, k: _Step, number: PrimExpr, size: int) -> tirx.Stmt | None:
        """Asks, in each step of a tile, for a line of what was packed ahead of time and comes next.

        That is the next tile of rows; or the next panel, of which each tile of rows, of `size`, asks for another
        vector, or for more where tiles are fewer.
        """
        form = self.form
        tiles = form.packed_factor
        if tiles is None or _is_small(tiles):
            return None
        reduce = form.nest.reduce
        last = tirx.const(int(tiles.shape[-2 - len(reduce)]) - 1, self.index)
        steps = [k[axis.var] for axis in reduce]
        if form.row_tiles is not None:
            batch = [self.batch[axis.var] for axis in uses(form.scalar.value, form.batch)]
            following = tirx.min(number + 1, last)
            return prefetch(tirx.BufferLoad(tiles, [*batch, following, *steps, tirx.const(0, self.index)]))
        *batch, panel = self.place
        following = tirx.max(panel - 1, 0) if self.turned else tirx.min(panel + 1, last)
        vectors = self.tiling.vectors
        # A step of few rows is bound by its loads, of which each request is one more.
        each = min(-(-vectors // -(-form.height // size)), max(1, size // 2))
        most = tirx.const(vectors - 1, self.index)
        within = [tirx.min(number * each + u, most) * self.tiling.lanes for u in range(each)]
        return sequence(*(prefetch(tirx.BufferLoad(tiles, [*batch, following, *steps, first])) for first in within))

    def tile(self, number: PrimExpr, size: int, height: int) -> tirx.Stmt:
        """The products with `height` rows of a tile of `size`, whose totals are in registers."""
        form, start = self.form, number * size
        held = self._held(height)

        def rows(make: Callable[[_Held, PrimExpr], tirx.Stmt]) -> tirx.Stmt:
            """A statement of each row: where it is held, and its place there."""
            return sequence(
                *(
                    loop(some.count, lambda r, some=some: make(some, r), ForKind.UNROLLED, name="r", dtype=self.index)
                    for some in held
                )
            )

        def clear(tile: tirx.Buffer, r: PrimExpr) -> tirx.Stmt:
            return self._all_columns(lambda c: tirx.BufferStore(tile, form.identity, [r, c]))

        def step(k: _Step) -> tirx.Stmt:
            def update(some: _Held, r: PrimExpr) -> tirx.Stmt:
                place = r + some.first
                factor = self._broadcast(k, number, start + place, place)

                if form.dot is not None:
                    return self._dots(some.totals, r, factor, k)

                def element(c: PrimExpr) -> tirx.Stmt:
                    term = factor * self._column(k, c)
                    return tirx.BufferStore(some.totals, tirx.BufferLoad(some.totals, [r, c]) + term, [r, c])

                return self._all_columns(element)

            return sequence(self._ahead(k, number, size), rows(update))

        def add(some: _Held, r: PrimExpr) -> tirx.Stmt:
            def element(c: PrimExpr) -> tirx.Stmt:
                total = tirx.BufferLoad(some.results, [r, c]) + tirx.BufferLoad(some.totals, [r, c])
                return tirx.BufferStore(some.results, total, [r, c])

            return self._all_columns(element)

        def part(outer: _Step) -> tirx.Stmt:
            inner = _over(form.nest.reduce[1:], lambda k: step({**outer, **k}))
            return sequence(rows(lambda some, r: clear(some.totals, r)), inner, rows(add))

        def store(some: _Held, r: PrimExpr) -> tirx.Stmt:
            def element(c: PrimExpr) -> tirx.Stmt:
                return form.nest.bind(at(some, r, c)).finish(tirx.BufferLoad(some.results, [r, c]))

            return sequence(*self._valid_columns(element))

        def at(some: _Held, r: PrimExpr, c: PrimExpr | int) -> dict[tirx.Var, PrimExpr]:
            row = start + r + some.first
            values = {**self.batch, **decode(row, form.rows), **decode(self.first + c, form.columns)}
            return {v: as_index(e, dtype_of(v)) for v, e in values.items()}

        target = form.nest.body if form.nest.epilogue is None else form.nest.epilogue

        def ask(some: _Held, r: PrimExpr) -> tirx.Stmt:
            def line(c: int) -> tirx.Stmt:
                indices = [replace_variables(index, at(some, r, c)) for index in target.indices]
                return prefetch(tirx.BufferLoad(target.buffer, indices), write=True)

            return sequence(*map(line, _lines(target.buffer, self.valid)))

        buffers = [some.results for some in held] + [some.totals for some in held if form.in_parts]
        statements = [
            *map(tirx.AllocBuffer, buffers),
            # Each row of results is elsewhere: what is asked for now is there when the sums are.
            *([rows(ask)] if stores_in_vectors(form) and not _is_small(target.buffer) else []),
            rows(lambda some, r: clear(some.results, r)),
            _over(form.nest.reduce[:1], part) if form.in_parts else _over(form.nest.reduce, step),
            rows(store),
        ]
        if form.followers is not None:
            def behind(r: PrimExpr) -> tirx.Stmt:
                values = {**self.batch, **decode(start + r, form.rows)}
                return self.behind({var: as_index(value, dtype_of(var)) for var, value in values.items()})

            statements.append(loop(height, behind, name="r", dtype=self.index))
        return sequence(*statements)

    def _held(self, height: int) -> list[_Held]:
        """Buffers of the rows of a tile, each small enough for the stack."""
        dtype = str(self.form.nest.body.buffer.dtype)
        most = max(1, _MAX_STACK_BYTES // (self.tiling.width * DataType(dtype).itemsize))
        held = []
        for first in range(0, height, most):
            shape = (min(most, height - first), self.tiling.width)
            totals = tirx.decl_buffer(shape, dtype, "tile")
            results = tirx.decl_buffer(shape, dtype, "sums") if self.form.in_parts else totals
            held.append(_Held(first, totals, results))
        return held


@dataclass(frozen=True, eq=False)
class _Held:
    """Some rows of a tile.

    Attributes
    ----------
    first : int
        Their place in the tile.
    totals : Buffer
        What is added to in each step.
    results : Buffer
        The totals of all parts of the sum; the same buffer where it has none.
    """

    first: int
    totals: tirx.Buffer
    results: tirx.Buffer

    @property
    def count(self) -> int:
        """How many rows."""
        return int(self.totals.shape[0])


def _is_small(buffer: tirx.Buffer) -> bool:
    """Whether all of a buffer is in the first-level cache after its first use, so that nothing is asked for ahead."""
    return product(shape_of(buffer)) * DataType(str(buffer.dtype)).itemsize <= _FIRST_LEVEL


def _lines(buffer: tirx.Buffer, elements: int) -> range:
    """One of the elements of each line of so many that follow each other."""
    return range(0, elements, max(1, _LINE // DataType(str(buffer.dtype)).itemsize))


def _over(axes: tuple[Axis, ...], make: Callable[[dict[tirx.Var, PrimExpr]], tirx.Stmt]) -> tirx.Stmt:
    if not axes:
        return make({})
    axis = axes[0]
    return loop(
        axis.extent,
        lambda v: _over(axes[1:], lambda rest: make({axis.var: v, **rest})),
        name=axis.var.name,
        dtype=axis.dtype,
    )
