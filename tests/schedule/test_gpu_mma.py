"""The mma rule: kernels run on the CPU device and are compared with the plain function; nvcc says what they use."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from tvm import te, topi

from souffle.codegen.nvcc import compile_cubin, find_nvcc
from souffle.decision import Refused
from souffle.schedule.gpu.emit.async_copy import AsyncCopy, async_copy
from souffle.schedule.gpu.emit.staging import choose_fetch
from souffle.schedule.gpu.forms.matrix_product import canonical_contraction
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule
from souffle.schedule.gpu.rules.mma_contraction import MMA_CONTRACTION
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling, assumed_operands
from souffle.tvm_compat import primfunc_from_tensors
from tests.schedule.matrix_products import gemm, matmul
from tests.schedule.stage_kernels import (
    A100,
    SMALL,
    Built,
    Case,
    Tensors,
    build,
    compare,
    data,
    kernels,
    scheduled,
)
from tests.thorough import sized


def conv(shape, filters, stride, padding, dilation=1, groups=1, image="float16") -> tuple[Tensors, te.Tensor]:
    x, w = data(*shape, dtype=image, name="image"), data(*filters, name="weight")
    half = x if image == "float16" else topi.cast(x, "float16")
    return (x, w), topi.nn.group_conv2d_nchw(half, w, stride, padding, dilation, groups, "float32")


def gelu(x: te.Tensor) -> te.Tensor:
    return topi.multiply(x, topi.multiply(topi.add(topi.erf(topi.multiply(x, 0.7071)), 1.0), 0.5))


def plain_cases() -> list[Case]:
    found = []
    shapes = [
        ("whole", (64, 96, 64), {}),
        ("prime", (37, 41, 43), {}),
        ("odd_rows", (33, 64, 72), {}),
        ("odd_columns", (48, 50, 64), {}),
        ("odd_inner", (32, 64, 52), {}),
        ("quarter_vectors", (36, 44, 60), {}),
        ("batched", (17, 24, 40, 3), {"tb": True}),
        ("left_transposed", (40, 64, 48), {"ta": True}),
        ("both_transposed", (48, 40, 33), {"ta": True, "tb": True}),
        ("right_transposed", (24, 72, 80, 2, 2), {"tb": True}),
        ("short_sum", (40, 48, 8), {}),
        ("shorter_sum", (40, 48, 5), {"ta": True}),
        ("few_rows", (5, 64, 256), {}),
        ("few_columns", (64, 6, 200), {}),
        ("left_wide", (40, 64, 96), {"types": ("float32", "float16")}),
        ("right_wide", (40, 64, 96), {"types": ("float16", "float32"), "tb": True}),
        ("both_wide", (33, 40, 36), {"types": ("float32", "float32"), "ta": True}),
        ("long", (32, 32, 1000), {}),
    ]
    for name, extents, options in shapes:
        inputs, result = gemm(*extents, **options)
        found.append(Case(f"plain_{name}", inputs, (result,)))
    a, b = data(3, 12, 40, name="a"), data(40, 56, name="b")
    found.append(Case("plain_one_right_for_all", (a, b), (matmul(a, b),)))
    # A view of columns that begins at an odd element: no two neighbours are aligned.
    x, w = data(32, 65, name="x"), data(64, 48, name="w")
    found.append(Case("plain_unaligned", (x, w), (matmul(topi.strided_slice(x, [0, 1], [32, 65]), w),)))
    return found


def neighbour_cases() -> list[Case]:
    inputs, result = gemm(48, 72, 64)
    bias, residual = data(72, dtype="float32", name="bias"), data(48, 72, dtype="float32", name="residual")
    biased = topi.add(result, bias)
    heads = topi.transpose(topi.reshape(biased, (48, 6, 12)), (1, 0, 2))
    table = data(72, dtype="int32", name="table")
    gathered = te.compute((48, 72), lambda i, j: result[i, j] + bias[table[j]], name="gathered")
    scores_in, scores = gemm(24, 24, 16, 4, tb=True)
    mask = data(24, 24, dtype="float32", name="mask")
    x, g = data(2, 16, 12, name="x"), data(16, 2, 16, name="y")
    flat = topi.transpose(topi.reshape(x, (32, 12)))
    shuffled = topi.reshape(topi.transpose(g, (1, 0, 2)), (32, 16))
    scaled_a = data(32, 64, dtype="float32", name="scaled_a")
    scaled = topi.cast(topi.multiply(scaled_a, 0.5), "float16")
    weight = data(64, 40, name="weight")
    padded_a = data(31, 64, name="padded_a")
    left, right = data(64, 24, name="left"), data(64, 40, name="right")
    return [
        Case("after_bias_gelu_half", (*inputs, bias), (topi.cast(gelu(biased), "float16"),)),
        Case("after_gelu", (*inputs, bias), (gelu(biased),)),
        Case("after_residual", (*inputs, bias, residual), (topi.add(biased, residual),)),
        Case("after_itself_too", (*inputs, bias), (result, topi.cast(topi.nn.relu(biased), "float16"))),
        Case("after_heads", (*inputs, bias), (topi.cast(heads, "float16"),)),
        Case("after_transpose", (*inputs, bias), (topi.transpose(biased),)),
        Case("after_gather", (*inputs, bias, table), (gathered,)),
        Case("before_pad", (padded_a, weight), (matmul(topi.nn.pad(padded_a, (0, 0), (9, 0)), weight),)),
        Case("after_mask", (*scores_in, mask), (topi.add(topi.multiply(scores, 0.25), mask),)),
        Case("before_shuffle", (x, g), (matmul(flat, shuffled, tb=False),)),
        Case("before_scale", (scaled_a, weight), (matmul(scaled, weight),)),
        Case("before_join", (weight, left, right), (matmul(weight, topi.concatenate([left, right], 1), ta=True),)),
    ]


def convolution_cases() -> list[Case]:
    found = []
    for name, arguments in (
        ("same", ((1, 16, 10, 10), (24, 16, 3, 3), 1, 1)),
        ("stride", ((2, 8, 15, 13), (16, 8, 3, 3), 2, 1)),
        ("dilated", ((1, 16, 12, 12), (16, 16, 3, 3), 1, 2, 2)),
        ("point", ((2, 32, 8, 8), (24, 32, 1, 1), 1, 0)),
        ("point_odd", ((1, 32, 7, 7), (24, 32, 1, 1), 1, 0)),
        ("grouped", ((1, 32, 7, 7), (32, 16, 3, 3), 1, 1, 1, 2)),
        ("stem", ((1, 3, 20, 20), (16, 3, 7, 7), 2, 3)),
        ("wide", ((1, 16, 9, 9), (16, 16, 3, 3), 1, 1, 1, 1, "float32")),
    ):
        (x, w), result = conv(*arguments)
        bias = data(arguments[1][0], 1, 1, dtype="float32", name="bias")
        found.append(Case(f"conv_{name}", (x, w, bias), (topi.nn.relu(topi.add(result, bias)),)))
    return found


def tiled_cases(count: int) -> list[Case]:
    """Shapes with values of knobs drawn at random: each number of stages with each split of the sum, and fragments."""
    draw = random.Random(7)
    found = []
    stages_and_splits = itertools.cycle(itertools.product((1, 2, 3, 4), (1, 2, 4)))
    fragments = itertools.cycle(itertools.product((1, 2, 3, 4), (2, 4, 6, 8)))
    for number in range(count):
        stages, along_inner = next(stages_and_splits)
        rows, columns = next(fragments)
        while True:
            types = draw.choice((("float16", "float16"), ("float32", "float16"), ("float16", "float16")))
            extents = [draw.choice((16, 29, 40, 64, 72, 130)) for _ in range(2)]
            inner = draw.choice((33, 64, 80, 160, 200))
            inputs, result = gemm(*extents, inner, ta=draw.random() < 0.4, tb=draw.random() < 0.4, types=types)
            bias = data(extents[1], dtype="float32", name="bias")
            result = topi.nn.relu(topi.add(result, bias))
            result = topi.cast(result, "float16") if draw.random() < 0.5 else result
            request = draw.choice((SMALL, A100))
            sketch = MMA_CONTRACTION.sketch(StageForms(primfunc_from_tensors([*inputs, bias, result], "f")), request)
            values = {knob.name: draw.choice(knob.values) for knob in sketch.knobs}
            values |= {"stages": stages, "warps_along_inner": along_inner, "mma_rows": rows, "mma_columns": columns}
            open_to_it = all(values[knob.name] in knob.values for knob in sketch.knobs)
            if open_to_it and isinstance(sketch.make(values), GpuSchedule):
                break
        found.append(Case(f"tiled_{number}", (*inputs, bias), (result,), request, tuple(values.items())))
    return found


OWN = [*plain_cases(), *neighbour_cases(), *convolution_cases()]
TILED = tiled_cases(16)
CASES = [*OWN, *TILED]
RUN = [*OWN[:: sized(3, 1)], *TILED]
"""What g++ compiles: of the rule's own choices a part, of drawn ones all."""


@pytest.fixture(scope="module")
def built() -> Built:
    return build(RUN, MMA_CONTRACTION)


@pytest.mark.parametrize("case", RUN, ids=lambda case: case.name)
def test_result(case: Case, built: Built) -> None:
    compare(case, built, wide=2e-5)


def test_each_number_of_stages_and_split_of_the_sum_is_among_the_cases() -> None:
    drawn = {(dict(case.values)["stages"], dict(case.values)["warps_along_inner"]) for case in CASES if case.values}
    assert drawn == set(itertools.product((1, 2, 3, 4), (1, 2, 4)))


def test_each_number_of_fragments_is_among_the_cases() -> None:
    values = [dict(case.values) for case in CASES if case.values]
    drawn = {(one["mma_rows"], one["mma_columns"]) for one in values}
    assert drawn == set(itertools.product((1, 2, 3, 4), (2, 4, 6, 8)))


def fetched(case: Case) -> list[AsyncCopy | str]:
    return [one.copy for one in assumed_operands(canonical_contraction(case.func), case.request).both]


def copied_bytes(case: Case) -> list[int | Refused]:
    return [copy.copy_bytes if isinstance(copy, AsyncCopy) else copy for copy in fetched(case)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain_whole", [16, 16]),
        ("plain_odd_columns", [16, 4]),
        ("plain_odd_inner", [8, 16]),
        ("plain_quarter_vectors", [8, 8]),
        ("plain_right_transposed", [16, 16]),
        ("plain_left_wide", ["computed from what is in memory", 16]),
        ("plain_prime", ["not aligned to 4 bytes", "not aligned to 4 bytes"]),
        ("plain_unaligned", ["not aligned to 4 bytes", 16]),
        ("before_scale", ["computed from what is in memory", 16]),
        ("before_join", [16, "a choice between values"]),
        ("conv_point", [16, 16]),
        ("conv_same", ["not aligned to 4 bytes", "not aligned to 4 bytes"]),
    ],
)
def test_which_operands_are_copied(name: str, expected: list[int | str]) -> None:
    (case,) = (case for case in CASES if case.name == name)
    found = copied_bytes(case)
    for own, wanted in zip(found, expected, strict=True):
        assert wanted in own.reason if isinstance(wanted, str) else own == wanted


def test_copies_of_fp32_and_of_padding() -> None:
    """The copies are of any type; a tile that is transposed on its way takes one element at a time."""
    a, b = data(64, 60, dtype="float32", name="a"), data(60, 40, dtype="float32", name="b")
    k = te.reduce_axis((0, 60), name="k")
    result = te.compute((64, 40), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    problem = canonical_contraction(primfunc_from_tensors([a, b, result], "f"))

    def copy(side: str, inner_last: bool | None, arch: str = "sm_80") -> AsyncCopy | Refused:
        return async_copy(choose_fetch(problem, side, (1, 32, 16), 128, inner_last, lambda _: 4), arch)

    assert copy("left", None).copy_bytes == copy("right", None).copy_bytes == 16
    assert copy("left", False).copy_bytes == 4
    assert "sm_75" in copy("left", None, "sm_75").reason
    for before, after, expected in (((0, 0), (16, 0), 16), ((0, 4), (16, 0), "not aligned")):
        x, w = data(48, 64 - before[1], name="x"), data(64, 32, name="w")
        padded = topi.nn.pad(x, before, after)
        problem = canonical_contraction(primfunc_from_tensors([x, w, matmul(padded, w)], "f"))
        # A condition on rows is one for all of a copy; one on columns may lie between two elements.
        own = assumed_operands(problem, SMALL).left.copy
        assert expected in own.reason if isinstance(expected, str) else own.copy_bytes == expected


def test_vectors_barriers_and_stages_of_the_text() -> None:
    (inputs, result), (wide_in, wide) = gemm(384, 768, 768), gemm(384, 768, 768, types=("float32", "float16"))
    cases = [Case("copied", inputs, (result,), A100), Case("wide", wide_in, (wide,), A100)]
    text, _ = kernels({case.name: scheduled(case, MMA_CONTRACTION) for case in cases}, "sm_80")
    parts = {case.name: text[text.rindex(f" {case.name}(int tile") :].split("\n}\n")[0] for case in cases}
    for part in parts.values():
        # One for each wait, one before totals take the place of tiles, one before they are read, one before the next
        # strip's.
        strips, waits = len(re.findall(r"if \(strip < \d+\)", part)), part.count("souffle_copy_wait")
        assert waits and part.count("__syncthreads") == waits + 2 + strips
        assert "souffle_copy_async<16>" in part
        assert re.search(r"\*\(float4\*\)\(product_ptr", part)
    assert "*(float4*)(a_ptr" in parts["wide"]
    assert "*(half4*)(tiles" in parts["wide"]
    assert "a_ptr +" not in parts["copied"]


def ptxas_cases() -> dict[str, tuple[te.Tensor, ...]]:
    (a, b), result = gemm(384, 3072, 768)
    bias = data(3072, dtype="float32", name="bias")
    wide_in, wide = gemm(383, 764, 770, ta=True, types=("float32", "float16"))
    (x, w), image = conv((2, 64, 28, 28), (128, 64, 3, 3), 1, 1)
    return {
        "gelu": (a, b, bias, topi.cast(gelu(topi.add(result, bias)), "float16")),
        "wide": (*wide_in, wide),
        "image": (x, w, topi.nn.relu(image)),
    }


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
def test_no_choice_spills() -> None:
    """The values that need most registers by the estimate, and the rule's own."""
    schedules = {}
    for name, tensors in ptxas_cases().items():
        func = primfunc_from_tensors(list(tensors), name)
        sketch = MMA_CONTRACTION.sketch(StageForms(func), A100)
        schedules[name] = sketch.chosen()
        combinations = itertools.product(*(knob.values for knob in sketch.knobs))
        problem = canonical_contraction(func)
        tilings = [MmaTiling.of(dict(zip((k.name for k in sketch.knobs), c, strict=True)), 256) for c in combinations]
        operands = assumed_operands(problem, A100)
        fitting = [t for t in tilings if t is not None and t.refusal(operands, A100) is None]
        fitting.sort(key=lambda tiling: tiling.registers(operands, 256))
        for number, tiling in enumerate(fitting[-1:-8:-5]):
            made = sketch.make(tiling.values)
            if isinstance(made, GpuSchedule):
                schedules[f"{name}_{number}"] = made
    assert len(schedules) >= 6
    _, report = compile_cubin(kernels(schedules, "sm_80")[0], "sm_80")
    assert {used.spill_store_bytes for used in report.values()} == {0}
    assert max(used.registers for used in report.values()) < 255


def test_refusals() -> None:
    inputs, result = gemm(64, 64, 64)
    func = primfunc_from_tensors([*inputs, result], "f")
    answer = MMA_CONTRACTION.sketch(StageForms(func), GpuRequest("sm_75"))
    assert isinstance(answer, Refused)
    assert "sm_75 has no mma" in answer.reason
    sketch = MMA_CONTRACTION.sketch(StageForms(func), A100)
    own = dict(sketch.choose())
    for changed, reason in (
        ({"warps_along_rows": 8, "warps_along_inner": 2}, "cannot be shared"),
        ({"warps_along_rows": 1, "warps_along_inner": 4, "step": 32}, "equal parts"),
        (
            {"mma_rows": 4, "mma_columns": 8, "warps_along_rows": 8, "warps_along_inner": 1, "step": 64, "stages": 4},
            "bytes of shared memory",
        ),
    ):
        made = sketch.with_values({**own, **changed})
        assert isinstance(made, Refused)
        assert reason in made.reason
    little = MMA_CONTRACTION.sketch(StageForms(func), GpuRequest("sm_80", max_shared_bytes=1024)).chosen()
    assert isinstance(little, Refused)
    assert "no tile fits 1024 bytes" in little.reason
