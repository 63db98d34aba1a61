"""Products of matrices in tests, of fp16 or of fp32 factors with fp32 totals."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx

from tests.schedule.stage_kernels import Tensors, data, shape_of

HALVES = ("float16", "float16")
WORDS = ("float32", "float32")


def as_factor(value: tirx.PrimExpr, factors: str) -> tirx.PrimExpr:
    """A value in fp32, through the type of factors."""
    return value.astype(factors).astype("float32")


def matmul(a: te.Tensor, b: te.Tensor, *, ta: bool = False, tb: bool = False, factors: str = "float16") -> te.Tensor:
    """``a @ b``, whatever the operands are in memory; with batch axes that `b` may lack."""
    rows, inner = shape_of(a)[-2:][::-1] if ta else shape_of(a)[-2:]
    columns = shape_of(b)[-2] if tb else shape_of(b)[-1]
    k = te.reduce_axis((0, inner), name="k")

    def term(*index):
        *batch, i, j = index
        left = a(*batch, *((k, i) if ta else (i, k)))
        right = b(*batch[: len(b.shape) - 2], *((j, k) if tb else (k, j)))
        return te.sum(as_factor(left, factors) * as_factor(right, factors), axis=k)

    return te.compute((*shape_of(a)[:-2], rows, columns), term, name="product")


def gemm(
    m: int,
    n: int,
    k: int,
    *batch: int,
    ta: bool = False,
    tb: bool = False,
    types: Sequence[str] = HALVES,
    factors: str = "float16",
) -> tuple[Tensors, te.Tensor]:
    """The operands of a product, of these types in memory, and the product."""
    a = data(*batch, *((k, m) if ta else (m, k)), dtype=types[0], name="a")
    b = data(*batch, *((n, k) if tb else (k, n)), dtype=types[1], name="b")
    return (a, b), matmul(a, b, ta=ta, tb=tb, factors=factors)
