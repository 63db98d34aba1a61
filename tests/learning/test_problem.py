"""Features that are no graph are refused, and the room stands alone; PyTorch is not needed for either."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import souffle
from souffle.learning import GraphFeatures, PolicyError, require
from tests.learning.toys import graph

FOLDER = Path(souffle.__file__).parent / "learning"
NODES, EDGES, WEIGHTS = np.zeros((3, 2), np.float32), np.array([[0, 1], [1, 2]]), np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((NODES[:0], EDGES[:, :0], WEIGHTS[:0]), r"float32 \(0, 2\), which should be float32 \(n, F\) of one vertex"),
        ((NODES.astype(float), EDGES, WEIGHTS), "nodes are float64"),
        ((NODES, EDGES.T[:, :1], WEIGHTS), r"edges are int64 \(2, 1\)|edge_weights"),
        ((NODES, EDGES.astype(np.int32), WEIGHTS), "edges are int32"),
        ((NODES, EDGES, WEIGHTS[:1]), r"edge_weights are float32 \(1,\), which should be float32 \(2,\)"),
        ((NODES + np.float32(np.nan), EDGES, WEIGHTS), "no finite number"),
        ((NODES, EDGES, WEIGHTS + np.float32(np.inf)), "no finite number"),
        ((NODES, EDGES + 1, WEIGHTS), "no vertex of the 3"),
        ((NODES, EDGES - 1, WEIGHTS), "no vertex of the 3"),
        ((NODES, EDGES[::-1].copy(), WEIGHTS), "a consumer stands before its producer"),
    ],
)
def test_arrays_that_are_no_graph_are_refused(arrays: tuple, message: str) -> None:
    with pytest.raises(PolicyError, match=f"the features of the graph 'g' are not valid: .*({message})"):
        GraphFeatures("g", *arrays)


def test_graphs_compare_by_identity() -> None:
    one, other = graph(NODES, []), graph(NODES, [])
    assert one == one and one != other and len({one, other}) == 2


def test_what_is_missing_is_named() -> None:
    with pytest.raises(PolicyError, match=r"need no_such_module .*: pip install 'souffle-dl\[learn\]'"):
        require("numpy", "no_such_module")


BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "tvm", "onnx", "islpy"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import souffle.learning
souffle.learning.GraphFeatures, dir(souffle.learning)
try:
    souffle.learning.train
except souffle.learning.PolicyError as error:
    assert "torch (torch is blocked)" in str(error) and "souffle-dl[learn]" in str(error), error
else:
    raise AssertionError
"""


def test_the_room_can_be_entered_without_pytorch() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_room_knows_nothing_of_the_compiler_and_reads_no_pickles() -> None:
    libraries = {"torch", "torch_geometric", "safetensors", "numpy", "matplotlib"}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.split(".")[0]
                assert root in libraries | sys.stdlib_module_names | {"souffle"} and root != "pickle", name
                assert root != "souffle" or name.startswith(("souffle.learning", "souffle.errors")), name
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr not in {"load", "save"}, f"{path.name}:{node.lineno}"
