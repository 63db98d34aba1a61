"""``Det``: elimination with the largest pivot of each column, each step as TEs over what is left of the matrix."""

from __future__ import annotations

import onnx
from tvm import te, tirx

from souffle.frontend.custom import NodeOperands, defines, int_imm
from souffle.frontend.custom_order import is_peak
from souffle.frontend.refusal import Obstacle
from souffle.tvm_compat import PrimExpr

__all__: list[str] = []

# Each row is a step of its own, with three TEs.
_MOST_ROWS = 64


@defines("Det")
def _determinant(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    shape, dtype = operands.shape(0), operands.dtype(0)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise Obstacle(f"it is of {list(shape)}, and only a square matrix has a determinant", "give it square matrices")
    if shape[-1] > _MOST_ROWS:
        raise Obstacle(
            f"its matrices have {shape[-1]} rows, each a step of its own, and at most {_MOST_ROWS} are supported",
            "end the network before this node and compute the determinant outside of it",
        )
    batch, wide = shape[:-2], dtype if dtype == "float64" else "float32"
    source = operands.tensor(0)
    rest = te.compute(shape, lambda *at: tirx.Cast(wide, source(*at)), name="matrix") if dtype != wide else source
    result: te.Tensor | None = None
    for rows in range(shape[-1], 0, -1):
        pivot = _pivot_row(rest, batch, rows)
        result = _times_pivot(result, rest, pivot, batch)
        if rows > 1:
            rest = _eliminated(rest, pivot, batch, rows)
    if dtype == wide:
        return [result]
    return [te.compute(batch, lambda *at: tirx.Cast(dtype, result(*at)), name="determinant")]


def _times_pivot(before: te.Tensor | None, matrix: te.Tensor, pivot: te.Tensor, batch: tuple[int, ...]) -> te.Tensor:
    """The product of the pivots so far and this one."""
    one, minus = (tirx.const(value, str(matrix.dtype)) for value in (1, -1))

    def product(*at: PrimExpr) -> PrimExpr:
        # A row that changes places with the first turns the sign.
        row = pivot(*at)
        value = tirx.Select(row == 0, one, minus) * matrix(*at, row, 0)
        return value if before is None else before(*at) * value

    return te.compute(batch, product, name="product")


def _eliminated(matrix: te.Tensor, pivot: te.Tensor, batch: tuple[int, ...], rows: int) -> te.Tensor:
    """The matrix without its first column and the row of the pivot, which the first takes the place of."""
    zero, one = (tirx.const(value, str(matrix.dtype)) for value in (0, 1))

    def element(*at: PrimExpr) -> PrimExpr:
        (*outer, i, j), first = at, pivot(*at[:-2])
        row = tirx.Select(tirx.EQ(i + 1, first), int_imm(0), i + 1)
        top = matrix(*outer, first, 0)
        # A column of zeros has nothing to take away; the determinant is zero.
        empty = tirx.EQ(top, zero)
        share = tirx.Select(empty, zero, matrix(*outer, row, 0) / tirx.Select(empty, one, top))
        # As a sum of two: what is no reduction would be written out in its readers, each step three times in the next.
        term = te.reduce_axis((0, 2), name="term")
        taken = zero - share * matrix(*outer, first, j + 1)
        return te.sum(tirx.Select(term == 0, matrix(*outer, row, j + 1), taken), axis=term)

    return te.compute((*batch, rows - 1, rows - 1), element, name=f"rest{rows}")


def _pivot_row(matrix: te.Tensor, batch: tuple[int, ...], rows: int) -> te.Tensor:
    """In which row the first column has its largest element."""

    def largest(*at: PrimExpr) -> PrimExpr:
        r = te.reduce_axis((0, rows), name="r")
        return te.max(tirx.abs(matrix(*at, r, 0)), axis=r)

    peak = te.compute(batch, largest, name=f"peak{rows}")

    def first(*at: PrimExpr) -> PrimExpr:
        r = te.reduce_axis((0, rows), name="r")
        here = is_peak(tirx.abs(matrix(*at, r, 0)), peak(*at))
        return te.min(tirx.Select(here, r.var, int_imm(rows - 1)), axis=r)

    return te.compute(batch, first, name=f"pivot{rows}")
