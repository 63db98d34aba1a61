"""Place the intermediate tensors of a network in one workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "Lifetime", "place"]

ALIGNMENT = 256
"""Bytes; what cudaMalloc guarantees, so that vector loads stay aligned."""


@dataclass(frozen=True)
class Lifetime:
    """When a tensor's memory is in use.

    Attributes
    ----------
    nbytes : int
    first, last : int
        Epochs, inclusive. An epoch ends at a grid sync or at the end of a kernel. Two tensors may share memory only if
        a whole barrier lies between their lifetimes, since blocks of one epoch run in any order.
    """

    nbytes: int
    first: int
    last: int


def place(lifetimes: Sequence[Lifetime]) -> tuple[tuple[int, ...], int]:
    """Offsets in bytes such that tensors whose lifetimes meet do not overlap, and the bytes needed in all.

    Greedy best fit by size: large tensors first, each at the lowest offset that is free over its lifetime.
    """
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    total = 0
    for index in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].nbytes, i)):
        life = lifetimes[index]
        taken = sorted(
            (offsets[other], offsets[other] + _rounded(lifetimes[other].nbytes))
            for other in placed
            if lifetimes[other].first <= life.last and life.first <= lifetimes[other].last
        )
        at = 0
        for start, end in taken:
            if at + _rounded(life.nbytes) <= start:
                break
            at = max(at, end)
        offsets[index] = at
        placed.append(index)
        total = max(total, at + _rounded(life.nbytes))
    return tuple(offsets), total


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
