"""The paper's models in their small sizes, against ONNX Runtime."""

from __future__ import annotations

import time

import pytest

import models
from souffle.frontend import import_onnx
from souffle.program import TE
from tests.frontend.support import compare


@pytest.mark.parametrize("name", ["bert", "lstm", "lstm-unrolled", "mmoe", "efficientnet", "swin", "se:M3"])
def test_model(name):
    program = compare(models.build(name, "tiny"))
    assert all(isinstance(te_, TE) for te_ in program.tes)


def test_import_time_of_an_unrolled_network():
    model = models.build("lstm", "paper", steps=8)
    start = time.perf_counter()
    program = import_onnx(model)
    assert time.perf_counter() - start < 15
    assert len(program.tes) > 800
