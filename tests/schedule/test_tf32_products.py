"""Sums of products of fp32 on tensor cores: kernels run on the CPU device, beside products that are rounded by hand.

The oracle rounds factors with NumPy's integers and multiplies in fp64, and shares nothing with what it checks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from tvm import topi

from souffle.codegen.nvcc import compile_cubin, find_nvcc
from souffle.decision import Refused
from souffle.program.products import TF32, TF32X3
from souffle.schedule.gpu.forms.matrix_product import canonical_contraction
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import MULTIPLIES, GpuRequest, GpuSchedule
from souffle.schedule.gpu.rules.mma_contraction import MMA_CONTRACTION
from souffle.schedule.gpu.tiling.mma_tiling import assumed_operands
from souffle.tvm_compat import primfunc_from_tensors
from tests.schedule import matrix_products
from tests.schedule.stage_kernels import (
    A100,
    SMALL,
    Built,
    Case,
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

matmul = partial(matrix_products.matmul, factors="float32")
gemm = partial(matrix_products.gemm, types=matrix_products.WORDS, factors="float32")


def plain_cases() -> list[Case]:
    found = []
    shapes = [
        ("whole", (64, 96, 64), {}),
        ("prime", (37, 41, 43), {}),
        ("few_rows", (5, 64, 40), {}),
        ("odd_columns", (48, 50, 64), {}),
        ("odd_inner", (32, 64, 53), {}),
        ("batched", (17, 24, 40, 3), {"tb": True}),
        ("left_transposed", (40, 64, 48), {"ta": True}),
        ("both_transposed", (48, 40, 33), {"ta": True, "tb": True}),
        ("right_transposed", (24, 72, 80, 2, 2), {"tb": True}),
        ("short_sum", (40, 48, 8), {}),
        ("shorter_sum", (40, 48, 5), {"ta": True}),
        ("long", (32, 32, 1000), {}),
    ]
    few = ("whole", "prime", "long", "shorter_sum")
    for (name, extents, options), how in itertools.product(shapes, (TF32, TF32X3)):
        if how == TF32X3 and name not in few and not THOROUGH:
            continue
        inputs, result = gemm(*extents, **options)
        found.append(WordCase(f"plain_{name}_{how}", inputs, (result,)))
    return found


def neighbour_cases() -> list[Case]:
    found = []
    for how in (TF32, TF32X3):
        inputs, result = gemm(48, 72, 64)
        bias = data(72, dtype="float32", name="bias")
        heads = topi.transpose(topi.reshape(topi.add(result, bias), (48, 6, 12)), (1, 0, 2))
        a, weight = data(31, 64, dtype="float32", name="a"), data(64, 40, dtype="float32", name="weight")
        padded = topi.nn.pad(a, (0, 0), (9, 0))
        x, w = data(2, 8, 15, 13, dtype="float32", name="image"), data(16, 8, 3, 3, dtype="float32", name="filters")
        image = topi.nn.relu(topi.nn.conv2d_nchw(x, w, 2, 1, 1))
        found += [
            WordCase(f"after_heads_{how}", (*inputs, bias), (topi.cast(heads, "float16"),)),
            WordCase(f"before_pad_{how}", (a, weight), (matmul(padded, weight),)),
            WordCase(f"before_scale_{how}", (a, weight), (matmul(topi.multiply(a, 0.5), weight),)),
            WordCase(f"convolution_{how}", (x, w), (image,)),
        ]
    return found


def tiled_cases(count: int) -> list[Case]:
    """Shapes with values of knobs drawn at random: each number of stages with each split of the sum, and fragments."""
    draw = random.Random(11)
    found = []
    stages_and_splits = itertools.cycle(itertools.product((1, 2, 3, 4), (1, 2, 4)))
    fragments = itertools.cycle(itertools.product((1, 2, 3, 4), (2, 4, 6, 8)))
    for number in range(count):
        stages, along_inner = next(stages_and_splits)
        rows, columns = next(fragments)
        while True:
            how, request = draw.choice((TF32, TF32X3)), draw.choice((SMALL, A100))
            extents = [draw.choice((16, 29, 40, 64, 72, 130)) for _ in range(2)]
            inputs, result = gemm(
                *extents, draw.choice((33, 64, 80, 160)), ta=draw.random() < 0.4, tb=draw.random() < 0.4
            )
            case = WordCase(f"tiled_{number}_{how}", inputs, (topi.nn.relu(result),), request)
            sketch = MMA_CONTRACTION.sketch(StageForms(case.func), request)
            values = {knob.name: draw.choice(knob.values) for knob in sketch.knobs}
            values |= {"stages": stages, "warps_along_inner": along_inner, "mma_rows": rows, "mma_columns": columns}
            open_to_it = all(values[knob.name] in knob.values for knob in sketch.knobs)
            if open_to_it and isinstance(sketch.make(values), GpuSchedule):
                break
        found.append(WordCase(case.name, case.inputs, case.outputs, request, tuple(values.items())))
    return found


def stands_for_others(name: str) -> bool:
    """Shapes that tests below ask for, and of the others, which are in tests/schedule/test_gpu_mma.py too, a part."""
    shape, _, how = name.rpartition("_")
    kind, _, shape = shape.partition("_")
    if kind == "plain":
        return how == TF32X3 or shape in ("whole", "prime", "long", "odd_inner", "batched", "left_transposed")
    # What stands before and behind a product, in one of both ways.
    return kind == "tiled" or (kind == "before") == (how == TF32)


CASES = [*plain_cases(), *neighbour_cases(), *tiled_cases(sized(12, 16))]
RUN = [case for case in CASES if THOROUGH or stands_for_others(case.name)]
"""What g++ compiles."""


@pytest.fixture(scope="module")
def built() -> Built:
    return build(RUN, MMA_CONTRACTION)


@pytest.mark.parametrize("case", RUN, ids=lambda case: case.name)
def test_result(case: Case, built: Built) -> None:
    compare(case, built, wide=2e-5 if case.name.endswith(TF32X3) else 2e-3)


def rounded(values: np.ndarray) -> np.ndarray:
    """To 11 bits, ties away from zero."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def in_tf32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return rounded(a).astype(np.float64) @ rounded(b).astype(np.float64)


def in_three(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    parts = []
    for whole in (a, b):
        high = rounded(whole)
        parts.append((high.astype(np.float64), rounded(whole - high).astype(np.float64)))
    (a_high, a_low), (b_high, b_low) = parts
    return a_high @ b_high + a_low @ b_high + a_high @ b_low


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        (f"plain_{name}_{how}", oracle)
        for name in ("whole", "prime", "long")
        for how, oracle in ((TF32, in_tf32), (TF32X3, in_three))
    ],
)
def test_factors_are_rounded_as_said(name: str, oracle: Callable, built: Built) -> None:
    """Beside the same products in fp64, only sums are rounded, so that any other rounding of factors shows."""
    (case,) = (case for case in CASES if case.name == name)
    inputs = random_inputs(case)
    (found,) = launched(case, built, inputs)
    exact = inputs[0].astype(np.float64) @ inputs[1].astype(np.float64)
    magnitude = np.abs(inputs[0]).astype(np.float64) @ np.abs(inputs[1])
    rounding = (np.abs(found - oracle(*inputs)) / magnitude).max()
    assert rounding < 3e-7
    error = (np.abs(found - exact) / magnitude).max()
    # Rounding once is 2 ** -11 of each factor at most; both parts of a sum lose 2 ** -22 or less.
    assert rounding * 4 < error < 2**-10 if name.endswith(f"_{TF32}") else error < 4e-7


def test_what_has_no_number_is_none(built: Built) -> None:
    """NaN stays NaN; an infinity is one in TF32, and NaN as a sum of two parts."""
    for how, infinite in ((TF32, np.isinf), (TF32X3, np.isnan)):
        (case,) = (case for case in CASES if case.name == f"plain_prime_{how}")
        a, b = random_inputs(case)
        a[3, 5], a[7, 11] = np.nan, np.inf
        (found,) = launched(case, built, [a, b])
        assert np.isnan(found[3]).all()
        assert infinite(found[7]).all()
        assert np.isfinite(np.delete(found, (3, 7), 0)).all()


def test_which_operands_are_copied() -> None:
    """As wide as memory lets them; what is transposed on its way for halves lies as it is for words."""
    expected = {"whole": (16, 16), "odd_columns": (16, 8), "odd_inner": (4, 16), "left_transposed": (16, 16)}
    for name, widths in expected.items():
        (case,) = (case for case in CASES if case.name == f"plain_{name}_{TF32}")
        operands = assumed_operands(canonical_contraction(case.func), case.request)
        assert tuple(one.copy.copy_bytes for one in operands.both) == widths


def test_text() -> None:
    inputs, result = gemm(384, 768, 768)
    for how, added, begun in ((TF32, 1, 0), (TF32X3, 2, 1)):
        case = WordCase(f"text_{how}", inputs, (result,), A100)
        schedule = scheduled(case, MMA_CONTRACTION)
        assert (schedule.tensor_cores, schedule.way) == (True, f"in {how}")
        text, _ = kernels({case.name: schedule}, "sm_80")
        part = text[text.rindex(f" {case.name}(int tile") :].split("\n}\n")[0]
        # Where parts are loaded ahead, those of each second piece are multiplied from registers of their own.
        banks = 1 + ("left_ahead" in part)
        assert part.count("souffle_add_tf32_product") == banks * added
        assert part.count("souffle_begin_tf32_product") == banks * begun
        assert "souffle_copy_async<16>" in part
        assert "souffle_load_word_matrices" in part
        assert "souffle_load_words" in part
        assert ("souffle_split_to_tf32" in part) == (how == TF32X3)


def test_ieee_products_are_refused() -> None:
    inputs, result = gemm(64, 64, 64)
    func = primfunc_from_tensors([*inputs, result], "f")
    answer = MMA_CONTRACTION.sketch(StageForms(func), A100)
    assert isinstance(answer, Refused)
    assert "operands and total are float32, float32, float32; fp16, fp16 and fp32 are needed" in answer.reason
    older = MMA_CONTRACTION.sketch(StageForms(func.with_attr(MULTIPLIES, TF32)), GpuRequest("sm_75"))
    assert isinstance(older, Refused)
    assert "sm_75 has no mma" in older.reason


@pytest.mark.thorough("nvcc takes those of tests/schedule/test_gpu_mma.py")
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
def test_own_choices_do_not_spill() -> None:
    schedules = {}
    for how in (TF32, TF32X3):
        for extents, options in (
            ((384, 3072, 768), {}),
            ((383, 764, 770), {"ta": True}),
            ((196, 512, 512), {"tb": True}),
        ):
            inputs, result = gemm(*extents, **options)
            bias = data(extents[1], dtype="float32", name="bias")
            case = WordCase(f"nvcc{extents[0]}_{how}", (*inputs, bias), (topi.nn.relu(topi.add(result, bias)),), A100)
            schedules[case.name] = scheduled(case, MMA_CONTRACTION)
    assert len(schedules) == 6
    _, report = compile_cubin(kernels(schedules, "sm_80")[0], "sm_80")
    assert {used.spill_store_bytes for used in report.values()} == {0}
