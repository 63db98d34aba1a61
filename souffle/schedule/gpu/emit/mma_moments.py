"""Moments of a tile's rows, taken of the results as they are written (paper §6.3).

As a strip of totals is read back from shared memory in rows, neighbouring lanes of a warp have the results of a row.
Each lane combines its own in order, then lanes exchange what they have by shuffles in a butterfly, after which
all of them have the moment of the row: the next moment may be one about the mean that this one gives, and what is made
of an element and the moments of its chunk is stored last. The order is fixed, so a result has the same bits in every
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.gpu.emit.contraction_statements import Binder, guarded, local_buffer, loop
from souffle.schedule.gpu.emit.folding import fold_problem
from souffle.schedule.gpu.emit.writeback import result_lanes
from souffle.schedule.gpu.forms.behind_contraction import Fold
from souffle.schedule.gpu.forms.contraction_expressions import Axis, substitute_axes
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.forms.row_values import replaced_parts
from souffle.tvm_compat import PrimExpr, cast, dtype_of, sequence, variables

__all__ = ["MOST_LANES", "RowMoments", "moments_refusal"]

MOST_LANES = 4
"""fp32 that one instruction reads of shared memory."""

_WARP = 32
_ALL_LANES = 2**32 - 1


def moments_refusal(problem: Contraction, tile: tuple[int, int, int]) -> Refused | None:
    """Why the tiles of a contraction on tensor cores have no moments, or tiles of this extent have not."""
    if not problem.folds:
        return None
    if not problem.normalizes:
        return Refused(f"it has {1 + len(problem.folds)} reduction blocks, one is needed")
    for fold in problem.folds:
        if fold.over != problem.columns or dtype_of(fold.total) != "float32":
            return Refused(f"{fold.name} reduces its rows, or is not in fp32")
    if not fold_problem(problem, tile):
        return Refused(f"a tile of {tile[2]} columns is none that the reductions behind start in")
    if tile[2] // result_lanes(problem, MOST_LANES, apart=True) > _WARP:
        return Refused(f"a warp does not hold {tile[2]} results of a row")
    return None


class RowMoments:
    """Writes the moments of a tile's rows.

    Parameters
    ----------
    problem : Contraction
    lanes : int
        Neighbouring results of a thread.
    columns : int
        Of a tile.
    """

    def __init__(self, problem: Contraction, lanes: int, columns: int) -> None:
        self.problem, self.lanes, self.vectors = problem, lanes, columns // lanes
        # What is stored is at hand: a moment of it does not work it out again.
        self._values = [tirx.Var(f"value_{n}", dtype_of(store.value)) for n, store in enumerate(problem.stores)]
        self._terms = [self._of_values(fold.value) for fold in problem.folds]
        self._last = [self._of_values(store.value) for store in problem.finished]
        self._made = [
            local_buffer(f"finished_{n}", lanes, str(store.buffer.dtype)) for n, store in enumerate(problem.finished)
        ]
        self._held = [local_buffer(f"moment_{n}", 1, "float32") for n, _ in enumerate(problem.folds)]

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Registers that it needs."""
        return (*self._held, *self._made)

    @property
    def kept(self) -> tuple[int, ...]:
        """Numbers of the outputs whose values it reads."""
        read = [v for term in (*self._terms, *self._last) for v in variables(term)]
        return tuple(n for n, value in enumerate(self._values) if any(value.same_as(v) for v in read))

    def _of_values(self, term: PrimExpr) -> PrimExpr:
        for value, store in zip(self._values, self.problem.stores, strict=True):
            # A store with a condition has no value elsewhere.
            term = replaced_parts(term, store.value, value) if store.where is None else term
        return term

    def write(
        self,
        tile: tuple[PrimExpr, PrimExpr, PrimExpr],
        extents: tuple[int, int, int],
        row: PrimExpr,
        vector: PrimExpr,
        sums: Any,
        values: Sequence[Any | None],
        of_row: Mapping[tirx.Var, PrimExpr],
    ) -> tirx.Stmt | None:
        """The statements, which all lanes of a warp come to, with neighbouring results of rows.

        Parameters
        ----------
        tile : tuple of expression
            Which tile it is, along batch, rows, columns.
        extents : tuple of int
            Of a tile, along the same.
        row, vector : expression
            The thread's row in the tile, and its vector of results in it.
        sums, values : buffer
            The thread's totals, and what it made of them for each output.
        of_row : mapping
            What stands for the variables of the row.
        """
        problem = self.problem
        if not problem.folds:
            return None
        binder = Binder()
        mapping: dict[tirx.Var, PrimExpr] = dict(of_row)
        inside: list[PrimExpr] = []
        last: Axis = problem.columns[-1]
        positions = (tile[0], tile[1] * extents[1] + row, tile[2] * self.vectors + vector)
        read = [v for e in self._expressions() for v in variables(e)]
        groups = (problem.batch, problem.rows, problem.columns)
        for axes, linear, extent, size, width in zip(
            groups, positions, problem.extents, extents, (1, 1, self.lanes), strict=False
        ):
            position = binder.name("at", linear)
            if extent % size:
                inside.append(tirx.LT(position, extent // width))
            mapping |= binder.locate(axes, position, lambda a: any(a.var.same_as(v) for v in read), width, 0)

        def here(lane: PrimExpr) -> dict[tirx.Var, PrimExpr]:
            found = mapping | {problem.total: sums[lane]}
            if last.var in found:
                found[last.var] = found[last.var] + lane
            held = zip(self._values, values, strict=True)
            return found | {value: buffer[lane] for value, buffer in held if buffer is not None}

        statements: list[tirx.Stmt] = []
        for fold, term, own in zip(problem.folds, self._terms, self._held, strict=True):

            def add(lane: PrimExpr, fold: Fold = fold, term: PrimExpr = term, own: Any = own) -> tirx.Stmt:
                return tirx.BufferStore(own, fold.combine(own[0], substitute_axes(term, here(lane))), [0])

            statements.append(tirx.BufferStore(own, cast(fold.initial, "float32"), [0]))
            statements.append(guarded(inside, loop("lane", self.lanes, add, "unrolled")))
            statements += self._exchanged(fold, own)
            mapping[fold.total] = own[0]
            first = [*inside, tirx.EQ(vector, 0)]
            statements.append(guarded(first, self._stored(fold, mapping | {fold.chunk: tile[2]})))
        statements += [guarded(inside, self._finished(number, here)) for number in range(len(self._last))]
        return sequence(*binder.statements, *statements)

    def _finished(self, number: int, here: Callable[[PrimExpr], Mapping[tirx.Var, PrimExpr]]) -> tirx.Stmt:
        """What is made of the thread's elements and the moments of their chunk."""
        store, value, made = self.problem.finished[number], self._last[number], self._made[number]

        def collect(lane: PrimExpr) -> tirx.Stmt:
            return tirx.BufferStore(made, substitute_axes(value, here(lane)), [lane])

        def write(lane: PrimExpr) -> tirx.Stmt:
            return tirx.BufferStore(store.buffer, made[lane], [substitute_axes(i, here(lane)) for i in store.indices])

        where = [] if store.where is None else [substitute_axes(store.where, here(tirx.IntImm("int32", 0)))]
        stored = loop("lane", self.lanes, write, "vectorized")
        return guarded(where, sequence(loop("lane", self.lanes, collect, "unrolled"), stored))

    def _expressions(self) -> list[PrimExpr]:
        stores = [*(store for fold in self.problem.folds for store in fold.stores), *self.problem.finished]
        parts = [e for s in stores for e in (*s.indices, s.value, s.where) if e is not None]
        return [*self._terms, *self._last, *parts]

    def _exchanged(self, fold: Fold, own: Any) -> list[tirx.Stmt]:
        """What the lanes of a row have, combined."""
        statements, distance = [], self.vectors // 2
        while distance:
            mask = tirx.const(_ALL_LANES, "uint32")
            other = tirx.call_intrin("float32", "tirx.tvm_warp_shuffle_xor", mask, own[0], distance, _WARP, _WARP)
            statements.append(tirx.BufferStore(own, fold.combine(own[0], other), [0]))
            distance //= 2
        return statements

    def _stored(self, fold: Fold, mapping: Mapping[tirx.Var, PrimExpr]) -> tirx.Stmt:
        stores = []
        for store in fold.stores:
            where = [] if store.where is None else [substitute_axes(store.where, mapping)]
            indices = [substitute_axes(index, mapping) for index in store.indices]
            stores.append(
                guarded(where, tirx.BufferStore(store.buffer, substitute_axes(store.value, mapping), indices))
            )
        return sequence(*stores)
