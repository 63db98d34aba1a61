"""What a tile takes, against counts made by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

from souffle.cost import Work, work_of
from souffle.schedule.gpu import RULES, GpuRequest, StageForms
from souffle.schedule.lower import DeviceFunction, cuda_target, device_function, lower_stage
from souffle.tvm_compat import primfunc_from_tensors
from tests.cost.stages import affine, lowered, product


def test_an_element_wise_tile() -> None:
    rule, function = lowered(affine(1 << 20))
    assert (rule, function.tiles) == ("elementwise", 1024)
    # 256 threads take 4 neighbours each: one load of 16 bytes, 4 multiply-adds, one store; 4 KiB in and 4 KiB out.
    assert work_of(function) == Work(
        warp_instructions=8 * (1 + 1 + 4) + 8 * _index_instructions(function),
        fp32=1024,
        int32=256 * _index_instructions(function),
        shared_bytes=4096 + 4096,
        requested_bytes=4096,
        distinct_bytes=4096,
        written_bytes=4096,
        global_waits=1,
        # What a warp executes stands there once, but for the address of the load, which is made with that of the store.
        code_bytes=16 * (80 + 1 + 1 + 4 + _index_instructions(function)),
    )


def _index_instructions(function: DeviceFunction) -> int:
    """``tile * 1024 + tid * 4``: one product that threads differ in, one sum, an address for the load and the store."""
    text = str(function.func.body)
    assert "tile * 1024 + tid * 4" in text
    return 1 + 1 + 2


@pytest.mark.parametrize("k", [64, 256])
def test_a_tile_of_a_matrix_product(k: int) -> None:
    rule, function = lowered(product(64, 64, k, "float32"), sm_count=1)
    tiles = function.tiles
    assert rule == "contraction" and 64 % tiles == 0
    work, twice = work_of(function), work_of(lowered(product(64, 64, 2 * k, "float32"), sm_count=1)[1])
    # Parts of a sum beyond the first are added to it.
    added = work.fp32 * tiles - 64 * 64 * k
    assert added % (64 * 64) == 0 and added // (64 * 64) + 1 in (1, 2, 4, 8, 16)
    # A tile is of all rows or of all columns.
    assert work.requested_bytes == work.distinct_bytes == (64 + 64 // tiles) * k * 4
    assert work.written_bytes * tiles == 64 * 64 * 4
    assert work.tensor_fma == work.special == 0
    # A barrier a step, and two where parts are added. Steps are on their way while others are worked on.
    steps = twice.barriers - work.barriers
    assert work.barriers == steps + 2 * (added > 0) and work.prefetched_waits >= steps
    assert work.global_waits == 1


def _guarded(m: int, n: int, depth: int) -> list[te.Tensor]:
    """A product on tensor cores, then a bias and `depth` exponentials."""
    a, b, c = product(m, n, 128, "float16")
    bias = te.placeholder((n,), "float32", "bias")

    def element(i: tirx.Var, j: tirx.Var) -> tvm.ir.Expr:
        value = c[i, j] + bias[j]
        for _ in range(depth):
            value = tirx.exp(value * 0.5)
        return value

    return [a, b, bias, te.compute(c.shape, element, "d")]


def test_loads_behind_branches_wait_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an epilogue that is long enough to be a branch, for rows that not all tiles have; not where they are ahead."""
    waits = {}
    for ahead in (True, False):
        if not ahead:
            monkeypatch.setattr(device_function, "with_loads_ahead", lambda function: function)
        for m in (96, 100):
            for depth in (0, 6):
                rule, function = lowered(_guarded(m, 128, depth), sm_count=2)
                assert rule == "mma_contraction"
                waits[m, depth, ahead] = work_of(function).global_waits
    plain = {waits[m, depth, ahead] for m, depth in ((96, 0), (96, 6), (100, 0)) for ahead in (True, False)}
    assert len(plain) == 1, "whole tiles have no condition, short ones are predicated"
    assert {waits[100, 6, True]} == plain and waits[100, 6, False] > waits[100, 0, False]


def test_a_tile_on_tensor_cores() -> None:
    rule, function = lowered(product(64, 64, 128, "float16"), sm_count=1)
    assert rule == "mma_contraction"
    work = work_of(function)
    assert work.tensor_fma * function.tiles == 64 * 64 * 128
    # Each of the tiles reads its rows of one operand and its columns of the other.
    assert work.distinct_bytes * function.tiles >= 2 * 64 * 128 * 2
    assert work.written_bytes * function.tiles == 64 * 64 * 4


@pytest.mark.parametrize("each", [(4, 1, 2), (2, 2, 4), (1, 4, 1)])
def test_an_element_in_a_register_is_converted_once(each: tuple[int, int, int]) -> None:
    """A window of fp16 with fp32 sums: each held element once in a round, each product by one multiply-add."""
    x = te.placeholder((1, 256, 58, 58), "float16", "x")
    w = te.placeholder((256, 4, 3, 3), "float16", "w")
    func = primfunc_from_tensors([x, w, topi.nn.group_conv2d_nchw(x, w, 1, 0, 1, 64, "float32")], "conv")
    sketch = RULES["window"].sketch(StageForms(func), GpuRequest("sm_90", 256, 132, 227 * 1024))
    schedule = sketch.make({**sketch.choose(), **{f"each_{n}": value for n, value in enumerate(each)}, "split": 1})
    (function,) = lower_stage("stage", schedule, cuda_target("sm_90"))
    rows, columns, channels = each
    held = (rows + 2) * (columns + 2) + 9 * channels
    outputs = function.tiles * function.threads * rows * columns * channels
    assert outputs == 256 * 56 * 56
    assert work_of(function).fp32 == 256 * 4 * (9 * rows * columns * channels + held)


def test_what_only_some_threads_need_is_computed_by_them() -> None:
    """Two steps of 32 inputs each, of which 36 or 63 are there: indices of the others are never worked out.

    They have names, which stand before the condition.
    """

    def counted(channels: int) -> float:
        x = te.placeholder((1, channels * 4, 58, 58), "float16", "x")
        w = te.placeholder((4 * 8, channels, 3, 3), "float16", "w")
        func = primfunc_from_tensors([x, w, topi.nn.group_conv2d_nchw(x, w, 1, 0, 1, 4, "float32")], "conv")
        sketch = RULES["mma_contraction"].sketch(StageForms(func), GpuRequest("sm_90", 256, 132, 227 * 1024))
        values = sketch.choose()
        assert values["step"] == 32 and values["stages"] == 1
        (function,) = lower_stage("stage", sketch.make(values), cuda_target("sm_90"))
        return work_of(function).int32

    # A first step and an eighth of another, or nearly two; some of it is not of the steps.
    assert 0.55 * counted(7) < counted(4) < 0.8 * counted(7)


def test_what_unrolled_turns_add_alike_is_an_offset_wherever_it_stands() -> None:
    """``thread * 64 + (tile * 2048 + turn)`` is one sum of what threads differ in; turns differ in an offset."""
    _, function = lowered(affine(8192))

    def counted(*order: int, turns: int) -> float:
        tile, tid, source = function.func.params[:3]
        x = tirx.decl_buffer((1 << 20,), "float32", "x", data=source)
        turn = tirx.Var("turn", "int32")
        terms = [tid * 64, tile * 2048, turn, tid & 7]
        index = sum((terms[number] for number in order[1:]), terms[order[0]])
        load = tirx.Evaluate(tirx.BufferLoad(x, [index]))
        loop = tirx.For(turn, 0, turns, tirx.ForKind.UNROLLED, load)
        return work_of(replace(function, func=tirx.PrimFunc(function.func.params, loop))).int32 / function.threads

    orders = list(permutations(range(4)))
    few = {counted(*order, turns=2) for order in orders}
    assert len(few) == 1
    assert {counted(*order, turns=16) for order in orders} == few


def test_elements_far_apart_take_a_sector_each() -> None:
    x = te.placeholder((64, 1024), "float32", "x")
    _, function = lowered([x, te.compute((1024,), lambda i: x[0, i] + x[0, 0], "row")])
    _, across = lowered([x, te.compute((64,), lambda i: x[i, 3], "column")])
    assert work_of(function).requested_bytes * function.tiles == 4096 + 32 * function.tiles
    assert work_of(across).requested_bytes * across.tiles == 64 * 32


def test_what_a_condition_leaves_out_is_not_read() -> None:
    x = te.placeholder((1024,), "float32", "x")
    shifted = te.compute(
        (1024,), lambda i: tirx.if_then_else(i >= 512, x[i - 512], tirx.const(0, "float32")), "shifted"
    )
    _, function = lowered([x, shifted])
    assert function.tiles <= 4
    work = work_of(function)
    assert work.requested_bytes * function.tiles == 512 * 4
    assert work.written_bytes * function.tiles == 1024 * 4


def test_warps_without_work_are_not_counted() -> None:
    _, function = lowered(affine(40))
    assert (function.tiles, function.threads) == (1, 256)
    # Two of eight warps have a thread below 40; the second's idle threads take their turns.
    assert work_of(function).fp32 == 2 * 32


def test_a_serial_reduction_waits_for_its_loads() -> None:
    def mean(rows: int) -> Work:
        x = te.placeholder((rows, 32), "float32", "x")
        r = te.reduce_axis((0, rows), "r")
        return work_of(lowered([x, te.compute((32,), lambda i: te.sum(x[r, i], r), "s")])[1])

    short, long = mean(4096), mean(8192)
    assert long.global_waits == pytest.approx(2 * short.global_waits, rel=0.05)
    assert long.arithmetic_waits == 2 * short.arithmetic_waits


def test_gathers_are_taken_as_scattered() -> None:
    x = te.placeholder((4096,), "float32", "x")
    at = te.placeholder((1024,), "int32", "at")
    _, function = lowered([x, at, te.compute((1024,), lambda i: x[at[i]], "gathered")])
    work = work_of(function)
    assert work.requested_bytes * function.tiles == pytest.approx(1024 * 4 + 1024 * 32)


def test_what_tiles_have_in_common() -> None:
    x = te.placeholder((4096, 128), "float32", "x")
    scale = te.placeholder((128,), "float32", "scale")
    _, function = lowered([x, scale, te.compute((4096, 128), lambda i, j: x[i, j] * scale[j], "scaled")])
    work = work_of(function)
    assert function.tiles > 5
    assert work.common_bytes == pytest.approx(128 * 4)
    assert work.distinct_bytes - work.common_bytes == pytest.approx(4096 * 128 * 4 / function.tiles)


def test_the_same_twice() -> None:
    works = [work_of(lowered(product(100, 60, 77, "float32"))[1]) for _ in range(2)]
    assert works[0] == works[1]
    assert all(isinstance(value, float | int) and np.isfinite(value) for value in vars(works[0]).values())
