"""The contraction rules: kernels run on the CPU device and are compared with the plain function."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

from souffle.codegen.device_functions import with_device_functions
from souffle.decision import Refused
from souffle.emulator import compile_text
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Rule, Sketch
from souffle.schedule.gpu.rules.contraction import CONTRACTION
from souffle.schedule.gpu.rules.tensor_core_contraction import TENSOR_CORE_CONTRACTION
from souffle.schedule.gpu.schedule_check import check_schedule
from souffle.schedule.gpu.tiling import contraction_tiling
from souffle.schedule.lower import cuda_target
from souffle.tvm_compat import const_int, primfunc_from_tensors
from tests.schedule.stage_kernels import PLAIN
from tests.thorough import sized, some

SMALL = GpuRequest("sm_90", threads=64, sm_count=4)
H100 = GpuRequest("sm_90")

Tensors = tuple[te.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """A stage: its inputs and outputs, and what is asked for."""

    name: str
    inputs: Tensors
    outputs: Tensors
    request: GpuRequest = SMALL

    @property
    def func(self) -> tirx.PrimFunc:
        return primfunc_from_tensors([*self.inputs, *self.outputs], self.name)


def data(*shape: int, dtype: str = "float32", name: str = "x") -> te.Tensor:
    return te.placeholder(shape, dtype, name=name)


def long(*shape: int) -> tuple[tirx.IntImm, ...]:
    return tuple(tirx.IntImm("int64", extent) for extent in shape)


def matmul(a: te.Tensor, b: te.Tensor, out: str = "float32", *, ta: bool = False, tb: bool = False) -> te.Tensor:
    """``a @ b`` as TE writes it; `b` may lack the batch axes of `a`."""
    (rows, inner) = a.shape[-2:][::-1] if ta else a.shape[-2:]
    columns = b.shape[-2] if tb else b.shape[-1]
    k = te.reduce_axis((0, inner), name="k")

    def product(*index):
        *batch, i, j = index
        left = a(*batch, *((k, i) if ta else (i, k)))
        right = b(*batch[: len(b.shape) - 2], *((j, k) if tb else (k, j)))
        return te.sum(left.astype(out) * right.astype(out), axis=k)

    return te.compute((*a.shape[:-2], rows, columns), product, name="matmul")


def gemm(m: int, n: int, k: int, *batch: int, dtype: str = "float32", out: str = "float32", ta=False, tb=False):
    a = data(*batch, *((k, m) if ta else (m, k)), dtype=dtype, name="a")
    b = data(*batch, *((n, k) if tb else (k, n)), dtype=dtype, name="b")
    return (a, b), matmul(a, b, out, ta=ta, tb=tb)


def conv(shape, filters, stride, padding, dilation, groups=1, dtype="float32"):
    x, w = data(*shape, dtype=dtype, name="image"), data(*filters, dtype=dtype, name="weight")
    return (x, w), topi.nn.group_conv2d_nchw(x, w, stride, padding, dilation, groups, "float32")


def matmul_cases() -> list[Case]:
    found = []
    for name, arguments, options in (
        ("plain", (64, 64, 64), {}),
        ("prime", (37, 41, 43), {}),
        ("batched", (17, 24, 20, 6), {}),
        ("batches", (9, 10, 16, 2, 3), {"tb": True}),
        ("left_transposed", (32, 48, 29), {"ta": True}),
        ("both_transposed", (31, 8, 16), {"ta": True, "tb": True}),
        ("short_sum", (40, 36, 5), {}),
        ("unit_batch", (16, 20, 24, 1), {}),
        ("double", (20, 24, 28), {"dtype": "float64", "out": "float64"}),
        ("integer", (20, 24, 28), {"dtype": "int8", "out": "int32"}),
        ("half", (24, 40, 32), {"dtype": "float16"}),
        ("many_small", (5, 7, 8, 50), {}),
    ):
        inputs, result = gemm(*arguments, **options)
        found.append(Case(name, inputs, (result,)))
    a, b = data(3, 2, 12, 20, name="a"), data(20, 28, name="b")
    found.append(Case("no_batch", (a, b), (matmul(a, b),)))
    return found


def neighbour_cases() -> list[Case]:
    inputs, product = gemm(24, 36, 20)
    bias, residual = data(36, name="bias"), data(24, 36, name="residual")
    biased = topi.add(product, bias)
    heads = topi.transpose(topi.reshape(biased, (24, 4, 9)), (1, 0, 2))
    gelu = topi.multiply(biased, topi.multiply(topi.add(topi.erf(topi.multiply(biased, 0.7071)), 1.0), 0.5))
    parts = [topi.transpose(topi.reshape(p, (24, 3, 4)), (1, 2, 0)) for p in topi.split(biased, 3, axis=1)]
    scores_in, scores = gemm(12, 16, 8, 4, tb=True)
    mask = data(12, 16, name="mask")
    q, kk, d, zero = data(20, 24, dtype="int8", name="q"), data(24, 16, name="w"), data(20, name="d"), data(name="z")
    scaled = te.compute((20, 24), lambda i, j: (q[i, j].astype("float32") - zero()) * d[i], name="scaled")
    x, g = data(2, 10, 12, name="x"), data(10, 2, 16, name="y")
    shuffled = topi.reshape(topi.transpose(g, (1, 0, 2)), (20, 16))
    flat = topi.transpose(topi.reshape(x, (20, 12)))
    one, two = data(18, 20, name="one"), data(18, 20, name="two")
    left, right = data(20, 8, name="left"), data(20, 16, name="right")
    joined_left = topi.concatenate([one, two], axis=0)
    joined_right = topi.concatenate([left, right], axis=1)
    grouped, keys = data(6, 9, 16, name="grouped"), data(2, 11, 16, name="keys")
    k = te.reduce_axis((0, 16), name="k")
    attention = te.compute(
        (6, 9, 11), lambda h, i, j: te.sum(grouped[h, i, k] * keys[h // 3, j, k], axis=k), name="gqa"
    )
    r = te.reduce_axis((0, 13), name="r")
    u, v = data(17, 13, name="u"), data(19, 13, name="v")
    distance = te.compute((17, 19), lambda i, j: te.sum(te.abs(u[i, r] - v[j, r] + 1.0), axis=r), name="distance")
    furthest = te.compute((17, 19), lambda i, j: te.max(u[i, r] + v[j, r], axis=r), name="furthest")
    three = te.compute((17, 19), lambda i, j: te.sum(u[i, r] * v[j, r] * bias[r], axis=r), name="three")
    wide_a, wide_b = (te.placeholder(long(*s), name=n) for s, n in (((18, 24), "a"), ((24, 32), "b")))
    wide = topi.reshape(topi.add(matmul(wide_a, wide_b), 1.0), long(6, 3, 32))
    return [
        Case("bias_relu", (*inputs, bias), (topi.nn.relu(biased),)),
        Case("residual", (*inputs, bias, residual), (topi.add(biased, residual),)),
        Case("itself_too", (*inputs, bias), (product, gelu)),
        Case("heads", (*inputs, bias), (heads,)),
        Case("split_heads", (*inputs, bias), tuple(named(p, f"part{i}") for i, p in enumerate(parts))),
        Case("half_out", (*inputs, bias), (topi.cast(biased, "float16"), topi.transpose(biased))),
        Case("mask", (*scores_in, mask), (topi.add(topi.multiply(scores, 0.25), mask),)),
        Case("dequantise", (q, kk, d, zero), (matmul(scaled, kk),)),
        Case("shuffled", (x, g), (matmul(flat, shuffled),)),
        Case("joined_rows", (one, two, left), (matmul(joined_left, left),)),
        Case("joined_columns", (one, left, right), (matmul(one, joined_right),)),
        Case("grouped_heads", (grouped, keys), (attention,)),
        Case("distance", (u, v), (distance,)),
        Case("furthest", (u, v), (furthest,)),
        Case("three_factors", (u, v, bias), (three,)),
        Case("long_shapes", (wide_a, wide_b), (wide,)),
        Case("odd_reshape", inputs, (topi.reshape(topi.tanh(product), (32, 27)),)),
    ]


def convolution_cases() -> list[Case]:
    found = []
    for name, arguments in (
        ("conv3x3", ((1, 6, 10, 10), (8, 6, 3, 3), 1, 1, 1)),
        ("conv_stride", ((2, 3, 15, 13), (5, 3, 3, 3), 2, 1, 1)),
        ("conv_dilated", ((1, 4, 12, 12), (7, 4, 3, 3), 1, 2, 2)),
        ("conv1x1", ((1, 16, 7, 7), (12, 16, 1, 1), 1, 0, 1)),
        ("conv_grouped", ((1, 12, 9, 9), (18, 4, 3, 3), 1, 1, 1, 3)),
        ("conv_stem", ((1, 3, 20, 20), (8, 3, 7, 7), 2, 3, 1)),
    ):
        inputs, result = conv(*arguments)
        bias = data(arguments[1][0], 1, 1, name="bias")
        found.append(Case(name, (*inputs, bias), (topi.nn.relu(topi.add(result, bias)),)))
    x, w = data(1, 6, 5, 7, name="image"), data(6, 5, 3, 3, name="weight")
    transposed = topi.nn.conv2d_transpose_nchw(x, w, (2, 2), (1, 1, 1, 1), "float32", (1, 1))
    found.append(Case("conv_transposed", (x, w), (transposed,)))
    line, taps = data(1, 5, 40, name="line"), data(9, 5, 3, name="taps")
    found.append(Case("conv1d", (line, taps), (topi.nn.conv1d_ncw(line, taps, 1, 1, 1),)))
    (x, w), result = conv((1, 4, 8, 8), (8, 4, 3, 3), 1, 1, 1)
    skip = data(1, 8, 8, 8, name="skip")
    tokens = topi.transpose(topi.reshape(topi.add(result, skip), (1, 8, 64)), (0, 2, 1))
    found.append(Case("conv_tokens", (x, w, skip), (tokens,)))
    return found


def random_cases(count: int) -> list[Case]:
    """Products of random extents, among them primes and ones, with random neighbours."""
    draw = random.Random(5)
    found = []
    for number in range(count):
        extents = [draw.choice((4, 5, 7, 8, 11, 13, 16, 29, 32, 47)) for _ in range(3)]
        batch = [draw.choice((1, 2, 3)) for _ in range(draw.randrange(3))]
        inputs, result = gemm(*extents, *batch, ta=draw.random() < 0.5, tb=draw.random() < 0.5)
        outputs: list[te.Tensor] = [result] if draw.random() < 0.4 else []
        if draw.random() < 0.6:
            bias = data(extents[1], name="bias")
            inputs, result = (*inputs, bias), topi.sigmoid(topi.add(result, bias))
        if draw.random() < 0.5:
            axes = list(range(len(result.shape)))
            draw.shuffle(axes)
            result = topi.transpose(result, axes)
        if draw.random() < 0.5:
            result = topi.reshape(topi.negative(result), (int(np.prod([const_int(e) for e in result.shape])),))
        outputs += [t for t in [result] if not any(t.same_as(o) for o in outputs)]
        request = GpuRequest("sm_90", threads=draw.choice((64, 96, 128)), sm_count=draw.choice((2, 16)))
        found.append(Case(f"random_{number}", tuple(inputs), tuple(outputs), request))
    return found


def named(tensor: te.Tensor, name: str) -> te.Tensor:
    """A copy under a name of its own: parameters are named after tensors, and arguments are found by them."""
    return te.compute(tensor.shape, lambda *index: tensor(*index), name=name)


CASES = [*matmul_cases(), *neighbour_cases(), *convolution_cases(), *random_cases(sized(8, 20))]
OTHERWISE = CASES[:: sized(8, 1)]
"""With other numbers than the rule's own."""


@dataclass(frozen=True, eq=False)
class Built:
    schedules: dict[str, GpuSchedule]
    text: str
    module: object
    reference: object


def offered(rule: Rule, func: object, request: GpuRequest) -> Sketch | Refused:
    """What a rule says of a stage alone."""
    return rule.sketch(StageForms(func), request)


def scheduled(rule: Rule, func: object, request: GpuRequest) -> GpuSchedule | Refused:
    """The rule's own choice."""
    answer = offered(rule, func, request)
    return answer.chosen() if isinstance(answer, Sketch) else answer


def build(cases: list[Case], choice: Callable) -> Built:
    """All cases as one CUDA text, since each compilation costs more than a case."""
    tvm.register_global_func("tvm_callback_cuda_compile", lambda code, target=None: b"x", override=True)
    schedules = {}
    for case in cases:
        schedule = choice(case.func, case.request)
        assert isinstance(schedule, GpuSchedule), f"{case.name}: {schedule}"
        check_schedule(schedule, case.request)
        schedules[case.name] = schedule
    kernels = tvm.IRModule({name: schedule.func for name, schedule in schedules.items()})
    text = tvm.compile(kernels, target=cuda_target("sm_90")).mod.imports[0].inspect_source()
    text = with_device_functions(text)
    return Built(schedules, text, compile_text(text), reference(tuple(cases)))


@cache
def reference(cases: tuple[Case, ...]) -> object:
    """The cases as plain loops."""
    return tvm.compile(tvm.IRModule({case.name: case.func for case in cases}), target=PLAIN)


def arrays(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    generator = np.random.default_rng(3)

    def shape(tensor: te.Tensor) -> tuple[int, ...]:
        return tuple(const_int(extent) for extent in tensor.shape)

    inputs = []
    for tensor in case.inputs:
        dtype = np.dtype(str(tensor.dtype))
        values = (
            generator.integers(-9, 9, shape(tensor)) if dtype.kind == "i" else generator.uniform(-1, 1, shape(tensor))
        )
        inputs.append(np.asarray(values, dtype))
    return inputs, [np.full(shape(tensor), 7, str(tensor.dtype)) for tensor in case.outputs]


def compare(case: Case, built: Built, orders: tuple[str, ...] = ("fixed", "shuffled")) -> None:
    inputs, outputs = arrays(case)
    schedule = built.schedules[case.name]
    expected = [tvm.runtime.tensor(array) for array in (*inputs, *outputs)]
    built.reference[case.name](*expected)
    signature = re.search(rf"\b{case.name}_kernel\(([^)]*)\) {{", built.text)
    assert signature is not None
    parameters = [re.sub(r"_ptr$", "", p.split()[-1]) for p in signature.group(1).split(",")]
    by_name = dict(zip([v.name for v in schedule.func.params], (*inputs, *outputs), strict=True))
    assert len(by_name) == len(inputs) + len(outputs)
    for order in orders:
        for output in outputs:
            output.fill(7)
        built.module.launch(
            f"{case.name}_kernel",
            grid=(schedule.tiles, 1, 1),
            block=(schedule.threads, 1, 1),
            args=[by_name[name] for name in parameters],
            order=order,
        )
        for output, reference in zip(outputs, expected[len(inputs) :], strict=True):
            tolerance = 1e-2 if "16" in str(output.dtype) else 2e-5
            np.testing.assert_allclose(output, reference.numpy(), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def built() -> Built:
    return build(CASES, partial(scheduled, CONTRACTION))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_result(case: Case, built: Built) -> None:
    compare(case, built)


def sampled(func: tirx.PrimFunc, request: GpuRequest) -> GpuSchedule:
    """A schedule with numbers drawn by chance, by asynchronous copies where the stage can have them."""
    sketch = offered(CONTRACTION, func, request)
    chance = random.Random(str(func.attrs["global_symbol"]))
    for _ in range(2000):
        values = {knob.name: chance.choice(knob.values) for knob in sketch.knobs}
        if values["stages"] == 1 and len(sketch.knobs[-1].values) > 1:
            continue
        schedule = sketch.with_values(values)
        if isinstance(schedule, GpuSchedule):
            return schedule
    chosen = sketch.chosen()
    assert isinstance(chosen, GpuSchedule)
    return chosen


@pytest.fixture(scope="module")
def built_sampled() -> Built:
    return build(OTHERWISE, sampled)


@pytest.mark.parametrize("case", OTHERWISE, ids=lambda case: case.name)
def test_result_with_other_numbers(case: Case, built_sampled: Built) -> None:
    compare(case, built_sampled)


def test_some_copies_are_asynchronous(built_sampled: Built) -> None:
    commits = re.findall(r"souffle_copy_commit\(\);", built_sampled.text)
    # At least one before and one in the loop of a kernel.
    assert len(commits) >= len(OTHERWISE)


def tensor_core_cases() -> list[Case]:
    found = []
    for name, arguments, options in (
        ("plain", (32, 48, 64), {}),
        ("prime", (37, 41, 43), {}),
        ("batched", (17, 24, 20, 3), {"tb": True}),
        ("transposed", (32, 40, 32), {"ta": True, "tb": True}),
        ("short_sum", (40, 36, 8), {"ta": True}),
    ):
        inputs, result = gemm(*arguments, dtype="float16", **options)
        bias = data(arguments[1], name="bias")
        found.append(Case(f"tc_{name}", (*inputs, bias), (topi.nn.relu(topi.add(result, bias)),)))
    inputs, result = gemm(24, 36, 20, dtype="float16")
    residual = data(24, 36, name="residual")
    heads = topi.transpose(topi.reshape(topi.add(result, residual), (24, 4, 9)), (1, 0, 2))
    found.append(Case("tc_heads", (*inputs, residual), (result, topi.cast(heads, "float16"))))
    a, b = data(20, 24, name="a"), data(24, 32, name="b")
    cast = matmul(topi.cast(a, "float16"), topi.cast(b, "float16"))
    found.append(Case("tc_cast_before", (a, b), (cast,)))
    for name, arguments in (
        ("conv", ((1, 16, 10, 10), (24, 16, 3, 3), 1, 1, 1)),
        ("conv_stride", ((2, 8, 15, 13), (16, 8, 3, 3), 2, 1, 1)),
        ("conv_grouped", ((1, 32, 7, 7), (32, 16, 3, 3), 1, 1, 1, 2)),
    ):
        (x, w), result = conv(*arguments, dtype="float16")
        found.append(Case(f"tc_{name}", (x, w), (topi.nn.relu(result),)))
    wide, filters = data(1, 16, 9, 9, name="image"), data(16, 16, 3, 3, dtype="float16", name="weight")
    padded = topi.nn.conv2d_nchw(topi.cast(wide, "float16"), filters, 1, 1, 1, out_dtype="float32")
    found.append(Case("tc_cast_and_pad", (wide, filters), (padded,), GpuRequest("sm_80", threads=128, sm_count=2)))
    return found


TENSOR_CORE_CASES = tensor_core_cases()


@pytest.fixture(scope="module")
def built_tensor_core() -> Built:
    return build(TENSOR_CORE_CASES, partial(scheduled, TENSOR_CORE_CONTRACTION))


@pytest.mark.parametrize("case", TENSOR_CORE_CASES, ids=lambda case: case.name)
def test_tensor_core_result(case: Case, built_tensor_core: Built) -> None:
    assert built_tensor_core.schedules[case.name].tensor_cores
    compare(case, built_tensor_core)


def large_cases(dtype: str) -> list[Case]:
    inputs, product = gemm(384, 768, 768, dtype=dtype)
    bias = data(768, name="bias")
    (x, w), image = conv((1, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1, dtype=dtype)
    channel = data(64, 1, 1, name="bias")
    scores_in, scores = gemm(384, 384, 64, 12, dtype=dtype, tb=True)
    return [
        Case(f"linear_{dtype}", (*inputs, bias), (topi.add(product, bias),), H100),
        Case(f"conv_{dtype}", (x, w, channel), (topi.nn.relu(topi.add(image, channel)),), H100),
        Case(f"scores_{dtype}", scores_in, (topi.multiply(scores, 0.125),), H100),
    ]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", some(["sm_90"], ["sm_80"]))
def test_registers(arch: str, tmp_path: Path) -> None:
    tvm.register_global_func("tvm_callback_cuda_compile", lambda code, target=None: b"x", override=True)
    kernels = {}
    for dtype, rule in (("float32", CONTRACTION), ("float16", TENSOR_CORE_CONTRACTION)):
        for case in large_cases(dtype):
            kernels[case.name] = scheduled(rule, case.func, case.request).func
    text = tvm.compile(tvm.IRModule(kernels), target=cuda_target(arch)).mod.imports[0].inspect_source()
    source = tmp_path / "kernels.cu"
    source.write_text(with_device_functions(text))
    # Two blocks of 256 threads share the 65536 registers of a multiprocessor; kernels ask for that many.
    command = ["nvcc", "-cubin", f"-arch={arch}", "-Xptxas", "-v", "-maxrregcount=128", "-o", str(tmp_path / "k.cubin")]
    report = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=120, check=True).stderr
    assert len(re.findall(r"Used (\d+) registers", report)) == len(kernels)
    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}


def refusals() -> list[tuple[str, Tensors, str]]:
    (row_a, row_b), row = gemm(1, 1000, 2048)
    (x, filters) = data(1, 8, 9, 9, name="image"), data(8, 1, 3, 3, name="weight")
    depthwise = topi.nn.depthwise_conv2d_nchw(x, filters, 1, 1, 1)
    (a, b), short = gemm(64, 64, 2)
    (p, q), product = gemm(32, 32, 32)
    v = data(32, 32, name="v")
    k = te.reduce_axis((0, 32), name="k")
    square = te.compute((32,), lambda i: te.sum(v[i, k] * v[i, k], axis=k), name="square")
    scaled = topi.multiply(p, 2.0)
    s, w = data(32, name="s"), data(32, 32, name="w")
    r = te.reduce_axis((0, 32), name="r")
    shifted = te.compute(
        (32, 32), lambda i, j: te.sum(te.abs(v[i, r] - w[r, j]) + i.astype("float32"), axis=r), name="shifted"
    )
    huge_in, huge = gemm(1 << 17, 1 << 15, 32)
    return [
        ("row", (row_a, row_b, row), "fewer than 4 times"),
        ("depthwise", (x, filters, depthwise), "fewer than 4 times"),
        ("short", (a, b, short), "too short"),
        ("softmax", (p, q, topi.nn.softmax(product)), "reduction blocks"),
        ("self_transposed", (p, q, topi.add(product, topi.transpose(product))), "several elements"),
        ("broadcast", (p, q, topi.broadcast_to(topi.expand_dims(product, 0), (3, 32, 32))), "once"),
        ("square", (v, square), "fewer than 4 times"),
        ("other_output", (p, q, s, product, topi.exp(s)), "does not depend"),
        ("kept_producer", (p, q, scaled, matmul(scaled, q)), "does not depend"),
        ("no_product", (v, topi.sum(v, axis=1)), "one operand"),
        ("argmax", (v, topi.argmax(v, axis=1)), "more than one value"),
        ("position", (v, w, shifted), "one operand"),
        ("huge", (*huge_in, huge), "32-bit"),
    ]


@pytest.mark.parametrize(
    ("name", "tensors", "reason"), refusals(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_refusal(name: str, tensors: Tensors, reason: str) -> None:
    answer = offered(CONTRACTION, primfunc_from_tensors(list(tensors), name), H100)
    assert isinstance(answer, Refused)
    assert reason in answer.reason


def test_tensor_core_refusals() -> None:
    def reason(inputs: Tensors, result: te.Tensor, request: GpuRequest = H100) -> str:
        answer = offered(TENSOR_CORE_CONTRACTION, primfunc_from_tensors([*inputs, result], "f"), request)
        assert isinstance(answer, Refused)
        return answer.reason

    assert "float32, float32" in reason(*gemm(32, 32, 32))
    assert "times the work" in reason(*gemm(4, 5, 64, dtype="float16"))
    assert "no tensor cores" in reason(*gemm(32, 32, 32, dtype="float16"), GpuRequest("sm_61"))
    a, b = data(32, 32, dtype="float16", name="a"), data(32, 32, dtype="float16", name="b")
    k = te.reduce_axis((0, 32), name="k")
    rounded = te.compute((32, 32), lambda i, j: te.sum((a[i, k] * b[k, j]).astype("float32"), axis=k), name="m")
    assert "not by a product in fp32" in reason((a, b), rounded)


def test_of_tilings_about_as_fast_one_with_fewest_tiles_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = data(384, 768), data(768, 3072, name="y")
    func = primfunc_from_tensors([left, right, topi.matmul(left, right)], "f")
    tiles = offered(CONTRACTION, func, H100).chosen().tiles
    monkeypatch.setattr(contraction_tiling, "_ALIKE", 1.0)
    fastest = offered(CONTRACTION, func, H100).chosen().tiles
    monkeypatch.setattr(contraction_tiling, "_ALIKE", 100.0)
    assert offered(CONTRACTION, func, H100).chosen().tiles < tiles <= fastest


def test_little_shared_memory() -> None:
    (a, b), product = gemm(256, 256, 256, dtype="float16")
    func = primfunc_from_tensors([a, b, product], "f")
    for rule in (CONTRACTION, TENSOR_CORE_CONTRACTION):
        assert isinstance(scheduled(rule, func, GpuRequest("sm_90", max_shared_bytes=256)), Refused)
        assert isinstance(scheduled(rule, func, GpuRequest("sm_90", max_shared_bytes=16 * 1024)), GpuSchedule)
