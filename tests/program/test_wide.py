"""Index arithmetic that 32 bits do not hold."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import te, tirx

import souffle
from souffle.program.wide import wide_bodies, with_wide_indices
from souffle.tvm_compat import dtype_of, fresh_axis

LARGE = 12405735


def resized() -> tuple[onnx.ModelProto, np.ndarray, np.ndarray]:
    """A nearest element of a long axis for each of few."""
    node = helper.make_node(
        "Resize",
        ["x", "", "", "s"],
        ["y"],
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
    graph = helper.make_graph(
        [node],
        "resized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, LARGE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 233])],
        [numpy_helper.from_array(np.array([1, 1, 233], np.int64), "s")],
    )
    x = np.arange(LARGE, dtype=np.float32).reshape(1, 1, LARGE)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return model, x, x[..., np.arange(233) * LARGE // 233]


def squared() -> tuple[souffle.TEProgram, np.ndarray, np.ndarray]:
    """An element at the square of the place, over a number."""
    x = te.placeholder((70000,), "float32", name="x")
    program = souffle.from_te([x], [te.compute((70000,), lambda i: x[i * i // 109350], name="y")])
    values = np.random.default_rng(0).standard_normal(70000).astype(np.float32)
    return program, values, values[np.arange(70000) ** 2 // 109350]


@pytest.mark.parametrize("network", [resized, squared])
@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_the_elements_that_are_meant_are_read(network, target: str) -> None:
    model, x, expected = network()
    options = {"device": "cpu", "cubin": False, "verify": "values"} if target == "cuda" else {}
    net = souffle.compile(model, target=target, **options)
    (y,) = net({"x": x}).values()
    np.testing.assert_array_equal(y, expected)
    assert target == "cpu" or net.certificate.verdict == "PROVEN"


def test_programs_themselves_compute_in_64_bits() -> None:
    program, x, expected = squared()
    (y,) = program.run([x]).values()
    np.testing.assert_array_equal(y, expected)


def of(index, extent: int, data: bool = False) -> str:
    """The text of a TE's index over one axis."""
    axis = fresh_axis(extent, "i")
    source = te.placeholder((extent,), "int32", name="x")
    (body,) = wide_bodies([axis], [source(index(source(axis.var) if data else axis.var))])
    return str(body)


@pytest.mark.parametrize(
    ("index", "extent", "wide"),
    [
        (lambda i: i * 1000 // 1000, 2_147_483, False),
        (lambda i: i * 1000 // 1000, 2_147_485, True),
        (lambda i: i - (2**31 - 1) + (2**31 - 1), 8, False),
        (lambda i: i - (2**31 - 1) - 7 + (2**31 - 1) + 7, 8, True),
        (lambda i: tirx.min(i * i, 7), 46_341, False),
        (lambda i: tirx.min(i * i, 7), 46_342, True),
        (lambda i: tirx.Select(i * i < 7, i, 0), 46_342, True),
        (lambda i: (i << 20) >> 20, 2**11, False),
        (lambda i: (i << 20) >> 20, 2**11 + 1, True),
    ],
)
def test_bounds(index, extent: int, wide: bool) -> None:
    assert ("int64" in of(index, extent)) == wide


def test_integers_of_tensors_wrap_around() -> None:
    assert "int64" not in of(lambda x: tirx.max(tirx.min(x * 70000, 9), 0), 10, data=True)


def test_statements_keep_their_types() -> None:
    """Names for numbers that 32 bits do not hold hold 64; what is stored has the type that it had."""
    tile, part = tirx.Var("tile", "int32"), tirx.Var("part", "int32")
    x, y = (tirx.decl_buffer((2**33,), "int32", name=name) for name in "xy")
    body = tirx.SeqStmt(
        [
            tirx.Bind(part, tile * 2**16),
            tirx.BufferStore(y, tirx.Broadcast(x[part + 1] + tile, 4), [tirx.Ramp(part, 1, 4) + tirx.Broadcast(5, 4)]),
        ]
    )
    assert with_wide_indices(body, {tile: 2**15 - 8}).same_as(body)
    bind, store = with_wide_indices(body, {tile: 2**15 + 8}).seq
    assert dtype_of(bind.var) == dtype_of(bind.value) == dtype_of(store.value.value.a.indices[0]) == "int64"
    assert dtype_of(store.indices[0]) == "int64x4" and dtype_of(store.value) == "int32x4"
