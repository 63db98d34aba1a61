"""How often a part of an expression is evaluated."""

from __future__ import annotations

from functools import cached_property

from souffle.index import isl
from souffle.index.expression import Expression, Path
from souffle.index.quasi_affine import AffineView

__all__ = ["PointCounter"]


class PointCounter:
    """Counts the points of one expression's iteration space at which conditions hold."""

    def __init__(self, expression: Expression) -> None:
        self.expression = expression
        self._known: dict[tuple[bool, frozenset[Path]], int] = {}

    @cached_property
    def view(self) -> AffineView:
        """The conditions as sets; not built where everything is evaluated unconditionally."""
        return AffineView(self.expression)

    def times(self, reduced: bool, paths: frozenset[Path]) -> int:
        """At how many points one of `paths` may hold; of the output's axes only, or (`reduced`) of all axes.

        Exact where the conditions are quasi-affine; where data decides, as if it always decided for it.
        """
        key = (reduced, paths)
        if key not in self._known:
            self._known[key] = self._count(reduced, paths)
        return self._known[key]

    def _count(self, reduced: bool, paths: frozenset[Path]) -> int:
        everything = self.expression.points * (self.expression.reduction_points if reduced else 1)
        if frozenset() in paths:
            return everything
        domain = isl.within_budget(lambda: self._domain(reduced, paths))
        return everything if domain is None else min(everything, isl.count_points(domain))

    def _domain(self, reduced: bool, paths: frozenset[Path]) -> isl.Set:
        union: isl.Set | None = None
        for path in paths:
            part, _ = self.view.domain(path)
            union = part if union is None else union.union(part)
        return union if reduced else isl.first_dimensions(union, len(self.expression.axes))
