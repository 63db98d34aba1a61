"""Which comparisons of data were seen to come out how: what was never seen says nothing about what it decides."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from tvm import tirx

from souffle.tvm_compat import dtype_of, same_expression
from souffle.verify.stage_functions import text_of
from souffle.verify.values.field import Number

__all__ = ["Sighting", "TextSightings"]

_EXTREMES = (tirx.Min, tirx.Max)
_OUTCOMES = ("less", "equal", "more")


class Sighting:
    """A comparison, a minimum or a maximum in a text, and how its operands were to each other, over all points.

    A number that becomes an integer is compared with 0.

    Parameters
    ----------
    node : expression
    """

    def __init__(self, node: Any) -> None:
        self.node = node
        self.outcomes = [False, False, False]
        self._wanted = _possible(node)
        self.open = bool(self._wanted)

    def look(self, a: Number, b: Number, mask: np.ndarray | None) -> None:
        """Note how operands are to each other, where a mask holds; or the places of them in an order."""
        for outcome in self._wanted:
            if not self.outcomes[outcome]:
                found = (a < b) if outcome == 0 else (a == b) if outcome == 1 else (a > b)
                self.outcomes[outcome] = bool(np.any(found if mask is None else found & mask))
        self.open = bool(self.missing)

    @property
    def missing(self) -> tuple[str, ...]:
        """What was not seen: that the first operand is less than the second, equal, or more."""
        return tuple(_OUTCOMES[i] for i in self._wanted if not self.outcomes[i])

    @property
    def evaluated(self) -> bool:
        """Whether it was seen at all."""
        return any(self.outcomes)

    def __str__(self) -> str:
        return f"{text_of(self.node)} was never seen {' or '.join(self.missing)}"


def _possible(node: Any) -> tuple[int, ...]:
    """Which outcomes a comparison may have by its types and literals, of those that make a difference."""
    if isinstance(node, tirx.Cast):
        # A number becomes a Boolean by being 0 or not.
        return (1, 2) if dtype_of(node).startswith("bool") else (0, 1, 2)
    if same_expression(node.a, node.b):
        return ()
    (low, high), (other_low, other_high) = _range(node.a), _range(node.b)
    outcomes = (low < other_high, max(low, other_low) <= min(high, other_high), high > other_low)
    # Where operands are equal, a minimum of them is either.
    return tuple(i for i in range(3) if outcomes[i] and not (i == 1 and isinstance(node, _EXTREMES)))


def _range(operand: Any) -> tuple[float, float]:
    """The least and the largest that an operand may be, by its type, or as a literal."""
    if isinstance(operand, (tirx.IntImm, tirx.FloatImm)):
        return float(operand.value), float(operand.value)
    while isinstance(operand, tirx.Cast):
        operand = operand.value
    dtype = dtype_of(operand)
    return (0.0, 1.0) if dtype.startswith("bool") else (0.0 if dtype.startswith("uint") else -inf, inf)


class TextSightings:
    """The comparisons of one text, by their number in the order in which it is translated, which is always the same."""

    def __init__(self) -> None:
        self.all: list[Sighting] = []
        self._next = 0

    def again(self) -> TextSightings:
        """For the text when it is translated once more."""
        self._next = 0
        return self

    def of(self, node: Any) -> Sighting:
        """The next comparison."""
        if self._next == len(self.all):
            self.all.append(Sighting(node))
        self._next += 1
        return self.all[self._next - 1]
