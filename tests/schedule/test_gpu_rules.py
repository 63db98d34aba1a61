"""The GPU rules: schedules are lowered to CUDA text, run on the CPU device and compared with the plain function."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from tvm import te, tirx, topi

import souffle
from souffle.codegen.device_functions import with_device_functions
from souffle.emulator import compile_text
from souffle.pipeline import stages_of
from souffle.schedule.gpu import (
    RULES,
    GpuRequest,
    GpuSchedule,
    ScheduleError,
    Sketch,
    StageForms,
    check_schedule,
    schedule_gpu,
)
from souffle.schedule.lower import cuda_target
from souffle.schedule.stage import flat_stages
from souffle.tvm_compat import collect, const_int, primfunc_from_tensors
from tests.schedule.stage_kernels import PLAIN
from tests.testlib import calls_made
from tests.thorough import sized

SMALL = GpuRequest("sm_90", threads=64, sm_count=4)
ODD = GpuRequest("sm_90", threads=96, sm_count=4)
H100 = GpuRequest("sm_90")


@dataclass(frozen=True, eq=False)
class Case:
    """A stage: its inputs and outputs, and what is asked for."""

    name: str
    inputs: tuple[te.Tensor, ...]
    outputs: tuple[te.Tensor, ...]
    rule: str
    request: GpuRequest = SMALL

    @property
    def func(self) -> tirx.PrimFunc:
        return primfunc_from_tensors([*self.inputs, *self.outputs], self.name)


def data(*shape: int, dtype: str = "float32", name: str = "x") -> te.Tensor:
    return te.placeholder(shape, dtype, name=name)


def named(tensor: te.Tensor, name: str) -> te.Tensor:
    return te.compute(tensor.shape, lambda *index: tensor(*index), name=name)


def squares(x: te.Tensor, times: int) -> te.Tensor:
    """A chain that inlining would double at every step."""
    for _ in range(times):
        x = topi.add(topi.multiply(topi.multiply(x, x), 0.5), topi.multiply(x, 0.25))
    return x


def mean(x: te.Tensor, axes: tuple[int, ...], keepdims: bool = True) -> te.Tensor:
    count = float(np.prod([const_int(x.shape[axis]) for axis in axes]))
    return topi.divide(topi.sum(x, axis=list(axes), keepdims=keepdims), tirx.const(count, x.dtype))


def normalized(x: te.Tensor, axes: tuple[int, ...]) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    center = mean(x, axes)
    apart = topi.subtract(x, center)
    variance = mean(topi.multiply(apart, apart), axes)
    return center, variance, topi.multiply(apart, topi.rsqrt(topi.add(variance, tirx.const(1e-5, x.dtype))))


def elementwise_cases() -> list[Case]:
    x, b, s = data(33, 100), data(100, name="b"), data(name="s")
    half = te.compute((), lambda: s() * 2.0, name="half")
    shifted = te.compute((33, 100), lambda i, j: half() + x[i, j], name="shifted")
    more = te.compute((33, 100), lambda i, j: te.tanh(shifted[i, j]), name="more")
    index = data(7, dtype="int64", name="index")
    wide = data(64, 256)
    joined = topi.concatenate([topi.transpose(x), topi.reshape(b, (100, 1))], axis=1)
    return [
        Case("several", (s, x), (half, shifted, more), "elementwise"),
        Case("scalar", (s,), (half,), "elementwise"),
        Case("vector", (wide,), (topi.nn.relu(topi.add(wide, wide)),), "elementwise"),
        Case("bias", (x, b), (topi.sigmoid(topi.add(x, b)),), "elementwise"),
        Case("gather", (x, index), (topi.take(x, index, axis=0, mode="clip"),), "elementwise"),
        Case("concat", (x, b), (joined,), "elementwise"),
        Case("pad", (x,), (topi.nn.pad(x, [1, 2], [3, 1], 0.5),), "elementwise"),
        Case("slice", (x,), (topi.strided_slice(x, [1, 3], [30, 99], [1, 2]),), "elementwise"),
        Case("reshape", (x,), (topi.reshape(topi.exp(x), (3, 1100)),), "elementwise"),
        Case("compare", (x, b), (topi.greater(x, b),), "elementwise"),
        Case("cast", (x,), (topi.cast(x, "float16"),), "elementwise"),
        Case("where", (x, b), (topi.where(topi.greater(x, b), x, topi.add(x, b)),), "elementwise"),
        Case("squares", (x,), (squares(x, 24),), "elementwise"),
        Case("squares_turned", (x,), (topi.transpose(squares(x, 3)), named(squares(x, 2), "two")), "elementwise"),
        Case("integer", (index,), (topi.add(topi.multiply(index, index), index),), "elementwise"),
    ]


def reduction_cases() -> list[Case]:
    x = data(3, 5, 13, 11)
    n = data(37, 64)
    v, w, t = data(1, 96, name="v"), data(96, 52, name="w"), data(52, 96, name="t")
    image, filters = data(1, 6, 15, 13), data(6, 1, 3, 3, name="f")
    depthwise = topi.nn.depthwise_conv2d_nchw(image, filters, 1, 1, 1)
    short, longer = mean(x, (1,), False), data(2, 3001)
    return [
        Case("total", (x,), (topi.sum(x),), "reduction"),
        Case("rows", (n,), (topi.sum(n, axis=1),), "reduction"),
        Case("columns", (n,), (topi.max(n, axis=0),), "reduction"),
        Case("channels", (x,), (topi.prod(topi.exp(topi.multiply(x, 0.1)), axis=1),), "reduction"),
        Case("global_pool", (x,), (mean(x, (2, 3)),), "reduction"),
        Case("outer_axes", (x,), (mean(x, (0, 2), False),), "reduction"),
        Case("long", (longer,), (topi.sqrt(topi.sum(longer, axis=1)),), "reduction"),
        Case("argmax", (n,), (named(topi.argmax(n, axis=1), "place"),), "reduction"),
        Case("argmin_columns", (n,), (named(topi.argmin(n, axis=0), "place"),), "reduction"),
        Case("max_pool", (image,), (topi.nn.pool2d(image, [3, 3], [2, 2], [1, 1], [1, 1, 1, 1], "max"),), "window"),
        Case("avg_pool", (image,), (topi.nn.pool2d(image, [2, 2], [2, 2], [1, 1], [0, 0, 1, 1], "avg"),), "reduction"),
        Case("depthwise", (image, filters), (topi.nn.relu(depthwise),), "window"),
        Case("vector_matrix", (v, w), (topi.matmul(v, w),), "reduction"),
        Case("vector_transposed", (v, t), (topi.matmul(v, t, False, True),), "reduction"),
        Case("reshaped", (x,), (named(short, "short"), topi.reshape(topi.nn.relu(short), (39, 11))), "reduction"),
        Case("beside", (x,), (named(mean(x, (1,), False), "average"), topi.tanh(x)), "reduction"),
        Case("halves", (data(9, 70, dtype="float16"),), (), "reduction"),
        Case("integers", (data(9, 70, dtype="int64"),), (), "reduction"),
    ]


def rowwise_cases() -> list[Case]:
    x, y, g = data(4, 7, 29), data(19, 200, name="y"), data(200, name="g")
    center, variance, normal = normalized(y, (1,))
    chain = data(2, 5, 6, 7)
    return [
        Case("softmax", (x,), (topi.nn.softmax(x, axis=2),), "rowwise"),
        Case("softmax_middle", (x,), (topi.nn.softmax(x, axis=1),), "rowwise"),
        Case("softmax_tiny", (data(65, 3),), (), "rowwise"),
        Case("log_softmax", (y,), (topi.nn.log_softmax(y),), "rowwise"),
        Case("layer_norm", (y, g), (topi.add(topi.multiply(normal, g), g),), "rowwise"),
        Case("moments", (y,), (named(center, "center"), named(variance, "spread"), named(normal, "normal")), "rowwise"),
        Case("instance_norm", (chain,), (normalized(chain, (2, 3))[2],), "rowwise"),
        Case("batch_moments", (chain,), (normalized(chain, (0, 2, 3))[2],), "rowwise"),
        Case("share", (y,), (topi.divide(y, topi.sum(y, axis=1, keepdims=True)),), "rowwise"),
        Case("one_row", (data(1, 333),), (), "rowwise"),
        Case("big_row", (data(3, 5000),), (), "rowwise"),
        Case("gelu_norm", (y,), (normalized(topi.tanh(y), (1,))[2],), "rowwise"),
        Case("gemv_cumulated", (data(1, 9), data(9, 9, name="w")), (), "rowwise"),
        Case("gemv_cumulated_odd", (data(1, 33), data(33, 9, name="w")), (), "rowwise", ODD),
        Case("pool_pool", (data(1, 2, 9, 9),), (), "rowwise", ODD),
        Case("full_block", (data(5, 1500),), (), "rowwise", H100),
    ]


def cumulated(x: te.Tensor) -> te.Tensor:
    """Running sums along the second axis, as a reduction."""
    k = te.reduce_axis((0, x.shape[1]), "k")
    return te.compute(x.shape, lambda i, j: te.sum(te.if_then_else(k <= j, x[i, k], 0.0), axis=k), name="sums")


def completed(case: Case) -> Case:
    """Cases given by their inputs alone: a softmax, a sum, running sums of a product, two poolings."""
    if case.outputs:
        return case
    x = case.inputs[0]
    output = topi.nn.softmax(x) if case.rule == "rowwise" else topi.sum(x, axis=1)
    if len(case.inputs) == 2:
        output = cumulated(topi.matmul(*case.inputs))
    elif len(x.shape) == 4:
        once = topi.nn.pool2d(x, [3, 3], [2, 2], [1, 1], [1, 1, 1, 1], "max")
        output = topi.nn.pool2d(topi.tanh(once), [2, 2], [1, 1], [1, 1], [1, 0, 1, 0], "max")
    return Case(case.name, case.inputs, (output,), case.rule, case.request)


def random_cases(count: int) -> list[Case]:
    """Stages of random shapes, most extents prime, with random reduced axes and thread counts."""
    chance = np.random.default_rng(7)
    cases = []
    for number in range(count):
        rank = int(chance.integers(1, 5))
        shape = [int(chance.choice([1, 2, 3, 5, 7, 11, 13, 17, 31, 32])) for _ in range(rank)]
        axes = tuple(int(a) for a in np.flatnonzero(chance.integers(0, 2, rank))) or (rank - 1,)
        x = data(*shape)
        request = GpuRequest("sm_90", int(chance.choice([32, 64, 96, 128])), int(chance.choice([1, 8, 132])))
        kind = number % 4
        if kind == 0:
            outputs = (normalized(x, axes)[2],)
        elif kind == 1:
            outputs = (topi.nn.relu(topi.sum(x, axis=list(axes))),)
        elif kind == 2:
            outputs = (topi.nn.softmax(x, axis=axes[-1]),)
        else:
            total = topi.sum(x, axis=list(axes), keepdims=True)
            most = named(topi.max(x, axis=list(axes)), "most")
            outputs = (named(total, "total"), topi.subtract(topi.exp(x), total), most)
        cases.append(Case(f"random_{number}", (x,), outputs, "", request))
    return cases


DRAWN = random_cases(sized(8, 32))
CASES = [completed(case) for case in (*elementwise_cases(), *reduction_cases(), *rowwise_cases(), *DRAWN)]
OTHERWISE = CASES[:: sized(8, 1)]
"""With other numbers than the rule's own."""


@dataclass(frozen=True, eq=False)
class Built:
    schedules: dict[str, GpuSchedule]
    text: str
    module: object
    reference: object


def chosen(case: Case) -> GpuSchedule | None:
    schedule, _ = schedule_gpu(case.func, case.request)
    return schedule


def sampled(case: Case) -> GpuSchedule | None:
    """The schedule of the same rule with numbers drawn by chance."""
    chance = random.Random(case.name)
    for rule in RULES.values():
        sketch = rule.sketch(StageForms(case.func), case.request)
        own = sketch.chosen() if isinstance(sketch, Sketch) else sketch
        if not isinstance(own, GpuSchedule):
            continue
        for _ in range(20):
            schedule = sketch.with_values({knob.name: chance.choice(knob.values) for knob in sketch.knobs})
            if isinstance(schedule, GpuSchedule):
                check_schedule(schedule, case.request)
                return schedule
        return own
    return None


def build(choice: Callable[[Case], GpuSchedule | None], cases: Sequence[Case]) -> Built:
    """The cases as one CUDA text, since each compilation costs more than a case."""
    tvm.register_global_func("tvm_callback_cuda_compile", lambda code, target=None: b"x", override=True)
    schedules = {}
    for case in cases:
        schedule = choice(case)
        if schedule is not None:
            schedules[case.name] = schedule
    kernels = tvm.IRModule({name: schedule.func for name, schedule in schedules.items()})
    text = with_device_functions(tvm.compile(kernels, target=cuda_target("sm_90")).mod.imports[0].inspect_source())
    return Built(schedules, text, compile_text(text), reference())


@cache
def reference() -> object:
    """The cases as plain loops."""
    return tvm.compile(tvm.IRModule({case.name: case.func for case in CASES}), target=PLAIN)


@pytest.fixture(scope="module")
def built() -> Built:
    return build(chosen, CASES)


@pytest.fixture(scope="module")
def built_sampled() -> Built:
    return build(sampled, OTHERWISE)


def arrays(case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    chance = np.random.default_rng(3)

    def shape(tensor: te.Tensor) -> tuple[int, ...]:
        return tuple(const_int(extent) for extent in tensor.shape)

    inputs = []
    for tensor in case.inputs:
        dtype = np.dtype(str(tensor.dtype))
        values = chance.integers(0, 9, shape(tensor)) if dtype.kind == "i" else chance.uniform(-1, 1, shape(tensor))
        inputs.append(np.asarray(values, dtype))
    return inputs, [np.full(shape(tensor), 7, str(tensor.dtype)) for tensor in case.outputs]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_result(case: Case, built: Built) -> None:
    assert not case.rule or built.schedules[case.name].rule == case.rule
    compare(case, built)


@pytest.mark.parametrize("case", OTHERWISE, ids=lambda case: case.name)
def test_result_with_other_numbers(case: Case, built_sampled: Built) -> None:
    compare(case, built_sampled)


def compare(case: Case, built: Built) -> None:
    inputs, outputs = arrays(case)
    schedule = built.schedules[case.name]
    names = [t.op.name for t in (*case.inputs, *case.outputs)]
    assert len(set(names)) == len(names)
    expected = [tvm.runtime.tensor(array) for array in (*inputs, *outputs)]
    built.reference[case.name](*expected)
    extents = {"threadIdx.x": 1, "threadIdx.y": 1, "threadIdx.z": 1}
    for loop in collect(schedule.func.body, tirx.For):
        if loop.thread_binding is not None:
            extents[loop.thread_binding.thread_tag] = const_int(loop.extent)
    signature = re.search(rf"\b{case.name}_kernel\(([^)]*)\) {{", built.text)
    assert signature is not None
    parameters = [re.sub(r"_ptr$", "", p.split()[-1]) for p in signature.group(1).split(",")]
    by_name = dict(zip([v.name for v in schedule.func.params], (*inputs, *outputs), strict=True))
    for order in ("fixed", "shuffled"):
        for output in outputs:
            output.fill(7)
        built.module.launch(
            f"{case.name}_kernel",
            grid=(schedule.tiles, 1, 1),
            block=(extents["threadIdx.x"], extents["threadIdx.y"], extents["threadIdx.z"]),
            args=[by_name[name] for name in parameters],
            order=order,
        )
        for output, reference in zip(outputs, expected[len(inputs) :], strict=True):
            tolerance = 1e-2 if "16" in str(output.dtype) else 1e-5
            np.testing.assert_allclose(output, reference.numpy(), rtol=tolerance, atol=tolerance)


def test_barrier_needed() -> None:
    x, w = data(400, 500), data(500, 300, name="w")
    product = topi.matmul(x, w)
    schedule, refusals = schedule_gpu(
        primfunc_from_tensors([x, w, topi.nn.softmax(product, axis=1), topi.sum(product, axis=0)], "f"), H100
    )
    assert schedule is None
    assert "T_matmul" in refusals[-1].reason
    assert "across its axis" in refusals[-1].reason


def test_few_long_rows_are_refused() -> None:
    x = data(2, 1 << 18)
    _, refusals = schedule_gpu(primfunc_from_tensors([x, topi.nn.softmax(x)], "f"), H100)
    assert any(r.reason.startswith("rowwise: would leave") and "idle" in r.reason for r in refusals)


def test_rows_whose_elements_lie_in_pieces_have_threads_of_their_own() -> None:
    """Patches merged: a row is four pieces of memory, and neighbouring rows are as far apart as pieces are long."""
    x = data(14, 14, 64)
    rows = te.compute((49, 256), lambda i, j: x[i // 7 * 2 + j // 64 % 2, i % 7 * 2 + j // 128, j % 64], "merged")
    k, n = te.reduce_axis((0, 256), "k"), te.reduce_axis((0, 256), "n")
    mean = te.compute((49,), lambda i: te.sum(rows[i, k], axis=k), "mean")
    square = te.compute((49,), lambda i: te.sum((rows[i, n] - mean[i]) * (rows[i, n] - mean[i]), axis=n), "square")
    result = te.compute((49, 256), lambda i, j: rows[i, j] - mean[i] * square[i], "result")
    schedule, _ = schedule_gpu(primfunc_from_tensors([x, result], "f"), H100)
    assert (schedule.rule, schedule.tiles) == ("rowwise", 49)


def test_the_work_of_scheduling_does_not_grow_with_the_data() -> None:
    def work(*shape: int) -> int:
        x, g = data(*shape), data(shape[1], name="g")
        func = primfunc_from_tensors([x, g, topi.add(topi.multiply(normalized(x, (1,))[2], g), g)], "f")
        return calls_made(lambda: schedule_gpu(func, H100))

    work(197, 768)
    assert work(4 * 197, 4 * 768) < 2 * work(197, 768)


def test_threads_share_the_rows_of_a_softmax_from_a_model() -> None:
    """Its maxima start from minus infinity, which TVM does not know by itself."""
    node = onnx.helper.make_node("Softmax", ["x"], ["y"], axis=-1)
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [4608, 384]) for name in "xy")
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y]), ir_version=10)
    (stage,) = flat_stages(stages_of(souffle.import_onnx(model), arch="sm_90", cubin=False)[0])
    assert stage.schedule.rule == "rowwise" and stage.schedule.tiles >= 4608 // 8


def unchecked(body: str) -> GpuSchedule:
    func = next(case for case in CASES if case.name == "softmax").func
    schedule, _ = schedule_gpu(func, SMALL)
    return {
        "tiles": GpuSchedule(schedule.func, "r", schedule.tiles + 1, schedule.threads),
        "threads": GpuSchedule(schedule.func, "r", schedule.tiles, 32),
        "unscheduled": GpuSchedule(func, "r", 1, 64),
    }[body]


@pytest.mark.parametrize(
    ("kind", "message"), [("tiles", "blockIdx.x has"), ("threads", "the loops bind"), ("unscheduled", "global memory")]
)
def test_check_finds(kind: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_schedule(unchecked(kind), SMALL)


def test_check_finds_output_read_back() -> None:
    x = data(64)
    first = te.compute((64,), lambda i: x[i] + 1.0, name="first")
    second = te.compute((64,), lambda i: first[63 - i] * 2.0, name="second")
    sch = tvm.s_tir.Schedule(primfunc_from_tensors([x, first, second], "f"))
    for name in ("first", "second"):
        outer, inner = sch.split(sch.get_loops(sch.get_sblock(name))[0], [1, 64])
        sch.bind(outer, "blockIdx.x")
        sch.bind(inner, "threadIdx.x")
    with pytest.raises(ScheduleError, match="first is read"):
        check_schedule(GpuSchedule(sch.mod["main"], "r", 1, 64), SMALL)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_text_compiles(built: Built, tmp_path: Path) -> None:
    source = tmp_path / "rules.cu"
    source.write_text(built.text)
    command = ["nvcc", "-arch=sm_90", "-cubin", "-o", str(tmp_path / "rules.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
