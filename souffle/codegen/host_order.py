"""The order of stages on a processor: those that read the same constants follow each other, while these are in a cache.

The program's order is by depth, so that independent stages stand together, as kernels on a GPU want them. Of a stack of
recurrent layers that is one wavefront after another, and each reads the weights of all layers from memory. Layer after
layer reads those of one, again and again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Hashable, Sequence

from souffle.program import Tensor
from souffle.schedule.stage import Stage

__all__ = ["backwards", "by_constants"]

_LARGE_BYTES = 1 << 16
"""A constant that is read again soon enough, whatever lies between, is not worth another order."""


def by_constants(stages: Sequence[Stage], constants: Collection[Tensor]) -> tuple[Stage, ...]:
    """Stages in an order in which those that read the same large constants follow each other.

    The same order where no large constant is read by two stages. What reads none comes as soon as it can; then what
    reads the constants that were read last, and else what stands first.

    Parameters
    ----------
    stages : sequence of Stage
        In an order of execution.
    constants : collection of Tensor
    """
    keys = [_large(stage, constants) for stage in stages]
    if max(Counter(key for key in keys if key).values(), default=0) < 2:
        return tuple(stages)
    producers = {tensor: number for number, stage in enumerate(stages) for tensor in stage.outputs}
    before = [{producers[tensor] for tensor in stage.inputs if tensor in producers} for stage in stages]
    after: list[list[int]] = [[] for _ in stages]
    for number, needed in enumerate(before):
        for producer in needed:
            after[producer].append(number)
    missing = [len(needed) for needed in before]
    ready: dict[Hashable, list[int]] = {}
    used: dict[Hashable, int] = {}

    def enter(number: int) -> None:
        heapq.heappush(ready.setdefault(keys[number], []), number)

    for number, count in enumerate(missing):
        if not count:
            enter(number)
    order: list[Stage] = []
    while ready:
        key = () if () in ready else max(ready, key=lambda each: (used.get(each, -1), -ready[each][0]))
        number = heapq.heappop(ready[key])
        if not ready[key]:
            del ready[key]
        if key:
            used[key] = len(order)
        order.append(stages[number])
        for reader in after[number]:
            missing[reader] -= 1
            if not missing[reader]:
                enter(reader)
    assert len(order) == len(stages)  # the order given was one of execution
    return tuple(order)


def backwards(stages: Sequence[Stage], constants: Collection[Tensor]) -> tuple[bool, ...]:
    """Which stages read their large constants from the end: every other one of those that read the same.

    So each begins with what the one before read last. Where the constants are larger than a cache, all of it would be
    pushed out before it is read again, if all began at one end.

    Parameters
    ----------
    stages : sequence of Stage
        In their order of execution.
    constants : collection of Tensor
    """
    turns: Counter[tuple[Tensor, ...]] = Counter()
    found = []
    for stage in stages:
        key = _large(stage, constants)
        found.append(bool(key) and turns[key] % 2 == 1)
        turns[key] += 1
    return tuple(found)


def _large(stage: Stage, constants: Collection[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in stage.inputs if tensor in constants and tensor.nbytes >= _LARGE_BYTES)
