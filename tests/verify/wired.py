"""A small network with grid barriers, compiled, saved, and changed."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
import tvm_ffi
from onnx import TensorProto, helper, numpy_helper
from tvm import tirx

import souffle
from souffle.cli import main
from souffle.kernel.grid_barrier import COMPLETION_FUNCTION, COUNTER_FUNCTION
from souffle.runtime import Network


def network_of_products() -> onnx.ModelProto:
    """A product of a transposed product, and a softmax: each column of the first is read where a row is made."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((96, 96)).astype(np.float32) for _ in range(2)]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w0"], ["a"], name="first"),
            helper.make_node("Transpose", ["a"], ["t"], name="turn", perm=[1, 0]),
            helper.make_node("MatMul", ["t", "w1"], ["b"], name="second"),
            helper.make_node("Softmax", ["b"], ["y"], name="softmax", axis=-1),
        ],
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [96, 96])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [96, 96])],
        [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


MODEL = network_of_products()


def compiled(level: str = "V3", **options) -> Network:
    options = {"target": "cuda", "arch": "sm_90", "cubin": False, "device": "cpu", "tuning_log": None, **options}
    return souffle.compile(MODEL, level=level, **options)


def without_grid_barrier(func: tirx.PrimFunc, number: int = 0) -> tirx.PrimFunc:
    """`func` without its grid barrier of that number."""
    seen = -1

    def drop(node: tirx.Evaluate) -> tirx.Stmt:
        nonlocal seen
        found = isinstance(node.value, tvm.ir.Call) and str(node.value.args[0]) in names
        seen += found
        return tirx.Evaluate(tirx.IntImm("int32", 0)) if found and seen == number else node

    names = {f'"{name}"' for name in (COUNTER_FUNCTION, COMPLETION_FUNCTION)}
    body = tvm_ffi.structural_map(func.body, (tirx.Evaluate, drop))
    assert seen >= number
    return func.with_body(body)


def change(path: Path, edit: Callable[[dict[str, bytes]], None]) -> None:
    """Change a file's members, and its manifest with them."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    edit(members)
    manifest = json.loads(members.pop("manifest.json"))
    manifest["members"] = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in members.items()
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**members, "manifest.json": json.dumps(manifest).encode()}.items():
            archive.writestr(name, data)


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    status = main.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err
