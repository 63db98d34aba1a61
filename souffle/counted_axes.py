"""Outputs of a network whose extent depends on data: held with the largest extent, and cut to what is there.

A network's shapes are static. What may select none or all of its elements, such as NonZero, gives a tensor with room
for all of them, and a number, the *count*, that says how many of the positions along an axis are there. The count is an
output of the program like others. Callers do not see it: they get outputs that are as long as it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from souffle.errors import DeviceError

__all__ = ["Counts", "check_counts", "cut", "first_positions", "hidden_outputs"]

Counts = Mapping[str, tuple[tuple[int, str], ...]]
"""By the name of an output: its axes that are counted, each with the name of the output that is its count."""


def hidden_outputs(counts: Counts) -> frozenset[str]:
    """The names of the outputs that are counts, which callers do not see."""
    return frozenset(count for axes in counts.values() for _, count in axes)


def check_counts(counts: Counts, outputs: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Raise ValueError unless every counted axis is one of an output, and its count a whole number that is an output.

    Parameters
    ----------
    counts : mapping
    outputs : mapping of str to (shape, type)
    """
    hidden = hidden_outputs(counts)
    for name, axes in counts.items():
        rank = len(outputs[name][0]) if name in outputs else 0
        for axis, count in axes:
            if not 0 <= axis < rank or name in hidden or outputs.get(count) != ((), "int64"):
                raise ValueError(f"axis {axis} of output {name!r} cannot be as long as {count!r} says")


def first_positions(array: np.ndarray, extents: Mapping[int, int]) -> np.ndarray:
    """A new array of the first positions along some axes."""
    return array[tuple(slice(extents.get(axis)) for axis in range(array.ndim))].copy()


def cut(
    outputs: Mapping[str, Any],
    counts: Counts,
    read: Callable[[Any], Any] = np.asarray,
    take: Callable[[Any, Mapping[int, int]], Any] = first_positions,
) -> dict[str, Any]:
    """The outputs that callers see, each as long as its counts say.

    Parameters
    ----------
    outputs : mapping of str to array
        All outputs of a run.
    counts : mapping
    read : callable
        Gives the value of a count.
    take : callable
        Gives the first positions of an output, by axis.

    Raises
    ------
    DeviceError
        If a count is none: negative, or more than there is room for.
    """
    hidden = hidden_outputs(counts)
    numbers = {name: int(read(outputs[name])) for name in sorted(hidden)}
    found: dict[str, Any] = {}
    for name, output in outputs.items():
        if name in hidden:
            continue
        extents = {axis: numbers[count] for axis, count in counts.get(name, ())}
        for axis, extent in extents.items():
            if not 0 <= extent <= output.shape[axis]:
                raise DeviceError(
                    f"output {name!r} has room for {output.shape[axis]} along axis {axis}, and the network counted "
                    f"{extent}"
                )
        found[name] = take(output, extents) if extents else output
    return found
