"""Long indices of loops that are to be unrolled are worked out ahead of them, so that nvcc does unroll them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import tvm_ffi
from tvm import tirx

import souffle
from souffle.cli.compare import onnxruntime_outputs
from souffle.codegen.nvcc import find_nvcc
from souffle.schedule.lower import device_function as lower
from souffle.schedule.lower.unrolled_indices import with_short_indices
from tests.defects import mended
from tests.schedule.lower.test_tvm_defects import compiled, inputs, network, node

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")

TILE, LANE = tirx.Var("tile", "int32"), tirx.Var("lane", "int32")
X = tirx.decl_buffer((4096,), "float32", name="x")
TABLE = tirx.decl_buffer((64,), "int32", name="table")
OWN = tirx.decl_buffer((4,), "float32", name="own", scope="local")


def windows(at: object) -> object:
    """An index with three divisions by what is no power of two."""
    return tirx.truncdiv(at, 49) * 8 + tirx.truncmod(tirx.truncdiv(at, 7), 7) * 64


def shortened(index: object, *, kind: tirx.ForKind = tirx.ForKind.UNROLLED, own: object = LANE) -> tuple[int, tirx.For]:
    """How many indices are worked out ahead of a loop, and the loop."""
    body = tirx.BufferStore(OWN, X[index], [own])
    function = tirx.PrimFunc([TILE], tirx.For(LANE, 0, 4, kind, body))
    found: list[tirx.For] = []
    binds: list[tirx.Bind] = []
    made = with_short_indices(function).body
    tvm_ffi.structural_walk(made, [(tirx.For, found.append), (tirx.Bind, binds.append)])
    return len(binds), found[0]


def test_the_part_that_no_turn_changes_is_moved() -> None:
    count, loop = shortened(windows(TILE) + LANE)
    assert count == 1 and str(loop.body.value.indices[0]) == "base + lane"


@pytest.mark.parametrize(
    ("index", "options"),
    [
        (tirx.truncdiv(TILE, 49) * 8 + LANE, {}),
        (tirx.truncdiv(TILE, 4) + tirx.truncdiv(TILE, 8) + tirx.truncdiv(TILE, 16) + LANE, {}),
        (windows(TILE + LANE), {}),
        (windows(TABLE[TILE]) + LANE, {}),
        (windows(tirx.truncdiv(64, TILE)) + LANE, {}),
        (windows(TILE) + LANE, {"kind": tirx.ForKind.SERIAL}),
        (windows(TILE) + LANE, {"own": 0}),
    ],
)
def test_what_stays(index: object, options: dict) -> None:
    count, loop = shortened(index, **options)
    assert count == 0 and tvm_ffi.structural_equal(loop.body.value.indices[0], index)


def test_a_variable_of_the_loop_s_own_keeps_an_index_in_it() -> None:
    own = tirx.Var("own_place", "int32")
    body = tirx.SeqStmt([tirx.Bind(own, LANE * 4), tirx.BufferStore(OWN, X[windows(own) + LANE], [LANE])])
    function = tirx.PrimFunc([TILE], tirx.For(LANE, 0, 4, tirx.ForKind.UNROLLED, body))
    assert tvm_ffi.structural_equal(with_short_indices(function).body, function.body)


def put_back(width: int = 64) -> onnx.ModelProto:
    """A product of windows of 7 x 7 places, put back where they are in the image, and added to it."""
    weights = np.random.default_rng(0).standard_normal((width, width)).astype(np.float32)
    nodes = [
        node("MatMul", ["x", "w"], ["p"]),
        node("Reshape", ["p", "apart"], ["a"]),
        node("Transpose", ["a"], ["t"], perm=[0, 2, 1, 3, 4]),
        node("Reshape", ["t", "together"], ["u"]),
        node("Add", ["r", "u"], ["y"]),
    ]
    shapes = {"apart": np.array([8, 8, 7, 7, width]), "together": np.array([56, 56, width])}
    return network(nodes, ["y"], x=(64, 49, width), r=(56, 56, width), w=weights, **shapes)


def stack_of(model: onnx.ModelProto) -> int:
    (kernel,) = souffle.compile(model, target="cuda", arch="sm_90", level="V3", device="cpu").kernels
    return kernel.stack_bytes


@needs_nvcc
def test_a_thread_s_arrays_are_registers() -> None:
    assert stack_of(put_back()) == 0


@needs_nvcc
def test_nvcc_leaves_a_loop_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # Loops of loads alone are unrolled.
    for step in ("with_loads_ahead", "with_short_indices"):
        monkeypatch.setattr(lower, step, lambda function: function)
    assert stack_of(put_back()) >= 128, mended("lower/unrolled_indices.py", "nvcc")


def test_results_are_the_same() -> None:
    model = put_back(16)
    values = inputs(model)
    found = compiled(model)(values)
    for name, want in onnxruntime_outputs(model, values).items():
        assert np.allclose(found[name], want, rtol=1e-4, atol=1e-4)
