"""What stands between two products in tests: softmax, masks, and the normalization of rows."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import te, tirx, topi

from tests.schedule.stage_kernels import shape_of


def softmax(scores: te.Tensor) -> te.Tensor:
    return topi.nn.softmax(scores, axis=-1)


def softmax_of_infinities(scores: te.Tensor) -> te.Tensor:
    """As the frontend writes it: the maximum starts from minus infinity."""
    greatest = te.comm_reducer(lambda a, b: tirx.Max(a, b), lambda dtype: tirx.const(-math.inf, dtype), name="greatest")
    n, other = (te.reduce_axis((0, shape_of(scores)[-1]), name=name) for name in ("n", "other"))
    most = te.compute(scores.shape[:-1], lambda *at: greatest(scores(*at, n), axis=n), name="most")
    exponential = te.compute(scores.shape, lambda *at: tirx.exp(scores(*at) - most(*at[:-1])), name="exponential")
    total = te.compute(scores.shape[:-1], lambda *at: te.sum(exponential(*at, other), axis=other), name="total")
    return te.compute(scores.shape, lambda *at: exponential(*at) / total(*at[:-1]), name="weights")


def causal(scores: te.Tensor) -> te.Tensor:
    *_, rows, columns = shape_of(scores)

    def masked(*index):
        return tirx.if_then_else(index[-1] <= index[-2] + (columns - rows), scores(*index), tirx.const(-1e9, "float32"))

    return te.compute(scores.shape, masked, name="masked")


def seen_between(before: int, after: int) -> Callable[[te.Tensor], te.Tensor]:
    """Each row sees the columns from so many before its own to so many after it."""

    def masked(scores: te.Tensor) -> te.Tensor:
        def element(*index):
            *_, row, column = index
            seen = tirx.And(column >= row - before, column <= row + after)
            return tirx.if_then_else(seen, scores(*index), tirx.const(-math.inf, "float32"))

        return te.compute(scores.shape, element, name="masked")

    return masked


def normalized(scores: te.Tensor) -> te.Tensor:
    """Rows without their mean, by their deviation."""
    columns = shape_of(scores)[-1]
    k, other = (te.reduce_axis((0, columns), name=name) for name in ("k", "other"))
    total = te.compute(scores.shape[:-1], lambda *i: te.sum(scores(*i, k), axis=k), name="total")
    centred = te.compute(scores.shape, lambda *i: scores(*i) - total(*i[:-1]) / columns, name="centred")
    square = te.compute(
        scores.shape[:-1], lambda *i: te.sum(centred(*i, other) * centred(*i, other), axis=other), name="square"
    )
    return te.compute(
        scores.shape, lambda *i: centred(*i) * tirx.rsqrt(square(*i[:-1]) / columns + 1e-5), name="normalized"
    )
