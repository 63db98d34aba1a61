"""Chains of steps from one product to the next, each of which feeds nothing but the chain (paper §6.5)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from souffle.program import Tensor

__all__ = ["ChainSearch"]

_Step = TypeVar("_Step", bound=Hashable)
"""What a chain consists of: items of a program, or stages."""


class ChainSearch(Generic[_Step]):
    """Finds the chains that end in a step.

    Parameters
    ----------
    steps : sequence
        In topological order.
    tensors : callable
        Of a step, what it reads and what it defines.
    kept : sequence of Tensor
        What is needed outside of all steps.
    joins : callable
        Whether a step may be in a chain.
    is_product : callable
        Whether a chain begins with a step.
    longest : int
        Steps of a chain.
    """

    def __init__(
        self,
        steps: Sequence[_Step],
        tensors: Callable[[_Step], tuple[Sequence[Tensor], Sequence[Tensor]]],
        kept: Sequence[Tensor],
        joins: Callable[[_Step], bool],
        is_product: Callable[[_Step], bool],
        longest: int,
    ) -> None:
        self._position = {step: number for number, step in enumerate(steps)}
        self._joins, self._is_product, self._longest = joins, is_product, longest
        self._reads = {step: tuple(tensors(step)[0]) for step in steps}
        self._defines = {step: tuple(tensors(step)[1]) for step in steps}
        self._writer = {tensor: step for step in steps for tensor in self._defines[step]}
        self._readers: dict[Tensor, set[_Step]] = {}
        for step in steps:
            for tensor in self._reads[step]:
                self._readers.setdefault(tensor, set()).add(step)
        self._kept = frozenset(kept)

    def to(self, last: _Step) -> Iterator[tuple[_Step, ...]]:
        """Chains from a product to `last`, in the order of the steps; those that begin later come first."""
        return self._longer((last,), set())

    def _longer(self, chain: tuple[_Step, ...], seen: set[frozenset[_Step]]) -> Iterator[tuple[_Step, ...]]:
        for step in self._feeding(chain):
            longer = tuple(sorted((step, *chain), key=self._position.__getitem__))
            if frozenset(longer) in seen:
                continue
            seen.add(frozenset(longer))
            if self._is_product(step):
                yield longer
            elif len(longer) < self._longest:
                yield from self._longer(longer, seen)

    def _feeding(self, chain: Sequence[_Step]) -> list[_Step]:
        """The steps that a chain reads, and nothing else does."""
        inside = set(chain)
        writers = {self._writer[t] for step in chain for t in self._reads[step] if t in self._writer} - inside
        feeding = [step for step in writers if self._joins(step) and self._feeds_only(step, inside)]
        return sorted(feeding, key=self._position.__getitem__, reverse=True)

    def _feeds_only(self, step: _Step, inside: set[_Step]) -> bool:
        defined = self._defines[step]
        return self._kept.isdisjoint(defined) and all(self._readers.get(t, set()) - {step} <= inside for t in defined)
