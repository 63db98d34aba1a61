"""Which items of a program are independent, while some of them become one."""

from __future__ import annotations

from collections.abc import Sequence

from souffle.program import Item, TEProgram

__all__ = ["DependenceOrder"]


class DependenceOrder:
    """The dependence graph of a program, in which independent items can be joined to one node.

    Parameters
    ----------
    program : TEProgram
    """

    def __init__(self, program: TEProgram) -> None:
        producers, items = program.producers, program.tes
        self._number = {item: number for number, item in enumerate(items)}
        # Ordered sets of nodes; those that were joined to another have none.
        self._before: list[dict[int, None]] = [
            dict.fromkeys(self._number[producers[t]] for t in item.inputs if t in producers) for item in items
        ]
        self._after: list[dict[int, None]] = [{} for _ in items]
        for node, before in enumerate(self._before):
            for other in before:
                self._after[other][node] = None
        self._order: list[int] | None = list(range(len(items)))
        self._gone: set[int] = set()

    def independent(self, items: Sequence[Item]) -> list[list[Item]]:
        """Items divided into as few sets as possible of which no item depends on another of its set.

        Set number ``r`` holds those that the longest chain of `items` leads to with ``r`` of them before. So joining
        one set leaves the others as independent as they were: a path from one of a set to another, through what was
        joined, would be a chain that is longer than those of the set.

        Parameters
        ----------
        items : sequence of Item
            None of which was joined.
        """
        if self._order is None:
            self._order = self._sorted()
        numbers = [self._number[item] for item in items]
        among = set(numbers)
        # Of each node the longest chain up to it and with it.
        length = [0] * len(self._before)
        for node in self._order:
            before = self._before[node]
            length[node] = (max(map(length.__getitem__, before)) if before else 0) + (node in among)
        sets: dict[int, list[Item]] = {}
        for item, number in zip(items, numbers, strict=True):
            sets.setdefault(length[number], []).append(item)
        return [sets[number] for number in sorted(sets)]

    def join(self, items: Sequence[Item]) -> None:
        """Make one node of items that are independent."""
        first, *rest = (self._number[item] for item in items)
        for node in rest:
            for other in self._before[node]:
                del self._after[other][node]
                self._after[other][first] = self._before[first][other] = None
            for other in self._after[node]:
                del self._before[other][node]
                self._before[other][first] = self._after[first][other] = None
            self._before[node], self._after[node] = {}, {}
        self._gone.update(rest)
        self._order = None

    def _sorted(self) -> list[int]:
        missing = list(map(len, self._before))
        order = [node for node, count in enumerate(missing) if not count and node not in self._gone]
        for node in order:
            for other in self._after[node]:
                missing[other] -= 1
                if not missing[other]:
                    order.append(other)
        assert len(order) + len(self._gone) == len(missing)  # what was joined was independent
        return order
