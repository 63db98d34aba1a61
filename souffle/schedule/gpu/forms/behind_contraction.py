"""What stands behind a contraction: blocks of its elements, and reductions that start in the block that has them.

A block behind the sum is a function of the element that it reads, if the map from its own elements to those can be
inverted. The same holds of a reduction over those elements with its data-parallel and its reduced axes taken together;
what is reduced has then to be a whole group of the canonical form, rows or columns, of which a tile has some in a row
(paper §6.3: memory-intensive TEs take the tiles of the compute-intensive producer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Range, TensorLoad

from souffle.index.inverse import inverse_map
from souffle.schedule.gpu.forms.contraction_expressions import (
    Axis,
    NotAContraction,
    bounded,
    depends,
    narrow_indices,
    substitute_axes,
)
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, buffer_loads, const_int, dtype_of, is_branch, variables

__all__ = ["Block", "Element", "Fold", "Store", "fold_of", "fresh_axes", "inverted", "store_of", "term_of"]


@dataclass(frozen=True, eq=False)
class Store:
    """One output: ``buffer[indices] = value`` where ``where`` holds (everywhere if it is ``None``)."""

    buffer: Any
    indices: tuple[PrimExpr, ...]
    value: PrimExpr
    where: PrimExpr | None


@dataclass(frozen=True, eq=False)
class Block:
    """A block of a stage as TensorIR has it: ``buffer[indices] = value`` for all values of its axes."""

    name: str
    spatial: tuple[Axis, ...]
    reduction: tuple[Axis, ...]
    buffer: Any
    indices: tuple[PrimExpr, ...]
    value: PrimExpr
    initial: PrimExpr | None

    @cached_property
    def loads(self) -> tuple[TensorLoad, ...]:
        """All reads in its value; repeated ones repeat."""
        return tuple(buffer_loads(self.value))

    @cached_property
    def _sources(self) -> frozenset[Any]:
        return frozenset(load.source for load in self.loads)

    def reads(self, other: Block) -> bool:
        """Whether it reads what another block writes."""
        return other.buffer in self._sources


@dataclass(frozen=True, eq=False)
class Element:
    """An element of a reduction, as what stands behind it reads it.

    Attributes
    ----------
    block : Block
        The reduction.
    total : Var
        What stands for the element.
    where : tuple of expression
        Its place in the block's buffer, over the axes of the canonical form.
    """

    block: Block
    total: tirx.Var
    where: tuple[PrimExpr, ...]

    def is_read_by(self, load: TensorLoad) -> bool:
        """Whether a load reads the reduction's buffer."""
        return load.source.same_as(self.block.buffer)


@dataclass(frozen=True, eq=False)
class Fold:
    """A reduction over elements of the contraction, of which each tile combines what it has.

    Attributes
    ----------
    name : str
        The reduction block's name.
    over : tuple of Axis
        What is reduced: all rows or all columns of the canonical form.
    size : int or None
        Extent that a tile has to have along them: the chunks of the reduction are its tiles. ``None``: one tile has to
        hold all.
    chunk : Var
        Which chunk a tile is; in the indices of ``stores`` where there are chunks.
    total : Var
        The accumulator in the values of ``stores``.
    combine : type
        ``tirx.Add``, ``tirx.Mul``, ``tirx.Max`` or ``tirx.Min``.
    initial : expression
        Its identity.
    value : expression
        What an element contributes, over the axes, the contraction's own total, and totals of earlier reductions of the
        same chunks.
    stores : tuple of Store
        Over the axes that are kept, ``chunk`` and ``total``.
    """

    name: str
    over: tuple[Axis, ...]
    size: int | None
    chunk: tirx.Var
    total: tirx.Var
    combine: type
    initial: PrimExpr
    value: PrimExpr
    stores: tuple[Store, ...]


def fresh_axes(axes: Sequence[Axis]) -> tuple[dict[tirx.Var, PrimExpr], list[Axis]]:
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


def store_of(
    block: Block,
    value: PrimExpr,
    element: Element,
    analyzer: tvm.sym.Analyzer,
    folds: Sequence[tuple[Block, Fold]] = (),
) -> Store:
    """One output block as a function of an element of the reduction.

    Parameters
    ----------
    block : Block
    value : expression
        What it stores, with the blocks between it and the contraction substituted.
    element : Element
        Of the contraction.
    analyzer : Analyzer
        That knows the axes of the canonical form.
    folds : sequence of pairs of Block and Fold
        Reductions behind the contraction that the value may read, each where the element's own chunk is.

    Raises
    ------
    NotAContraction
        If there is no such function.
    """
    mapping, axes = fresh_axes(block.spatial)
    local = bounded(axes)
    value, place = _at_one_place(block, narrow_indices(substitute_axes(value, mapping), local), element, local)
    inverse, conditions = _inverse(block, axes, place, element, local)
    whole = {axis.var: analyzer.simplify(e) for axis, e in zip(axes, inverse, strict=True)}
    value = _with_own_chunks(block, value, whole, folds, analyzer)
    place_of = {v: mapping[v] for v in (axis.var for axis in block.spatial)}
    indices = tuple(analyzer.simplify(substitute_axes(place_of[v], whole)) for v in block.indices)
    final = analyzer.simplify(substitute_axes(value, whole))
    guard = None
    for condition in conditions:
        guard = condition if guard is None else tirx.And(guard, condition)
    return Store(block.buffer, indices, final, guard)


def _with_own_chunks(
    block: Block,
    value: PrimExpr,
    whole: dict[tirx.Var, PrimExpr],
    folds: Sequence[tuple[Block, Fold]],
    analyzer: tvm.sym.Analyzer,
) -> PrimExpr:
    """A value with the totals of reductions for what it reads of them, which has to be where its element belongs."""
    for load in buffer_loads(value):
        found = next(((own, fold) for own, fold in folds if load.source.same_as(own.buffer)), None)
        if found is None:
            continue
        own, fold = found
        stored = next((store for store in fold.stores if store.buffer.same_as(own.buffer)), None)
        if stored is None or fold.size is None:
            raise NotAContraction(f"block {block.name} reads {own.name}, which has no chunks that are stored")
        linear: PrimExpr = tirx.IntImm("int32", 0)
        for axis in fold.over:
            linear = linear * axis.extent + axis.var
        chunk = {fold.chunk: tirx.floordiv(linear, fold.size)}
        expected = [substitute_axes(index, chunk) for index in stored.indices]
        places = [substitute_axes(index, whole) for index in load.indices]
        if not all(analyzer.can_prove_equal(a, b) for a, b in zip(expected, places, strict=True)):
            raise NotAContraction(f"block {block.name} reads {own.name} of another chunk than its element's")

    def total(load: TensorLoad) -> PrimExpr:
        return next((fold.total for own, fold in folds if load.source.same_as(own.buffer)), load)

    return structural_map(value, (TensorLoad, total)) if folds else value


def _at_one_place(
    block: Block, value: PrimExpr, element: Element, local: tvm.sym.Analyzer
) -> tuple[PrimExpr, list[PrimExpr]]:
    """A value with the element's total for what it reads of the reduction, and where it reads it."""
    main = element.block
    reads = [load for load in buffer_loads(value) if element.is_read_by(load)]
    places = [[local.simplify(index) for index in load.indices] for load in reads]
    if not places:
        raise NotAContraction(f"block {block.name} does not read {main.name}")
    for place in places[1:]:
        if not all(local.can_prove_equal(a, b) for a, b in zip(places[0], place, strict=True)):
            raise NotAContraction(f"block {block.name} reads several elements of {main.name} for one of its own")
    value = structural_map(
        value, (TensorLoad, lambda load: element.total if element.is_read_by(load) else load)
    )
    if any(element.is_read_by(load) for load in buffer_loads(value)):
        raise NotAContraction(f"block {block.name} reads {main.name} at an index that depends on data")
    return value, places[0]


def fold_of(
    block: Block,
    update: PrimExpr,
    behind: Sequence[tuple[Block, PrimExpr]],
    element: Element,
    groups: Sequence[Sequence[Axis]],
    kept: bool,
    before: Sequence[tuple[Block, Fold]] = (),
) -> Fold:
    """A reduction behind the contraction, over the axes of the canonical form.

    Parameters
    ----------
    block : Block
    update : expression
        Its value, with the blocks between it and the contraction substituted.
    behind : sequence of pairs of Block and expression
        Output blocks that are functions of the reduction, itself not among them.
    element : Element
        Of the contraction.
    groups : sequence of sequences of Axis
        Batch, rows and columns of the canonical form.
    kept : bool
        Whether the reduction's own result is an output.
    before : sequence of pairs of Block and Fold
        Reductions whose results this one may read: of each the one at its own place.

    Raises
    ------
    NotAContraction
        If it is no such reduction.
    """
    folded = tirx.Var("folded", dtype_of(update))
    combine, term = term_of(block, _with_totals(block, update, before), folded)
    reasons = []
    for read in (_chunked, _whole):
        try:
            tiled = read(block, term, element, groups)
        except NotAContraction as reason:
            reasons.append(str(reason))
            continue
        for fold in (fold for _, fold in before if any(fold.total.same_as(v) for v in variables(tiled.value))):
            if (*tiled.over, tiled.size) != (*fold.over, fold.size):
                raise NotAContraction(f"block {block.name} has other chunks than {fold.name}, which it reads")
        result = Element(block, folded, tiled.indices)
        stores = [Store(block.buffer, tiled.indices, folded, None)] if kept else []
        for output, value in behind:
            if any(element.is_read_by(load) for load in buffer_loads(value)):
                raise NotAContraction(f"block {output.name} reads both {element.block.name} and {block.name}")
            stores.append(store_of(output, value, result, tiled.analyzer))
        return Fold(
            block.name, tiled.over, tiled.size, tiled.chunk, folded, combine, block.initial, tiled.value, tuple(stores)
        )
    raise NotAContraction(reasons[-1])


def _with_totals(block: Block, update: PrimExpr, before: Sequence[tuple[Block, Fold]]) -> PrimExpr:
    """What a reduction stores, with the totals of earlier ones for what it reads of them at its own place."""

    for load in buffer_loads(update):
        for other, _ in before:
            own = all(a.same_as(b) for a, b in zip(load.indices, block.indices, strict=False))
            if load.source.same_as(other.buffer) and not (own and len(load.indices) == len(block.indices)):
                raise NotAContraction(f"block {block.name} reads {other.name} at another place than its own")

    def total(load: TensorLoad) -> PrimExpr:
        return next((fold.total for other, fold in before if load.source.same_as(other.buffer)), load)

    return structural_map(update, (TensorLoad, total))


def term_of(block: Block, update: PrimExpr, total: tirx.Var) -> tuple[type, PrimExpr]:
    """How a reduction combines, and what; `total` stands for what it has so far.

    Raises
    ------
    NotAContraction
        If it does not combine its total with one term.
    """
    update = structural_map(
        update, (TensorLoad, lambda load: total if load.source.same_as(block.buffer) else load)
    )
    if not isinstance(update, tirx.Add | tirx.Max | tirx.Min | tirx.Mul) or block.initial is None:
        raise NotAContraction(
            f"block {block.name} combines by {type(update).__name__}, not by sum, product, min or max"
        )
    if update.b.same_as(total):
        return type(update), update.a
    if update.a.same_as(total):
        return type(update), update.b
    raise NotAContraction(f"block {block.name} does not combine its total with one term")


@dataclass(frozen=True, eq=False)
class _Tiled:
    """How tiles of the contraction have what a reduction combines; see :class:`Fold`.

    ``indices`` is where its results are; ``analyzer`` knows the axes that these and ``value`` are over.
    """

    over: tuple[Axis, ...]
    size: int | None
    chunk: tirx.Var
    value: PrimExpr
    indices: tuple[PrimExpr, ...]
    analyzer: tvm.sym.Analyzer


def _whole(block: Block, term: PrimExpr, element: Element, groups: Sequence[Sequence[Axis]]) -> _Tiled:
    """A reduction that one tile holds."""
    axes = [axis for group in groups for axis in group]
    kept, spatial = fresh_axes(block.spatial)
    reduced, inner = fresh_axes(block.reduction)
    block_axes = [*spatial, *inner]
    value, inverse = inverted(block, substitute_axes(term, {**kept, **reduced}), block_axes, element, axes)
    over = _over(block, [inverse[axis.var] for axis in inner], [inverse[axis.var] for axis in spatial], groups)
    indices = tuple(substitute_axes(kept[v], inverse) for v in block.indices)
    return _Tiled(over, None, tirx.Var("chunk", "int32"), value, indices, bounded(axes))


def _chunked(block: Block, term: PrimExpr, element: Element, groups: Sequence[Sequence[Axis]]) -> _Tiled:
    """A reduction of chunks: its first data-parallel axis says which one, the reduced axis which element of it."""
    axes = [axis for group in groups for axis in group]
    inner = [axis for axis in block.reduction if axis.extent > 1]
    if len(inner) != 1 or not block.spatial or block.spatial[0].extent == 1:
        raise NotAContraction(f"block {block.name} has no chunks")
    first, size, count = block.spatial[0], inner[0].extent, block.spatial[0].extent
    kept, spatial = fresh_axes(block.spatial[1:])
    reduced, _ = fresh_axes([axis for axis in block.reduction if axis.extent == 1])
    all_ = Axis(tirx.Var("element", "int32"), count * size)
    decoded = {first.var: tirx.floordiv(all_.var, size), inner[0].var: tirx.floormod(all_.var, size)}
    term = substitute_axes(term, {**kept, **reduced, **decoded})
    term = narrow_indices(term, bounded([*spatial, all_]))
    # Beyond the end of the last chunk stands the identity.
    if is_branch(term) and tvm_ffi.structural_equal(term.args[2], block.initial):
        condition = term.args[0]
        if isinstance(condition, tirx.LT) and condition.a.same_as(all_.var) and isinstance(condition.b, tirx.IntImm):
            all_, term = Axis(all_.var, int(condition.b.value)), term.args[1]
    if -(-all_.extent // size) != count:
        raise NotAContraction(f"block {block.name} has chunks beyond its elements")
    value, inverse = inverted(block, term, [*spatial, all_], element, axes)
    over = _over(block, [inverse[all_.var]], [inverse[axis.var] for axis in spatial], groups)
    linear: PrimExpr = tirx.IntImm("int32", 0)
    for axis in over:
        linear = linear * axis.extent + axis.var
    analyzer = bounded(axes)
    if not analyzer.can_prove_equal(linear, inverse[all_.var]):
        raise NotAContraction(f"block {block.name} takes its elements in another order than tiles have them")
    chunk = tirx.Var("chunk", "int32")
    analyzer.bind(chunk, Range(0, count))
    places = {**kept, first.var: chunk}
    indices = tuple(substitute_axes(places[v], inverse) for v in block.indices)
    return _Tiled(over, size, chunk, value, indices, analyzer)


def inverted(
    block: Block, term: PrimExpr, block_axes: Sequence[Axis], element: Element, axes: Sequence[Axis]
) -> tuple[PrimExpr, dict[tirx.Var, PrimExpr]]:
    """What an element contributes, and the block's axes, both over those of the canonical form."""
    local, known = bounded(block_axes), bounded(axes)
    value, place = _at_one_place(block, narrow_indices(term, local), element, local)
    inverse, conditions = _inverse(block, block_axes, place, element, local)
    if conditions:
        raise NotAContraction(f"block {block.name} reads a part of {element.block.name}")
    inverted = {axis.var: known.simplify(e) for axis, e in zip(block_axes, inverse, strict=True)}
    return known.simplify(substitute_axes(value, inverted)), inverted


def _over(
    block: Block, reduced: Sequence[PrimExpr], kept: Sequence[PrimExpr], groups: Sequence[Sequence[Axis]]
) -> tuple[Axis, ...]:
    """The axes that are reduced: rows alone or columns alone, none of which is kept too."""
    parts = [tuple(axis for axis in group if any(depends(e, axis) for e in reduced)) for group in groups]
    over = tuple(axis for some in parts for axis in some)
    if not over or any(depends(e, axis) for e in kept for axis in over):
        raise NotAContraction(f"block {block.name} does not reduce whole axes of the contraction")
    if over not in parts[1:]:
        raise NotAContraction(f"block {block.name} does not reduce rows alone or columns alone")
    return over


def _inverse(
    block: Block, axes: Sequence[Axis], place: Sequence[PrimExpr], element: Element, analyzer: tvm.sym.Analyzer
) -> tuple[list[PrimExpr], list[PrimExpr]]:
    """What of `block` reads an element of the reduction, and the conditions under which there is something."""
    conditions: list[PrimExpr] = []
    maps: list[PrimExpr] = []
    points: list[PrimExpr] = []
    covered = 1
    extents = [const_int(extent) for extent in element.block.buffer.shape]
    for index, target, extent in zip(place, element.where, extents, strict=True):
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
    inverse = inverse_map([(a.var, a.extent) for a in axes], maps)
    if inverse is None:
        raise NotAContraction(f"block {block.name} reads the reduction through a map that cannot be inverted")
    return inverse(points), conditions
