"""What horizontal fusion refuses, as an error."""

from __future__ import annotations

from souffle.errors import SouffleError

__all__ = ["FusionError"]


class FusionError(SouffleError):
    """Kernels that cannot be fused, or a description of a launch that cannot be read.

    The message names the file and the line or key, says what stands there, and what would help.
    """
