"""A stage of two sums of products with work on rows between them, such as attention.

::

    S[b, m, n] = sum over k of left[b, m, k] * right[b, n, k]
    x[b, m, n] = S, or f(S, r); then r[b, m] = combine over n of g(x, r); again, any number of times
    O[b, m, v] = sum over n of h(x, r)[b, m, n] * other[b, n, v]

Theorem behind it. Let every block between the two reductions read `S`, or what has taken its place, at one place for
each element of its own, through an invertible map, and reduce all columns and nothing else. Then all of it is a
function of ``(b, m, n)`` and of values of the row ``(b, m)``; and if the second reduction sums over the columns of the
first, a tile of whole rows needs no other tile: neither `S` nor what is made of it leaves the block that computes it.
The axes of the second product are those of the first, put through the inverse of the map by which it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import tvm
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.decision import Refused
from souffle.schedule.gpu.forms.behind_contraction import Block, Element, Store, fresh_axes, inverted, store_of, term_of
from souffle.schedule.gpu.forms.contraction_expressions import (
    Axis,
    NotAContraction,
    bounded,
    depends,
    narrow_indices,
    substitute_axes,
)
from souffle.schedule.gpu.forms.matrix_product import Contraction, demand_short_indices
from souffle.schedule.gpu.forms.row_steps import RowReduction, RowStep
from souffle.schedule.gpu.forms.running_rows import RunningRows, read_running_rows
from souffle.schedule.gpu.forms.stage_blocks import Inliner, OutputBlocks, demand_own_axes, reads_block, stage_blocks
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.forms.two_operands import Factored, Operand, factored_reduction
from souffle.schedule.gpu.rule import NORMALIZES
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, variables

__all__ = ["ChainedProducts", "read_chained_products"]


@dataclass(frozen=True, eq=False)
class ChainedProducts:
    """The canonical form.

    Attributes
    ----------
    first : Contraction
        Without stores. Its total is what stands for an element in the expressions of rows.
    steps : tuple of RowStep
    second : Contraction
        Its batch and rows are those of the first, its inner axes the first's columns. Its left operand is a value over
        these, the element, and results of rows.
    running : RunningRows or Refused
        How rows are reduced along with the second product, or why they cannot be.
    """

    first: Contraction
    steps: tuple[RowStep, ...]
    second: Contraction
    running: RunningRows | Refused

    @property
    def reductions(self) -> tuple[RowReduction, ...]:
        """The reductions of all steps."""
        return tuple(reduction for step in self.steps for reduction in step.reductions)


def read_chained_products(stage: StageForms) -> ChainedProducts | Refused:
    """The two products of a stage and what lies between, or what the stage lacks of it."""
    if NORMALIZES in stage.func.attrs:
        return Refused("it has a product that normalizes, which is tiled alone")
    try:
        blocks = stage_blocks(stage.func)
        reductions = [block for block in blocks if block.reduction]
        if len(reductions) < 2:
            raise NotAContraction(f"it has {len(reductions)} reduction blocks, two products are needed")
        for block in blocks:
            demand_own_axes(block)
        return _either_way(stage.func, blocks, reductions[0], reductions[-1])
    except NotAContraction as reason:
        return Refused(str(reason))


def _either_way(func: tirx.PrimFunc, blocks: Sequence[Block], first: Block, last: Block) -> ChainedProducts:
    """The form with the rows of either operand of the first product, and with or without keeping what rows become."""
    outputs = OutputBlocks(func)
    inliner = Inliner()
    for block in blocks[: blocks.index(first)]:
        if block in outputs:
            raise NotAContraction(f"output block {block.name} does not depend on the product {first.name}")
        inliner.define(block, inliner.expand(block.value))
    factored = factored_reduction(first, inliner.expand(first.value))
    if not factored.product_sum or not (factored.rows or factored.columns):
        raise NotAContraction(f"block {first.name} is no product of rows and columns")
    reasons: list[NotAContraction] = []
    for swapped in (False, True):
        for keep in (True, False):
            try:
                return _Reader(func, blocks, first, last, outputs, inliner.copy(), factored, swapped, keep).read()
            except NotAContraction as reason:
                reasons.append(reason)
    raise reasons[0]


@dataclass(eq=False)
class _Reader:
    """Reads the form with one choice of what are rows."""

    func: tirx.PrimFunc
    blocks: Sequence[Block]
    first: Block
    last: Block
    outputs: OutputBlocks
    inliner: Inliner
    factored: Factored
    swapped: bool
    keep: bool
    results: list[tuple[Block, tirx.Var, tuple[PrimExpr, ...]]] = field(default_factory=list)
    steps: list[RowStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        factored = self.factored
        self.batch, self.rows, self.columns = list(factored.batch), list(factored.rows), list(factored.columns)
        self.operands = factored.operands
        if self.swapped:
            self.rows, self.columns, self.operands = self.columns, self.rows, self.operands[::-1]
        self.known = bounded(factored.axes)
        self.element = Element(self.first, factored.total, factored.where)

    def read(self) -> ChainedProducts:
        if not self.columns:
            raise NotAContraction(f"block {self.first.name} has one column for each row")
        between = self.blocks[self.blocks.index(self.first) + 1 : self.blocks.index(self.last)]
        for block in (self.first, *between):
            if block in self.outputs:
                raise NotAContraction(f"block {block.name} is needed outside of the stage")
        for block in between:
            value = self.inliner.expand(block.value)
            if block.reduction:
                self._reduce(block, value)
            elif self.keep and self._is_worth_keeping(block):
                self._update(block, value)
            else:
                self.inliner.define(block, value)
        return self._second()

    def _is_worth_keeping(self, block: Block) -> bool:
        """Whether a block has an element for each of the product's, and several others read it."""
        if prod(axis.extent for axis in block.spatial) != prod(axis.extent for axis in self.factored.axes):
            return False
        readers = [other for other in self.blocks if other is not block and reads_block(other.value, block)]
        return len(readers) > 1 and dtype_of(block.value) == dtype_of(self.factored.total)

    def _reduce(self, block: Block, value: PrimExpr) -> None:
        result = tirx.Var(f"row_{len(self.results)}", dtype_of(value))
        combine, term = term_of(block, value, result)
        kept, spatial = fresh_axes(block.spatial)
        reduced, inner = fresh_axes(block.reduction)
        term, inverse = self._on_elements(block, substitute_axes(term, {**kept, **reduced}), [*spatial, *inner])
        for axis in spatial:
            if any(depends(inverse[axis.var], column) for column in self.columns):
                raise NotAContraction(f"block {block.name} does not reduce whole rows of {self.first.name}")
        for axis in inner:
            if any(depends(inverse[axis.var], other) for other in (*self.batch, *self.rows)):
                raise NotAContraction(f"block {block.name} reduces more than a row of {self.first.name}")
        reduction = RowReduction(block.name, result, combine, block.initial, term)
        independent = self.steps and not any(
            v.same_as(r.result) for r in self.steps[-1].reductions for v in variables(term)
        )
        if independent:
            self.steps[-1] = RowStep(self.steps[-1].update, (*self.steps[-1].reductions, reduction))
        else:
            self.steps.append(RowStep(None, (reduction,)))
        where = tuple(substitute_axes(kept[index], inverse) for index in block.indices)
        self.results.append((block, result, where))

    def _update(self, block: Block, value: PrimExpr) -> None:
        mapping, axes = fresh_axes(block.spatial)
        value, inverse = self._on_elements(block, substitute_axes(value, mapping), axes)
        self.steps.append(RowStep(value, ()))
        where = tuple(substitute_axes(mapping[index], inverse) for index in block.indices)
        self.element = Element(block, self.element.total, where)

    def _on_elements(
        self, block: Block, value: PrimExpr, axes: Sequence[Axis]
    ) -> tuple[PrimExpr, dict[tirx.Var, PrimExpr]]:
        """A value, and the axes that it is over, both over those of the first product and the results of rows."""
        value, inverse = inverted(block, narrow_indices(value, bounded(axes)), axes, self.element, self.factored.axes)

        def result_of(load: TensorLoad) -> PrimExpr:
            for source, result, where in self.results:
                if load.source.same_as(source.buffer):
                    if not all(self.known.can_prove_equal(a, b) for a, b in zip(load.indices, where, strict=True)):
                        raise NotAContraction(f"block {block.name} reads {source.name} of another row")
                    return result
            return load

        value = self.known.simplify(structural_map(value, (TensorLoad, result_of)))
        self._demand_known(block, value)
        return value, inverse

    def _demand_known(self, block: Block, value: PrimExpr) -> None:
        """Demand that a value reads nothing that only the stage has."""
        for other in self.blocks:
            if other not in self.outputs and reads_block(value, other):
                raise NotAContraction(f"block {block.name} reads {other.name} beside what is kept of its row")

    def _second(self) -> ChainedProducts:
        last = self.last
        factored = factored_reduction(last, self.inliner.expand(last.value))
        reads = [any(self.element.is_read_by(load) for load in buffer_loads(o.value)) for o in factored.operands]
        if not factored.product_sum or reads not in ([True, False], [False, True]):
            raise NotAContraction(f"block {last.name} is no product of the rows of {self.first.name} with a matrix")
        mine, other = factored.operands if reads[0] else factored.operands[::-1]
        columns = [axis for axis in factored.axes if not depends(mine.value, axis)]
        own = [axis for axis in factored.axes if depends(mine.value, axis)]
        value, inverse = self._on_elements(last, mine.value, [*own, *factored.inner])
        for axis in own:
            if any(depends(inverse[axis.var], column) for column in self.columns):
                raise NotAContraction(f"block {last.name} does not sum over whole rows of {self.first.name}")
        for axis in factored.inner:
            if any(depends(inverse[axis.var], row) for row in (*self.batch, *self.rows)):
                raise NotAContraction(f"block {last.name} sums over more than a row of {self.first.name}")
        if not columns or any(not depends(other.value, axis) for axis in columns):
            raise NotAContraction(f"block {last.name} is no product of rows and columns")
        known = bounded([*self.factored.axes, *columns])
        other_value = known.simplify(substitute_axes(other.value, inverse))
        self._demand_known(last, other_value)
        # What the other operand tells rows apart by, a tile has to have one of.
        moved = [axis for axis in self.rows if depends(other_value, axis)]
        batch, rows = [*self.batch, *moved], [axis for axis in self.rows if axis not in moved]
        if moved and not rows:
            raise NotAContraction(f"block {last.name} multiplies each row of {self.first.name} by a matrix of its own")
        where = tuple(known.simplify(substitute_axes(index, inverse)) for index in factored.where)
        element = Element(last, factored.total, where)
        groups = tuple(map(tuple, (batch, rows, self.columns)))
        left, right = self.operands
        first = Contraction(
            self.func,
            self.first.name,
            *groups,
            tuple(self.factored.inner),
            left,
            right,
            self.factored.total,
            self.factored.update,
            self.first.initial,
            True,
            (),
        )
        second = Contraction(
            self.func,
            last.name,
            groups[0],
            groups[1],
            tuple(columns),
            groups[2],
            Operand(value, mine.dtype, mine.leaf),
            Operand(other_value, other.dtype, other.leaf),
            factored.total,
            factored.update,
            last.initial,
            True,
            self._stores(element, known),
        )
        expressions = (left.value, right.value, value, other_value)
        demand_short_indices(expressions, second.stores, (*groups, columns, self.factored.inner))
        running = read_running_rows(self.factored.total, self.steps, value, rows, self.columns)
        return ChainedProducts(first, tuple(self.steps), second, running)

    def _stores(self, element: Element, known: tvm.sym.Analyzer) -> tuple[Store, ...]:
        last = self.last
        stores = [Store(last.buffer, element.where, element.total, None)] if last in self.outputs else []
        for block in self.blocks[self.blocks.index(last) + 1 :]:
            value = self.inliner.expand(block.value)
            if block not in self.outputs:
                self.inliner.define(block, value)
                continue
            store = store_of(block, value, element, known)
            self._demand_known(block, store.value)
            stores.append(store)
        if not stores:
            raise NotAContraction("no output depends on the second product")
        return tuple(stores)
