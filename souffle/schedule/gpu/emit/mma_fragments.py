"""What tensor cores multiply, and how a warp comes to it: the kinds of fragments, with what differs between them.

Halves are multiplied 16 at a time (``m16n8k16``). Numbers of 32 bits are multiplied 8 at a time as TF32 (``m16n8k8``),
which has their exponents and 11 of their 24 bits: rounded to that once, or each as the sum of its rounded part and of
what is left, rounded as well. Of the four products of such sums three are added, the small ones first; the fourth is
about as small as what rounding both parts loses (Markidis et al. 2018; NVIDIA's CUTLASS calls it 3xTF32). Tensor cores
round their sums towards zero, which would add up: three such products begin at zero, and are added to totals outside
(Ootomo and Yokota 2022).

Words of four 8-bit integers are multiplied 8 at a time (``m16n8k32``), and added in 32 bits, exactly; where threads
have them is where they have words of TF32.

In shared memory a fragment's rows are 16 bytes, of halves 8, of words 4. ``ldmatrix`` brings those whose inner axis is
contiguous; of halves it transposes the others on their way, words are loaded one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tvm import tirx

from souffle.program.products import TF32, TF32X3
from souffle.schedule.gpu.emit.mma_instructions import (
    COLUMNS,
    ROWS,
    byte_product,
    first_tf32_product,
    load_part,
    load_word_part,
    load_words,
    product,
    round_part,
    split_part,
    tf32_product,
)
from souffle.tvm_compat import PrimExpr

__all__ = ["HALVES", "WORDS", "Fragments", "Placed", "byte_fragments"]

_ZERO = tirx.IntImm("int32", 0)


class Placed(Protocol):
    """Where an element of a matrix is in shared memory."""

    inner_last: bool
    """Whether the inner axis is contiguous."""
    pitch: int
    """Elements from one row of shared memory to the next."""
    crossed: int
    """Elements of a row that change places among each other; 0 where rows lie in order."""

    def place(self, batch: PrimExpr, own: PrimExpr, inner: PrimExpr) -> PrimExpr:
        """Index into shared memory."""
        ...

    def crossing(self, row: PrimExpr) -> PrimExpr:
        """What a column of a row is combined with, by exclusive or, to its place in the row; the same in each eighth
        row."""
        ...


@dataclass(frozen=True)
class Fragments:
    """One kind of fragments, of 16 rows or 8 columns.

    Attributes
    ----------
    name : str
    dtype : str
        Of operands in shared memory.
    register_dtype : str
        Of a thread's part of a fragment.
    inner : int
        Inner elements of a fragment.
    products : int
        Instructions that multiply two fragments.
    total_dtype : str
        Of totals.
    bytes : tuple of str
        Of words of 8-bit integers, the types of those of the left and of the right operand.
    """

    name: str
    dtype: str
    register_dtype: str
    inner: int
    products: int = 1
    total_dtype: str = "float32"
    bytes: tuple[str, ...] = ()

    @property
    def words(self) -> bool:
        """Whether elements in shared memory have 32 bits."""
        return self.dtype != "float16"

    @property
    def element_bytes(self) -> int:
        """Of an operand in shared memory."""
        return 4 if self.words else 2

    @property
    def split(self) -> bool:
        """Whether an operand is multiplied as a sum of two parts, each with registers of its own."""
        return self.products > 1

    @property
    def sums(self) -> int:
        """Registers of a thread for products of a fragment of 8 columns that are added outside of tensor cores."""
        return 4 if self.split else 0

    @property
    def relative_work(self) -> int:
        """How much longer tensor cores take than for as many products of halves: TF32 has half the rate of fp16, and
        8-bit integers twice it, of which a word has four (NVIDIA's white papers on A100, 2020, and H100, 2022)."""
        return self.products * (2 if self.words else 1)

    @property
    def preparing(self) -> int:
        """Instructions of a thread on each register before it is multiplied: rounding, a difference and rounding."""
        return 0 if self.bytes or not self.words else 3 if self.split else 1

    def padding(self, *, inner_last: bool) -> int:
        """Elements between rows of a matrix, so that what a warp loads at once lies in different banks.

        Rows of ``ldmatrix`` are then an odd multiple of 16 bytes apart; of single words, whose four inner indices and
        eight own ones a warp loads together, 8 banks.
        """
        return 4 if self.words and inner_last else 8

    def unit(self, *, inner_last: bool) -> int:
        """Elements of the rows of ``ldmatrix``, which may change places within a row of a matrix; 0 where words are
        loaded one by one."""
        return 0 if self.words and not inner_last else 16 // self.element_bytes

    def loads(self, *, inner_last: bool) -> int:
        """Instructions that load a part of 16 rows, or of 2 x 8 columns."""
        return 4 if self.words and not inner_last else 1

    def part_places(self, lane: PrimExpr, *, rows: bool, inner_last: bool) -> tuple[PrimExpr, PrimExpr]:
        """Where a thread's pointer for a part of an operand goes: own (row or column) and inner index in the part.

        Parameters
        ----------
        lane : expression
            The thread's number in its warp.
        rows : bool
            Whether the part is of the left operand: one fragment of 16 rows, whose registers are (rows 0-7, first half
            of the inner elements), (8-15, first), (0-7, second), (8-15, second). Of the right one it is two of 8
            columns, whose registers are (columns 0-7, first half), (0-7, second), (8-15, first), (8-15, second).
        inner_last : bool
            Whether shared memory has the inner axis contiguous; otherwise halves are transposed on their way, and words
            are loaded from where the thread has its first.
        """
        if self.words and not inner_last:
            return tirx.floordiv(lane, 4), tirx.floormod(lane, 4)
        matrix, row = tirx.floordiv(lane, 8), tirx.floormod(lane, 8)
        low, high = tirx.floormod(matrix, 2), tirx.floordiv(matrix, 2)
        own, inner = (low, high) if rows else (high, low)
        own, inner = own * (ROWS // 2), inner * (self.inner // 2)
        return (own + row, inner) if inner_last else (own, inner + row)

    def load(
        self, part: Any, at: PrimExpr, shared: Any, place: PrimExpr, placed: Placed, *, rows: bool
    ) -> list[tirx.Stmt]:
        """Load four registers from `at` on, of the part to which `place` points for this thread."""
        if not self.words:
            return [load_part(part, at, shared, place, transposed=not placed.inner_last)]
        if placed.inner_last:
            return [load_word_part(part, at, shared, place)]
        own = placed.place(_ZERO, tirx.IntImm("int32", COLUMNS), _ZERO)
        inner = placed.place(_ZERO, _ZERO, tirx.IntImm("int32", self.inner // 2))
        next_, second = (own, inner) if rows else (inner, own)
        return [load_words(part, at, shared, place, next_), load_words(part, at + 2, shared, place + second, next_)]

    def prepare(self, part: Any, rest: Any, at: PrimExpr) -> tirx.Stmt | None:
        """What is done with four registers before they are multiplied."""
        if not self.preparing:
            return None
        return split_part(part, rest, at) if self.split else round_part(part, at)

    def multiply(
        self,
        totals: Any,
        at: PrimExpr,
        left: Any,
        left_at: PrimExpr,
        right: Any,
        right_at: PrimExpr,
        *,
        first: bool = False,
    ) -> tirx.Stmt:
        """Add one product of fragments to four totals; or make them of the `first` one, which is of TF32."""
        if self.bytes:
            return byte_product(self.bytes, totals, at, left, left_at, right, right_at)
        words = first_tf32_product if first else tf32_product
        add = product if self.dtype == "float16" else words
        return add(totals, at, left, left_at, right, right_at)


HALVES = Fragments("fp16", "float16", "uint32", 16)
"""fp16 operands."""

WORDS = {
    TF32: Fragments(TF32, "float32", "float32", 8),
    TF32X3: Fragments(TF32X3, "float32", "float32", 8, products=3),
}
"""fp32 operands, by how a program says that they may be multiplied; in IEEE arithmetic tensor cores do not."""


def byte_fragments(left: str, right: str) -> Fragments:
    """Words of four 8-bit integers of these types, ``"int8"`` or ``"uint8"``."""
    return Fragments("int8", "int32", "int32", 8, total_dtype="int32", bytes=(left, right))
