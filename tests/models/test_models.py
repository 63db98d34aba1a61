"""The model builders: valid ONNX, alive under ONNX Runtime, the same bytes each time, and their command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from souffle import models
from souffle.errors import ModelError, OptionError
from souffle.models.__main__ import main

ROOT = Path(__file__).resolve().parents[2]

# Those of Souffle's paper; tests/models/test_stitching.py and test_learning.py have the others.
_OTHERS = {*models.STITCHING_NAMES, *models.LEARNING_NAMES}
SOUFFLE_NAMES = tuple(name for name in models.ALL_NAMES if name not in _OTHERS)

OPERATORS = {
    "bert": "Add Constant Div Erf LayerNormalization MatMul Mul Reshape Softmax Transpose",
    "resnext": "Add Conv Flatten Gemm GlobalAveragePool MaxPool Relu",
    "lstm": "Constant LSTM Squeeze",
    "efficientnet": "Add Conv Flatten Gemm GlobalAveragePool Mul Sigmoid",
    "swin": "Add Concat Constant Conv Div Erf Flatten Gather Gemm GlobalAveragePool LayerNormalization MatMul Mul "
    "Reshape Slice Softmax Transpose",
    "mmoe": "Add Concat Constant Gemm MatMul Mul ReduceSum Relu Sigmoid Softmax Unsqueeze",
    "lstm-unrolled": "Add Concat Constant Gather Gemm Mul Sigmoid Split Tanh Unsqueeze",
    **dict.fromkeys(models.SE_NAMES, "Conv GlobalAveragePool Mul Sigmoid"),
}


def run(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def test_names() -> None:
    assert models.NAMES == ("bert", "resnext", "lstm", "efficientnet", "swin", "mmoe")
    assert tuple(f"se:M{i}" for i in range(10)) == models.SE_NAMES
    assert set(SOUFFLE_NAMES) == set(OPERATORS)


@pytest.mark.parametrize("name", SOUFFLE_NAMES)
def test_tiny_model_is_valid_and_alive(name: str) -> None:
    model = models.build(name)
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    inputs, others = models.random_inputs(model, 0), models.random_inputs(model, 1)
    for info, value, other in zip(model.graph.output, run(model, inputs), run(model, others), strict=True):
        assert value.shape == tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim)
        assert value.dtype == np.float32
        assert np.isfinite(value).all()
        largest = np.abs(value).max()
        assert 1e-2 < largest < 50
        # Neither constant over its elements nor deaf to the input.
        assert value.size == 1 or value.std() > 0.1 * largest
        assert np.abs(value - other).max() > 0.1 * largest


@pytest.mark.parametrize("name", SOUFFLE_NAMES)
def test_small_changes_of_the_input_stay_small(name: str) -> None:
    # Otherwise rounding alone would set two correct implementations apart.
    model = models.build(name)
    inputs = models.random_inputs(model)
    noise = np.random.default_rng(2)
    moved = {key: value + 1e-4 * noise.standard_normal(value.shape, np.float32) for key, value in inputs.items()}
    for value, other in zip(run(model, inputs), run(model, moved), strict=True):
        assert np.abs(value - other).max() < 1e-3 * np.abs(value).max()


@pytest.mark.parametrize("name", SOUFFLE_NAMES)
def test_operators_and_names(name: str) -> None:
    model = models.build(name)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 17)]
    assert {node.op_type for node in model.graph.node} == set(OPERATORS[name].split())
    names = Counter(node.name for node in model.graph.node)
    assert max(names.values()) == 1
    assert all(name.startswith("/") for name in names)
    used = {value for node in model.graph.node for value in node.input}
    assert {initializer.name for initializer in model.graph.initializer} <= used


def test_structure_of_tiny_models() -> None:
    def attributes(name: str, op_type: str, attribute: str) -> set[object]:
        nodes = [node for node in models.build(name).graph.node if node.op_type == op_type]
        found = [helper.get_attribute_value(a) for node in nodes for a in node.attribute if a.name == attribute]
        return {tuple(value) if isinstance(value, list) else value for value in found}

    assert attributes("resnext", "Conv", "group") == {1, 4}
    assert attributes("efficientnet", "Conv", "kernel_shape") == {(1, 1), (3, 3), (5, 5)}
    assert attributes("efficientnet", "Conv", "strides") == {(1, 1), (2, 2)}
    masks = [i for i in models.build("swin").graph.initializer if len(i.dims) == 5]
    assert masks, "no shifted windows"
    assert set(np.unique(numpy_helper.to_array(masks[0]))) == {-100.0, 0.0}
    names = {node.name for node in models.build("bert").graph.node}
    assert "/encoder/layer.0/attention/self/query/MatMul" in names


@pytest.mark.parametrize("name", SOUFFLE_NAMES)
def test_same_arguments_give_the_same_bytes(name: str) -> None:
    first = models.build(name).SerializeToString(deterministic=True)
    assert first == models.build(name).SerializeToString(deterministic=True)
    assert first != models.build(name, seed=1).SerializeToString(deterministic=True)


def test_bytes_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "import hashlib\nfrom souffle import models\n"
        "text = b''.join(models.build(n).SerializeToString(deterministic=True) for n in models.ALL_NAMES)\n"
        "print(hashlib.sha256(text).hexdigest())"
    )
    digests = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        digests.add(subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60).stdout)
    assert len(digests) == 1


@pytest.mark.parametrize("name", SOUFFLE_NAMES)
def test_a_batch_is_as_its_parts_one_by_one(name: str) -> None:
    single, batched = models.build(name), models.build(name, batch=3)
    onnx.checker.check_model(batched, full_check=True)
    x = models.random_inputs(batched)["input"]
    axis = list(x.shape).index(3, 1 if "lstm" in name else 0)
    parts = [run(single, {"input": part}) for part in np.split(x, 3, axis)]
    for index, value in enumerate(run(batched, {"input": x})):
        expected = np.concatenate([part[index] for part in parts], axis)
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("steps", [None, 1, 7])
def test_unrolled_lstm_equals_lstm(steps: int | None) -> None:
    stack, cells = models.build("lstm", steps=steps), models.build("lstm-unrolled", steps=steps)
    inputs = models.random_inputs(stack)
    assert len(inputs["input"]) == (steps or 4)
    np.testing.assert_allclose(run(cells, inputs)[0], run(stack, inputs)[0], rtol=1e-4, atol=1e-6)


def test_published_configurations() -> None:
    # Only those that are built at once.
    def shape(name: str) -> list[int]:
        return [dim.dim_value for dim in models.build(name, "paper").graph.input[0].type.tensor_type.shape.dim]

    assert shape("lstm") == [100, 1, 256]
    assert shape("mmoe") == [1, 100]
    assert shape("se:M0") == [1, 32, 112, 112]
    assert shape("se:M9") == [1, 1152, 7, 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "brt"}, "no model is named 'brt'; there are bert, resnext"),
        ({"name": "bert", "size": "huge"}, "no size 'huge'; there are tiny, paper"),
        ({"name": "bert", "steps": 3}, "'bert' has no time steps"),
        ({"name": "lstm", "steps": 0}, "1 or more"),
        ({"name": "lstm", "seed": -1}, "must not be negative"),
        ({"name": "bert", "batch": 0}, "a batch of 0; it needs 1 or more"),
        ({"name": "nmt", "batch": 2}, "'nmt' has no batch"),
        ({"name": "bert", "batch": 2, "open_dimensions": True}, "leaves the batch open"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        models.build(**arguments)


def _model(element: int, shape: list[int | str | None], **attributes: int) -> onnx.ModelProto:
    table = numpy_helper.from_array(np.zeros((30, 50), np.float32), "table")
    node = helper.make_node("Gather", ["table", "x"], ["y"], **attributes)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    inputs = [helper.make_tensor_value_info("x", element, shape)]
    return helper.make_model(helper.make_graph([node], "g", inputs, [result], [table]))


def test_random_integers_index_their_table() -> None:
    values = models.random_inputs(_model(TensorProto.INT64, [1000]))["x"]
    assert values.dtype == np.int64
    assert values.min() == 0
    assert values.max() == 29
    assert models.random_inputs(_model(TensorProto.INT32, [1000], axis=1))["x"].max() == 49


@pytest.mark.parametrize(
    ("element", "dtype"),
    [(TensorProto.BOOL, np.bool_), (TensorProto.FLOAT16, np.float16), (TensorProto.DOUBLE, np.float64)],
)
def test_random_inputs_of_other_types(element: int, dtype: type) -> None:
    value = models.random_inputs(_model(element, [2, 3]))["x"]
    assert value.dtype == dtype
    assert value.shape == (2, 3)


def test_random_scalar() -> None:
    assert models.random_inputs(_model(TensorProto.INT64, []))["x"].shape == ()


def test_random_inputs_need_static_tensors_of_numbers() -> None:
    with pytest.raises(ModelError, match=r"'x' leaves dimension 0 open \(batch\)"):
        models.random_inputs(_model(TensorProto.FLOAT, ["batch", 3]))
    with pytest.raises(ModelError, match="'x' leaves dimension 1 open"):
        models.random_inputs(_model(TensorProto.FLOAT, [2, None]))
    with pytest.raises(ModelError, match="cannot be drawn"):
        models.random_inputs(_model(TensorProto.STRING, [2]))


def test_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lstm.onnx"
    assert main(["lstm", "--size", "tiny", "--steps", "8", "--batch", "2", "-o", str(path)]) == 0
    assert onnx.load(str(path)) == models.build("lstm", steps=8, batch=2)
    parameters = 3 * (8 * 16 * 16 + 8 * 16 + 2 * 2 * 16)  # per layer: weights, biases, initial states
    assert f"9 nodes, {parameters:,} parameters" in capsys.readouterr().out
    assert main(["lstm", "-o", str(tmp_path / "missing" / "lstm.onnx")]) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nothing"], ["bert", "--size", "big"], ["bert", "--steps", "2"]])
def test_command_refuses_bad_arguments(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "souffle.models", *arguments, "-o", str(tmp_path / "x.onnx")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert "python -m souffle.models: error: " in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
