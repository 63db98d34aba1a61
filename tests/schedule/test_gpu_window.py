"""Single reductions in registers: every choice of numbers runs on the CPU device and equals the plain function."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tvm import te, tirx, topi

from souffle.decision import Refused
from souffle.schedule.gpu.forms.contraction_expressions import Axis
from souffle.schedule.gpu.forms.one_reduction import Meeting, find_meeting
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Sketch
from souffle.schedule.gpu.rules.window import WINDOW, direct_sketch
from souffle.schedule.gpu.tiling.direct_tiling import read_plan
from souffle.tvm_compat import PrimExpr, const_int, primfunc_from_tensors
from tests.schedule.knob_choices import Choices, built_choices
from tests.thorough import THOROUGH, sized

SMALL = GpuRequest("sm_90", threads=64, sm_count=4)
ODD = GpuRequest("sm_90", threads=96, sm_count=4)


@dataclass(frozen=True, eq=False)
class Case:
    """A stage: its inputs and output, and whether its outputs share inputs."""

    name: str
    inputs: tuple[te.Tensor, ...]
    output: te.Tensor
    shares: bool = True
    request: GpuRequest = SMALL

    @property
    def func(self) -> tirx.PrimFunc:
        return primfunc_from_tensors([*self.inputs, self.output], self.name)


def data(*shape: int, dtype: str = "float32", name: str = "x") -> te.Tensor:
    return te.placeholder(shape, dtype, name=name)


def swish(x: te.Tensor, b: te.Tensor) -> te.Tensor:
    y = te.compute(x.shape, lambda n, c, *at: x(n, c, *at) + b[c], name="biased")
    return te.compute(x.shape, lambda *at: y[at] * tirx.sigmoid(y[at]), name="swish")


def depthwise(name: str, shape: tuple[int, ...], k: int, stride: int, padding: int, dilation: int = 1) -> Case:
    x, w, b = data(*shape), data(shape[1], 1, k, k, name="w"), data(shape[1], name="b")
    conv = topi.nn.depthwise_conv2d_nchw(x, w, stride, padding, dilation)
    return Case(name, (x, w, b), swish(conv, b))


def channels_last(name: str, n: int, h: int, w: int, c: int, k: int, stride: int) -> Case:
    x, f, s = data(n, h, w, c), data(k, k, c, name="f"), data(c, name="s")
    before = k // 2
    padded = topi.nn.pad(x, [0, before, before, 0], [0, before, before, 0])
    dy, dx = te.reduce_axis((0, k), "dy"), te.reduce_axis((0, k), "dx")
    oh, ow = -(-h // stride), -(-w // stride)
    conv = te.compute(
        (n, oh, ow, c),
        lambda b, i, j, a: te.sum(padded[b, i * stride + dy, j * stride + dx, a] * f[dy, dx, a], [dy, dx]),
        name="conv",
    )
    return Case(name, (x, f, s), te.compute(conv.shape, lambda *at: tirx.exp(conv[at]) * s[at[3]], name="scaled"))


def window_cases() -> list[Case]:
    x, wide = data(2, 5, 13, 11), data(1, 3, 24, 20)
    grouped, weights = data(2, 12, 9, 8, name="image"), data(12, 4, 3, 3, name="weight")
    conv = topi.nn.group_conv2d_nchw(grouped, weights, 1, 1, 1, 3, "float32")
    line, taps = data(3, 40), data(5, name="taps")
    r = te.reduce_axis((0, 5), "r")
    ladder = te.compute((3, 18), lambda i, j: te.sum(line[i, j * 2 + r * 1] * taps[r], axis=r), name="ladder")
    return [
        depthwise("same", (2, 6, 15, 13), 3, 1, 1),
        depthwise("stride", (1, 7, 17, 14), 3, 2, 1),
        depthwise("five", (1, 4, 14, 14), 5, 1, 2),
        depthwise("five_stride", (3, 2, 13, 9), 5, 2, 2),
        depthwise("dilated", (1, 4, 15, 12), 3, 1, 2, 2),
        depthwise("dilated_stride", (1, 3, 16, 15), 3, 2, 2, 2),
        depthwise("valid", (1, 3, 10, 9), 3, 1, 0),
        depthwise("one_pixel", (1, 96, 1, 7), 3, 1, 1),
        channels_last("last", 1, 9, 7, 12, 3, 1),
        channels_last("last_stride", 2, 8, 10, 5, 3, 2),
        Case("max_pool", (x,), topi.nn.pool2d(x, [3, 3], [2, 2], [1, 1], [1, 1, 1, 1], "max")),
        Case("avg_pool", (wide,), topi.nn.pool2d(wide, [3, 2], [1, 1], [1, 1], [1, 0, 1, 1], "avg")),
        Case("min_window", (wide,), topi.nn.pool2d(topi.exp(wide), [2, 3], [1, 2], [1, 1], [0, 0, 0, 0], "max")),
        Case("grouped", (grouped, weights), topi.nn.relu(conv)),
        Case("ladder", (line, taps), ladder),
        Case("odd_threads", (wide,), topi.nn.pool2d(wide, [3, 3], [1, 1], [1, 1], [1, 1, 1, 1], "max"), True, ODD),
    ]


def product(m: int, n: int, k: int, turned: bool, dtype: str = "float32") -> tuple[tuple[te.Tensor, ...], te.Tensor]:
    a, b = data(m, k, dtype=dtype, name="a"), data(*((n, k) if turned else (k, n)), dtype=dtype, name="b")
    r = te.reduce_axis((0, k), "r")

    def term(i, j):
        return a[i, r].astype("float32") * (b[j, r] if turned else b[r, j]).astype("float32")

    total = te.compute((m, n), lambda i, j: te.sum(term(i, j), axis=r), name="product")
    return (a, b), te.compute((m, n), lambda i, j: te.tanh(total[i, j]).astype(dtype), name="out")


def beside_cases(columns: int, dtype: str) -> list[Case]:
    """What stands beside the sums of neighbours: of other types, at other places, under conditions, by other data."""
    x, r = data(6, 5, columns, dtype=dtype), te.reduce_axis((0, 6), "r")
    total = te.compute((5, columns), lambda i, j: te.sum(x[r, i, j].astype("float32"), axis=r), "total")
    b, s = data(columns, name="b"), data(5, name="s")
    residual, other = data(5, columns, name="residual"), data(5, columns, dtype="float16", name="other")
    small, large = data(columns, dtype="int8", name="small"), data(5, columns, dtype="int64", name="large")
    longer, turned = data(5, columns + 8, name="longer"), data(columns, 5, name="turned")
    place, table = data(columns, dtype="int32", name="place"), data(9, name="table")

    def plain(i, j):
        return te.tanh(total[i, j] * 0.1 + b[j] + residual[i, j]) * s[i] + other[i, j].astype("float32") * b[j]

    def types(i, j):
        factor = small[j].astype("float32") + large[i, j].astype("float32")
        return te.tanh(total[i, j] * 0.1) * factor + residual[i, j] * residual[i, j]

    def places(i, j):
        moved = longer[i, j + 1] + longer[i, j + 8] * longer[i, j]
        return te.tanh(total[i, j] * 0.1 + moved) + turned[j, i] * b[columns - 1 - j]

    def choices(i, j):
        here = tirx.if_then_else(j % 3 > 0, other[i, j].astype("float32"), tirx.const(0, "float32"))
        there = tirx.Select(small[j] > 4, b[j], residual[i, j])
        return te.tanh(total[i, j] * 0.1 + here) * there + table[place[j]]

    given = {
        plain: (x, b, s, residual, other),
        types: (x, small, large, residual),
        places: (x, longer, turned, b),
        choices: (x, place, table, residual, b, small, other),
    }

    def case(beside: Callable[..., PrimExpr], inputs: tuple[te.Tensor, ...]) -> Case:
        output = te.compute((5, columns), lambda i, j: beside(i, j).astype(dtype), "out")
        return Case(f"{beside.__name__}_{columns}_{dtype}", inputs, output, False)

    return [case(beside, inputs) for beside, inputs in given.items()]


def repeated_cases() -> list[Case]:
    """Reductions whose terms are all the same, and whose lengths are no multiple of what shares them."""
    x, r, s = data(5, 7), te.reduce_axis((0, 67), "r"), te.reduce_axis((0, 3), "s")
    return [
        Case("same_sum", (x,), te.compute((5, 7), lambda i, j: te.sum(x[i, j] * x[i, j], axis=r)), False),
        Case("same_largest", (x,), te.compute((5, 7), lambda i, j: te.max(x[i, j], axis=r)), False),
        Case("same_window", (x,), te.compute((5, 5), lambda i, j: te.sum(x[i, j + s], axis=[r, s])), False),
    ]


def reduction_cases() -> list[Case]:
    x, n, v = data(3, 5, 13, 11), data(37, 64), data(2, 3001)
    found = [
        Case(f"product_{m}_{n}_{k}_{int(t)}_{d}", *product(m, n, k, t, d), shares=False, request=q)
        for m, n, k, t, d, q in (
            (1, 52, 96, False, "float32", SMALL),
            (1, 52, 96, True, "float32", SMALL),
            (2, 37, 101, True, "float32", SMALL),
            (3, 45, 64, False, "float32", ODD),
            (3, 40, 200, True, "float16", SMALL),
            (2, 48, 72, False, "float16", SMALL),
            (1, 1, 333, False, "float32", SMALL),
        )
    ]
    return [
        *found,
        Case("total", (x,), topi.sum(x), False),
        Case("rows", (n,), topi.sum(n, axis=1), False),
        Case("columns", (n,), topi.max(n, axis=0), False),
        Case("channels", (x,), topi.prod(topi.exp(topi.multiply(x, 0.1)), axis=1), False),
        Case("pool", (x,), topi.multiply(topi.sum(x, axis=[2, 3], keepdims=True), 1.0 / 143), False),
        Case("outer", (x,), topi.min(x, axis=[0, 2]), False),
        Case("long", (v,), topi.sqrt(topi.sum(topi.multiply(v, v), axis=1)), False),
        Case("reshaped", (x,), topi.reshape(topi.nn.relu(topi.sum(x, axis=1)), (39, 11)), False),
        Case("halves", (data(9, 70, dtype="float16"),), topi.sum(data(9, 70, dtype="float16"), axis=1), False),
        Case("integers", (data(9, 70, dtype="int64"),), topi.sum(data(9, 70, dtype="int64"), axis=1), False),
        *repeated_cases(),
        *beside_cases(48, "float32"),
        *beside_cases(36, "float16"),
        *beside_cases(37, "float32"),
        *beside_cases(64, "float16"),
    ]


def shared_input(case: Case) -> Case:
    """`case` with its output over its own inputs, where the list above writes both apart."""
    if case.name in ("halves", "integers"):
        return Case(case.name, case.inputs, topi.sum(case.inputs[0], axis=1), False)
    return case


CASES = [shared_input(case) for case in (*window_cases(), *reduction_cases())]

SAMPLES = sized(2, 7)
"""Choices of numbers of each stage, beside the rule's own."""


def offered(case: Case) -> Sketch | Refused:
    """The schedules in registers, of windows and of what shares no input."""
    stage = StageForms(case.func)
    if case.shares:
        return WINDOW.sketch(stage, case.request)
    return direct_sketch(stage.read(read_plan), case.request, "reduction")


@pytest.fixture(scope="module")
def built() -> Choices:
    chance = random.Random(11)

    def sampled(case: Case) -> list[GpuSchedule | Refused]:
        sketch = offered(case)
        assert isinstance(sketch, Sketch), sketch
        choices = [sketch.choose()]
        while len(choices) < min(SAMPLES, sketch.size):
            choices.append({knob.name: chance.choice(knob.values) for knob in sketch.knobs})
        return [sketch.with_values(values) for values in choices]

    return built_choices(CASES, sampled)


def arrays(case: Case) -> list[np.ndarray]:
    chance = np.random.default_rng(5)
    inputs = []
    for tensor in case.inputs:
        shape, dtype = tuple(const_int(e) for e in tensor.shape), np.dtype(str(tensor.dtype))
        values = chance.integers(0, 9, shape) if dtype.kind == "i" else chance.uniform(-1, 1, shape)
        inputs.append(np.asarray(values, dtype))
    return inputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_result(case: Case, built: Choices) -> None:
    output = np.zeros(tuple(const_int(e) for e in case.output.shape), str(case.output.dtype))
    built.assert_equal(case.name, arrays(case), [output], 1e-2 if "16" in str(output.dtype) else 2e-5)


def test_what_stands_beside_neighbours_is_read_together() -> None:
    """Of elements that four or eight outputs have beside each other; not where they are apart or under conditions."""
    together = {}
    for case in (*beside_cases(48, "float32"), *beside_cases(64, "float16"), *beside_cases(37, "float32")):
        sketch = offered(case)
        values = {knob.name: knob.values[0] for knob in sketch.knobs}
        lanes = next(knob.values[-1] for knob in sketch.knobs if knob.name == "lanes")
        schedule = sketch.with_values({**values, "lanes": lanes})
        assert isinstance(schedule, GpuSchedule), schedule
        together[case.name] = len(re.findall(r"wide\d+ = T.alloc", str(schedule.func.script())))
    assert together == {
        "plain_48_float32": 3,
        "types_48_float32": 3,
        "places_48_float32": 2,
        "choices_48_float32": 3,
        "plain_64_float16": 3,
        "types_64_float16": 3,
        "places_64_float16": 2,
        "choices_64_float16": 3,
        "plain_37_float32": 0,
        "types_37_float32": 0,
        "places_37_float32": 0,
        "choices_37_float32": 0,
    }


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.skipif(not THOROUGH, reason="nvcc takes all cases together for make test-all")
def test_text_compiles_without_spills(built: Choices, tmp_path: Path) -> None:
    source = tmp_path / "window.cu"
    source.write_text(built.text)
    command = ["nvcc", "-arch=sm_90", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "window.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"(\d+) bytes spill", done.stderr)) == {"0"}


def test_where_outputs_meet() -> None:
    y, dy = Axis(tirx.Var("y", "int32"), 8), Axis(tirx.Var("dy", "int32"), 3)
    buffer = tirx.decl_buffer((64,), "float32", "image")

    def meeting(index):
        return find_meeting(buffer[index], y, dy)

    assert meeting(y.var + dy.var) == Meeting(1, 1)
    assert meeting(y.var * 2 + dy.var) == Meeting(1, 2)
    assert meeting(y.var + dy.var * 3) == Meeting(3, 1)
    assert meeting(y.var * 2 + dy.var * 3) is None
    assert meeting(y.var) is None
    condition = tirx.if_then_else(y.var > 1, buffer[y.var + dy.var], tirx.const(0, "float32"))
    assert find_meeting(condition, y, dy) is None


def test_numbers_that_do_not_fit_are_refused() -> None:
    case = next(case for case in CASES if case.name == "five")
    sketch = WINDOW.sketch(StageForms(case.func), case.request)
    most = {knob.name: knob.values[-1] for knob in sketch.knobs}
    answer = sketch.with_values(most)
    assert isinstance(answer, Refused)
    assert "registers" in answer.reason or "multiply-adds" in answer.reason


def test_windows_that_share_nothing_are_refused() -> None:
    x = data(2, 6, 8, 8)
    pool = topi.nn.pool2d(x, [2, 2], [2, 2], [1, 1], [0, 0, 0, 0], "max")
    answer = WINDOW.sketch(StageForms(primfunc_from_tensors([x, pool], "f")), SMALL)
    assert isinstance(answer, Refused)
    assert "share no input" in answer.reason
