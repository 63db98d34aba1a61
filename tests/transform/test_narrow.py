"""Tensors stored in the type they are read in: what becomes narrow, what gets a copy, and that no bit changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tvm import te, tirx

import souffle
from souffle import models
from souffle.pipeline import compile_cuda
from souffle.program import FusedTE, Loop, Tensor, TEProgram, parts_of
from souffle.program.evaluate import evaluate
from souffle.schedule.stage import flat_stages
from souffle.transform import mixed_precision, narrow, roll, vertical
from tests.testlib import Builder, inputs_for, random_program

RNG = np.random.default_rng(0)


def weights(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def composed(program: TEProgram) -> TEProgram:
    return vertical(mixed_precision(program)[0])[0]


def assert_same_bits(before: TEProgram, after: TEProgram) -> None:
    inputs = [RNG.standard_normal(tensor.shape).astype(tensor.dtype) for tensor in before.inputs]
    expected, found = evaluate(before, inputs), evaluate(after, inputs)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name].view(np.uint8), value.view(np.uint8))


def products(program: TEProgram) -> list[list[str]]:
    """The types that each sum of products reads from memory."""
    parts = [part for item in program.tes for part in parts_of(item)]
    return [[t.dtype for t in part.inputs] for part in parts if part.is_reduction and len(part.inputs) == 2]


def test_what_is_only_converted_is_stored_so() -> None:
    b = Builder()
    hidden = b.relu(b.matmul(b.input(32, 64), b.constant(weights(64, 64))))
    before = composed(b.program(b.matmul(hidden, b.constant(weights(64, 64)))))
    after, decisions = narrow(before)
    assert products(before)[1] == ["float32", "float16"] and products(after)[1] == ["float16", "float16"]
    (stored,) = (d for d in decisions if d.accepted)
    assert stored.subject == hidden.name and f"{hidden.nbytes // 2} bytes less written" in stored.reason
    assert len(after.tes) == len(before.tes) and [len(parts_of(item)) for item in after.tes] == [2, 1]
    assert [t.dtype for t in after.inputs] == ["float32"] and after.output_names == before.output_names
    assert_same_bits(before, after)


def test_a_sum_is_converted_by_a_statement_after_it() -> None:
    b = Builder()
    total = b.matmul(b.input(32, 64), b.constant(weights(64, 64)))
    before = composed(b.program(b.matmul(total, b.constant(weights(64, 64)))))
    after, _ = narrow(before)
    first = after.tes[0]
    assert isinstance(first, FusedTE) and [t.dtype for t in first.outputs] == ["float16"]
    assert first.internal == (total,)
    assert_same_bits(before, after)


def test_a_residual_keeps_the_wide_tensor_beside_a_copy() -> None:
    b = Builder()
    x = b.relu(b.input(32, 64))
    before = composed(b.program(b.plus(b.matmul(x, b.constant(weights(64, 64))), x)))
    after, decisions = narrow(before)
    assert [[t.dtype for t in item.outputs] for item in after.tes] == [["float32", "float16"], ["float32"]]
    (copied,) = (d for d in decisions if d.accepted)
    assert f"{x.nbytes // 2} bytes more written" in copied.reason and "read an element 64 times" in copied.reason
    assert_same_bits(before, after)


def test_an_output_of_the_program_stays_wide() -> None:
    b = Builder()
    x = b.relu(b.input(32, 64))
    before = composed(b.program(x, b.matmul(x, b.constant(weights(64, 64)))))
    after, _ = narrow(before)
    assert after.outputs[0] is x and after.tes[0].outputs[0] is x and products(after) == [["float16", "float16"]]
    assert_same_bits(before, after)


def test_a_copy_that_is_read_once_is_refused() -> None:
    b = Builder()
    x = b.relu(b.input(32, 64))
    half = b.map(lambda v: v.astype("float16"), x)
    before = b.program(b.plus(half, half), b.plus(x, x))
    same, (decision,) = narrow(before)
    assert same is before and not decision.accepted and "no byte less" in decision.reason


def test_readers_that_want_different_types_are_refused() -> None:
    b = Builder()
    x = b.relu(b.input(32, 64, dtype="float64"))
    before = b.program(*(b.map(lambda v, to=to: v.astype(to), x) for to in ("float16", "float32")))
    same, (decision,) = narrow(before)
    assert same is before and "float16, float32" in decision.reason


def test_an_input_keeps_its_type() -> None:
    b = Builder()
    before = composed(b.program(b.matmul(b.input(32, 64), b.constant(weights(64, 64)))))
    assert narrow(before)[0] is before


def test_other_conversions_are_none_of_these() -> None:
    b = Builder()
    x = b.relu(b.input(32, 64, dtype="int64"))
    before = b.program(b.map(lambda v: v.astype("int32"), x))
    assert narrow(before) == (before, ())


@pytest.mark.parametrize("kind", [tirx.if_then_else, tirx.Select])
def test_a_conversion_goes_into_a_choice(kind) -> None:
    """As where a padded image is converted: the padding is a constant, and the rest is read."""
    b = Builder()
    x, y = b.relu(b.input(32, 64)), b.relu(b.input(32, 64))

    def chosen(p, q):
        from_x = p > tirx.const(0.5, "float32")
        return kind(from_x, kind(q > 0.25, p, tirx.const(0.1, "float32")), q).astype("float16")

    program = b.program(b.map(chosen, x, y))
    assert narrow(program)[0] is program, "the conditions read both as they are"

    def padded(p):
        k = te.reduce_axis((0, 64), "k")
        value = lambda i, k: kind(i < 32, p[tirx.min(i, 31), k], tirx.const(0.1, "float32"))  # noqa: E731
        return te.compute((40,), lambda i: te.sum(value(i, k).astype("float16").astype("float32"), axis=[k]))

    b = Builder()
    before = b.program(b.add(padded, b.relu(b.input(32, 64))))
    after, _ = narrow(before)
    assert [t.dtype for t in after.tes[-1].inputs] == ["float16"]
    assert_same_bits(before, after)


def expressions(program: TEProgram) -> set[te.ComputeOp]:
    return {part.op for item in program.tes for part in parts_of(item)}


def layers(count: int) -> TEProgram:
    b = Builder()
    x = b.input(16, 32)
    for _ in range(count):
        x = b.plus(b.tanh(b.bias(b.matmul(x, b.constant(weights(32, 32))), b.constant(weights(32)))), x)
    return b.program(x)


def test_equal_layers_stay_one_loop() -> None:
    before = composed(layers(5))
    (loop,) = (item for item in roll(before)[0].tes if isinstance(item, Loop))
    after, decisions = narrow(before, alike=True)
    assert_same_bits(before, after)
    rolled, _ = roll(after)
    (narrower,) = (item for item in rolled.tes if isinstance(item, Loop))
    assert narrower.steps == loop.steps == 5
    assert products(after) == [["float16", "float16"]] * 5
    assert any("as TEs equal to them do" in d.reason for d in decisions), "the first layer reads an input"
    assert any("as TEs equal to it have" in d.reason for d in decisions), "nothing reads the copy of the last"
    assert_same_bits(before, rolled)
    apart, _ = narrow(before)
    assert products(apart) == [["float32", "float16"], *[["float16", "float16"]] * 4]


def test_equal_layers_share_expressions() -> None:
    """One expression of the imported program for all layers stays one for all of them."""
    before = composed(souffle.import_onnx(models.build("bert")))
    after, decisions = narrow(before, alike=True)
    copies = {t.shape for item in after.tes for t in item.outputs if t.name.endswith("_fp16")}
    assert len(expressions(after)) - len(copies) <= len(expressions(before)) < sum(len(parts_of(i)) for i in before.tes)
    assert len([d for d in decisions if d.accepted]) > len(copies) > 0


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_keep_every_bit(seed: int) -> None:
    before = composed(random_program(random.Random(seed).choice, 12, seed))
    for alike in (False, True):
        after, _ = narrow(before, alike=alike)
        inputs = inputs_for(before, seed)
        for name, value in evaluate(before, inputs).items():
            np.testing.assert_array_equal(evaluate(after, inputs)[name], value)


@pytest.mark.parametrize(("name", "level"), [("bert", "V2"), ("bert", "V3")])
def test_networks_keep_every_bit_and_move_fewer_bytes(name: str, level: str) -> None:
    model = models.build(name)
    inputs, found, stages = models.random_inputs(model, seed=3), {}, {}
    for wanted in (False, True):
        seen: dict[str, object] = {}

        def hook(stage: str, result: object, seen: dict = seen, wanted: bool = wanted) -> object:
            seen[stage] = result if wanted or stage != "narrow" else seen["vertical"]
            return seen[stage]

        # On the device a rule may add up in another order for operands of another type, so bits are compared as TEs.
        options = {"precision": "mixed", "reductions": "one_phase", "cubin": False}
        plan = compile_cuda(souffle.import_onnx(model), level=level, hook=hook, **options).plan
        stages[wanted] = flat_stages(seen["schedule"])
        moved = sum(launch.bytes_read + launch.bytes_written for launch in plan.launches)
        found[wanted] = evaluate(seen["narrow"], inputs), moved
    for output, value in found[False][0].items():
        np.testing.assert_array_equal(found[True][0][output], value)
    assert found[True][1] < found[False][1]
    conversions = [s for s in stages[True] if len(s.tes) == 1 and s.name.endswith("_fp16")]
    graph_inputs = {tensor.name for tensor in souffle.import_onnx(model).inputs}
    assert all(s.inputs[0].name in graph_inputs for s in conversions), "a copy is stored by the stage that defines it"


def test_operands_of_bert_s_products_lie_in_memory_as_fp16() -> None:
    seen: dict[str, object] = {}

    def hook(stage: str, result: object) -> object:
        seen[stage] = result
        return result

    program = souffle.import_onnx(models.build("bert"))
    compile_cuda(program, level="V3", precision="mixed", reductions="one_phase", cubin=False, hook=hook)
    stages = [s for s in flat_stages(seen["schedule"]) if s.schedule.tensor_cores]
    assert stages
    for stage in stages:
        product = next(te_ for te_ in stage.tes if te_.is_reduction)
        assert {tensor.dtype for tensor in product.inputs} == {"float16"}, stage.name


def test_a_program_without_conversions_is_the_same() -> None:
    program = layers(2)
    assert narrow(program) == (program, ())
    assert isinstance(program.outputs[0], Tensor)
