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

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Range, TensorLoad

from souffle.schedule.gpu.expressions import (
    Axis,
    NotAContraction,
    bounded,
    buffer_loads,
    cast,
    count_nodes,
    depends,
    dtype_of,
    narrow_indices,
    substitute_axes,
)
from souffle.schedule.gpu.operands import narrow_operand, separate, split_term, straighten
from souffle.tvm_compat import PrimExpr, const_int

__all__ = ["Contraction", "Operand", "Store", "canonical_contraction"]

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
class Store:
    """One output: ``buffer[indices] = value`` where ``where`` holds (everywhere if it is ``None``)."""

    buffer: Any
    indices: tuple[PrimExpr, ...]
    value: PrimExpr
    where: PrimExpr | None


@dataclass(frozen=True, eq=False)
class Contraction:
    """The canonical form. Groups of axes are fused row-major, the first axis outermost; unit axes are dropped.

    Attributes
    ----------
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
        Over the axes and ``total``.
    """

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

    @property
    def dtype(self) -> str:
        """Type of the accumulator."""
        return str(self.total.ty.dtype)

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """Batch, rows, columns, inner."""
        return tuple(prod(a.extent for a in group) for group in (self.batch, self.rows, self.columns, self.inner))


@dataclass(frozen=True, eq=False)
class _Block:
    name: str
    spatial: tuple[Axis, ...]
    reduction: tuple[Axis, ...]
    buffer: Any
    indices: tuple[PrimExpr, ...]
    value: PrimExpr
    initial: PrimExpr | None


def _blocks(func: tirx.PrimFunc) -> list[_Block]:
    root = func.body.block if hasattr(func.body, "block") else None
    if root is None:
        raise NotAContraction("the function has no root block")
    nests = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    blocks = []
    for nest in nests:
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
            _Block(block.name_hint, spatial, reduction, store.buffer, tuple(store.indices), store.value, initial)
        )
    return blocks


class _Inliner:
    """Substitutes the values of injective blocks into reads of their buffers."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, _Block, PrimExpr]] = []

    def define(self, block: _Block, value: PrimExpr) -> None:
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


def _index_vars(block: _Block) -> None:
    """Demand that a block writes each element at its own axes."""
    spatial = [axis.var for axis in block.spatial]
    if len(block.indices) != len(spatial) or any(
        not isinstance(index, tirx.Var) or not any(index.same_as(var) for var in spatial) for index in block.indices
    ):
        raise NotAContraction(f"block {block.name} does not write at its own axes")


def _fresh_axes(axes: Sequence[Axis]) -> tuple[dict[tirx.Var, PrimExpr], list[Axis]]:
    """32-bit stand-ins for `axes`, a constant 0 for a unit axis; and the non-unit ones."""
    mapping: dict[tirx.Var, PrimExpr] = {}
    fresh = []
    for axis in axes:
        if axis.extent == 1:
            mapping[axis.var] = tirx.IntImm("int32", 0)
            continue
        new = Axis(tirx.Var(str(axis.var.name), "int32"), axis.extent)
        mapping[axis.var] = new.var
        fresh.append(new)
    return mapping, fresh


def canonical_contraction(func: tirx.PrimFunc) -> Contraction:
    """Bring a function of one sum of products and injective blocks around it to canonical form.

    Raises
    ------
    NotAContraction
        With the reason, naming the block.
    """
    blocks = _blocks(func)
    reductions = [b for b in blocks if b.reduction]
    if len(reductions) != 1:
        raise NotAContraction(f"it has {len(reductions)} reduction blocks, one is needed")
    main = reductions[0]
    intermediate = list(func.body.block.alloc_buffers)

    def is_output(block: _Block) -> bool:
        return not any(block.buffer.same_as(b) for b in intermediate)

    for block in blocks:
        _index_vars(block)
    inliner = _Inliner()
    after = False
    dependent: list[_Block] = []
    values: dict[int, PrimExpr] = {}
    term_value = main.value
    for block in blocks:
        if block is main:
            term_value = inliner.expand(main.value)
            after = True
            continue
        value = inliner.expand(block.value)
        inliner.define(block, value)
        reads_total = after and any(load.source.same_as(main.buffer) for load in buffer_loads(value))
        if is_output(block):
            if not reads_total:
                raise NotAContraction(f"output block {block.name} does not depend on the reduction {main.name}")
            dependent.append(block)
            values[id(block)] = value

    mapping, axes = _fresh_axes(main.spatial)
    reduce_mapping, inner = _fresh_axes(main.reduction)
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
    for block in dependent:
        stores.append(_store_of(block, values[id(block)], main, total, where, extents, everything))
    if not stores:
        raise NotAContraction("no output depends on the reduction")

    _demand_short_indices((left, right), stores, (batch, rows, columns, inner))
    innermost = _innermost(stores[0], axes)
    if innermost is not None and any(axis is innermost for axis in rows):
        rows, columns, operands = columns, rows, operands[::-1]
    return Contraction(
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
    )


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


def _innermost(store: Store, axes: Sequence[Axis]) -> Axis | None:
    """The axis by which neighbouring elements of the output differ."""
    for index in reversed(store.indices):
        used = [axis for axis in axes if depends(index, axis)]
        if used:
            return used[-1]
    return None


def _store_of(
    block: _Block,
    value: PrimExpr,
    main: _Block,
    total: tirx.Var,
    where: Sequence[PrimExpr],
    extents: Sequence[int],
    analyzer: tvm.sym.Analyzer,
) -> Store:
    """One output block as a function of the place ``where`` in the reduction's buffer."""
    mapping, axes = _fresh_axes(block.spatial)
    local = bounded(axes)
    value = narrow_indices(substitute_axes(value, mapping), local)
    reads = [load for load in buffer_loads(value) if load.source.same_as(main.buffer)]
    places = [[local.simplify(index) for index in load.indices] for load in reads]
    for place in places[1:]:
        if not all(local.can_prove_equal(a, b) for a, b in zip(places[0], place, strict=True)):
            raise NotAContraction(f"block {block.name} reads several elements of {main.name} for one of its own")
    value = tvm_ffi.structural_map(
        value, (TensorLoad, lambda load: total if load.source.same_as(main.buffer) else load)
    )
    if any(load.source.same_as(main.buffer) for load in buffer_loads(value)):
        raise NotAContraction(f"block {block.name} reads {main.name} at an index that depends on data")
    inverse, conditions = _inverse(block, axes, places[0], where, extents, local)
    whole = {axis.var: analyzer.simplify(e) for axis, e in zip(axes, inverse, strict=True)}
    place_of = {v: mapping[v] for v in (axis.var for axis in block.spatial)}
    indices = tuple(analyzer.simplify(substitute_axes(place_of[v], whole)) for v in block.indices)
    final = analyzer.simplify(substitute_axes(value, whole))
    guard = None
    for condition in conditions:
        guard = condition if guard is None else tirx.And(guard, condition)
    return Store(block.buffer, indices, final, guard)


def _inverse(
    block: _Block,
    axes: Sequence[Axis],
    place: Sequence[PrimExpr],
    where: Sequence[PrimExpr],
    extents: Sequence[int],
    analyzer: tvm.sym.Analyzer,
) -> tuple[list[PrimExpr], list[PrimExpr]]:
    """The element of `block` that reads the reduction at `where`, and the conditions under which there is one."""
    conditions: list[PrimExpr] = []
    maps: list[PrimExpr] = []
    points: list[PrimExpr] = []
    covered = 1
    for index, target, extent in zip(place, where, extents, strict=True):
        bound = analyzer.const_int_bound(index)
        low, high = int(bound.min_value), int(bound.max_value)
        if low < 0 or high >= extent:
            raise NotAContraction(f"block {block.name} reads the reduction out of its bounds")
        if low > 0:
            conditions.append(tirx.GE(target, low))
        if high < extent - 1:
            conditions.append(tirx.LT(target, high + 1))
        if high > low:
            maps.append(analyzer.simplify(index - low))
            points.append(target - low if low else target)
            covered *= high - low + 1
    if covered != prod(axis.extent for axis in axes):
        raise NotAContraction(f"block {block.name} does not read each element of its region of the reduction once")
    if not axes:
        return [], conditions
    # Each axis read alone, in any order, is the usual case; it needs no solver.
    direct = {
        i: next((p for m, p in zip(maps, points, strict=True) if m.same_as(a.var)), None) for i, a in enumerate(axes)
    }
    if all(p is not None for p in direct.values()):
        return [direct[i] for i in range(len(axes))], conditions
    try:
        index_map = tirx.IndexMap([a.var for a in axes], maps, None)
        inverse = index_map.inverse([Range(0, a.extent) for a in axes])
    except (ValueError, RuntimeError) as error:
        raise NotAContraction(
            f"block {block.name} reads the reduction through a map that cannot be inverted"
        ) from error
    return list(inverse.map_indices(points)), conditions
