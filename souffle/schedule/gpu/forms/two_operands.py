"""A reduction as a sum over two operands, its axes sorted by the operands that depend on them."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import TensorLoad

from souffle.schedule.gpu.forms.behind_contraction import Block, fresh_axes, term_of
from souffle.schedule.gpu.forms.contraction_expressions import (
    Axis,
    bounded,
    depends,
    narrow_indices,
    substitute_axes,
)
from souffle.schedule.gpu.forms.term_operands import narrow_operand, separate, split_term, straighten
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, cast, dtype_of

__all__ = ["Factored", "Operand", "factored_reduction"]


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
class Factored:
    """A reduction as a sum over two operands; as in :class:`Contraction`, before its rows or columns may change places.

    Attributes
    ----------
    axes : list of Axis
        Batch, rows and columns in the order of the reduction's own axes.
    where : tuple of expression
        The place of an element in the reduction's buffer.
    """

    axes: list[Axis]
    batch: list[Axis]
    rows: list[Axis]
    columns: list[Axis]
    inner: list[Axis]
    operands: tuple[Operand, Operand]
    total: tirx.Var
    update: PrimExpr
    product_sum: bool
    where: tuple[PrimExpr, ...]


def factored_reduction(main: Block, update: PrimExpr) -> Factored:
    """The axes of a reduction sorted by the operands that depend on them."""
    mapping, axes = fresh_axes(main.spatial)
    reduce_mapping, inner = fresh_axes(main.reduction)
    total = tirx.Var("total", dtype_of(main.value))
    update = structural_map(
        update, (TensorLoad, lambda load: total if load.source.same_as(main.buffer) else load)
    )
    update = narrow_indices(substitute_axes(update, {**mapping, **reduce_mapping}), bounded([*axes, *inner]))
    combine, term = term_of(main, update, total)
    split = split_term(term, axes)
    wide = (dtype_of(split.left), dtype_of(split.right))
    left, right = (narrow_operand(factor) for factor in (split.left, split.right))
    left, right, separated, axes = separate(left, right, axes)
    (left, right), straightened, axes = straighten((left, right), axes)
    (left, right), _, inner = straighten((left, right), inner)
    separated = {var: substitute_axes(parts, straightened) for var, parts in separated.items()} | straightened
    groups: dict[tuple[bool, bool], list[Axis]] = {(x, y): [] for x in (True, False) for y in (True, False)}
    for axis in axes:
        groups[depends(left, axis), depends(right, axis)].append(axis)
    leaves = [tirx.Var(name, dtype_of(value)) for name, value in (("left", left), ("right", right))]
    wrapped = split.wrap(*(cast(leaf, dtype) for leaf, dtype in zip(leaves, wide, strict=True)))
    return Factored(
        axes,
        groups[True, True],
        groups[True, False] + groups[False, False],
        groups[False, True],
        inner,
        tuple(Operand(value, dtype_of(value), leaf) for value, leaf in zip((left, right), leaves, strict=True)),
        total,
        combine(total, wrapped),
        split.product and combine is tirx.Add,
        tuple(substitute_axes(mapping[var], separated) for var in main.indices),
    )
