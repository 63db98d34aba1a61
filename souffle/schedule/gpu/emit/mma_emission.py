"""The kernel of the mma rule: a pipeline of tiles, products of fragments, totals written by way of shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, prod
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.async_copy import barrier
from souffle.schedule.gpu.emit.contraction_statements import (
    Binder,
    kernel_func,
    local_buffer,
    loop,
    shared_buffer,
)
from souffle.schedule.gpu.emit.finished_fragments import FinishedFragments
from souffle.schedule.gpu.emit.mma_epilogue import Strips
from souffle.schedule.gpu.emit.mma_instructions import COLUMNS, ROWS
from souffle.schedule.gpu.emit.mma_pieces import (
    FragmentPlace,
    FragmentSource,
    TileRing,
    add_products,
    first_place,
    load_piece,
    multiply_piece,
    rest_buffers,
    warp_place,
)
from souffle.schedule.gpu.emit.mma_pipeline import Pipeline
from souffle.schedule.gpu.emit.normalized_fetch import NormalizedFetch
from souffle.schedule.gpu.emit.row_statements import RowStatements
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling, Operands
from souffle.tvm_compat import PrimExpr, sequence

__all__ = ["MmaKernel", "emit_mma"]


def emit_mma(problem: Contraction, tiling: MmaTiling, operands: Operands, threads: int) -> tirx.PrimFunc:
    """The stage with its body replaced by the kernel.

    Parameters
    ----------
    problem : Contraction
    tiling : MmaTiling
    operands : Operands
        Of the tiling's tiles.
    threads : int
        Of a block.
    """
    kernel = MmaKernel(problem, tiling, operands, threads)
    return kernel_func(problem.func, kernel.tiles, threads, kernel.buffers, kernel.body)


class MmaKernel:
    """A sum of products' kernel on tensor cores: what one block does, with the buffers that it needs.

    Parameters
    ----------
    problem, tiling, operands, threads
        See :func:`emit_mma`.
    """

    def __init__(self, problem: Contraction, tiling: MmaTiling, operands: Operands, threads: int) -> None:
        self.problem, self.tiling, self.threads = problem, tiling, threads
        self.counts = tiling.counts(problem.extents)
        self.steps = ceil(problem.extents[3] / tiling.step)
        self.rolled = tiling.rolls_pieces(operands, threads)
        self.ahead = tiling.reads_ahead(operands, threads, self.steps)
        down, across = tiling.parts
        sides = []
        first = 0
        for name, comes in zip(("left", "right"), operands.both, strict=True):
            sides.append(TileRing(name, comes, comes.buffers(tiling.stages), first))
            first += sides[-1].elements
        self.left, self.right = sides
        self.sides = tuple(sides)
        fragments = tiling.fragments
        elements = tiling.shared_bytes(operands) // fragments.element_bytes
        self.shared = shared_buffer("tiles", elements, fragments.dtype)
        self.left_part = local_buffer("left_part", down * 4, fragments.register_dtype)
        self.right_part = local_buffer("right_part", across * 2, fragments.register_dtype)
        self.left_ahead = self.right_ahead = None
        if self.ahead:
            self.left_ahead = local_buffer("left_ahead", down * 4, fragments.register_dtype)
            self.right_ahead = local_buffer("right_ahead", across * 2, fragments.register_dtype)
        self.left_rest, self.right_rest, self.sums = rest_buffers(fragments, tiling.parts)
        self.totals = local_buffer("totals", down * across * 4, fragments.total_dtype)
        self.rows = RowStatements(problem, 1, tiling.tile[1], threads, operands.left.finished, down)
        # What is copied is not normalized.
        self.normalized = None
        if self.rows.held is not None and not self.left.asynchronous:
            self.left.source = self.normalized = NormalizedFetch(self.left.fetch, problem.row_values)
        self.finished = None
        if operands.left.finished is not None:
            self.finished = FinishedFragments(self.rows, self.left_part, down)
        parts = tiling.strip_parts(operands)
        self.strips = Strips(problem, tiling, parts, self.shared, self.totals, threads, self.rows)

    @property
    def tiles(self) -> int:
        """Blocks of the grid."""
        return prod(self.counts)

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Registers and shared memory."""
        held = tuple(side.held for side in self.sides if side.held is not None)
        further = (self.left_ahead, self.right_ahead, self.left_rest, self.right_rest, self.sums)
        held += tuple(own for own in further if own is not None)
        own = (self.left_part, self.right_part, self.totals, *self.strips.buffers, *self.rows.buffers)
        own += () if self.normalized is None else self.normalized.buffers
        own += () if self.finished is None else self.finished.buffers
        return (self.shared, *held, *own)

    def body(self, block: PrimExpr, thread: PrimExpr) -> tirx.Stmt:
        """What a thread does for one tile."""
        counts = self.counts
        binder = Binder()
        self.lane = binder.name("lane", tirx.floormod(thread, 32))
        self.warp_row, self.warp_column, self.slice = warp_place(binder, thread, self.tiling.warps)
        column_tile = binder.name("column_tile", tirx.floormod(block, counts[2]))
        row_tile = binder.name("row_tile", tirx.floormod(tirx.floordiv(block, counts[2]), counts[1]))
        batch_tile = binder.name("batch_tile", tirx.floordiv(block, counts[1] * counts[2]))
        # The thread's pointers into a tile, from which all parts are constants away.
        columns = self.warp_column * (self.tiling.parts[1] * COLUMNS)
        self.places = (
            self._first_place(binder, self.left, self.warp_row * ROWS, rows=True),
            self._first_place(binder, self.right, columns, rows=False),
        )
        zero = tirx.const(0, self.tiling.fragments.total_dtype)
        clear = loop("i", self._total_count(), lambda i: tirx.BufferStore(self.totals, zero, [i]), "unrolled")
        corners = (lambda turn: (batch_tile, row_tile, turn), lambda turn: (batch_tile, column_tile, turn))
        rings = tuple(zip(self.sides, corners, strict=True))
        rows = self._row_values((batch_tile, row_tile), thread)
        pipeline = Pipeline(self.shared, rings, self.steps, self.tiling.stages, thread, rows)
        if self.ahead:
            steps = self._steps_ahead(pipeline)
        else:
            steps = loop("turn", self.steps, lambda turn: pipeline.turn(turn, self._products(turn)), "rolled")
        results = self.strips.write(
            (batch_tile, row_tile, column_tile), (self.warp_row, self.warp_column, self.slice), self.lane, thread
        )
        return sequence(*binder.statements, clear, *pipeline.opening, steps, *pipeline.closing, results)

    def _total_count(self) -> int:
        return self.tiling.parts[0] * self.tiling.parts[1] * 4

    def _first_place(self, binder: Binder, side: TileRing, start: PrimExpr, *, rows: bool) -> FragmentPlace:
        first = self.slice * (self.tiling.step // self.tiling.warps[2])
        fragments, name = self.tiling.fragments, "left_place" if rows else "right_place"
        return first_place(binder, name, fragments, side.fetch, self.lane, start, first, rows=rows)

    def _row_values(self, corner: tuple[PrimExpr, PrimExpr], thread: PrimExpr) -> list[tirx.Stmt]:
        """What is worked out for the rows of the tile, and a barrier after it."""
        statements = self.rows.work_out(corner, thread)
        if statements is None:
            return []
        taken = None if self.normalized is None else self.normalized.take(self.rows.values, thread)
        return [statements, barrier(), *([] if taken is None else [taken])]

    def _sources(self, binder: Binder, turn: PrimExpr, bank: int = 0) -> tuple[FragmentSource, FragmentSource]:
        """From where the parts of a step are loaded, and to which registers."""
        left, right = (
            replace(place, first=binder.name(name, side.start(turn) + place.first))
            for name, side, place in zip(("left_at", "right_at"), self.sides, self.places, strict=True)
        )
        left_part, right_part = (self.left_ahead, self.right_ahead) if bank else (self.left_part, self.right_part)
        return (
            FragmentSource(left, left_part, self.left_rest),
            FragmentSource(right, right_part, self.right_rest),
        )

    def _products(self, turn: PrimExpr) -> tirx.Stmt:
        binder = Binder()
        rows, finish = self._finishing(turn)
        left, right = self._sources(binder, turn)
        products = add_products(
            self.tiling,
            self.tiling.step,
            self.shared,
            self.totals,
            replace(left, finish=finish),
            right,
            sums=self.sums,
            rolled=self.rolled,
        )
        return sequence(*binder.statements, rows, products)

    def _steps_ahead(self, pipeline: Pipeline) -> tirx.Stmt:
        """All steps, where the parts of each piece are loaded before the products of the piece before.

        Two sets of registers take turns, so that steps of an odd number of pieces come in pairs.
        """
        count, together = self.tiling.pieces, self.tiling.steps_together

        def one(turn: PrimExpr, first: int) -> tirx.Stmt:
            places = [(turn, piece) for piece in range(1, count)] + [(turn + 1, 0)]
            loads = [self._loads(*place, (first + 1 + n) % 2) for n, place in enumerate(places)]
            products = [self._multiplied(turn, piece, (first + piece) % 2) for piece in range(count)]
            return pipeline.turn_ahead(turn, products, loads)

        def several(number: PrimExpr) -> tirx.Stmt:
            return sequence(*(one(number * together + n, n * count) for n in range(together)))

        zero = tirx.IntImm("int32", 0)
        begin = [*pipeline.arrived(), self._loads(zero, 0, 0)]
        return sequence(*begin, loop("turns", self.steps // together, several, "rolled"))

    def _loads(self, turn: PrimExpr, piece: int, bank: int) -> tirx.Stmt:
        binder = Binder()
        loads = load_piece(self.tiling, self.shared, *self._sources(binder, turn, bank), piece)
        return sequence(*binder.statements, loads)

    def _multiplied(self, turn: PrimExpr, piece: int, bank: int) -> tirx.Stmt:
        left, right = self._sources(Binder(), turn, bank)
        return multiply_piece(self.tiling, self.totals, left, right, piece, sums=self.sums)

    def _finishing(self, turn: PrimExpr) -> tuple[tirx.Stmt | None, Callable[[PrimExpr], tirx.Stmt] | None]:
        """What is taken before the products of a step, and what finishes each of its pieces."""
        finished = self.finished
        if finished is None:
            return None, None
        step, row = self.tiling.step, self.warp_row * ROWS
        first = turn * step + self.slice * (step // self.tiling.warps[2])
        chunks = self.problem.row_values.chunks
        size = self.problem.extents[3] if chunks is None else chunks.size
        if size % step == 0:
            return finished.take_rows(turn * step, row, self.lane), lambda k: finished.finish()
        piece = self.tiling.fragments.inner
        return None, lambda k: sequence(finished.take_rows(first + k * piece, row, self.lane), finished.finish())
