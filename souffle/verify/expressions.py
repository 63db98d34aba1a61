"""Integer expressions over finite axes: the checker's own form of indices and conditions, evaluated by NumPy.

Everything in a kernel is static, so an index is a function on a box of integers (tile, thread, turns of loops). It is
evaluated with one array dimension for each axis, and parts that depend on few axes stay small by broadcasting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

__all__ = [
    "Axis",
    "Expr",
    "Undecided",
    "add",
    "asked_once",
    "compare",
    "conjuncts",
    "const",
    "evaluate",
    "holding",
    "interval",
    "linear_terms",
    "operation",
    "remade",
    "span",
    "tabulated",
    "unknown",
    "variable",
    "wrapped",
]


class Undecided(Exception):
    """The checker cannot say; the message is the reason. Becomes UNKNOWN in the certificate, never an error."""


_Key, _Answer = TypeVar("_Key"), TypeVar("_Answer")


def asked_once(known: dict[_Key, _Answer | Undecided], key: _Key, ask: Callable[[], _Answer]) -> _Answer:
    """What is known for a key, or else asked now; that it cannot be said is an answer, too.

    Raises
    ------
    Undecided
    """
    if key not in known:
        try:
            known[key] = ask()
        except Undecided as reason:
            known[key] = reason
    found = known[key]
    if isinstance(found, Undecided):
        raise found
    return found


@dataclass(frozen=True, eq=False)
class Axis:
    """A variable that takes the values ``0 .. extent - 1``; with `data`, one of them, and data says which."""

    name: str
    extent: int
    data: bool = False


class Expr:
    """A node; equal ones are one object as long as it lives, so that shared parts are evaluated once.

    Attributes
    ----------
    op : str
        ``"const"``, ``"axis"``, ``"unknown"`` (data, or anything the checker does not follow), ``"real"`` (no whole
        number: :mod:`souffle.verify.reals`), ``"table"`` (of the values of `args`, each from its lowest on), or an
        operation.
    args : tuple of Expr
    value
        The number, the axis, the table, or the (lowest, highest) value of what is unknown, or wraps around.
    axes : frozenset of Axis
        On which it depends.
    opaque : bool
        Whether something in it is unknown.
    bounds : (int, int) or None
        What :func:`interval` says of it, once asked.
    """

    __slots__ = ("args", "axes", "bounds", "op", "opaque", "value")

    def __init__(self, op: str, args: tuple[Expr, ...], value: object) -> None:
        self.op = op
        self.args = args
        self.value = value
        self.axes = frozenset({value}) if op == "axis" else frozenset().union(*(a.axes for a in args))
        self.opaque = op == "unknown" or any(a.opaque for a in args)
        self.bounds: tuple[int, int] | None = None

    @property
    def by_data(self) -> bool:
        """Whether data chooses among its values: each may occur, none need."""
        return any(axis.data for axis in self.axes)

    def __repr__(self) -> str:
        if self.op == "const":
            return str(self.value)
        if self.op == "axis":
            return self.value.name
        return "?" if self.op == "unknown" else f"({self.op} {' '.join(map(repr, self.args))})"


_interned: dict[tuple, Expr] = {}
_INTERNED_MOST = 400_000
"""Nodes kept for sharing; beyond, the table is emptied, which costs sharing only."""


def _node(op: str, args: tuple[Expr, ...], value: object = None) -> Expr:
    key = (op, *(id(a) for a in args), value)
    found = _interned.get(key)
    if found is None:
        if len(_interned) > _INTERNED_MOST:
            _interned.clear()
        # The node keeps its arguments alive, so that their ids stay theirs as long as it is in the table.
        found = _interned[key] = Expr(op, args, value)
    return found


def const(value: int) -> Expr:
    """A number."""
    return _node("const", (), int(value))


def variable(axis: Axis) -> Expr:
    """The value of an axis."""
    return const(0) if axis.extent == 1 else _node("axis", (), axis)


def unknown(low: int, high: int) -> Expr:
    """Some value from `low` to `high`; two of them are never taken for equal."""
    return Expr("unknown", (), (low, high))


def wrapped(expr: Expr, low: int, high: int) -> Expr:
    """What is left of a number in a type that holds those from `low` to `high`."""
    least, most = interval(expr)
    return expr if low <= least and most <= high else _node("wrap", (expr,), (low, high))


def tabulated(args: tuple[Expr, ...], values: np.ndarray) -> Expr:
    """The element of `values` at the place that `args` say, whose lowest values are the first."""
    if values.min() == values.max():
        return const(values.flat[0])
    return _node("table", args, (values.shape, values.astype(np.int64).tobytes()))


def _table(expr: Expr) -> np.ndarray:
    shape, values = expr.value
    return np.frombuffer(values, np.int64).reshape(shape)


def remade(expr: Expr, args: Sequence[Expr]) -> Expr:
    """The operation of `expr`, of other arguments."""
    return wrapped(*args, *expr.value) if expr.op == "wrap" else operation(expr.op, *args)


def add(*terms: Expr) -> Expr:
    """The sum."""
    total = const(0)
    for term in terms:
        total = operation("add", total, term)
    return total


def _divisor(b: np.ndarray) -> np.ndarray:
    """That a divisor is not zero where it divides is claimed by itself; elsewhere the result does not matter."""
    return b if np.ndim(b) == 0 and b else np.where(b == 0, 1, b)


def _truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    quotient = np.abs(a) // np.abs(_divisor(b))
    return np.where((a < 0) != (b < 0), -quotient, quotient)


_EVALUATE = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "floordiv": lambda a, b: a // _divisor(b),
    "floormod": lambda a, b: a % _divisor(b),
    "div": _truncated,
    "mod": lambda a, b: a - _truncated(a, b) * b,
    "min": np.minimum,
    "max": np.maximum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": lambda a, b: (a != 0) & (b != 0),
    "or": lambda a, b: (a != 0) | (b != 0),
    "not": lambda a: a == 0,
    "select": lambda c, a, b: np.where(c != 0, a, b),
    "shl": np.left_shift,
    "shr": np.right_shift,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def compare(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A comparison of numbers of any type."""
    return _EVALUATE[op](a, b)


_CONDITIONS = {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"}


def _is_truth(expr: Expr) -> bool:
    return expr.op in _CONDITIONS or (
        expr.op in ("const", "unknown") and 0 <= interval(expr)[0] <= interval(expr)[1] <= 1
    )


def operation(op: str, *args: Expr) -> Expr:
    """An operation of the table above, folded where its arguments are numbers."""
    if all(a.op == "const" for a in args):
        if op in ("div", "mod", "floordiv", "floormod") and args[1].value == 0:
            raise Undecided("a division by zero")
        return const(int(_EVALUATE[op](*(np.int64(a.value) for a in args))))
    values = [a.value if a.op == "const" else None for a in args]
    if op in ("add", "bor", "bxor") and 0 in values:
        return args[0] if values[1] == 0 else args[1]
    if op in ("sub", "shl", "shr") and values[1] == 0:
        return args[0]
    if op == "mul" and 0 in values:
        return const(0)
    if op == "mul" and 1 in values:
        return args[0] if values[1] == 1 else args[1]
    if op in ("div", "floordiv") and values[1] == 1:
        return args[0]
    if op in ("div", "mod") and values[1] is not None and values[1] > 0 and interval(args[0])[0] >= 0:
        # C's division is the mathematical one where nothing is negative.
        op = "floordiv" if op == "div" else "floormod"
    if op == "and":
        known = [v for v in values if v is not None]
        if known:
            return const(0) if known[0] == 0 else args[1] if values[0] is not None else args[0]
    if op == "select" and values[0] is not None:
        return args[1] if values[0] else args[2]
    if op == "select" and values[2] == 0 and _is_truth(args[1]):
        return operation("and", args[0], args[1])
    if op == "select" and values[1] == 1 and _is_truth(args[2]):
        return operation("or", args[0], args[2])
    return _node(op, args)


def evaluate(expr: Expr, env: Mapping[Axis, np.ndarray], memo: dict[Expr, np.ndarray]) -> np.ndarray:
    """The values of an expression, broadcast over the arrays of its axes.

    Raises
    ------
    Undecided
        If something in it is unknown.
    """
    found = memo.get(expr)
    if found is not None:
        return found
    if expr.op == "const":
        result = np.int64(expr.value)
    elif expr.op == "axis":
        result = env[expr.value]
    elif expr.op == "unknown":
        raise Undecided("a value that depends on data")
    elif expr.op == "wrap":
        low, high = expr.value
        result = (evaluate(expr.args[0], env, memo) - low) % (high - low + 1) + low
    elif expr.op == "table":
        result = _table(expr)[tuple(evaluate(a, env, memo) - interval(a)[0] for a in expr.args)]
    else:
        result = _EVALUATE[expr.op](*(evaluate(a, env, memo) for a in expr.args))
    memo[expr] = result
    return result


def holding(conditions: Sequence[Expr], env: Mapping[Axis, np.ndarray], memo: dict[Expr, np.ndarray]) -> np.ndarray:
    """Where all of some conditions hold, broadcast over the arrays of their axes."""
    mask = np.True_
    for condition in conditions:
        mask = mask & (evaluate(condition, env, memo) != 0)
    return mask


_LOWEST, _HIGHEST = -(2**80), 2**80
"""Beyond every number of a type."""


def interval(expr: Expr) -> tuple[int, int]:
    """Bounds of an expression's values, inclusive; each axis on its own, so not the tightest."""
    if expr.bounds is None:
        expr.bounds = _interval(expr)
    return expr.bounds


def _interval(expr: Expr) -> tuple[int, int]:
    if expr.op == "const":
        return expr.value, expr.value
    if expr.op == "axis":
        return 0, expr.value.extent - 1
    if expr.op in ("unknown", "wrap"):
        return expr.value
    if expr.op == "table":
        return int(_table(expr).min()), int(_table(expr).max())
    if expr.op in _CONDITIONS:
        return 0, 1
    parts = [interval(a) for a in expr.args]
    (a, b), (c, d) = parts[0], parts[-1]
    if expr.op == "select":
        return min(parts[1][0], parts[2][0]), max(parts[1][1], parts[2][1])
    if expr.op in ("min", "max"):
        choose = min if expr.op == "min" else max
        return choose(a, c), choose(b, d)
    if expr.op == "add":
        return max(a + c, _LOWEST), min(b + d, _HIGHEST)
    if expr.op == "sub":
        return max(a - d, _LOWEST), min(b - c, _HIGHEST)
    corners: list[int] = []
    if expr.op == "mul":
        corners = [a * c, a * d, b * c, b * d]
    elif expr.op in ("floordiv", "div") and c <= 0:
        corners = [-max(abs(a), abs(b)), max(abs(a), abs(b))]
    elif expr.op in ("floordiv", "div"):
        # Truncation is at least the floor, and at most one more.
        corners = [x // y for x in (a, b) for y in (c, d)]
        if expr.op == "div":
            corners = [-((-q) // y) if q < 0 else q // y for q in (a, b) for y in (c, d)]
    elif expr.op == "floormod" and c > 0:
        corners = [a, b] if c == d and a // c == b // c and b - a < c and a >= 0 and b < c else [0, d - 1]
    elif expr.op == "mod" and c > 0:
        corners = [0 if a >= 0 else -(d - 1), 0 if b <= 0 else d - 1]
    elif expr.op in ("shl", "shr") and c >= 0 and (c == d or d < 32):
        corners = [x >> y if expr.op == "shr" else x << y for x in (a, b) for y in (c, d)]
    elif expr.op == "band" and (c >= 0 or a >= 0):
        corners = [0, min(x for x in (b if a >= 0 else _HIGHEST, d if c >= 0 else _HIGHEST))]
    elif expr.op in ("bor", "bxor") and a >= 0 and c >= 0:
        corners = [0, (1 << max(b, d).bit_length()) - 1]
    if not corners:
        return _LOWEST, _HIGHEST
    return max(min(corners), _LOWEST), min(max(corners), _HIGHEST)


def conjuncts(conditions: Sequence[Expr]) -> tuple[Expr, ...]:
    """The parts that must all hold, without repeats and without what always holds."""
    found: dict[Expr, None] = {}
    for condition in conditions:
        if condition.op == "and":
            found.update(dict.fromkeys(conjuncts(condition.args)))
        elif condition.op != "const" or condition.value == 0:
            found[condition] = None
    return tuple(found)


def linear_terms(expr: Expr) -> tuple[dict[Expr, int], int]:
    """An expression as a sum of parts times integers, and a number."""
    terms: dict[Expr, int] = {}
    total = 0
    stack = [(expr, 1)]
    while stack:
        node, factor = stack.pop()
        if node.op == "const":
            total += factor * node.value
        elif node.op == "add":
            stack += [(a, factor) for a in node.args]
        elif node.op == "sub":
            stack += [(node.args[0], factor), (node.args[1], -factor)]
        elif node.op == "mul" and node.args[1].op == "const":
            stack.append((node.args[0], factor * node.args[1].value))
        elif node.op == "mul" and node.args[0].op == "const":
            stack.append((node.args[1], factor * node.args[0].value))
        elif node.op == "shl" and node.args[1].op == "const":
            stack.append((node.args[0], factor << node.args[1].value))
        else:
            terms[node] = terms.get(node, 0) + factor
    return {node: factor for node, factor in terms.items() if factor}, total


def span(terms: Mapping[Expr, int]) -> tuple[int, int]:
    """Bounds of a sum of parts times integers, inclusive."""
    ends = [sorted(end * by for end in interval(term)) for term, by in terms.items()]
    return sum(pair[0] for pair in ends), sum(pair[1] for pair in ends)
