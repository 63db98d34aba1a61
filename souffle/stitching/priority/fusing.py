"""Priority fusion: vertices in the order of their priorities, each fused with a neighbour (002 §3).

::

    for v from the highest priority to the lowest:
      for u in the producers of v, the one that gives it most bytes first, then in its consumers:
        if the kernels of u and of v may be one: make them one, and go on with the next v

So fusion accumulates: each of both may be a kernel of many vertices by then. Which fusions are possible, and with that
the kernels, depends on the order alone. Two kernels may be one where

    nothing between them would have to run after the one and before the other   (no cycle)
    they have at most `limit` vertices together                                 (002: "to avoid overfusion")
    at most one of their vertices is a product or a convolution                 (see :class:`FusionRules`)
    there is a kernel of them, and it is not predicted to take longer than both
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from souffle.errors import OptionError
from souffle.stitching.graph import OpGraph, members_of
from souffle.stitching.kinds import ELEMENTWISE, REDUCTIONS, Kind
from souffle.stitching.priority.prices import PatternPrices

__all__ = ["FusionRules", "PriorityFusion"]

_MANY = ELEMENTWISE | REDUCTIONS
"""Kinds of which a kernel may have any number."""


@dataclass(frozen=True)
class FusionRules:
    """What may be fused.

    Attributes
    ----------
    limit : int
        Vertices of a kernel.
    products : int
        Of these so many may be products or convolutions. The evaluator knows nothing of their tiles, and the schedules
        have a form for two in attention alone, so that of a kernel of several it would promise what nobody can make.
    loss : float
        Seconds that a kernel may be predicted to take longer than both of its parts; infinite for no such rule.
    """

    limit: int = 16
    products: int = 1
    loss: float = 0.0

    def __post_init__(self) -> None:
        if self.limit < 1 or self.products < 0 or math.isnan(self.loss):
            raise OptionError(
                f"fusion rules of limit={self.limit}, products={self.products}, loss={self.loss} are not valid; "
                "limit is at least 1, products at least 0 and loss a number of seconds"
            )


class PriorityFusion:
    """Fuses the vertices of one graph in any order.

    Parameters
    ----------
    graph : OpGraph
    prices : PatternPrices
        Of the same graph.
    rules : FusionRules
    """

    def __init__(self, graph: OpGraph, prices: PatternPrices, rules: FusionRules) -> None:
        self.graph, self.prices, self.rules = graph, prices, rules
        passed: dict[tuple[int, int], int] = {(producer, consumer): size for producer, consumer, size in graph.edges}
        self._products = tuple(int(op.kind not in _MANY) for op in graph.ops)
        self._partners = tuple(self._neighbours(number, passed) for number in range(len(graph.ops)))

    def _neighbours(self, number: int, passed: Mapping[tuple[int, int], int]) -> tuple[int, ...]:
        """With what a vertex may be fused, in the order in which that is tried."""
        graph = self.graph
        if graph.ops[number].kind is Kind.EXTERN:
            return ()
        producers = sorted(graph.producers[number], key=lambda one: (-passed[one, number], one))
        consumers = sorted(graph.consumers[number], key=lambda one: (-passed[number, one], one))
        return tuple(one for one in (*producers, *consumers) if graph.ops[one].kind is not Kind.EXTERN)

    def __call__(self, order: Iterable[int]) -> list[int]:
        """The kernels, each the bits of a number; vertices that are not in the order are fused by others only.

        Parameters
        ----------
        order : iterable of int
            Vertices, the ones of highest priority first.
        """
        kernels, price, rules = _Kernels(self.graph), self.prices, self.rules
        seconds = [price(1 << number) for number in range(len(self.graph.ops))]
        products = list(self._products)
        for number in order:
            own = kernels.of[number]
            for partner in self._partners[number]:
                other = kernels.of[partner]
                if other == own or products[own] + products[other] > rules.products:
                    continue
                mask = kernels.mask[own] | kernels.mask[other]
                if mask.bit_count() > rules.limit:
                    continue
                together = price(mask)
                if math.isinf(together) or together > seconds[own] + seconds[other] + rules.loss:
                    continue
                joined = kernels.join(own, other)
                if joined is not None:
                    seconds[joined], products[joined] = together, products[own] + products[other]
                    break
        return kernels.masks()

    def seconds(self, kernels: Sequence[int]) -> float:
        """Of kernels one after another, with their launches."""
        return sum(map(self.prices, kernels))


class _Kernels:
    """The kernels of a graph while they are fused, always in an order in which they can run (Pearce and Kelly 2007).

    A kernel is called by one of its vertices. Fusing two moves only what stands between them.
    """

    def __init__(self, graph: OpGraph) -> None:
        count = len(graph.ops)
        self.of = list(range(count))
        self.mask = [1 << number for number in range(count)]
        self._place = list(range(count))
        self._at: list[int | None] = list(range(count))
        self._after = [set(consumers) for consumers in graph.consumers]
        self._before = [set(producers) for producers in graph.producers]

    def masks(self) -> list[int]:
        """The vertices of each kernel as the bits of a number, in an order in which they can run."""
        return [self.mask[kernel] for kernel in self._at if kernel is not None]

    def join(self, one: int, other: int) -> int | None:
        """Make two kernels one and give its name; ``None`` where a third would have to run between them."""
        place = self._place
        if place[one] > place[other]:
            one, other = other, one
        first, last = place[one], place[other]
        behind = self._reached(one, other, last)
        if behind is None:
            return None
        between = [kernel for kernel in self._at[first + 1 : last] if kernel is not None]
        moved = [kernel for kernel in between if kernel not in behind]
        moved += [one, *(kernel for kernel in between if kernel in behind)]
        self._at[first : last + 1] = [*moved, *[None] * (last + 1 - first - len(moved))]
        for number, kernel in enumerate(moved, first):
            place[kernel] = number
        self._absorb(one, other)
        return one

    def _reached(self, one: int, other: int, last: int) -> set[int] | None:
        """What has to run after a kernel, of what stands before a later one; ``None`` if that one needs any of it."""
        reached: set[int] = set()
        pending = [kernel for kernel in self._after[one] if self._place[kernel] < last]
        while pending:
            kernel = pending.pop()
            if kernel in reached:
                continue
            if other in self._after[kernel]:
                return None
            reached.add(kernel)
            pending += [after for after in self._after[kernel] if self._place[after] < last]
        return reached

    def _absorb(self, one: int, other: int) -> None:
        """The vertices and the neighbours of a kernel become those of one."""
        for number in members_of(self.mask[other]):
            self.of[number] = one
        self.mask[one] |= self.mask[other]
        for own, back in ((self._after, self._before), (self._before, self._after)):
            for neighbour in own[other]:
                back[neighbour].discard(other)
                if neighbour != one:
                    back[neighbour].add(one)
            own[one] |= own[other]
            own[one] -= {one, other}
            own[other] = set()
