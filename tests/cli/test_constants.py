"""``--constant``: values of inputs on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import souffle
from souffle.cli import check, main
from tests.frontend.support import node_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "sum.onnx"
    onnx.save(node_model("ReduceSum", [("float32", (2, 3)), ("int64", (1,))]), path)
    return path


def run(*arguments: object) -> int:
    return main.main([str(argument) for argument in arguments])


def test_a_network_is_compiled_with_the_value(model, tmp_path, capsys):
    np.save(tmp_path / "axes.npy", np.array([1]))
    x = np.arange(6, dtype="float32").reshape(2, 3)
    for value, axis in (("[0]", 0), (tmp_path / "axes.npy", 1)):
        assert run("compile", model, "--no-cubin", "--constant", f"x1={value}", "-o", tmp_path / "sum.souffle") == 0
        network = souffle.load(tmp_path / "sum.souffle", device="cpu")
        np.testing.assert_array_equal(network(x)["y0"], x.sum(axis=axis, keepdims=True))


def test_onnx_runtime_is_given_the_value_too(model, monkeypatch, capsys):
    monkeypatch.setattr(check, "gpu_arch", lambda: None)
    assert run("check", model, "--constant", "x1=[-1]", "--levels", "V0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_values_beside_versions(model, tmp_path, capsys):
    proto = onnx.load(model)
    for tensor, axis in ((proto.graph.input[0].type, 0), (proto.graph.input[1].type, 0)):
        tensor.tensor_type.shape.dim[axis].dim_param = "n" if tensor.tensor_type.elem_type == 1 else "axes"
    onnx.save(proto, model)
    words = ("--dim", "n=2,5", "--dim", "axes=1", "--constant", "x1=[-1]")
    assert run("check", model, *words, "--levels", "V0", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] and {ran["version"] for ran in record["runs"]} == {"n=2", "n=5"}
    assert run("compile", model, *words, "--target", "cpu", "--level", "V0", "-o", tmp_path / "sum.souffle") == 0
    network = souffle.load(tmp_path / "sum.souffle")
    assert [network(np.ones((n, 3), "float32"))["y0"].shape for n in (2, 5)] == [(2, 1), (5, 1)]
    assert run("explain", model, "--dim", "n=2", "--dim", "axes=2", "--constant", "x1=[-1]") == 2
    assert "axes is 2 by dims" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["x1"], "is not of the form NAME=VALUE"),
        (["=[0]"], "is not of the form NAME=VALUE"),
        (["x1=[0", "x1=0"], "'[0' is neither a number"),
        (["x1=[0]", "x1=[1]"], "gives 'x1' two values"),
        (["x1=none.npy"], "none.npy cannot be read as a .npy file"),
        (["x2=[0]"], "has no input named 'x2'"),
        (["x1=null"], "which it does not hold"),
        ([], "compile with constants={'x1': ...}"),
    ],
)
def test_what_is_no_value_is_an_error(model, values, words, capsys):
    options = [part for value in values for part in ("--constant", value)]
    assert run("explain", model, "--no-cubin", *options) == 2
    assert words in capsys.readouterr().err
