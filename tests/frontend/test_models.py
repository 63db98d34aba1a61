"""The paper's models in their small sizes, against ONNX Runtime."""

from __future__ import annotations

import pytest

from souffle import models
from souffle.frontend import import_onnx
from souffle.program import TE
from tests.frontend.support import compare
from tests.testlib import calls_made
from tests.thorough import some


# Of the others, the imported programs are in tests/test_models_all_levels.py.
@pytest.mark.parametrize("name", some(["bert", "lstm-unrolled", "mmoe", "se:M3"], ["lstm", "efficientnet", "swin"]))
def test_model(name):
    program = compare(models.build(name, "tiny"))
    assert all(isinstance(te_, TE) for te_ in program.tes)


def test_the_work_of_importing_grows_with_the_steps_and_not_faster():
    def work(steps: int) -> int:
        model = models.build("lstm", "paper", steps=steps)
        return calls_made(lambda: import_onnx(model))

    work(2)  # what is loaded and remembered once
    assert work(8) < 5 * work(2)
