"""TensorIR's scalar expressions as the checker's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.tvm_compat import dtype_of
from souffle.verify import reals
from souffle.verify.accesses import Claim
from souffle.verify.conditions import under
from souffle.verify.expressions import Expr, const, interval, operation, unknown, wrapped

__all__ = [
    "BINARY",
    "FUNCTIONS",
    "REAL",
    "Claims",
    "bytes_of",
    "index_of",
    "is_float",
    "is_hoisted",
    "lanes_of",
    "operator_name",
    "unknown_of",
]

BINARY = {
    tirx.Add: "add",
    tirx.Sub: "sub",
    tirx.Mul: "mul",
    tirx.Div: "div",
    tirx.Mod: "mod",
    tirx.FloorDiv: "floordiv",
    tirx.FloorMod: "floormod",
    tirx.Min: "min",
    tirx.Max: "max",
    tirx.EQ: "eq",
    tirx.NE: "ne",
    tirx.LT: "lt",
    tirx.LE: "le",
    tirx.GT: "gt",
    tirx.GE: "ge",
    tirx.And: "and",
    tirx.Or: "or",
    tirx.LShift: "shl",
    tirx.RShift: "shr",
    tirx.BitwiseAnd: "band",
    tirx.BitwiseOr: "bor",
    tirx.BitwiseXor: "bxor",
}

_MAY_OVERFLOW = frozenset({"add", "sub", "mul", "div", "floordiv", "shl"})
_DIVISIONS = frozenset({"div", "mod", "floordiv", "floormod"})

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
REAL = ("float32", "float64")
FUNCTIONS = {
    f"{name}{end}": (op, dtype)
    for name, op in (
        *((name, name) for name in ("floor", "ceil", "trunc", "round", "rint", "nearbyint")),
        *(("fmin", "min"), ("fmax", "max")),
    )
    for end, dtype in zip(("f", ""), REAL, strict=True)
}
"""What C calls operations on floating-point numbers, and their type."""

_EVALUATED = 2**62
"""Beyond, nothing is evaluated in 64 bits."""


class Claims:
    """Claims about expressions that are read.

    Attributes
    ----------
    found : list of Claim
        Of the expressions read so far.
    of_names : dict
        What is claimed of data in the value of a variable, which matters where an index names it.
    choices, shortcuts : tuple of Expr
        Conditions around the expression that is read: of choices, and those that are not asked about what is hoisted.
    """

    def __init__(self) -> None:
        self.found: list[Claim] = []
        self.of_names: dict[Any, tuple[Claim, ...]] = {}
        self.choices: tuple[Expr, ...] = ()
        self.shortcuts: tuple[Expr, ...] = ()

    def claim(self, value: Expr, low: int, high: int, otherwise: str) -> None:
        """Note one more."""
        self.found.append(Claim(value, low, high, (*self.choices, *self.shortcuts), otherwise, None))

    @contextmanager
    def under(self, choices: tuple[Expr, ...] = (), shortcuts: tuple[Expr, ...] | None = None) -> Iterator[None]:
        """Within further conditions; `shortcuts` in place of those that there are."""
        outer = self.choices, self.shortcuts
        self.choices = (*self.choices, *choices)
        self.shortcuts = self.shortcuts if shortcuts is None else shortcuts
        yield
        self.choices, self.shortcuts = outer


def bytes_of(dtype: str) -> int:
    """Bytes of one element as stored, with all its lanes."""
    known = tvm.DataType(dtype)
    return max(1, known.bits // 8) * known.lanes


def lanes_of(node: Any) -> int:
    """How many numbers an expression is."""
    return int(tvm.DataType(dtype_of(node)).lanes)


def operator_name(call: Call) -> str:
    """The name of what is called; of an external function that is in the text, its own."""
    name = str(getattr(call.op, "name", None) or getattr(call.op, "name_hint", call.op))
    return str(call.args[0].value) if name in ("tirx.call_extern", "tirx.call_pure_extern") else name


def is_hoisted(node: Any) -> bool:
    """Whether the generator writes an expression as statements ahead of the one that it stands in.

    So what is in it is calculated whatever a short cut or a ``Select`` around it says.
    """
    if isinstance(node, Call) and operator_name(node) in ("prim.if_then_else", "tirx.reinterpret"):
        return True
    return isinstance(node.ty, tvm.ir.PrimType) and lanes_of(node) > 1


def index_of(
    node: Any,
    env: dict[Any, Expr],
    loaded: Callable[[TensorLoad], Expr | None] = lambda load: None,
    lane: Expr | None = None,
    claims: Claims | None = None,
) -> Expr:
    """An expression of TensorIR; what depends on data, or is not known otherwise, is unknown within its type.

    Parameters
    ----------
    node : expression
    env : dict
        What variables stand for.
    loaded : callable
        What an element of a buffer is, where that is known to be one value wherever it stands in the expression.
    lane : Expr, optional
        Which lane is asked for, of an expression with several.
    claims : Claims, optional
        Gets what must hold for the result to be right.
    """
    return _Indices(env, loaded, lane, claims or Claims()).of(node)


class _Indices:
    def __init__(
        self, env: dict[Any, Expr], loaded: Callable[[TensorLoad], Expr | None], lane: Expr | None, claims: Claims
    ) -> None:
        self.env = env
        self.loaded = loaded
        self.lane = lane
        self.claims = claims

    def of(self, node: Any) -> Expr:
        if self.claims.shortcuts and is_hoisted(node):
            with self.claims.under(shortcuts=()):
                return self.of(node)
        # `isinstance` of TVM's classes, which have abstract base classes, is a good part of the reader's time.
        kind = type(node)
        if kind is tirx.IntImm:
            return const(int(node.value))
        if kind not in BINARY and isinstance(node, tvm.ir.Var):
            self.claims.found += self.claims.of_names.get(node, ())
            found = self.env.get(node)
            return unknown_of(node) if found is None else found
        op = BINARY.get(kind)
        if op is not None and not is_float(node.a):
            return self.binary(op, node)
        if isinstance(node, TensorLoad):
            value = None if is_float(node) else self.loaded(node)
            return unknown_of(node) if value is None else value
        if isinstance(node, tirx.Broadcast):
            return self.of(node.value)
        if isinstance(node, tirx.Ramp) and self.lane is not None:
            step = self.held("mul", node.stride, self.of(node.stride), self.lane)
            return self.held("add", node.base, self.of(node.base), step)
        if isinstance(node, tirx.Not):
            return operation("not", self.of(node.a))
        if isinstance(node, tirx.Select):
            condition, shortcuts = self.of(node.condition), self.claims.shortcuts
            with self.claims.under(shortcuts=(*shortcuts, condition)):
                one = self.of(node.true_value)
            with self.claims.under(shortcuts=(*shortcuts, operation("not", condition))):
                return self.chosen(node, condition, one, self.of(node.false_value))
        if isinstance(node, tirx.Cast) and not is_float(node.value) and not is_float(node):
            return self.cast(node)
        if isinstance(node, tirx.Let):
            with self.claims.under(shortcuts=()):
                self.env[node.var] = self.of(node.value)
            return self.of(node.body)
        if isinstance(node, Call):
            name = operator_name(node)
            if name == "prim.if_then_else":
                condition = self.of(node.args[0])
                with self.claims.under((condition,)):
                    one = self.of(node.args[1])
                with self.claims.under((operation("not", condition),)):
                    return self.chosen(node, condition, one, self.of(node.args[2]))
            if name == "prim.likely":
                return self.of(node.args[0])
        noted = len(self.claims.found)
        found = self.calculated(node)
        if found is None:
            # What is calculated of data is read, and its claims noted, by itself.
            del self.claims.found[noted:]
        return unknown_of(node) if found is None else found

    @staticmethod
    def chosen(node: Any, condition: Expr, one: Expr, other: Expr) -> Expr:
        if not is_float(node):
            return operation("select", condition, one, other)
        return reals.chosen(condition, one, other) or unknown_of(node)

    def calculated(self, node: Any) -> Expr | None:
        """What is calculated in floating point from whole numbers, or a whole number that it gives."""
        if isinstance(node, tirx.Cast):
            value, dtype = self.of(node.value), _element_type(node)
            if not is_float(node):
                return self.truncated(value, node)
            if dtype not in REAL:
                return None
            return reals.calculated("cast", dtype, value) if is_float(node.value) else reals.counted(value, dtype)
        if isinstance(node, tirx.FloatImm):
            return reals.literal(float(node.value), _element_type(node)) if _element_type(node) in REAL else None
        operands, op = (), BINARY.get(type(node))
        if op is not None:
            operands, dtype = (node.a, node.b), _element_type(node.a)
        elif isinstance(node, Call) and operator_name(node) in FUNCTIONS:
            operands, (op, dtype) = node.args[1:], FUNCTIONS[operator_name(node)]
        found = []
        for operand in operands:
            found.append(self.of(operand) if _element_type(operand) == dtype else unknown_of(operand))
            if found[-1].opaque:
                return None
        if op in _COMPARISONS:
            return reals.compared(op, *found)
        return reals.calculated(op, dtype, *found) if found else None

    def truncated(self, value: Expr, node: tirx.Cast) -> Expr | None:
        """A cast to integers, which must hold what is left of the number."""
        found = reals.truncated(value)
        if found is None or dtype_of(node).startswith("bool"):
            return None
        least, most = _type_range(dtype_of(node))
        low, high = interval(found)
        if least <= low and high <= most:
            return found
        if found.opaque:
            return None
        self.claims.claim(found, least, most, f"overflows {dtype_of(node)}")
        return found

    def binary(self, op: str, node: Any) -> Expr:
        one = self.of(node.a)
        if op not in ("and", "or") or lanes_of(node) > 1:
            return self.held(op, node, one, self.of(node.b))
        with self.claims.under(shortcuts=(*self.claims.shortcuts, one if op == "and" else operation("not", one))):
            return operation(op, one, self.of(node.b))

    def held(self, op: str, node: Any, one: Expr, other: Expr) -> Expr:
        """What an operation gives in `node`'s type: unsigned and short numbers wrap around, others must not leave it.

        What data may push over the end of its type may be anything afterwards, unless the conditions around it say that
        it does not.
        """
        if op not in _DIVISIONS and op not in _MAY_OVERFLOW:
            return operation(op, one, other)
        least, most = _type_range(dtype_of(node))
        if op in _DIVISIONS:
            low, high = interval(other)
            if low <= 0 <= high:
                self.claims.claim(operation("ne", other, const(0)), 1, 1, "divides by zero")
            if low == high == 0 or (other.opaque and low <= 0 <= high):
                return unknown(least, most)
        result = operation(op, one, other)
        low, high = interval(result) if op in _MAY_OVERFLOW else (least, most)
        if least <= low and high <= most:
            return result
        if result.opaque:
            low, high = interval(under(result, (*self.claims.choices, *self.claims.shortcuts)))
            return result if least <= low and high <= most else unknown(least, most)
        fits = low >= -_EVALUATED and high <= _EVALUATED
        if least == 0 or most <= _MOST_OF_SHORT:
            return wrapped(result, least, most) if fits else unknown(least, most)
        self.claims.claim(result, least, most, f"overflows {dtype_of(node)}")
        return result if fits else unknown(least, most)

    def cast(self, node: tirx.Cast) -> Expr:
        value = self.of(node.value)
        low, high = interval(value)
        least, most = _type_range(dtype_of(node))
        if least <= low and high <= most:
            return value
        if dtype_of(node).startswith("bool"):
            return operation("ne", value, const(0))
        return wrapped(value, least, most)


def is_float(node: Any) -> bool:
    """Whether a number, or each of a vector, is no whole one."""
    if type(node) is tirx.FloatImm:
        return True
    try:
        return "float" in dtype_of(node)
    except AttributeError:
        return False


def _element_type(node: Any) -> str:
    return dtype_of(node).split("x")[0]


_MOST_OF_SHORT = 2**15 - 1
"""The greatest signed number that wraps around: of ``int16``."""

_ANYTHING = (-(2**64), 2**64)
"""What has no type of which the range is known."""


def _type_range(dtype: str) -> tuple[int, int]:
    if dtype.startswith("bool"):
        return 0, 1
    match = re.match(r"(u?)int(\d+)", dtype)
    if match is None:
        return _ANYTHING
    bits = int(match.group(2))
    return (0, 2**bits - 1) if match.group(1) else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def unknown_of(node: Any) -> Expr:
    """What is known of any expression: the range of its type."""
    try:
        return unknown(*_type_range(dtype_of(node)))
    except AttributeError:
        return unknown(*_ANYTHING)
