"""Printing accesses the way the paper writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from souffle.index.expression import UNKNOWN, Expression, Path
from souffle.program import TE

__all__ = ["axis_names", "describe_read"]

_SYMBOLS = {
    "add": ("+", 2),
    "sub": ("-", 2),
    "mul": ("*", 3),
    "floordiv": ("//", 3),
    "floormod": ("%", 3),
    "div": ("/", 3),
    "mod": ("%", 3),
    "lt": ("<", 1),
    "le": ("≤", 1),
    "gt": (">", 1),
    "ge": ("≥", 1),
    "eq": ("=", 1),
    "ne": ("≠", 1),
    "and": ("and", 0),
    "or": ("or", 0),
}
_ATOM = 9


def axis_names(te: TE) -> tuple[str, ...]:
    """Names of the data-parallel, then the reduction axes, made unique."""
    names: list[str] = []
    for axis in te.axes + te.reduce_axes:
        name, count = str(axis.var.name), 0
        while name in names:
            count += 1
            name = f"{axis.var.name}_{count}"
        names.append(name)
    return tuple(names)


def describe_read(te: TE, expression: Expression, tensor: str, indices: Sequence[int], paths: Iterable[Path]) -> str:
    """One read as ``O0[i, j] → I0[i, rk], 0 ≤ rk < 64``; ``*`` stands for an index that depends on data."""
    names = axis_names(te)
    used: set[int] = set()
    texts: list[str] = []
    notes: list[str] = []
    for position, number in enumerate(indices):
        if expression.nodes[number].data:
            texts.append("*")
            notes.append(f"0 ≤ * < {expression.inputs[_input_of(te, tensor)][0][position]}")
        else:
            texts.append(_text(expression, number, names, used)[0])
    alternatives = []
    for path in sorted(paths, key=sorted):
        conditions = []
        for number, wanted in sorted(path):
            if number == UNKNOWN or expression.nodes[number].data:
                conditions.append("data decides")
                continue
            text = _text(expression, number, names, used)[0]
            conditions.append(text if wanted else f"not ({text})")
        alternatives.append(" and ".join(dict.fromkeys(conditions)))
    split = len(expression.axes)
    ranges = []
    for position in sorted(used):
        first, extent = (expression.axes + expression.reduce_axes)[position]
        if position >= split:
            ranges.append(f"{first} ≤ {names[position]} < {first + extent}")
    parts = [f"{te.outputs[0].name}[{', '.join(names[:split])}] → {tensor}[{', '.join(texts)}]", *ranges, *notes]
    if alternatives and "" not in alternatives:
        parts.append("if " + " or ".join(dict.fromkeys(alternatives)))
    return ", ".join(parts)


def _input_of(te: TE, tensor: str) -> int:
    return next(i for i, candidate in enumerate(te.inputs) if candidate.name == tensor)


def _text(expression: Expression, number: int, names: Sequence[str], used: set[int]) -> tuple[str, int]:
    """The text of a node and how tightly it binds."""
    node = expression.nodes[number]
    if node.kind == "axis":
        used.add(node.value)
        return names[node.value], _ATOM
    if node.kind in ("int", "float"):
        return str(node.value), _ATOM if node.value >= 0 else 2
    if node.kind == "cast" and node.dtype != "bool":
        return _text(expression, node.args[0], names, used)
    args = [_text(expression, arg, names, used) for arg in node.args]
    if node.kind in _SYMBOLS:
        symbol, level = _SYMBOLS[node.kind]
        left = args[0][0] if args[0][1] >= level else f"({args[0][0]})"
        right = args[1][0] if args[1][1] > level else f"({args[1][0]})"
        return f"{left} {symbol} {right}", level
    if node.kind == "choose":
        test, then, other = (text for text, _ in args)
        return f"({then} if {test} else {other})", _ATOM
    name = str(node.value) if node.kind == "call" else node.kind
    return f"{name}({', '.join(text for text, _ in args)})", _ATOM
