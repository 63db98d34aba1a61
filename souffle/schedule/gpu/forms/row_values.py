"""Values that a row of a contraction has: reductions of its own ahead of the contraction, and what is made of them.

A stage may hold reductions that its contraction's left operand reads, or what stands behind it, each at one place for
all of a row: the mean of a normalized row, its deviation (paper §6.3). They are then functions of the axes of the rows,
so that a tile works them out once for each of its rows, ahead of the contraction. In the expressions of the canonical
form a variable stands for each largest part that depends on nothing but the row::

    left[m, k] = (x[m, k] - s[m] / n) * rsqrt(v[m] / n + e)      s, v: reductions of the stage
    left[m, k] = (x[m, k] - mean) * scale                        mean = s[m] / n, scale = rsqrt(v[m] / n + e)

A part may vary from chunk to chunk of the row, as one does that a normalization of chunks needs: what is left of the
inner axis in it is the number ``k // n`` of its chunk.

Legal because a reduction of the stage has the same value wherever it is read, and the parts read nothing else that
varies within the row, or within a chunk of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.index.operations import ARITHMETIC
from souffle.schedule.gpu.forms.behind_contraction import Block, fresh_axes, term_of
from souffle.schedule.gpu.forms.contraction_expressions import (
    Axis,
    NotAContraction,
    bounded,
    count_nodes,
    depends,
    narrow_indices,
    substitute_axes,
)
from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, variables

__all__ = ["NO_ROW_VALUES", "Chunks", "RowTotal", "RowValue", "RowValues", "replaced_parts"]

_PARTS = (*ARITHMETIC, Call, tirx.Cast, tirx.Select, TensorLoad)

_LONGEST = 128
"""Terms of a reduction that one thread adds up for a row; more would leave the others waiting for it."""


@dataclass(frozen=True, eq=False)
class RowTotal:
    """A reduction with one result for each row.

    Attributes
    ----------
    total : Var
        Stands for the result, in later reductions and in values.
    axes : tuple of Axis
        What it reduces.
    combine : type
        ``tirx.Add``, ``tirx.Mul``, ``tirx.Max`` or ``tirx.Min``.
    initial : expression
    value : expression
        What it combines, over the axes of batch and rows, its own and totals of reductions before it.
    """

    total: tirx.Var
    axes: tuple[Axis, ...]
    combine: type
    initial: PrimExpr
    value: PrimExpr

    @property
    def terms(self) -> int:
        """How many it combines."""
        return prod(axis.extent for axis in self.axes)


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks of a row.

    Attributes
    ----------
    axis : Axis
        Which chunk it is.
    size : int
        Neighbours along the inner axis that are one chunk.
    """

    axis: Axis
    size: int


@dataclass(frozen=True, eq=False)
class RowValue:
    """What is made of the reductions of a row: `value`, over the axes of batch and rows and totals; `var` stands for it
    in the contraction. With `chunks` there is one for each chunk of the row, and `value` is over their axis as well.
    """

    var: tirx.Var
    value: PrimExpr
    chunks: Chunks | None = None

    @property
    def count(self) -> int:
        """How many of them a row has."""
        return 1 if self.chunks is None else self.chunks.axis.extent


@dataclass(frozen=True, eq=False)
class RowValues:
    """All that is worked out for the rows of a tile, ahead of its contraction; the reductions in order."""

    reductions: tuple[RowTotal, ...] = ()
    values: tuple[RowValue, ...] = ()

    @property
    def chunks(self) -> Chunks | None:
        """The chunks of rows for which some values are."""
        return next((value.chunks for value in self.values if value.chunks is not None), None)

    @property
    def count(self) -> int:
        """Values of a row."""
        return sum(value.count for value in self.values)

    @classmethod
    def of(
        cls,
        ahead: Sequence[tuple[Block, PrimExpr]],
        row_axes: Sequence[Axis],
        inner: Sequence[Axis],
        expressions: Sequence[PrimExpr],
    ) -> tuple[RowValues, list[PrimExpr]]:
        """The values, and the expressions with their variables.

        Parameters
        ----------
        ahead : sequence of pairs of Block and expression
            The reductions ahead of the contraction, and what they store.
        row_axes : sequence of Axis
            Batch and rows.
        inner : sequence of Axis
        expressions : sequence of expression
            That read them.

        Raises
        ------
        NotAContraction
            If one of them is read at a place that varies within a row, or cannot be worked out so.
        """
        chunks = _chunks_of(inner, expressions)
        if chunks is not None:
            number = tirx.floordiv(inner[0].var, chunks.size)
            expressions = [replaced_parts(e, number, chunks.axis.var) for e in expressions]
        finder = _Finder(ahead, row_axes, chunks)
        while True:
            parts = [part for e in expressions for part in finder.parts(e)]
            if not parts:
                break
            part = max(parts, key=count_nodes)
            var = finder.value(part)
            expressions = [replaced_parts(e, part, var) for e in expressions]
        if chunks is not None:
            expressions = [substitute_axes(e, {chunks.axis.var: number}) for e in expressions]
        for expression in expressions:
            finder.demand_none(expression)
        return cls(tuple(finder.reductions), tuple(finder.values)), list(expressions)


NO_ROW_VALUES = RowValues()
"""Of a contraction that has nothing ahead of it."""


class _Finder:
    def __init__(
        self, ahead: Sequence[tuple[Block, PrimExpr]], row_axes: Sequence[Axis], chunks: Chunks | None
    ) -> None:
        self._ahead = ahead
        self._row_axes = row_axes
        self._chunks = chunks
        self._known: list[tuple[TensorLoad, tirx.Var]] = []
        self.reductions: list[RowTotal] = []
        self.values: list[RowValue] = []

    def parts(self, expression: PrimExpr) -> list[PrimExpr]:
        """The parts of an expression that read the reductions and vary with the row and its chunk alone."""
        found: list[PrimExpr] = []

        def see(part: PrimExpr) -> None:
            if "float" in dtype_of(part) and self._reads(part) and self._of_row(part):
                found.append(part)

        structural_walk(expression, (_PARTS, see))
        return found

    def value(self, part: PrimExpr) -> tirx.Var:
        """A variable for one of the parts."""
        var = tirx.Var(f"row_value_{len(self.values)}", dtype_of(part))
        apart = self._chunks is not None and depends(part, self._chunks.axis)
        self.values.append(RowValue(var, self._over_totals(part), self._chunks if apart else None))
        return var

    def demand_none(self, expression: PrimExpr) -> None:
        """Demand that nothing of the reductions is left in an expression."""
        for load in buffer_loads(expression):
            block = self._source(load)
            if block is not None:
                raise NotAContraction(f"block {block.name} is read at places that vary within a row")

    def _source(self, load: TensorLoad) -> Block | None:
        return next((block for block, _ in self._ahead if load.source.same_as(block.buffer)), None)

    def _reads(self, part: PrimExpr) -> bool:
        return any(self._source(load) is not None for load in buffer_loads(part))

    def _of_row(self, part: PrimExpr) -> bool:
        axes = (*self._row_axes, *(() if self._chunks is None else (self._chunks.axis,)))
        known = (*(axis.var for axis in axes), *(load.source for load in buffer_loads(part)))
        return all(any(v.same_as(other) for other in known) for v in variables(part))

    def _over_totals(self, expression: PrimExpr) -> PrimExpr:
        """An expression with the totals of reductions in the place of reads of them."""

        # Not within TVM's walk, which makes errors of its own of what is raised there.
        for load in buffer_loads(expression):
            if self._source(load) is not None:
                self._total(load)

        def total(load: TensorLoad) -> PrimExpr:
            known = self._known_total(load)
            return load if known is None else known

        return structural_map(expression, (TensorLoad, total))

    def _known_total(self, load: TensorLoad) -> tirx.Var | None:
        return next((var for known, var in self._known if tvm_ffi.structural_equal(known, load)), None)

    def _total(self, load: TensorLoad) -> tirx.Var:
        """The variable for a reduction that is read at some place."""
        known = self._known_total(load)
        if known is not None:
            return known
        block, update = next((b, value) for b, value in self._ahead if load.source.same_as(b.buffer))
        mapping = {axis.var: index for axis, index in zip(block.spatial, _places(block, load), strict=True)}
        own, axes = fresh_axes(block.reduction)
        total = tirx.Var(f"row_total_{len(self._known)}", dtype_of(load))
        combine, term = term_of(block, update, total)
        analyzer = bounded([*self._row_axes, *axes])
        value = self._over_totals(narrow_indices(substitute_axes(term, {**mapping, **own}), analyzer))
        self._known.append((load, total))
        reduction = RowTotal(total, tuple(axes), combine, block.initial, value)
        if reduction.terms > _LONGEST:
            raise NotAContraction(f"block {block.name} has {reduction.terms} terms a row, more than {_LONGEST}")
        self.reductions.append(reduction)
        return total


def _chunks_of(inner: Sequence[Axis], expressions: Sequence[PrimExpr]) -> Chunks | None:
    """The chunks of rows that expressions tell apart, if all are of one size, which divides the inner axis."""
    if len(inner) != 1:
        return None
    sizes = set()

    def see(node: tirx.FloorDiv) -> None:
        if node.a.same_as(inner[0].var) and isinstance(node.b, tirx.IntImm):
            sizes.add(int(node.b.value))

    for expression in expressions:
        structural_walk(expression, (tirx.FloorDiv, see))
    if len(sizes) != 1 or inner[0].extent % min(sizes):
        return None
    size = sizes.pop()
    return Chunks(Axis(tirx.Var("chunk", "int32"), inner[0].extent // size), size)


def _places(block: Block, load: TensorLoad) -> list[PrimExpr]:
    """The values of a block's data-parallel axes at the element that is read; a block writes at its own axes."""
    indices = list(load.indices)
    return [indices[next(n for n, v in enumerate(block.indices) if v.same_as(axis.var))] for axis in block.spatial]


def replaced_parts(expression: PrimExpr, part: PrimExpr, var: tirx.Var) -> PrimExpr:
    """An expression with a variable in the place of each of its parts that equals `part`."""

    def replace(node: PrimExpr) -> PrimExpr:
        return var if tvm_ffi.structural_equal(node, part) else node

    rule: tuple[type, Callable[[PrimExpr], PrimExpr]] = (type(part), replace)
    return structural_map(expression, rule)
