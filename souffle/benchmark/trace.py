"""A trace for people to look at: the Trace Event Format of Chrome, as JSON, which Perfetto opens (ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Slice", "Trace"]


@dataclass(frozen=True)
class Slice:
    """Something that lasted.

    Attributes
    ----------
    name : str
    track : str
        Slices of one track lie within each other or apart.
    begin_us, duration_us : float
    args : mapping
        Shown beside it.
    """

    name: str
    track: str
    begin_us: float
    duration_us: float
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """Slices of one run.

    Attributes
    ----------
    network : str
    clock : str
        What the axis is, in words.
    slices : tuple of Slice
    """

    network: str
    clock: str
    slices: tuple[Slice, ...]

    def text(self) -> str:
        """The file's text."""
        return json.dumps(
            {
                "traceEvents": list(self._events()),
                "displayTimeUnit": "ns",
                "otherData": {"network": self.network, "clock": self.clock},
            }
        )

    def _events(self) -> Iterable[dict[str, Any]]:
        yield {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": f"{self.network}: {self.clock}"}}
        tracks = {track: number for number, track in enumerate(dict.fromkeys(one.track for one in self.slices), 1)}
        for track, number in tracks.items():
            about = {"ph": "M", "pid": 1, "tid": number}
            yield {"name": "thread_name", **about, "args": {"name": track}}
            yield {"name": "thread_sort_index", **about, "args": {"sort_index": number}}
        for one in self.slices:
            yield {
                "name": one.name,
                "cat": "souffle",
                "ph": "X",
                "pid": 1,
                "tid": tracks[one.track],
                "ts": one.begin_us,
                "dur": one.duration_us,
                "args": dict(one.args),
            }
