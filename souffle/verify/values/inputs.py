"""Random values for the tensors that a stage reads, the same for its definition and for its functions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.tvm_compat import const_int
from souffle.verify.values import field
from souffle.verify.values.scalars import is_float

__all__ = ["HashedTensor", "Values", "blank", "elements_of", "integer_ranges", "random_tensors"]

_MOST_STORED = 1 << 24
"""Elements of a tensor whose values are stored; those of a larger one are worked out where they are read."""

_MOST_FILLED = 1 << 16
"""Elements of an output that is filled before it is written."""

_INTEGERS = 1 << 10
"""How far integers go that choose no element."""


class HashedTensor:
    """A tensor that is too large to be stored: each element is worked out from its number.

    Parameters
    ----------
    name : str
    elements : int
    seed : int
    """

    def __init__(self, name: str, elements: int, seed: int) -> None:
        self.name = name
        self.elements = elements
        self.seed = seed

    def __len__(self) -> int:
        return self.elements

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        return field.function_of(self.name, [places], self.seed).reshape(np.shape(places))


Values = np.ndarray | HashedTensor


def elements_of(buffer: Any) -> int:
    """How many elements a buffer has."""
    return prod(const_int(extent) for extent in buffer.shape)


def integer_ranges(reference: tirx.PrimFunc) -> tuple[tuple[int, int], ...]:
    """Ranges from which integers of the inputs may be drawn, the better first.

    An integer that chooses an element should be able to choose any, counted from the end too where the definition
    allows that; which ranges it allows is seen when it is evaluated.
    """
    extents: list[int] = []

    def see(load: TensorLoad) -> None:
        for index, extent in zip(load.indices, load.source.shape):
            if not isinstance(index, (tirx.Var, tirx.IntImm)):
                inner: list[Any] = []
                tvm_ffi.structural_walk(index, (TensorLoad, inner.append))
                if inner:
                    extents.append(const_int(extent))

    tvm_ffi.structural_walk(reference.body, (TensorLoad, see))
    most = min(extents, default=_INTEGERS)
    return (-most, most), (0, most), (0, 1)


def random_tensors(buffers: Sequence[Any], integers: tuple[int, int], seed: int) -> list[Values]:
    """Random elements of the field, of a range of integers, or bits, for each buffer.

    Parameters
    ----------
    buffers : sequence of Buffer
    integers : tuple of int
        The first, and the one after the last.
    seed : int
    """
    found: list[Values] = []
    for number, buffer in enumerate(buffers):
        dtype, count = str(buffer.dtype), elements_of(buffer)
        random = np.random.default_rng((seed, number))
        if is_float(dtype) and count > _MOST_STORED:
            found.append(HashedTensor(f"input {number}", count, seed))
        elif is_float(dtype):
            found.append(random.integers(0, field.P, count, np.int64))
        elif dtype == "bool":
            found.append(random.integers(0, 2, count, np.int64))
        else:
            low = 0 if dtype.startswith("u") else integers[0]
            found.append(random.integers(low, integers[1], count, np.int64))
    return found


def blank(buffer: Any, seed: int) -> np.ndarray:
    """An output before it is written: noise, or zeros where it is large."""
    count = elements_of(buffer)
    return field.noise(count, "output", seed) if count <= _MOST_FILLED else np.zeros(count, np.int64)
