"""Programs made of plain ``te`` tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import te, tirx, topi

import souffle
from souffle.program import ProgramError, TEProgram


def matrix(name: str, *shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(shape or (4, 4), dtype, name=name)


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape or (4, 4)).astype(np.float32)


def test_a_graph_with_weights_and_a_shared_reduction_axis() -> None:
    x, w = matrix("x", 3, 4), matrix("w", 4, 4)
    k = te.reduce_axis((0, 4), name="k")
    first = te.compute((3, 4), lambda i, j: te.sum(x[i, k] * w[k, j], axis=[k]), name="first")
    second = te.compute((3, 4), lambda i, j: te.sum(first[i, k] * w[j, k], axis=[k]), name="second")
    total = te.compute((3, 4), lambda i, j: first[i, j] + second[i, j], name="total")
    weight, given = values(4, 4), values(3, 4)
    program = souffle.from_te([x], [total], {w: weight}, name="net")
    assert [te_.name for te_ in program.tes] == ["first", "second", "total"] and program.name == "net"
    assert [tensor.name for tensor in program.constants] == ["w"]
    assert program.tes[0].reduce_axes[0].var.name == "k"
    assert not program.tes[0].reduce_axes[0].var.same_as(program.tes[1].reduce_axes[0].var)
    product = given @ weight
    np.testing.assert_allclose(program.run([given])["total"], product + product @ weight.T, rtol=1e-4, atol=1e-5)


def test_names_are_made_unique_and_valid() -> None:
    x = matrix("float", 4)
    first = te.compute((4,), lambda i: x[i] + 1.0, name="a.b")
    second = te.compute((4,), lambda i: first[i] * 2.0, name="a.b")
    program = souffle.from_te({"the input": x}, {"the output": second})
    assert [te_.name for te_ in program.tes] == ["a_b", "a_b_1"]
    assert (program.input_names, program.output_names) == (("the input",), ("the output",))
    given = values(4)
    np.testing.assert_allclose(program.run({"the input": given})["the output"], (given + 1) * 2, rtol=1e-6)


def test_several_outputs_of_one_te() -> None:
    x = matrix("x", 3, 5)
    places = topi.argmax(x, axis=1)
    pair = places.op.input_tensors[0].op
    program = souffle.from_te([x], {"place": pair.output(0), "value": pair.output(1)})
    assert len(program.tes) == 1 and len(program.tes[0].outputs) == 2
    given = values(3, 5)
    found = program.run([given])
    np.testing.assert_array_equal(found["place"], given.argmax(1))
    np.testing.assert_array_equal(found["value"], given.max(1))


def test_library_graphs_in_one_call() -> None:
    x, w = matrix("x", 1, 2, 5, 5), matrix("w", 3, 2, 3, 3)
    result = topi.nn.softmax(topi.nn.flatten(topi.nn.relu(topi.nn.conv2d_nchw(x, w, 1, 1, 1))))
    program = souffle.from_te([x, w], {"y": result})
    found = program.run([values(1, 2, 5, 5), values(3, 2, 3, 3)])["y"]
    assert found.shape == (1, 75) and found.sum() == pytest.approx(1, abs=1e-5)


def test_unused_inputs_stay_and_unused_tes_do_not() -> None:
    x, unused = matrix("x"), matrix("unused")
    used = te.compute((4, 4), lambda i, j: x[i, j] + 1.0, name="used")
    te.compute((4, 4), lambda i, j: used[i, j] + unused[i, j], name="left_out")
    program = souffle.from_te([x, unused], [used])
    assert program.input_names == ("x", "unused") and len(program.tes) == 1


def _twice(x: te.Tensor, name: str) -> te.Tensor:
    return te.compute(x.shape, lambda i: x[i] * 2.0, name=name)


def _plus(x: te.Tensor, y: te.Tensor, name: str) -> te.Tensor:
    return te.compute(x.shape, lambda i: x[i] + y[i], name=name)


def test_steps_of_a_recurrence_stand_in_order() -> None:
    inputs = [matrix(f"x{step}", 2) for step in range(4)]
    state = te.compute((2,), lambda i: inputs[0][i] + 1.0, name="s0")
    for step in (1, 2, 3):
        read = _twice(inputs[step], f"r{step}")
        state = _plus(read, state, f"s{step}")
    program = souffle.from_te(inputs, [state])
    assert [te_.name for te_ in program.tes] == ["r1", "s0", "s1", "r2", "s2", "r3", "s3"]


def test_a_deep_graph() -> None:
    """Deeper than Python's recursion limit."""
    first = result = matrix("x", 2)
    for _ in range(1500):
        result = topi.negative(result)
    assert len(souffle.from_te([first], [result]).tes) == 1500


def test_a_compiled_program_computes_the_same() -> None:
    x = matrix("x", 8, 8)
    total = topi.sum(topi.exp(x), axis=1)
    program = souffle.from_te({"x": x}, {"y": total})
    given = values(8, 8)
    net = souffle.compile(program, target="cuda", arch="sm_90", cubin=False, device="cpu")
    np.testing.assert_allclose(net(given)["y"], program.run([given])["y"], rtol=1e-5)


def _sum(*tensors: te.Tensor) -> te.Tensor:
    return te.compute(tensors[0].shape, lambda i, j: sum((t[i, j] for t in tensors[1:]), tensors[0][i, j]), name="sum")


X, Y = matrix("X"), matrix("Y")
XY = _sum(X, Y)

WRONG: dict[str, tuple[Callable[[], TEProgram], str]] = {
    "a tensor that nothing gives": (
        lambda: souffle.from_te([X], [XY]),
        r"TE sum reads 'Y' of shape \[4, 4\], which is neither an input nor a constant",
    ),
    "an input that is computed": (lambda: souffle.from_te([X, Y, XY], [XY]), "input 'sum' is computed"),
    "a weight that is computed": (lambda: souffle.from_te([X, Y], [XY], {XY: values()}), "constant 'sum' is computed"),
    "an output that is not": (lambda: souffle.from_te([X, Y], [X]), "output 'X' is not made by te.compute"),
    "no outputs": (lambda: souffle.from_te([X], []), "has no outputs"),
    "an output twice": (lambda: souffle.from_te([X, Y], {"a": XY, "b": XY}), "output 'b' is sum: .* output already"),
    "an input that is a weight": (lambda: souffle.from_te([X, Y], [XY], {Y: values()}), "constant 'Y' is Y: .* given"),
    "one name for two inputs": (
        lambda: souffle.from_te([X, matrix("X")], [_sum(X, X)]),
        "two inputs are named 'X'; give te tensors names",
    ),
    "a weight of another type": (
        lambda: souffle.from_te([X], [XY], {Y: np.zeros((4, 4))}),
        r"constant 'Y' is float64 of shape \[4, 4\], expected float32 of shape \[4, 4\]",
    ),
    "a weight of another shape": (
        lambda: souffle.from_te([X], [XY], {Y: values(4)}),
        r"constant 'Y' is float32 of shape \[4\], expected float32 of shape \[4, 4\]",
    ),
    "an open shape": (
        lambda: souffle.from_te([te.placeholder((te.var("n"),), name="open")], [XY]),
        r"'open' has shape \[n\]; every extent must be a constant",
    ),
    "an open shape of a result": (
        lambda: souffle.from_te([X], [te.compute((te.var("n"), 4), lambda i, j: X[0, j], name="grown")]),
        r"'grown' has shape \[n, 4\]",
    ),
    "no tensor": (lambda: souffle.from_te(["X"], [XY]), "'X' is a str, and not a te.Tensor"),
    "an operator that is no expression": (
        lambda: souffle.from_te([X], [topi.argsort(X)]),
        "is a ExternOp; only te.compute makes tensor expressions",
    ),
}


@pytest.mark.parametrize(("build", "message"), WRONG.values(), ids=WRONG.keys())
def test_errors_name_the_tensor(build: Callable[[], TEProgram], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        build()


def test_bodies_of_every_kind() -> None:
    """Casts, choices and integer arithmetic, over axes of one extent."""
    x, n = matrix("x", 1, 6), matrix("n", 6, dtype="int32")
    result = te.compute(
        (1, 6), lambda i, j: tirx.if_then_else(n[j] % 2 == 0, x[i, j], n[j].astype("float32")), name="mixed"
    )
    numbers, given = np.arange(6, dtype=np.int32), values(1, 6)
    found = souffle.from_te([x, n], [result]).run([given, numbers])["mixed"]
    np.testing.assert_array_equal(found, np.where(numbers % 2 == 0, given, numbers.astype(np.float32)))
