"""What a part of a search asks workers about a stage, within which limits, and which answers cannot be true."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from souffle.workers import Job, Places

__all__ = ["Limits", "SharedStage", "lacks_seconds"]


@dataclass(frozen=True)
class Limits:
    """What one job may take.

    Attributes
    ----------
    seconds : float
    memory_mb : int
    """

    seconds: float = 120.0
    memory_mb: int = 4096


@dataclass(frozen=True)
class SharedStage:
    """A stage that workers know.

    Attributes
    ----------
    name : str
    stage, setting : str
        Keys of what is shared.
    limits : Limits
    """

    name: str
    stage: str
    setting: str
    limits: Limits

    def job(
        self,
        function: str,
        label: str,
        payload: Mapping[str, Any],
        *,
        resource: Any = "cpu",
        places: Places | None = None,
    ) -> Job:
        """A job about it."""
        return Job(
            function,
            {"stage": self.stage, "setting": self.setting, **payload},
            f"{label} of stage {self.name}",
            (self.stage, self.setting),
            self.limits.seconds,
            self.limits.memory_mb,
            resource,
            places,
        )


def lacks_seconds(value: Any) -> str:
    """Why what a worker says of a candidate cannot be true; empty where it can."""
    if not isinstance(value, Mapping) or not isinstance(value.get("problem"), str):
        return f"its worker gave {str(value)[:80]!r} for figures"
    if value["problem"]:
        return ""
    seconds = value.get("seconds")
    if not isinstance(seconds, (list, tuple)) or not seconds:
        return f"its worker gave the times {seconds!r}"
    wrong = [one for one in seconds if not isinstance(one, (int, float)) or not 0 < one < math.inf]
    return f"its worker gave the time {wrong[0]!r}" if wrong else ""
