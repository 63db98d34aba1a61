"""The rule of chained products: kernels run on the CPU device and are compared with the plain function."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

from souffle.codegen.cuda import emit_cuda
from souffle.emulator import compile_text
from souffle.kernel import KernelShape
from souffle.kernel.calls import ArgumentPlace, StageCall
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Sketch
from souffle.schedule.gpu.rules.chained_products import CHAINED_PRODUCTS
from souffle.schedule.gpu.schedule_check import check_schedule
from souffle.schedule.lower import DeviceFunction, cuda_target, lower_stage
from souffle.tvm_compat import const_int, primfunc_from_tensors

A100 = GpuRequest("sm_80", sm_count=108, max_shared_bytes=163 * 1024)
SMALL = GpuRequest("sm_80", threads=128, sm_count=4, max_shared_bytes=163 * 1024)

Tensors = tuple[te.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """A stage with what is asked for, and values for the knobs where they are not the rule's own."""

    name: str
    inputs: Tensors
    outputs: Tensors
    request: GpuRequest = SMALL
    values: tuple[tuple[str, int], ...] = ()

    @property
    def func(self) -> tirx.PrimFunc:
        return primfunc_from_tensors([*self.inputs, *self.outputs], self.name)


def data(*shape: int, dtype: str = "float16", name: str = "x") -> te.Tensor:
    return te.placeholder(shape, dtype, name=name)


def shape_of(tensor: te.Tensor) -> tuple[int, ...]:
    return tuple(const_int(extent) for extent in tensor.shape)


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


def softmax(scores: te.Tensor) -> te.Tensor:
    return topi.nn.softmax(scores, axis=-1)


def attention(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    values: tuple[int, ...],
    scores: Callable[[te.Tensor], te.Tensor] = lambda s: topi.divide(s, tirx.const(4.0, "float32")),
    types: str = "float16",
) -> tuple[Tensors, te.Tensor]:
    q, k, v = (data(*shape, dtype=types, name=name) for shape, name in zip((queries, keys, values), "qkv", strict=True))
    weights = softmax(scores(product(q, k, transposed=True)))
    return (q, k, v), topi.cast(product(weights, v), "float16")


def causal(scores: te.Tensor) -> te.Tensor:
    *_, rows, columns = shape_of(scores)

    def masked(*index):
        return tirx.if_then_else(index[-1] <= index[-2] + (columns - rows), scores(*index), tirx.const(-1e9, "float32"))

    return te.compute(scores.shape, masked, name="masked")


def normalized(scores: te.Tensor) -> te.Tensor:
    """Rows without their mean, by their deviation."""
    columns = shape_of(scores)[-1]
    k, other = (te.reduce_axis((0, columns), name=name) for name in ("k", "other"))
    total = te.compute(scores.shape[:-1], lambda *i: te.sum(scores(*i, k), axis=k), name="total")
    centred = te.compute(scores.shape, lambda *i: scores(*i) - total(*i[:-1]) / columns, name="centred")
    square = te.compute(
        scores.shape[:-1], lambda *i: te.sum(centred(*i, other) * centred(*i, other), axis=other), name="square"
    )
    return te.compute(
        scores.shape, lambda *i: centred(*i) * tirx.rsqrt(square(*i[:-1]) / columns + 1e-5), name="normalized"
    )


def chain(
    rows: int, inner: int, columns: int, last: int, between: Callable[[te.Tensor], te.Tensor], types: str = "float16"
) -> tuple[Tensors, te.Tensor]:
    x, w, u = data(rows, inner, name="x", dtype=types), data(inner, columns, name="w"), data(columns, last, name="u")
    bias = data(columns, dtype="float32", name="bias")
    result = product(between(topi.add(product(x, w), bias)), u)
    residual = data(rows, last, dtype="float32", name="residual")
    return (x, w, bias, u, residual), topi.add(result, residual)


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
    for name, between in (("gelu", topi.tanh), ("norm", normalized), ("nothing", lambda x: x)):
        inputs, result = chain(40, 48, 72, 40, between)
        found.append(Case(f"chain_{name}", inputs, (result,)))
    return found


def drawn_cases(count: int) -> list[Case]:
    """Shapes and values of knobs drawn at random."""
    draw = random.Random(11)
    found = []
    while len(found) < count:
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
            if isinstance(sketch.make(values), GpuSchedule):
                found.append(Case(f"drawn_{len(found)}", inputs, (result,), request, tuple(values.items())))
                break
    return found


CASES = [*plain_cases(), *drawn_cases(10)]


@dataclass(frozen=True, eq=False)
class Built:
    """All cases as one CUDA text, since each compilation costs more than a case."""

    schedules: Mapping[str, GpuSchedule]
    functions: Mapping[str, DeviceFunction]
    module: object
    reference: object


def scheduled(case: Case) -> GpuSchedule:
    sketch = CHAINED_PRODUCTS.sketch(StageForms(case.func), case.request)
    assert isinstance(sketch, Sketch), f"{case.name}: {sketch}"
    schedule = sketch.with_values(dict(case.values)) if case.values else sketch.chosen()
    assert isinstance(schedule, GpuSchedule), f"{case.name}: {schedule}"
    check_schedule(schedule, case.request)
    return schedule


@pytest.fixture(scope="module")
def built() -> Built:
    schedules = {case.name: scheduled(case) for case in CASES}
    target = cuda_target("sm_80")
    functions: dict[str, DeviceFunction] = {}
    shapes = []
    for name, schedule in schedules.items():
        (functions[name],) = lower_stage(name, schedule, target)
        sizes = tuple((str(p.ty.dtype), 0) for p in schedule.func.params)
        call = StageCall((functions[name],), tuple(ArgumentPlace(i) for i in range(len(sizes))), False, ())
        shapes.append((f"run_{name}", KernelShape((call,), sizes)))
    text = emit_cuda(shapes, target)[0]
    plain = tvm.IRModule({case.name: case.func for case in CASES})
    return Built(schedules, functions, compile_text(text), tvm.compile(plain, target="llvm"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_result(case: Case, built: Built) -> None:
    generator = np.random.default_rng(3)
    inputs = [
        np.asarray(generator.uniform(-1, 1, shape_of(tensor)), np.dtype(str(tensor.dtype))) for tensor in case.inputs
    ]
    outputs = [np.full(shape_of(tensor), 7, str(tensor.dtype)) for tensor in case.outputs]
    expected = [tvm.runtime.tensor(array) for array in (*inputs, *outputs)]
    built.reference[case.name](*expected)
    schedule, function = built.schedules[case.name], built.functions[case.name]
    seen = []
    for order, blocks in (("fixed", schedule.tiles), ("shuffled", max(1, schedule.tiles // 2))):
        for output in outputs:
            output.fill(7)
        built.module.launch(
            f"run_{case.name}",
            grid=(blocks, 1, 1),
            block=(schedule.threads, 1, 1),
            args=[*inputs, *outputs, blocks],
            shared_bytes=function.shared_bytes,
            order=order,
        )
        for output, reference in zip(outputs, expected[len(inputs) :], strict=True):
            scale = max(1.0, float(np.abs(reference.numpy()).max()))
            np.testing.assert_allclose(output, reference.numpy(), rtol=1e-2, atol=1e-2 * scale)
        seen.append([output.copy() for output in outputs])
    # Sums are added in one order, whichever warp comes first.
    assert all(np.array_equal(a, b) for a, b in zip(*seen, strict=True))
