"""Constants of several TEs as one, so that the merged TE reads them at one index: packed once, at compile time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from souffle.program import Tensor
from souffle.transform.horizontal.operands import PackedPlace

__all__ = ["Pack", "Packs"]


@dataclass(frozen=True)
class Pack:
    """Constants that become one.

    Attributes
    ----------
    tensors : tuple of Tensor
    axis : int or None
        Along which they stand one after another; ``None`` for a new first axis.
    """

    tensors: tuple[Tensor, ...]
    axis: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        first = self.tensors[0].shape
        if self.axis is None:
            return (len(self.tensors), *first)
        return (*first[: self.axis], sum(t.shape[self.axis] for t in self.tensors), *first[self.axis + 1 :])


class Packs:
    """The packs of one transformation, each made once.

    Parameters
    ----------
    constants : mapping of Tensor to array
        Those of the program.
    fresh : callable
        Makes a name unique.
    """

    def __init__(self, constants: Mapping[Tensor, np.ndarray], fresh: Callable[[str], str]) -> None:
        self._constants = constants
        self._fresh = fresh
        self._tensors: dict[Pack, Tensor] = {}

    def tensor(self, pack: Pack) -> Tensor:
        """The tensor that holds a pack."""
        if pack not in self._tensors:
            first = pack.tensors[0]
            name = self._fresh(f"{first.name}_x{len(pack.tensors)}")
            self._tensors[pack] = Tensor(name, pack.shape, first.dtype)
        return self._tensors[pack]

    def arrays(self, read: Iterable[Tensor]) -> dict[Tensor, np.ndarray]:
        """The values of the packs among some tensors."""
        wanted = set(read)
        return {tensor: self._array(pack) for pack, tensor in self._tensors.items() if tensor in wanted}

    def _array(self, pack: Pack) -> np.ndarray:
        arrays = [self._constants[t] for t in pack.tensors]
        return np.stack(arrays) if pack.axis is None else np.concatenate(arrays, axis=pack.axis)

    def windows(self) -> dict[Tensor, PackedPlace]:
        """Packs that are a window of a longer one, and where it starts: each weight is kept once, whatever reads it.

        The cells on the wavefronts of an LSTM need the weights of layers 0 to 1, 0 to 2, 1 to 3, and so on. Packs that
        overlap by at least half are laid over each other.
        """
        stacks = {pack.tensors: tensor for pack, tensor in self._tensors.items() if pack.axis is None}
        wholes: list[tuple[Tensor, ...]] = []
        holding: dict[Tensor, set[int]] = {}
        home: dict[tuple[Tensor, ...], int] = {}
        for column in sorted(stacks, key=len, reverse=True):
            for number in sorted({n for tensor in column for n in holding.get(tensor, ())}):
                joined = _overlaid(wholes[number], column)
                if joined is not None:
                    wholes[number], home[column] = joined, number
                    break
            else:
                wholes.append(column)
                home[column] = len(wholes) - 1
            for tensor in column:
                holding.setdefault(tensor, set()).add(home[column])
        found: dict[Tensor, PackedPlace] = {}
        for column, packed in stacks.items():
            whole = wholes[home[column]]
            if whole != column:
                found[packed] = PackedPlace(self.tensor(Pack(whole)), axis=0, offset=_start(whole, column))
        return found


def _start(whole: tuple[Tensor, ...], column: tuple[Tensor, ...]) -> int | None:
    """Where `column` stands in `whole` without a gap."""
    starts = range(len(whole) - len(column) + 1)
    return next((i for i in starts if whole[i : i + len(column)] == column), None)


def _overlaid(whole: tuple[Tensor, ...], column: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """The shortest sequence that holds both, if at least half of `column` lies in `whole` or at one of its ends."""
    if _start(whole, column) is not None:
        return whole
    for common in range(len(column) - 1, (len(column) - 1) // 2, -1):
        if whole[-common:] == column[:common]:
            return whole + column[common:]
        if whole[:common] == column[-common:]:
            return column[:-common] + whole
    return None
