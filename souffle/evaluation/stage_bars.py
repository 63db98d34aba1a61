"""A picture of an ablation: a bar for each row, of its launches, its waits and its stages, as an SVG file.

Stages lie from the longest to the shortest, in the colour of what bounds them; each has its name and time as a tooltip,
and where there is room as a label. A mark shows what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

__all__ = ["stage_bars"]

_COLOURS = {
    "launches": "#8a8f98",
    "waits": "#c9485b",
    "code": "#7a5195",
    "memory": "#2f6b9a",
    "l2": "#5b9bc8",
    "shared": "#3d9970",
    "tensor": "#e0a030",
    "fp32": "#d9822b",
    "issue": "#b5793c",
    "int32": "#a58b6f",
    "special": "#9aa65b",
    "l2_port": "#86b6d6",
    "chain": "#b9bec7",
}
_LIGHT = ("chain", "l2_port")
_OTHER = "#cccccc"
_LABELS, _WIDTH, _RIGHT, _BAR, _GAP, _TOP = 250, 900, 70, 26, 12, 64
_CHARACTER = 6.2
"""Columns of a letter at the size of labels."""
_FONT = 'font-family="Helvetica, Arial, sans-serif"'


def stage_bars(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """The picture as text.

    Parameters
    ----------
    rows : sequence of mapping
        As :func:`souffle.evaluation.ablation.measured_row` gives them; those that are not predicted are left out.
    title : str

    Returns
    -------
    str
        An SVG file; with a line that says so where nothing is predicted.
    """
    rows = [row for row in rows if row["predicted_us"] is not None]
    longest = max((max(row["predicted_us"], row["latency_us"] or 0.0) for row in rows), default=1.0) or 1.0
    scale = _WIDTH / longest
    height = _TOP + len(rows) * (_BAR + _GAP) + 66
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LABELS + _WIDTH + _RIGHT}" height="{height}" {_FONT}>',
        f'<rect width="100%" height="100%" fill="white"/><text x="12" y="26" font-size="17">{escape(title)}</text>',
    ]
    if not rows:
        words = "No device file describes this GPU: nothing is predicted."
        parts.append(f'<text x="12" y="{_TOP}" font-size="13">{words}</text>')
    bottom = _TOP + len(rows) * (_BAR + _GAP)
    for tick in _ticks(longest):
        x = _LABELS + tick * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom}" stroke="#e6e8eb"/>')
        at = f'x="{x:.1f}" y="{bottom + 16}" font-size="11" text-anchor="middle" fill="#555"'
        parts.append(f"<text {at}>{tick:g} µs</text>")
    for number, row in enumerate(rows):
        parts += _bar(row, _TOP + number * (_BAR + _GAP), scale)
    kinds = [kind for kind in _COLOURS if any(kind == part[0] and part[2] > 0 for row in rows for part in _parts(row))]
    x = 12.0
    for kind in [*kinds, *(["measured"] if any(row["latency_us"] for row in rows) else [])]:
        mark = f'<rect x="{x:.0f}" y="{bottom + 34}" width="12" height="12" fill="{_COLOURS.get(kind, "black")}"/>'
        words = kind if kind in ("launches", "waits", "code", "measured") else f"stages: {kind}"
        parts.append(f'{mark}<text x="{x + 17:.0f}" y="{bottom + 44}" font-size="12">{words}</text>')
        x += 34 + len(words) * 6.6
    return "\n".join([*parts, "</svg>"]) + "\n"


def _parts(row: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """Kind, name and µs of each part of a bar."""
    fixed = [("launches", "launches"), ("waits", "waits of the grid"), ("code", "code that is fetched")]
    times = (row["launch_us"], row["wait_us"], row["code_us"])
    parts = [(kind, name, us) for (kind, name), us in zip(fixed, times, strict=True)]
    return parts + [(one["bound"], one["stage"], one["us"]) for one in row["stage_us"]]


def _bar(row: Mapping[str, Any], y: int, scale: float) -> list[str]:
    middle = y + _BAR / 2 + 4
    out = [f'<text x="{_LABELS - 8}" y="{middle:.1f}" font-size="12" text-anchor="end">{escape(row["label"])}</text>']
    x = float(_LABELS)
    for kind, name, us in _parts(row):
        width = us * scale
        if width <= 0:
            continue
        colour = _COLOURS.get(kind, _OTHER)
        box = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{colour}"'
        edge = ' stroke="white" stroke-width="0.6"' if width > 1.5 else ""
        out.append(f"<rect {box}{edge}><title>{escape(f'{name}: {us:.2f} µs ({kind})')}</title></rect>")
        room = int((width - 8) / _CHARACTER)
        if room >= 6:
            ink = "black" if kind in _LIGHT else "white"
            label = name if len(name) <= room else f"{name[: room - 1]}…"
            out.append(f'<text x="{x + 4:.1f}" y="{middle:.1f}" font-size="10.5" fill="{ink}">{escape(label)}</text>')
        x += width
    out.append(f'<text x="{x + 6:.1f}" y="{middle:.1f}" font-size="12">{row["predicted_us"]:,.4g}</text>')
    if row["latency_us"]:
        at = _LABELS + row["latency_us"] * scale
        out.append(f'<rect x="{at - 1.5:.1f}" y="{y - 3}" width="3" height="{_BAR + 6}" fill="black"/>')
    return out


def _ticks(longest: float) -> list[float]:
    """Round numbers from 0 to the longest, at most nine."""
    steps = (m * 10.0**power for power in range(-3, 12) for m in (1, 2, 5))
    step = next(step for step in steps if longest / step <= 8)
    return [step * i for i in range(int(longest / step) + 1)]
