"""Two-phase reductions: every combiner, ragged chunks, what stands before and behind, loops, and equal bits always.

And which the cost model shares among blocks: those that leave a device idle, by more than it may err.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import onnx
import pytest
from tvm import te, tirx

import souffle
from souffle import models
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.cost.kernel import RELATIVE_ERROR
from souffle.decision import Refused
from souffle.errors import OptionError
from souffle.pipeline import compile_cuda
from souffle.placement import place_reductions
from souffle.placement.stage_trial import seconds_of
from souffle.placement.two_phase import Phases, Split, split_by_cost, two_phase
from souffle.program import FusedTE, Loop, Tensor, TEProgram, parts_of
from souffle.program.evaluate import evaluate
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.stage import flat_stages
from souffle.transform import roll, vertical
from tests.placement.trials_on_a100 import trials_of
from tests.testlib import Builder, assert_same_function, inputs_for, random_program, run_on_cpu_device
from tests.thorough import some

pytestmark = pytest.mark.sampled(6)

ARGMAX = te.comm_reducer(
    lambda x, y: (
        tirx.Select(tirx.any(x[1] > y[1], tirx.all(x[1] == y[1], x[0] < y[0])), x[0], y[0]),
        tirx.Select(x[1] >= y[1], x[1], y[1]),
    ),
    lambda index, value: (tirx.const(2**31 - 1, index), tirx.min_value(value)),
)
PRODUCT = te.comm_reducer(lambda x, y: x * y, lambda dtype: tirx.const(1, dtype))
KINDS = {"sum": te.sum, "max": te.max, "min": te.min, "product": PRODUCT}


def into(parts: int):
    return lambda te_: Split(parts, "asked for")


def rows(kind: str, extent: int, dtype: str = "float32") -> TEProgram:
    b = Builder()

    def made(p: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, extent), "k")
        return te.compute((4,), lambda i: KINDS[kind](p[i, k], axis=k), name="total")

    return b.program(b.add(made, b.input(4, extent, dtype=dtype)))


def small(program: TEProgram) -> list[np.ndarray]:
    """Values of which every product and sum is exact."""
    rng = np.random.default_rng(0)
    return [rng.choice([-2, -1, -1, 1, 1, 2], size=t.shape).astype(t.dtype) for t in program.inputs]


def assert_exact(program: TEProgram, result: TEProgram) -> None:
    inputs = small(program)
    expected, found = evaluate(program, inputs), evaluate(result, inputs)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize(("extent", "parts", "chunks"), [(64, 4, 4), (60, 8, 6), (61, 8, 8), (7, 8, 7), (9, 4, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_one_axis(kind: str, extent: int, parts: int, chunks: int) -> None:
    """Of one size where a divisor is near; otherwise the identity stands beyond the end."""
    program = rows(kind, extent)
    result, (decision,) = two_phase(program, into(parts))
    partial, total = result.tes
    assert decision.accepted and decision.reason == "asked for"
    assert partial.output.shape == (chunks, 4) and total.output is program.outputs[0]
    assert partial.reduction_shape == (-(-extent // chunks),) and total.reduction_shape == (chunks,)
    assert_exact(program, result)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "int64", "uint8"])
def test_other_types(dtype: str) -> None:
    b = Builder()
    x = b.input(3, 37, dtype=dtype)
    program = b.program(b.reduce(x, 1, "max"), b.reduce(x, 0, "max"))
    assert_same_bits_for(program, two_phase(program, into(3))[0], np.arange(111).reshape(3, 37).astype(dtype))


def assert_same_bits_for(program: TEProgram, result: TEProgram, *inputs: np.ndarray) -> None:
    assert len(result.tes) > len(program.tes)
    expected, found = evaluate(program, list(inputs)), evaluate(result, list(inputs))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("parts", [2, 3, 5, 16])
def test_a_reduction_of_tuples(parts: int) -> None:
    b = Builder()
    x = b.input(5, 23)
    k = te.reduce_axis((0, 23), "k")
    p = te.placeholder((5, 23), name="p")
    both = te.compute((5,), lambda i: ARGMAX((k.var, p[i, k]), axis=k), name="argmax")
    place, best = Tensor("place", (5,), "int32"), Tensor("best", (5,), "float32")
    op = both[0].op
    origin = souffle.program.Origin(("argmax",), ("ArgMax",), "argmax")
    b.tes.append(souffle.program.make_te("argmax", list(op.axis), list(op.body), [(p, x)], origin, [place, best]))
    program = b.program(place, best)
    result, _ = two_phase(program, into(parts))
    assert [len(item.outputs) for item in result.tes] == [2, 2]
    values = np.random.default_rng(0).integers(0, 4, (5, 23)).astype(np.float32)  # many are equal
    assert_same_bits_for(program, result, values)
    np.testing.assert_array_equal(evaluate(result, [values])["out0"], values.argmax(1))


def test_several_axes_are_shared_from_the_outermost() -> None:
    b = Builder()

    def made(p: te.Tensor) -> te.Tensor:
        axes = [te.reduce_axis((0, extent), "k") for extent in (3, 5, 4)]
        return te.compute((6,), lambda i: te.sum(p[(axes[0], i, *axes[1:])], axis=axes))

    program = b.program(b.add(made, b.input(3, 6, 5, 4)))
    shapes = {2: (2, 6), 3: (3, 6), 8: (3, 2, 6), 16: (3, 5, 6), 60: (3, 5, 4, 6)}
    for parts, shape in shapes.items():
        result, _ = two_phase(program, into(parts))
        assert result.tes[0].output.shape == shape
        assert_exact(program, result)


def test_what_stands_before_and_behind_stays_on_its_side() -> None:
    b = Builder()
    x, w, bias = b.input(6, 40), b.input(40, 8), b.input(8)
    program, _ = vertical(b.program(b.relu(b.bias(b.matmul(x, w), bias))))
    (whole,) = program.tes
    result, _ = two_phase(program, into(4))
    partial, total = result.tes
    assert isinstance(whole, FusedTE) and isinstance(total, FusedTE) and total.parts[1:] == whole.parts[1:]
    assert partial.inputs == (x, w) and bias in total.inputs and total.outputs == whole.outputs
    assert_exact(program, result)


def test_a_prologue_goes_with_the_first_phase() -> None:
    b = Builder()
    x, gate, w = b.input(6, 40), b.input(40), b.constant(np.ones((40, 8), np.float32))
    scaled = b.add(lambda p, q: te.compute((6, 40), lambda i, j: p[i, j] * q[j]), x, gate)
    program, _ = vertical(b.program(b.relu(b.matmul(scaled, w))))
    (whole,) = program.tes
    assert whole.prologue
    result, _ = two_phase(program, into(4))
    assert result.tes[0].prologue == whole.prologue and not result.tes[1].prologue
    assert_exact(program, result)


def test_refusals_have_reasons() -> None:
    b = Builder()
    x = b.input(4, 1)
    program = b.program(b.reduce(x, 1))
    same, (decision,) = two_phase(program, into(4))
    assert same is program and not decision.accepted and "cannot be shared" in decision.reason
    same, (decision,) = two_phase(rows("sum", 64), lambda te_: Refused("not asked for"))
    assert not decision.accepted and decision.reason == "not asked for" and len(same.tes) == 1
    b = Builder()
    (elementwise,) = b.program(b.relu(b.input(4))).tes
    assert Phases.of(elementwise, 2) == Refused("it is no reduction")


def test_a_range_that_varies_is_left_whole() -> None:
    """Adaptive pooling of 7 values into 3."""
    b = Builder()

    def made(p: te.Tensor) -> te.Tensor:
        def pooled(i):
            start, end = i * 7 // 3, ((i + 1) * 7 + 2) // 3
            k = te.reduce_axis((0, end - start), "k")
            return te.sum(p[start + k], axis=k)

        return te.compute((3,), pooled)

    program = b.program(b.add(made, b.input(7)))
    same, (decision,) = two_phase(program, into(2))
    assert same is program and "varies" in decision.reason


def test_names_that_are_taken_are_not_used() -> None:
    b = Builder()
    total = b.reduce(b.input(4, 64), 1)
    b.inputs.append(Tensor(f"{total.name}_partial", (4,), "float32"))
    program = b.program(b.plus(total, b.inputs[-1]))
    result, _ = two_phase(program, into(4))
    assert len({tensor.name for tensor in result.tensors()}) == len(list(result.tensors()))
    assert_exact(program, result)


@pytest.mark.parametrize("seed", range(20))
def test_random_programs(seed: int) -> None:
    """Whole numbers, so that every grouping gives the same bits."""
    choose = random.Random(seed)
    program, _ = vertical(random_program(choose.choice, 14, seed))
    result, decisions = two_phase(program, lambda te_: Split(choose.choice((1, 2, 3, 4, 7)), "chosen"))
    assert len(decisions) == sum(getattr(item, "is_reduction", False) for item in program.tes)
    assert_same_function(program, result)


def layers(count: int) -> TEProgram:
    b, rng = Builder(), np.random.default_rng(0)
    x = b.input(4, 16)
    w = [b.constant(rng.integers(-1, 2, (16, 16)).astype(np.float32)) for _ in range(count)]
    for n in range(count):
        x = b.map(lambda v: tirx.max(tirx.min(v, 8.0), -8.0), b.matmul(x, w[n]), name="clip")
    return vertical(b.program(x))[0]


def test_equal_layers_stay_a_loop() -> None:
    program = layers(5)
    result, _ = two_phase(program, into(4))
    (loop,) = (item for item in roll(result)[0].tes if isinstance(item, Loop))
    assert loop.steps == 5 and len(loop.body) == 2
    assert_same_function(program, roll(result)[0])


def test_layers_of_one_expression_are_asked_once() -> None:
    program = vertical(souffle.import_onnx(models.build("bert")))[0]
    asked = []

    def split(te_) -> Split:
        asked.append(te_)
        return Split(2, "asked for")

    result, decisions = two_phase(program, split)
    assert len(asked) < len(decisions) == sum(d.accepted for d in decisions)
    ops = [part.op for item in result.tes for part in parts_of(item)]
    assert len(set(ops)) < len(ops)


@cache
def network(name: str) -> onnx.ModelProto:
    return models.build(name)


def forced(name: str, parts: int, precision: str, level: str = "V3"):
    """A network of which every reduction that can be is split, and the stages that it has."""
    seen: dict[str, object] = {}

    def hook(stage: str, result: object) -> object:
        if stage == "two_phase":
            result, seen["split"] = two_phase(result, into(parts))
        seen[stage] = result
        return result

    program = souffle.import_onnx(network(name))
    options = {"level": level, "precision": precision, "reductions": "one_phase", "cubin": False}
    return compile_cuda(program, hook=hook, **options).plan, seen


@pytest.mark.parametrize(
    ("name", "parts", "precision", "level"),
    some(
        [("bert", 2, "mixed", "V3"), ("mmoe", 4, "fp32", "V4")],
        [(name, 3, "fp32", "V3") for name in models.NAMES],
    ),
)
def test_networks_of_split_reductions(name: str, parts: int, precision: str, level: str) -> None:
    plan, seen = forced(name, parts, precision, level)
    assert sum(d.accepted for d in seen["split"]) > 1
    inputs = models.random_inputs(network(name), seed=1)
    found = run_on_cpu_device(plan, inputs)
    result = compare(found, onnxruntime_outputs(network(name), inputs), precision)
    assert result.ok, f"largest error {result.error:.2e} of the output's magnitude"
    for seed in (3, 4):
        again = run_on_cpu_device(plan, inputs, order="shuffled", seed=seed, blocks=3)
        for output, value in found.items():
            np.testing.assert_array_equal(again[output], value)


def test_phases_are_stages_with_a_grid_sync_between() -> None:
    seen: dict[str, object] = {}

    def hook(stage: str, result: object) -> object:
        seen[stage] = two_phase(result, into(8))[0] if stage == "two_phase" else result
        return seen[stage]

    for kind in ("sum", "max"):
        program = rows(kind, 4096)
        plan = compile_cuda(program, level="V3", reductions="one_phase", cubin=False, hook=hook).plan
        partial, total = flat_stages(seen["schedule"])
        assert partial.outputs == total.inputs and len(plan.launches) == 1
        (kernel,) = plan.kernels
        assert kernel.grid_syncs == 1
        inputs = inputs_for(program)
        np.testing.assert_array_equal(
            run_on_cpu_device(plan, inputs, order="shuffled")["out0"], evaluate(program, inputs)["out0"]
        )


def test_the_option() -> None:
    b = Builder()
    program = b.program(b.matmul(b.input(16, 8192), b.constant(np.ones((8192, 16), np.float32))))
    plans = {
        how: compile_cuda(program, level=level, arch="sm_80", reductions=how, cubin=False).plan
        for how, level in (("ordered", "V3"), ("one_phase", "V3"))
    }
    accepted = {how: [d for d in plan.decisions if d[0] == "two-phase" and d[2]] for how, plan in plans.items()}
    assert len(accepted["ordered"]) == 1 and not accepted["one_phase"]
    assert "µs" in accepted["ordered"][0][3]
    below = compile_cuda(program, level="V2", arch="sm_80", cubin=False).plan
    assert not any(d[0] == "two-phase" for d in below.decisions) and len(below.launches) == 1
    with pytest.raises(OptionError, match="ordered, one_phase"):
        compile_cuda(program, reductions="atomic", cubin=False)


def asked(program: TEProgram, *, described: bool = True) -> list[Split | Refused]:
    """What the cost model answers for the reductions of a program."""
    trials = trials_of(program, described=described)
    answers: list[Split | Refused] = []

    def record(whole) -> Split | Refused:
        answers.append(split_by_cost(whole, trials))
        return answers[-1]

    two_phase(program, record)
    return answers


def product(rows: int, inner: int, columns: int) -> TEProgram:
    b = Builder()
    total = b.matmul(b.input(rows, inner), b.constant(np.ones((inner, columns), np.float32)))
    return vertical(b.program(b.relu(b.bias(total, b.constant(np.ones(columns, np.float32))))))[0]


def column_sums(rows: int, columns: int) -> TEProgram:
    b = Builder()
    return b.program(b.reduce(b.input(rows, columns), 0))


def softmax_of(rows: int, columns: int) -> TEProgram:
    b = Builder()
    x = b.grouped("softmax").input(rows, columns)
    return b.program(b.reduce(x, 1, "max"), b.reduce(x, 1))


@pytest.mark.parametrize("program", [product(32, 16384, 64), product(7, 9000, 33), column_sums(100000, 40)])
def test_few_long_reductions_are_split(program: TEProgram) -> None:
    (answer,) = asked(program)
    assert isinstance(answer, Split) and answer.parts > 4
    now, then = (float(text.split(" µs")[0].split()[-1]) for text in answer.reason.split(" µs")[0:2])
    assert then < now and "tile" in answer.reason and "a grid sync more" in answer.reason


def test_longer_ranges_are_shared_by_no_fewer() -> None:
    (short,), (longer,), (longest,) = (asked(column_sums(rows, 40)) for rows in (64, 4096, 65536))
    assert isinstance(short, Refused) and longer.parts <= longest.parts


def test_the_fastest_number_of_parts_is_found() -> None:
    """Beside numbers worked out one by one: times rise and fall with the parts, as their tiles fill waves or do not."""
    chosen, rising = set(), False
    for rows, inner, columns in ((96, 6144, 640), (100, 5000, 300), (64, 3000, 200)):
        program = product(rows, inner, columns)
        trials = trials_of(program)
        (whole,) = (item for item in program.tes if item.is_reduction)
        answer = split_by_cost(whole, trials)
        assert isinstance(answer, Split)
        seconds, first = {}, {}
        for parts in (2, 3, 4, 6, 8):
            phases = Phases.of(whole, parts)
            stages = trials.stages((phases.partial, phases.total))
            first[parts], last = map(seconds_of, trials.predicted(stages))
            seconds[parts] = first[parts] + last
        assert answer.seconds == pytest.approx(min(seconds.values()), rel=1e-6)
        # Of parts that are about as fast with both phases, the fastest without the second.
        near = [parts for parts in seconds if seconds[parts] <= RELATIVE_ERROR * answer.seconds]
        other = min(near, key=first.__getitem__)
        assert (answer.parts if answer.joined is None else answer.joined.parts) == other
        chosen.add(answer.parts)
        rising |= any(seconds[few] < seconds[more] for few, more in ((2, 3), (3, 4), (4, 6)))
    assert rising and any(parts & (parts - 1) for parts in chosen)


def test_parts_for_what_computes_the_second_phase_are_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(2, "two", 2e-6, Split(3, "three", 2.1e-6))
    monkeypatch.setattr("souffle.placement.reductions.split_by_cost", lambda item, trials: split)
    scheduler = GpuScheduler(device_for("sm_80"))
    found = {
        on_chip: place_reductions(product(32, 600, 64), None, scheduler, frozenset(on_chip))
        for on_chip in ((), ("weights",), ("reuse",), ("channels",))
    }
    parts = {
        on_chip: [program.tes[0].outputs[0].shape[0] for program, _ in placed] for on_chip, placed in found.items()
    }
    assert parts == {(): [2], ("weights",): [2], ("reuse",): [2, 3], ("channels",): [2, 3]}
    (_, first), (_, second) = found["reuse",]
    assert [d.reason for d in first if d.accepted] == ["two"] and [d.reason for d in second if d.accepted] == ["three"]
    assert {d.stage for d in second if d.accepted} != {d.stage for d in first if d.accepted}


@pytest.mark.parametrize(
    ("program", "described", "reason"),
    [
        (product(4096, 64, 4096), True, "keep all 108 multiprocessors busy"),
        (product(8, 32, 8), True, "spread evenly"),
        (softmax_of(4, 100000), True, "same rows"),
        (product(32, 16384, 64), False, "described"),
    ],
    ids=["wide", "not worth a grid sync", "of one operator", "no device"],
)
def test_what_is_left_whole(program: TEProgram, described: bool, reason: str) -> None:
    answers = asked(program, described=described)
    assert answers and all(isinstance(answer, Refused) and reason in answer.reason for answer in answers)
