"""How often Python looks for garbage in processes that are Souffle's own."""

from __future__ import annotations

import gc

__all__ = ["collect_rarely"]


def collect_rarely() -> None:
    """Have Python look through all that is held less often, in a process that does nothing but compile.

    Most of what a compiler makes stays: to look through it as often as Python does takes a tenth of the time. A process
    in which users call Souffle is theirs, and keeps its thresholds.
    """
    gc.set_threshold(50_000, 20, 20)
