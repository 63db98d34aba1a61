"""Independent stages that a kernel computes side by side."""

from __future__ import annotations

from dataclasses import dataclass

from souffle.schedule.lower.shares import Share
from souffle.schedule.stage import Stage

__all__ = ["Group", "Members"]

Members = tuple[tuple[Stage, Share], ...]
"""Stages with the workers that compute each."""


@dataclass(frozen=True, eq=False)
class Group:
    """Independent stages of one epoch that are computed side by side.

    Attributes
    ----------
    members : Members
        Of one function each, in the order of the kernel's text.
    runs : int
        How often a launch computes them.
    """

    members: Members
    runs: int = 1
