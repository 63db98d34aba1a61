"""Training curves as a picture (SVG)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from souffle.learning.history import HistoryRow
from souffle.learning.problem import PolicyError

__all__ = ["training_curves"]

# Okabe and Ito's, which the color-blind tell apart; without their yellow, which is hard to see on white.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_DASHES = ("-", "--", "-.", ":")
_STYLE = {
    # The same file from the same history; letters stay letters that can be searched.
    "svg.hashsalt": "souffle",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    # Names of graphs are no formulas.
    "text.parse_math": False,
    "text.color": "#222222",
    "axes.labelcolor": "#222222",
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "grid.color": "#dddddd",
}


def training_curves(history: Sequence[HistoryRow], path: str | Path, title: str = "Training") -> None:
    """Draw how much faster each graph got in a training than by the draws of its first update, which are by chance.

    On the left the mean of an update's draws, on the right the best so far, both beside the mean of the first: graphs
    that fusion makes many times as fast would hide what learning gains on all others. The background is white, also in
    a dark viewer.

    Parameters
    ----------
    history : sequence of HistoryRow
    path : path
        Of the SVG file.
    title : str

    Raises
    ------
    PolicyError
        If the history is empty or the file cannot be written.
    """
    if not history:
        raise PolicyError("a training without a single update has no curves; train first")
    graphs = list(dict.fromkeys(row.graph for row in history))
    with rc_context(_STYLE):
        figure = Figure(figsize=(10, 4.2 + 0.2 * ((len(graphs) + 2) // 3)), facecolor="white", layout="constrained")
        left, right = figure.subplots(1, 2, sharex=True, sharey=True)
        for number, graph in enumerate(graphs):
            rows = [row for row in history if row.graph == graph]
            _line(left, rows, [row.mean_seconds for row in rows], number)
            _line(right, rows, [row.best_seconds for row in rows], number)
        _labelled(left, "mean of an update's draws")
        _labelled(right, "best so far")
        left.set_ylabel("faster than the first draws (%)")
        figure.suptitle(title, fontsize=12)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        try:
            figure.savefig(Path(path), format="svg", metadata={"Date": None})
        except OSError as error:
            raise PolicyError(f"{path}: the curves cannot be written: {error}") from error


def _line(axes: Axes, rows: Sequence[HistoryRow], seconds: Sequence[float], number: int) -> None:
    first = next((row.mean_seconds for row in rows if isfinite(row.mean_seconds)), nan)
    axes.plot(
        [row.evaluations for row in rows],
        # Where no draw can run there is no speedup, and the line has a gap.
        [100 * (first / value - 1) if isfinite(value) else nan for value in seconds],
        color=_COLORS[number % len(_COLORS)],
        linestyle=_DASHES[number // len(_COLORS) % len(_DASHES)],
        marker="o" if len(rows) == 1 else None,
        markersize=4,
        linewidth=1.5,
        label=rows[0].graph,
    )


def _labelled(axes: Axes, what: str) -> None:
    axes.set_title(what, fontsize=10)
    axes.set_xlabel("evaluations of a graph (times)")
    axes.grid(True, linewidth=0.6)
    axes.set_axisbelow(True)
