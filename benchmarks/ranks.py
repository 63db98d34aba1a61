"""What every comparison of the cost model with measurements needs: rank correlation, and a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

import numpy as np

__all__ = ["Mark", "pair_correlation", "rank_correlation", "scatter"]

Mark = tuple[float, float, str, str]
"""Measured, predicted (both above 0), the kind that gives the colour, and what the mark says when pointed at."""


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, equal values sharing their mean rank; not a number below three values."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    if len(left) < 3 or len(set(left)) == 1 or len(set(right)) == 1:
        return float("nan")
    return float(np.corrcoef(ranks(left), ranks(right))[0, 1])


def pair_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Kendall's tau-b: pairs in the same order less pairs in the opposite one, over the pairs that differ."""
    first, second = (np.sign(np.subtract.outer(values, values)) for values in map(np.asarray, (left, right)))
    differing = math.sqrt(float((first != 0).sum()) * float((second != 0).sum()))
    return float((first * second).sum()) / differing if len(left) >= 3 and differing else float("nan")


def scatter(marks: Sequence[Mark], colors: Mapping[str, str], title: str, across: str, up: str) -> str:
    """An SVG of predicted over measured, both logarithmic.

    Parameters
    ----------
    marks : sequence of Mark
        At least one.
    colors : mapping of str to str
        Of each kind, in the order of the legend.
    title, across, up : str
        Above the plot, and at its axes.
    """
    values = [value for one in marks for value in one[:2]]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    side, edge = 480, 60

    def at(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * side

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side + 2 * edge + 90}" height="{side + 2 * edge}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<g transform="translate({edge},{edge})">',
    ]
    for power in range(low, high + 1):
        x = at(10.0**power)
        parts.append(f'<path d="M{x:.1f} 0V{side}M0 {side - x:.1f}H{side}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{side + 16}" text-anchor="middle">{10.0**power:g}</text>')
        parts.append(f'<text x="-6" y="{side - x + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    parts.append(f'<path d="M0 {side}L{side} 0" stroke="#888" stroke-dasharray="4"/>')
    for measured, predicted, kind, label in marks:
        parts.append(
            f'<circle cx="{at(measured):.1f}" cy="{side - at(predicted):.1f}" r="3.5" fill="{colors[kind]}" '
            f'fill-opacity="0.6"><title>{escape(label)}</title></circle>'
        )
    for row, (kind, color) in enumerate(colors.items()):
        parts.append(f'<circle cx="{side + 14}" cy="{12 + 18 * row}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{side + 24}" y="{16 + 18 * row}">{escape(kind)}</text>')
    parts.append(f'<text x="{side / 2}" y="-20" text-anchor="middle" font-size="14">{escape(title)}</text>')
    parts.append(f'<text x="{side / 2}" y="{side + 40}" text-anchor="middle">{escape(across)}</text>')
    turned = f'<text transform="translate(-40,{side / 2}) rotate(-90)" text-anchor="middle">'
    parts.append(f"{turned}{escape(up)}</text>")
    return "\n".join([*parts, "</g></svg>", ""])
