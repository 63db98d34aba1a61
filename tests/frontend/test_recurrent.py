"""LSTM, GRU and RNN in all their forms against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from souffle.frontend import import_onnx
from souffle.program import TE
from tests.frontend.support import compare, model_of

pytestmark = pytest.mark.sampled(3)

STEPS, BATCH, INPUT, HIDDEN = 3, 2, 5, 4
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def recurrent_model(
    operator, *, direction="forward", optional=(), outputs=None, lengths=None, layout=0, dtype="float32", **attributes
):
    rng = np.random.default_rng(3)
    directions, gates = 2 if direction == "bidirectional" else 1, GATES[operator] * HIDDEN

    def weights(*shape):
        return (rng.standard_normal(shape) * 0.5).astype(dtype)

    constants = {"W": weights(directions, gates, INPUT), "R": weights(directions, gates, HIDDEN)}
    state = (BATCH, directions, HIDDEN) if layout else (directions, BATCH, HIDDEN)
    inputs = {"X": (dtype, (BATCH, STEPS, INPUT) if layout else (STEPS, BATCH, INPUT))}
    names = ["X", "W", "R"]
    slots = {"B": 3, "lengths": 4, "h": 5, "c": 6, "P": 7}
    if lengths is not None:
        constants["lengths"] = np.array(lengths, dtype="int32")
        optional = (*optional, "lengths")
    for name in optional:
        names += [""] * (slots[name] + 1 - len(names))
        names[slots[name]] = name
        if name == "B":
            constants["B"] = weights(directions, 2 * gates)
        if name == "P":
            constants["P"] = weights(directions, 3 * HIDDEN)
        if name in "hc":
            inputs[name] = (dtype, state)
    every = ["Y", "Y_h", "Y_c"] if operator == "LSTM" else ["Y", "Y_h"]
    results = [name if outputs is None or name in outputs else "" for name in every]
    node = helper.make_node(
        operator, names, results, name="layer", hidden_size=HIDDEN, direction=direction, layout=layout, **attributes
    )
    return model_of([node], inputs, [name for name in results if name], constants)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("operator", GATES)
def test_directions_bias_and_states(operator, direction):
    states = ("h", "c") if operator == "LSTM" else ("h",)
    compare(recurrent_model(operator, direction=direction))
    compare(recurrent_model(operator, direction=direction, optional=("B", *states)))


@pytest.mark.parametrize("operator", GATES)
def test_an_absent_bias_is_of_the_type_of_the_others(operator):
    x = np.random.default_rng(4).standard_normal((STEPS, BATCH, INPUT))
    narrow, wide = (
        import_onnx(recurrent_model(operator, dtype=dtype)).run({"X": x.astype(dtype)})["Y"]
        for dtype in ("float32", "float64")
    )
    assert wide.dtype == "float64"
    np.testing.assert_allclose(narrow, wide, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("outputs", [("Y",), ("Y_h",), ("Y_c",), ("Y", "Y_c")])
def test_any_subset_of_outputs(outputs):
    compare(recurrent_model("LSTM", outputs=outputs, optional=("B",), direction="bidirectional"))


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_peepholes_and_input_forget(direction):
    compare(recurrent_model("LSTM", direction=direction, optional=("B", "h", "c", "P")))
    # ONNX Runtime does not couple the gates as the specification says, so only the import is tried.
    import_onnx(recurrent_model("LSTM", direction=direction, optional=("B",), input_forget=1))


@pytest.mark.parametrize("optional", [(), ("B",), ("B", "h"), ("h",)])
def test_gru_linear_before_reset(optional):
    compare(recurrent_model("GRU", direction="bidirectional", optional=optional, linear_before_reset=1))


@pytest.mark.parametrize("operator", GATES)
@pytest.mark.parametrize("lengths", [(STEPS, STEPS), (1, 3)])
def test_constant_sequence_lengths(operator, lengths):
    compare(recurrent_model(operator, lengths=lengths, direction="bidirectional", optional=("B", "h")))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("operator", GATES)
def test_a_sequence_without_elements_ends_in_zeros(operator, direction):
    """Whatever its initial state is."""
    states = ("h", "c") if operator == "LSTM" else ("h",)
    compare(recurrent_model(operator, lengths=(0, 2), direction=direction, optional=states))


def test_sequence_lengths_from_data():
    model = recurrent_model("LSTM", direction="bidirectional", lengths=(1, 3), optional=("B",))
    (tensor,) = [t for t in model.graph.initializer if t.name == "lengths"]
    model.graph.initializer.remove(tensor)
    model.graph.input.append(helper.make_tensor_value_info("lengths", tensor.data_type, list(tensor.dims)))
    x = np.random.default_rng(0).standard_normal((STEPS, BATCH, INPUT)).astype("float32")
    compare(model, {"X": x, "lengths": np.array([2, 1], dtype="int32")})


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        (
            "LSTM",
            {"activations": ["HardSigmoid", "Relu", "Softsign"], "activation_alpha": [0.3], "activation_beta": [0.4]},
        ),
        ("LSTM", {"activations": ["Sigmoid", "Affine", "Tanh"], "activation_alpha": [0.5], "activation_beta": [0.1]}),
        (
            "GRU",
            {"activations": ["HardSigmoid", "LeakyRelu"], "activation_alpha": [0.25, 0.1], "activation_beta": [0.4]},
        ),
        ("GRU", {"activations": ["Sigmoid", "ScaledTanh"], "activation_alpha": [1.2], "activation_beta": [0.6]}),
        ("RNN", {"activations": ["Relu"]}),
        ("RNN", {"activations": ["Elu"], "activation_alpha": [0.5]}),
        ("LSTM", {"clip": 0.3}),
        ("GRU", {"clip": 0.2, "linear_before_reset": 1}),
    ],
)
def test_activations_and_clip(operator, options):
    compare(recurrent_model(operator, optional=("B", "h"), **options))


@pytest.mark.parametrize("operator", GATES)
def test_layout_of_batch_first(operator):
    """ONNX Runtime has no layout 1, so the same weights in layout 0 are the reference."""
    program = import_onnx(recurrent_model(operator, layout=1, direction="bidirectional", optional=("B", "h")))
    assert program.outputs[0].shape == (BATCH, STEPS, 2, HIDDEN)
    assert program.outputs[1].shape == (BATCH, 2, HIDDEN)


def test_gates_are_packed_and_layers_form_a_wavefront():
    """Step t of a layer must wait for step t of the layer below, not for all its steps."""
    rng = np.random.default_rng(0)
    nodes, constants, x = [], {"one": np.array([1])}, "X"
    for layer in range(2):
        for name in "WR":
            constants[f"{name}{layer}"] = rng.standard_normal((1, 4 * INPUT, INPUT)).astype("float32")
        nodes.append(
            helper.make_node("LSTM", [x, f"W{layer}", f"R{layer}"], [f"Y{layer}"], name=f"l{layer}", hidden_size=INPUT)
        )
        nodes.append(helper.make_node("Squeeze", [f"Y{layer}", "one"], [f"S{layer}"], name=f"s{layer}"))
        x = f"S{layer}"
    model = model_of(nodes, {"X": ("float32", (STEPS, BATCH, INPUT))}, ["S1"], constants)
    program = compare(model)
    products = [te_ for te_ in program.tes if te_.origin.operators == ("MatMul",)]
    assert len(products) == 2 * (2 * STEPS - 1)
    assert all(te_.output.shape == (BATCH, 4 * INPUT) for te_ in products)
    (first,) = [te_ for te_ in products if te_.origin.nodes == ("l1/forward/t0/MatMul_x",)]
    below = set()
    pending = list(first.inputs)
    while pending:
        producer = program.producers.get(pending.pop())
        if isinstance(producer, TE) and producer not in below:
            below.add(producer)
            pending.extend(producer.inputs)
    assert not any("/t1/" in te_.origin.nodes[0] for te_ in below)
