"""A loop and what stands around it wait for no grid where what they need of each other stays on one block."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm import te, tirx

import souffle
from benchmarks.recurrent import recurrent
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.codegen.assemble import CompiledKernels
from souffle.kernel.kernel_shape import LoopCall
from souffle.pipeline import compile_cuda
from souffle.program import Tensor, TEProgram
from souffle.tvm_compat import collect
from souffle.verify import PROVEN, REFUTED, certify_plan
from souffle.verify.certify import functions_of
from tests.testlib import ORDERS, Builder, assert_on_every_grid, run_on_cpu_device
from tests.thorough import some


def compiled(program: TEProgram, **options: object) -> CompiledKernels:
    return compile_cuda(program, **{"level": "V4", "arch": "sm_90", "cubin": False, "verify": "values", **options})


def of_rows(b: Builder, x: Tensor) -> Tensor:
    """Each row less half of its sum."""
    y = b.map(lambda v: te.round(v * 3.0), x)
    total = b.reduce(y, 1)
    return b.add(lambda p, q: te.compute(x.shape, lambda i, j: p[i, j] - te.round(q[i] * 0.5)), y, total)


def rows(count: int, width: int = 50, steps: int = 5, *, crossing: bool = False) -> TEProgram:
    """Of each row the first moves by the sum, again and again; before it and after it, rows by themselves or not."""
    b = Builder()

    def less_the_sum(x):
        total = b.reduce(x, 1)
        return b.add(
            lambda p, q: te.compute(
                (count, width), lambda i, j: te.round((p[i, width - 1 - j] * 7 - q[i]) * 0.125)
            ),
            x, total,
        )  # fmt: skip

    y = of_rows(b, b.input(count, width))
    for _ in range(steps):
        y = less_the_sum(y)
    last = b.reduce(y, 0 if crossing else 1)
    index = (lambda i, j: j) if crossing else (lambda i, j: i)
    return b.program(
        b.add(lambda p, q: te.compute((count, width), lambda i, j: p[i, width - 1 - j] * 2 - q[index(i, j)]), y, last)
    )


def beside(count: int = 300, width: int = 50, steps: int = 5) -> TEProgram:
    """Rows that stay on their blocks, of which each needs all of a vector that changes from step to step."""
    b = Builder()
    x, v = b.input(count, width), b.input(1, width)
    w = b.constant(np.random.default_rng(1).integers(-2, 3, (width, width)).astype(np.float32))
    y = of_rows(b, x)
    for _ in range(steps):
        total = b.reduce(y, 1)
        y = b.add(
            lambda p, q, r: te.compute(
                (count, width), lambda i, j: te.round((p[i, width - 1 - j] * 7 - q[i]) * 0.125) + r[0, j]
            ),
            y, total, v,
        )  # fmt: skip
        v = b.map(lambda a: te.round(a * 0.0625), b.matmul(v, w))
    return b.program(y)


def calls_of(net: CompiledKernels) -> tuple[LoopCall, int]:
    """The only loop of the only kernel, and how many grid barriers that has."""
    (merged,) = net.merged
    (loop,) = (call for call in merged.shape.calls if isinstance(call, LoopCall))
    return loop, merged.shape.grid_syncs


def right(net: CompiledKernels, program: TEProgram) -> None:
    """Proven, and the same as the program on every grid."""
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    assert_on_every_grid(net.plan, program)


@pytest.mark.parametrize("count", some([1, 300], [7]))
@pytest.mark.parametrize("crossing", [False, True])
def test_rows_wait_for_their_block_alone(count: int, crossing: bool) -> None:
    """What follows waits for the grid where it needs what other blocks have made."""
    program = rows(count, crossing=crossing)
    net = compiled(program)
    assert calls_of(net)[1] == (crossing and count == 300)
    right(net, program)


def test_a_block_barrier_stands_before_a_loop_whose_steps_wait_for_the_grid() -> None:
    program = beside()
    net = compiled(program)
    loop, syncs = calls_of(net)
    # Between its steps, and once behind it.
    assert loop.block_sync_first and not loop.sync_first and syncs == loop.steps - 1 + 1
    assert "| block barrier\n  for s in 0" in str(net.merged[0])
    right(net, program)


@pytest.mark.parametrize(("kind", "waits"), some([("GRU", "flags")], [("LSTM", "flags"), ("GRU", "barriers")]))
def test_cells_of_one_tile_wait_for_no_grid(kind: str, waits: str) -> None:
    """Whatever a step reads of what stands before, its own part of it too."""
    model = recurrent(kind, 16, 16, steps=6, batch=1)
    net = compiled(souffle.import_onnx(model), waits=waits)
    (kernel,) = net.plan.kernels
    assert net.plan.certificate.verdict == PROVEN and not kernel.grid_syncs and not kernel.cooperative
    reasons = [one.reason for one in kernel.barriers]
    assert "what a loop and what stands around it need of each other stays on one block" in reasons
    inputs = {"x": np.random.default_rng(1).standard_normal((6, 1, 16)).astype(np.float32)}
    found = run_on_cpu_device(net.plan, inputs)
    assert compare(found, onnxruntime_outputs(model, inputs), "fp32").ok
    for options in ORDERS:
        again = run_on_cpu_device(net.plan, inputs, **options)
        assert all(again[name].tobytes() == value.tobytes() for name, value in found.items()), options


@pytest.mark.parametrize("program", [rows(300), beside()], ids=["rows", "beside"])
def test_each_barrier_is_needed(program: TEProgram) -> None:
    """Left out, any of them is missed: before the loop, between its steps, and after it."""
    net = compiled(program, verify="off")
    (merged,) = net.merged
    names = ("tirx.tvm_storage_sync", "tirx.cuda.grid_sync")
    waits = [
        node
        for node in collect(merged.func.body, tirx.Evaluate)
        if str(getattr(getattr(node.value, "op", None), "name", "")) in names
    ]
    assert len(waits) >= 2
    for wait in waits:
        gone = (tirx.Evaluate, lambda node, wait=wait: tirx.Evaluate(0) if node.same_as(wait) else node)
        kernels = {merged.name: merged.func.with_body(tvm_ffi.structural_map(merged.func.body, gone))}
        assert certify_plan(net.plan, kernels, functions_of(net)).verdict == REFUTED, wait
