"""Which items of a program are independent, while some of them become one."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter

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
        self._before = [{self._number[producers[t]] for t in item.inputs if t in producers} for item in items]
        self._node = list(range(len(items)))
        self._inside = [[number] for number in range(len(items))]
        self._order = list(range(len(items)))

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
        among = {self._number[item] for item in items}
        rank: dict[int, int] = {}
        for node in self._order:
            rank[node] = max((rank[each] + (each in among) for each in self._needed(node)), default=0)
        sets: dict[int, list[Item]] = {}
        for item in items:
            sets.setdefault(rank[self._number[item]], []).append(item)
        return [sets[number] for number in sorted(sets)]

    def join(self, items: Sequence[Item]) -> None:
        """Make one node of items that are independent."""
        numbers = [self._number[item] for item in items]
        first = numbers[0]
        self._inside[first] = numbers
        for number in numbers:
            self._node[number] = first
        nodes = sorted(set(self._node))
        self._order = list(TopologicalSorter({node: self._needed(node) for node in nodes}).static_order())

    def _needed(self, node: int) -> list[int]:
        return sorted({self._node[before] for number in self._inside[node] for before in self._before[number]})
