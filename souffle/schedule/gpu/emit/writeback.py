"""Writing the results of a contraction, with what comes after it applied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tvm import tirx
from tvm.ir import Call

from souffle.schedule.gpu.emit.contraction_statements import Binder, guarded, local_buffer, loop
from souffle.schedule.gpu.forms.contraction_expressions import Axis, substitute_axes
from souffle.schedule.gpu.forms.matrix_product import Contraction, Store
from souffle.schedule.gpu.forms.memory_access import has_condition_on, lanes_along, memory_step
from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import PrimExpr, sequence, variables

__all__ = ["result_lanes", "value_buffers", "write_results"]


@lru_cache(maxsize=256)
def result_lanes(contraction: Contraction, most: int, *, apart: bool = False) -> int:
    """How many neighbouring columns one store can take in every output, at most `most`.

    Parameters
    ----------
    apart : bool
        Whether values that vectors cannot be computed of may be computed one by one; see :func:`write_results`.
    """
    if not contraction.columns:
        return 1
    axis = contraction.columns[-1]
    lanes = most
    for store in (*contraction.stores, *contraction.finished):
        target = store.buffer[store.indices] if store.indices else None
        if target is None or (store.where is not None and has_condition_on(store.where, axis)):
            return 1
        if memory_step(target, axis) != 1:
            return 1
        lanes = min(lanes, lanes_along(target, axis, str(store.buffer.dtype)))
        if not apart:
            lanes = min(lanes, _value_lanes(store, axis))
    return lanes


def _value_lanes(store: Store, axis: Axis) -> int:
    """Of how many neighbours the value can be computed as one vector."""
    return 1 if _calls(store.value) else lanes_along(store.value, axis, str(store.buffer.dtype))


def value_buffers(contraction: Contraction, lanes: int, kept: Collection[int] = ()) -> tuple[Any | None, ...]:
    """For each output registers where a vector is put together from single values; ``None`` where it needs none.

    Parameters
    ----------
    kept : collection of int
        Numbers of outputs whose values are needed again.
    """
    return tuple(
        local_buffer(f"value_{number}", lanes, str(store.buffer.dtype))
        if number in kept or (lanes > 1 and _value_lanes(store, contraction.columns[-1]) < lanes)
        else None
        for number, store in enumerate(contraction.stores)
    )


def _calls(value: PrimExpr) -> list[Call]:
    found: list[Call] = []
    structural_walk(value, (Call, found.append))
    return found


def write_results(
    contraction: Contraction,
    batch: PrimExpr,
    row: PrimExpr,
    column: PrimExpr,
    lanes: int,
    total: Callable[[PrimExpr], PrimExpr],
    tile: tuple[int, int, int],
    apart: Sequence[Any] = (),
    of_row: Mapping[tirx.Var, PrimExpr] | None = None,
) -> tirx.Stmt | None:
    """Store all outputs that depend on `lanes` neighbouring totals, if there are such.

    Parameters
    ----------
    batch, row, column : expression
        Linear indices in the groups; `column` counts vectors of `lanes`.
    total : callable
        From the lane to the finished total.
    tile : tuple of int
        Extents of the tile, to know which groups have a ragged end.
    apart : sequence of buffer
        For each output what :func:`value_buffers` gives; needed where :func:`result_lanes` was asked so.
    of_row : mapping, optional
        What stands for the variables of the row.
    """
    if not contraction.stores:
        return None
    binder = Binder()
    conditions = []
    mapping: dict[tirx.Var, PrimExpr] = dict(of_row or {})
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
    for number, store in enumerate(contraction.stores):

        def here(lane: PrimExpr) -> dict[tirx.Var, PrimExpr]:
            # Lanes move the last column axis only; the position itself is bound once.
            found = dict(mapping)
            if last is not None and last.var in found:
                found[last.var] = found[last.var] + lane
            found[contraction.total] = total(lane)
            return found

        def value(lane: PrimExpr, store: Store = store) -> PrimExpr:
            return substitute_axes(store.value, here(lane))

        def collect(lane: PrimExpr, store: Store = store, held: Any = apart[number] if apart else None) -> tirx.Stmt:
            return tirx.BufferStore(held, value(lane, store), [lane])

        def write(lane: PrimExpr, store: Store = store, held: Any = None) -> tirx.Stmt:
            own = value(lane, store) if held is None else held[lane]
            return tirx.BufferStore(store.buffer, own, [substitute_axes(i, here(lane)) for i in store.indices])

        if apart and apart[number] is not None:
            # Vectors are read where rows are normalized, in which a thread waits for what it reads of each.
            whole = contraction.normalizes and last is not None and _value_lanes(store, last) >= lanes
            body = sequence(
                loop("lane", lanes, collect, "vectorized" if whole else "unrolled"),
                loop("lane", lanes, lambda lane, w=write, n=number: w(lane, held=apart[n]), "vectorized"),
            )
        else:
            body = loop("lane", lanes, write, "vectorized")
        where = [] if store.where is None else [substitute_axes(store.where, mapping)]
        statements.append(guarded(where, body))
    return sequence(*binder.statements, guarded(conditions, sequence(*statements)))
