"""Elements of what is wrapped around, whose places are divisions of sums with constants, on every way to code."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

import souffle
from souffle.codegen.cuda import emit_cuda
from souffle.emulator import compile_text
from souffle.kernel import KernelShape
from souffle.kernel.kernel_shape import ArgumentPlace, StageCall
from souffle.program.evaluate import evaluate
from souffle.program.flattening import has_shifted_division
from souffle.program.llvm_pipeline import compile_llvm
from souffle.schedule.gpu import GpuRequest, sketch_of
from souffle.schedule.lower import cuda_target, lower_stage
from souffle.tvm_compat import primfunc_from_tensors

ARCH = "sm_80"
# Data, what is made of it, shifts; one of each that TVM was seen to simplify wrongly is among them.
_RINGS = (
    ((8, 31, 5), (10, 31, 10), (6, 0, 2)),
    ((8, 5, 33), (31, 10, 33), (3, 2, 0)),
    ((2, 3, 40), (12, 3, 40), (0, 2, 0)),
)


def turned(x: te.Tensor, shape: tuple[int, ...], shifts: tuple[int, ...]) -> te.Tensor:
    """`x` wrapped around, from elsewhere than its beginning."""

    def element(*at: tirx.Var) -> tirx.PrimExpr:
        return x[tuple(tirx.floormod(i + s, e) for i, s, e in zip(at, shifts, x.shape, strict=True))]

    return te.compute(shape, element, name="turned")


def expected(x: np.ndarray, shape: tuple[int, ...], shifts: tuple[int, ...], softmax: bool) -> np.ndarray:
    found = x[np.ix_(*((np.arange(n) + s) % e for n, s, e in zip(shape, shifts, x.shape, strict=True)))]
    powers = np.exp(found - found.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True) if softmax else found


def stage(ring: tuple, softmax: bool) -> tuple[tirx.PrimFunc, np.ndarray, np.ndarray]:
    """The function, what it is given, and what it is to give."""
    extents, shape, shifts = ring
    x = te.placeholder(extents, name="x")
    result = turned(x, shape, shifts)
    result = topi.nn.softmax(result) if softmax else result
    values = np.random.default_rng(0).standard_normal(extents).astype(np.float32)
    return primfunc_from_tensors([x, result], "ring"), values, expected(values, shape, shifts, softmax)


@pytest.mark.parametrize(("ring", "rule"), list(itertools.product(_RINGS, ["elementwise", "rowwise"])))
def test_stages_of_the_gpu(ring: tuple, rule: str) -> None:
    func, x, wanted = stage(ring, rule == "rowwise")
    schedule = sketch_of(rule, func, GpuRequest(ARCH, threads=64, sm_count=4)).chosen()
    (function,) = lower_stage("ring", schedule, cuda_target(ARCH))
    sizes = tuple((str(p.ty.dtype), 0) for p in schedule.func.params)
    shape = KernelShape((StageCall((function,), (ArgumentPlace(0), ArgumentPlace(1)), False, ()),), sizes)
    text = emit_cuda([("run", shape)], cuda_target(ARCH))[0]
    found = np.zeros_like(wanted)
    compile_text(text).launch(
        "run",
        grid=(3, 1, 1),
        block=(schedule.threads, 1, 1),
        args=[x, found, 3],
        shared_bytes=function.shared_bytes,
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def fused(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """With one loop for all axes, as parallel schedules have it."""
    schedule = tvm.s_tir.Schedule(func)
    schedule.fuse(*schedule.get_loops(schedule.get_sblock("turned")))
    return schedule.mod["main"].with_attr("global_symbol", "ring")


@pytest.mark.parametrize("ring", _RINGS)
def test_code_of_the_cpu(ring: tuple) -> None:
    func, x, wanted = stage(ring, False)
    found = tvm.runtime.tensor(np.zeros_like(wanted))
    compile_llvm({"ring": fused(func)}, tvm.target.Target("llvm"))["ring"](tvm.runtime.tensor(x), found)
    np.testing.assert_array_equal(found.numpy(), wanted)
    extents, shape, shifts = ring
    data = te.placeholder(extents, name="x")
    program = souffle.from_te([data], [turned(data, shape, shifts)])
    (evaluated,) = evaluate(program, [x]).values()
    np.testing.assert_array_equal(evaluated, wanted)


_I, _J = (tirx.Var(name, "int32") for name in "ij")


@pytest.mark.parametrize(
    ("index", "shifted"),
    [
        (lambda: tirx.floormod(_I * 7 + _J, 5) + 3, False),
        (lambda: tirx.floordiv(tirx.floormod(_I, 35), 7) * 2 + 1, False),
        (lambda: tirx.floormod(_I + 1, 5), True),
        (lambda: tirx.floordiv(tirx.floormod(_I - _J, 35), 7), True),
        (lambda: tirx.floormod(tirx.Var("n", "int32") + _I, 5), True),
        (lambda: tirx.floordiv(15 - _I, 4), True),
        (lambda: tirx.floormod(_I, -2) * 21 + _J, True),
    ],
)
def test_which_divisions_are_kept_from_the_simplifier(index: Callable[[], tirx.PrimExpr], shifted: bool) -> None:
    assert has_shifted_division(index(), [_I, _J]) == shifted


@pytest.mark.parametrize("options", [{"target": "cpu"}, {"target": "cuda", "device": "cpu", "cubin": False}])
def test_remainders_that_are_made_negative(options: dict) -> None:
    """TVM simplifies 21 - -g % 2 * 21 to 21 + g % -2 * 21, cannot lower that, and makes one remainder of two."""
    x = te.placeholder((42,), name="x")
    result = te.compute(
        (4, 21),
        lambda g, j: x[j + 21 - tirx.floormod(tirx.floordiv(g, 2) * 2 + 1 - tirx.floormod(g, 2) + 1, 2) * 21],
        name="y",
    )
    doubled = te.compute((4, 21), lambda g, j: result[g, j] * result[g, 20 - j], name="z")
    values = np.random.default_rng(1).standard_normal(42).astype(np.float32)
    (found,) = souffle.compile(souffle.from_te([x], [doubled]), **options)(values).values()
    rows = np.stack([values[21:], values[:21]] * 2)
    np.testing.assert_allclose(found, rows * rows[:, ::-1], rtol=1e-6)


def test_arrays_of_truth_values_of_the_cpu() -> None:
    """What is compared once and read by several lies in an array of the function's own."""
    a, b = (te.placeholder((1, 2, 8, 8), "uint8", name) for name in "ab")
    less = te.compute(a.shape, lambda *at: a[at] <= b[at], name="less")
    result = te.compute((3, 2, 8, 8), lambda k, *at: less[(0, *at)], name="y")
    x, y = (np.random.default_rng(seed).integers(0, 3, (1, 2, 8, 8), np.uint8) for seed in range(2))
    (found,) = souffle.compile(souffle.from_te([a, b], [result]), target="cpu")(x, y).values()
    np.testing.assert_array_equal(found, np.broadcast_to(x <= y, (3, 2, 8, 8)))
