"""TensorIR's scalar and vector expressions as functions over many lanes at once.

A value is a Python integer where it is the same everywhere, or an array whose last axis is the lanes, whose last but
one is the elements of a vector, and whose others are loops that are run at once. Floating-point types hold elements of
the field, integers and Booleans hold integers. Functions are ``f(frame, mask)``: `frame` has the values of variables,
`mask` says for which lanes the value is wanted (``None``: for all).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import const_int, dtype_of
from souffle.verify.expressions import Undecided
from souffle.verify.indices import operator_name
from souffle.verify.values.field import Number
from souffle.verify.values.infinities import divides_by_places
from souffle.verify.values.integers import INTEGER_OPERATORS, as_integers, in_type, loses_nothing, wrapped
from souffle.verify.values.points import Numbers
from souffle.verify.values.positions import decided
from souffle.verify.values.sightings import Sighting, TextSightings
from souffle.verify.vocabulary import OF_INTEGERS, function_name

__all__ = [
    *("Evaluator", "Fault", "Frame", "Mask", "Scalars", "ZeroDivisor"),
    *("both", "is_float", "is_steady", "none_of"),
]

Mask = np.ndarray | None
Frame = list
Evaluator = Callable[[Frame, Mask], Number]


class Fault(Exception):
    """A lane goes where it must not, or divides by zero.

    Attributes
    ----------
    reason : str
    lane : int
        The first.
    """

    def __init__(self, reason: str, lane: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lane = lane


class ZeroDivisor(Fault):
    """A lane divides a whole number by zero."""


def is_float(dtype: str) -> bool:
    """Whether a type's values are elements of the field."""
    return "float" in dtype


def both(mask: Mask, other: Number) -> Mask:
    """Where both hold."""
    return mask if isinstance(other, int) else other if mask is None else mask & other


def none_of(mask: Mask) -> bool:
    """Whether it holds nowhere."""
    return mask is not None and not mask.any()


_FIELD = {
    tirx.Add: "add",
    tirx.Sub: "subtract",
    tirx.Mul: "multiply",
    tirx.Div: "divide",
    tirx.Max: "largest",
    tirx.Min: "least",
}
"""What numbers call an operator."""

_RESTS = {tirx.Mod: "fmod", tirx.FloorMod: "floored rest"}
"""Of floating-point types: functions of which nothing is known."""

_COMPARED: dict[type, Callable[[Number, Number], Any]] = {
    tirx.EQ: lambda a, b: a == b,
    tirx.NE: lambda a, b: a != b,
    tirx.LT: lambda a, b: a < b,
    tirx.LE: lambda a, b: a <= b,
    tirx.GT: lambda a, b: a > b,
    tirx.GE: lambda a, b: a >= b,
}


def _steady(evaluate: Evaluator) -> Evaluator:
    """Mark an expression as one that has the same value whenever it is evaluated."""
    evaluate.steady = True
    return evaluate


def is_steady(evaluate: Evaluator) -> bool:
    """Whether an expression has the same value whenever it is evaluated: it depends on the lane alone."""
    return getattr(evaluate, "steady", False)


def _width(node: Any) -> int:
    """Elements of the vector that an expression really is, whatever type it says it has."""
    if isinstance(node, (tirx.Ramp, tirx.Broadcast)):
        return const_int(node.lanes)
    if isinstance(node, TensorLoad):
        # Of memory whose elements are vectors themselves, an element is one.
        return max(map(_width, node.indices), default=1) * node.source.dtype.lanes
    return node.ty.dtype.lanes


def _demand_equal_widths(node: Any) -> None:
    if hasattr(node, "b") and _width(node.a) != _width(node.b):
        raise Undecided(f"vectors of {_width(node.a)} and {_width(node.b)} elements in one operation, {node}")


class Scalars:
    """Translates expressions of numbers alone. Subclasses say what elements of memory and calls are, too.

    Parameters
    ----------
    numbers : Numbers
        The field, the order in which numbers are compared, and the functions that are taken for random ones.
    sightings : TextSightings, optional
        Where to note how comparisons come out.

    Attributes
    ----------
    drawn : set of Var
        Variables that depend on what memory holds.
    slots : dict of Var to int
        Where a frame has the value of each variable.
    named : dict of Var to expression
        What the other variables of floating-point types stand for.
    unsure : bool
        Whether it decides an integer or a comparison how nvcc rounds.
    steady : set of int
        Slots of variables that never change; what is made of them is worked out once.
    """

    def __init__(self, numbers: Numbers, sightings: TextSightings | None = None) -> None:
        self.numbers = numbers
        self.sightings = sightings
        self.drawn: set[Any] = set()
        self.named: dict[Any, Any] = {}
        self.unsure = False
        self.slots: dict[Any, int] = {}
        self.steady: set[int] = set()

    def slot(self, var: Any) -> int:
        """Where a frame has the value of a variable."""
        return self.slots.setdefault(var, len(self.slots))

    def name(self, var: Any, value: Any) -> None:
        """Note what a variable stands for."""
        if self.is_drawn(value):
            self.drawn.add(var)
        elif is_float(dtype_of(var)):
            self.named[var] = value

    def frame(self) -> Frame:
        """A frame with room for all variables seen so far."""
        return [None] * len(self.slots)

    def load(self, node: TensorLoad) -> Evaluator:
        """An element of memory: refused here."""
        raise Undecided(f"an element of {node.source.name} in an expression of numbers alone")

    def call(self, node: Call, name: str) -> Evaluator:
        """What no expression of numbers alone is: refused here."""
        raise Undecided(f"a call of {name} in an expression")

    def of(self, node: Any) -> Evaluator:
        """The function that evaluates an expression.

        Raises
        ------
        Undecided
            If it holds something whose meaning is not stated here.
        """
        if isinstance(node, tirx.IntImm):
            value = int(node.value)
            return _steady(lambda f, m: value)
        if isinstance(node, tirx.FloatImm):
            value = self._literal(float(node.value), dtype_of(node))
            return lambda f, m: value
        if isinstance(node, tvm.ir.Var):
            if node not in self.slots:
                raise Undecided(f"the variable {node.name}, which nothing binds")
            slot = self.slots[node]
            return _steady(lambda f, m: f[slot]) if slot in self.steady else lambda f, m: f[slot]
        if isinstance(node, TensorLoad):
            return self.load(node)
        kind = type(node)
        _demand_equal_widths(node)
        if kind in _COMPARED:
            return self._comparison(kind, node)
        if kind in INTEGER_OPERATORS:
            if kind in (tirx.Min, tirx.Max):
                return self._extreme(kind, node)
            table = _FIELD if is_float(dtype_of(node)) else INTEGER_OPERATORS
            if kind is tirx.Add and table is _FIELD:
                for product, other in ((node.a, node.b), (node.b, node.a)):
                    if isinstance(product, tirx.Mul):
                        _demand_equal_widths(product)
                        a, b, c = self.of(product.a), self.of(product.b), self.of(other)
                        return self._multiply_add(a, b, c)
            if table is _FIELD and kind in _RESTS:
                return self._function(_RESTS[kind], [self.of(node.a), self.of(node.b)], (node.a, node.b))
            if kind not in table:
                raise Undecided(f"{kind.__name__} of {dtype_of(node)}")
            exact = table is INTEGER_OPERATORS
            operate = in_type(dtype_of(node), table[kind]) if exact else getattr(self.numbers, table[kind])
            a, b = self.of(node.a), self.of(node.b)
            if divides_by_places(node) and not self.is_drawn(node.b):
                return self._quotient(operate, a, b)
            return self._binary(operate, a, b)
        if kind in (tirx.And, tirx.Or):
            return self._connective(kind, self.of(node.a), self.of(node.b))
        if kind is tirx.Not:
            inner = self.of(node.a)
            return lambda f, m: _negated(inner(f, m))
        if kind is tirx.BitwiseNot:
            complement, bits = in_type(dtype_of(node), lambda value: ~as_integers(value)), self.of(node.a)
            return lambda f, m: complement(bits(f, m))
        if kind is tirx.Select:
            return self._choice(node.condition, node.true_value, node.false_value)
        if kind is tirx.Cast:
            return self._cast(node, self.of(node.value))
        if kind is tirx.Ramp:
            base, stride, lanes = self.of(node.base), self.of(node.stride), np.arange(const_int(node.lanes))[:, None]
            return lambda f, m: base(f, m) + stride(f, m) * lanes
        if kind is tirx.Broadcast:
            return self.of(node.value)
        if kind is tirx.Shuffle:
            return self._shuffle(node)
        if kind is tirx.Let:
            value, slot = self.of(node.value), self.slot(node.var)
            self.name(node.var, node.value)
            body = self.of(node.body)

            def let(f: Frame, m: Mask) -> Number:
                f[slot] = value(f, m)
                return body(f, m)

            return let
        if isinstance(node, Call):
            return self._known_call(node)
        raise Undecided(f"an expression of the kind {kind.__name__}")

    @staticmethod
    def _binary(operate: Callable, a: Evaluator, b: Evaluator) -> Evaluator:
        if not (is_steady(a) and is_steady(b)):
            return lambda f, m: operate(a(f, m), b(f, m))
        found: list[Number] = []

        def once(f: Frame, m: Mask) -> Number:
            if not found:
                found.append(operate(a(f, None), b(f, None)))
            return found[0]

        return _steady(once)

    def _quotient(self, operate: Callable, a: Evaluator, b: Evaluator) -> Evaluator:
        """A quotient or a rest of places, which depends on the mask: nothing is divided by zero where it is wanted."""
        quotient = self._binary(operate, a, b)

        def evaluate(f: Frame, m: Mask) -> Number:
            zero = np.atleast_1d(both(m, np.asarray(b(f, m) == 0)))
            if zero.any():
                raise ZeroDivisor("it divides by zero", int(np.argwhere(zero)[0][-1]))
            return quotient(f, m)

        return evaluate

    def _multiply_add(self, a: Evaluator, b: Evaluator, c: Evaluator) -> Evaluator:
        numbers = self.numbers
        return lambda f, m: numbers.multiply_add(a(f, m), b(f, m), c(f, m))

    def _literal(self, value: float, dtype: str) -> Number:
        return self.numbers.constant(value, dtype) if value == value else int(self.numbers.noise(1, "not a number")[0])

    def _comparison(self, kind: type, node: Any) -> Evaluator:
        if is_float(dtype_of(node.a)) and not self.is_drawn(node):
            return decided(_COMPARED[kind], (node.a, node.b), self)
        a, b, compare = self.of(node.a), self.of(node.b), _COMPARED[kind]
        ranks = self.numbers.ranks if is_float(dtype_of(node.a)) else None
        sighting = self.sighting(node)
        if ranks is None and sighting is None:
            return lambda f, m: _truth(compare(a(f, m), b(f, m)))

        def evaluate(f: Frame, m: Mask) -> Number:
            x, y = a(f, m), b(f, m)
            if ranks is not None:
                x, y = ranks(x), ranks(y)
            if sighting is not None and sighting.open:
                sighting.look(x, y, m)
            return _truth(compare(x, y))

        return evaluate

    def _extreme(self, kind: type, node: Any) -> Evaluator:
        """A minimum or a maximum."""
        if is_float(dtype_of(node)) and not self.is_drawn(node):
            with suppress(Undecided):
                return self._choice((tirx.GE if kind is tirx.Max else tirx.LE)(node.a, node.b), node.a, node.b)
        a, b = self.of(node.a), self.of(node.b)
        table = _FIELD if is_float(dtype_of(node)) else INTEGER_OPERATORS
        operate = INTEGER_OPERATORS[kind] if table is INTEGER_OPERATORS else getattr(self.numbers, table[kind])
        if self.numbers.sums and table is _FIELD and self.is_drawn(node.a) and self.is_drawn(node.b):
            joined, most = self.numbers.joined, kind is tirx.Max
            return lambda f, m: joined(np.array(np.broadcast_arrays(a(f, m), b(f, m))), most)
        sighting = self.sighting(node)
        if sighting is None or not sighting.open:
            return self._binary(operate, a, b)
        ranks = self.numbers.ranks if table is _FIELD else lambda value: value

        def evaluate(f: Frame, m: Mask) -> Number:
            x, y = a(f, m), b(f, m)
            if sighting.open:
                sighting.look(ranks(x), ranks(y), m)
            return operate(x, y)

        return evaluate

    def sighting(self, node: Any) -> Sighting | None:
        """Where to note how a comparison of data comes out; ``None`` for one of places."""
        if self.sightings is None or not self.is_drawn(node):
            return None
        return self.sightings.of(node)

    def is_drawn(self, node: Any) -> bool:
        """Whether an expression depends on what memory holds."""
        found: list[Any] = []

        def see(var: Any) -> None:
            if var in self.drawn:
                found.append(var)

        structural_walk(node, [(TensorLoad, found.append), (tirx.Var, see)])
        return bool(found)

    @staticmethod
    def _connective(kind: type, a: Evaluator, b: Evaluator) -> Evaluator:
        stops = kind is tirx.Or

        def evaluate(f: Frame, m: Mask) -> Number:
            first = a(f, m)
            if isinstance(first, int):
                return int(stops) if bool(first) == stops else b(f, m)
            first = first.astype(bool)
            wanted = both(m, ~first if stops else first)
            if none_of(wanted):
                return first
            second = b(f, wanted)
            return first | (second != 0) if stops else first & (second != 0)

        return evaluate

    def _choice(self, condition: Any, true: Any, false: Any) -> Evaluator:
        test, yes, no = self.of(condition), self.of(true), self.of(false)

        def evaluate(f: Frame, m: Mask) -> Number:
            known = test(f, m)
            if isinstance(known, int):
                return yes(f, m) if known else no(f, m)
            known = known != 0
            first, second = both(m, known), both(m, ~known)
            if none_of(first):
                return no(f, m)
            if none_of(second):
                return yes(f, m)
            return np.where(known, yes(f, first), no(f, second))

        return evaluate

    def _cast(self, node: tirx.Cast, value: Evaluator) -> Evaluator:
        source, target = dtype_of(node.value), dtype_of(node)
        if is_float(source) and is_float(target):
            return value
        if is_float(target):
            residue = self.numbers.residue
            return lambda f, m: residue(as_integers(value(f, m)))
        truth = target.startswith("bool")
        if is_float(source) and not self.is_drawn(node):
            return decided(lambda x: x != 0 if truth else np.trunc(x).astype(np.int64), (node.value,), self)
        if is_float(source):
            sighting = self.sighting(node)
            whole = in_type(target, self.numbers.whole)
            convert = whole if not truth else lambda number: _truth(number != 0)

            def converted(f: Frame, m: Mask) -> Number:
                found = convert(value(f, m))
                if sighting is not None and sighting.open:
                    sighting.look(found, 0, m)
                return found

            return converted
        if truth:
            return lambda f, m: _truth(value(f, m) != 0)
        if source.startswith("bool") or loses_nothing(source, target):
            return lambda f, m: as_integers(value(f, m))
        return lambda f, m: wrapped(target, as_integers(value(f, m)))

    def _shuffle(self, node: tirx.Shuffle) -> Evaluator:
        vectors = [self.of(v) for v in node.vectors]
        sizes = [tvm.DataType(dtype_of(v)).lanes for v in node.vectors]
        wanted = [const_int(i) for i in node.indices]

        def evaluate(f: Frame, m: Mask) -> Number:
            parts = [np.atleast_2d(np.asarray(v(f, m))) for v in vectors]
            outer = np.broadcast_shapes(*((*p.shape[:-2], 1, p.shape[-1]) for p in parts))
            whole = [np.broadcast_to(p, (*outer[:-2], n, outer[-1])) for p, n in zip(parts, sizes)]
            return np.concatenate(whole, axis=-2)[..., wanted, :]

        return evaluate

    def _known_call(self, node: Call) -> Evaluator:
        name = operator_name(node)
        if name == "prim.if_then_else":
            return self._choice(*node.args)
        if name in ("prim.likely", "tirx.likely"):
            return self.of(node.args[0])
        arguments = node.args[1:] if node.args and isinstance(node.args[0], tvm.ir.StringImm) else node.args
        if name in ("tirx.fma", "fmaf", "fma", "__fmaf_rn"):
            a, b, c = (self.of(x) for x in arguments)
            return self._multiply_add(a, b, c)
        if name == "tirx.sigmoid":
            # As TVM's legalization writes it.
            a, numbers = self.of(arguments[0]), self.numbers

            def sigmoid(f: Frame, m: Mask) -> Number:
                exponential = numbers.function_of("exp", [numbers.negative(a(f, m))])
                return numbers.inverse(numbers.add(exponential, numbers.residue(1)))

            return sigmoid
        if name in ("tirx.isnan", "tirx.isinf", "tirx.isfinite"):
            # No element of the field stands for such a number.
            finite = int(name == "tirx.isfinite")
            return lambda f, m: finite
        if name == "tirx.reinterpret":
            source, target = dtype_of(arguments[0]), dtype_of(node)
            value = self.of(arguments[0])
            return value if source == target else self._function(f"bits of {source} as {target}", [value], arguments)
        if name in ("fmaxf", "fmax", "__hmax", "fminf", "fmin", "__hmin"):
            kind = tirx.Max if "max" in name else tirx.Min
            return self._extreme(kind, kind(*arguments))
        known = function_name(name)
        if known is None or not (is_float(dtype_of(node)) or known in OF_INTEGERS):
            return self.call(node, name)
        return self._function(known, [self.of(x) for x in arguments], arguments)

    def _function(self, name: str, evaluators: list[Evaluator], arguments: Any) -> Evaluator:
        numbers = self.numbers
        # Lanes of a vector have one exponent where it is a literal.
        raised = arguments[1].value if name == "pow" and isinstance(arguments[1], tirx.Broadcast) else arguments[-1]
        if name == "pow" and isinstance(raised, (tirx.FloatImm, tirx.IntImm)):
            exponent, base = float(raised.value), evaluators[0]
            if exponent == int(exponent) and 0 <= exponent <= 64:
                return lambda f, m: numbers.power(base(f, m), int(exponent))
        return lambda f, m: numbers.function_of(name, [e(f, m) for e in evaluators])


def _truth(value: Any) -> Number:
    return int(value) if isinstance(value, (bool, np.bool_)) else value


def _negated(value: Number) -> Number:
    return int(not value) if isinstance(value, int) else value == 0
