"""Two products of fp32 with work on rows between them, on tensor cores: kernels run on the CPU device."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from tvm import te, topi

from souffle.codegen.nvcc import compile_cubin, find_nvcc
from souffle.decision import Refused
from souffle.program.products import TF32, TF32X3
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuSchedule, Sketch, Values
from souffle.schedule.gpu.rules.chained_products import CHAINED_PRODUCTS
from tests.schedule.matrix_products import matmul
from tests.schedule.row_functions import causal, normalized, seen_between, softmax_of_infinities
from tests.schedule.stage_kernels import (
    A100,
    SMALL,
    Built,
    Case,
    Tensors,
    WordCase,
    build,
    compare,
    data,
    kernels,
    launched,
    random_inputs,
    scheduled,
)
from tests.thorough import THOROUGH, sized

product = partial(matmul, factors="float32")


def attention(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    last: int,
    scores: Callable[[te.Tensor], te.Tensor] = lambda s: topi.divide(s, 4.0),
    weigh: Callable[[te.Tensor], te.Tensor] = softmax_of_infinities,
) -> tuple[Tensors, te.Tensor]:
    shapes = (queries, keys, (*keys[:-1], last))
    q, k, v = (data(*shape, dtype="float32", name=name) for shape, name in zip(shapes, "qkv", strict=True))
    return (q, k, v), product(weigh(scores(product(q, k, tb=True))), v)


def values_of(along_rows: int, *, second_along_rows: int = 1, second_along_inner: int = 1, stages: int = 2) -> Values:
    """Panels with a running maximum and sum."""
    return {
        "warps_along_rows": along_rows,
        "mma_rows": 1,
        "mma_columns": 2,
        "chunks": 1,
        "running": 1,
        "step": 8,
        "second_warps_along_rows": second_along_rows,
        "second_warps_along_inner": second_along_inner,
        "second_step": 8 * second_along_inner,
        "stages": stages,
    }


def plain_cases() -> list[Case]:
    found = []
    for how in (TF32, TF32X3):
        for name, queries, keys, last, request in (
            ("square", (2, 48, 16), (2, 48, 16), 16, SMALL),
            ("wide", (2, 64, 64), (2, 384, 64), 64, A100),
            ("prime", (3, 17, 29), (3, 37, 29), 13, SMALL),
            ("one_query", (2, 1, 32), (2, 50, 32), 32, SMALL),
            ("many_keys", (1, 16, 32), (1, 1000, 32), 32, A100),
        ):
            inputs, result = attention(queries, keys, last)
            found.append(WordCase(f"{name}_{how}", inputs, (result,), request))
        inputs, result = attention((2, 32, 32), (2, 32, 32), 32, causal)
        found.append(WordCase(f"causal_{how}", inputs, (result,)))
        mask = data(2, 40, 130, dtype="float32", name="mask")
        inputs, result = attention((2, 40, 32), (2, 130, 32), 40, lambda s, m=mask: topi.add(s, m))
        for name, chosen in (("masked", ()), ("running_masked", tuple(values_of(2).items()))):
            found.append(WordCase(f"{name}_{how}", (*inputs, mask), (result,), values=chosen))
        for name, values in (
            ("running_same_rows", values_of(4, second_along_rows=4)),
            ("running_shared_sums", values_of(1, second_along_inner=2, stages=3)),
        ):
            inputs, result = attention((1, 70, 16), (1, 130, 16), 23)
            found.append(WordCase(f"{name}_{how}", inputs, (result,), values=tuple(values.items())))
        inputs, result = attention((2, 70, 32), (2, 100, 32), 24, seen_between(200, 30))
        found.append(WordCase(f"running_window_{how}", inputs, (result,), values=tuple(values_of(2).items())))
        x, w, u = (
            data(*shape, dtype="float32", name=n) for shape, n in (((40, 48), "x"), ((48, 72), "w"), ((72, 40), "u"))
        )
        found.append(WordCase(f"chain_{how}", (x, w, u), (product(normalized(product(x, w)), u),)))
    return found


def drawn_cases(count: int) -> list[Case]:
    """Shapes and values of knobs drawn at random."""
    draw = random.Random(5)
    found = []
    while len(found) < count:
        how, request = draw.choice((TF32, TF32X3)), draw.choice((SMALL, A100))
        batch, (rows, keys, last) = draw.choice((1, 2)), (draw.choice((2, 16, 23, 32, 64, 100)) for _ in range(3))
        head = draw.choice((16, 23, 32, 64))
        scores = draw.choice((causal, lambda s: s))
        inputs, result = attention((batch, rows, head), (batch, keys, head), last, scores)
        case = WordCase(f"drawn_{len(found)}_{how}", inputs, (result,), request)
        sketch = CHAINED_PRODUCTS.sketch(StageForms(case.func), request)
        assert isinstance(sketch, Sketch), sketch
        for _ in range(200):
            values = {knob.name: draw.choice(knob.values) for knob in sketch.knobs}
            if isinstance(sketch.make(values), GpuSchedule):
                found.append(WordCase(case.name, inputs, (result,), request, tuple(values.items())))
                break
    return found


# In three products, which g++ takes longest for, what differs from one: how totals and shares of them are kept.
_IN_THREE = ("masked", "running_masked", "running_shared_sums", "chain")
CASES = [
    case
    for case in (*plain_cases(), *drawn_cases(sized(3, 12)))
    if THOROUGH or not case.name.endswith(TF32X3) or case.name.removesuffix(f"_{TF32X3}") in _IN_THREE
]


@pytest.fixture(scope="module")
def built() -> Built:
    return build(CASES, CHAINED_PRODUCTS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_result(case: Case, built: Built) -> None:
    """Sums of two parts are as exact as fp32, which a value that passes as fp16 or as TF32 would not be."""
    compare(case, built, wide=2e-6 if case.name.endswith(TF32X3) else 2e-3)


@pytest.mark.parametrize("how", [TF32, TF32X3])
def test_rows_that_a_mask_hides(how: str, built: Built) -> None:
    """Minus infinity in a mask is no factor: it is added to what was multiplied."""
    for name in ("masked", "running_masked"):
        (case,) = (case for case in CASES if case.name == f"{name}_{how}")
        *inputs, mask = random_inputs(case)
        mask[0, :, 64:], mask[1, 3] = -np.inf, -np.inf
        (found,) = launched(case, built, [*inputs, mask])
        q, k, v = (one.astype(np.float64) for one in inputs)
        scores = q @ k.transpose(0, 2, 1) + mask
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            expected = weights / weights.sum(-1, keepdims=True) @ v
        assert np.isnan(found[1, 3]).all() and np.isnan(expected[1, 3]).all()
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-5 if how == TF32X3 else 2e-3)


def test_ieee_chains_are_refused() -> None:
    (inputs, result) = attention((2, 48, 16), (2, 48, 16), 16)
    answer = CHAINED_PRODUCTS.sketch(StageForms(Case("plain", inputs, (result,)).func), A100)
    assert isinstance(answer, Refused)
    assert "operands and total are float32, float32, float32" in answer.reason


@pytest.mark.thorough("nvcc takes those of tests/schedule/test_gpu_mma.py")
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
def test_own_choices_spill_no_more_than_a_word() -> None:
    schedules = {}
    for how in (TF32, TF32X3):
        for shape, keys in (((12, 384, 64), 384), ((8, 1024, 64), 1024), ((64, 49, 32), 49)):
            inputs, result = attention(shape, (shape[0], keys, shape[2]), shape[2])
            case = WordCase(f"nvcc{keys}_{how}", inputs, (result,), A100)
            schedules[case.name] = scheduled(case, CHAINED_PRODUCTS)
            assert how in schedules[case.name].way
    _, report = compile_cubin(kernels(schedules, "sm_80")[0], "sm_80")
    assert max(used.spill_store_bytes for used in report.values()) <= 4
