"""A GPU's second-level cache, overwritten before a run of a library that does not do it itself."""

from __future__ import annotations

from functools import cache
from typing import Any

from souffle.runtime.cuda import Cuda
from souffle.runtime.cuda_workspace import FLUSH_BYTES

__all__ = ["evict_gpu_caches"]


@cache
def _area() -> tuple[Cuda, int, Any]:
    """Kept until the process ends."""
    cuda = Cuda()
    with cuda.current():
        return cuda, cuda.alloc(FLUSH_BYTES, "clearing the cache"), cuda.stream()


def evict_gpu_caches() -> None:
    """Overwrite as much memory as :meth:`souffle.runtime.Network.time` does, and wait until that is done."""
    cuda, address, stream = _area()
    with cuda.current():
        cuda.fill(address, 0, FLUSH_BYTES, stream)
        cuda.synchronize(stream, "clearing the cache")
