"""The rule of chained products: kernels run on the CPU device and are compared with the plain function."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from tvm import te, tirx, topi

from souffle.schedule.gpu.forms.chained_products import ChainedProducts, read_chained_products
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuSchedule, Sketch
from souffle.schedule.gpu.rules.chained_products import CHAINED_PRODUCTS
from souffle.tvm_compat import primfunc_from_tensors
from tests.schedule.row_functions import causal, normalized, seen_between, softmax, softmax_of_infinities
from tests.schedule.stage_kernels import (
    A100,
    SMALL,
    Built,
    Case,
    Tensors,
    build,
    compare,
    data,
    launched,
    random_inputs,
    shape_of,
)
from tests.thorough import THOROUGH, sized


def half(tensor: te.Tensor) -> te.Tensor:
    return tensor if str(tensor.dtype) == "float16" else topi.cast(tensor, "float16")


def product(left: te.Tensor, right: te.Tensor, *, transposed: bool = False) -> te.Tensor:
    """``left @ right`` over the last two axes in fp16 with fp32 totals; batch axes of extent 1 serve all."""
    left, right = half(left), half(right)
    inner = shape_of(left)[-1]
    columns = shape_of(right)[-2 if transposed else -1]
    batch = tuple(max(a, b) for a, b in zip(shape_of(left)[:-2], shape_of(right)[:-2], strict=True))
    k = te.reduce_axis((0, inner), name="k")

    def at(tensor: te.Tensor, index: list, *last: object) -> tirx.PrimExpr:
        return tensor(*(0 if extent == 1 else i for i, extent in zip(index, shape_of(tensor), strict=False)), *last)

    def term(*index):
        *outer, i, j = index
        right_at = (j, k) if transposed else (k, j)
        pair = (at(left, outer, i, k), at(right, outer, *right_at))
        return te.sum(pair[0].astype("float32") * pair[1].astype("float32"), axis=k)

    return te.compute((*batch, shape_of(left)[-2], columns), term, name="product")


def attention(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    values: tuple[int, ...],
    scores: Callable[[te.Tensor], te.Tensor] = lambda s: topi.divide(s, tirx.const(4.0, "float32")),
    types: str = "float16",
    weigh: Callable[[te.Tensor], te.Tensor] = softmax,
) -> tuple[Tensors, te.Tensor]:
    q, k, v = (data(*shape, dtype=types, name=name) for shape, name in zip((queries, keys, values), "qkv", strict=True))
    weights = weigh(scores(product(q, k, transposed=True)))
    return (q, k, v), topi.cast(product(weights, v), "float16")


def chain(
    rows: int, inner: int, columns: int, last: int, between: Callable[[te.Tensor], te.Tensor], types: str = "float16"
) -> tuple[Tensors, te.Tensor]:
    x, w, u = data(rows, inner, name="x", dtype=types), data(inner, columns, name="w"), data(columns, last, name="u")
    bias = data(columns, dtype="float32", name="bias")
    result = product(between(topi.add(product(x, w), bias)), u)
    residual = data(rows, last, dtype="float32", name="residual")
    return (x, w, bias, u, residual), topi.add(result, residual)


def running(
    along_rows: int = 2, chunks: int = 1, *, second_along_rows: int = 1, second_along_inner: int = 1
) -> tuple[tuple[str, int], ...]:
    """Values of knobs for panels with a running maximum and sum."""
    return (
        ("warps_along_rows", along_rows),
        ("mma_rows", 1),
        ("mma_columns", 2),
        ("chunks", chunks),
        ("running", 1),
        ("step", 16),
        ("second_warps_along_rows", second_along_rows),
        ("second_warps_along_inner", second_along_inner),
        ("second_step", 16 * second_along_inner),
        ("stages", 2),
    )


def plain_cases() -> list[Case]:
    found = []
    for name, arguments, request in (
        ("square", ((2, 48, 16), (2, 48, 16), (2, 48, 16)), SMALL),
        ("wide", ((2, 64, 64), (2, 384, 64), (2, 384, 64)), A100),
        ("prime", ((3, 17, 29), (3, 37, 29), (3, 37, 13)), SMALL),
        ("one_query", ((2, 1, 32), (2, 50, 32), (2, 50, 32)), SMALL),
        ("shared_keys", ((4, 20, 16), (1, 24, 16), (1, 24, 16)), SMALL),
        ("long_heads", ((1, 32, 200), (1, 64, 200), (1, 64, 256)), A100),
        ("many_keys", ((1, 16, 32), (1, 1000, 32), (1, 1000, 32)), A100),
    ):
        inputs, result = attention(*arguments)
        found.append(Case(name, inputs, (result,), request))
    inputs, result = attention((2, 32, 32), (2, 32, 32), (2, 32, 32), causal)
    found.append(Case("causal", inputs, (result,)))
    inputs, result = attention((2, 32, 32), (2, 40, 32), (2, 40, 32), types="float32")
    found.append(Case("wide_types", inputs, (result,)))
    mask = data(1, 40, 56, dtype="float32", name="mask")
    inputs, result = attention((3, 40, 32), (3, 56, 32), (3, 56, 32), lambda s: topi.add(s, mask))
    found.append(Case("mask", (*inputs, mask), (result,)))
    for name, arguments, values in (
        ("running", ((2, 40, 32), (2, 100, 32), (2, 100, 40)), running()),
        ("running_same_rows", ((1, 70, 16), (1, 130, 16), (1, 130, 23)), running(4, 1, second_along_rows=4)),
        ("running_shared_sums", ((2, 17, 29), (2, 161, 29), (2, 161, 13)), running(1, 1, second_along_inner=2)),
    ):
        inputs, result = attention(*arguments, weigh=softmax_of_infinities)
        found.append(Case(name, inputs, (result,), values=values))
    mask = data(2, 40, 130, dtype="float32", name="mask")
    inputs, result = attention(
        (2, 40, 32), (2, 130, 32), (2, 130, 40), lambda s: topi.add(s, mask), weigh=softmax_of_infinities
    )
    for name, values in (("infinite", ()), ("running_infinite", running())):
        found.append(Case(name, (*inputs, mask), (result,), values=values))
    for name, rows, columns, before, after, values in (
        ("causal", 70, 100, 200, 30, running()),
        ("window", 100, 100, 40, 0, running(1)),
        ("far", 64, 161, -90, 200, running(1)),
        ("short", 90, 65, 3, 3, running()),
    ):
        shapes = ((2, rows, 32), (2, columns, 32), (2, columns, 24))
        inputs, result = attention(*shapes, seen_between(before, after), weigh=softmax_of_infinities)
        found.append(Case(f"running_{name}", inputs, (result,), values=values))
    for name, between in (("gelu", topi.tanh), ("norm", normalized), ("nothing", lambda x: x)):
        inputs, result = chain(40, 48, 72, 40, between)
        found.append(Case(f"chain_{name}", inputs, (result,)))
    return found


def drawn_cases(count: int) -> list[Case]:
    """Shapes and values of knobs drawn at random."""
    draw = random.Random(11)
    found = []
    while len(found) < count:
        way = draw.choice((0, 1))
        rows, keys, head, last = (draw.choice((2, 16, 23, 32, 64, 100)) for _ in range(4))
        batch = draw.choice((1, 2, 3))
        scores = draw.choice((causal, normalized, lambda s: s))
        head = max(head, 16)
        inputs, result = attention((batch, rows, head), (batch, keys, head), (batch, keys, last), scores)
        request = draw.choice((SMALL, A100))
        sketch = CHAINED_PRODUCTS.sketch(StageForms(primfunc_from_tensors([*inputs, result], "f")), request)
        assert isinstance(sketch, Sketch), sketch
        knobs = {knob.name: knob.values for knob in sketch.knobs}
        for _ in range(200):
            values = {name: draw.choice(choices) for name, choices in knobs.items()}
            values["running"] = way if 1 in knobs["running"] else 0
            if isinstance(sketch.make(values), GpuSchedule):
                found.append(Case(f"drawn_{len(found)}", inputs, (result,), request, tuple(values.items())))
                break
    return found


CASES = [*plain_cases(), *drawn_cases(sized(6, 14))]
_INFINITE = ("infinite", "running_infinite")
RUN = [case for number, case in enumerate(CASES) if THOROUGH or number % 3 == 0 or case.name in _INFINITE]
"""What g++ compiles."""


@pytest.fixture(scope="module")
def built() -> Built:
    return build(RUN, CHAINED_PRODUCTS)


@pytest.mark.parametrize("case", RUN, ids=lambda case: case.name)
def test_result(case: Case, built: Built) -> None:
    compare(case, built)


@pytest.mark.parametrize("name", _INFINITE)
def test_rows_of_infinities(name: str, built: Built) -> None:
    """Rows that begin, or end, or are all minus infinity; and NaN and infinity, which make a row NaN."""
    case = next(case for case in CASES if case.name == name)
    inputs = [one * 4 for one in random_inputs(case)]
    mask = inputs[3]
    mask[0, 1] = mask[1, 2, :90] = mask[1, 3, 1:] = mask[0, 4, 16:] = -np.inf
    mask[0, 5, 100], mask[1, 6, 3], mask[1, 7, :100], mask[1, 7, 120] = np.nan, np.inf, -np.inf, np.nan
    mask[0, 8], mask[0, 9, 64:96] = -1e30, 300.0
    q, k, v = (one.astype(np.float64) for one in inputs[:3])
    with np.errstate(invalid="ignore"):
        scores = q @ k.swapaxes(1, 2) + mask
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = weights / weights.sum(-1, keepdims=True) @ v
    assert np.isnan(expected).any(-1).sum() == 4
    (found,) = launched(case, built, inputs)
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (seen_between(1000, 0), (-69, 0)),
        (seen_between(5, 7), (-5, 7)),
        (seen_between(-2, 7), (2, 7)),
        (lambda s: topi.multiply(seen_between(5, 0)(s), tirx.const(0.5, "float32")), (-5, 0)),
        (lambda s: topi.add(seen_between(5, 0)(s), tirx.const(1.5, "float32")), (-5, 0)),
        (lambda s: topi.multiply(seen_between(5, 0)(s), tirx.const(-0.5, "float32")), None),
        (causal, None),
        (lambda s: s, None),
    ],
)
def test_which_columns_are_seen(mask: Callable[[te.Tensor], te.Tensor], expected: tuple[int, int] | None) -> None:
    inputs, result = attention((2, 70, 16), (2, 70, 16), (2, 70, 16), mask, weigh=softmax_of_infinities)
    form = read_chained_products(StageForms(primfunc_from_tensors([*inputs, result], "f")))
    assert isinstance(form, ChainedProducts), form
    seen = form.running.seen
    assert (None if seen is None else (seen.least, seen.greatest)) == expected
