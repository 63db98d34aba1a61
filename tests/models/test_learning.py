"""The workloads of "Learning to Fuse": valid ONNX, the numbers of an implementation in NumPy, published sizes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import souffle
from souffle import models
from souffle.certificate import PROVEN
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.models import amoebanet, rnnlm, transformer_xl
from souffle.program.evaluate import evaluate
from tests.models.learning_references import REFERENCES
from tests.thorough import some

OPERATORS = {
    "amoebanet": "Add AveragePool BatchNormalization Concat Constant Conv Flatten Gemm GlobalAveragePool MaxPool Pad "
    "Relu Slice",
    "rnnlm": "Add Concat Constant Gather Gemm LogSoftmax MatMul Mul Sigmoid Split Tanh",
    "gnmt": "Add Concat Constant Gather Gemm LogSoftmax MatMul Mul Reshape Sigmoid Softmax Split Tanh Unsqueeze",
    "transformer-xl": "Add Concat Constant Gather Gemm LayerNormalization LogSoftmax MatMul Mul Relu Reshape Slice "
    "Softmax Transpose",
}


@cache
def built(name: str) -> onnx.ModelProto:
    return models.build(name)


@cache
def run(name: str, seed: int) -> dict[str, np.ndarray]:
    return onnxruntime_outputs(built(name), models.random_inputs(built(name), seed))


def exact(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64) if values.dtype.kind == "f" else values


def parameters(model: onnx.ModelProto) -> int:
    """Weights that are trained: no statistics, places, masks or sizes."""
    fixed = ("running_mean", "running_var", "sizes", "places", "mask")
    return sum(math.prod(one.dims) for one in model.graph.initializer if not one.name.endswith(fixed))


def test_names() -> None:
    assert set(models.LEARNING_NAMES) == set(OPERATORS) == set(REFERENCES)
    assert set(models.LEARNING_NAMES) <= set(models.ALL_NAMES)
    assert not set(models.LEARNING_NAMES) & {*models.NAMES, *models.SE_NAMES, *models.STITCHING_NAMES}


@pytest.mark.parametrize("name", models.LEARNING_NAMES)
def test_tiny_model_is_valid_and_alive(name: str) -> None:
    model = built(name)
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    values, *others = (run(name, seed) for seed in range(3))
    for info in model.graph.output:
        value = values[info.name]
        assert value.shape == tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim)
        assert value.dtype == np.float32
        assert np.isfinite(value).all() and np.abs(value).max() < 50
        spread = np.abs(value - value.mean()).max()
        assert max(np.abs(value - other[info.name]).max() for other in others) > 0.02 * spread > 0


@pytest.mark.parametrize("name", models.LEARNING_NAMES)
def test_operators_and_names(name: str) -> None:
    model = built(name)
    assert {node.op_type for node in model.graph.node} == set(OPERATORS[name].split())
    assert max(Counter(node.name for node in model.graph.node).values()) == 1
    stored = [tensor.name for tensor in model.graph.initializer]
    assert len(set(stored)) == len(stored)
    used = {value for node in model.graph.node for value in node.input}
    assert {*stored, *(info.name for info in model.graph.input)} <= used
    assert {value for node in model.graph.node for value in node.output} - used <= {o.name for o in model.graph.output}
    assert model.SerializeToString(deterministic=True) == models.build(name).SerializeToString(deterministic=True)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", models.LEARNING_NAMES)
def test_equals_numpy(name: str, seed: int) -> None:
    inputs = {key: exact(value) for key, value in models.random_inputs(built(name), seed).items()}
    expected = REFERENCES[name](inputs, [exact(numpy_helper.to_array(one)) for one in built(name).graph.initializer])
    found = run(name, seed)
    assert set(found) == set(expected)
    for key, value in expected.items():
        scale = max(1e-3, np.abs(value).max())
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=2e-5 * scale, err_msg=key)


# AmoebaNet's many kernels take LLVM much longer than all the others.
@pytest.mark.parametrize("name", some(["rnnlm"], ["transformer-xl", "gnmt"]))
def test_llvm_code(name: str) -> None:
    network = souffle.compile(built(name), target="cpu")
    found = {key: np.asarray(value) for key, value in network(models.random_inputs(built(name), 1)).items()}
    result = compare(found, run(name, 1), "fp32")
    assert result.ok, f"{name}: largest error {result.error:.2e} of the output's magnitude"


@pytest.mark.thorough("the other networks are above")
def test_the_imported_program_of_amoebanet() -> None:
    outputs = evaluate(souffle.import_onnx(built("amoebanet")), models.random_inputs(built("amoebanet"), 1))
    result = compare(outputs, run("amoebanet", 1), "fp32")
    assert result.ok, result


def test_steps_of_the_language_model() -> None:
    assert models.random_inputs(models.build("rnnlm", steps=2))["words"].shape == (3, 2)


def test_one_kernel_of_the_language_model_is_proven() -> None:
    # One step: the proof's time grows with the cells.
    model = models.build("rnnlm", steps=1)
    network = souffle.compile(model, target="cuda", arch="sm_90", cubin=False, device="cpu")
    assert network.certificate.verdict == PROVEN and not network.certificate.unknown
    inputs = models.random_inputs(model, seed=1)
    found = {key: np.asarray(value) for key, value in network(inputs).items()}
    result = compare(found, onnxruntime_outputs(model, inputs), "fp32")
    assert result.ok, f"largest error {result.error:.2e} of the output's magnitude"


def test_cells_of_amoebanet() -> None:
    config = amoebanet.SIZES["tiny"]
    nodes = built("amoebanet").graph.node
    # Five sums of two in each cell.
    cells = 2 + 2 + 3 * config.cells
    assert sum(node.op_type == "Add" for node in nodes) == 5 * cells
    joined = [len(node.input) for node in nodes if node.op_type == "Concat" and "/fit/" not in node.name]
    assert joined == [5, 5, 4, 5, 4, 5, 4]
    # A pool for each average and maximum, and two that skip pixels where the input of a cell changes its side.
    assert sum(node.op_type == "MaxPool" for node in nodes) == 3 * 4 + 3
    assert sum(node.op_type == "AveragePool" for node in nodes) == 2 * 4 + 3 * 3 + 2 * 4


def test_published_numbers_of_parameters() -> None:
    # AmoebaNet-A with N = 4, F = 50: 5.1 million (Real et al. 2018); sides do not change it.
    small = replace(amoebanet.SIZES["paper"], image=32)
    assert round(parameters(amoebanet.build_amoebanet(small, 0)) / 1e6, 1) == 5.1

    # Transformer-XL standard: 151 million (Dai et al. 2019, Table 1), with all 267,735 words.
    config = transformer_xl.SIZES["paper"]
    one, two = (
        parameters(transformer_xl.build_transformer_xl(replace(config, layers=layers, words=100), 0))
        for layers in (1, 2)
    )
    other_words = (267735 - 100) * (config.hidden + 1)
    assert round((one + (two - one) * (config.layers - 1) + other_words) / 1e6) == 151

    # LSTM-2048-512: 0.83 thousand million (Józefowicz et al. 2016, Table 1), one layer and all 793,471 words.
    config = replace(rnnlm.SIZES["paper"], layers=1, steps=1, words=100)
    other_words = (793471 - 100) * (config.embedding + config.projected + 1)
    assert abs((parameters(rnnlm.build_rnnlm(config, 0)) + other_words) / 1e9 - 0.83) < 0.01
