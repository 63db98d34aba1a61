"""The kernel of wmma: tiles through registers, products of whole fragments, totals written by strips of rows."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.contraction_statements import guarded, kernel_func, local_buffer, loop, shared_buffer
from souffle.schedule.gpu.emit.staging import TileFetch, choose_fetch
from souffle.schedule.gpu.emit.writeback import result_lanes, write_results
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.tiling.wmma_tiling import FRAGMENT, PADDING, SIDE, WmmaTiling
from souffle.tvm_compat import PrimExpr, sequence

__all__ = ["emit_wmma"]

_MOST_LANES = 4
"""fp32 that one store takes."""


def emit_wmma(problem: Contraction, tiling: WmmaTiling, threads: int) -> tuple[tirx.PrimFunc, int]:
    """The stage with its body replaced by the kernel, and the kernel's tiles.

    Parameters
    ----------
    problem : Contraction
    tiling : WmmaTiling
    threads : int
        Of a block.
    """
    kernel = _Kernel(problem, tiling, threads)
    return kernel.func(), kernel.tiles


class _Side:
    """One operand: how its tiles come, where they are, and a warp's fragments of them."""

    def __init__(self, name: str, fetch: TileFetch, matrix: str, fragments: int) -> None:
        self.fetch, self.fragments = fetch, fragments
        self.shared = shared_buffer(f"{name}_tile", fetch.shared_elements, "float16")
        self.held = local_buffer(f"{name}_next", fetch.register_elements, "float16")
        self.part = tirx.decl_buffer((fragments * FRAGMENT,), "float16", f"{name}_part", scope=f"wmma.{matrix}")

    def load(self, warp: PrimExpr, k: PrimExpr, *, row_major: bool) -> tirx.Stmt:
        """The fragments of the warp with this number along the operand's axis, at a piece of the inner axis."""
        fetch = self.fetch

        def one(i: PrimExpr) -> tirx.Stmt:
            at = fetch.place(tirx.IntImm("int32", 0), (warp * self.fragments + i) * SIDE, k * SIDE)
            pointer = self.shared.access_ptr("r", ptr_type="float16", offset=at, extent=_extent(fetch.pitch))
            layout = "row_major" if row_major else "col_major"
            return tirx.Evaluate(
                tirx.tvm_load_matrix_sync(self.part.data, SIDE, SIDE, SIDE, i, pointer, fetch.pitch, layout)
            )

        return loop("i", self.fragments, one, "unrolled")


class _Kernel:
    def __init__(self, problem: Contraction, tiling: WmmaTiling, threads: int) -> None:
        self.problem, self.tiling, self.threads = problem, tiling, threads
        self.counts = tiling.counts(problem.extents)
        self.steps = ceil(problem.extents[3] / tiling.step)
        _, rows, columns = tiling.tile
        down, across = tiling.fragments

        def side(name: str, extent: int, matrix: str, fragments: int) -> _Side:
            fetch = choose_fetch(problem, name, (1, extent, tiling.step), threads, None, lambda _: PADDING)
            return _Side(name, fetch, matrix, fragments)

        # matrix_a is rows x inner, matrix_b is inner x columns.
        self.left = side("left", rows, "matrix_a", down)
        self.right = side("right", columns, "matrix_b", across)
        self.strip = shared_buffer("strip", tiling.strip[0] * tiling.strip_pitch, "float32")
        self.totals = tirx.decl_buffer((down * across * FRAGMENT,), "float32", "totals", scope="wmma.accumulator")
        self.lanes = result_lanes(problem, _MOST_LANES)

    @property
    def tiles(self) -> int:
        return prod(self.counts)

    def func(self) -> tirx.PrimFunc:
        left, right = self.left, self.right
        shared, held, parts = ((getattr(left, n), getattr(right, n)) for n in ("shared", "held", "part"))
        buffers = (*shared, self.strip, *held, *parts, self.totals)
        return kernel_func(self.problem.func, self.tiles, self.threads, buffers, self.body)

    def body(self, block: PrimExpr, thread: PrimExpr) -> tirx.Stmt:
        counts = self.counts
        column_tile = tirx.floormod(block, counts[2])
        row_tile = tirx.floormod(tirx.floordiv(block, counts[2]), counts[1])
        self.tile = (tirx.floordiv(block, counts[1] * counts[2]), row_tile, column_tile)
        self.thread = thread
        warp = tirx.floordiv(thread, 32)
        self.warp_column = tirx.floormod(warp, self.tiling.warps[1])
        self.warp_row = tirx.floordiv(warp, self.tiling.warps[1])
        down, across = self.tiling.fragments
        return sequence(
            loop("i", down * across, self._clear, "unrolled"),
            self._fetches(tirx.IntImm("int32", 0)),
            loop("turn", self.steps, self._advance),
            loop("i", down, self._write_strip, "unrolled"),
        )

    # Bringing tiles

    def _fetches(self, turn: PrimExpr) -> tirx.Stmt:
        batch, row, column = self.tile
        return sequence(
            self.left.fetch.fetch(self.left.held, self.thread, (batch, row, turn)),
            self.right.fetch.fetch(self.right.held, self.thread, (batch, column, turn)),
        )

    def _advance(self, turn: PrimExpr) -> tirx.Stmt:
        left, right = self.left, self.right
        following = None
        if self.steps > 1:
            following = guarded([tirx.LT(turn + 1, self.steps)], self._fetches(turn + 1))
        return sequence(
            left.fetch.put(left.held, left.shared, self.thread),
            right.fetch.put(right.held, right.shared, self.thread),
            following,
            loop("k", self.tiling.step // SIDE, self._products, "unrolled"),
        )

    # Arithmetic

    def _clear(self, i: PrimExpr) -> tirx.Stmt:
        value = tirx.const(0.0, "float32")
        return tirx.Evaluate(tirx.tvm_fill_fragment(self.totals.data, SIDE, SIDE, SIDE, i, value))

    def _products(self, k: PrimExpr) -> tirx.Stmt:
        down, across = self.tiling.fragments
        left, right = self.left, self.right

        def one(i: PrimExpr, j: PrimExpr) -> tirx.Stmt:
            at = i * across + j
            operands = (left.part.data, i, right.part.data, j)
            return tirx.Evaluate(tirx.tvm_mma_sync(self.totals.data, at, *operands, self.totals.data, at))

        return sequence(
            left.load(self.warp_row, k, row_major=left.fetch.inner_last),
            right.load(self.warp_column, k, row_major=not right.fetch.inner_last),
            loop("i", down, lambda i: loop("j", across, lambda j: one(i, j), "unrolled"), "unrolled"),
        )

    # Results

    def _write_strip(self, i: PrimExpr) -> tirx.Stmt:
        """The i-th fragment row of every warp: to shared memory, and from there to the outputs."""
        across = self.tiling.fragments[1]
        units = self.tiling.strip[0] * (self.tiling.tile[2] // self.lanes)

        def write(turn: PrimExpr) -> tirx.Stmt:
            unit = turn * self.threads + self.thread
            return guarded([tirx.LT(unit, units)] if units % self.threads else [], self._write(i, unit))

        return sequence(
            loop("j", across, lambda j: self._store(i, j), "unrolled"),
            loop("turn", ceil(units / self.threads), write),
        )

    def _store(self, i: PrimExpr, j: PrimExpr) -> tirx.Stmt:
        across, pitch = self.tiling.fragments[1], self.tiling.strip_pitch
        at = self.warp_row * SIDE * pitch + (self.warp_column * across + j) * SIDE
        pointer = self.strip.access_ptr("w", ptr_type="float32", offset=at, extent=_extent(pitch))
        own: tuple[Any, ...] = (self.totals.data, SIDE, SIDE, SIDE, i * across + j)
        return tirx.Evaluate(tirx.tvm_store_matrix_sync(*own, pointer, pitch, "row_major"))

    def _write(self, i: PrimExpr, unit: PrimExpr) -> tirx.Stmt:
        """A vector of results, the n-th of the strip."""
        lanes, pitch, (_, rows, columns) = self.lanes, self.tiling.strip_pitch, self.tiling.tile
        vectors = columns // lanes
        row, column = tirx.floordiv(unit, vectors), tirx.floormod(unit, vectors)
        # A strip holds the i-th 16 rows of each warp row.
        own = (tirx.floordiv(row, SIDE) * self.tiling.fragments[0] + i) * SIDE + tirx.floormod(row, SIDE)
        batch_tile, row_tile, column_tile = self.tile
        return write_results(
            self.problem,
            batch_tile,
            row_tile * rows + own,
            column_tile * vectors + column,
            lanes,
            lambda lane: self.strip[row * pitch + column * lanes + lane],
            self.tiling.tile,
        )


def _extent(pitch: int) -> int:
    """Elements from the first of a fragment to behind its last."""
    return (SIDE - 1) * pitch + SIDE
