"""Rows of networks, at tiny size: what they are made of adds up."""

from __future__ import annotations

import pytest

from souffle.errors import SouffleError
from souffle.evaluation.network_rows import Compiled, Ordered, Planned, Task, made_row
from souffle.evaluation.unfused import UNFUSED_NAME


def row(task: Task) -> dict:
    return made_row(task, lambda message: None, None)


@pytest.mark.parametrize("level", ["V0", "V4"])
def test_times_of_a_row_add_up(level: str) -> None:
    made = row(Compiled("mmoe", "tiny", level, "fp32", "sm_80", cubin=False, traffic=True))
    stages = sum(one["us"] for one in made["stage_us"])
    parts = made["launch_us"] + made["wait_us"] + made["code_us"] + stages
    assert parts == pytest.approx(made["predicted_us"], rel=1e-3)
    assert made["compute_us"] + made["memory_us"] == pytest.approx(stages, abs=0.01)
    # What a launch writes itself it need not read again.
    assert 0 < made["once_per_launch"]["read"] <= made["once_per_stage"]["read"]
    assert made["once_per_stage"]["read"] == made["bytes_read"]


def test_fewer_kernels_with_each_planner() -> None:
    made = row(Planned("mmoe", "tiny", (UNFUSED_NAME, "xla-rules", "stitching-dp"), "V100-PCIE-16GB"))
    kernels = {name: of["kernels"] for name, of in made["planners"].items()}
    assert kernels["unfused"] == made["tes"] > kernels["xla-rules"] >= kernels["stitching-dp"] > 0
    assert all(of["memory_kernels"] <= of["kernels"] for of in made["planners"].values())


def test_orders_are_no_slower_than_none() -> None:
    us = row(Ordered("rnnlm", "tiny", "A100-SXM4-40GB", 8))["us"]
    assert us["default"] <= us["none"] and us["annealing"] <= us["none"]


def test_what_cannot_be_made_says_why() -> None:
    assert "no model is named" in row(Planned("nothing", "tiny", ("tvm",), "V100-PCIE-16GB"))["failed"]
    assert "arch" in row(Compiled("mmoe", "tiny", "V0", "fp32", "sm_1", cubin=False))["failed"]
    assert issubclass(SouffleError, Exception)
