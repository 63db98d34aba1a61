"""Where compiled code is kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_root"]


def cache_root() -> Path | None:
    """``$SOUFFLE_CACHE``, or ``souffle`` in the user's cache folder; ``None`` where ``SOUFFLE_CACHE=off``."""
    chosen = os.environ.get("SOUFFLE_CACHE", "")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "souffle"
