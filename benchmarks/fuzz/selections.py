"""Recipes of operators that select, so that data decides how long their results are.

What they give is set aside (:meth:`Draft.aside`): it may be an output of the network, and no other recipe reads it,
since most operators are refused on it. The recipes themselves put behind it what may stand there.
"""

from __future__ import annotations

import numpy as np

from benchmarks.fuzz.draft import Draft, Value
from benchmarks.fuzz.grammar import recipe

__all__: list[str] = []


def _follow(d: Draft, rows: Value) -> None:
    """Read values along whose first axis there are as many as data says."""
    for _ in range(d.integer(0, 2)):
        kind = d.choice(("unary", "square", "transpose", "unsqueeze", "flatten", "cast"))
        if kind == "unary" and rows.dtype.startswith("float"):
            (rows,) = d.emit(d.choice(("Relu", "Abs", "Neg")), [rows])
        elif kind == "square":
            (rows,) = d.emit(d.choice(("Add", "Max", "Sub")), [rows, rows])
        elif kind == "transpose" and rows.rank == 2:
            (turned,) = d.emit("Transpose", [rows])
            (rows,) = d.emit("Transpose", [turned])
        elif kind == "unsqueeze" and rows.rank < 3:
            (rows,) = d.emit("Unsqueeze", [rows, d.ints(1)])
        elif kind == "flatten":
            (rows,) = d.emit("Flatten", [rows])
        elif kind == "cast":
            (rows,) = d.emit("Cast", [rows], to=1 if rows.dtype != "float32" else 7)


@recipe("SelectedElements", since=13, weight=0.3)
def _selected_elements(d: Draft) -> None:
    x = d.pick("f", 1, tame=True, exact=True, where=lambda v: v.array.any() and v.dtype == "float32")
    with d.aside():
        (where,) = d.emit("NonZero", [x])
        (places,) = d.emit("Transpose", [where])
        (values,) = d.emit("GatherND", [x, places])
        _follow(d, values)


@recipe("SelectedRows", since=13, weight=0.3)
def _selected_rows(d: Draft) -> None:
    x = d.pick("f", 1, 3, tame=True, exact=True, where=lambda v: v.array.size > 0 and v.dtype == "float32")
    condition = d.input(np.asarray(d.rng.random(x.shape[0]) < 0.6))
    with d.aside():
        (rows,) = d.emit("Compress", [x, condition], axis=0)
        _follow(d, rows)
    if d.chance(0.5):
        d.emit(d.choice(("ReduceMax", "ReduceMin")), [rows], axes=[0] if d.opset < 18 else None, keepdims=0)


@recipe("Unique", weight=0.3)
def _unique(d: Draft) -> None:
    x = d.pick("fi", 1, tame=True, exact=True, where=lambda v: 0 < v.array.size < 300 and v.dtype != "float16")
    axis = d.choice((None, d.axis(x)))
    with d.aside():
        d.emit("Unique", [x], outputs=4, axis=axis, sorted=d.choice((None, 0, 1)))


@recipe("NonMaxSuppression", since=11, weight=0.3)
def _suppression(d: Draft) -> None:
    batch, classes, number = d.integer(1, 2), d.integer(1, 3), d.integer(1, 17)
    # Whole numbers over powers of two: no overlap is near its threshold by rounding alone.
    boxes = d.input(np.asarray(d.rng.integers(0, 16, (batch, number, 4)) / 16).astype(np.float32))
    scores = d.input(np.asarray(d.rng.integers(0, 9, (batch, classes, number)) / 8).astype(np.float32))
    thresholds = [d.scalar(d.choice((0.25, 0.5, 0.7)), "float32"), d.scalar(d.choice((0.0, 0.3)), "float32")]
    given = [boxes, scores, d.ints(d.integer(1, 5)), *thresholds[: d.integer(1, 2)]]
    place = d.scalar(2, "int64")
    with d.aside():
        (rows,) = d.emit("NonMaxSuppression", given, center_point_box=d.choice((None, 0, 1)))
        d.emit("Gather", [rows, place], axis=1)
        _follow(d, rows)
