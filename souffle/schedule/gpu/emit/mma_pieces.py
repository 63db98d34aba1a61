"""What kernels of ``mma.sync`` are made of: rings of tiles in shared memory, places of warps, products of fragments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tvm import tirx

from souffle.schedule.gpu.emit.contraction_statements import Binder, local_buffer, loop
from souffle.schedule.gpu.emit.mma_fragments import Fragments, Placed
from souffle.schedule.gpu.emit.mma_instructions import COLUMNS, ROWS
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling
from souffle.schedule.gpu.tiling.operand_source import OperandSource
from souffle.tvm_compat import PrimExpr, sequence

__all__ = [
    "FragmentPlace",
    "FragmentSource",
    "TileRing",
    "add_products",
    "first_place",
    "load_piece",
    "multiply_piece",
    "rest_buffers",
    "warp_place",
]


class Fetch(Protocol):
    """Brings tiles into registers."""

    def fetch(self, registers: Any, thread: PrimExpr, corner: Sequence[PrimExpr]) -> tirx.Stmt:
        """Read the tile whose batch, own and inner tile indices are `corner`."""
        ...


class TileRing:
    """The tiles of one operand in shared memory, and how they come.

    Parameters
    ----------
    name : str
    comes : OperandSource
    buffers : int
        Tiles in shared memory.
    first : int
        The element of shared memory with which they begin.

    Attributes
    ----------
    held : buffer or None
        Registers of what is on its way where there are no asynchronous copies.
    source : Fetch
        What brings it into these; the fetch itself, if nothing else is put in its place.
    """

    def __init__(self, name: str, comes: OperandSource, buffers: int, first: int) -> None:
        self.fetch, self.copy, self.buffers, self.first = comes.fetch, comes.copy, buffers, first
        self.source: Fetch = comes.fetch
        self.asynchronous = comes.asynchronous
        # What is copied needs no registers.
        self.held = None
        if not self.asynchronous:
            self.held = local_buffer(f"{name}_next", self.fetch.register_elements, self.fetch.operand.dtype)

    @property
    def elements(self) -> int:
        """Elements of shared memory of all tiles."""
        return self.fetch.shared_elements * self.buffers

    def start(self, turn: PrimExpr) -> PrimExpr:
        """The element of shared memory at which the tile of a step begins."""
        own = tirx.floormod(turn, self.buffers) if self.buffers > 1 else tirx.IntImm("int32", 0)
        return self.first + own * self.fetch.shared_elements


@dataclass(frozen=True, eq=False)
class FragmentPlace:
    """Where a thread's pointers into a matrix in shared memory go.

    Attributes
    ----------
    placed : Placed
    first : expression
        The first pointer; where the units of rows change places, its row's beginning.
    column, crossing : expression, optional
        There, the first pointer's column, and what columns are combined with in the rows of all of its pointers: these
        are multiples of eight rows apart.
    """

    placed: Placed
    first: PrimExpr
    column: PrimExpr | None = None
    crossing: PrimExpr | None = None

    def moved(self, start: PrimExpr) -> FragmentPlace:
        """In a matrix that begins at the element `start`."""
        return replace(self, first=start + self.first)

    def part(self, own: PrimExpr, inner: PrimExpr) -> PrimExpr:
        """Where the pointer goes that is so many rows or columns, and so many inner elements, from the first."""
        if self.crossing is None:
            return self.first + self.placed.place(tirx.IntImm("int32", 0), own, inner)
        rows, columns = (own, inner) if self.placed.inner_last else (inner, own)
        # Whole groups of units are constants away, so that few columns have to be combined.
        within = tirx.floormod(columns, self.placed.crossed)
        column = tirx.bitwise_xor(self.column + within, self.crossing)
        return self.first + rows * self.placed.pitch + (columns - within) + column


@dataclass(frozen=True, eq=False)
class FragmentSource:
    """A matrix in shared memory from which a thread loads its part of fragments.

    Attributes
    ----------
    place : FragmentPlace
        Of the thread, in this matrix.
    registers : buffer
    rest : buffer, optional
        Registers of what is left of its elements where they are multiplied as sums of two parts.
    finish : callable, optional
        From the number of a piece of the step, as long as fragments are, to what is done with its parts when they are
        there.
    """

    place: FragmentPlace
    registers: Any
    rest: Any = None
    finish: Callable[[PrimExpr], tirx.Stmt] | None = None


def warp_place(binder: Binder, thread: PrimExpr, warps: tuple[int, int, int]) -> tuple[PrimExpr, PrimExpr, PrimExpr]:
    """The place of a thread's warp along rows, columns and the inner axis."""
    warp = tirx.floordiv(thread, 32)
    column = binder.name("warp_column", tirx.floormod(warp, warps[1]))
    row = binder.name("warp_row", tirx.floormod(tirx.floordiv(warp, warps[1]), warps[0]))
    return row, column, binder.name("slice", tirx.floordiv(warp, warps[0] * warps[1]))


def first_place(
    binder: Binder,
    name: str,
    fragments: Fragments,
    placed: Placed,
    lane: PrimExpr,
    start: PrimExpr,
    inner_start: PrimExpr,
    *,
    rows: bool,
) -> FragmentPlace:
    """Where a thread's pointers into a matrix go, if it began at 0: constants away from the first one.

    Parameters
    ----------
    binder : Binder
    name : str
        Of what is bound.
    fragments : Fragments
    placed : Placed
    lane : expression
    start, inner_start : expression
        Own (row or column) and inner index of the first of the warp's fragments.
    rows : bool
        Whether the matrix is the left operand.
    """
    own, inner = fragments.part_places(lane, rows=rows, inner_last=placed.inner_last)
    own, inner = start + own, inner_start + inner
    if not placed.crossed:
        return FragmentPlace(placed, binder.name(name, placed.place(tirx.IntImm("int32", 0), own, inner)))
    row, column = (own, inner) if placed.inner_last else (inner, own)
    first = binder.name(name, row * placed.pitch)
    crossing = binder.name(f"{name}_crossing", placed.crossing(row))
    return FragmentPlace(placed, first, binder.name(f"{name}_column", column), crossing)


def rest_buffers(fragments: Fragments, parts: tuple[int, int]) -> tuple[Any, Any, Any]:
    """Registers for what is left of so many fragments of rows and of columns, and for sums of their products; ``None``
    of each where operands are no sums of two parts."""
    if not fragments.split:
        return None, None, None
    (down, across), dtype = parts, fragments.register_dtype
    rests = local_buffer("left_rest", down * 4, dtype), local_buffer("right_rest", across * 2, dtype)
    return *rests, local_buffer("product_sums", across * fragments.sums, "float32")


def load_piece(
    tiling: MmaTiling, shared: Any, left: FragmentSource, right: FragmentSource, k: PrimExpr | int
) -> tirx.Stmt:
    """Load a warp's parts of piece `k` of a step, as long as fragments are, of both operands."""
    fragments = tiling.fragments

    def part(source: FragmentSource, count: int, apart: int, *, rows: bool) -> tirx.Stmt:
        def one(i: PrimExpr) -> tirx.Stmt:
            place = source.place.part(i * apart, k * fragments.inner)
            return sequence(*fragments.load(source.registers, i * 4, shared, place, source.place.placed, rows=rows))

        return loop("i", count, one, "unrolled")

    down, across = tiling.parts
    # Fragments of rows of one warp lie apart by those of the others, so that a strip of them is whole rows.
    return sequence(
        part(left, down, tiling.warps[0] * ROWS, rows=True), part(right, across // 2, 2 * COLUMNS, rows=False)
    )


def multiply_piece(
    tiling: MmaTiling,
    totals: Any,
    left: FragmentSource,
    right: FragmentSource,
    k: PrimExpr | int,
    first: PrimExpr | int = 0,
    sums: Any = None,
) -> tirx.Stmt:
    """Add the products of piece `k`, whose parts are there, to a warp's totals, of which the first is at `first`.

    Operands that are sums of two parts are multiplied in the registers `sums`.
    """
    down, across = tiling.parts
    fragments = tiling.fragments

    def prepared(source: FragmentSource, count: int) -> tirx.Stmt | None:
        if not fragments.preparing:
            return None
        return loop("i", count, lambda i: fragments.prepare(source.registers, source.rest, i * 4), "unrolled")

    def product(i: PrimExpr, j: PrimExpr) -> tirx.Stmt:
        at = (i * across + j) * 4
        return fragments.multiply(totals, first + at, left.registers, i * 4, right.registers, j * 2)

    def sum_of_products(i: PrimExpr) -> tirx.Stmt:
        """Of a fragment of rows. Those of one total are apart by all others, so that none waits for the one before."""

        def all_columns(left_registers: Any, right_registers: Any, *, begin: bool = False) -> tirx.Stmt:
            def one(j: PrimExpr) -> tirx.Stmt:
                return fragments.multiply(sums, j * 4, left_registers, i * 4, right_registers, j * 2, first=begin)

            return loop("j", across, one, "unrolled")

        def add(n: PrimExpr) -> tirx.Stmt:
            at = first + i * (across * 4) + n
            return tirx.BufferStore(totals, totals[at] + sums[n], [at])

        return sequence(
            all_columns(left.rest, right.registers, begin=True),
            all_columns(left.registers, right.rest),
            all_columns(left.registers, right.registers),
            loop("n", across * 4, add, "unrolled"),
        )

    def of_rows(i: PrimExpr) -> tirx.Stmt:
        return sum_of_products(i) if fragments.split else loop("j", across, lambda j: product(i, j), "unrolled")

    return sequence(
        None if left.finish is None else left.finish(k),
        prepared(left, down),
        prepared(right, across // 2),
        loop("i", down, of_rows, "unrolled"),
    )


def add_products(
    tiling: MmaTiling,
    step: int,
    shared: Any,
    totals: Any,
    left: FragmentSource,
    right: FragmentSource,
    first: PrimExpr | int = 0,
    sums: Any = None,
    *,
    rolled: bool = False,
) -> tirx.Stmt:
    """Add the products of `step` inner elements to a warp's totals, piece by piece; see :func:`multiply_piece`.

    Unrolled, the CUDA compiler loads parts of one piece while it multiplies those of another, in registers of their
    own; `rolled` keeps it from that.
    """

    def piece(k: PrimExpr) -> tirx.Stmt:
        return sequence(
            load_piece(tiling, shared, left, right, k), multiply_piece(tiling, totals, left, right, k, first, sums)
        )

    return loop("k", step // tiling.fragments.inner // tiling.warps[2], piece, "rolled" if rolled else "unrolled")
