"""The tensor cores' own instructions as statements: ``mma.sync`` and what feeds it, such as ``ldmatrix``.

A warp's 32 threads hold a fragment together. Of the 16 x 8 totals, thread ``t`` has those of rows ``t / 4`` and ``t / 4
+ 8`` at columns ``2 * (t % 4)`` and the next (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type",
and "for mma.m16n8k8" of TF32, whose totals lie alike). ``ldmatrix.x4`` brings four matrices of 8 rows of 16 bytes,
which are where threads ``8 * m`` to ``8 * m + 7`` point to for matrix ``m``; so the order of the pointers decides which
matrix becomes which register. A thread gets the word ``t % 4`` of row ``t / 4``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from souffle.tvm_compat import PrimExpr

__all__ = [
    "BEGIN_TF32_PRODUCT_FUNCTION",
    "BYTE_PRODUCT_FUNCTION",
    "BYTE_TYPES",
    "COLUMNS",
    "DOT_FUNCTION",
    "LOAD_FUNCTION",
    "LOAD_TRANSPOSED_FUNCTION",
    "LOAD_WORDS_FUNCTION",
    "LOAD_WORD_MATRICES_FUNCTION",
    "PRODUCT_FUNCTION",
    "PUT_FUNCTION",
    "ROUND_FUNCTION",
    "ROWS",
    "SCALE_FUNCTION",
    "SPLIT_FUNCTION",
    "TAKE_FUNCTION",
    "TF32_PRODUCT_FUNCTION",
    "byte_dot",
    "byte_product",
    "first_tf32_product",
    "load_part",
    "load_word_part",
    "load_words",
    "product",
    "put_totals",
    "round_part",
    "scale_part",
    "split_part",
    "take_totals",
    "tf32_product",
]

LOAD_FUNCTION = "souffle_load_matrices"
"""``(registers, shared)``; the texts of these functions are in :mod:`souffle.codegen.device_functions`."""

LOAD_TRANSPOSED_FUNCTION = "souffle_load_transposed_matrices"

LOAD_WORD_MATRICES_FUNCTION = "souffle_load_word_matrices"
"""``(registers, shared)``: as the first, of four words in each row."""

LOAD_WORDS_FUNCTION = "souffle_load_words"
"""``(registers, shared, distance)``: a word, and the one so many words behind it."""

PRODUCT_FUNCTION = "souffle_add_product"
"""``(totals, left, right)``"""

TF32_PRODUCT_FUNCTION = "souffle_add_tf32_product"
"""The same of fp32 registers that hold numbers of TF32."""

BEGIN_TF32_PRODUCT_FUNCTION = "souffle_begin_tf32_product"
"""The same with totals that begin at 0, whatever they were."""

ROUND_FUNCTION = "souffle_round_to_tf32"
"""``(registers)``: four numbers to the nearest of TF32, away from zero where two are as near."""

SPLIT_FUNCTION = "souffle_split_to_tf32"
"""``(registers, rests)``: the same, and what they were rounded by in TF32, too."""

BYTE_TYPES = {"int8": "s8", "uint8": "u8"}
"""What PTX calls 8-bit integers."""

BYTE_PRODUCT_FUNCTION = "souffle_add_byte_product_{}_{}"
"""The same of words of 8-bit integers of two types (:data:`BYTE_TYPES`), with totals of 32-bit integers."""

DOT_FUNCTION = "souffle_add_dot_{}_{}"
"""``(left, right, total)``: the total, and the products of the four 8-bit integers of two words."""

PUT_FUNCTION = "souffle_put_totals"
"""``(shared, totals)``: two neighbours."""

TAKE_FUNCTION = "souffle_take_totals"
"""``<lanes, planes>(result, shared, distance)``: sums of as many planes, `distance` fp32 apart, from first to last."""

SCALE_FUNCTION = "souffle_scale_part"
"""``(part, factors)``: of each row that a thread has of a 16 x 16 part, its elements times the first number of its pair
of factors plus the second, in fp16."""

ROWS, COLUMNS = 16, 8
"""Rows and columns of one instruction."""


def load_part(part: Any, at: PrimExpr, shared: Any, place: PrimExpr, *, transposed: bool) -> tirx.Stmt:
    """Four registers from `at` on, of the matrices to whose rows `place` points."""
    name = LOAD_TRANSPOSED_FUNCTION if transposed else LOAD_FUNCTION
    return _call(name, tirx.address_of(part[at]), tirx.address_of(shared[place]))


def load_word_part(part: Any, at: PrimExpr, shared: Any, place: PrimExpr) -> tirx.Stmt:
    """The same of matrices of words."""
    return _call(LOAD_WORD_MATRICES_FUNCTION, tirx.address_of(part[at]), tirx.address_of(shared[place]))


def load_words(part: Any, at: PrimExpr, shared: Any, place: PrimExpr, distance: PrimExpr) -> tirx.Stmt:
    """Two registers from `at` on, of words in shared memory that are so far apart."""
    return _call(LOAD_WORDS_FUNCTION, tirx.address_of(part[at]), tirx.address_of(shared[place]), distance)


def round_part(part: Any, at: PrimExpr) -> tirx.Stmt:
    """Round four registers to TF32."""
    return _call(ROUND_FUNCTION, tirx.address_of(part[at]))


def split_part(part: Any, rest: Any, at: PrimExpr) -> tirx.Stmt:
    """Round four registers to TF32, and put what is left of them, in TF32, too, where `rest` has the same place."""
    return _call(SPLIT_FUNCTION, tirx.address_of(part[at]), tirx.address_of(rest[at]))


def product(totals: Any, at: PrimExpr, left: Any, left_at: PrimExpr, right: Any, right_at: PrimExpr) -> tirx.Stmt:
    """Add a product of fragments to four totals."""
    return _product(PRODUCT_FUNCTION, totals[at], left[left_at], right[right_at])


def tf32_product(totals: Any, at: PrimExpr, left: Any, left_at: PrimExpr, right: Any, right_at: PrimExpr) -> tirx.Stmt:
    """The same of fragments of TF32."""
    return _product(TF32_PRODUCT_FUNCTION, totals[at], left[left_at], right[right_at])


def byte_product(
    types: Sequence[str], totals: Any, at: PrimExpr, left: Any, left_at: PrimExpr, right: Any, right_at: PrimExpr
) -> tirx.Stmt:
    """The same of fragments of 8-bit integers of these types."""
    function = BYTE_PRODUCT_FUNCTION.format(*(BYTE_TYPES[dtype] for dtype in types))
    return _product(function, totals[at], left[left_at], right[right_at])


def byte_dot(types: Sequence[str], total: PrimExpr, left: PrimExpr, right: PrimExpr) -> PrimExpr:
    """A total with the products of two words of 8-bit integers of these types."""
    function = DOT_FUNCTION.format(*(BYTE_TYPES[dtype] for dtype in types))
    return tirx.call_pure_extern("int32", function, left, right, total)


def first_tf32_product(
    totals: Any, at: PrimExpr, left: Any, left_at: PrimExpr, right: Any, right_at: PrimExpr
) -> tirx.Stmt:
    """Four totals of one product of fragments of TF32."""
    return _product(BEGIN_TF32_PRODUCT_FUNCTION, totals[at], left[left_at], right[right_at])


def _product(function: str, *places: Any) -> tirx.Stmt:
    return _call(function, *(tirx.address_of(place) for place in places))


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
