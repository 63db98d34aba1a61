"""Arrays at addresses that vector loads and compiled code rely on; NumPy's own begin anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["ALIGNMENT", "aligned_array", "aligned_bytes"]

ALIGNMENT = 256
"""Bytes; what device memory is aligned to, and a multiple of what LLVM's code relies on."""


def aligned_bytes(nbytes: int, fill: int | None = 0) -> np.ndarray:
    """Fresh bytes at an aligned address.

    Parameters
    ----------
    nbytes : int
    fill : int, optional
        What each of them is; None for whatever is there.
    """
    room = nbytes + ALIGNMENT
    # np.zeros has pages of zeros from the system, without writing them.
    raw = np.zeros(room, np.uint8) if fill == 0 else np.empty(room, np.uint8)
    if fill:
        raw.fill(fill)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def aligned_array(shape: Sequence[int], dtype: DTypeLike, fill: int | None = None) -> np.ndarray:
    """A fresh array at an aligned address, in C order.

    Parameters
    ----------
    shape : sequence of int
    dtype : data type
    fill : int, optional
        What each of its bytes is; None for whatever is there.
    """
    dtype = np.dtype(dtype)
    return aligned_bytes(math.prod(shape) * dtype.itemsize, fill).view(dtype).reshape(shape)
