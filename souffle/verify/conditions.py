"""What conditions say about values that data decides."""

from __future__ import annotations

from collections.abc import Sequence

from souffle.verify.expressions import Expr, conjuncts, linear_terms, operation, remade, span, unknown

__all__ = ["under"]

_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def under(expr: Expr, conditions: Sequence[Expr]) -> Expr:
    """`expr` where all of `conditions` hold: what data decides in it is bounded by what they compare it with."""
    facts = _Facts()
    for condition in conjuncts(conditions):
        facts.learn(condition, holds=True)
    return facts.applied(expr, {})


class _Facts:
    """Bounds of unknown terms, and of sums with one in them: a sum is told by its terms and their factors."""

    def __init__(self) -> None:
        self.bounds: dict[frozenset[tuple[Expr, int]], tuple[int, int]] = {}
        self.excluded: dict[frozenset[tuple[Expr, int]], frozenset[int]] = {}
        self.values: dict[tuple[Expr, int, int], Expr] = {}

    def also(self, condition: Expr, *, holds: bool) -> _Facts:
        """These, and what follows if a condition holds, or does not."""
        more = _Facts()
        more.bounds, more.excluded, more.values = dict(self.bounds), dict(self.excluded), self.values
        more.learn(condition, holds=holds)
        return more

    def learn(self, condition: Expr, *, holds: bool) -> None:
        """Note what follows if a condition holds, or does not."""
        if not condition.opaque:
            return
        if condition.op == "not":
            self.learn(condition.args[0], holds=not holds)
        elif condition.op == ("and" if holds else "or"):
            for part in condition.args:
                self.learn(part, holds=holds)
        elif condition.op in _OPPOSITE:
            self.compare(condition.op if holds else _OPPOSITE[condition.op], *condition.args)

    def compare(self, op: str, one: Expr, other: Expr) -> None:
        """``one op other`` holds: so much for their difference, and for each unknown term in it."""
        terms, total = linear_terms(operation("sub", one, other))
        if op == "ne":
            self.exclude(terms, -total)
            self.exclude({term: -factor for term, factor in terms.items()}, total)
            return
        most = -total - (op == "lt") if op in ("lt", "le", "eq") else None
        least = -total + (op == "gt") if op in ("gt", "ge", "eq") else None
        self.note(terms, least, most)
        self.note({term: -factor for term, factor in terms.items()}, _minus(most), _minus(least))
        for part, factor in terms.items():
            if part.opaque:
                low, high = span({term: by for term, by in terms.items() if term is not part})
                upper = None if most is None else most - low
                lower = None if least is None else least - high
                if factor < 0:
                    lower, upper = _minus(upper), _minus(lower)
                self.note(
                    {part: 1},
                    None if lower is None else -(-lower // abs(factor)),
                    None if upper is None else upper // abs(factor),
                )

    def exclude(self, terms: dict[Expr, int], value: int) -> None:
        """A sum is not a number, which bounds it where it is the least or the greatest that is left."""
        key = frozenset(terms.items())
        self.excluded[key] = self.excluded.get(key, frozenset()) | {value}
        self.note(terms, None, None)

    def note(self, terms: dict[Expr, int], least: int | None, most: int | None) -> None:
        """A sum lies between two numbers."""
        key = frozenset(terms.items())
        low, high = self.bounds.get(key) or span(terms)
        low, high = low if least is None else max(low, least), high if most is None else min(high, most)
        excluded = self.excluded.get(key, frozenset())
        while low <= high and low in excluded:
            low += 1
        while low <= high and high in excluded:
            high -= 1
        self.bounds[key] = low, high

    def applied(self, expr: Expr, memo: dict[Expr, Expr]) -> Expr:
        """`expr` with narrower unknown values for what is bounded here."""
        if not expr.opaque:
            return expr
        if expr not in memo:
            memo[expr] = self.narrowed(expr, memo)
        return memo[expr]

    def narrowed(self, expr: Expr, memo: dict[Expr, Expr]) -> Expr:
        terms, total = linear_terms(expr)
        low, high = self.bounds.get(frozenset(terms.items())) or span(terms)
        if low <= high and (low, high) != span(terms):
            return self.values.setdefault((expr, low, high), unknown(low + total, high + total))
        if not expr.args:
            return expr
        if expr.op == "select":
            condition, one, other = expr.args
            chosen = [
                self.also(condition, holds=holds).applied(part, {}) for part, holds in ((one, True), (other, False))
            ]
            return operation("select", self.applied(condition, memo), *chosen)
        return remade(expr, [self.applied(arg, memo) for arg in expr.args])


def _minus(value: int | None) -> int | None:
    return None if value is None else -value
