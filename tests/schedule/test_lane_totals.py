"""Totals that lanes share out among themselves: right for every number of totals, lanes and warps, and proven."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from tvm import te

from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.program.evaluate import evaluate
from souffle.schedule.gpu.emit.direct_emission import emit_direct
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Values
from souffle.schedule.gpu.rules import window
from souffle.schedule.gpu.tiling.direct_cost import knobs_of, tiling_of, tiling_refusal
from souffle.schedule.gpu.tiling.direct_tiling import (
    DirectTiling,
    SumPlan,
    halves_totals,
    parts_of,
    read_plan,
    totals_exchanged,
)
from souffle.verify import PROVEN
from tests.schedule.knob_choices import Choices, built_choices
from tests.schedule.test_gpu_window import Case, arrays, data, product
from tests.testlib import Builder, inputs_for, run_on_cpu_device
from tests.thorough import sized

pytestmark = pytest.mark.sampled(3)

MIDDLE = GpuRequest("sm_90", threads=128, sm_count=4)
WIDE = GpuRequest("sm_90", threads=64, sm_count=4)


def of_columns(name: str, rows: int, columns: int, reduce: object, dtype: str = "float32") -> Case:
    x, r = data(rows, columns, dtype=dtype), te.reduce_axis((0, rows), "r")
    return Case(name, (x,), te.compute((columns,), lambda i: reduce(x[r, i], axis=r), name="out"), False)


CASES = [
    Case("along", *product(8, 20, 96, True), shares=False, request=WIDE),
    Case("along_ragged", *product(7, 13, 101, True), shares=False, request=MIDDLE),
    Case("across", *product(8, 32, 96, False), shares=False, request=MIDDLE),
    Case("across_ragged", *product(5, 36, 75, False), shares=False, request=WIDE),
    Case("one_warp", *product(4, 16, 64, False), shares=False, request=GpuRequest("sm_90", threads=32, sm_count=4)),
    Case("half", *product(4, 24, 128, True, "float16"), shares=False, request=WIDE),
    of_columns("largest", 70, 36, te.max),
    of_columns("least", 64, 40, te.min, "int32"),
    of_columns("of_halves", 70, 64, te.sum, "float16"),
]

SAMPLES = sized(3, 12)
"""Tilings of each case, of different numbers of totals, lanes and warps where there are."""


def tilings(plan: SumPlan, request: GpuRequest) -> Iterator[DirectTiling]:
    """Those in which lanes exchange halves of their totals."""
    offered = {knob.name: knob.values for knob in knobs_of(plan, request)}
    for chosen in itertools.product(*offered.values()):
        tiling = tiling_of(plan, dict(zip(offered, chosen, strict=True)))
        fits = tiling.turns == 1 and tiling_refusal(plan, tiling, request) is None
        if fits and halves_totals(plan, tiling, request.threads):
            yield tiling


def different(plan: SumPlan, request: GpuRequest) -> list[DirectTiling]:
    by_kind: dict[tuple[object, ...], list[DirectTiling]] = {}
    for tiling in tilings(plan, request):
        distances, parts = parts_of(plan, tiling.split, request.threads)
        by_kind.setdefault((tiling.outputs(plan), len(distances), parts > 1), []).append(tiling)
    chance = random.Random(7)
    kinds = sorted(by_kind)
    return [chance.choice(by_kind[kind]) for kind in chance.sample(kinds, min(SAMPLES, len(kinds)))]


@pytest.fixture(scope="module")
def built() -> Choices:
    def sampled(case: Case) -> list[GpuSchedule]:
        plan = StageForms(case.func).read(read_plan)
        found = []
        for tiling in different(plan, case.request):
            kernel, tiles = emit_direct(plan, tiling, case.request.threads)
            found.append(GpuSchedule(kernel, "direct", tiles, case.request.threads))
        assert len(found) > 1, case.name
        return found

    return built_choices(CASES, sampled)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_lane_s_share_is_right(case: Case, built: Choices) -> None:
    output = np.zeros([int(e) for e in case.output.shape], str(case.output.dtype))
    built.assert_equal(case.name, arrays(case), [output], 1e-2 if "16" in str(output.dtype) else 2e-5)


def test_the_cases_are_of_all_kinds() -> None:
    """Of one warp and of several, neighbours on one sum or not, totals odd in number behind some exchange."""
    kinds = set()
    for case in CASES:
        plan = StageForms(case.func).read(read_plan)
        for tiling in different(plan, case.request):
            distances, parts = parts_of(plan, tiling.split, case.request.threads)
            left = totals_exchanged(tiling.outputs(plan), len(distances))
            kinds.add((parts > 1, plan.sum_fast))
            kinds |= {"odd"} if left[-1] % 2 and left[-1] > 1 else {"vector"} if plan.vector_is_output else set()
    assert kinds >= {(False, False), (False, True), (True, False), (True, True), "odd", "vector"}


def program(kind: str) -> TEProgram:
    """Sums of whole numbers with something behind them, whose values a proof has to follow through the exchanges."""
    b = Builder()
    weights = np.random.default_rng(1).integers(-3, 4, (24, 70)).astype(np.float32)
    if kind == "across":
        total = b.matmul(b.input(1, 70), b.constant(np.ascontiguousarray(weights.T)))
    elif kind == "along":
        total = b.matmul(b.input(1, 70), b.transpose(b.constant(weights), 1, 0))
    else:
        total = b.reduce(b.input(70, 36), 0, kind)
    return b.program(b.map(lambda v: te.round(v * 0.25), total))


@pytest.mark.parametrize("kind", ["across", "along", "sum", "max"])
@pytest.mark.parametrize("number", [0, 4])
def test_exchanges_are_proven_with_their_values(kind: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[DirectTiling] = []

    def choose(plan: SumPlan, request: GpuRequest) -> tuple[float, Values]:
        halving = different(plan, request)
        offered = {knob.name: knob.values for knob in knobs_of(plan, request)}
        every = (dict(zip(offered, values, strict=True)) for values in itertools.product(*offered.values()))
        chosen.append(halving[number % len(halving)])
        return 0.0, next(values for values in every if tiling_of(plan, values) == chosen[-1])

    monkeypatch.setattr(window, "choose_tiling", choose)
    made = program(kind)
    net = compile_cuda(made, level="V4", arch="sm_90", cubin=False, verify="values")
    assert chosen and "__shfl_xor" in net.plan.modules[0].text
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    inputs = inputs_for(made)
    for options in ({}, {"order": "shuffled", "seed": 1, "blocks": 2}, {"checked": True}):
        found = run_on_cpu_device(net.plan, inputs, **options)
        for name, value in evaluate(made, inputs).items():
            np.testing.assert_array_equal(found[name], value, err_msg=str(options))


def test_totals_are_halved_while_they_are_even_in_number() -> None:
    assert totals_exchanged(8, 4) == (4, 2, 1, 1)
    assert totals_exchanged(12, 5) == (6, 3, 3, 3, 3)
    assert totals_exchanged(7, 2) == (7, 7)
