"""The picture of an ablation: its bars are as long as what they stand for."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from souffle.evaluation.stage_bars import stage_bars


def row(label: str, predicted: float | None, measured: float | None = None, **times: float) -> dict[str, Any]:
    parts = {"launch_us": 0.0, "wait_us": 0.0, "code_us": 0.0} | {k: v for k, v in times.items() if k.endswith("_us")}
    stages = [{"stage": "a<b>&c", "us": predicted or 0.0, "runs": 1, "bound": "memory"}]
    return {"label": label, "predicted_us": predicted, "latency_us": measured, **parts, "stage_us": stages}


@pytest.mark.parametrize("longest", [0.003, 1.0, 7.0, 19.0, 4321.0, 8e6])
def test_bars_are_in_proportion(longest: float) -> None:
    root = ElementTree.fromstring(stage_bars([row("V0", longest), row("V4", longest / 4)], "x < y"))
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if list(e)]
    first, second = (float(bar.get("width")) for bar in bars)
    assert first == pytest.approx(4 * second, abs=0.05) and first == pytest.approx(900, abs=1)
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0].startswith("a<b>&c: ")
    ticks = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text") if re.fullmatch(r"[\d.e+-]+ µs", t.text)]
    assert 2 <= len(ticks) <= 9


def test_what_was_measured_is_marked_and_may_be_longer() -> None:
    text = stage_bars([row("V0", 10.0, 20.0)], "t")
    assert "measured" in text
    bar = next(e for e in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}rect") if list(e))
    assert float(bar.get("width")) == pytest.approx(450, abs=1)


def test_rows_without_a_prediction_are_left_out() -> None:
    assert "nothing is predicted" in stage_bars([row("V0", None)], "t")
