"""What the transformations may cost: arithmetic is kept (paper §6)."""

from __future__ import annotations

import pytest

from souffle import models
from souffle.analysis import Analysis, analyze
from souffle.frontend import import_onnx
from souffle.transform import horizontal, vertical

MOST = 1.05
"""By how much all operations of a network may grow."""


def operations(analysis: Analysis) -> int:
    return sum(analysis.arithmetic(item).operations for item in analysis.program.tes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", models.NAMES)
def test_transformations_repeat_no_arithmetic(name: str) -> None:
    program = import_onnx(models.build(name))
    merged, _ = horizontal(program)
    fused, _ = vertical(merged)
    before, after = analyze(program), analyze(fused)
    assert 0 < operations(after) <= MOST * operations(before)
    costly = [sum(a.arithmetic(item).expensive_operations for item in a.program.tes) for a in (before, after)]
    assert costly[1] <= costly[0]
    assert len(fused.tes) < len(program.tes) / 2
