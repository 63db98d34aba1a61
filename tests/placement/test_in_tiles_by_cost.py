"""Which reductions the cost model lets start in tiles: those that gain by it, by more than it may err."""

from __future__ import annotations

import re

import numpy as np
import pytest

from souffle.cost.device import cost_device
from souffle.placement.in_tiles import Start, propagate
from souffle.placement.in_tiles_by_cost import PropagateByCost
from souffle.placement.two_phase_by_cost import SplitByCost
from souffle.program import TEProgram
from souffle.schedule.drafts import cached_scheduler
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import gpu_request, gpu_scheduler
from souffle.schedule.lower import Lowering, cuda_target
from souffle.transform import vertical
from tests.testlib import Builder, assert_same_function

ARCH = "sm_80"


def asked(program: TEProgram, product: str | None = "A100-SXM4-40GB") -> tuple[list[Start], TEProgram]:
    lowering = Lowering(cuda_target(ARCH))
    scheduler = cached_scheduler(gpu_scheduler(device_for(ARCH), lowering.problem))
    known = (None if product is None else cost_device(product), scheduler, lowering)
    request = gpu_request(device_for(ARCH))
    choose = PropagateByCost(program, *known, request, SplitByCost(program, *known))
    answers: list[Start] = []

    def record(*items) -> Start:
        answers.append(choose(*items))
        return answers[-1]

    return answers, propagate(program, record)[0]


def product_and(axis: int, rows: int, inner: int, columns: int, *, kept: bool = True) -> TEProgram:
    b = Builder()
    weights = np.random.default_rng(0).standard_normal((inner, columns)).astype(np.float32)
    y = b.relu(b.bias(b.matmul(b.input(rows, inner), b.constant(weights)), b.constant(np.ones(columns, np.float32))))
    total = b.reduce(y, axis, "max")
    return vertical(b.program(*((y, total) if kept else (total,))))[0]


def test_a_long_reduction_starts_in_tiles_of_its_producer() -> None:
    (answer,), result = asked(program := product_and(0, 1000, 64, 200))
    assert answer.accepted and answer.size
    before, more, after = map(float, re.match(r"([\d.]+) \+ ([\d.]+) µs apart; ([\d.]+) µs", answer.reason).groups())
    assert after < before + more
    assert_same_function(program, result)


def test_what_is_not_needed_besides_is_not_stored() -> None:
    """A short one that a tile holds needs no second phase, so that a grid sync falls away."""
    (answer,), result = asked(program := product_and(1, 1000, 64, 32, kept=False))
    assert answer.accepted and answer.size is None
    assert len(result.tes) == len(program.tes)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (product_and(0, 333, 60, 77), "are not less by the factor"),
        (product_and(0, 32, 16384, 64), "a sum in two phases"),
        (product_and(0, 2, 64, 200), "the rule reduction computes its producer"),
    ],
    ids=["no gain", "split producer", "no tiles"],
)
def test_what_stays_apart(program: TEProgram, reason: str) -> None:
    (answer,), result = asked(program)
    assert not answer.accepted and reason in answer.reason
    assert result is program


def test_reductions_of_one_operator_stay_together() -> None:
    """One stage computes both, on chip: taking the first away would leave the second to read everything again."""
    b = Builder()
    y = b.matmul(b.input(1000, 64), b.constant(np.ones((64, 32), np.float32)))
    own = b.grouped("softmax")
    program = b.program(own.reduce(y, 1, "max"), own.reduce(own.tanh(y), 1))
    answers, result = asked(program)
    assert answers and not any(answer.accepted for answer in answers)
    assert all("on the same rows" in answer.reason for answer in answers) and result is program


def test_without_a_product_nothing_starts_in_tiles() -> None:
    (answer,), result = asked(program := product_and(0, 1000, 64, 200), None)
    assert not answer.accepted and "no product of this architecture" in answer.reason and result is program


def test_operators_that_read_an_element_more_than_once_are_not_asked_about() -> None:
    b = Builder()
    y = b.matmul(b.input(64, 32), b.constant(np.ones((32, 64), np.float32)))
    answers, _ = asked(b.program(b.matmul(y, b.constant(np.ones((64, 16), np.float32)))))
    assert not answers
