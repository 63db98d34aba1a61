"""Reductions computed where readers need several of their elements: cells of many shapes, random reads, prices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import tvm
from tvm import te, tirx

import souffle
from benchmarks.recurrent import recurrent
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.decision import Refused
from souffle.options import LEVELS
from souffle.pipeline import compile_cuda, transform_program
from souffle.placement.interleaving import interleave, interleave_by_cost
from souffle.program import parts_of
from souffle.schedule.stage import flat_stages
from souffle.verify import PROVEN, certify, printed
from tests.placement.trials_on_a100 import trials_of
from tests.testlib import Builder, assert_same_function, run_on_cpu_device
from tests.thorough import sized, some


def forced(model: onnx.ModelProto, level: str = "V3", arch: str = "sm_80"):
    """Kernels in which all that can be is computed where its readers need it, and what each stage of the flow gave."""
    seen: dict[str, object] = {}

    def hook(stage: str, result: object) -> object:
        if stage == "narrow":
            result, seen["decisions"] = interleave(result, lambda *_: "asked for")
        seen[stage] = result
        return result

    options = {"level": level, "reductions": "one_phase", "cubin": False, "arch": arch}
    return compile_cuda(souffle.import_onnx(model), hook=hook, disable=["interleaving"], **options), seen


CELLS = {
    "LSTM": recurrent("LSTM", 16, 16, steps=4),
    "LSTM, two layers": recurrent("LSTM", 24, 40, 40, steps=5),
    "LSTM of primes, batch 3": recurrent("LSTM", 7, 13, steps=3, batch=3),
    "LSTM of one unit": recurrent("LSTM", 3, 1, steps=3),
    "LSTM, input and forget coupled": recurrent("LSTM", 12, 20, steps=3, input_forget=1),
    "GRU, reset behind the product": recurrent("GRU", 10, 24, steps=4, linear_before_reset=1),
    "GRU, reset before the product": recurrent("GRU", 10, 24, steps=4, linear_before_reset=0),
    "wide": recurrent("LSTM", 160, 160, steps=3, batch=2),
    "LSTM both ways": recurrent("LSTM both ways", 9, 20, 20, steps=3),
}


# Of each kind of cell one, and one of odd sizes; several layers take the compiler longest.
FEW = [
    "LSTM of primes, batch 3",
    "LSTM, input and forget coupled",
    "GRU, reset behind the product",
    "GRU, reset before the product",
]


@pytest.mark.parametrize("name", some(FEW, (name for name in CELLS if name not in FEW)))
def test_cells_with_their_gates(name: str) -> None:
    """Gates are in the stage of their cell, and in no memory; right, the same bits in any order, and proven."""
    model = CELLS[name]
    kernels, seen = forced(model)
    assert any(decision.accepted for decision in seen["decisions"]), seen["decisions"]
    certificate = certify(kernels)
    assert certificate.verdict == PROVEN, printed(certificate)
    stages = flat_stages(seen["schedule"])
    inside = [
        part
        for item in seen["two_phase"].tes
        for part in parts_of(item)
        if getattr(part, "placement", None) is not None and part.placement.phase == "elements"
    ]
    assert inside
    for stage in stages:
        placed = [te_ for te_ in stage.tes if te_.placement is not None]
        names = {te_.name for te_ in stage.tes}
        assert all(te_.placement.contraction in names for te_ in placed)
        if placed:
            assert stage.schedule.rule in ("interleaved_sums", "rowwise"), stage.schedule.rule
            assert not any(tensor.name.endswith("_sums") for tensor in stage.outputs)
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    inputs = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    found = run_on_cpu_device(kernels.plan, inputs)
    result = compare(found, onnxruntime_outputs(model, inputs), "fp32")
    assert result.ok, f"largest error {result.error:.2e} of the output's magnitude"
    for seed in (3, 4):
        again = run_on_cpu_device(kernels.plan, inputs, order="shuffled", seed=seed, blocks=3)
        for output, value in found.items():
            np.testing.assert_array_equal(again[output], value)


def test_a_stack_of_cells_waits_once_a_wavefront() -> None:
    """Without, each wavefront has a product and cells, and waits for both."""
    steps = sized(5, 8)
    model = recurrent("LSTM", 64, 64, 64, 64, steps=steps)
    made = forced(model)[0].plan
    options = {"target": "cuda", "device": "cpu", "level": "V3", "arch": "sm_80", "cubin": False, "verify": "off"}
    apart = souffle.compile(model, reductions="one_phase", **options).plan
    waits = [sum(kernel.grid_syncs for kernel in plan.kernels) for plan in (made, apart)]
    wavefronts = steps + 3 - 1
    assert waits[0] <= wavefronts + 1 and waits[1] > 1.5 * waits[0], waits


def sums(b: Builder, rows: int, columns: int, inner: int = 6):
    x = b.input(rows, inner)
    return b.matmul(x, b.input(inner, columns))


Reads = Callable[[te.Tensor, tirx.Var, tirx.Var], list]


def reading(b: Builder, tensor, shape: tuple[int, int], reads: Reads):
    """A reader of some elements of a tensor, each of weight of its own."""

    def element(p: te.Tensor, i: tirx.Var, j: tirx.Var):
        total = tirx.const(0.0, "float32")
        for weight, value in enumerate(reads(p, i, j)):
            total = total + value * tirx.const(1.0 + weight, "float32")
        return te.tanh(total)

    return b.add(lambda p: te.compute(shape, lambda i, j: element(p, i, j)), tensor, name="reader")


@pytest.mark.parametrize("seed", range(sized(20, 40)))
def test_random_reads_give_the_same_function(seed: int) -> None:
    """Two readers at random strides and offsets, some under conditions and beyond the ends; the rest is needed, too."""
    rng = np.random.default_rng(seed)
    rows, columns = (int(rng.integers(4, 13)) for _ in range(2))
    b = Builder()
    t = sums(b, rows, columns)

    def reader() -> tuple[tuple[int, int], Reads]:
        strides = [int(rng.choice([1, 1, 2, 3, -1])) for _ in range(2)]
        swap = bool(rng.integers(2))
        shape = tuple(int(rng.integers(1, max(2, extent // abs(s)))) for extent, s in zip((rows, columns), strides))
        shape = shape[::-1] if swap else shape
        offsets = [tuple(int(v) for v in rng.integers(-2, 7, 2)) for _ in range(int(rng.integers(1, 5)))]

        def reads(p: te.Tensor, i: tirx.Var, j: tirx.Var) -> list:
            own = (j, i) if swap else (i, j)
            found = []
            for offset in offsets:
                at = [axis * s + o for axis, s, o in zip(own, strides, offset)]
                inside = tirx.all(at[0] >= 0, at[0] < rows, at[1] >= 0, at[1] < columns)
                found.append(tirx.if_then_else(inside, p(*at), tirx.const(0.5, "float32")))
            return found

        return shape, reads

    ends = [reading(b, t, *reader()) for _ in range(int(rng.integers(1, 3)))]
    if rng.integers(2):
        ends.append(b.reduce(b.slice(t, 0, rows // 2, rows), 0))
    program = b.program(*ends)
    result, decisions = interleave(program, lambda *_: "asked for")
    assert (result is program) == (not any(decision.accepted for decision in decisions))
    assert_same_function(program, result, seed)


def test_what_others_read_is_all_that_is_left() -> None:
    b = Builder()
    t = sums(b, 8, 12)
    gates = reading(b, t, (6, 6), lambda p, i, j: [p(i, j), p(i, j + 6)])
    last = b.reduce(b.slice(t, 0, 6, 8), 0)
    program, _ = transform_program(b.program(gates, last), LEVELS["V3"], "fp32")
    result, decisions = interleave(program, lambda *_: "asked for")
    assert [decision.accepted for decision in decisions] == [True]
    (product,) = [item for item in result.tes if item.name == t.name]
    assert product.output.shape == (2, 12)
    assert_same_function(program, result)


@pytest.mark.parametrize(
    ("shape", "reads", "reason"),
    [
        ((8, 11), lambda p, i, j: [p(i, j), p(i, j + 1)], "for several of its own"),
        ((8, 6), lambda p, i, j: [p(i, j), p(i, 11 - j)], "in several directions"),
        ((8, 6), lambda p, i, j: [p(0, j), p(1, j)], "for several of its own along axis 0"),
        ((4, 3), lambda p, i, j: [p(i + j, 0), p(i + j, 1)], "for several of its own"),
    ],
)
def test_what_is_refused(shape: tuple[int, int], reads: Reads, reason: str) -> None:
    b = Builder()
    program = b.program(reading(b, sums(b, 8, 12), shape, reads))
    result, (decision,) = interleave(program, lambda *_: "asked for")
    assert result is program and not decision.accepted
    assert reason in decision.reason


@pytest.mark.parametrize("reads", [lambda p, i, j: [p(i, j)], lambda p, i, j: [p(i, j), p(i, tirx.floordiv(j, 2))]])
def test_nothing_is_said_of_other_readers(reads: Reads) -> None:
    """Those that need one element for each of theirs, and those that read at what is no sum of multiples."""
    b = Builder()
    program = b.program(reading(b, sums(b, 8, 12), (8, 6), reads))
    assert interleave(program, lambda *_: "asked for") == (program, ())


def test_an_output_stays_whole() -> None:
    b = Builder()
    t = sums(b, 4, 12)
    program = b.program(t, reading(b, t, (4, 6), lambda p, i, j: [p(i, j), p(i, j + 6)]))
    result, (decision,) = interleave(program, lambda *_: "asked for")
    assert result is program and "need 96 elements, of the 48" in decision.reason


def test_prices_decide() -> None:
    """A cell behind a large batch has its product on tiles that reuse what they read, and stays apart."""
    for batch, taken in ((1, True), (512, False)):
        model = recurrent("LSTM", 256, 256, steps=2, batch=batch)
        program, _ = transform_program(souffle.import_onnx(model), LEVELS["V3"], "fp32")
        trials = trials_of(program)
        _, decisions = interleave(program, lambda item, made, trials=trials: interleave_by_cost(item, made, trials))
        asked = [decision for decision in decisions if "µs apart" in decision.reason]
        assert asked and all(decision.accepted == taken for decision in asked), decisions


def test_without_a_described_device_nothing_is_taken() -> None:
    program, _ = transform_program(souffle.import_onnx(CELLS["LSTM"]), LEVELS["V3"], "fp32")
    undescribed = trials_of(program, described=False)
    answers = []

    def choose(item, made):
        answers.append(interleave_by_cost(item, made, undescribed))
        return answers[-1]

    assert interleave(program, choose)[0] is program
    assert answers and all(isinstance(answer, Refused) for answer in answers)


@pytest.mark.thorough("a smaller one is in tests/test_models_all_levels.py")
@pytest.mark.parametrize(("sizes", "steps"), [((128,) * 5, 6)], ids=["four"])
def test_by_its_own_choice_a_stack_waits_once_a_wavefront(sizes: tuple[int, ...], steps: int) -> None:
    """Right and proven with all that V4 does besides: of the four layers, states would stay between unlike stages."""
    model = recurrent("LSTM", *sizes, steps=steps)
    options = {"target": "cuda", "device": "cpu", "level": "V4", "arch": "sm_90", "cubin": False}
    made = souffle.compile(model, verify="values", **options)
    apart = souffle.compile(model, disable=["interleaving"], verify="off", **options)
    syncs = [sum(kernel.grid_syncs for kernel in network.plan.kernels) for network in (made, apart)]
    wavefronts = steps + len(sizes) - 2
    assert syncs[0] <= wavefronts + 3 < syncs[1], syncs
    seconds = [sum(kernel.predicted.seconds for kernel in network.plan.kernels) for network in (made, apart)]
    assert seconds[0] < seconds[1]
    assert made.certificate.verdict == PROVEN
    # Of twelve steps there are wavefronts enough for a loop.
    assert steps < 12 or any(d.stage == "roll" and d.accepted for d in made.plan.decisions)
    inputs = {"x": np.random.default_rng(2).standard_normal((steps, 1, sizes[0])).astype(np.float32)}
    for network in (made, made.on("cpu", order="shuffled", seed=3, blocks=5)):
        result = compare(network(inputs), onnxruntime_outputs(model, inputs), "fp32")
        assert result.ok, f"largest error {result.error:.2e} of the output's magnitude"


def test_reads_where_data_says_are_left_alone() -> None:
    """Two elements of a reduction, one at a place that an input says."""
    b = Builder()
    t = sums(b, 8, 12)
    rows = b.constant(np.array([3, 1, 0, 7, 2, 2, 5, 6], np.int32))

    def gathered(p: te.Tensor, r: te.Tensor) -> te.Tensor:
        return te.compute((8, 6), lambda i, j: te.tanh(p(i, j) + p(r(i), j + 6)))

    program = b.program(b.add(gathered, t, rows, name="reader"))
    assert interleave(program, lambda *_: "asked for") == (program, ())


def test_ranges_that_vary_are_left_alone() -> None:
    """A reduction over as many values as its element says, of which a reader needs two."""
    b = Builder()
    x = b.input(12, 9)

    def triangle(p: te.Tensor) -> te.Tensor:
        def element(i: tirx.Var) -> object:
            k = tirx.IterVar(tvm.ir.Range(0, tirx.floordiv(i, 2) + 1), tirx.Var("k", "int32"), 2)
            return te.sum(p(i, k.var), axis=[k])

        return te.compute((12,), element)

    t = b.add(triangle, x)
    program = b.program(b.add(lambda p: te.compute((6,), lambda i: te.tanh(p(i) + p(i + 6))), t))
    assert interleave(program, lambda *_: "asked for") == (program, ())


def test_more_places_than_are_looked_at() -> None:
    b = Builder()
    t = b.reduce(b.input(3, 1 << 21), 0)
    program = b.program(b.add(lambda p: te.compute((1 << 20,), lambda i: te.tanh(p(i) + p(i + (1 << 20)))), t))
    result, (decision,) = interleave(program, lambda *_: "asked for")
    assert result is program and "more than 1048576 places" in decision.reason
