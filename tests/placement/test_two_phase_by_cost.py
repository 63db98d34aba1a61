"""Which reductions the cost model shares among blocks: those that leave a device idle, by more than it may err."""

from __future__ import annotations

import numpy as np
import pytest

from souffle.cost.device import cost_device
from souffle.placement.two_phase import Split, two_phase
from souffle.placement.two_phase_by_cost import SplitByCost
from souffle.program import TEProgram
from souffle.schedule.drafts import cached_scheduler
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import gpu_scheduler
from souffle.schedule.lower import Lowering, cuda_target
from souffle.transform import vertical
from tests.testlib import Builder

ARCH = "sm_80"


def asked(program: TEProgram, product: str | None = "A100-SXM4-40GB") -> list[Split]:
    lowering = Lowering(cuda_target(ARCH))
    scheduler = cached_scheduler(gpu_scheduler(device_for(ARCH), lowering.problem))
    device = None if product is None else cost_device(product)
    split = SplitByCost(program, device, scheduler, lowering)
    answers: list[Split] = []

    def record(te_) -> Split:
        answers.append(split(te_))
        return answers[-1]

    two_phase(program, record)
    return answers


def product(rows: int, inner: int, columns: int) -> TEProgram:
    b = Builder()
    total = b.matmul(b.input(rows, inner), b.constant(np.ones((inner, columns), np.float32)))
    return vertical(b.program(b.relu(b.bias(total, b.constant(np.ones(columns, np.float32))))))[0]


def column_sums(rows: int, columns: int) -> TEProgram:
    b = Builder()
    return b.program(b.reduce(b.input(rows, columns), 0))


@pytest.mark.parametrize("program", [product(32, 16384, 64), product(7, 9000, 33), column_sums(100000, 40)])
def test_few_long_reductions_are_split(program: TEProgram) -> None:
    (answer,) = asked(program)
    assert answer.parts > 4
    now, then = (float(text.split(" µs")[0].split()[-1]) for text in answer.reason.split(" µs")[0:2])
    assert then < now and "tile" in answer.reason and "a grid sync more" in answer.reason


def test_longer_ranges_are_shared_by_no_fewer() -> None:
    parts = [asked(column_sums(rows, 40))[0].parts for rows in (64, 4096, 65536)]
    assert parts == sorted(parts) and parts[0] == 1 < parts[-1]


def test_a_wide_stage_is_left_whole() -> None:
    (answer,) = asked(product(4096, 64, 4096))
    assert answer.parts == 1 and "keep all 108 multiprocessors busy" in answer.reason


def test_a_short_reduction_is_not_worth_a_grid_sync() -> None:
    (answer,) = asked(product(8, 32, 8))
    assert answer.parts == 1 and "spread evenly" in answer.reason


def test_reductions_of_one_operator_stay_together() -> None:
    b = Builder()
    x = b.grouped("softmax").input(4, 100000)
    program = b.program(b.reduce(x, 1, "max"), b.reduce(x, 1))
    assert all(answer.parts == 1 and "same rows" in answer.reason for answer in asked(program))


def test_nothing_is_split_for_a_device_that_is_not_described() -> None:
    (answer,) = asked(product(32, 16384, 64), None)
    assert answer.parts == 1 and "described" in answer.reason
