"""The picture of a training."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torch")
pytest.importorskip("torch_geometric")
pytest.importorskip("safetensors")

from souffle.learning import HistoryRow, PolicyError, training_curves

GRAPHS = ("mlp on A100", "cost $5 & <less>")


def _row(update: int, graph: str) -> HistoryRow:
    mean = math.inf if update == 1 else 0.5
    return HistoryRow(update, graph, 1.0, mean, 0.4, 2.0, 0.01, 0.1, 16 * (update + 1), float(update))


def test_curves_are_labelled_and_the_same_each_time(tmp_path: Path) -> None:
    history = [_row(update, graph) for update in range(3) for graph in GRAPHS]
    training_curves(history, tmp_path / "a.svg", "Two graphs")
    text = (tmp_path / "a.svg").read_text()
    words = [element.text for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    for expected in (*GRAPHS, "Two graphs", "faster than the first draws (%)", "evaluations of a graph (times)"):
        assert expected in words
    assert "#ffffff" in text
    training_curves(history, tmp_path / "b.svg", "Two graphs")
    assert (tmp_path / "b.svg").read_text() == text
    training_curves(history[:1], tmp_path / "a.svg")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no curves; train first"):
        training_curves([], tmp_path / "a.svg")
    with pytest.raises(PolicyError, match="cannot be written"):
        training_curves([_row(0, "a")], tmp_path / "none" / "a.svg")
