"""Dominance in a data-flow graph: which operation all that is made of a value passes through.

The algorithm of Cooper, Harvey and Kennedy ("A Simple, Fast Dominance Algorithm", 2001), which FusionStitching applies
to data flow in the place of control flow (2019, §5.4)::

    for all nodes but the start: idom ← undefined           finger1 ≠ finger2:
    while something changes:                                    while finger1 < finger2: finger1 ← idom[finger1]
        for all nodes in reverse postorder:                     while finger2 < finger1: finger2 ← idom[finger2]
            idom ← intersection of the processed predecessors

The start is where the graph ends: an operation dominates another if every way from that one to a result of the graph
leads through it. So the predecessors of an operation are its readers. Results have one more reader in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["Dominance"]


class Dominance:
    """Which operations of a graph dominate which.

    Parameters
    ----------
    order : sequence of str
        The operations, each behind those that it reads: their reverse is a reverse postorder from the results.
    operands : mapping
        What each reads.
    """

    def __init__(self, order: Sequence[str], operands: Mapping[str, Sequence[str]]) -> None:
        # The start is 0; the number of an operation rises from the results, as in a reverse postorder.
        self._number = {name: count for count, name in enumerate(reversed(order), start=1)}
        readers: list[list[int]] = [[] for _ in range(len(order) + 1)]
        for name in order:
            for operand in operands[name]:
                readers[self._number[operand]].append(self._number[name])
        self._above: list[int | None] = [0, *(None for _ in order)]
        changed = True
        while changed:
            changed = False
            for one in range(1, len(order) + 1):
                known = [reader for reader in readers[one] or [0] if self._above[reader] is not None]
                found = known[0]
                for reader in known[1:]:
                    found = self._intersection(found, reader)
                changed |= found != self._above[one]
                self._above[one] = found

    def _intersection(self, one: int, other: int) -> int:
        """Where the ways up the tree from two nodes meet."""
        while one != other:
            if one > other:
                one = self._above[one]
            else:
                other = self._above[other]
        return one

    def dominates(self, one: str, other: str) -> bool:
        """Whether every way from `other` to a result leads through `one`; each dominates itself."""
        at, wanted = self._number[other], self._number[one]
        while at > wanted:
            at = self._above[at]
        return at == wanted
