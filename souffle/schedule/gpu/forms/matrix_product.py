"""A stage around one sum of products, as ``total[b, m, n] = sum over k of left[b, m, k] * right[b, n, k]``.

Theorem behind it. Let the reduction be ``C[s] = sum over r of L(s, r) * R(s, r)``. Sort the axes of ``s`` by which
factor depends on them: both (batch), only L (rows), only R (columns). Fusing each class, and the axes of ``r``, into
one axis is a bijection of the iteration domain, and neither factor reads an axis outside its classes, so the result is
a batched matrix product. A convolution becomes the product of the weights with the image-to-column matrix, which is
never stored: the index arithmetic stays inside ``L`` and ``R``.

Blocks ahead of the reduction are substituted into ``L`` and ``R``. Blocks after it must read the reduction at one place
``h(v)`` for their element ``v``, with ``h`` invertible on its image; they are then functions of ``(b, m, n)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.decision import Refused
from souffle.schedule.gpu.forms.behind_contraction import Block, Fold, Store, fold_of, fresh_axes, store_of
from souffle.schedule.gpu.forms.expressions import (
    Axis,
    NotAContraction,
    bounded,
    count_nodes,
    depends,
    narrow_indices,
    substitute_axes,
)
from souffle.schedule.gpu.forms.operands import narrow_operand, separate, split_term, straighten
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import STARTS_IN_TILES
from souffle.tvm_compat import PrimExpr, buffer_loads, cast, const_int, dtype_of, statements_of

__all__ = ["Contraction", "Operand", "Store", "canonical_contraction", "read_contraction"]

_MAX_EXPRESSION_NODES = 4000
"""Beyond it substituting the neighbours into the reduction would cost more compile time than a kernel of their own."""


@dataclass(frozen=True, eq=False)
class Operand:
    """One factor of the products.

    Attributes
    ----------
    value : expression
        Over the variables of the axes it depends on; reads global buffers only.
    dtype : str
        Its type, before a widening cast that ``Contraction.update`` applies instead.
    leaf : Var
        What stands for it in ``Contraction.update``.
    """

    value: PrimExpr
    dtype: str
    leaf: tirx.Var


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

    def refused(self, reason: str) -> Refused:
        """A rule's refusal of it."""
        return Refused(f"block {self.name}: {reason}")

    @property
    def dtype(self) -> str:
        """Type of the accumulator."""
        return str(self.total.ty.dtype)

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """Batch, rows, columns, inner."""
        return tuple(prod(a.extent for a in group) for group in (self.batch, self.rows, self.columns, self.inner))


def _blocks(func: tirx.PrimFunc) -> list[Block]:
    root = func.body.block if hasattr(func.body, "block") else None
    if root is None:
        raise NotAContraction("the function has no root block")
    blocks = []
    for nest in statements_of(root.body):
        bound = {}
        while isinstance(nest, tirx.For):
            bound[nest.loop_var] = nest
            nest = nest.body
        if not hasattr(nest, "block"):
            raise NotAContraction("a nest is not loops around one block")
        block = nest.block
        if not isinstance(block.body, tirx.BufferStore):
            raise NotAContraction(f"block {block.name_hint} stores more than one value")
        kinds: dict[bool, list[Axis]] = {True: [], False: []}
        for axis in block.iter_vars:
            kinds[axis.iter_type == tirx.IterVar.CommReduce].append(Axis(axis.var, const_int(axis.dom.extent)))
        store = block.body
        initial = block.init.value if isinstance(block.init, tirx.BufferStore) else None
        spatial, reduction = tuple(kinds[False]), tuple(kinds[True])
        blocks.append(
            Block(block.name_hint, spatial, reduction, store.buffer, tuple(store.indices), store.value, initial)
        )
    return blocks


class _Inliner:
    """Substitutes the values of injective blocks into reads of their buffers."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, Block, PrimExpr]] = []

    def define(self, block: Block, value: PrimExpr) -> None:
        self._known.append((block.buffer, block, value))

    def expand(self, expression: PrimExpr) -> PrimExpr:
        def inline(load: TensorLoad) -> PrimExpr:
            for buffer, block, value in self._known:
                if load.source.same_as(buffer):
                    mapping = dict(zip(block.indices, load.indices, strict=True))
                    return substitute_axes(value, mapping)
            return load

        result = tvm_ffi.structural_map(expression, (TensorLoad, inline))
        if count_nodes(result) > _MAX_EXPRESSION_NODES:
            raise NotAContraction("substituting the blocks around the reduction makes its expression too long")
        return result


def _index_vars(block: Block) -> None:
    """Demand that a block writes each element at its own axes."""
    spatial = [axis.var for axis in block.spatial]
    if len(block.indices) != len(spatial) or any(
        not isinstance(index, tirx.Var) or not any(index.same_as(var) for var in spatial) for index in block.indices
    ):
        raise NotAContraction(f"block {block.name} does not write at its own axes")


def read_contraction(stage: StageForms) -> Contraction | Refused:
    """The sum of products of a stage; where it has the attribute ``STARTS_IN_TILES``, with reductions behind it."""
    try:
        return canonical_contraction(stage.func, folds=STARTS_IN_TILES in stage.func.attrs)
    except NotAContraction as reason:
        return Refused(str(reason))


def canonical_contraction(func: tirx.PrimFunc, *, folds: bool = False) -> Contraction:
    """Bring a function of one sum of products and injective blocks around it to canonical form.

    Parameters
    ----------
    func : PrimFunc
    folds : bool
        Whether reductions over elements of the sum of products may stand behind it.

    Raises
    ------
    NotAContraction
        With the reason, naming the block.
    """
    blocks = _blocks(func)
    reductions = [b for b in blocks if b.reduction]
    if len(reductions) != 1 and not (folds and reductions):
        raise NotAContraction(f"it has {len(reductions)} reduction blocks, one is needed")
    main = reductions[0]
    intermediate = list(func.body.block.alloc_buffers)

    def is_output(block: Block) -> bool:
        return not any(block.buffer.same_as(b) for b in intermediate)

    for block in blocks:
        _index_vars(block)
    inliner = _Inliner()
    after = False
    dependent: list[Block] = []
    folded: list[tuple[Block, PrimExpr]] = []
    values: dict[int, PrimExpr] = {}
    term_value = main.value
    for block in blocks:
        if block is main:
            term_value = inliner.expand(main.value)
            after = True
            continue
        value = inliner.expand(block.value)
        if block.reduction:
            folded.append((block, value))
            continue
        inliner.define(block, value)
        sources = (main.buffer, *(fold.buffer for fold, _ in folded))
        reads_total = after and any(load.source.same_as(one) for load in buffer_loads(value) for one in sources)
        if is_output(block):
            if not reads_total:
                raise NotAContraction(f"output block {block.name} does not depend on the reduction {main.name}")
            dependent.append(block)
            values[id(block)] = value

    mapping, axes = fresh_axes(main.spatial)
    reduce_mapping, inner = fresh_axes(main.reduction)
    analyzer = bounded([*axes, *inner])
    total = tirx.Var("total", dtype_of(main.value))

    def accumulate(load: TensorLoad) -> PrimExpr:
        return total if load.source.same_as(main.buffer) else load

    update = tvm_ffi.structural_map(term_value, (TensorLoad, accumulate))
    update = narrow_indices(substitute_axes(update, {**mapping, **reduce_mapping}), analyzer)
    if not isinstance(update, tirx.Add | tirx.Max | tirx.Min | tirx.Mul) or main.initial is None:
        raise NotAContraction(f"block {main.name} combines by {type(update).__name__}, not by sum, product, min or max")
    if update.b.same_as(total):
        combine, term = type(update), update.a
    elif update.a.same_as(total):
        combine, term = type(update), update.b
    else:
        raise NotAContraction(f"block {main.name} does not combine its total with one term")
    split = split_term(term, axes)
    wide = (dtype_of(split.left), dtype_of(split.right))
    left, right = (narrow_operand(e) for e in (split.left, split.right))
    left, right, separated, axes = separate(left, right, axes)
    (left, right), straightened, axes = straighten((left, right), axes)
    (left, right), _, inner = straighten((left, right), inner)
    separated = {v: substitute_axes(e, straightened) for v, e in separated.items()} | straightened

    groups: dict[tuple[bool, bool], list[Axis]] = {(x, y): [] for x in (True, False) for y in (True, False)}
    for axis in axes:
        groups[depends(left, axis), depends(right, axis)].append(axis)
    batch, rows, columns = groups[True, True], groups[True, False] + groups[False, False], groups[False, True]

    leaves = [tirx.Var(name, dtype_of(value)) for name, value in (("left", left), ("right", right))]
    wrapped = split.wrap(*(cast(leaf, dtype) for leaf, dtype in zip(leaves, wide, strict=True)))
    operands = [Operand(value, dtype_of(value), leaf) for value, leaf in zip((left, right), leaves, strict=True)]

    place = {axis.var: mapping[axis.var] for axis in main.spatial}
    where = [substitute_axes(place[v], separated) for v in main.indices]
    extents = [const_int(e) for e in main.buffer.shape]
    everything = bounded([*axes, *inner])
    stores = []
    if is_output(main):
        stores.append(Store(main.buffer, tuple(where), total, None))
    behind: dict[int, list[tuple[Block, PrimExpr]]] = {id(block): [] for block, _ in folded}
    for block in dependent:
        value = values[id(block)]
        of = next((f for f, _ in folded if any(load.source.same_as(f.buffer) for load in buffer_loads(value))), None)
        if of is not None:
            behind[id(of)].append((block, value))
            continue
        stores.append(store_of(block, value, main, total, where, extents, everything))
    parallel = (batch, rows, columns)
    started = [
        fold_of(block, value, behind[id(block)], main, total, where, parallel, is_output(block))
        for block, value in folded
    ]
    batch, rows, columns = _apart(started, batch, rows, columns)
    if not stores and not any(fold.stores for fold in started):
        raise NotAContraction("no output depends on the reduction")

    written = [*stores, *(store for fold in started for store in fold.stores)]
    read = [fold.value for fold in started]
    _demand_short_indices((left, right, *read), written, (batch, rows, columns, inner))
    innermost = _innermost(stores[0].indices if stores else where, axes)
    if innermost is not None and any(axis is innermost for axis in rows):
        rows, columns, operands = columns, rows, operands[::-1]
    return Contraction(
        func,
        main.name,
        tuple(batch),
        tuple(rows),
        tuple(columns),
        tuple(inner),
        operands[0],
        operands[1],
        total,
        combine(total, wrapped),
        main.initial,
        split.product and combine is tirx.Add,
        tuple(stores),
        tuple(started),
    )


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


def _demand_short_indices(
    operands: Sequence[PrimExpr], stores: Sequence[Store], groups: Sequence[Sequence[Axis]]
) -> None:
    """Kernels index in 32 bits."""
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
