"""What commands have in common: the compiler's options among a command's arguments."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["compiler_options"]

_NAMES = (
    *("arch", "precision", "fusion", "policy", "partition", "reductions"),
    *("grid_barrier", "waits", "disable", "reuse_policy", "graph", "watchdog_ms", "verify"),
)


def compiler_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that the command has, by the names that :func:`souffle.compile` gives them."""
    return {name: value for name, value in vars(arguments).items() if name in _NAMES}
