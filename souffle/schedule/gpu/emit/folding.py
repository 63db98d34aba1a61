"""Writing reductions over the elements of a contraction: each tile combines what it has (paper §6.3).

A thread combines its own elements in registers, then one thread for each result what the threads of a row or column of
the tile have, by way of shared memory. Both go in a fixed order, so that the result has the same bits in every run. A
moment that is about the mean of another's results comes after it, which leaves these in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.async_copy import barrier
from souffle.schedule.gpu.emit.contraction_statements import Binder, guarded, local_buffer, loop, shared_buffer
from souffle.schedule.gpu.forms.behind_contraction import Fold
from souffle.schedule.gpu.forms.contraction_expressions import Axis, substitute_axes
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.forms.memory_access import bits_of
from souffle.tvm_compat import PrimExpr, cast, dtype_of, sequence, variables

__all__ = ["ThreadShare", "fold_buffers", "fold_bytes", "fold_problem", "fold_results"]


@dataclass(frozen=True)
class ThreadShare:
    """What a thread has of a tile.

    Attributes
    ----------
    across : tuple of int
        Threads along batch, rows, columns.
    each : tuple of int
        Rows and columns of one thread.
    tile : tuple of expression
        Which tile it is, along batch, rows, columns.
    thread : tuple of expression
        Which thread of the tile, along the same.
    row, column : callable
        From the number of one of the thread's rows or columns to its place in the tile.
    total : callable
        From both numbers to the finished total.
    of_row : callable
        From a batch and a row of the tile to what stands there for the variables of the row.
    """

    across: tuple[int, int, int]
    each: tuple[int, int]
    tile: tuple[PrimExpr, PrimExpr, PrimExpr]
    thread: tuple[PrimExpr, PrimExpr, PrimExpr]
    row: Callable[[PrimExpr], PrimExpr]
    column: Callable[[PrimExpr], PrimExpr]
    total: Callable[[PrimExpr, PrimExpr], PrimExpr]
    of_row: Callable[[PrimExpr, PrimExpr], Mapping[tirx.Var, PrimExpr]] = lambda batch, row: {}


def fold_problem(problem: Contraction, tile: tuple[Any, Any, Any]) -> Any:
    """Whether a tile has the extent that the reductions ask for; for arrays of extents, which of them have it."""
    fits: Any = True
    for fold in problem.folds:
        size = tile[_over(problem, fold)]
        extent = prod(axis.extent for axis in fold.over)
        fits = fits & ((size >= extent) if fold.size is None else (size == fold.size))
    return fits


def fold_bytes(problem: Contraction, across: tuple[Any, Any, Any], each: tuple[Any, Any]) -> Any:
    """Bytes of shared memory that a tile's reductions take; arrays where these are."""
    taken: Any = 0
    for fold in problem.folds:
        elements = _elements(problem, fold, across, each)
        if _is_read(problem, fold):
            elements = elements + _results(problem, fold, across, each)
        taken = taken + elements * (bits_of(dtype_of(fold.total)) // 8)
    return taken


def fold_buffers(
    problem: Contraction, across: tuple[int, int, int], each: tuple[int, int]
) -> tuple[tuple[Any, ...], ...]:
    """For each reduction shared memory for the threads' parts, a register, and shared memory for results if another
    one reads these.
    """
    buffers: list[tuple[Any, ...]] = []
    for number, fold in enumerate(problem.folds):
        dtype = dtype_of(fold.total)
        held = shared_buffer(f"folded_{number}", _elements(problem, fold, across, each), dtype)
        own = local_buffer(f"fold_{number}", 1, dtype)
        if _is_read(problem, fold):
            results = shared_buffer(f"results_{number}", _results(problem, fold, across, each), dtype)
            buffers.append((held, own, results))
        else:
            buffers.append((held, own))
    return tuple(buffers)


def fold_results(
    problem: Contraction, part: ThreadShare, buffers: Sequence[tuple[Any, ...]], thread: PrimExpr, threads: int
) -> tirx.Stmt | None:
    """The statements of all reductions, behind the last of the contraction's sums; ``None`` if there are none.

    Parameters
    ----------
    problem : Contraction
    part : ThreadShare
    buffers : sequence
        See :func:`fold_buffers`.
    thread : expression
        Of the block.
    threads : int
        Of a block.
    """
    if not problem.folds:
        return None
    statements: list[tirx.Stmt] = []
    found: list[tuple[Fold, Any]] = []
    left = list(zip(problem.folds, buffers, strict=True))
    while left:
        ready = [(fold, held) for fold, held in left if not _read_of(fold, [other for other, _ in left])]
        left = [(fold, held) for fold, held in left if all(fold is not other for other, _ in ready)]
        if statements:
            statements.append(barrier())
        statements += [_own_parts(problem, fold, part, *held[:2], found) for fold, held in ready]
        statements.append(barrier())
        statements += [_joined(problem, fold, part, held, thread, threads) for fold, held in ready]
        found += [(fold, held[2]) for fold, held in ready if len(held) > 2]
    return sequence(*statements)


def _is_read(problem: Contraction, fold: Fold) -> bool:
    """Whether another reduction reads its results."""
    return any(_read_of(other, [fold]) for other in problem.folds if other is not fold)


def _read_of(fold: Fold, others: Sequence[Fold]) -> list[Fold]:
    """Those of some reductions whose results another one reads."""
    read = variables(fold.value)
    return [other for other in others if any(other.total.same_as(v) for v in read)]


def _over(problem: Contraction, fold: Fold) -> int:
    """1 if it reduces rows, 2 if columns."""
    return 1 if fold.over == problem.rows else 2


def _elements(problem: Contraction, fold: Fold, across: tuple[Any, Any, Any], each: tuple[Any, Any]) -> Any:
    over = _over(problem, fold)
    # One more than threads share a result: what neighbouring results read lies in different banks.
    return _results(problem, fold, across, each) * (across[over] + 1)


def _results(problem: Contraction, fold: Fold, across: tuple[Any, Any, Any], each: tuple[Any, Any]) -> Any:
    """Results of a tile."""
    over = _over(problem, fold)
    return across[0] * across[3 - over] * each[2 - over]


def _own_parts(
    problem: Contraction, fold: Fold, part: ThreadShare, held: Any, own: Any, found: Sequence[tuple[Fold, Any]]
) -> tirx.Stmt:
    """Each thread's elements, combined in registers; `found`: reductions before, and where their results are."""
    over = _over(problem, fold)
    kept = 3 - over
    groups = (problem.batch, problem.rows, problem.columns)
    names = variables(fold.value)
    batch = part.tile[0] * part.across[0] + part.thread[0]
    places = (None, part.row, part.column)

    def used(axis: Axis) -> bool:
        return any(axis.var.same_as(v) for v in names)

    def located(group: int, linear: PrimExpr, size: int) -> tuple[list, list, dict]:
        binder = Binder()
        position = binder.name("at", linear)
        inside = [tirx.LT(position, problem.extents[group])] if problem.extents[group] % size else []
        return binder.statements, inside, binder.locate(groups[group], position, used)

    def extent(group: int) -> int:
        return part.across[group] * part.each[group - 1]

    def of(x: PrimExpr) -> tirx.Stmt:
        place = places[kept](x)
        first, inside_batch, mapping = located(0, batch, part.across[0])
        second, inside_kept, more = located(kept, part.tile[kept] * extent(kept) + place, extent(kept))
        mapping = mapping | more
        number = part.thread[0] * extent(kept) + place
        results = {other.total: buffer[number] for other, buffer in found}

        def add(y: PrimExpr) -> tirx.Stmt:
            third, inside, last = located(over, part.tile[over] * extent(over) + places[over](y), extent(over))
            total = part.total(*((x, y) if over == 2 else (y, x)))
            of_row = part.of_row(part.thread[0], place if over == 2 else part.row(y))
            known = {problem.total: total, **of_row, **results}
            term = substitute_axes(fold.value, mapping | last | known)
            combined = tirx.BufferStore(own, fold.combine(own[0], term), [0])
            return sequence(*third, guarded([*inside_batch, *inside_kept, *inside], combined))

        return sequence(
            *first,
            *second,
            tirx.BufferStore(own, _initial(fold), [0]),
            loop("other", part.each[over - 1], add, "unrolled"),
            tirx.BufferStore(held, own[0], [number * (part.across[over] + 1) + part.thread[over]]),
        )

    return loop("kept", part.each[kept - 1], of, "unrolled")


def _joined(
    problem: Contraction,
    fold: Fold,
    part: ThreadShare,
    buffers: tuple[Any, ...],
    thread: PrimExpr,
    threads: int,
) -> tirx.Stmt:
    """What the threads of a tile have, combined in the order of the threads by one for each result, and stored.

    Where other reductions read it, it stays in shared memory, too.
    """
    held, own, *kept_results = buffers
    over = _over(problem, fold)
    kept = 3 - over
    size = part.across[kept] * part.each[kept - 1]
    results = part.across[0] * size
    expressions = [e for store in fold.stores for e in (*store.indices, store.value, store.where) if e is not None]
    names = [v for e in expressions for v in variables(e)]
    groups = (problem.batch, problem.rows, problem.columns)

    def turn(number: PrimExpr) -> tirx.Stmt:
        binder = Binder()
        at = binder.name("result", number * threads + thread)
        ends = [tirx.LT(at, results)] if results % threads else []
        mapping: dict[tirx.Var, PrimExpr] = {fold.total: own[0], fold.chunk: part.tile[over]}
        for group, place, count in (
            (0, tirx.floordiv(at, size), part.across[0]),
            (kept, tirx.floormod(at, size), size),
        ):
            position = binder.name("at", part.tile[group] * count + place)
            if problem.extents[group] % count:
                ends.append(tirx.LT(position, problem.extents[group]))
            mapping |= binder.locate(groups[group], position, lambda a: any(a.var.same_as(v) for v in names))
        base = at * (part.across[over] + 1)

        def add(other: PrimExpr) -> tirx.Stmt:
            return tirx.BufferStore(own, fold.combine(own[0], held[base + other + 1]), [0])

        more = part.across[over] - 1
        combined = [tirx.BufferStore(own, held[base], [0])]
        combined += [loop("other", more, add, "unrolled")] if more else []
        combined += [tirx.BufferStore(buffer, own[0], [at]) for buffer in kept_results]
        stores = []
        for store in fold.stores:
            where = [] if store.where is None else [substitute_axes(store.where, mapping)]
            value = substitute_axes(store.value, mapping)
            indices = [substitute_axes(index, mapping) for index in store.indices]
            stores.append(guarded(where, tirx.BufferStore(store.buffer, value, indices)))
        return sequence(*binder.statements, guarded(ends, sequence(*combined, *stores)))

    return loop("turn", ceil(results / threads), turn)


def _initial(fold: Fold) -> PrimExpr:
    return cast(fold.initial, dtype_of(fold.total))
