"""Sums of products in a definition, as products of matrices where elements share their factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from souffle.tvm_compat import variables
from souffle.verify.values.field import Field
from souffle.verify.values.scalars import Evaluator, Frame

__all__ = ["Factors", "factors_of"]

_MOST_GROUPS = 256
"""Of elements that have all shared indices in common; each is a product of matrices of its own."""

_MOST_WASTE = 4
"""Elements of the products of matrices for each one that is wanted."""

_CHUNK = 1 << 21
"""Elements of a factor that are worked out at once."""


@dataclass(frozen=True, eq=False)
class Factors:
    """A term that is a product of two expressions.

    Attributes
    ----------
    evaluators : tuple of callable
        Of the two.
    own : tuple of tuple of int
        For each, which spatial variables it depends on.
    """

    evaluators: tuple[Evaluator, Evaluator]
    own: tuple[tuple[int, ...], tuple[int, ...]]

    def sums(
        self,
        field: Field,
        coordinates: Sequence[np.ndarray],
        turns: Sequence[np.ndarray],
        spatial: Sequence[int],
        reduction: Sequence[int],
        frame: Frame,
    ) -> np.ndarray | None:
        """The sums over all turns for some elements; ``None`` where their factors are hardly shared.

        Parameters
        ----------
        field : Field
        coordinates : sequence of array
            Of the elements, for each spatial variable.
        turns : sequence of array
            Values of each reduction variable.
        spatial, reduction : sequence of int
            The slots of these variables.
        frame : list
        """
        count = len(coordinates[0]) if coordinates else 1
        shared = tuple(v for v in self.own[0] if v in self.own[1])
        group, first = _numbered([coordinates[v] for v in shared], count)
        if len(first) > _MOST_GROUPS:
            return None
        sides = [_numbered([coordinates[v] for v in own], count) for own in self.own]
        groups = [group[representative] for _, representative in sides]
        sizes = [np.bincount(g, minlength=len(first)) for g in groups]
        if int((sizes[0] * sizes[1]).sum()) > _MOST_WASTE * count:
            return None
        members = [np.flatnonzero(group == number) for number in range(len(first))]
        parts = [[np.flatnonzero(g == number) for g in groups] for number in range(len(first))]
        result = np.zeros(count, np.int64)
        step = max(1, _CHUNK // max(len(g) for g in groups))
        for start in range(0, len(turns[0]), step):
            some = [t[start : start + step] for t in turns]
            left, right = (
                self._factor(side, [c[sides[side][1]] for c in coordinates], some, spatial, reduction, frame)
                for side in (0, 1)
            )
            for (rows, columns), here in zip(parts, members):
                product = field.matrix_product(left[:, rows].T, right[:, columns])
                at = [np.searchsorted(r, sides[i][0][here]) for i, r in enumerate((rows, columns))]
                result[here] = field.add(result[here], product[at[0], at[1]])
        return result

    def _factor(
        self,
        side: int,
        coordinates: Sequence[np.ndarray],
        turns: Sequence[np.ndarray],
        spatial: Sequence[int],
        reduction: Sequence[int],
        frame: Frame,
    ) -> np.ndarray:
        """One factor: shape (turns, elements)."""
        for slot, values in zip(spatial, coordinates):
            frame[slot] = values
        for slot, values in zip(reduction, turns):
            frame[slot] = values[:, None]
        count = len(coordinates[0]) if coordinates else 1
        return np.broadcast_to(self.evaluators[side](frame, None), (len(turns[0]), count))


def _numbered(coordinates: Sequence[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    """A number for each element, equal where all coordinates are, and for each number one element."""
    key = np.zeros(count, np.int64)
    for values in coordinates:
        key = key * (int(values.max(initial=0)) + 1) + values
    _, first, numbers = np.unique(key, return_index=True, return_inverse=True)
    return numbers, first


def factors_of(term: Any, spatial: Sequence[Any], of: Callable[[Any], Evaluator]) -> Factors | None:
    """The factors of a term, if it is a product, and both depend on less than all that the element does."""
    while isinstance(term, tirx.Cast):
        term = term.value
    if not isinstance(term, tirx.Mul):
        return None
    own = []
    for factor in (term.a, term.b):
        used = variables(factor)
        own.append(tuple(i for i, v in enumerate(spatial) if any(v.same_as(u) for u in used)))
    if len(set(own[0]) | set(own[1])) in (len(own[0]), len(own[1])):
        return None
    return Factors((of(term.a), of(term.b)), (own[0], own[1]))
