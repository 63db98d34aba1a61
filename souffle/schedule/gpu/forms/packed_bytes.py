"""A sum of products of 8-bit integers, with four of them in each element of its operands.

::

    total[m, n] = sum over k of left[m, k] * right[n, k]
                →   sum over q of dot(L[m, q], R[n, q]),   L[m, q] = the bytes left[m, 4 q], ..., left[m, 4 q + 3]

Right since integers are added in any order with one result, and a byte of zero adds nothing. The four are neighbours
along one inner axis, the one that is contiguous in memory if its extent is a multiple of 4; where no axis has one they
are neighbours of all axes counted together, and zeros fill the last element up. What multiplies a word is one
instruction: ``dp4a``, or ``mma.m16n8k32`` with all of a fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.gpu.forms.contraction_expressions import Axis, bounded, substitute_axes
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.forms.memory_access import memory_step
from souffle.schedule.gpu.forms.two_operands import Operand
from souffle.tvm_compat import PrimExpr

__all__ = ["BYTES", "PACKED", "WORD", "byte_types", "packed_bytes"]

BYTES = ("int8", "uint8")
"""Types of factors."""

PACKED = 4
"""Numbers in a word."""

WORD = "int32"

_Lane = Callable[[int], tuple[Mapping[tirx.Var, PrimExpr], PrimExpr | None]]


def byte_types(problem: Contraction) -> tuple[str, str] | None:
    """The types of the two factors of a sum of products of 8-bit integers in 32 bits; ``None`` if it is none."""
    types = problem.left.dtype, problem.right.dtype
    if problem.dtype != WORD or not set(types) <= set(BYTES) or not problem.product_sum:
        return None
    update = problem.update
    product = update.b if isinstance(update, tirx.Add) and update.a.same_as(problem.total) else None
    if not isinstance(product, tirx.Mul):
        return None
    factors = [f.value if isinstance(f, tirx.Cast) else f for f in (product.a, product.b)]
    leaves = [problem.left.leaf, problem.right.leaf]
    if not any(all(f.same_as(x) for f, x in zip(factors, order, strict=True)) for order in (leaves, leaves[::-1])):
        return None
    starts_at_zero = isinstance(problem.initial, tirx.IntImm) and int(problem.initial.value) == 0
    return types if starts_at_zero else None


def packed_bytes(
    problem: Contraction, update: Callable[[PrimExpr, PrimExpr, PrimExpr], PrimExpr] | None = None
) -> Contraction | Refused:
    """The same sum, of words of four factors each.

    Parameters
    ----------
    problem : Contraction
    update : callable, optional
        From the total and a word of each operand to the new total; where none is given, whoever takes the words knows
        what to do with them.
    """
    types = byte_types(problem)
    if types is None:
        return problem.refused("it is no sum of products of 8-bit integers in 32 bits")
    axis = _packed_axis(problem)
    if axis is not None:
        word = Axis(tirx.Var(f"{axis.var.name}_word", "int32"), axis.extent // PACKED)
        inner = tuple(word if one is axis else one for one in problem.inner)

        def lane(number: int) -> tuple[Mapping[tirx.Var, PrimExpr], PrimExpr | None]:
            return {axis.var: word.var * PACKED + number}, None
    else:
        count = prod(one.extent for one in problem.inner)
        word = Axis(tirx.Var("word", "int32"), -(-count // PACKED))
        inner = (word,)

        def lane(number: int) -> tuple[Mapping[tirx.Var, PrimExpr], PrimExpr | None]:
            place = word.var * PACKED + number
            exists = None if count % PACKED == 0 else tirx.LT(place, count)
            return _located(problem.inner, place), exists

    left, right = (_packed(problem, operand, lane, inner) for operand in (problem.left, problem.right))
    changed = problem.update if update is None else update(problem.total, left.leaf, right.leaf)
    return replace(problem, inner=inner, left=left, right=right, update=changed, packed=types)


def _packed_axis(problem: Contraction) -> Axis | None:
    """The inner axis along which four neighbours make a word."""
    whole = [axis for axis in problem.inner if axis.extent % PACKED == 0]
    contiguous = [
        axis for axis in whole if 1 in (memory_step(operand.value, axis) for operand in (problem.left, problem.right))
    ]
    return max(contiguous or whole, key=lambda axis: axis.extent, default=None)


def _located(axes: Sequence[Axis], place: PrimExpr) -> dict[tirx.Var, PrimExpr]:
    """Where the axes are at one place of all of them, the last one innermost."""
    parts: dict[tirx.Var, PrimExpr] = {}
    for axis in reversed(axes):
        parts[axis.var] = tirx.floormod(place, axis.extent)
        place = tirx.floordiv(place, axis.extent)
    if axes:
        # The outermost needs no remainder, but what lies beyond all of them must lie in the tensor, too.
        parts[axes[0].var] = tirx.min(tirx.max(parts[axes[0].var], 0), axes[0].extent - 1)
    return parts


def _packed(problem: Contraction, operand: Operand, lane: _Lane, inner: Sequence[Axis]) -> Operand:
    analyzer = bounded([*problem.batch, *problem.rows, *problem.columns, *inner])
    word: PrimExpr | None = None
    for number in range(PACKED):
        where, exists = lane(number)
        value = substitute_axes(operand.value, where)
        if exists is not None:
            value = tirx.if_then_else(exists, value, tirx.const(0, operand.dtype))
        value = tirx.Cast(WORD, value)
        if operand.dtype != "uint8" and number < PACKED - 1:
            # The sign is not the next number's; that of the last one leaves the word.
            value = tirx.bitwise_and(value, tirx.const(255, WORD))
        value = tirx.shift_left(value, tirx.const(8 * number, WORD)) if number else value
        word = value if word is None else tirx.bitwise_or(word, value)
    return Operand(analyzer.simplify(word), WORD, tirx.Var(f"{operand.leaf.name}_word", WORD))
