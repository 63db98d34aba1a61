"""Whether a GPU can be used here."""

from __future__ import annotations

from souffle.errors import DeviceError, NoGpuError
from souffle.runtime.cuda import Cuda

__all__ = ["gpu_arch"]


def gpu_arch() -> str | None:
    """The architecture of the first usable GPU, such as ``"sm_90"``; ``None`` where there is none."""
    try:
        return Cuda().arch
    except (NoGpuError, DeviceError):
        return None
