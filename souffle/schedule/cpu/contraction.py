"""Matrix products and convolutions: one parallel loop over tiles, packed columns, accumulators in registers.

A task packs the columns of one panel once, as ``panel[k..., width]`` with zeros where the last panel is wider than the
matrix, then runs the micro-kernel over its rows: ``rows x width`` accumulators, for each k one read of the panel and a
broadcast of each row's element. The accumulators stay in registers for the whole sum, so that memory is read only: the
rows once per panel, the panel from the second-level cache. So the sum needs no blocking of its own, however long. Rows
that have no room in that cache are read once for as many panels as have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import ForKind

from souffle.schedule.cpu.contraction_form import CpuContraction
from souffle.schedule.cpu.contraction_panel import Panel
from souffle.schedule.cpu.contraction_tiling import (
    CpuTiling,
    panels_together,
    product_cycles,
    product_tiling,
)
from souffle.schedule.cpu.division import runs_of_tiles
from souffle.schedule.cpu.host import Machine
from souffle.schedule.cpu.loop_emission import emit_injective
from souffle.schedule.cpu.nest import (
    Axis,
    Nest,
    decode,
    loop,
    product,
    replace_variables,
    uses,
)
from souffle.schedule.cpu.sharing import kind_of_loop, nest_cycles
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, sequence

__all__ = ["emit_contraction", "materialized_rows"]

_MAX_GROWTH = 2
_MANY_COLUMNS = 256
"""For fewer a factor is converted where it is read, since writing it in another type would cost more."""


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
    chunks = runs_of_tiles(form, tiling, together, machine.cores)
    turned = backwards and form.panels is not None
    index = form.nest.spatial[-1].dtype

    def task(number: PrimExpr) -> tirx.Stmt:
        # The last one runs fastest: a thread has few panels that lie ready, or few rows.
        outer, inner = (chunks, blocks) if form.panels is None else (blocks, chunks)
        rest, second = (divide(number, tirx.const(inner, index)) for divide in (tirx.floordiv, tirx.floormod))
        first = tirx.floormod(rest, tirx.const(outer, index))
        chunk, block = (first, second) if form.panels is None else (second, first)
        batch = decode(tirx.floordiv(rest, tirx.const(outer, index)), form.batch)
        run = _Run(chunk, -(-tiles // chunks), chunks)
        return _Task(form, tiling, batch, block, together, run, turned, machine).statement()

    behind = 0.0 if form.followers is None else nest_cycles(form.followers.nests, machine)
    kind = kind_of_loop(product_cycles(form, machine, packed=form.packed) + behind)
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


@dataclass(frozen=True, eq=False)
class _Run:
    """The tiles of rows of a task: one of `chunks` runs, of `tiles` each, of which the last may be shorter."""

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
    machine : Machine
    """

    form: CpuContraction
    tiling: CpuTiling
    batch: dict[tirx.Var, PrimExpr]
    block: PrimExpr
    together: int
    run: _Run
    turned: bool
    machine: Machine

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

    def _times_rows(self, packed: tirx.Buffer, alone: Sequence[Panel] = ()) -> tirx.Stmt:
        """The products of the block's panels, or of one `alone`, with the run of tiles."""
        size, run = self.tiling.rows, self.run

        def each(make: Callable[[Panel], tirx.Stmt]) -> tirx.Stmt:
            return make(alone[0]) if alone else self._each(packed, make)

        def tile(number: PrimExpr, height: int) -> tirx.Stmt:
            return each(lambda panel: panel.tile(number, size, height))

        first = run.chunk * run.tiles
        tiles, remainder = divmod(self.form.height, size)
        count: PrimExpr | int = run.tiles
        if tiles % run.tiles:
            count = tirx.min(tirx.const(run.tiles, self._index), tiles - first)
        ahead = self.form.panels is not None
        statements = [
            *([] if ahead else [tirx.AllocBuffer(packed), each(lambda panel: panel.pack())]),
            loop(count, lambda t: tile(first + t, size), name="tile", dtype=self._index),
        ]
        if remainder:
            last = tile(tirx.const(tiles, self._index), remainder)
            statements.append(last if run.chunks == 1 else tirx.IfThenElse(run.chunk == run.chunks - 1, last, None))
        return sequence(*statements)

    def _each(self, packed: tirx.Buffer, make: Callable[[Panel], tirx.Stmt]) -> tirx.Stmt:
        """A statement for each panel of the block."""
        panels = -(-self.form.width // self.tiling.width)
        count: PrimExpr | int = self.together
        if panels % self.together:
            count = tirx.min(tirx.const(self.together, self._index), panels - self.block * self.together)
        return loop(count, lambda place: self._panel(packed, place, make), name="panel", dtype=self._index)

    def _panel(self, packed: tirx.Buffer, place: PrimExpr, make: Callable[[Panel], tirx.Stmt]) -> tirx.Stmt:
        """A statement for the panel at a place of the block; the last one of a matrix may have fewer columns."""
        form, tiling = self.form, self.tiling
        panels = -(-form.width // tiling.width)
        valid = form.width - (panels - 1) * tiling.width
        number = self.block * self.together + place
        where = [place]
        if form.panels is not None:
            where = [*(self.batch[axis.var] for axis in uses(form.vector.value, form.batch)), number]

        def behind(row: Mapping[tirx.Var, PrimExpr]) -> tirx.Stmt:
            nests = [] if form.followers is None else form.followers.of(row, number)
            return sequence(*(emit_injective(nest, self.machine) for nest in nests))

        def of(shape: CpuTiling, used: int) -> tirx.Stmt:
            first = number * tiling.width
            return make(Panel(form, shape, used, self.batch, first, packed, tuple(where), self.turned, behind))

        last = of(replace(tiling, vectors=-(-valid // tiling.lanes)), valid)
        if panels == 1:
            return last
        full = of(tiling, tiling.width)
        return full if valid == tiling.width else tirx.IfThenElse(number < panels - 1, full, last)
