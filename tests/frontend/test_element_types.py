"""What tensors may hold: every type is right, or refused with its name."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from tvm import te

import souffle
from souffle.frontend.from_te import from_te
from souffle.program import ProgramError
from tests.frontend.support import model_of, node_model

pytestmark = pytest.mark.sampled(4)


def there_and_back(element: int, shape: tuple[int, ...]):
    nodes = [helper.make_node("Cast", ["x"], ["t"], "narrowing", to=element)]
    nodes += [helper.make_node("Cast", ["t"], ["y"], to=TensorProto.FLOAT)]
    return model_of(nodes, {"x": ("float32", shape)}, ["y"], opset=25)


@pytest.mark.parametrize("dtype", ["int4", "float8_e4m3fn"])
def test_an_expression_of_a_type_that_cannot_be_held_is_refused(dtype):
    x = te.placeholder((8,), "float32", name="x")
    narrow = te.compute((8,), lambda i: x[i].astype(dtype), name="narrow")
    with pytest.raises(ProgramError, match=f"narrow: {dtype}.*tensors cannot hold"):
        from_te([x], [narrow])
    with pytest.raises(ProgramError, match=f"y: {dtype}.*tensors cannot hold"):
        y = te.placeholder((8,), dtype, name="y")
        from_te([y], [te.compute((8,), lambda i: y[i].astype("float32"), name="wide")])


@pytest.mark.parametrize("options", [{"target": "cpu"}, {"target": "cuda", "device": "cpu", "cubin": False}])
def test_bfloat16_rounds_to_the_nearest_even(options):
    special = [np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-40, 0.0, -0.0, 1.00390625, 1.01171875]
    bits = np.random.default_rng(0).integers(0, 2**32, 997, dtype=np.uint32)
    bits[:3] = 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001
    x = np.concatenate([bits.view("float32"), np.array(special, "float32")])
    network = souffle.compile(there_and_back(TensorProto.BFLOAT16, x.shape), **options)
    with np.errstate(all="ignore"):
        want = x.astype(ml_dtypes.bfloat16).astype("float32")
    np.testing.assert_array_equal(network(x)["y"], want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [{"target": "cpu"}, {"target": "cuda", "device": "cpu", "cubin": False}])
def test_functions_that_targets_have_in_single_precision_alone(options, dtype):
    functions = {"Acos": np.arccos, "Asin": np.arcsin, "Asinh": np.arcsinh, "Atan": np.arctan, "Atanh": np.arctanh}
    functions |= {"Cosh": np.cosh, "Sinh": np.sinh, "Tan": np.tan, "Round": np.rint}
    x = np.linspace(-0.9, 0.9, 37).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    nodes = [helper.make_node(name, ["x"], [name]) for name in functions]
    nodes += [helper.make_node("Add", ["x", "two"], ["more"]), helper.make_node("Acosh", ["more"], ["Acosh"])]
    model = model_of(nodes, {"x": (x.dtype, x.shape)}, [*functions, "Acosh"], {"two": np.array(2, x.dtype)}, opset=22)
    got = souffle.compile(model, **options)(x)
    want = {name: function(x.astype("float32")) for name, function in functions.items()}
    want["Acosh"] = np.arccosh((x + np.array(2, x.dtype)).astype("float32"))
    for name, expected in want.items():
        assert got[name].dtype == x.dtype
        np.testing.assert_allclose(
            got[name].astype("float32"), expected, rtol=1e-2 if dtype == "bfloat16" else 1e-3, atol=1e-6
        )


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("options", [{"target": "cpu"}, {"target": "cuda", "device": "cpu", "cubin": False}])
def test_sums_of_half_precision_do_not_stick(options, dtype):
    """A sum of ones in half precision ends at 2048 (256 in bfloat16), where the next number is two away."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["product"]), helper.make_node("ReduceSum", ["x"], ["total"])]
    nodes += [helper.make_node("GlobalAveragePool", ["image"], ["mean"])]
    nodes += [helper.make_node("Einsum", ["x", "w"], ["einsum"], equation="ab,bc->ac")]
    dtype = np.dtype(dtype)
    inputs = {"x": (dtype, (2, 4096)), "image": (dtype, (1, 1, 64, 64))}
    model = model_of(nodes, inputs, ["product", "total", "mean", "einsum"], {"w": np.ones((4096, 3), dtype)}, opset=22)
    got = souffle.compile(model, **options)({"x": np.ones((2, 4096), dtype), "image": np.ones((1, 1, 64, 64), dtype)})
    want = {"product": np.full((2, 3), 4096, dtype), "total": np.full((1, 1), 8192, dtype)}
    want["einsum"] = want["product"]
    want["mean"] = np.ones((1, 1, 1, 1), dtype)
    for name, expected in want.items():
        assert got[name].dtype == dtype
        np.testing.assert_array_equal(got[name].astype("float32"), expected.astype("float32"), err_msg=name)


@pytest.mark.parametrize("options", [{"target": "cpu"}, {"target": "cuda", "device": "cpu", "cubin": False}])
def test_a_lowest_number_of_bfloat16_is_no_start_of_a_maximum(options):
    x = np.full((2, 3), -np.inf, ml_dtypes.bfloat16)
    nodes = [helper.make_node("ReduceMax", ["x", "axes"], ["y"]), helper.make_node("Min", ["x", "two"], ["z"])]
    known = {"axes": np.array([1]), "two": np.array([2, np.nan, -1], x.dtype)}
    got = souffle.compile(model_of(nodes, {"x": (x.dtype, x.shape)}, ["y", "z"], known, opset=20), **options)(x)
    np.testing.assert_array_equal(got["y"].astype("float32"), [[-np.inf]] * 2)
    np.testing.assert_array_equal(got["z"].astype("float32"), [[-np.inf, np.nan, -np.inf]] * 2)


@pytest.mark.parametrize("options", [{"target": "cpu"}, {"target": "cuda", "device": "cpu", "cubin": False}])
@pytest.mark.parametrize(
    ("source", "target"),
    [("uint8", "int8"), ("uint16", "int8"), ("uint32", "int32"), ("uint64", "int32"), ("uint64", "int64")],
)
def test_what_was_unsigned_may_be_negative(options, source, target):
    most = np.iinfo(source).max
    x = np.array([0, 1, 3, most, most - 1, most // 2 + 1, most // 2], source)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(target))
    nodes = [helper.make_node("Cast", ["x"], ["cast"], to=element), helper.make_node("Sign", ["cast"], ["sign"])]
    nodes += [helper.make_node("Mod", ["cast", "three"], ["rest"]), helper.make_node("Relu", ["cast"], ["relu"])]
    model = model_of(
        nodes, {"x": (source, x.shape)}, ["cast", "sign", "rest", "relu"], {"three": np.array(3, target)}, opset=19
    )
    got, cast = souffle.compile(model, **options)(x), x.astype(target)
    for name, want in {"cast": cast, "sign": np.sign(cast), "rest": cast % 3, "relu": np.maximum(cast, 0)}.items():
        np.testing.assert_array_equal(got[name], want.astype(target), err_msg=name)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("outputs", [["y"], ["y", "mean", "inverse"]])
def test_layer_normalization_is_as_precise_as_its_type(dtype, outputs):
    x = 1000 + np.random.default_rng(0).standard_normal((5, 37)).astype(dtype)
    node = helper.make_node("LayerNormalization", ["x", "scale"], outputs, epsilon=1e-3)
    model = model_of([node], {"x": (dtype, x.shape)}, outputs, {"scale": np.ones(37, dtype)}, opset=17)
    got = souffle.compile(model, target="cpu")(x)
    exact = x.astype("float64")
    mean, epsilon = exact.mean(1, keepdims=True), float(np.float32(1e-3))
    inverse = 1 / np.sqrt(exact.var(1, keepdims=True) + epsilon)
    error = 1e-13 if dtype == "float64" else 1e-7
    np.testing.assert_allclose(got["y"], (exact - mean) * inverse, rtol=0, atol=1e4 * error)
    if "inverse" in got:
        assert got["mean"].dtype == got["inverse"].dtype == "float32"
        np.testing.assert_allclose(got["mean"], mean, rtol=1e-6)
        np.testing.assert_allclose(got["inverse"], inverse, rtol=1e-4)


_LARGE = {
    "ReduceMean": ({}, lambda x: x.mean((0, 1, 2, 3), keepdims=True)),
    "ReduceLogSum": ({}, lambda x: np.log(x.sum(keepdims=True))),
    "ReduceL2": ({"keepdims": 0}, lambda x: np.sqrt((x * x).sum())),
    "GlobalAveragePool": ({}, lambda x: x.mean((2, 3), keepdims=True)),
    "AveragePool": ({"kernel_shape": [8, 8]}, lambda x: x.mean((2, 3), keepdims=True)),
    "LpPool": ({"kernel_shape": [8, 8], "p": 2}, lambda x: np.sqrt((x * x).sum((2, 3), keepdims=True))),
    "LpNormalization": ({"axis": 3}, lambda x: x / np.sqrt((x * x).sum(3, keepdims=True))),
    "MeanVarianceNormalization": (
        {},
        lambda x: (x - x.mean((0, 2, 3), keepdims=True)) / x.std((0, 2, 3), keepdims=True),
    ),
    "Mean": ({}, lambda x: (x + x + x) / 3),
}


def test_half_precision_is_reduced_over_the_axes_that_are_given():
    x = np.full((2, 3, 128), 900, "float16")
    nodes = [helper.make_node(name, ["x", "axes"], [name], keepdims=0) for name in ("ReduceMean", "ReduceL2")]
    model = model_of(nodes, {"x": (x.dtype, x.shape)}, ["ReduceMean", "ReduceL2"], {"axes": np.array([-1])}, opset=18)
    got = souffle.compile(model, target="cpu")(x)
    np.testing.assert_array_equal(got["ReduceMean"], np.full((2, 3), 900, "float16"))
    np.testing.assert_allclose(got["ReduceL2"], np.full((2, 3), 900 * np.sqrt(128)), rtol=1e-3)


@pytest.mark.parametrize("operator", _LARGE)
def test_half_precision_does_not_overflow_before_its_result(operator):
    """Sums and squares beyond 65504, of which means, roots and logarithms are not."""
    attributes, function = _LARGE[operator]
    scale = 300 if operator == "ReduceL2" else 3000
    x = (scale * (1 + np.random.default_rng(0).random((1, 2, 8, 8)))).astype("float16")
    x = (x * np.float16(6)).astype("float16") if operator == "Mean" else x
    node = helper.make_node(operator, ["x"] * (3 if operator == "Mean" else 1), ["y"], **attributes)
    network = souffle.compile(model_of([node], {"x": ("float16", x.shape)}, ["y"], opset=18), target="cpu")
    got = network(x)["y"]
    assert got.dtype == "float16"
    np.testing.assert_allclose(got.astype("float64"), function(x.astype("float64")), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("opset", [12, 18])
def test_exponentials_in_half_precision_are_summed_where_the_axis_is_long(opset):
    """Of rows as long as a vocabulary; before operator set 13 a softmax runs over all axes from its own on."""
    names, shape = ("Softmax", "LogSoftmax", "ReduceLogSumExp"), (2, 7, 9430)
    x = np.zeros(shape if opset == 12 else (2, 66010), "float16")
    nodes = [helper.make_node(name, ["x"], [name], axis=1) for name in names[:2]]
    nodes.append(helper.make_node(names[2], ["x"], [names[2]]))
    got = souffle.compile(model_of(nodes, {"x": (x.dtype, x.shape)}, names, opset=opset), target="cpu")(x)
    np.testing.assert_allclose(got["Softmax"], np.full(x.shape, 1 / 66010), rtol=0, atol=2**-24)
    np.testing.assert_allclose(got["LogSoftmax"], np.full(x.shape, -np.log(66010)), rtol=1e-3)
    np.testing.assert_allclose(got["ReduceLogSumExp"].ravel(), np.log(2 * 66010), rtol=1e-3)


@pytest.mark.parametrize("options", [{"target": "cpu"}, {"target": "cuda", "device": "cpu", "cubin": False}])
def test_differences_of_unsigned_integers_wrap_around(options):
    for dtype in ("uint8", "uint32", "uint64"):
        x = np.array([0, 1, 5, 200], dtype)
        nodes = [helper.make_node("Sub", ["one", "x"], ["less"]), helper.make_node("Max", ["less", "one"], ["most"])]
        # The difference of what TVM finds to be one.
        nodes += [helper.make_node("Div", ["x", "x"], ["unit"]), helper.make_node("Sub", ["zero", "unit"], ["minus"])]
        constants = {"one": np.array(1, dtype), "zero": np.array(0, dtype)}
        model = model_of(nodes, {"x": (dtype, x.shape)}, ["less", "most", "minus"], constants, opset=18)
        got, less = souffle.compile(model, **options)(x), np.array(1, dtype) - x
        np.testing.assert_array_equal(got["less"], less)
        np.testing.assert_array_equal(got["most"], np.maximum(less, 1))


def test_half_precision_does_not_overflow_between_where_normalization_ends():
    """The distance from the mean, over a deviation below one, is beyond 65504; the result is not."""
    node = helper.make_node("BatchNormalization", ["x", "scale", "shift", "mean", "variance"], ["y"])
    rows = {"scale": 0.5, "shift": 1.0, "mean": 1.0, "variance": 0.25}
    inputs = {"x": ("float16", (1, 2, 3)), **dict.fromkeys(rows, ("float16", (2,)))}
    network = souffle.compile(model_of([node], inputs, ["y"], opset=15), target="cpu")
    x = np.array([[[6e4, -6e4, 1.0], [3.0, 2.0, 5e4]]], "float16")
    got = network({"x": x, **{name: np.full(2, value, "float16") for name, value in rows.items()}})["y"]
    np.testing.assert_allclose(got, (x.astype("float32") - 1) / np.sqrt(0.25 + 1e-5) * 0.5 + 1, rtol=1e-3)


@pytest.mark.parametrize("options", [{"target": "cpu"}, {"target": "cuda", "device": "cpu", "cubin": False}])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
def test_what_wraps_around_is_not_cancelled_in_comparisons(options, dtype):
    x, one = np.array([0, 1, np.iinfo(dtype).max, np.iinfo(dtype).min, 5], dtype), np.array(1, dtype)
    nodes = [helper.make_node("Add", ["x", "one"], ["more"]), helper.make_node("Less", ["x", "more"], ["less"])]
    nodes += [helper.make_node("GreaterOrEqual", ["more", "x"], ["not_less"])]
    nodes += [helper.make_node("Sub", ["x", "more"], ["minus"])]
    model = model_of(nodes, {"x": (dtype, x.shape)}, ["less", "not_less", "minus"], {"one": one}, opset=18)
    got = souffle.compile(model, **options)(x)
    with np.errstate(over="ignore"):
        more = (x + one).astype(dtype)
        want = {"less": x < more, "not_less": more >= x, "minus": (x - more).astype(dtype)}
    for name, expected in want.items():
        np.testing.assert_array_equal(got[name], expected, err_msg=name)


def test_interpolated_integers_are_rounded_and_doubles_stay_doubles():
    rng = np.random.default_rng(0)
    for dtype, shape, options in [
        ("uint8", (1, 1, 4, 4), {"mode": "cubic"}),
        ("int64", (1, 1, 5), {"mode": "linear"}),
        ("float64", (1, 1, 3, 4), {"mode": "linear"}),
    ]:
        x = rng.uniform(0, 255, shape).astype(dtype)
        sizes = np.array([*shape[:2], *(2 * extent + 1 for extent in shape[2:])])
        model = node_model("Resize", [(dtype, shape), None, None, sizes], opset=19, **options)
        got = souffle.compile(model, target="cpu", level="V0")(x)["y0"]
        (want,) = ReferenceEvaluator(model).run(None, {"x0": x})
        assert got.dtype == x.dtype
        np.testing.assert_allclose(got, want, rtol=1e-12 if dtype == "float64" else 0)


def test_operators_that_types_were_missing_in():
    rng = np.random.default_rng(0)
    numbers = rng.uniform(0.5, 3, (2, 3, 2, 2))
    bfloat = numbers.astype(ml_dtypes.bfloat16)
    special = np.array([np.nan, np.inf, -np.inf, 0], ml_dtypes.bfloat16)
    cases = [
        (node_model("Pow", [("bfloat16", bfloat.shape)] * 2, opset=15), [bfloat, bfloat], 1e-2),
        (
            node_model("Pow", [("float32", (3,)), ("float64", (3,))], opset=15),
            [np.float32([2, 3, 5]), np.full(3, 0.1)],
            1e-6,
        ),
        (node_model("IsNaN", [("bfloat16", (4,))], opset=20), [special], 0),
        (node_model("IsInf", [("bfloat16", (4,))], opset=20, detect_negative=0), [special], 0),
        (node_model("LRN", [("bfloat16", bfloat.shape)], opset=13, size=3), [bfloat], 1e-2),
    ]
    for model, given, tolerance in cases:
        got = souffle.compile(model, target="cpu", level="V0")(*given)["y0"]
        (want,) = ReferenceEvaluator(model).run(None, {f"x{k}": array for k, array in enumerate(given)})
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got.astype("float64"), want.astype("float64"), rtol=tolerance)
    x = np.array([[3, 7], [1, 0]], np.int32)
    for axes, wanted in (([1], [[2], [0]]), ([0], [[1, 1]])):
        model = node_model("ReduceLogSum", [("int32", (2, 2)), np.array(axes)], opset=18)
        np.testing.assert_array_equal(souffle.compile(model, target="cpu", level="V0")(x)["y0"], np.int32(wanted))
