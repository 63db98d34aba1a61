"""Matrix products and convolutions: one parallel loop over tiles, packed columns, accumulators in registers.

A task packs the columns of one panel once, as ``panel[k..., width]`` with zeros where the last panel is wider than the
matrix, then runs the micro-kernel over its rows: ``rows x width`` accumulators, for each k one read of the panel and a
broadcast of each row's element. The accumulators stay in registers for the whole sum, so that memory is read only: the
rows once per panel, the panel from the second-level cache. So the sum needs no blocking of its own, however long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm import DataType, tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import ForKind

from souffle.schedule.cpu.contraction_form import CpuContraction
from souffle.schedule.cpu.contraction_tiling import CpuTiling, product_cycles, product_tiling, reads_in_vectors
from souffle.schedule.cpu.host import Machine
from souffle.schedule.cpu.loop_emission import pieces
from souffle.schedule.cpu.nest import (
    Axis,
    Nest,
    as_index,
    decode,
    loop,
    map_buffer_loads,
    product,
    replace_variables,
    uses,
)
from souffle.schedule.cpu.sharing import kind_of_loop
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, sequence

__all__ = ["emit_contraction", "materialized_rows"]

_TRANSPOSE_BLOCK = 32
"""Elements along k that are transposed together, so that both sides stay in the first-level cache."""
_TASKS_PER_CORE = 3
_MIN_CHUNK_TILES = 4
"""Rows are divided among tasks only into chunks of at least so many tiles: each task packs its panel again."""
_MAX_GROWTH = 2
_MANY_COLUMNS = 256
"""For fewer a factor is converted where it is read, since writing it in another type would cost more."""
_MAX_STACK_BYTES = 1008
"""TVM puts smaller buffers on the stack, where LLVM turns them into registers; larger ones it allocates by a call."""


def materialized_rows(form: CpuContraction) -> tuple[Nest, CpuContraction] | None:
    """A nest that computes the scalar factor into a buffer of its own, and the contraction that reads that buffer.

    ``None`` where the factor is a plain load already, or the buffer would be much larger than what it reads.
    """
    value = form.scalar.value
    if isinstance(value, TensorLoad):
        return None
    converted = isinstance(value, tirx.Cast) and isinstance(value.value, TensorLoad)
    if converted and product(axis.extent for axis in form.columns) < _MANY_COLUMNS:
        return None
    axes = uses(value, (*form.batch, *form.rows, *form.nest.reduce))
    size = product(axis.extent for axis in axes)
    read = [product(int(e) for e in load.source.shape) for load in buffer_loads(value)]
    if not axes or (read and size > _MAX_GROWTH * max(read)):
        return None
    buffer = tirx.decl_buffer(tuple(a.extent for a in axes), dtype_of(value), f"{form.nest.name}_rows")
    fresh = tuple(Axis(tirx.Var(a.var.name, a.dtype), a.extent) for a in axes)
    stored = replace_variables(value, {a.var: f.var for a, f in zip(axes, fresh, strict=True)})
    store = tirx.BufferStore(buffer, stored, [f.var for f in fresh])
    nest = Nest(f"{form.nest.name}_rows", fresh, (), None, store)
    scalar = type(form.scalar)(tirx.BufferLoad(buffer, [a.var for a in axes]), form.scalar.private)
    changed = replace(form, scalar=scalar)
    return nest, changed


def emit_contraction(form: CpuContraction, machine: Machine, *, backwards: bool = False) -> tirx.Stmt:
    """The loops of a contraction, a parallel one outermost.

    Parameters
    ----------
    form : CpuContraction
    machine : Machine
    backwards : bool
        Whether each thread takes its panels that were packed ahead of time from the last to the first.
    """
    tiling = product_tiling(form, machine, packed=form.panels is not None)
    batches = form.batches
    panels = -(-form.width // tiling.width)
    tiles = form.height // tiling.rows
    chunks = _chunks(batches * panels, tiles, machine.cores, _MIN_CHUNK_TILES if form.panels is None else 1)
    index = form.nest.spatial[-1].dtype
    per_chunk = tiles // chunks

    def task(number: PrimExpr) -> tirx.Stmt:
        chunk = tirx.floormod(number, tirx.const(chunks, index))
        rest = tirx.floordiv(number, tirx.const(chunks, index))
        panel = tirx.floormod(rest, tirx.const(panels, index))
        batch = decode(tirx.floordiv(rest, tirx.const(panels, index)), form.batch)
        return _task(form, tiling, batch, panel, chunk, per_chunk, chunks)

    kind = kind_of_loop(product_cycles(form, machine, packed=form.panels is not None))
    count = batches * panels * chunks
    if not backwards or form.panels is None:
        return loop(count, task, kind, name="task", dtype=index)
    threads = machine.cores if kind == ForKind.PARALLEL else 1
    # As TVM divides a parallel loop: a thread keeps its panels whatever the direction.
    share = -(-count // threads)

    def run(thread: PrimExpr) -> tirx.Stmt:
        def turned(number: PrimExpr) -> tirx.Stmt:
            at = thread * share + (share - 1 - number)
            return task(at) if count % share == 0 else tirx.IfThenElse(at < count, task(at), None)

        return loop(share, turned, name="task", dtype=index)

    return loop(threads, run, kind, name="thread", dtype=index)


def _chunks(tasks: int, tiles: int, cores: int, least: int) -> int:
    """Into how many equal runs of tiles the rows are divided, to occupy the cores evenly."""
    wanted = _TASKS_PER_CORE * cores
    if tasks >= wanted or tasks % cores == 0:
        return 1
    options = [c for c in range(1, tiles // least + 1) if tiles % c == 0]
    even = [c for c in options if tasks * c % cores == 0]
    for choices in (even, options):
        if choices:
            return next((c for c in choices if tasks * c >= cores), choices[-1])
    return 1


def _task(
    form: CpuContraction,
    tiling: CpuTiling,
    batch: dict[tirx.Var, PrimExpr],
    number: PrimExpr,
    chunk: PrimExpr,
    per_chunk: int,
    chunks: int,
) -> tirx.Stmt:
    """One panel, times one run of tiles of rows."""
    panels = -(-form.width // tiling.width)
    valid = form.width - (panels - 1) * tiling.width
    first = number * tiling.width

    def body(shape: CpuTiling, used: int) -> tirx.Stmt:
        if form.panels is None:
            panel = _Panel.to_pack(form, shape, used, batch, first)
        else:
            panel = _Panel.ready(form, shape, used, batch, number, first)
        return panel.times_rows(tiling.rows, chunk, per_chunk, chunks)

    last = body(replace(tiling, vectors=-(-valid // tiling.lanes)), valid)
    if panels == 1:
        return last
    full = body(tiling, tiling.width)
    if valid == tiling.width:
        return full
    return tirx.IfThenElse(number < panels - 1, full, last)


_Step = dict[tirx.Var, PrimExpr]
"""Values of the axes that are summed over."""


@dataclass(frozen=True, eq=False)
class _Panel:
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
        Where the panel is among those that were packed ahead of time; empty where the task packs it.
    """

    form: CpuContraction
    tiling: CpuTiling
    valid: int
    batch: dict[tirx.Var, PrimExpr]
    first: PrimExpr
    packed: tirx.Buffer
    place: tuple[PrimExpr, ...] = ()

    @classmethod
    def to_pack(
        cls, form: CpuContraction, tiling: CpuTiling, valid: int, batch: dict[tirx.Var, PrimExpr], first: PrimExpr
    ) -> _Panel:
        extents = tuple(a.extent for a in form.nest.reduce)
        packed = tirx.decl_buffer((*extents, tiling.width), dtype_of(form.vector.value), "panel")
        return cls(form, tiling, valid, batch, first, packed)

    @classmethod
    def ready(
        cls,
        form: CpuContraction,
        tiling: CpuTiling,
        valid: int,
        batch: dict[tirx.Var, PrimExpr],
        number: PrimExpr,
        first: PrimExpr,
    ) -> _Panel:
        """One of those that were packed ahead of time."""
        used = uses(form.vector.value, form.batch)
        place = (*(batch[axis.var] for axis in used), number)
        return cls(form, tiling, valid, batch, first, form.panels, place)

    @property
    def index(self) -> str:
        """The type of loop variables."""
        return self.form.nest.spatial[-1].dtype

    def times_rows(self, height: int, chunk: PrimExpr, per_chunk: int, chunks: int) -> tirx.Stmt:
        """The products of the panel with one run of tiles of rows."""
        rows = self.form.height
        start = chunk * per_chunk
        statements = [
            *([] if self.place else [tirx.AllocBuffer(self.packed), self.pack()]),
            loop(per_chunk, lambda t: self.tile((start + t) * height, height), name="tile", dtype=self.index),
        ]
        remainder = rows % height
        if remainder:
            last = self.tile(tirx.const(rows - remainder, self.index), remainder)
            statements.append(last if chunks == 1 else tirx.IfThenElse(chunk == chunks - 1, last, None))
        return sequence(*statements)

    def pack(self) -> tirx.Stmt:
        """Fill the panel: in vectors along the columns, or along memory, which is then transposed."""
        return self._packed_by_vectors() if reads_in_vectors(self.form) else self._packed_transposed()

    def _packed_by_vectors(self) -> tirx.Stmt:
        def row(k: _Step) -> tirx.Stmt:
            return sequence(*self._valid_columns(lambda c: self._packed_element(k, c)), *self._zeros(k))

        return _over(self.form.nest.reduce, row)

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
        return map_buffer_loads(self.form.vector.value, lambda _: element) if self.place else element

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

    def tile(self, start: PrimExpr, height: int) -> tirx.Stmt:
        """The products with `height` rows from `start`, whose totals are in registers."""
        form = self.form
        dtype = str(form.nest.body.buffer.dtype)
        depth = max(1, _MAX_STACK_BYTES // (self.tiling.width * DataType(dtype).itemsize))
        totals = [
            (row, tirx.decl_buffer((min(depth, height - row), self.tiling.width), dtype, "tile"))
            for row in range(0, height, depth)
        ]

        def rows(make: Callable[[tirx.Buffer, PrimExpr, PrimExpr], tirx.Stmt]) -> tirx.Stmt:
            return sequence(
                *(
                    loop(
                        int(tile.shape[0]),
                        lambda r, tile=tile, row=row: make(tile, r, start + (r + row)),
                        ForKind.UNROLLED,
                        name="r",
                        dtype=self.index,
                    )
                    for row, tile in totals
                )
            )

        def clear(tile: tirx.Buffer, r: PrimExpr, _: PrimExpr) -> tirx.Stmt:
            return self._all_columns(lambda c: tirx.BufferStore(tile, form.identity, [r, c]))

        def step(k: _Step) -> tirx.Stmt:
            def update(tile: tirx.Buffer, r: PrimExpr, row: PrimExpr) -> tirx.Stmt:
                factor = replace_variables(form.scalar.value, {**self.batch, **k, **decode(row, form.rows)})

                if form.dot is not None:
                    return self._dots(tile, r, factor, k)

                def element(c: PrimExpr) -> tirx.Stmt:
                    term = factor * self._column(k, c)
                    return tirx.BufferStore(tile, tirx.BufferLoad(tile, [r, c]) + term, [r, c])

                return self._all_columns(element)

            return rows(update)

        def store(tile: tirx.Buffer, r: PrimExpr, row: PrimExpr) -> tirx.Stmt:
            def element(c: PrimExpr) -> tirx.Stmt:
                values = {**self.batch, **decode(row, form.rows), **decode(self.first + c, form.columns)}
                done = form.nest.bind({v: as_index(e, dtype_of(v)) for v, e in values.items()})
                return done.finish(tirx.BufferLoad(tile, [r, c]))

            return sequence(*self._valid_columns(element))

        allocations = [tirx.AllocBuffer(tile) for _, tile in totals]
        return sequence(*allocations, rows(clear), _over(form.nest.reduce, step), rows(store))


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
