"""Totals on their way from fragments to the outputs: through shared memory, where the sums of warps are added.

In a fragment a thread holds two neighbours of a row. A strip of rows of all warps is put into shared memory and read
back in rows, so that each thread computes and stores neighbours, index arithmetic is done once for all of them, and
what comes after the reduction is a short loop. Warps that have shared the inner axis put their totals into planes,
which are added from the first to the last: the result does not depend on which warp is done first. Moments of the rows
that a normalization begins with are taken of them on their way.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.async_copy import barrier
from souffle.schedule.gpu.emit.contraction_statements import guarded, local_buffer, loop
from souffle.schedule.gpu.emit.mma_instructions import COLUMNS, ROWS, put_totals, take_totals
from souffle.schedule.gpu.emit.mma_moments import MOST_LANES, RowMoments
from souffle.schedule.gpu.emit.row_statements import RowStatements
from souffle.schedule.gpu.emit.writeback import result_lanes, value_buffers, write_results
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling
from souffle.tvm_compat import PrimExpr, sequence

__all__ = ["Strips"]


class Strips:
    """Writes the results of a tile.

    Parameters
    ----------
    problem : Contraction
    tiling : MmaTiling
    parts : int
        Fragments of rows of each warp that make a strip.
    shared : buffer
        Shared memory that is free, of the operands' type.
    totals : buffer
        The fragments of a thread.
    threads : int
    rows : RowStatements, optional
        Where the values of the tile's rows are, if it has some.
    """

    def __init__(
        self,
        problem: Contraction,
        tiling: MmaTiling,
        parts: int,
        shared: Any,
        totals: Any,
        threads: int,
        rows: RowStatements | None = None,
    ) -> None:
        self.problem, self.tiling, self.parts = problem, tiling, parts
        self.rows = rows or RowStatements(problem, 1, tiling.tile[1], threads)
        self.shared, self.totals, self.threads = shared, totals, threads
        self.lanes = result_lanes(problem, MOST_LANES, apart=True)
        self.sums = local_buffer("sums", self.lanes, tiling.fragments.total_dtype)
        self.moments = RowMoments(problem, self.lanes, tiling.tile[2])
        self.values = value_buffers(problem, self.lanes, self.moments.kept)

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Registers that it needs."""
        return (self.sums, *(value for value in self.values if value is not None), *self.moments.buffers)

    def write(
        self,
        corner: tuple[PrimExpr, PrimExpr, PrimExpr],
        warp: tuple[PrimExpr, PrimExpr, PrimExpr],
        lane: PrimExpr,
        thread: PrimExpr,
    ) -> tirx.Stmt:
        """All results of the tile at batch, row and column tile `corner`, whose products this thread's `warp` has
        added: its place along rows, columns and the inner axis. Shared memory must be free.
        """
        tiling = self.tiling
        down, across = tiling.parts
        rows = self.parts * tiling.warps[0] * ROWS
        pitch = tiling.strip_pitch
        plane = rows * pitch
        vectors = tiling.tile[2] // self.lanes
        units = rows * vectors
        strips = down // self.parts
        # Elements of shared memory in a total.
        scale = 4 // tiling.fragments.element_bytes
        batch_tile, row_tile, column_tile = corner

        def strip(number: PrimExpr) -> tirx.Stmt:
            def put(i: PrimExpr, j: PrimExpr) -> tirx.Stmt:
                def half(h: PrimExpr) -> tirx.Stmt:
                    row = (i * tiling.warps[0] + warp[0]) * ROWS + h * 8 + tirx.floordiv(lane, 4)
                    column = (warp[1] * across + j) * COLUMNS + tirx.floormod(lane, 4) * 2
                    at = ((number * self.parts + i) * across + j) * 4 + h * 2
                    return put_totals(self.shared, (warp[2] * plane + row * pitch + column) * scale, self.totals, at)

                return loop("h", 2, half, "unrolled")

            def write(turn: PrimExpr) -> tirx.Stmt:
                unit = turn * self.threads + thread
                row, column = tirx.floordiv(unit, vectors), tirx.floormod(unit, vectors)
                take = take_totals(
                    self.sums,
                    self.shared,
                    (row * pitch + column * self.lanes) * scale,
                    self.lanes,
                    tiling.warps[2],
                    plane,
                )
                in_tile = number * rows + row
                of_row = self.rows.values(tirx.IntImm("int32", 0), in_tile)
                results = write_results(
                    self.problem,
                    batch_tile,
                    row_tile * tiling.tile[1] + in_tile,
                    column_tile * vectors + column,
                    self.lanes,
                    lambda which: self.sums[which],
                    tiling.tile,
                    self.values,
                    of_row,
                )
                moments = self.moments.write(corner, tiling.tile, in_tile, column, self.sums, self.values, of_row)
                inside = [tirx.LT(unit, units)] if units % self.threads else []
                return guarded(inside, sequence(take, results, moments))

            return sequence(
                loop("i", self.parts, lambda i: loop("j", across, lambda j: put(i, j), "unrolled"), "unrolled"),
                barrier(),
                loop("turn", -(-units // self.threads), write),
                guarded([tirx.LT(number + 1, strips)], barrier()) if strips > 1 else None,
            )

        return loop("strip", strips, strip, "unrolled")
