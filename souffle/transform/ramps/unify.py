"""Unification of rows: whether a row of a program's tensor is what a step of the loop computes, and from what.

Two definitions are equal where the same operators, in the same order, take equal constants, the same elements of what
all steps read, and rows of the step's own values and of what is handed on, which are *bound* to rows of the program's
tensors: each to one. A sum of the step may lack an addend on the other side where this addend is exactly zero: a
product, or a sum over products, of rows bound to zeros with factors that are finite whatever the inputs are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from souffle.index.expression import Expression
from souffle.program import TE, Tensor
from souffle.transform.ramps.index_forms import (
    Definition,
    Form,
    Term,
    condition_of,
    flat_form,
    form_of,
    peeled,
    reduction_forms,
    row_forms,
)
from souffle.transform.ramps.template import (
    ZERO,
    Before,
    Fixed,
    Operand,
    Row,
    Rows,
    Template,
    Travel,
    Within,
    Zero,
)

__all__ = ["ConstantValues", "Unification"]

_MOST_VISITS = 20_000
"""Pairs of nodes that are compared for one row."""

_LARGEST = {"float16": 6e4, "bfloat16": 3e38, "float32": 3e38, "float64": 1e308}
_BELOW_ONE = ("sigmoid", "tanh", "sin", "cos", "erf")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not")

Bound = Row | Zero


class ConstantValues:
    """The elements of a program's constants that forms mean."""

    def __init__(self, constants: Mapping[Tensor, np.ndarray]) -> None:
        self.constants = constants
        self._same: dict[tuple, bool] = {}
        self._flat: dict[Tensor, np.ndarray] = {}
        self._largest: dict[Tensor, float | None] = {}

    def same(self, one: Tensor, first: Form, other: Tensor, second: Form) -> bool:
        """Whether two constants have the same bits at the elements of two forms of the same terms."""
        key = one, other, first.constant, second
        if key not in self._same:
            left, right = self._view(one, first), self._view(other, second)
            close = left is not None and right is not None and left.flat[0] == right.flat[0]
            self._same[key] = close and left.tobytes() == right.tobytes()
        return self._same[key]

    def largest(self, tensor: Tensor) -> float | None:
        """The greatest magnitude in a constant; ``None`` where not all of it is finite."""
        if tensor not in self._largest:
            array = self.constants[tensor].astype(np.float64)
            finite = bool(np.isfinite(array).all())
            self._largest[tensor] = float(np.abs(array).max(initial=0)) if finite else None
        return self._largest[tensor]

    def _view(self, tensor: Tensor, form: Form) -> np.ndarray | None:
        if tensor not in self._flat:
            self._flat[tensor] = np.ascontiguousarray(self.constants[tensor]).reshape(-1)
        array = self._flat[tensor]
        low, high = form.bounds()
        if low < 0 or high >= array.size:
            return None
        shape = [axis.extent for axis, _ in form.terms]
        strides = [coefficient * array.itemsize for _, coefficient in form.terms]
        return np.lib.stride_tricks.as_strided(array[form.constant :], shape, strides, writeable=False)


class Unification:
    """What the rows of one step are bound to.

    Parameters
    ----------
    template : Template
    rows : Rows
    constants : ConstantValues
    step : int
        Its number; 0 is the template's own.
    known : mapping, optional
        What is handed to this step, where that is known.

    Attributes
    ----------
    within, before : dict
        By value and row: what that row of this step, and of the step before, is.
    needed : dict
        By value and row, as keys alone: rows of carried values that other rows of the same step read.
    """

    def __init__(
        self,
        template: Template,
        rows: Rows,
        constants: ConstantValues,
        step: int,
        known: Mapping[tuple[Tensor, int], Bound] | None = None,
    ) -> None:
        self.template = template
        self.rows = rows
        self.constants = constants
        self.step = step
        self.known = known
        self.within: dict[tuple[Tensor, int], Row] = {}
        self.before: dict[tuple[Tensor, int], Bound] = {}
        self.needed: dict[tuple[Tensor, int], bool] = {}
        self._trail: list[tuple[dict, object]] = []
        self._visits = 0

    def is_row(self, value: Tensor, row: int, found: Row) -> bool:
        """Whether row `row` of `value` is, in this step, what `found` is; what it reads is bound then."""
        self._visits = 0
        mark = len(self._trail)
        return self._bind_within(value, row, found) or self._undone(mark)

    def reads(self, value: Tensor, row: int) -> tuple[Row, ...]:
        """The rows of the program, as far as they are bound, that the definition of a row reads."""
        found: dict[Row, None] = {}
        _, definition, env = self._row(value, row)
        pending = [Term(definition, root, env) for root in definition.expression.regions[0].roots]
        while pending:
            term = peeled(pending.pop())
            if term.node.kind != "load":
                pending += term.args()
                continue
            operand = self._operand(term)
            form = flat_form(term)
            if form is None or not isinstance(operand, Within | Before):
                continue
            size = self.template.size(operand.value)
            key = operand.value, form.constant // size
            bound = self.within.get(key) if isinstance(operand, Within) else (self.known or {}).get(key)
            if isinstance(bound, Row):
                found[bound] = None
        return tuple(found)

    # Bindings, which are taken back where what needed them does not match.

    def _set(self, table: dict, key: object, value: object) -> bool:
        if key not in table:
            table[key] = value
            self._trail.append((table, key))
        return table[key] == value

    def _undone(self, mark: int) -> bool:
        while len(self._trail) > mark:
            table, key = self._trail.pop()
            del table[key]
        return False

    def _bind_before(self, value: Tensor, row: int, found: Bound) -> bool:
        key = value, row
        if self.known is not None and self.known.get(key) != found:
            return False
        return self._set(self.before, key, found)

    def _bind_within(self, value: Tensor, row: int, found: Bound) -> bool:
        key = value, row
        if key in self.within or not isinstance(found, Row):
            return self.within.get(key) == found
        mark = len(self._trail)
        self._set(self.within, key, found)
        return self._same_definition(value, row, found) or self._undone(mark)

    # Definitions.

    def _row(self, value: Tensor, row: int) -> tuple[TE, Definition, tuple[Form, ...]]:
        part = self.rows.parts[value]
        definition = self.rows.definition(part)
        return part, definition, self.template.row_forms(value, row) + reduction_forms(definition.expression)

    def _same_definition(self, value: Tensor, row: int, found: Row) -> bool:
        part, definition, env = self._row(value, row)
        other = self.rows.parts.get(found.tensor)
        there = row_forms(found.tensor.shape, found.start, self.template.size(value))
        if other is None or there is None or other.is_reduction != part.is_reduction:
            return False
        if found.tensor.dtype != value.dtype:
            return False
        if part.is_reduction and part.outputs.index(value) != other.outputs.index(found.tensor):
            return False
        right = self.rows.definition(other)
        if not part.is_reduction:
            roots = definition.expression.regions[0].roots, right.expression.regions[0].roots
            one = Term(definition, roots[0][part.outputs.index(value)], env)
            return self._same(one, Term(right, roots[1][other.outputs.index(found.tensor)], there))
        if not _same_reducer(definition.expression, right.expression):
            return False
        there += reduction_forms(right.expression)
        for mine, its in zip(definition.expression.regions, right.expression.regions, strict=True):
            for one, another in zip(mine.roots, its.roots, strict=True):
                if not self._same(Term(definition, one, env), Term(right, another, there)):
                    return False
        return True

    # Terms: the first one is of the template.

    def _operand(self, term: Term) -> Operand:
        return self.template.operands[term.definition.te][term.node.value]

    def _same(self, one: Term, other: Term) -> bool:
        self._visits += 1
        if self._visits > _MOST_VISITS:
            return False
        one, other = peeled(one), peeled(other)
        mark = len(self._trail)
        if self._alike(one, other):
            return True
        self._undone(mark)
        node = one.node
        if node.kind in ("add", "sub") and node.data:
            left, right = one.args()
            if self._zero(right) and self._same(left, other):
                return True
            self._undone(mark)
            if node.kind == "add" and self._zero(left) and self._same(right, other):
                return True
            self._undone(mark)
        inner = self._expanded(one)
        if inner is not None and self._same(inner, other):
            return True
        self._undone(mark)
        if other.node.kind == "load":
            inner = self._definition_of(other)
            if inner is not None and self._same(one, inner):
                return True
            self._undone(mark)
        return False

    def _alike(self, one: Term, other: Term) -> bool:
        here, there = one.node, other.node
        if here.dtype != there.dtype:
            return False
        if here.kind == "load":
            return self._same_load(one, other)
        if not here.data and not there.data and here.dtype.startswith("int"):
            form = form_of(one)
            return form is not None and form == form_of(other)
        if (here.kind, len(here.args)) != (there.kind, len(there.args)):
            return False
        if here.kind in ("opaque", "text", "axis", "operand"):
            return False
        if here.kind == "float" and np.float64(here.value).tobytes() != np.float64(there.value).tobytes():
            return False
        if here.kind != "float" and here.value != there.value:
            return False
        if here.kind in _COMPARISONS and not here.data and not there.data:
            decided = condition_of(one)
            if decided is not None:
                return decided == condition_of(other)
        return all(self._same(a, b) for a, b in zip(one.args(), other.args(), strict=True))

    def _same_load(self, one: Term, other: Term) -> bool:
        operand, here = self._operand(one), flat_form(one)
        if here is None:
            return False
        if other.node.kind == "float" and other.node.value == 0 and isinstance(operand, Before):
            return not np.signbit(other.node.value) and self._bind_zero(operand.value, here)
        there = flat_form(other) if other.node.kind == "load" else None
        if there is None or here.terms != there.terms:
            return False
        tensor = other.tensor
        if isinstance(operand, Fixed):
            if operand.tensor is tensor and here == there:
                return True
            both = operand.tensor in self.constants.constants and tensor in self.constants.constants
            return both and self.constants.same(operand.tensor, here, tensor, there)
        if isinstance(operand, Travel):
            return operand.tensor is tensor and here.constant + self.step * operand.stride == there.constant
        row = self.template.row_of(operand.value, here)
        size = self.template.size(operand.value)
        if row is None:
            return False
        start = there.constant - (here.constant - row * size)
        if start < 0 or start % size or start + size > tensor.size:
            return False
        found = self.rows.canonical(Row(tensor, start), size)
        if isinstance(operand, Before):
            return self._bind_before(operand.value, row, found)
        if operand.value in self.template.initial and not self._set(self.needed, (operand.value, row), True):
            return False
        return self._bind_within(operand.value, row, found)

    def _bind_zero(self, value: Tensor, form: Form) -> bool:
        row = self.template.row_of(value, form)
        return row is not None and self._bind_before(value, row, ZERO)

    def _expanded(self, one: Term) -> Term | None:
        """The definition of an element that the step computes; ``None`` for what is not to be looked into."""
        if one.node.kind != "load":
            return None
        operand = self._operand(one)
        if not isinstance(operand, Within):
            return None
        if operand.value in self.template.initial:
            form = flat_form(one)
            row = None if form is None else self.template.row_of(operand.value, form)
            if row is None:
                return None
            self._set(self.needed, (operand.value, row), True)
        return self._definition_of(one)

    def _definition_of(self, load: Term) -> Term | None:
        env = tuple(form_of(arg) for arg in load.args())
        return None if None in env else self.rows.element(load.tensor, env)

    # Zeros, and what is finite.

    def _zero(self, term: Term) -> bool:
        """Whether a term of the template is exactly zero; what has to be zeros for it is bound to them then."""
        term = peeled(term)
        mark = len(self._trail)
        return self._is_zero(term) or self._undone(mark)

    def _is_zero(self, term: Term) -> bool:
        node = term.node
        if node.kind in ("int", "float"):
            return node.value == 0
        if node.kind == "load":
            return self._zero_load(term)
        args = term.args()
        if node.kind == "mul":
            return any(self._magnitude(args[1 - side]) is not None and self._zero(args[side]) for side in (0, 1))
        if node.kind in ("add", "sub"):
            return self._zero(args[0]) and self._zero(args[1])
        if node.kind == "choose":
            return self._zero(args[1]) and self._zero(args[2])
        return node.kind == "cast" and node.dtype in _LARGEST and self._zero(args[0])

    def _zero_load(self, term: Term) -> bool:
        operand, form = self._operand(term), flat_form(term)
        if form is None or isinstance(operand, Fixed | Travel):
            return False
        if isinstance(operand, Before):
            return self._bind_zero(operand.value, form)
        value = operand.value
        row = self.template.row_of(value, form)
        if row is None or (value, row) in self.within or value in self.template.initial:
            return False
        inner = self._definition_of(term)
        if inner is not None:
            return self._zero(inner)
        part, definition, env = self._row(value, row)
        expression = definition.expression
        if not part.is_reduction or not _is_sum(expression):
            return False
        return all(self._zero(Term(definition, root, env)) for region in expression.regions for root in region.roots)

    def _magnitude(self, term: Term) -> float | None:
        """What a term of the template is at most, whatever finite inputs are; ``None`` where nothing is known."""
        term = peeled(term)
        node = term.node
        largest = _LARGEST.get(node.dtype)
        if largest is None:
            return None
        found: float | None = None
        if node.kind in ("int", "float"):
            found = abs(node.value)
        elif node.kind == "load":
            operand = self._operand(term)
            if isinstance(operand, Fixed) and operand.tensor in self.constants.constants:
                found = self.constants.largest(operand.tensor)
            elif isinstance(operand, Within) and operand.value not in self.template.initial:
                inner = self._definition_of(term)
                found = None if inner is None else self._magnitude(inner)
        elif node.kind == "call" and node.value in _BELOW_ONE:
            found = 1.0
        elif node.kind in ("add", "sub", "mul", "cast", "max", "min"):
            sides = [self._magnitude(arg) for arg in term.args()]
            if None not in sides:
                found = {"mul": np.prod, "cast": max, "max": max, "min": max}.get(node.kind, sum)(sides)
        return found if found is not None and found < largest else None


def _is_sum(expression: Expression) -> bool:
    nodes = expression.nodes
    if len(expression.combine) != 1 or any(region.conditions for region in expression.regions):
        return False
    root = nodes[expression.combine[0]]
    return root.kind == "add" and [nodes[arg].kind for arg in root.args] == ["operand", "operand"]


def _same_reducer(one: Expression, other: Expression) -> bool:
    """Whether two reductions combine values in the same way over axes of the same extents."""
    extents = [[extent for _, extent in e.reduce_axes if extent > 1] for e in (one, other)]
    shapes = [[len(region.roots) for region in e.regions] for e in (one, other)]
    if extents[0] != extents[1] or shapes[0] != shapes[1] or len(one.combine) != len(other.combine):
        return False
    if any(region.conditions for e in (one, other) for region in e.regions):
        return False
    return all(_same_tree(one, a, other, b) for a, b in zip(one.combine, other.combine, strict=True))


def _same_tree(one: Expression, a: int, other: Expression, b: int) -> bool:
    left, right = one.nodes[a], other.nodes[b]
    if (left.kind, left.value, left.dtype, len(left.args)) != (right.kind, right.value, right.dtype, len(right.args)):
        return False
    return all(_same_tree(one, x, other, y) for x, y in zip(left.args, right.args, strict=True))
