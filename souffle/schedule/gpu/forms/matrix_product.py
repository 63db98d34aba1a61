"""A stage around one sum of products, as ``total[b, m, n] = sum over k of left[b, m, k] * right[b, n, k]``.

Theorem behind it. Let the reduction be ``C[s] = sum over r of L(s, r) * R(s, r)``. Sort the axes of ``s`` by which
factor depends on them: both (batch), only L (rows), only R (columns). Fusing each class, and the axes of ``r``, into
one axis is a bijection of the iteration domain, and neither factor reads an axis outside its classes, so the result is
a batched matrix product. A convolution becomes the product of the weights with the image-to-column matrix, which is
never stored: the index arithmetic stays inside ``L`` and ``R``.

Blocks ahead of the reduction are substituted into ``L`` and ``R``. Blocks after it must read the reduction at one place
``h(v)`` for their element ``v``, with ``h`` invertible on its image; they are then functions of ``(b, m, n)``.
Reductions that do not depend on it, where a normalization put them ahead of it, have to be of its rows
(:mod:`souffle.schedule.gpu.forms.row_values`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.gpu.forms.behind_contraction import Block, Element, Fold, Store, fold_of, store_of
from souffle.schedule.gpu.forms.contraction_expressions import Axis, NotAContraction, bounded, depends
from souffle.schedule.gpu.forms.row_values import NO_ROW_VALUES, RowValues
from souffle.schedule.gpu.forms.stage_blocks import Inliner, OutputBlocks, demand_own_axes, reads_block, stage_blocks
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.forms.two_operands import Operand, factored_reduction
from souffle.schedule.gpu.rule import NORMALIZES, STARTS_IN_TILES
from souffle.tvm_compat import PrimExpr, buffer_loads, const_int

__all__ = ["Contraction", "Store", "canonical_contraction", "demand_short_indices", "read_contraction"]


@dataclass(frozen=True, eq=False)
class Contraction:
    """The canonical form. Groups of axes are fused row-major, the first axis outermost; unit axes are dropped.

    Attributes
    ----------
    func : PrimFunc
        The stage.
    name : str
        The reduction block's name.
    batch, rows, columns, inner : tuple of Axis
        The last axis of ``columns`` (or else of ``batch``) is the innermost of the first output.
    left, right : Operand
        Over batch, rows, inner and over batch, columns, inner.
    total : Var
        The accumulator in ``update`` and in the values of ``stores``.
    update : expression
        The new total, over ``total`` and the leaves.
    initial : expression
        The first total.
    product_sum : bool
        Whether ``update`` is ``total + left * right`` up to casts, so that zero operands change nothing.
    stores : tuple of Store
        Over the axes and ``total``; none where only reductions of the elements are needed.
    folds : tuple of Fold
        Reductions over elements that start in the tile that has them. What each reduces is all of ``rows`` or all of
        ``columns``; axes that it keeps of these stand in ``batch``, whether or not both operands depend on them.
    row_values : RowValues
        What is worked out for each row ahead of the sum; in ``left``, ``stores`` and ``folds`` by its variables.
    finished : tuple of Store
        Outputs over the axes, ``total`` and the totals of chunks in ``folds``: what is made of an element when the
        reductions of its chunk are done.
    packed : tuple of str
        Types of the 8-bit integers of which four are in each element of the left and of the right operand; none where
        elements are numbers (:mod:`souffle.schedule.gpu.forms.packed_bytes`).
    """

    func: tirx.PrimFunc
    name: str
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    left: Operand
    right: Operand
    total: tirx.Var
    update: PrimExpr
    initial: PrimExpr
    product_sum: bool
    stores: tuple[Store, ...]
    folds: tuple[Fold, ...] = ()
    row_values: RowValues = NO_ROW_VALUES
    finished: tuple[Store, ...] = ()
    packed: tuple[str, ...] = ()

    @property
    def normalizes(self) -> bool:
        """Whether its rows need something ahead of it, or its reductions are moments, one of which may read another."""
        return NORMALIZES in self.func.attrs

    def refused(self, reason: str) -> Refused:
        """A rule's refusal of it."""
        return Refused(f"block {self.name}: {reason}")

    @property
    def dtype(self) -> str:
        """Type of the accumulator."""
        return str(self.total.ty.dtype)

    @cached_property
    def extents(self) -> tuple[int, int, int, int]:
        """Batch, rows, columns, inner."""
        return tuple(prod(a.extent for a in group) for group in (self.batch, self.rows, self.columns, self.inner))


def read_contraction(stage: StageForms) -> Contraction | Refused:
    """The sum of products of a stage; where it has the attribute ``STARTS_IN_TILES``, with reductions behind it.

    Where it has ``NORMALIZES``, that says which of its reductions the sum of products is: others may be ahead of it.
    """
    attributes = stage.func.attrs
    name = str(attributes[NORMALIZES]) if NORMALIZES in attributes else None
    try:
        return canonical_contraction(stage.func, folds=STARTS_IN_TILES in attributes, name=name)
    except NotAContraction as reason:
        return Refused(str(reason))


def canonical_contraction(func: tirx.PrimFunc, *, folds: bool = False, name: str | None = None) -> Contraction:
    """Bring a function of one sum of products and injective blocks around it to canonical form.

    Parameters
    ----------
    func : PrimFunc
    folds : bool
        Whether reductions over elements of the sum of products may stand behind it.
    name : str, optional
        Of its block; else it is the first reduction. The others that do not depend on it are of its rows then.

    Raises
    ------
    NotAContraction
        With the reason, naming the block.
    """
    blocks = stage_blocks(func)
    reductions = [b for b in blocks if b.reduction]
    if len(reductions) != 1 and not (folds and reductions):
        raise NotAContraction(f"it has {len(reductions)} reduction blocks, one is needed")
    main = reductions[0] if name is None else next((b for b in reductions if b.name == name), None)
    if main is None:
        raise NotAContraction(f"block {name} is no reduction")
    for block in blocks:
        demand_own_axes(block)
    outputs = OutputBlocks(func)
    around = _inlined(blocks, main, outputs, normalizes=name is not None)
    factored = factored_reduction(main, around.update)
    element = Element(main, factored.total, factored.where)
    analyzer = bounded([*factored.axes, *factored.inner])
    stores = [Store(main.buffer, element.where, element.total, None)] if main in outputs else []
    behind: dict[Block, list[tuple[Block, PrimExpr]]] = {block: [] for block, _ in around.folded}
    after: list[tuple[Block, PrimExpr]] = []
    for block, value in around.behind:
        fold = next((fold for fold, _ in around.folded if reads_block(value, fold)), None)
        if fold is None:
            stores.append(store_of(block, value, element, analyzer))
        elif name is not None and reads_block(value, main):
            after.append((block, value))
        else:
            behind[fold].append((block, value))
    parallel = (factored.batch, factored.rows, factored.columns)
    started: list[Fold] = []
    for block, value in around.folded:
        before = list(zip((b for b, _ in around.folded), started, strict=False)) if name is not None else []
        started.append(fold_of(block, value, behind[block], element, parallel, block in outputs, before))
    pairs = list(zip((block for block, _ in around.folded), started, strict=True))
    finished = [store_of(block, value, element, analyzer, pairs) for block, value in after]
    batch, rows, columns = _apart(started, *parallel)
    if not stores and not any(fold.stores for fold in started):
        raise NotAContraction("no output depends on the reduction")
    left, right = factored.operands
    written = [*stores, *finished, *(store for fold in started for store in fold.stores)]
    read = (left.value, right.value, *(fold.value for fold in started))
    demand_short_indices(read, written, (batch, rows, columns, factored.inner))
    innermost = _innermost(stores[0].indices if stores else element.where, factored.axes)
    if innermost is not None and any(axis is innermost for axis in rows):
        rows, columns, left, right = columns, rows, right, left
    problem = Contraction(
        func,
        main.name,
        tuple(batch),
        tuple(rows),
        tuple(columns),
        tuple(factored.inner),
        left,
        right,
        element.total,
        factored.update,
        main.initial,
        factored.product_sum,
        tuple(stores),
        tuple(started),
        finished=tuple(finished),
    )
    return _with_row_values(problem, around.ahead) if around.ahead else problem


def _with_row_values(problem: Contraction, ahead: Sequence[tuple[Block, PrimExpr]]) -> Contraction:
    """A contraction with variables in the place of what it reads of reductions ahead of it."""
    stores, folds = (*problem.stores, *problem.finished), problem.folds
    expressions = [problem.left.value, *(s.value for s in stores), *(f.value for f in folds)]
    if any(reads_block(problem.right.value, block) for block, _ in ahead):
        raise NotAContraction("a reduction ahead of the contraction is read along its columns")
    values, (left, *rest) = RowValues.of(ahead, (*problem.batch, *problem.rows), problem.inner, expressions)
    written = tuple(replace(s, value=v) for s, v in zip(stores, rest, strict=False))
    return replace(
        problem,
        left=replace(problem.left, value=left),
        stores=written[: len(problem.stores)],
        finished=written[len(problem.stores) :],
        folds=tuple(replace(f, value=v) for f, v in zip(folds, rest[len(stores) :], strict=True)),
        row_values=values,
    )


@dataclass(frozen=True, eq=False)
class _Inlined:
    """A reduction with the blocks around it substituted into each other, as far as no reduction lies between.

    Attributes
    ----------
    update : expression
        What the reduction stores.
    ahead : tuple of pairs of Block and expression
        The reductions that do not depend on it, and what they store.
    folded : tuple of pairs of Block and expression
        The other reductions, and what they store.
    behind : tuple of pairs of Block and expression
        The outputs that depend on a reduction.
    """

    update: PrimExpr
    ahead: tuple[tuple[Block, PrimExpr], ...]
    folded: tuple[tuple[Block, PrimExpr], ...]
    behind: tuple[tuple[Block, PrimExpr], ...]


def _inlined(blocks: Sequence[Block], main: Block, outputs: OutputBlocks, *, normalizes: bool) -> _Inlined:
    inliner = Inliner()
    update = None
    ahead: list[tuple[Block, PrimExpr]] = []
    folded: list[tuple[Block, PrimExpr]] = []
    behind: list[tuple[Block, PrimExpr]] = []
    for block in blocks:
        value = inliner.expand(block.value)
        if block is main:
            update = value
        elif block.reduction:
            depends_on_main = any(reads_block(value, b) for b in (main, *(f for f, _ in folded)))
            (ahead if normalizes and not depends_on_main else folded).append((block, value))
        else:
            inliner.define(block, value)
            if block in outputs:
                if update is None or not any(reads_block(value, b) for b in (main, *(f for f, _ in folded))):
                    raise NotAContraction(f"output block {block.name} does not depend on the reduction {main.name}")
                behind.append((block, value))
    return _Inlined(update, tuple(ahead), tuple(folded), tuple(behind))


def _apart(
    folds: Sequence[Fold], batch: list[Axis], rows: list[Axis], columns: list[Axis]
) -> tuple[list[Axis], list[Axis], list[Axis]]:
    """The groups, with what a fold keeps of the rows or columns that it reduces in the batch."""
    for fold in folds:
        group = next((one for one in (rows, columns) if fold.over[0] in one), ())
        moved = [axis for axis in group if axis not in fold.over]
        batch = [*batch, *moved]
        rows, columns = ([axis for axis in one if axis not in moved] for one in (rows, columns))
    for fold in folds:
        if [*fold.over] not in (rows, columns):
            raise NotAContraction(f"block {fold.name} reduces other axes than another reduction of the same elements")
    return batch, rows, columns


def demand_short_indices(
    operands: Sequence[PrimExpr], stores: Sequence[Store], groups: Sequence[Sequence[Axis]]
) -> None:
    """Demand that a kernel can index in 32 bits.

    Parameters
    ----------
    operands : sequence of expression
        What it reads, but for what stores read.
    stores : sequence of Store
    groups : sequence of sequences of Axis
        Each of which it counts in one.

    Raises
    ------
    NotAContraction
    """
    expressions = (*operands, *(store.value for store in stores))
    buffers = [load.source for e in expressions for load in buffer_loads(e)] + [store.buffer for store in stores]
    sizes = [prod(const_int(e) for e in buffer.shape) for buffer in buffers]
    sizes += [prod(axis.extent for axis in group) for group in groups]
    if max(sizes) >= 2**31:
        raise NotAContraction(f"{max(sizes)} elements are too many for 32-bit indices")


def _innermost(indices: Sequence[PrimExpr], axes: Sequence[Axis]) -> Axis | None:
    """The axis by which neighbouring elements of the output differ."""
    for index in reversed(indices):
        used = [axis for axis in axes if depends(index, axis)]
        if used:
            return used[-1]
    return None
