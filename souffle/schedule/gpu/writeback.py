"""Writing the results of a contraction, with what comes after it applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from souffle.schedule.gpu.canonical import Contraction
from souffle.schedule.gpu.expressions import Axis, substitute_axes
from souffle.schedule.gpu.staging import has_condition_on, lanes_along, memory_step
from souffle.schedule.gpu.statements import Binder, guarded, loop, sequence
from souffle.tvm_compat import PrimExpr, variables

__all__ = ["result_lanes", "write_results"]


def result_lanes(contraction: Contraction, most: int) -> int:
    """How many neighbouring columns one store can take in every output, at most `most`."""
    if not contraction.columns:
        return 1
    axis = contraction.columns[-1]
    lanes = most
    for store in contraction.stores:
        target = store.buffer[store.indices] if store.indices else None
        if target is None or (store.where is not None and has_condition_on(store.where, axis)):
            return 1
        if memory_step(target, axis) != 1 or any(isinstance(c, Call) for c in _calls(store.value)):
            return 1
        lanes = min(lanes, lanes_along(store.value, axis, str(store.buffer.dtype)))
    return lanes


def _calls(value: PrimExpr) -> list[Call]:
    found: list[Call] = []
    tvm_ffi.structural_walk(value, (Call, found.append))
    return found


def write_results(
    contraction: Contraction,
    batch: PrimExpr,
    row: PrimExpr,
    column: PrimExpr,
    lanes: int,
    total: Callable[[PrimExpr], PrimExpr],
    tile: tuple[int, int, int],
) -> tirx.Stmt:
    """Store all outputs that depend on `lanes` neighbouring totals.

    Parameters
    ----------
    batch, row, column : expression
        Linear indices in the groups; `column` counts vectors of `lanes`.
    total : callable
        From the lane to the finished total.
    tile : tuple of int
        Extents of the tile, to know which groups have a ragged end.
    """
    binder = Binder()
    conditions = []
    mapping: dict[tirx.Var, PrimExpr] = {}
    last: Axis | None = contraction.columns[-1] if lanes > 1 else None
    names = [
        v
        for s in contraction.stores
        for e in (*s.indices, s.value, *([s.where] if s.where is not None else []))
        for v in variables(e)
    ]
    groups = (contraction.batch, contraction.rows, contraction.columns)
    for axes, linear, extent, size, width in zip(
        groups, (batch, row, column), contraction.extents, tile, (1, 1, lanes), strict=False
    ):
        position = binder.name("at", linear)
        if extent % size:
            conditions.append(tirx.LT(position, extent // width))
        mapping.update(binder.locate(axes, position, lambda a: any(a.var.same_as(v) for v in names), width, 0))

    statements = []
    for store in contraction.stores:

        def write(lane: PrimExpr, store: Any = store) -> tirx.Stmt:
            # Lanes move the last column axis only; the position itself is bound once.
            here = dict(mapping)
            if last is not None and last.var in here:
                here[last.var] = here[last.var] + lane
            here[contraction.total] = total(lane)
            value = substitute_axes(store.value, here)
            return tirx.BufferStore(store.buffer, value, [substitute_axes(i, here) for i in store.indices])

        body = loop("lane", lanes, write, "vectorized")
        where = [] if store.where is None else [substitute_axes(store.where, mapping)]
        statements.append(guarded(where, body))
    return sequence(*binder.statements, guarded(conditions, sequence(*statements)))
