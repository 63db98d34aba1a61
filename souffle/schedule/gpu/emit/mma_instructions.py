"""The tensor cores' own instructions as statements: ``mma.sync.m16n8k16`` and the ``ldmatrix`` that feeds it.

A warp's 32 threads hold a fragment together. Of the 16 x 8 totals, thread ``t`` has those of rows ``t / 4`` and ``t / 4
+ 8`` at columns ``2 * (t % 4)`` and the next (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type").
``ldmatrix.x4`` brings four 8 x 8 matrices, whose rows of 16 bytes are where threads ``8 * m`` to ``8 * m + 7`` point
to for matrix ``m``; so the order of the pointers decides which matrix becomes which register.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from souffle.tvm_compat import PrimExpr

__all__ = [
    "COLUMNS",
    "INNER",
    "LOAD_FUNCTION",
    "LOAD_TRANSPOSED_FUNCTION",
    "PRODUCT_FUNCTION",
    "PUT_FUNCTION",
    "ROWS",
    "SCALE_FUNCTION",
    "TAKE_FUNCTION",
    "load_part",
    "part_places",
    "product",
    "put_totals",
    "scale_part",
    "take_totals",
]

LOAD_FUNCTION = "souffle_load_matrices"
"""``(registers, shared)``; the texts of these functions are in :mod:`souffle.codegen.device_functions`."""

LOAD_TRANSPOSED_FUNCTION = "souffle_load_transposed_matrices"

PRODUCT_FUNCTION = "souffle_add_product"
"""``(totals, left, right)``"""

PUT_FUNCTION = "souffle_put_totals"
"""``(shared, totals)``: two neighbours."""

TAKE_FUNCTION = "souffle_take_totals"
"""``<lanes, planes>(result, shared, distance)``: sums of as many planes, `distance` fp32 apart, from first to last."""

SCALE_FUNCTION = "souffle_scale_part"
"""``(part, factors)``: of each row that a thread has of a 16 x 16 part, its elements times the first number of its pair
of factors plus the second, in fp16."""

ROWS, COLUMNS, INNER = 16, 8, 16
"""Rows, columns and products of one instruction."""


def part_places(lane: PrimExpr, *, rows: bool, inner_last: bool) -> tuple[PrimExpr, PrimExpr]:
    """Where a thread's pointer for a 16 x 16 part of an operand goes: own (row or column) and inner index in the part.

    Parameters
    ----------
    lane : expression
        The thread's number in its warp.
    rows : bool
        Whether the part is of the left operand: one fragment of 16 rows, whose registers are (rows 0-7, inner 0-7),
        (8-15, 0-7), (0-7, 8-15), (8-15, 8-15). Of the right one it is two of 8 columns, whose registers are (columns
        0-7, inner 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
    inner_last : bool
        Whether shared memory has the inner axis contiguous; otherwise matrices are transposed on their way.
    """
    matrix, row = tirx.floordiv(lane, 8), tirx.floormod(lane, 8)
    low, high = tirx.floormod(matrix, 2) * 8, tirx.floordiv(matrix, 2) * 8
    own, inner = (low, high) if rows else (high, low)
    return (own + row, inner) if inner_last else (own, inner + row)


def load_part(part: Any, at: PrimExpr, shared: Any, place: PrimExpr, *, transposed: bool) -> tirx.Stmt:
    """Four registers from `at` on, of the matrices to whose rows `place` points."""
    name = LOAD_TRANSPOSED_FUNCTION if transposed else LOAD_FUNCTION
    return _call(name, tirx.address_of(part[at]), tirx.address_of(shared[place]))


def product(totals: Any, at: PrimExpr, left: Any, left_at: PrimExpr, right: Any, right_at: PrimExpr) -> tirx.Stmt:
    """Add a product of fragments to four totals."""
    pointers = (totals[at], left[left_at], right[right_at])
    return _call(PRODUCT_FUNCTION, *(tirx.address_of(p) for p in pointers))


def scale_part(part: Any, at: PrimExpr, factors: Any, factors_at: PrimExpr) -> tirx.Stmt:
    """Scale and shift the elements of four registers, those of two rows, by two pairs of factors."""
    return _call(SCALE_FUNCTION, tirx.address_of(part[at]), tirx.address_of(factors[factors_at]))


def put_totals(shared: Any, place: PrimExpr, totals: Any, at: PrimExpr) -> tirx.Stmt:
    """Two neighbouring totals to shared memory."""
    return _call(PUT_FUNCTION, tirx.address_of(shared[place]), tirx.address_of(totals[at]))


def take_totals(result: Any, shared: Any, place: PrimExpr, lanes: int, planes: int, distance: int) -> tirx.Stmt:
    """The sums over planes, in order, of `lanes` neighbouring totals in shared memory."""
    pointers = (tirx.address_of(result[0]), tirx.address_of(shared[place]))
    return _call(f"{TAKE_FUNCTION}<{lanes}, {planes}>", *pointers, tirx.IntImm("int32", distance))


def _call(name: str, *arguments: Any) -> tirx.Stmt:
    return tirx.Evaluate(tirx.call_extern("int32", name, *arguments))
