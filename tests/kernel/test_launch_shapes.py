"""Stages of different launch shapes in one kernel: grids and blocks in x, y and z, barriers of some of the threads."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx
from tvm.script import tirx as script

import souffle
from souffle.analysis import analyze
from souffle.codegen.nvcc import find_nvcc
from souffle.kernel import plan_calls
from souffle.kernel.kernel_shape import KernelShape
from souffle.program import TEProgram
from souffle.program.evaluate import evaluate
from souffle.schedule.form_stages import JoinPolicy, form_stages
from souffle.schedule.gpu import GpuSchedule
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.lower import (
    DeviceFunction,
    LoweringError,
    cuda_target,
    fit_functions,
    lower_stage,
    partial_function,
)
from souffle.schedule.lower.fewer_threads import BARRIER_FUNCTION
from souffle.schedule.lower.stages import lower_stages
from souffle.tvm_compat import primfunc_from_tensors
from souffle.verify import PROVEN
from tests.kernel.launch_shapes import ARCH, Reschedule, by_rule, crosswise, rescheduled, staged
from tests.testlib import Builder, inputs_for, run_on_cpu_device

pytestmark = pytest.mark.sampled(4)

ORDERS = ({"order": "fixed"}, {"order": "shuffled", "seed": 1}, {"order": "shuffled", "seed": 2, "blocks": 3})


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)


def rows_and_products() -> TEProgram:
    """Rows of 90 summed, times a matrix, and once more with what follows: stages sum0, matmul1, and one of two TEs."""
    b = Builder()
    y = b.reduce(b.input(6, 20, 90), 2)
    z = b.matmul(y, b.constant(weights(20, 33)))
    return b.program(b.reduce(b.matmul(z, b.constant(weights(33, 17))), 1))


def products() -> TEProgram:
    b = Builder()
    y = b.matmul(b.input(48, 64), b.constant(weights(64, 80)))
    z = b.relu(b.matmul(y, b.constant(weights(80, 64))))
    return b.program(z, b.reduce(z, 1))


def compiled(program: TEProgram, how: dict[int, Reschedule], **options):
    options = {"level": "V3", "arch": ARCH, "cubin": False, **options}
    return souffle.compile(program, target="cuda", device="cpu", hook=rescheduled(how), **options)


SHAPES: dict[str, tuple[dict[int, Reschedule], int, tuple[int, ...]]] = {
    # Threads of the kernel, and those that its partial barriers wait for.
    "warps of rows, a small tile, many threads": (
        {0: crosswise(32, 2), 1: staged(4, 8, 5), 2: by_rule(512)},
        512,
        (32,),
    ),
    "a block for a row, and a tile, of three warps": ({0: crosswise(96), 1: staged(4, 24, 4, True)}, 256, (96,)),
    "threads that end within a warp": ({0: crosswise(100), 1: staged(10, 10, 4, True)}, 256, (128,)),
    "three dimensions, broken warps": ({0: crosswise(8, 2, 3), 1: staged(3, 11, 10), 2: by_rule(64)}, 64, (64,)),
    "widest ends within a warp": ({0: crosswise(90), 1: staged(10, 10, 4), 2: by_rule(32)}, 100, (32, 96)),
    "all end within one warp": ({0: crosswise(97), 1: staged(10, 10, 4), 2: by_rule(32)}, 128, (32, 128)),
    "as many threads in other dimensions": ({0: crosswise(16, 2, 8), 1: staged(8, 32, 4), 2: by_rule(256)}, 256, ()),
    "a thousand threads": ({0: crosswise(30, 1, 34), 1: staged(6, 33, 20), 2: by_rule(64)}, 1020, (64, 224)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_any_shapes_together_give_the_function(name: str) -> None:
    how, threads, counts = SHAPES[name]
    program = rows_and_products()
    net, inputs = compiled(program, how), inputs_for(program)
    (kernel,) = net.plan.kernels
    assert net.certificate.verdict == PROVEN
    assert kernel.threads == threads
    found = re.findall(rf"{BARRIER_FUNCTION}<1, (\d+)>", net.plan.modules[0].text)
    assert tuple(sorted({int(count) for count in found})) == counts
    expected = evaluate(program, inputs)["out0"]
    apart = compiled(program, how, level="V0")
    assert len(apart.plan.kernels) > 1
    np.testing.assert_array_equal(run_on_cpu_device(apart.plan, inputs)["out0"], expected)
    for options in ORDERS:
        np.testing.assert_array_equal(run_on_cpu_device(net.plan, inputs, **options)["out0"], expected)
    checked = net.on("cpu", checked=True)
    np.testing.assert_array_equal(checked(inputs)["out0"], expected)


@pytest.mark.parametrize(
    ("arch", "how"),
    [
        ("sm_80", {0: by_rule(64, "sm_80"), 1: by_rule(128, "sm_80"), 2: by_rule(96, "sm_80")}),
        ("sm_80", {0: by_rule(512, "sm_80"), 1: by_rule(256, "sm_80"), 2: by_rule(64, "sm_80")}),
        ("sm_75", {0: by_rule(64, "sm_75"), 2: by_rule(96, "sm_75")}),
    ],
    ids=["mma", "mma of more threads", "wmma"],
)
def test_tensor_cores_beside_other_shapes(arch: str, how: dict[int, Reschedule]) -> None:
    program = products()
    net, inputs = compiled(program, how, arch=arch, precision="mixed"), inputs_for(program)
    text = net.plan.modules[0].text
    assert len(net.plan.kernels) == 1
    assert net.certificate.verdict == PROVEN and BARRIER_FUNCTION in text
    assert ("nvcuda::wmma::mma_sync" in text) == (arch == "sm_75")
    expected = evaluate(program, inputs)
    alone = run_on_cpu_device(compiled(program, how, arch=arch, precision="mixed", level="V0").plan, inputs)
    for options in ORDERS:
        found = run_on_cpu_device(net.plan, inputs, **options)
        for output, value in expected.items():
            np.testing.assert_array_equal(found[output], value)
            np.testing.assert_array_equal(alone[output], value)


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvcc_takes_them_and_bounds_registers_by_the_widest(arch: str) -> None:
    program = products()
    how = {0: by_rule(64, arch), 1: by_rule(128, arch), 2: by_rule(512, arch)}
    net = compiled(program, how, arch=arch, precision="mixed", cubin=True)
    (kernel,) = net.plan.kernels
    assert f"__launch_bounds__(512) {kernel.name}(" in net.plan.modules[0].text
    # 65,536 registers of a multiprocessor for a block of 512 threads.
    assert 0 < kernel.resources.registers <= 65536 // 512


def functions_of(threads: int) -> tuple[DeviceFunction, ...]:
    """A sum of rows of 90 with barriers, of so many threads."""
    x, k = te.placeholder((6, 20, 90), "float32", "x"), te.reduce_axis((0, 90), "k")
    func = primfunc_from_tensors([x, te.compute((6, 20), lambda i, j: te.sum(x[i, j, k], axis=k), "y")], "stage")
    return lower_stage("rows", crosswise(threads)(func), cuda_target(ARCH))


@pytest.mark.parametrize(
    ("threads", "calling"), [((96, 64), (96, 64)), ((100, 97), (128, 128)), ((300, 97), (300, 128)), ((90,), (90,))]
)
def test_how_many_threads_call(threads: tuple[int, ...], calling: tuple[int, ...]) -> None:
    functions = [functions_of(n)[0] for n in threads]
    fitted = fit_functions(functions)
    assert tuple(fitted[f].threads for f in functions) == calling
    assert all(fitted[f] is f for f in functions if f.threads == max(calling))


def test_a_form_is_made_once() -> None:
    (function,) = functions_of(96)
    assert partial_function(function) is partial_function(function)
    assert partial_function(partial_function(function)) is partial_function(function)


def test_kernels_of_different_sizes_share_a_stage_in_both_forms() -> None:
    """A kernel has blocks of its widest stage; a stage that is as wide itself keeps its own barriers."""
    program = rows_and_products()
    stages, _ = form_stages(program, analyze(program), GpuScheduler(device_for(ARCH)), JoinPolicy(False))
    how = {0: crosswise(96), 1: staged(4, 24, 4)}
    stages = lower_stages(rescheduled(how)("schedule", stages), cuda_target(ARCH))

    def shape(*chosen: int) -> KernelShape:
        return plan_calls([stages[i] for i in chosen], program.constants, prefetch=False).shape

    alone, narrow, wide = shape(0), shape(0, 1), shape(0, 1, 2)
    assert (alone.threads, narrow.threads, wide.threads) == (96, 96, 256)
    assert [f.name.endswith("_partial") for f in alone.functions] == [False]
    assert [f.name.endswith("_partial") for f in narrow.functions] == [False, False]
    assert [f.name.endswith("_partial") for f in wide.functions[:2]] == [True, True]
    again = shape(1, 2)
    assert again.functions[0] is wide.functions[1]


def test_equal_stages_may_have_different_schedules() -> None:
    b = Builder()
    x = b.input(8, 32)
    for _ in range(2):
        x = b.matmul(x, b.constant(weights(32, 32)))
    program, how = b.program(x), {0: staged(8, 8, 8), 1: staged(4, 4, 4)}
    net, inputs = compiled(program, how), inputs_for(program)
    assert len(set(net.plan.kernels[0].stages)) == 2
    np.testing.assert_array_equal(run_on_cpu_device(net.plan, inputs)["out0"], evaluate(program, inputs)["out0"])


def handed(rows: int, lanes: int, *, index: str, by: str) -> GpuSchedule:
    """Each row adds a vector that one row, or every second thread, has put into shared memory."""
    source = f"""
@T.prim_func(s_tir=True)
def stage(x: T.Buffer(({rows * lanes},), "float32"), y: T.Buffer(({rows * lanes},), "float32")):
    T.func_attr({{"tirx.noalias": True}})
    s = T.sblock_alloc_buffer(({rows * lanes},), scope="shared")
    for b in T.thread_binding(1, thread="blockIdx.x"):
        for j in T.thread_binding({rows}, thread="threadIdx.y"):
            for i in T.thread_binding({lanes}, thread="threadIdx.x"):
                with T.sblock("put"):
                    v = T.axis.spatial({rows}, j)
                    w = T.axis.spatial({lanes}, i)
                    T.where({by})
                    s[{index}] = x[{index}]
                with T.sblock("take"):
                    v = T.axis.spatial({rows}, j)
                    w = T.axis.spatial({lanes}, i)
                    y[v * {lanes} + w] = s[{index}]
"""
    made = tvm.script.from_source(source, extra_vars={"T": script})
    return GpuSchedule(made, "handed", 1, rows * lanes)


@pytest.mark.parametrize(
    ("rows", "index", "by", "shared"),
    [
        (4, "w", "j == 0", True),
        (4, "w // 2", "j == 0", True),
        (1, "w // 2", "i % 2 == 0", True),
        (1, "w", "i >= 0", False),
    ],
)
def test_no_barrier_is_left_out_where_threads_share_an_index(rows: int, index: str, by: str, shared: bool) -> None:
    """TVM takes an index that names the innermost axis for one thread's own."""
    (function,) = lower_stage("handed", handed(rows, 64, index=index, by=by), cuda_target(ARCH))
    assert function.has_barrier == shared


@pytest.mark.parametrize("grid", [("blockIdx.y", "blockIdx.x"), ("blockIdx.x", "blockIdx.z"), ("blockIdx.z",)])
def test_grids_of_any_dimensions(grid: tuple[str, ...]) -> None:
    x = te.placeholder((6, 5, 64), "float32", "x")
    func = primfunc_from_tensors([x, te.compute((6, 5, 64), lambda *i: x[i] * 2.0, "y")], "stage")
    sch = s_tir.Schedule(func)
    (block,) = sch.get_child_blocks(sch.get_sblock("root"))
    *loops, lane = sch.get_loops(block)
    for loop, tag in zip(loops, grid):
        sch.bind(loop, tag)
    sch.bind(lane, "threadIdx.x")
    tiles = 30 if len(grid) == 2 else 6
    (function,) = lower_stage("any", GpuSchedule(sch.mod["main"], "any", tiles, 64), cuda_target(ARCH))
    assert (function.tiles, function.threads) == (tiles, 64)


def test_what_cannot_have_barriers_of_its_own_threads_says_why() -> None:
    x, k = te.placeholder((48, 64), "float16", "x"), te.reduce_axis((0, 64), "k")
    w = te.placeholder((64, 80), "float16", "w")
    product = te.compute((48, 80), lambda i, j: te.sum(x[i, k].astype("float32") * w[k, j], axis=k), "y")
    schedule = by_rule(64, "sm_75")(primfunc_from_tensors([x, w, product], "stage"))
    (function,) = lower_stage("product", schedule, cuda_target("sm_75"))
    assert function.has_barrier
    broken = replace(function, threads=48)
    with pytest.raises(LoweringError, match=r"stage product has 48 threads, which end within a warp.*whole warps"):
        partial_function(broken)
    tid = function.func.params[1]
    turns = tirx.For(tirx.Var("i", "int32"), 0, tid + 1, tirx.ForKind.SERIAL, function.func.body)
    uneven = replace(functions_of(100)[0], func=function.func.with_body(turns))
    with pytest.raises(LoweringError, match=r"not the same for all threads|whole warps"):
        partial_function(uneven)


def test_a_block_has_a_thousand_threads_at_most() -> None:
    with pytest.raises(LoweringError, match=r"blocks of 2048 threads; a block holds 1024"):
        x = te.placeholder((4096,), "float32", "x")
        func = primfunc_from_tensors([x, te.compute((4096,), lambda i: x[i] * 2.0, "y")], "stage")
        sch = s_tir.Schedule(func)
        (block,) = sch.get_child_blocks(sch.get_sblock("root"))
        outer, y, lane = sch.split(sch.get_loops(block)[0], [None, 2, 1024])
        for loop, tag in ((outer, "blockIdx.x"), (y, "threadIdx.y"), (lane, "threadIdx.x")):
            sch.bind(loop, tag)
        lower_stage("many", GpuSchedule(sch.mod["main"], "many", 2, 2048), cuda_target(ARCH))
