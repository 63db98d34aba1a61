"""An axis written as two digits, ``high * base + low``, where expressions divide it: each part then has one of them.

**Theorem.** Let `base` divide the axis' extent. Then ``(high, low) -> high * base + low`` is a bijection of digits and
values, so that an expression takes the same values over both, at the same points of the other axes. In what is divided
by a number, terms that are multiples of it come out: ``(m * d + r) // d = m + r // d`` and ``(m * d + r) % d = r % d``,
with the division that rounds down.

A tile's number, of which the quotient says where in one tensor's axis and the remainder where in another's, is the
case for which this is made: a condition on one of them does not tie the other's range to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from souffle.verify.expressions import (
    Axis,
    Expr,
    add,
    const,
    interval,
    linear_terms,
    operation,
    remade,
    variable,
)

__all__ = ["in_digits"]

_AS_THEY_ARE = ("table", "real")
"""What is not made anew of other arguments."""


def in_digits(nodes: Sequence[Expr]) -> tuple[Expr, ...] | None:
    """Some expressions with one axis, the longest that can be, as two digits; ``None`` where nothing divides one."""
    found = max(_bases(nodes), key=lambda pair: (pair[0].extent, pair[1]), default=None)
    if found is None:
        return None
    axis, base = found
    high = variable(Axis(f"{axis.name}/{base}", axis.extent // base))
    low = variable(Axis(f"{axis.name}%{base}", base))
    value = add(operation("mul", high, const(base)), low)
    known: dict[Expr, Expr] = {}
    return tuple(_with(node, axis, value, known) for node in nodes)


def _divided(node: Expr) -> bool:
    return node.op in ("floordiv", "floormod") and node.args[1].op == "const" and node.args[1].value > 1


def _parts(nodes: Sequence[Expr]) -> list[Expr]:
    """All that some expressions are made of, themselves among it."""
    seen, stack = dict.fromkeys(nodes), list(nodes)
    while stack:
        new = [argument for argument in stack.pop().args if argument not in seen]
        seen.update(dict.fromkeys(new))
        stack += new
    return list(seen)


def _bases(nodes: Sequence[Expr]) -> Iterator[tuple[Axis, int]]:
    """Axes that stand in a division, with the bases in which it takes off a digit."""
    parts = _parts(nodes)
    # The places of a table are counted from the lowest of what its arguments say themselves that they are.
    kept = frozenset().union(*(part.axes for part in parts if part.op in _AS_THEY_ARE))
    for part in parts:
        if not _divided(part):
            continue
        divisor = part.args[1].value
        for term, factor in linear_terms(part.args[0])[0].items():
            axis = term.value if term.op == "axis" else None
            if axis is None or axis.data or axis in kept or divisor % factor:
                continue
            base = divisor // abs(factor)
            if 1 < base < axis.extent and axis.extent % base == 0:
                yield axis, base


def _with(node: Expr, axis: Axis, value: Expr, known: dict[Expr, Expr]) -> Expr:
    """An expression with `value` in the place of an axis."""
    if axis not in node.axes:
        return node
    if node.op == "axis":
        return value
    if node not in known:
        args = [_with(argument, axis, value, known) for argument in node.args]
        known[node] = _quotient_or_rest(node.op, args[0], node.args[1].value) if _divided(node) else remade(node, args)
    return known[node]


def _quotient_or_rest(op: str, value: Expr, divisor: int) -> Expr:
    terms, total = linear_terms(value)
    whole, left = const(total // divisor), const(total % divisor)
    for term, factor in terms.items():
        whole = add(whole, operation("mul", term, const(factor // divisor)))
        left = add(left, operation("mul", term, const(factor % divisor)))
    low, high = interval(left)
    inside = low >= 0 and high < divisor
    if op == "floormod":
        return left if inside else operation("floormod", left, const(divisor))
    return whole if inside else add(whole, operation("floordiv", left, const(divisor)))
