"""The two operands of a reduction's term: which part of it depends on which axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import tvm
from tvm import tirx
from tvm.ir import Call

from souffle.index.operations import ARITHMETIC, COMPARISONS, DIVISIONS
from souffle.schedule.gpu.forms.contraction_expressions import (
    Axis,
    NotAContraction,
    bounded,
    depends,
    is_constant,
    substitute_axes,
)
from souffle.schedule.gpu.forms.memory_access import memory_step
from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, is_branch, variables

__all__ = ["TermSplit", "narrow_operand", "separate", "split_term", "straighten"]

_Wrap = Callable[[PrimExpr, PrimExpr], PrimExpr]


@dataclass(frozen=True, eq=False)
class TermSplit:
    """``term == wrap(left, right)``; `product` says that wrap multiplies them, up to casts of the result."""

    left: PrimExpr
    right: PrimExpr
    wrap: _Wrap
    product: bool


def _factors(expression: PrimExpr) -> list[PrimExpr]:
    if isinstance(expression, tirx.Mul):
        return _factors(expression.a) + _factors(expression.b)
    return [expression]


def _multiply(factors: Sequence[PrimExpr]) -> PrimExpr:
    result = factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result


def _nested(left: set[int], right: set[int]) -> bool:
    return left <= right or right <= left


def split_term(term: PrimExpr, spatial: Sequence[Axis]) -> TermSplit:
    """Find the two operands of a reduction's term.

    Parameters
    ----------
    term : expression
        What the reduction adds up.
    spatial : sequence of Axis
        The reduction's data-parallel axes.

    Raises
    ------
    NotAContraction
        If it has one operand, or three that no two could stand for.
    """

    def spatial_set(expression: PrimExpr) -> set[int]:
        used = variables(expression)
        return {i for i, axis in enumerate(spatial) if any(axis.var.same_as(v) for v in used)}

    if isinstance(term, tirx.Cast):
        inner = split_term(term.value, spatial)
        dtype = dtype_of(term)
        return TermSplit(inner.left, inner.right, lambda a, b: tirx.Cast(dtype, inner.wrap(a, b)), inner.product)
    if isinstance(term, tirx.Mul):
        factors = _factors(term)
        sets = [spatial_set(f) for f in factors]
        first = max(range(len(factors)), key=lambda i: len(sets[i]))
        apart = [i for i in range(len(factors)) if not sets[i] <= sets[first]]
        # Nothing apart (a product such as A[i, k] * x[k], or a grouped convolution): the largest other factor.
        rest = apart or [i for i in range(len(factors)) if i != first and buffer_loads(factors[i])]
        if not rest:
            raise NotAContraction("the summed term has one operand only")
        second = max(rest, key=lambda i: len(sets[i]))
        groups: dict[int, list[PrimExpr]] = {first: [], second: []}
        for i, factor in enumerate(factors):
            home = first if i == first or (i != second and sets[i] <= sets[first]) else second
            if i not in (first, second) and home == second and not sets[i] <= sets[second]:
                raise NotAContraction("the summed term is a product of three operands over different axes")
            groups[home].append(factor)
        # Keeps the operands in the order of the text, so that rounding is that of the original where there are two.
        order = sorted(groups)
        left, right = (_multiply(groups[i]) for i in order)
        return TermSplit(left, right, lambda a, b: a * b, True)
    if is_branch(term) or isinstance(term, tirx.Select):
        return _split_branch(term, spatial)
    if isinstance(term, (*ARITHMETIC, *COMPARISONS)):
        kind, first_side, second_side = type(term), term.a, term.b
        if is_constant(second_side):
            inner = split_term(first_side, spatial)
            return TermSplit(inner.left, inner.right, lambda a, b: kind(inner.wrap(a, b), second_side), False)
        if is_constant(first_side):
            inner = split_term(second_side, spatial)
            return TermSplit(inner.left, inner.right, lambda a, b: kind(first_side, inner.wrap(a, b)), False)
        if not _nested(spatial_set(term.a), spatial_set(term.b)):
            return TermSplit(term.a, term.b, lambda a, b: kind(a, b), False)
    if isinstance(term, Call) and len(term.args) == 1:
        inner = split_term(term.args[0], spatial)
        return TermSplit(inner.left, inner.right, lambda a, b: Call(term.op, [inner.wrap(a, b)], ret_ty=term.ty), False)
    raise NotAContraction("the summed term has one operand only")


def _split_branch(term: PrimExpr, spatial: Sequence[Axis]) -> TermSplit:
    """``if c: x * y else: z * w`` is ``(if c: x else z) * (if c: y else w)``; a constant 0 stands for ``0 * 0``."""
    if isinstance(term, tirx.Select):
        condition, yes, no = term.condition, term.true_value, term.false_value
    else:
        condition, yes, no = term.args

    def both(a: PrimExpr, b: PrimExpr) -> PrimExpr:
        return tirx.if_then_else(condition, a, b)

    def zero(expression: PrimExpr) -> bool:
        return is_constant(expression) and float(expression.value) == 0.0

    first = None if zero(yes) else split_term(yes, spatial)
    second = None if zero(no) else split_term(no, spatial)
    present = [s for s in (first, second) if s is not None]
    if not present or not all(s.product for s in present):
        raise NotAContraction("the summed term is a selection between terms that are not products")

    def part(side: str) -> PrimExpr:
        known = getattr(present[0], side)
        a, b = (tirx.const(0, dtype_of(known)) if s is None else getattr(s, side) for s in (first, second))
        if dtype_of(a) != dtype_of(b):
            raise NotAContraction("the summed term selects between operands of different types")
        return both(a, b)

    return TermSplit(part("left"), part("right"), present[0].wrap, True)


def narrow_operand(value: PrimExpr) -> PrimExpr:
    """`value` before its widening cast, so that the narrow type is what is staged; selections are looked through."""
    if isinstance(value, tirx.Cast) and tvm.DataType(dtype_of(value.value)).bits < tvm.DataType(dtype_of(value)).bits:
        return narrow_operand(value.value) if buffer_loads(value.value) else value
    if is_branch(value):
        condition, yes, no = value.args
        a, b = narrow_operand(yes), narrow_operand(no)
        if is_constant(yes) and float(yes.value) == 0.0:
            a = tirx.const(0, dtype_of(b))
        if is_constant(no) and float(no.value) == 0.0:
            b = tirx.const(0, dtype_of(a))
        if dtype_of(a) == dtype_of(b) != dtype_of(value):
            return tirx.if_then_else(condition, a, b)
    return value


def _split_points(expressions: Sequence[PrimExpr], axis: Axis) -> list[int]:
    """Extents of an inner factor by which `axis` may be split to separate what each operand reads of it."""
    found: set[int] = set()
    bounds = 0

    def see(node: PrimExpr) -> None:
        nonlocal bounds
        if not isinstance(node.b, tirx.IntImm) or not any(axis.var.same_as(v) for v in variables(node.a)):
            return
        value = abs(int(node.b.value))
        if isinstance(node, DIVISIONS):
            found.add(value)
        elif isinstance(node.a, tirx.Var):
            bounds = gcd(bounds, value + (1 if isinstance(node, tirx.LE | tirx.GT) else 0))

    for expression in expressions:
        structural_walk(expression, ((*DIVISIONS, *COMPARISONS), see))
    found.add(gcd(bounds, axis.extent))
    return sorted(c for c in found if 1 < c < axis.extent and axis.extent % c == 0)


def separate(
    left: PrimExpr, right: PrimExpr, axes: list[Axis]
) -> tuple[PrimExpr, PrimExpr, dict[tirx.Var, PrimExpr], list[Axis]]:
    """Split axes that both operands read, where one of them reads only the outer or only the inner factor.

    Grouped convolution: the image is read at ``f // (F / G)``, so ``f = (g, i)`` makes g a batch axis and i one of the
    weights alone. Operands joined by a condition on an axis (horizontal transformation) come apart the same way.
    """
    mapping: dict[tirx.Var, PrimExpr] = {}
    result: list[Axis] = []
    for axis in axes:
        parts = [axis]
        if depends(left, axis) and depends(right, axis):
            for size in _split_points((left, right), axis):
                name = str(axis.var.name)
                outer = Axis(tirx.Var(f"{name}_outer", "int32"), axis.extent // size)
                inner = Axis(tirx.Var(f"{name}_inner", "int32"), size)
                value = outer.var * size + inner.var
                analyzer = bounded([*result, *axes, outer, inner])
                new = [analyzer.simplify(substitute_axes(e, {axis.var: value})) for e in (left, right)]
                if any(not depends(e, part) for e in new for part in (outer, inner)):
                    left, right = new
                    mapping[axis.var] = value
                    parts = [outer, inner]
                    break
        result.extend(parts)
    return left, right, mapping, result


def straighten(
    operands: Sequence[PrimExpr], axes: Sequence[Axis]
) -> tuple[list[PrimExpr], dict[tirx.Var, PrimExpr], list[Axis]]:
    """Split axes along which memory is contiguous in pieces only, so that the inner factor runs along a piece.

    The heads of attention, put together by a transposition, are read at ``k // 64`` and ``k % 64``: along ``k`` no
    number of neighbours can be read at once, along the inner factor of 64 they can.

    Parameters
    ----------
    operands : sequence of expression
    axes : sequence of Axis

    Returns
    -------
    operands : list of expression
        Over the new axes.
    mapping : dict
        The axes that were split, over their factors.
    axes : list of Axis
        In order, the factors of an axis in its place.
    """
    current, mapping, result = list(operands), {}, []
    for axis in axes:
        parts = [axis]
        broken = [e for e in current if depends(e, axis) and memory_step(e, axis) is None]
        for size in _split_points(broken, axis) if broken else ():
            name = str(axis.var.name)
            outer = Axis(tirx.Var(f"{name}_outer", "int32"), axis.extent // size)
            inner = Axis(tirx.Var(f"{name}_inner", "int32"), size)
            value = outer.var * size + inner.var
            analyzer = bounded([*result, *axes, outer, inner])

            def over_factors(e: PrimExpr, a=axis, v=value, k=analyzer) -> PrimExpr:
                return k.simplify(substitute_axes(e, {a.var: v}))

            if all(memory_step(over_factors(e), inner) in (0, 1) for e in broken):
                current = [over_factors(e) for e in current]
                mapping[axis.var] = value
                parts = [outer, inner]
                break
        result.extend(parts)
    return current, mapping, result
