"""What numbers of floating-point types decide that no data decides, such as where a resized image's elements lie.

Elements of the field have no fraction to be dropped and no order. So integers and comparisons that come of such numbers
are worked out with the numbers themselves: in their type, each operation rounded to nearest, in the definition and in
what was lowered alike. nvcc may leave a product that it adds unrounded; it is noted where that decides.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, Protocol

import numpy as np
from tvm import tirx
from tvm.ir import Call

from souffle.tvm_compat import dtype_of
from souffle.verify.expressions import Undecided
from souffle.verify.indices import BINARY, FUNCTIONS, REAL, is_float, operator_name
from souffle.verify.reals import KNOWN, Ends, operated
from souffle.verify.values.field import Number

__all__ = ["Text", "decided"]

_Real = Callable[[list, np.ndarray | None, bool], Ends]
"""With whether products may be added unrounded; if not, the ends are one number."""

# TVM's round is to even, whatever C calls it.
_FUNCTIONS = {f"tirx.{op}": op for op in ("floor", "ceil", "trunc", "nearbyint")} | {"tirx.round": "rint"}

_MOST = 2.0**62
"""Of an integer."""


class Text(Protocol):
    """What evaluates integers.

    Attributes
    ----------
    named : dict of Var to expression
        What variables of floating-point types stand for.
    unsure : bool
        Set where it decides whether a product is rounded before it is added.
    """

    named: dict[Any, Any]
    unsure: bool

    def of(self, node: Any) -> Callable[[list, np.ndarray | None], Number]:
        """The function that evaluates an expression."""


def decided(
    decide: Callable[..., np.ndarray], nodes: tuple[Any, ...], text: Text
) -> Callable[[list, np.ndarray | None], Number]:
    """The function that evaluates what numbers decide.

    Parameters
    ----------
    decide : callable
        A comparison, or what becomes of a number in a type of integers; rises or falls with each number.
    nodes : tuple of expressions
        The numbers.
    text : Text

    Raises
    ------
    Undecided
        If something in them is not known; also when evaluated, if a number is not finite.
    """
    reals = [_real(node, text) for node in nodes]

    def evaluate(f: list, m: np.ndarray | None) -> Number:
        rounded, any_way = ([real(f, m, way)[0] for real in reals] for way in (False, True))
        wanted = True if m is None else m
        if any((~np.isfinite(end) & wanted).any() for ends in any_way for end in ends):
            raise Undecided("a number that is not finite decides an integer or a comparison")
        corners = [decide(*(np.clip(end, -_MOST, _MOST) for end in some)) for some in product(*any_way)]
        if any(((one != corners[0]) & wanted).any() for one in corners):
            text.unsure = True
        found = decide(*(np.clip(ends[0], -_MOST, _MOST) for ends in rounded))
        return found if np.ndim(found) else int(found)

    return evaluate


def _real(node: Any, text: Text) -> _Real:
    dtype, kind = dtype_of(node).split("x")[0], type(node)
    if kind is tirx.Broadcast or node in text.named:
        return _real(node.value if kind is tirx.Broadcast else text.named[node], text)
    if kind is tirx.FloatImm and dtype in REAL and np.isfinite(node.value):
        return lambda f, m, way: _counted(float(node.value), dtype)
    if kind is tirx.Cast and dtype in REAL and not is_float(node.value):
        whole = text.of(node.value)
        return lambda f, m, way: _counted(whole(f, m), dtype)
    op, operands = _operation(node)
    if op not in KNOWN or dtype not in REAL:
        raise Undecided(f"{op or kind.__name__} of {dtype}, which decides an integer or a comparison")
    parts = [_real(operand, text) for operand in operands]
    if op == "select":
        parts.insert(0, _real(tirx.Cast("float64", node.args[0] if kind is Call else node.condition), text))

    def evaluate(f: list, m: np.ndarray | None, way: bool) -> Ends:
        ends = [part(f, m, way) for part in parts]
        most = max(near.ndim for near, _ in ends)
        near, far = operated(op, dtype, *(tuple(_with_axes(end, most) for end in pair) for pair in ends))
        return near, far if way else near

    return evaluate


def _operation(node: Any) -> tuple[str | None, tuple[Any, ...]]:
    if type(node) in BINARY:
        return BINARY[type(node)], (node.a, node.b)
    if isinstance(node, tirx.Cast):
        return "cast", (node.value,)
    if isinstance(node, tirx.Select):
        return "select", (node.true_value, node.false_value)
    name = operator_name(node) if isinstance(node, Call) else ""
    if name == "prim.if_then_else":
        return "select", tuple(node.args[1:])
    if name in FUNCTIONS:
        return FUNCTIONS[name][0], tuple(node.args[1:])
    return _FUNCTIONS.get(name, name or None), tuple(node.args) if name else ()


def _counted(value: Number | float, dtype: str) -> Ends:
    rounded = np.asarray(value).astype(dtype).astype(np.float64)
    return (np.stack([rounded, rounded]),) * 2


def _with_axes(ends: np.ndarray, axes: int) -> np.ndarray:
    return ends.reshape(2, *(1,) * (axes - ends.ndim), *ends.shape[1:])
