"""Reductions that start in the tiles of what they reduce: which, in how many parts, and that they stay the function."""

from __future__ import annotations

import numpy as np

import souffle
from souffle import models
from souffle.cost.device import cost_device
from souffle.cost.stage_price import price_on
from souffle.options import LEVELS
from souffle.pipeline import transform_program
from souffle.placement.tile_parts import reduce_in_tiles
from souffle.program import TEProgram
from souffle.program.evaluate import evaluate
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from tests.testlib import inputs_for

DEVICE = cost_device("A100-SXM4-40GB")


def scheduler() -> GpuScheduler:
    return GpuScheduler(device_for("sm_80"), price_on(DEVICE))


def excitation(name: str) -> TEProgram:
    """A squeeze and excitation of the paper's Figure 6, transformed."""
    program, _ = transform_program(souffle.import_onnx(models.build(name, "paper")), LEVELS["V4"], "fp32")
    return program


def test_squeeze_starts_where_channels_are_pooled() -> None:
    program = excitation("se:M9")
    result, decisions = reduce_in_tiles(program, DEVICE, scheduler())
    (accepted,) = [decision for decision in decisions if decision.accepted]
    assert accepted.stage == "channels"
    (partial,) = [t for t in result.tensors() if t.name.endswith("_partial")]
    parts = partial.shape[0]
    assert f"in {parts} parts" in accepted.reason
    assert parts > 1 and 1152 % parts == 0 and partial.shape[1:] == (1, 48, 1, 1)
    inputs = inputs_for(program)
    expected, found = evaluate(program, inputs), evaluate(result, inputs)
    for output, value in expected.items():
        np.testing.assert_allclose(found[output], value, rtol=1e-5, atol=1e-6)


def test_short_squeeze_is_repeated_instead() -> None:
    """Of few channels each tile computes the whole in less time than it combines parts."""
    program = excitation("se:M1")
    result, decisions = reduce_in_tiles(program, DEVICE, scheduler())
    assert result is program
    assert not any(decision.accepted for decision in decisions)


def test_without_a_described_device_nothing_changes() -> None:
    program = excitation("se:M9")
    assert reduce_in_tiles(program, None, scheduler()) == (program, ())
