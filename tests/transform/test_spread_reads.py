"""Reads at varying multiples of a small axis: they become choices, the steps of opposite recurrences one loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import te, tirx

import souffle
from benchmarks.recurrent import recurrent
from souffle import models
from souffle.choice import stationary
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.codegen.assemble import CompiledKernels
from souffle.pipeline import compile_cuda
from souffle.program import Loop, TEProgram, parts_of
from souffle.program.evaluate import evaluate
from souffle.transform import absorb_ramps, roll, spread_reads
from souffle.tvm_compat import PrimExpr, collect, is_branch, load_indices, loads
from souffle.verify import PROVEN
from tests.testlib import Builder, assert_same_function, calls_made, inputs_for, run_on_cpu_device
from tests.transform.test_ramps import assert_same_values, loops, transformed

pytestmark = pytest.mark.sampled(6)

ORDERS = (
    {"order": "shuffled", "seed": 1, "blocks": 3},
    {"order": "shuffled", "seed": 2, "blocks": 40},
    {"checked": True, "blocks": 2},
)


def the_loop(program: TEProgram) -> Loop:
    """The one loop that a program becomes, which computes what the program does, before and after ramps."""
    spread, decisions = spread_reads(program)
    assert decisions and all(d.accepted and d.stage == "spread" for d in decisions)
    assert_same_values(program, spread)
    rolled = roll(spread)[0]
    for other in (rolled, roll(absorb_ramps(spread)[0])[0]):
        assert_same_values(program, other)
        assert len(loops(other)) == 1
    return loops(rolled)[0]


@pytest.mark.parametrize(
    ("kind", "steps", "batch", "hidden", "attributes", "rolled"),
    [
        # The first two steps of an LSTM have no states before them, or two tensors of them; the last keeps no cells.
        ("LSTM", 9, 1, 8, {}, 6),
        ("LSTM", 8, 3, 12, {}, 5),
        ("GRU", 7, 1, 24, {"linear_before_reset": 0}, 6),
        ("GRU", 6, 3, 8, {"linear_before_reset": 0}, 5),
        ("GRU", 9, 1, 8, {"linear_before_reset": 1}, 8),
        ("RNN", 5, 1, 8, {}, 4),
        ("RNN", 12, 3, 16, {}, 11),
    ],
)
def test_the_steps_of_both_directions_are_one_loop(
    kind: str, steps: int, batch: int, hidden: int, attributes: dict, rolled: int
) -> None:
    model = recurrent(f"{kind} both ways", hidden, hidden, steps=steps, batch=batch, **attributes)
    program = transformed(model)
    assert not loops(roll(program)[0])
    assert the_loop(program).steps == rolled


@pytest.mark.parametrize(
    ("kind", "attributes", "steps", "batch"),
    [("LSTM", {}, 5, 3), ("GRU", {}, 5, 3), ("GRU", {"linear_before_reset": 1}, 5, 1), ("RNN", {}, 8, 1)],
)
def test_layers_upon_each_other_stay_right(kind: str, attributes: dict, steps: int, batch: int) -> None:
    program = transformed(recurrent(f"{kind} both ways", 8, 8, 8, steps=steps, batch=batch, **attributes))
    spread, _ = spread_reads(program)
    rolled, _ = roll(spread)
    assert_same_values(program, spread)
    assert_same_values(program, rolled)
    assert_same_values(program, roll(absorb_ramps(spread)[0])[0])
    assert kind == "LSTM" or loops(rolled)


# Recurrences of several directions, written by hand: direction `i` of step `t` reads the row that `row(i, t)` says.

Row = Callable[[PrimExpr, int], PrimExpr]


def directions(
    count: int, steps: int, row: Row, *, rows: int = 64, width: int = 4, product: bool = False, last: bool = False
) -> TEProgram:
    """The directions along the first axis of the states, or along the last one; `product`: what is read is multiplied
    by weights in the same TE."""
    b = Builder()
    x = b.input(rows, width)
    shape = (width, count) if last else (count, width)
    rng = np.random.default_rng(0)
    weights = b.constant(rng.integers(-2, 3, (count, width, width)).astype(np.float32))
    state = b.relu(b.input(*shape))

    def step(at: int) -> Callable[..., te.Tensor]:
        def made(before: te.Tensor, given: te.Tensor, by: te.Tensor | None = None) -> te.Tensor:
            def element(*place: tirx.Var) -> PrimExpr:
                i, k = reversed(place) if last else place
                if by is None:
                    return te.round((before(*place) + given(row(i, at), k)) * 0.5)
                r = te.reduce_axis((0, width), "r")
                return te.sum(given(row(i, at), r) * by(i, r, k) + before(i, r), [r])

            return te.compute(shape, element)

        return made

    for at in range(steps):
        read = [state, x, weights] if product else [state, x]
        state = b.add(step(at), *read, name="step")
        state = b.map(lambda v: te.round(v * 0.25), state, name="scaled")
    return b.program(state)


def opposite(i: PrimExpr, t: int) -> PrimExpr:
    """Forward from the first row, and backward from row 17."""
    return i * (17 - 4 * t) + 2 * t


def one_row(i: PrimExpr, t: int) -> PrimExpr:
    """As above, from row 8: both read the same row in step 4."""
    return i * (8 - 2 * t) + t


def three_ways(i: PrimExpr, t: int) -> PrimExpr:
    """The first two as above, the third forward by three rows: by chance as far from the second in some step."""
    return tirx.if_then_else(i < 2, i * (20 - 4 * t) + 2 * t, tirx.IntImm("int32", 3 * t + 1))


def halves(i: PrimExpr, t: int) -> PrimExpr:
    """No multiples: each other row twice, from some row on."""
    return tirx.floordiv(i * (9 - 2 * t) + 2 * t, 2) if t < 4 else tirx.floordiv(i * (9 - 2 * t) + 2 * t + 14, 2)


@pytest.mark.parametrize("product", [False, True], ids=["elements", "product"])
@pytest.mark.parametrize(
    ("count", "row", "last"),
    [(2, opposite, False), (2, one_row, False), (2, opposite, True), (4, opposite, False)],
)
def test_directions_written_by_hand(count: int, row: Row, last: bool, product: bool) -> None:
    if product and last:
        pytest.skip("a product has its directions first here")
    rows = 64
    start = (lambda i, t: row(i, t) + 36) if count > 2 else row
    program = directions(count, 9, start, rows=rows * (count - 1), product=product, last=last)
    spread, decisions = spread_reads(program)
    assert len(decisions) == 1 and decisions[0].accepted
    assert_same_function(program, spread)
    rolled, _ = roll(spread)
    (loop,) = loops(rolled)
    assert loop.steps == 9
    # The strides of the directions, in elements.
    assert len({p.stride for p in loop.indexed}) == count
    assert_same_function(program, rolled)


def test_three_directions_of_which_two_were_one_read() -> None:
    def ways(i: PrimExpr, t: int) -> PrimExpr:
        return three_ways(i, t)

    def chosen(t: int) -> Callable[..., te.Tensor]:
        def element(before: te.Tensor, given: te.Tensor, i: tirx.Var, k: tirx.Var) -> PrimExpr:
            two = given(i * (20 - 4 * t) + 2 * t, k)
            read = two if 20 - 2 * t + 20 - 4 * t == 3 * t + 1 else tirx.if_then_else(i < 2, two, given(3 * t + 1, k))
            return te.round((before(i, k) + read) * 0.5)

        return lambda before, given: te.compute((3, 4), lambda i, k: element(before, given, i, k))

    b = Builder()
    x, state = b.input(64, 4), b.relu(b.input(3, 4))
    for t in range(7):
        state = b.map(lambda v: te.round(v * 0.5), b.add(chosen(t), state, x, name="step"), name="scaled")
    program = b.program(state)
    rolled, _ = roll(spread_reads(program)[0])
    (loop,) = loops(rolled)
    assert (loop.steps, {p.stride for p in loop.indexed}) == (7, {8, -8, 12})
    assert_same_function(program, rolled)
    # The choice in the index rather than around the read.
    inside = directions(3, 7, ways)
    spread, _ = spread_reads(inside)
    assert_same_function(inside, spread)
    assert [loop.steps for loop in loops(roll(spread)[0])] == [7]
    assert_same_function(inside, roll(spread)[0])


def test_what_is_guarded_stays_guarded() -> None:
    """The first direction reads nothing, and would read before the first row."""

    def made(t: int) -> Callable[..., te.Tensor]:
        def element(before: te.Tensor, given: te.Tensor, i: tirx.Var, k: tirx.Var) -> PrimExpr:
            read = given(i * (40 - 2 * t) + t - 30, k)
            return te.round((before(i, k) + tirx.if_then_else(i >= 1, read, tirx.const(1, "float32"))) * 0.5)

        return lambda before, given: te.compute((2, 4), lambda i, k: element(before, given, i, k))

    b = Builder()
    x, state = b.input(12, 4), b.relu(b.input(2, 4))
    for t in range(6):
        state = b.map(lambda v: te.round(v * 0.5), b.add(made(t), state, x, name="step"), name="scaled")
    program = b.program(state)
    spread, _ = spread_reads(program)
    assert_same_function(program, spread)
    rows = [int(load_indices(load)[0]) for t in spread.tes for load in reads_of(t) if len(load_indices(load)) == 2
            and isinstance(load_indices(load)[0], tirx.IntImm)]  # fmt: skip
    assert rows and min(rows) >= 0 and max(rows) < 12
    assert_same_function(program, roll(spread)[0])


def reads_of(item: object) -> list:
    return [load for part in parts_of(item) for body in part.op.body for load in loads(body)]


def test_indices_that_are_no_multiples() -> None:
    program = directions(2, 4, halves)
    spread, _ = spread_reads(program)
    assert_same_function(program, spread)
    assert_same_function(program, roll(spread)[0])


def test_only_what_differs_becomes_a_choice() -> None:
    program = directions(2, 5, opposite, product=True)
    spread, _ = spread_reads(program)
    for item in spread.tes:
        for part in parts_of(item):
            branches = [node for body in part.op.body for node in collect(body, tvm.ir.Call) if is_branch(node)]
            assert len(branches) == (1 if part.is_reduction else 0), part.name


def test_nothing_changes_where_nothing_becomes_equal() -> None:
    for program in (
        directions(2, 2, opposite),
        directions(2, 6, lambda i, t: i * 20 + t),
        directions(5, 6, lambda i, t: i * (10 - t) + t),
    ):
        assert spread_reads(program) == (program, ())
    program = directions(2, 6, opposite)
    once, _ = spread_reads(program)
    assert once is not program and spread_reads(once) == (once, ())


@pytest.mark.parametrize("name", ["bert", "swin", "resnext", "efficientnet", "mmoe", "lstm"])
def test_other_networks_are_unchanged(name: str) -> None:
    program = transformed(models.build(name, "tiny"))
    assert spread_reads(program) == (program, ())


def with_weights(equal: bool, steps: int = 6, width: int = 4, *, transposed: bool = False) -> TEProgram:
    """Opposite recurrences of which each step and direction has weights of its own, in one constant."""
    b = Builder()
    rng = np.random.default_rng(0)
    both = rng.integers(-2, 3, (2, width, width)).astype(np.float32)
    rows = [both[row % 2] if equal else rng.integers(-2, 3, (width, width)) for row in range(2 * steps)]
    weights = b.constant(np.ascontiguousarray(np.stack(rows, 1 if transposed else 0), np.float32))
    state = b.relu(b.input(2, width))

    def step(t: int) -> Callable[..., te.Tensor]:
        def made(before: te.Tensor, by: te.Tensor) -> te.Tensor:
            def element(i: tirx.Var, k: tirx.Var) -> PrimExpr:
                r = te.reduce_axis((0, width), "r")
                row = i * (2 * steps - 1 - 4 * t) + 2 * t
                return te.sum(before(i, r) * (by(r, row, k) if transposed else by(row, r, k)), [r])

            return te.compute((2, width), element)

        return made

    for t in range(steps):
        state = b.map(lambda v: te.round(v * 0.25), b.add(step(t), state, weights, name="step"), name="scaled")
    return b.program(state)


@pytest.mark.parametrize("equal", [True, False])
def test_rows_of_a_constant_are_set_apart(equal: bool) -> None:
    """Rows that are equal in all steps are one; others lie in the order of the steps."""
    program = with_weights(equal)
    rolled, _ = roll(spread_reads(program)[0])
    (loop,) = loops(rolled)
    assert loop.steps == 6
    shapes = [tensor.shape for tensor in rolled.constants]
    assert shapes == ([(1, 4, 4)] * 2 if equal else [(6, 1, 4, 4)] * 2)
    assert len(loop.indexed) == (0 if equal else 2)
    assert_same_function(program, rolled)


def test_a_constant_that_is_not_read_by_rows_is_refused() -> None:
    program = with_weights(False, transposed=True)
    rolled, decisions = roll(spread_reads(program)[0])
    assert not loops(rolled)
    assert any("move apart by other pieces than rows" in d.reason for d in decisions)


def test_large_constants_of_each_step_are_proven() -> None:
    """What is asked into the cache ahead is what a step reads."""
    program = with_weights(False, 5, 128)
    rolled, _ = roll(spread_reads(program)[0])
    assert loops(rolled)
    net = compile_cuda(rolled, level="V4", arch="sm_90", cubin=False, verify="values")
    assert net.plan.certificate.verdict == PROVEN and "prefetch_l2" in net.plan.modules[0].text
    inputs = inputs_for(program)
    for name, value in run_on_cpu_device(net.plan, inputs).items():
        np.testing.assert_array_equal(value, evaluate(program, inputs)[name])


def test_unaligned_moves_are_refused_by_roll() -> None:
    program = directions(2, 5, opposite, width=3)
    spread, _ = spread_reads(program)
    rolled, decisions = roll(spread)
    assert not loops(rolled)
    assert any("no multiple of 16" in d.reason for d in decisions if not d.accepted)


def test_a_load_that_moves_unevenly_ends_the_loop() -> None:
    program = directions(2, 9, lambda i, t: i * (40 - 4 * t - (t > 5)) + 2 * t)
    rolled, _ = roll(spread_reads(program)[0])
    assert sorted(loop.steps for loop in loops(rolled)) == [3, 6]
    assert_same_function(program, rolled)


def test_the_cost_grows_with_the_program_alone() -> None:
    short, long = (directions(2, steps, lambda i, t: i * (200 - 2 * t) + t, rows=256) for steps in (20, 80))
    calls = [calls_made(lambda program=program: spread_reads(program)) for program in (short, long)]
    assert calls[1] < 4.5 * calls[0]


# End to end


def compiled(model: object, **options: object) -> CompiledKernels:
    program = souffle.import_onnx(model)
    return compile_cuda(program, **{"level": "V4", "arch": "sm_90", "cubin": False, "verify": "values", **options})


@pytest.mark.thorough("written by hand they are below, and of a whole LSTM in tests/kernel/test_tile_waits.py")
@pytest.mark.parametrize(
    ("kind", "hidden", "steps", "batch", "attributes", "disable"),
    # Products computed in channels alone are predicted to take less here than a loop.
    [("GRU", 32, 6, 3, {"linear_before_reset": 1}, ["channels"]), ("LSTM", 48, 6, 1, {}, ["channels"])],
)
def test_kernels_are_right_and_proven(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    hidden: int,
    steps: int,
    batch: int,
    attributes: dict,
    disable: list[str],
) -> None:
    monkeypatch.setattr(stationary, "pays", lambda made, before: True)
    model = recurrent(f"{kind} both ways", hidden, hidden, steps=steps, batch=batch, **attributes)
    net = compiled(model, disable=disable)
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    accepted = {d.stage for d in net.plan.decisions if d.accepted}
    assert {"spread", "roll", "weights"} <= accepted
    inputs = {"x": np.random.default_rng(1).standard_normal((steps, batch, hidden)).astype(np.float32)}
    found = run_on_cpu_device(net.plan, inputs)
    assert compare(found, onnxruntime_outputs(model, inputs), "fp32").ok
    for options in ORDERS:
        again = run_on_cpu_device(net.plan, inputs, **options)
        for output, value in found.items():
            np.testing.assert_array_equal(again[output], value, err_msg=str(options))


def test_a_kernel_of_opposite_recurrences_gives_the_bits_of_the_reference() -> None:
    program = directions(2, 9, opposite, product=True, width=16)
    net = compile_cuda(program, level="V4", arch="sm_90", cubin=False, verify="values")
    assert net.plan.certificate.verdict == PROVEN
    inputs = inputs_for(program)
    expected = evaluate(program, inputs)
    for options in ORDERS:
        for name, value in run_on_cpu_device(net.plan, inputs, **options).items():
            np.testing.assert_array_equal(value, expected[name], err_msg=str(options))
