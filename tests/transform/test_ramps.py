"""Ramps: partial steps before and after a repeated piece become steps of its loop, in which some rows idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import te, tirx

import souffle
from benchmarks.recurrent import recurrent
from souffle.options import LEVELS
from souffle.pipeline import transform_program
from souffle.program import Loop, Tensor, TEProgram, fuse
from souffle.transform import absorb_ramps, roll
from souffle.transform.ramps.outer_elements import Pad, with_outer_elements
from tests.testlib import Builder

pytestmark = pytest.mark.sampled(6)

RNG = np.random.default_rng(0)


def transformed(model: onnx.ModelProto, precision: str = "fp32") -> TEProgram:
    return transform_program(souffle.import_onnx(model), LEVELS["V4"], precision)[0]


def assert_same_values(one: TEProgram, other: TEProgram, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    named = zip(one.input_names, one.inputs, strict=True)
    inputs = {name: rng.standard_normal(tensor.shape).astype(tensor.dtype) for name, tensor in named}
    expected, found = one.run(inputs), other.run(inputs)
    assert list(expected) == list(found)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, equal_nan=True, err_msg=name)


def loops(program: TEProgram) -> list[Loop]:
    return [item for item in program.tes if isinstance(item, Loop)]


def absorbed(program: TEProgram) -> tuple[TEProgram, Loop]:
    """The program with its ramps absorbed, which is right, and the one loop that it becomes."""
    result, decisions = absorb_ramps(program)
    assert [d.accepted for d in decisions if d.stage == "ramps"].count(True) >= 1, decisions
    assert_same_values(program, result)
    rolled, _ = roll(result)
    assert_same_values(program, rolled)
    return result, max(loops(rolled), key=lambda loop: len(loop.body) * loop.steps)


def copies_with_zeros(program: TEProgram) -> list[str]:
    return [item.name for item in program.tes if item.name.endswith("_padded") and not item.is_reduction]


@pytest.mark.parametrize(
    ("kind", "layers", "steps", "batch", "hidden", "attributes", "wavefronts"),
    [
        ("LSTM", 1, 9, 3, 8, {}, 9),
        ("LSTM", 2, 9, 1, 12, {}, 10),
        ("LSTM", 3, 8, 1, 8, {}, 10),
        ("LSTM", 3, 12, 3, 8, {}, 14),
        ("LSTM", 4, 10, 1, 8, {}, 14),
        ("GRU", 1, 9, 1, 8, {"linear_before_reset": 1}, 9),
        ("GRU", 2, 8, 3, 8, {"linear_before_reset": 1}, 9),
        ("GRU", 4, 20, 3, 8, {"linear_before_reset": 1}, 23),
        ("GRU", 3, 9, 1, 8, {}, 12),
        ("RNN", 1, 6, 1, 20, {}, 6),
        ("RNN", 3, 9, 1, 8, {}, 11),
    ],
)
def test_all_wavefronts_of_a_stack_are_steps_of_one_loop(
    kind: str, layers: int, steps: int, batch: int, hidden: int, attributes: dict, wavefronts: int
) -> None:
    program = transformed(recurrent(kind, *[hidden] * (layers + 1), steps=steps, batch=batch, **attributes))
    result, loop = absorbed(program)
    assert loop.steps == wavefronts
    outside = [item for item in roll(result)[0].tes if not isinstance(item, Loop) and item.is_reduction]
    assert len(outside) == 1, "the product of the inputs alone"
    assert copies_with_zeros(result) == []


def test_a_layer_alone_needs_no_masks() -> None:
    result, _ = absorbed(transformed(recurrent("LSTM", 8, 8, steps=9)))
    assert not any(tensor.name.startswith("active_rows") for tensor in result.constants)


def test_a_product_of_the_inputs_that_is_an_output_too_is_copied() -> None:
    program = transformed(recurrent("LSTM", 8, 8, 8, steps=9))
    product = next(item for item in program.tes if item.is_reduction)
    shown = replace(program, outputs=(*program.outputs, *product.outputs), output_names=(*program.output_names, "x"))
    assert copies_with_zeros(absorbed(program)[0]) == []
    assert copies_with_zeros(absorbed(shown)[0]) == [f"{product.name}_padded"]


def with_zeros_around(fused: bool, apart: bool = False) -> tuple[TEProgram, dict[Tensor, Pad]]:
    """Rows 2 to 6 of a copy of a product, with or without what is fused with it, that has rows around."""
    b = Builder()
    product = b.matmul(b.input(5, 4), b.constant(RNG.standard_normal((4, 6)).astype(np.float32)))
    value = b.relu(product) if fused else product
    if apart:
        value = b.add(lambda p: te.compute((5, 6), lambda i, j: p(4 - i, j) * 2.0), product)
    padded = b.pad(value, 0, 2, 3)
    program = b.program(b.scaled(b.slice(padded, 0, 2, 7), 3.0))
    if fused or apart:
        whole = fuse(program.tes[:2], [value])
        program = replace(program, tes=(whole, *program.tes[2:]))
    return program, {value: Pad(0, 2, 3, padded)}


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_read_around_a_tensor_is_computed_with_it(fused: bool) -> None:
    program, pads = with_zeros_around(fused)
    result = with_outer_elements(program, pads)
    assert len(result.tes) == len(program.tes) - 1
    assert result.tes[0].outputs[0].shape == (10, 6)
    assert_same_values(program, result)
    # The elements that nothing depends on are those of the nearest row.
    name = next(iter(pads.values())).tensor
    shown = replace(result, outputs=(name,), output_names=("whole",)).run({"in0": np.eye(5, 4, dtype=np.float32)})
    np.testing.assert_array_equal(shown["whole"][[0, 1]], shown["whole"][[2, 2]])
    np.testing.assert_array_equal(shown["whole"][[7, 8, 9]], shown["whole"][[6, 6, 6]])


def test_parts_that_read_other_rows_of_each_other_are_copied() -> None:
    program, pads = with_zeros_around(False, apart=True)
    assert with_outer_elements(program, pads) is program


@pytest.mark.parametrize("kind", ["GRU", "LSTM both ways"])
def test_what_cannot_be_absorbed_stays_right(kind: str) -> None:
    program = transformed(recurrent(kind, 8, 8, 8, steps=8, batch=3))
    result, _ = absorb_ramps(program)
    assert_same_values(program, result)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_mixed_precision(kind: str) -> None:
    program = transformed(recurrent(kind, 16, 16, 16, 16, steps=10), "mixed")
    result, _ = absorb_ramps(program)
    assert_same_values(program, result)
    assert_same_values(program, roll(result)[0])


def test_the_same_program_where_nothing_is_absorbed_and_after_a_second_time() -> None:
    builder = Builder()
    plain = builder.program(builder.relu(builder.input(4, 4)))
    assert absorb_ramps(plain) == (plain, ())
    result, _ = absorbed(transformed(recurrent("LSTM", 8, 8, 8, steps=9)))
    assert absorb_ramps(result)[0] is result


def test_transforming_again_undoes_nothing() -> None:
    result, loop = absorbed(transformed(recurrent("LSTM", 8, 8, 8, steps=12)))
    again, _ = transform_program(result, LEVELS["V4"], "fp32")
    assert_same_values(result, again)
    assert max(other.steps for other in loops(roll(again)[0])) >= loop.steps - 2


def stack_with_states(layers: int, steps: int, hidden: int, as_inputs: bool) -> onnx.ModelProto:
    """LSTM layers with initial states, of which the last states are outputs too."""
    nodes, constants, inputs, outputs, last = [], [], [], [], "x"
    for layer in range(layers):
        shapes = {"w": (1, 4 * hidden, hidden), "r": (1, 4 * hidden, hidden), "b": (1, 8 * hidden)}
        for name, shape in shapes.items():
            value = (RNG.standard_normal(shape) / np.sqrt(hidden)).astype(np.float32)
            constants.append(numpy_helper.from_array(value, f"{name}{layer}"))
        for name in ("h", "c"):
            if as_inputs:
                shape = [1, 1, hidden]
                inputs.append(helper.make_tensor_value_info(f"{name}{layer}", TensorProto.FLOAT, shape))
            else:
                value = RNG.standard_normal((1, 1, hidden)).astype(np.float32)
                constants.append(numpy_helper.from_array(value, f"{name}{layer}"))
            outputs.append(helper.make_tensor_value_info(f"last_{name}{layer}", TensorProto.FLOAT, None))
        read = [last, f"w{layer}", f"r{layer}", f"b{layer}", "", f"h{layer}", f"c{layer}"]
        given = [f"y{layer}", f"last_h{layer}", f"last_c{layer}"]
        nodes.append(helper.make_node("LSTM", read, given, hidden_size=hidden))
        nodes.append(helper.make_node("Squeeze", [f"y{layer}", "one"], [f"z{layer}"]))
        last = f"z{layer}"
    constants.append(numpy_helper.from_array(np.array([1], np.int64), "one"))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [steps, 1, hidden])
    y = helper.make_tensor_value_info(last, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "cells", [x, *inputs], [y, *outputs], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("as_inputs", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_initial_states_and_last_states(layers: int, as_inputs: bool) -> None:
    program = transformed(stack_with_states(layers, 10, 8, as_inputs))
    result, _ = absorb_ramps(program)
    assert_same_values(program, result)
    rolled, _ = roll(result)
    assert_same_values(program, rolled)
    # The frontend has multiplied constant states by the weights: no product of the first steps is left to be absorbed.
    if as_inputs:
        assert [loop.steps for loop in loops(rolled)] == [10 + layers - 1]


# A stack of smoothing filters, written by hand: filter l at time t is rounded(a * (what filter l - 1 gave) + b * own),
# with all filters of a wavefront in one tensor. Before and after the piece wavefronts have fewer rows.


Edit = Callable[[int, int], float]


def filters(
    count: int, steps: int, width: int = 4, *, bias: Edit | None = None, factor: Edit | None = None, shift: int = 0
) -> TEProgram:
    """Filters in wavefronts; `bias` and `factor` are of wavefront and filter, `shift` is where the first one reads."""
    b = Builder()
    x = b.input(steps, width)
    previous: tuple[Tensor, int, int] | None = None
    results = []
    known: dict[bytes, Tensor] = {}

    def shared(array: np.ndarray) -> Tensor:
        key = array.tobytes()
        known[key] = known.get(key) or b.constant(array)
        return known[key]

    for wave in range(steps + count - 1):
        low, high = max(0, wave - steps + 1), min(count - 1, wave)
        pulls = np.array([factor(wave, row) if factor else 0.5 for row in range(low, high + 1)], np.float32)
        adds = np.array([bias(wave, row) if bias else 1.0 + row for row in range(low, high + 1)], np.float32)
        tensors = [x, shared(pulls), shared(adds)] + ([previous[0]] if previous else [])
        value = b.add(wavefront(previous, wave, low, high, width, shift if wave == 0 else 0), *tensors, name="filter")
        if high == count - 1:
            results.append((value, count - 1 - low))
        previous = value, low, high
    return b.program(*(b.slice(value, 0, row, row + 1) for value, row in results))


def wavefront(
    previous: tuple[Tensor, int, int] | None, wave: int, low: int, high: int, width: int, shift: int
) -> Callable[..., te.Tensor]:
    def made(x: te.Tensor, pulls: te.Tensor, adds: te.Tensor, held: te.Tensor | None = None) -> te.Tensor:
        def element(i: tirx.Var, k: tirx.Var) -> object:
            # Row l reads row l - 1 of the wavefront before; the first one reads the input.
            given = x(wave + shift, k) if low == 0 else None
            if previous is None:
                return given * tirx.const(0.25, "float32") + adds(i)
            _, before_low, before_high = previous
            above = None
            if high > 0:
                above = held(i + (low - 1 - before_low), k)
                given = above if given is None else tirx.if_then_else(i < 1, given, above)
            total = given * tirx.const(0.25, "float32")
            own = held(i + (low - before_low), k) * pulls(i)
            if high > before_high:
                inside = i + low <= before_high
                return tirx.if_then_else(inside, own + total, total) + adds(i)
            return own + total + adds(i)

        return te.compute((high - low + 1, width), element)

    return made


def test_a_stack_of_filters() -> None:
    program = filters(3, 12)
    result, decisions = absorb_ramps(program)
    assert_same_values(program, result)
    assert_same_values(program, roll(result)[0])
    assert any(d.accepted for d in decisions), decisions
    assert max(loop.steps for loop in loops(roll(result)[0])) == 14


@pytest.mark.parametrize(
    "edit",
    [
        {"bias": lambda wave, row: 7.0 if (wave, row) == (1, 0) else 1.0 + row},
        {"factor": lambda wave, row: 0.75 if (wave, row) == (1, 0) else 0.5},
        {"factor": lambda wave, row: np.inf if row == 1 else 0.5},
        {"factor": lambda wave, row: np.nan if row == 2 else 0.5},
        {"shift": 1},
    ],
    ids=["bias", "factor", "infinite", "undefined", "index"],
)
def test_a_changed_partial_step_is_no_step(edit: dict) -> None:
    program = filters(3, 12, **edit)
    result, _ = absorb_ramps(program)
    assert_same_values(program, result)
    whole = max(loop.steps for loop in loops(roll(result)[0])) if loops(roll(result)[0]) else 0
    assert whole < 14


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_weights_that_are_not_finite_are_not_multiplied_by_zeros(value: float) -> None:
    model = recurrent("LSTM", 8, 8, 8, steps=9)
    for constant in model.graph.initializer:
        if constant.name == "r1":
            array = numpy_helper.to_array(constant).copy()
            array[0, 0, 0] = value
            constant.CopyFrom(numpy_helper.from_array(array, "r1"))
    program = transformed(model)
    result, _ = absorb_ramps(program)
    assert_same_values(program, result)


@pytest.mark.parametrize("part", range(6))
def test_a_constant_of_one_partial_step_that_differs_is_kept(part: int) -> None:
    """Each constant that a partial step alone reads is changed, in a copy for that step."""
    program = transformed(recurrent("LSTM", 8, 8, 8, steps=9))
    candidates = [
        (item, tensor)
        for item in program.tes[1:8]
        for tensor in getattr(item, "inputs", ())
        if tensor in program.constants and not hasattr(item, "parts")
    ]
    item, tensor = candidates[part % len(candidates)]
    changed = Tensor(f"{tensor.name}_changed", tensor.shape, tensor.dtype)
    array = program.constants[tensor].copy()
    array.reshape(-1)[0] += 1
    edited = item.with_inputs([changed if t is tensor else t for t in item.inputs])
    tes = [edited if other is item else other for other in program.tes]
    mutated = replace(program, tes=tuple(tes), constants={**program.constants, changed: array})
    result, _ = absorb_ramps(mutated)
    assert_same_values(mutated, result)
    steps = [loop.steps for loop in loops(roll(result)[0])]
    assert max(steps, default=0) < 10
