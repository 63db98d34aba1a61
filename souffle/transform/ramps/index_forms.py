"""Index expressions of one row: sums of multiples of the row's axes, once its place in the tensor is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from souffle.index.expression import Expression, Node
from souffle.program import TE, Tensor

__all__ = [
    "Axis",
    "Definition",
    "Form",
    "Term",
    "condition_of",
    "flat_form",
    "form_of",
    "peeled",
    "reduction_forms",
    "row_forms",
]


class Axis(NamedTuple):
    """An axis within a row (``"content"``) or of a reduction (``"reduced"``), counted from the last one."""

    kind: str
    number: int
    extent: int


@dataclass(frozen=True)
class Form:
    """``constant + sum(coefficient * axis)``; no coefficient is 0."""

    constant: int
    terms: tuple[tuple[Axis, int], ...] = ()

    def plus(self, other: Form, factor: int = 1) -> Form:
        """This and `factor` times `other`."""
        if not other.terms:
            return Form(self.constant + factor * other.constant, self.terms)
        total = dict(self.terms)
        for axis, coefficient in other.terms:
            total[axis] = total.get(axis, 0) + factor * coefficient
        terms = tuple(sorted((axis, value) for axis, value in total.items() if value))
        return Form(self.constant + factor * other.constant, terms)

    def bounds(self) -> tuple[int, int]:
        """The least and the greatest value."""
        spans = [coefficient * (axis.extent - 1) for axis, coefficient in self.terms]
        low, high = sum(min(0, span) for span in spans), sum(max(0, span) for span in spans)
        return self.constant + low, self.constant + high

    def divided(self, divisor: int) -> Form | None:
        """``floor(self / divisor)`` where that is such a form."""
        whole = tuple((axis, value // divisor) for axis, value in self.terms if value % divisor == 0)
        rest = Form(self.constant, tuple((axis, value) for axis, value in self.terms if value % divisor))
        low, high = (bound // divisor for bound in rest.bounds())
        return Form(low, whole) if low == high else None


@dataclass(frozen=True, eq=False)
class Definition:
    """A TE and its expression."""

    te: TE
    expression: Expression


class Term(NamedTuple):
    """A node of a TE's expression, at the elements that `env` says: a form for each axis."""

    definition: Definition
    number: int
    env: tuple[Form, ...]

    @property
    def node(self) -> Node:
        """The node."""
        return self.definition.expression.nodes[self.number]

    @property
    def tensor(self) -> Tensor:
        """Of a load: what it reads."""
        return self.definition.te.inputs[self.node.value]

    def args(self) -> tuple[Term, ...]:
        """What the node takes."""
        return tuple(Term(self.definition, number, self.env) for number in self.node.args)


def row_forms(shape: Sequence[int], start: int, size: int) -> tuple[Form, ...] | None:
    """The indices of the elements ``start`` to ``start + size`` of a tensor, as forms of the row's axes.

    ``None`` where they are no box, or do not begin at a multiple of their number.
    """
    if start % size or start + size > prod(shape) or start < 0:
        return None
    forms: list[Form] = []
    covered, rest, number = 1, start, 0
    for extent in reversed(shape):
        coordinate, rest = rest % extent, rest // extent
        wanted = size // covered
        taken = min(extent, wanted)
        if wanted % taken or coordinate % taken:
            return None
        axis = Axis("content", number, taken)
        forms.insert(0, Form(coordinate, ((axis, 1),) if taken > 1 else ()))
        number += taken > 1
        covered *= taken
    return tuple(forms) if covered == size else None


def reduction_forms(expression: Expression) -> tuple[Form, ...]:
    """The reduction axes of an expression as forms."""
    forms: list[Form] = []
    number = 0
    for first, extent in reversed(expression.reduce_axes):
        forms.insert(0, Form(first, ((Axis("reduced", number, extent), 1),) if extent > 1 else ()))
        number += extent > 1
    return tuple(forms)


def form_of(term: Term) -> Form | None:
    """An integer node as a form; ``None`` where it is none, or depends on data."""
    node = term.node
    if node.kind == "int":
        return Form(node.value)
    if node.kind == "axis":
        return term.env[node.value]
    if node.data:
        return None
    if node.kind == "choose":
        chosen = peeled(term)
        return None if chosen.node.kind == "choose" else form_of(chosen)
    if node.kind == "cast":
        return form_of(term.args()[0]) if node.dtype.startswith("int") else None
    if len(node.args) != 2:
        return None
    left, right = (form_of(arg) for arg in term.args())
    if left is None or right is None:
        return None
    return _combined(node.kind, left, right)


def _combined(kind: str, left: Form, right: Form) -> Form | None:
    if kind == "add":
        return left.plus(right)
    if kind == "sub":
        return left.plus(right, -1)
    if kind == "mul" and not (left.terms and right.terms):
        value, factor = (left, right.constant) if not right.terms else (right, left.constant)
        return Form(0).plus(value, factor)
    if kind in ("floordiv", "floormod") and not right.terms and right.constant > 0:
        quotient = left.divided(right.constant)
        return quotient if quotient is None or kind == "floordiv" else left.plus(quotient, -right.constant)
    if kind in ("min", "max"):
        low, high = left.plus(right, -1).bounds()
        if high <= 0:
            return left if kind == "min" else right
        if low >= 0:
            return right if kind == "min" else left
    return None


_HOLDS = {
    "lt": lambda low, high: True if high < 0 else False if low >= 0 else None,
    "le": lambda low, high: True if high <= 0 else False if low > 0 else None,
    "gt": lambda low, high: True if low > 0 else False if high <= 0 else None,
    "ge": lambda low, high: True if low >= 0 else False if high < 0 else None,
    "eq": lambda low, high: True if low == high == 0 else False if low > 0 or high < 0 else None,
    "ne": lambda low, high: False if low == high == 0 else True if low > 0 or high < 0 else None,
}
"""Whether a comparison holds, by the least and the greatest value of the difference; ``None``: for some elements."""


def condition_of(term: Term) -> bool | None:
    """Whether a condition holds at all elements, at none, or neither is known."""
    node = term.node
    if node.kind == "int":
        return bool(node.value)
    if node.kind == "not":
        inner = condition_of(term.args()[0])
        return None if inner is None else not inner
    if node.kind in ("and", "or"):
        sides = [condition_of(arg) for arg in term.args()]
        decisive = node.kind == "or"
        return decisive if decisive in sides else None if None in sides else not decisive
    if node.kind == "call" and node.value == "likely":
        return condition_of(term.args()[0])
    if node.kind in _HOLDS and not node.data:
        left, right = (form_of(arg) for arg in term.args())
        if left is not None and right is not None:
            return _HOLDS[node.kind](*left.plus(right, -1).bounds())
    return None


def peeled(term: Term) -> Term:
    """What a term is, past choices whose conditions are decided."""
    while term.node.kind == "choose":
        holds = condition_of(term.args()[0])
        if holds is None:
            break
        term = term.args()[1 if holds else 2]
    return term


def flat_form(term: Term) -> Form | None:
    """Of a load: which element it reads, counted in row-major order."""
    total = Form(0)
    for arg, extent in zip(term.args(), term.tensor.shape, strict=True):
        index = form_of(arg)
        if index is None:
            return None
        total = Form(0).plus(total, extent).plus(index)
    return total
