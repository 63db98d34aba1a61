"""The workloads of FusionStitching's papers: valid ONNX, the numbers of an implementation in NumPy, true gradients."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from souffle import models
from souffle.cli.compare import onnxruntime_outputs
from souffle.errors import ModelError
from souffle.models import asr, dien, patterns, transformer
from souffle.models.draws import Draw, read_draws, write_draws
from tests.models.references import LOSSES, REFERENCES, numeric_gradient

OPERATORS = {
    "layer-norm": "Add Constant Mul Reciprocal ReduceSum Sqrt Sub",
    "multi-interests": "Add Constant Div Exp Log MatMul Max Mul ReduceSum Sub",
    "logistic": "Add MatMul Softmax",
    "logistic-train": "Add Clip Constant Div Greater Less Log MatMul Mul Neg Or ReduceMean ReduceSum Softmax Sub "
    "Transpose Where",
    "perceptron": "Add MatMul Relu Softmax",
    "perceptron-train": "Add Constant Div Exp Greater LogSoftmax MatMul Mul Neg ReduceMean ReduceSum Relu Sqrt Sub "
    "Transpose Where",
    "word2vec": "Constant Div Gather MatMul Mul ReduceSum Sqrt Transpose",
    "word2vec-train": "Abs Add Concat Constant Exp Gather Log MatMul Mul Neg ReduceMean ReduceSum Relu ScatterND "
    "Sigmoid Split Squeeze Sub Transpose Unsqueeze",
    "var-encoder": "Add Constant Div Exp Log MatMul Mul Neg ReduceMean ReduceSum Sigmoid Sub Tanh",
    "bi-rnn": "Add Constant Gather LSTM MatMul Reshape Transpose",
    "dyn-rnn": "Add Constant Gather LSTM MatMul Reshape Squeeze Sub Transpose",
    "crnn": "Add Constant Conv LSTM LogSoftmax MatMul MaxPool Relu Reshape Squeeze Transpose",
    "nmt": "Add Concat Constant Gather Gemm LogSoftmax MatMul Mul ReduceMax Reshape Sigmoid Softmax Split Squeeze Sub "
    "Tanh Unsqueeze",
    "transformer": "Add Constant Div LayerNormalization MatMul Relu Reshape Softmax Transpose",
    "dien": "Add Concat Constant Div Expand GRU Gather Gemm Greater Less MatMul Max Min Mul ReduceMean ReduceSum "
    "Reshape Sigmoid Slice Softmax Split Sqrt Squeeze Sub Tanh Transpose Unsqueeze Where",
    "asr": "Add Constant Conv Div LayerNormalization LogSoftmax MatMul Mul Relu Reshape Softmax Transpose",
}


@cache
def built(name: str) -> onnx.ModelProto:
    return models.build(name)


def exact(name: str, seed: int) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Inputs of a model and its initializers, in float64 where they are floats."""

    def widened(value: np.ndarray) -> np.ndarray:
        return value.astype(np.float64) if value.dtype.kind == "f" else value

    inputs = {key: widened(value) for key, value in models.random_inputs(built(name), seed).items()}
    return inputs, [widened(numpy_helper.to_array(tensor)) for tensor in built(name).graph.initializer]


def test_names() -> None:
    assert set(models.STITCHING_NAMES) == set(OPERATORS) == set(REFERENCES)
    assert set(models.STITCHING_NAMES) <= set(models.ALL_NAMES)
    assert not set(models.STITCHING_NAMES) & {*models.NAMES, *models.SE_NAMES}


@pytest.mark.parametrize("name", models.STITCHING_NAMES)
def test_tiny_model_is_valid_and_alive(name: str) -> None:
    model = built(name)
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    values, *others = (onnxruntime_outputs(model, models.random_inputs(model, seed)) for seed in range(3))
    for info in model.graph.output:
        value = values[info.name]
        assert value.shape == tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim)
        assert value.dtype == np.float32
        assert np.isfinite(value).all()
        spread = np.abs(value - value.mean()).max() if value.size > 1 else np.abs(value).max()
        # Deaf to no input, and not constant over its elements.
        assert max(np.abs(value - other[info.name]).max() for other in others) > 0.02 * spread > 0


@pytest.mark.parametrize("name", models.STITCHING_NAMES)
def test_operators_and_names(name: str) -> None:
    model = built(name)
    assert {node.op_type for node in model.graph.node} == set(OPERATORS[name].split())
    assert max(Counter(node.name for node in model.graph.node).values()) == 1
    used = {value for node in model.graph.node for value in node.input}
    assert {tensor.name for tensor in model.graph.initializer} | {info.name for info in model.graph.input} <= used
    made = {value for node in model.graph.node for value in node.output if value}
    unread = made - used - {info.name for info in model.graph.output}
    # Recurrent nodes have outputs that nobody asks for.
    assert all("LSTM" in value or "GRU" in value for value in unread)
    assert model.SerializeToString(deterministic=True) == models.build(name).SerializeToString(deterministic=True)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", models.STITCHING_NAMES)
def test_equals_numpy(name: str, seed: int) -> None:
    inputs, weights = exact(name, seed)
    expected = REFERENCES[name](inputs, weights)
    found = onnxruntime_outputs(built(name), models.random_inputs(built(name), seed))
    assert set(found) == set(expected)
    for key, value in expected.items():
        scale = max(1e-3, np.abs(value).max())
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5 * scale, err_msg=key)


@pytest.mark.parametrize("name", LOSSES)
def test_every_parameter_moves_far_beyond_what_is_tolerated(name: str) -> None:
    # Otherwise a wrong gradient would hide behind the parameter that it changes.
    inputs, _ = exact(name, 0)
    found = onnxruntime_outputs(built(name), models.random_inputs(built(name), 0))
    parameters = [key for key in inputs if f"{key}_new" in found]
    assert len(parameters) == len([key for key in found if key.endswith("_new")])
    for key in parameters:
        # A decay alone moves this one, by a thousandth.
        least = 5e-4 if key == "beta2_power" else 1e-2
        assert np.abs(found[f"{key}_new"] - inputs[key]).max() > least * np.abs(inputs[key]).max(), key


def test_numeric_gradient() -> None:
    given = {"x": np.array([0.5, -2.0])}
    found = numeric_gradient(lambda values: float((values["x"] ** 3).sum()), given, "x")
    np.testing.assert_allclose(found, [0.75, 12.0], rtol=1e-8)


@pytest.mark.parametrize("name", models.STITCHING_NAMES)
def test_small_changes_of_the_input_stay_small(name: str) -> None:
    model = built(name)
    inputs = models.random_inputs(model)
    rng = np.random.default_rng(2)

    def nudged(value: np.ndarray) -> np.ndarray:
        if value.dtype.kind != "f":
            return value
        return np.asarray(value * (1 + 1e-5 * rng.standard_normal(value.shape)), value.dtype)

    values = onnxruntime_outputs(model, inputs)
    others = onnxruntime_outputs(model, {key: nudged(value) for key, value in inputs.items()})
    for key, value in values.items():
        assert np.abs(value - others[key]).max() < 1e-3 * np.abs(value).max(), key


def test_sizes_that_the_papers_state() -> None:
    config = patterns.INTERESTS_SIZES["paper"]
    assert round(4 * config.batch * config.behaviours**2 / 2**20) == 552
    assert round(4 * config.batch * config.behaviours * config.width / 2**20) == 12

    def first(name: str) -> int:
        return models.build(name, "paper").graph.input[0].type.tensor_type.shape.dim[0].dim_value

    assert first("crnn") == 8
    assert patterns.LAYER_NORM_SIZES["paper"].rows % 32 == 0
    assert dien.SIZES["paper"].batch == 256
    assert asr.SIZES["paper"].batch == 8
    config = transformer.SIZES["paper"]
    assert config.batch * config.source == config.batch * config.target == 4096


def test_the_pattern_of_2019_has_the_operators_of_its_figure() -> None:
    counts = Counter(node.op_type for node in built("multi-interests").graph.node)
    assert counts["MatMul"] == counts["ReduceSum"] == 2
    others = {"MatMul", "ReduceSum", "Constant"}
    assert sum(count for kind, count in counts.items() if kind not in others) == 9


def test_draws() -> None:
    rng = np.random.default_rng(0)
    assert set(Draw("integers", 2, 3).values(rng, (100,))) == {2, 3, 4}
    low = Draw("uniform", 1.0, 2.0).values(rng, (1000,))
    assert 1.0 <= low.min() < 1.1 < 2.9 < low.max() < 3.0
    assert 1.8 < Draw("normal", 5.0, 2.0).values(rng, (10000,)).std() < 2.2
    hot = Draw("one_hot").values(rng, (50, 3))
    assert set(hot.reshape(-1)) == {0.0, 1.0} and (hot.sum(1) == 1).all() and hot.sum(0).min() > 0
    with pytest.raises(ModelError, match="'poisson', which is not known"):
        Draw("poisson").values(rng, (2,))


def test_draws_travel_in_the_metadata() -> None:
    model = onnx.ModelProto()
    assert read_draws(model) == {}
    write_draws(model, {})
    assert not model.metadata_props
    draws = {"x": Draw("integers", 1, 4)}
    write_draws(model, draws)
    assert read_draws(onnx.ModelProto.FromString(model.SerializeToString())) == draws
    for text in ("nonsense", "[1]", '{"x": {"shape": 1}}', '{"x": 1}'):
        model.metadata_props[0].value = text
        with pytest.raises(ModelError, match="cannot be read"):
            read_draws(model)
    lengths = models.random_inputs(built("dyn-rnn"))["lengths"]
    assert lengths.dtype == np.int32 and lengths.min() >= 1
    label = models.random_inputs(built("logistic-train"))["label"]
    assert label.dtype == np.float32 and (label.sum(1) == 1).all()
