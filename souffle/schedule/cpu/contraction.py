"""Matrix products and convolutions: one parallel loop over tiles, packed columns, accumulators in registers.

A task packs the columns of one panel once, as ``panel[k..., width]`` with zeros where the last panel is wider than the
matrix, then runs the micro-kernel over its rows: ``rows x width`` accumulators, for each k one read of the panel and a
broadcast of each row's element. The accumulators stay in registers for the whole sum, so that memory is read only: the
rows once per panel, the panel from the second-level cache. So the sum needs no blocking of its own, however long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import DataType, tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import ForKind

from souffle.schedule.cpu.contraction_form import CpuContraction
from souffle.schedule.cpu.contraction_tiling import (
    CpuTiling,
    panels_together,
    product_cycles,
    product_tiling,
    reads_in_vectors,
)
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
    shape_of,
    uses,
)
from souffle.schedule.cpu.prefetch import prefetch
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
_FIRST_LEVEL = 32 << 10
"""Bytes of constants that are in the first-level cache after their first use, so that none is asked for ahead."""
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
    tiling = product_tiling(form, machine, packed=form.packed)
    batches, tiles = form.batches, form.height // tiling.rows
    together = panels_together(form, tiling)
    blocks = -(-form.width // (tiling.width * together))
    chunks = _chunks(batches * blocks, tiles, machine.cores, _MIN_CHUNK_TILES if form.panels is None else 1)
    turned = backwards and form.panels is not None
    index = form.nest.spatial[-1].dtype

    def task(number: PrimExpr) -> tirx.Stmt:
        chunk = tirx.floormod(number, tirx.const(chunks, index))
        rest = tirx.floordiv(number, tirx.const(chunks, index))
        block = tirx.floormod(rest, tirx.const(blocks, index))
        batch = decode(tirx.floordiv(rest, tirx.const(blocks, index)), form.batch)
        return _Task(form, tiling, batch, block, together, _Run(chunk, tiles // chunks, chunks), turned).statement()

    kind = kind_of_loop(product_cycles(form, machine, packed=form.packed))
    count = batches * blocks * chunks
    if turned:
        return _turned(count, task, kind, machine.cores, index)
    return loop(count, task, kind, name="task", dtype=index)


def _turned(
    count: int, task: Callable[[PrimExpr], tirx.Stmt], kind: ForKind, cores: int, index: str
) -> tirx.Stmt:
    """A loop whose threads each take the tasks that would be theirs, from the last to the first."""
    threads = cores if kind == ForKind.PARALLEL else 1
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


@dataclass(frozen=True, eq=False)
class _Run:
    """The tiles of rows of a task: one of `chunks` runs, each of `tiles`."""

    chunk: PrimExpr
    tiles: int
    chunks: int


@dataclass(frozen=True, eq=False)
class _Task:
    """One block of panels, times one run of tiles of rows.

    Attributes
    ----------
    form : CpuContraction
    tiling : CpuTiling
    batch : dict
        Values of the batch axes.
    block : expression
        The block's number.
    together : int
        Panels of a block: a tile of rows is multiplied with one after another.
    run : _Run
    turned : bool
        Whether the panel before is the next one.
    """

    form: CpuContraction
    tiling: CpuTiling
    batch: dict[tirx.Var, PrimExpr]
    block: PrimExpr
    together: int
    run: _Run
    turned: bool

    def statement(self) -> tirx.Stmt:
        """What the task does."""
        packed = self.form.panels
        if packed is None:
            extents = (self.together, *(axis.extent for axis in self.form.nest.reduce), self.tiling.width)
            packed = tirx.decl_buffer(extents, dtype_of(self.form.vector.value), "panels")
        if self.together == 1:
            return self._panel(packed, tirx.const(0, self._index), lambda panel: self._times_rows(packed, [panel]))
        return self._times_rows(packed)

    @property
    def _index(self) -> str:
        return self.form.nest.spatial[-1].dtype

    def _times_rows(self, packed: tirx.Buffer, alone: Sequence[_Panel] = ()) -> tirx.Stmt:
        """The products of the block's panels, or of one `alone`, with the run of tiles."""
        size, run = self.tiling.rows, self.run

        def each(make: Callable[[_Panel], tirx.Stmt]) -> tirx.Stmt:
            return make(alone[0]) if alone else self._each(packed, make)

        def tile(number: PrimExpr, height: int) -> tirx.Stmt:
            return each(lambda panel: panel.tile(number, size, height))

        first = run.chunk * run.tiles
        ahead = self.form.panels is not None
        statements = [
            *([] if ahead else [tirx.AllocBuffer(packed), each(lambda panel: panel.pack())]),
            loop(run.tiles, lambda t: tile(first + t, size), name="tile", dtype=self._index),
        ]
        tiles, remainder = divmod(self.form.height, size)
        if remainder:
            last = tile(tirx.const(tiles, self._index), remainder)
            statements.append(last if run.chunks == 1 else tirx.IfThenElse(run.chunk == run.chunks - 1, last, None))
        return sequence(*statements)

    def _each(self, packed: tirx.Buffer, make: Callable[[_Panel], tirx.Stmt]) -> tirx.Stmt:
        """A statement for each panel of the block."""
        panels = -(-self.form.width // self.tiling.width)
        count: PrimExpr | int = self.together
        if panels % self.together:
            count = tirx.min(tirx.const(self.together, self._index), panels - self.block * self.together)
        return loop(count, lambda place: self._panel(packed, place, make), name="panel", dtype=self._index)

    def _panel(self, packed: tirx.Buffer, place: PrimExpr, make: Callable[[_Panel], tirx.Stmt]) -> tirx.Stmt:
        """A statement for the panel at a place of the block; the last one of a matrix may have fewer columns."""
        form, tiling = self.form, self.tiling
        panels = -(-form.width // tiling.width)
        valid = form.width - (panels - 1) * tiling.width
        number = self.block * self.together + place
        where = [place]
        if form.panels is not None:
            where = [*(self.batch[axis.var] for axis in uses(form.vector.value, form.batch)), number]

        def of(shape: CpuTiling, used: int) -> tirx.Stmt:
            return make(_Panel(form, shape, used, self.batch, number * tiling.width, packed, tuple(where), self.turned))

        last = of(replace(tiling, vectors=-(-valid // tiling.lanes)), valid)
        if panels == 1:
            return last
        full = of(tiling, tiling.width)
        return full if valid == tiling.width else tirx.IfThenElse(number < panels - 1, full, last)


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
        Where the panel is among those of the block, or among those that were packed ahead of time.
    turned : bool
        Whether the panel before is the next one.
    """

    form: CpuContraction
    tiling: CpuTiling
    valid: int
    batch: dict[tirx.Var, PrimExpr]
    first: PrimExpr
    packed: tirx.Buffer
    place: tuple[PrimExpr, ...]
    turned: bool

    @property
    def index(self) -> str:
        """The type of loop variables."""
        return self.form.nest.spatial[-1].dtype

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
        # A constant keeps its own type.
        return map_buffer_loads(value, lambda _: element)

    def _ahead(self, k: _Step, number: PrimExpr) -> tirx.Stmt | None:
        """Asks, in each step of a tile, for a line of what was packed ahead of time and comes next.

        That is the next tile of rows; or the next panel, of which each tile of rows asks for another vector.
        """
        form = self.form
        tiles = form.panels if form.row_tiles is None else form.row_tiles
        if tiles is None or product(shape_of(tiles)) * DataType(str(tiles.dtype)).itemsize <= _FIRST_LEVEL:
            return None
        reduce = form.nest.reduce
        last = tirx.const(int(tiles.shape[-2 - len(reduce)]) - 1, self.index)
        if form.row_tiles is not None:
            batch = [self.batch[axis.var] for axis in uses(form.scalar.value, form.batch)]
            following, within = tirx.min(number + 1, last), tirx.const(0, self.index)
        else:
            *batch, panel = self.place
            following = tirx.max(panel - 1, 0) if self.turned else tirx.min(panel + 1, last)
            within = tirx.min(number, tirx.const(self.tiling.vectors - 1, self.index)) * self.tiling.lanes
        return prefetch(tirx.BufferLoad(tiles, [*batch, following, *(k[axis.var] for axis in reduce), within]))

    def tile(self, number: PrimExpr, size: int, height: int) -> tirx.Stmt:
        """The products with `height` rows of a tile of `size`, whose totals are in registers."""
        form, start = self.form, number * size
        dtype = str(form.nest.body.buffer.dtype)
        depth = max(1, _MAX_STACK_BYTES // (self.tiling.width * DataType(dtype).itemsize))
        totals = [
            (row, tirx.decl_buffer((min(depth, height - row), self.tiling.width), dtype, "tile"))
            for row in range(0, height, depth)
        ]

        def rows(make: Callable[[tirx.Buffer, PrimExpr, PrimExpr], tirx.Stmt]) -> tirx.Stmt:
            """A statement of each row: its buffer, its place there, and in the tile."""
            return sequence(
                *(
                    loop(
                        int(tile.shape[0]),
                        lambda r, tile=tile, row=row: make(tile, r, r + row),
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
            def update(tile: tirx.Buffer, r: PrimExpr, place: PrimExpr) -> tirx.Stmt:
                factor = self._broadcast(k, number, start + place, place)

                if form.dot is not None:
                    return self._dots(tile, r, factor, k)

                def element(c: PrimExpr) -> tirx.Stmt:
                    term = factor * self._column(k, c)
                    return tirx.BufferStore(tile, tirx.BufferLoad(tile, [r, c]) + term, [r, c])

                return self._all_columns(element)

            return sequence(self._ahead(k, number), rows(update))

        def store(tile: tirx.Buffer, r: PrimExpr, place: PrimExpr) -> tirx.Stmt:
            def element(c: PrimExpr) -> tirx.Stmt:
                values = {**self.batch, **decode(start + place, form.rows), **decode(self.first + c, form.columns)}
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
