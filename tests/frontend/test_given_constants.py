"""Values of inputs that are given at compile time: taken, checked, and asked for by the refusals that they help."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import souffle
from souffle import api
from souffle.errors import ModelError, OptionError, Refusal, UnsupportedOperatorError
from souffle.program.evaluate import evaluate
from tests.frontend.support import assert_same, model_of, node_model, reference

F, I64, I32, BOOL = "float32", "int64", "int32", "bool"
X = np.arange(12, dtype=F).reshape(3, 4)

# operator, the data's shape, values of the other inputs, attributes
PARAMETERS = {
    "axes": ("ReduceMean", [np.array([-1])], {"opset": 18}),
    "no axes": ("ReduceSum", [np.zeros(0, I64)], {"noop_with_empty_axes": 1}),
    "axis": ("CumSum", [np.array(1)], {}),
    "shape": ("Reshape", [np.array([2, -1])], {}),
    "squeezed": ("Unsqueeze", [np.array([0, -1])], {}),
    "repeats": ("Tile", [np.array([2, 1])], {}),
    "bounds": ("Slice", [np.array([-1]), np.array([0]), np.array([1]), np.array([-2])], {}),
    "split": ("Split", [np.array([1, 3])], {"axis": 1, "outputs": 2}),
    "k": ("TopK", [np.array([2])], {"outputs": 2}),
    "depth": ("OneHot", [np.array(12, F), np.array([0, 2], F)], {}),
    "pads": ("Pad", [np.array([0, 1, 2, 0]), np.array(7, F)], {}),
    "expanded": ("Expand", [np.array([2, 1, 4])], {}),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_asked_for_by_name_and_taken(name):
    operator, values, attributes = PARAMETERS[name]
    model = node_model(
        operator, [(F, X.shape), *((str(v.dtype), v.shape) for v in values)], **{"opset": 17} | attributes
    )
    given = {"x0": X, **{f"x{k}": value for k, value in enumerate(values, 1)}}
    needs = () if name == "no axes" else needed(model)
    assert needs or name == "no axes"
    program = souffle.import_onnx(model, constants={need: given[need] for need in needs})
    feeds = {label: given[label] for label in program.input_names}
    assert not set(feeds) & set(needs)
    assert_same(evaluate(program, feeds), reference(model, given))


def needed(model: onnx.ModelProto) -> tuple[str, ...]:
    with pytest.raises(UnsupportedOperatorError) as refused:
        souffle.import_onnx(model)
    error = refused.value
    assert error.refusal is Refusal.PARAMETER
    assert f"compile with constants={{{', '.join(f'{name!r}: ...' for name in error.needs)}}}, or give" in str(error)
    return error.needs


def gather_model() -> onnx.ModelProto:
    """Rows of x, whose batch is open, and a sum along axes inside of a function and a branch."""
    nodes = [
        helper.make_node("Gather", ["x", "rows"], ["a"], axis=1),
        helper.make_node("Inner", ["a", "axes"], ["y"], domain="local", name="outer"),
    ]
    body = [helper.make_node("Abs", ["p"], ["q"]), helper.make_node("ReduceSum", ["q", "at"], ["r"], keepdims=0)]
    opsets = [helper.make_opsetid("", 17)]
    inner = helper.make_function("local", "Inner", ["p", "at"], ["r"], body, opsets)
    inputs = {"x": (F, ("N", 4)), "rows": (I64, ("R",)), "axes": (I64, (1,)), "mask": (F, ("N",))}
    return model_of(nodes, inputs, ["y"], functions=[inner], domains=["local"])


def test_inputs_are_found_through_functions_and_beside_a_batch():
    model, rows = gather_model(), np.array([3, 0, 0])
    with pytest.raises(UnsupportedOperatorError, match="it is made of others") as refused:
        souffle.import_onnx(model, batch=3, constants={"rows": rows})
    assert (refused.value.needs, refused.value.refusal) == (("axes",), Refusal.PARAMETER)
    program = souffle.import_onnx(model, batch=3, constants={"rows": rows, "axes": [-1]})
    assert program.input_names == ("x", "mask")
    found = evaluate(program, {"x": X, "mask": np.zeros(3, F)})["y"]
    np.testing.assert_array_equal(found, X[:, rows].sum(axis=-1))


def test_what_depends_on_data_is_not_asked_for():
    nodes = [helper.make_node("Compress", ["x", "c"], ["y"]), helper.make_node("EyeLike", ["y"], ["z"])]
    with pytest.raises(UnsupportedOperatorError) as refused:
        souffle.import_onnx(model_of(nodes, {"x": (F, (3, 3)), "c": (BOOL, (3,))}, ["z"]))
    assert (refused.value.refusal, refused.value.needs) == (Refusal.DATA, ())


@pytest.mark.parametrize(
    ("constants", "words"),
    [
        ({"axis": [0]}, "has no input named 'axis'; it takes 'x' .float32.N, 4.., .* did you mean 'axes'"),
        ({"axes": np.array([0], I32)}, "input 'axes' .* takes int64.1. and was given int32.1.; convert it yourself"),
        ({"axes": [0, 1]}, "takes int64.1. and was given .2,.; give a value of this shape"),
        ({"axes": 0}, "give a value of this shape"),
        ({"axes": [0.5]}, "was given .0.5., which it does not hold"),
        ({"axes": [True]}, "which it does not hold"),
        ({"axes": [2**70]}, "which it does not hold"),
        ({"axes": ["a"]}, "which it does not hold"),
        ({"axes": "0"}, "which it does not hold"),
        ({"axes": [float("inf")]}, "which it does not hold"),
        ({"x": [[1, 2, 3, 1e39]] * 3}, "which it does not hold"),
        ({"x": [[1, 2, 3, 2**24 + 1]] * 3}, "which it does not hold"),
        ({"axes": [[0], [1, 2]]}, "which it does not hold"),
        ({"axes": None}, "which it does not hold"),
        ({"mask": np.zeros(2, F)}, "N is 3 by batch="),
        (["axes"], "give a mapping of names of inputs to their values"),
    ],
)
def test_what_is_no_value_of_an_input_is_refused(constants, words):
    with pytest.raises(OptionError, match=words):
        souffle.import_onnx(gather_model(), batch=3, constants=constants)


def test_dimensions_of_one_name_have_one_extent():
    with pytest.raises(OptionError, match="N is 3 by the value of 'x'"):
        souffle.import_onnx(gather_model(), constants={"x": X, "mask": np.zeros(2, F)})


def window_model() -> onnx.ModelProto:
    """Rows of x, and sums of it; what is m has a row for each of them, as long as follows from both."""
    nodes = [
        helper.make_node("ReduceSum", ["x", "axes"], ["s"], keepdims=0, name="sum"),
        helper.make_node("Gather", ["x", "rows"], ["y"], axis=1),
        helper.make_node("Abs", ["m"], ["z"]),
    ]
    inputs = {"x": (F, ("batch", "seq", 4)), "axes": (I64, ("n",)), "rows": (I64, ("r",)), "m": (F, ("r", "2*r + seq"))}
    model = model_of(nodes, inputs, ["s", "y", "z"])
    shapes = (["batch", "seq"], ["batch", "r", 4], ["r", "seq + r*2"])
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip("syz", shapes, strict=True)]
    del model.graph.output[:]
    model.graph.output.extend(infos)
    return model


WINDOW = {"axes": [-1], "rows": [1, 0, 0]}


@pytest.mark.parametrize(
    ("given", "shapes"),
    [
        ({"dims": {"batch": 2, "seq": 5}}, [(2, 5, 4), (3, 11)]),
        ({"dims": {"batch": 2, "seq": 5, "r": 3, "n": 1}}, [(2, 5, 4), (3, 11)]),
        ({"batch": 3, "dims": {"seq": 5}}, [(3, 5, 4), (3, 11)]),
        ({"dims": {"batch": 2, "seq": 5}, "constants": WINDOW | {"m": np.zeros((3, 11), F)}}, [(2, 5, 4)]),
        ({"dims": {"batch": 2, "seq": 5}, "constants": WINDOW | {"rows": []}}, [(2, 5, 4), (0, 5)]),
        ({"constants": WINDOW | {"x": np.zeros((2, 5, 4), F)}}, [(3, 11)]),
        ({"constants": WINDOW | {"x": np.zeros((2, 5, 4), F), "m": np.zeros((3, 11), F)}}, []),
    ],
)
def test_open_dimensions_follow_from_values(given, shapes):
    program = souffle.import_onnx(window_model(), **{"constants": WINDOW} | given)
    assert [tensor.shape for tensor in program.inputs] == shapes


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (OptionError, {"dims": {"batch": 2, "seq": 5, "r": 4}}, "input 'rows' .* was given .3,.; r is 4 by dims"),
        (OptionError, {"dims": {"batch": 2, "seq": [5, 7], "r": [3, 4]}}, "r is 4 by dims"),
        (OptionError, {"batch": 2, "dims": {"seq": 5}}, "r is 2 by batch=2"),
        (OptionError, {"dims": {"batch": 2, "sec": 5}}, "'r' .dimension 0 of input 'm'., 'n' .* mean 'seq'"),
        (ModelError, {}, 'and .seq. too; pass dims={"batch": ..., "seq": ...} to fix them'),
        (
            OptionError,
            {"dims": {"batch": 2, "seq": [5, 7]}, "constants": WINDOW | {"m": np.zeros((3, 11), F)}},
            r"2\*r . seq is 13 by dims and the value of 'rows'",
        ),
        (
            OptionError,
            {"dims": {"batch": 2, "seq": 5}, "constants": WINDOW | {"m": np.zeros((2, 9), F)}},
            "r is 3 by the value of 'rows'",
        ),
        (
            OptionError,
            {"dims": {"batch": [2]}, "constants": WINDOW | {"x": np.zeros((2, 5, 4), F)}},
            "dims={'batch': .2.} has no effect: constants settle",
        ),
        (
            UnsupportedOperatorError,
            {"dims": {"batch": 2, "seq": [5, 7], "n": 1}, "constants": {"rows": [0]}},
            "compile with constants={'axes': ...}",
        ),
        (
            ModelError,
            {"dims": {"batch": 2, "seq": 5}, "constants": {}},
            'dims={"n": ..., "r": ...} to fix them .* constants={"axes": ..., "rows": ...} gives them',
        ),
    ],
)
def test_values_and_dimensions_that_disagree_are_refused(kind, given, words, monkeypatch):
    monkeypatch.setattr(api, "network_of", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(kind, match=words) as refused:
        souffle.compile(window_model(), target="cpu", **{"constants": WINDOW} | given)
    assert type(refused.value) is kind


@pytest.mark.parametrize("options", [{"target": "cpu"}, {"target": "cuda", "device": "cpu", "cubin": False}])
def test_versions_have_the_constants(options, tmp_path):
    net = souffle.compile(
        window_model(), dims={"batch": [2], "seq": [3, 5]}, constants=WINDOW, level="V1", on_demand=True, **options
    )
    assert net.dimensions == ("batch", "seq")
    assert [spec.shape for spec in net.signature.inputs] == [("batch", "seq", 4), (3, "2 * 3 + seq")]
    net.save(tmp_path / "net.souffle")
    again = souffle.load(tmp_path / "net.souffle", device=options.get("device", "auto"))
    for network, extents in ((net, (2, 3)), (net, (2, 5)), (again, (2, 5)), (net, (1, 2))):
        x, m = (np.random.default_rng(0).standard_normal(s).astype(F) for s in ((*extents, 4), (3, 6 + extents[1])))
        found = network({"x": x, "m": m})
        np.testing.assert_allclose(found["s"], x.sum(axis=-1), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found["y"], x[:, WINDOW["rows"]])
        np.testing.assert_array_equal(found["z"], abs(m))


@pytest.mark.parametrize(
    ("element", "given", "taken"),
    [
        (TensorProto.FLOAT, [1, 2.5], np.array([1, 2.5], F)),
        (TensorProto.FLOAT16, [0.1, -1], np.array([0.1, -1], "float16")),
        (TensorProto.BFLOAT16, [0.1, 3], np.array([0.1, 3]).astype(helper.tensor_dtype_to_np_dtype(16))),
        (TensorProto.INT8, (-128, 127), np.array([-128, 127], "int8")),
        (TensorProto.UINT64, [2**64 - 1, 0], np.array([2**64 - 1, 0], "uint64")),
        (TensorProto.BOOL, [True, False], np.array([True, False])),
    ],
)
def test_numbers_take_the_type_of_the_input(element, given, taken):
    infos = [helper.make_tensor_value_info(name, element, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    program = souffle.import_onnx(model, constants={"x": given})
    found = evaluate(program, {})["y"]
    assert found.dtype == taken.dtype
    np.testing.assert_array_equal(found, taken)


def test_a_default_gives_way_and_a_weight_does_not():
    model = node_model("Add", [(F, (3,)), np.ones(3, F)])
    with pytest.raises(OptionError, match="'x1' is a weight of the given model and no input"):
        souffle.import_onnx(model, constants={"x1": np.zeros(3, F)})
    model.graph.input.append(helper.make_tensor_value_info("x1", TensorProto.FLOAT, [3]))
    for constants, least in (({}, 1.0), ({"x1": [5, 6, 7]}, 5.0)):
        program = souffle.import_onnx(model, constants=constants)
        assert evaluate(program, {"x0": np.zeros(3, F)})["y0"].min() == least


def test_a_program_has_one_value_of_a_dimension():
    with pytest.raises(OptionError, match=r"'seq' the value \[5, 7\]; .* lists of values are for souffle.compile"):
        souffle.import_onnx(window_model(), dims={"batch": 2, "seq": [5, 7]}, constants=WINDOW)


def test_what_was_given_is_kept_as_it_was():
    values = np.array([1.0, 2.0], F)
    program = souffle.import_onnx(node_model("Add", [(F, (2,)), (F, (2,))]), constants={"x1": values})
    values[:] = 0
    np.testing.assert_array_equal(evaluate(program, {"x0": np.zeros(2, F)})["y0"], [1.0, 2.0])


@pytest.mark.parametrize("options", [{"target": "cpu"}, {"target": "cuda", "device": "cpu", "cubin": False}])
def test_networks_of_other_values_are_other_networks(options):
    model = node_model("ReduceSum", [(F, X.shape), (I64, (1,))])
    for axis in (0, 1):
        network = souffle.compile(model, constants={"x1": [axis]}, **options)
        np.testing.assert_array_equal(network(X)["y0"], X.sum(axis=axis, keepdims=True))


def test_a_program_has_its_constants():
    program = souffle.import_onnx(node_model("Abs", [(F, (3,))]))
    with pytest.raises(OptionError, match=r"constants={.x0.: \.\.\.} has no effect"):
        souffle.compile(program, constants={"x0": [1, 2, 3]})
    souffle.compile(program, constants={}, target="cpu")


def test_an_initializer_helps_as_well():
    model = node_model("ReduceSum", [(F, X.shape), (I64, (1,))])
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "x1"))
    assert souffle.import_onnx(model).input_names == ("x0",)
