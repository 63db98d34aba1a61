"""How many registers the arrays of a thread take that a lowered function declares."""

from __future__ import annotations

from math import prod

import tvm
from tvm import tirx

from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import const_int

__all__ = ["OWN_REGISTERS", "local_words"]

OWN_REGISTERS = 24
"""Of a thread beside its arrays: addresses, indices, what is being computed."""

_WARP = 32


def local_words(func: tirx.PrimFunc) -> float:
    """32-bit words of a thread's arrays, and of its part of a warp's fragments."""
    words = 0.0

    def see(alloc: tirx.AllocBuffer) -> None:
        nonlocal words
        scope = str(alloc.buffer.scope())
        nbytes = prod(map(const_int, alloc.buffer.shape)) * tvm.DataType(str(alloc.buffer.dtype)).itemsize
        if scope == "local":
            words += nbytes / 4
        elif scope.startswith("wmma"):
            words += nbytes / 4 / _WARP

    structural_walk(func.body, (tirx.AllocBuffer, see))
    return words
