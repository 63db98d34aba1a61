"""NaN, infinities, zeros and the ends of the range, through every target; the expected values are those of IEEE 754.

The operators of one test are one network, so that it costs one compilation for each target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import souffle
from souffle.frontend import import_onnx
from souffle.program.evaluate import evaluate
from tests.frontend.support import compare, model_of, node_model
from tests.thorough import THOROUGH

pytestmark = pytest.mark.sampled(4)

Arrays = dict[str, np.ndarray]


def by_definition(model, inputs: Arrays) -> Arrays:
    return evaluate(import_onnx(model), inputs)


def on_host(model, inputs: Arrays) -> Arrays:
    return souffle.compile(model, target="cpu")(inputs)


def as_cuda(level: str) -> Callable:
    def run(model, inputs: Arrays) -> Arrays:
        network = souffle.compile(model, target="cuda", level=level, device="cpu", cubin=False)
        assert network.certificate.verdict == "PROVEN"
        return network(inputs)

    return run


TARGETS = {"definition": by_definition, "host": on_host, "V4": as_cuda("V4")}
if THOROUGH:
    TARGETS["V0"] = as_cuda("V0")
every_target = pytest.mark.parametrize("run", TARGETS.values(), ids=TARGETS)


def assert_equal_numbers(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], rtol: float = 2e-5) -> None:
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype and got[name].shape == expected.shape, name
        if expected.dtype.kind == "f":
            # Infinities and NaN have to be where they are expected; +0 and -0 are equal.
            np.testing.assert_allclose(got[name], expected, rtol=rtol, atol=rtol, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], expected, err_msg=name)


def special(dtype: str) -> np.ndarray:
    limits = np.finfo(dtype)
    numbers = [np.nan, np.inf, -np.inf, 0.0, -0.0, limits.max, limits.min, limits.tiny, 1, -1, 0.5, -0.5, 7, -7, 3.5]
    return np.array(numbers, dtype)


def network(expressions: Mapping[str, tuple], inputs: Arrays, constants: Arrays | None = None):
    nodes = []
    for name, (operator, *rest) in expressions.items():
        attributes = rest.pop() if isinstance(rest[-1], dict) else {}
        nodes.append(helper.make_node(operator, rest, [name], name=f"the_{name}", **attributes))
    given = {name: (str(array.dtype), array.shape) for name, array in inputs.items()}
    return model_of(nodes, given, list(expressions), constants, opset=18)


def reference(model, inputs: Arrays) -> Arrays:
    with np.errstate(all="ignore"):
        values = ReferenceEvaluator(model).run(None, inputs)
    return {output.name: np.asarray(value) for output, value in zip(model.graph.output, values, strict=True)}


@every_target
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_elementwise(run: Callable, dtype: str) -> None:
    x = special(dtype)
    inputs = {"x": x, "a": x[:, None].copy(), "b": x[None, ::-1].copy()}
    constants = {name: np.array(value, dtype) for name, value in (("zero", 0), ("one", 1), ("six", 6))}
    expressions = {
        "relu": ("Relu", "x"),
        "leaky": ("LeakyRelu", "x", {"alpha": 0.25}),
        "leaky_by_zero": ("LeakyRelu", "x", {"alpha": 0.0}),
        "thresholded": ("ThresholdedRelu", "x", {"alpha": 0.75}),
        "sign": ("Sign", "x"),
        "clip": ("Clip", "x", "zero", "six"),
        "clip_below": ("Clip", "x", "one"),
        "max": ("Max", "a", "b"),
        "min": ("Min", "a", "b"),
        "max_of_three": ("Max", "a", "b", "x"),
        "max_constant": ("Max", "one", "x"),
        "max_nested": ("Max", "min", "max_of_three"),
        "times_zero": ("Mul", "x", "zero"),
        "zero_by": ("Div", "zero", "x"),
        "by_zero": ("Div", "x", "zero"),
        "difference": ("Sub", "x", "x"),
        "equal": ("Equal", "x", "x"),
        "is_nan": ("Not", "equal"),
        "less": ("Less", "a", "b"),
        "not_less": ("Not", "less"),
        "where": ("Where", "not_less", "a", "b"),
        "isnan": ("IsNaN", "x"),
        "rest": ("Mod", "a", "b", {"fmod": 1}),
    }
    if dtype == "float32":
        expressions |= {
            "elu": ("Elu", "x"),
            "celu": ("Celu", "x", {"alpha": 2.0}),
            "selu": ("Selu", "x"),
            "hard_sigmoid": ("HardSigmoid", "x"),
            "prelu": ("PRelu", "max", "b"),
        }
    model = network(expressions, inputs, constants)
    want = reference(model, inputs)
    with np.errstate(all="ignore"):
        # The reference evaluator computes these in ways of its own.
        want["thresholded"] = np.where(x > np.array(0.75, dtype), x, np.array(0, dtype))
        want["leaky_by_zero"] = np.where(x < 0, x * np.array(0, dtype), x)
        want["clip_below"] = np.clip(x, np.array(1, dtype), np.finfo(dtype).max)
        want["rest"] = np.fmod(inputs["a"], inputs["b"])
        if dtype == "float32":
            want["elu"] = np.where(x < 0, np.expm1(x), x)
            want["celu"] = np.where(x < 0, 2 * np.expm1(x / 2), x)
            want["selu"] = np.float32(1.0507009873554805) * np.where(x < 0, np.float32(1.6732632) * np.expm1(x), x)
            want["hard_sigmoid"] = np.clip(np.float32(0.2) * x + np.float32(0.5), 0, 1)
            want["prelu"] = np.where(want["max"] < 0, want["max"] * inputs["b"], want["max"])
    assert_equal_numbers(run(model, inputs), want, 2e-5 if dtype == "float32" else 2e-3)


@every_target
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_zeros_have_the_sign_that_they_are_defined_to_have(run: Callable, dtype: str) -> None:
    """By which a later division gives one infinity or the other. Which of two zeros is the greater is not defined."""
    x = np.tile(special(dtype), 7)
    shift = np.linspace(-3, 3, len(x)).astype(dtype)
    known = {"zero": 0.0, "minus": -0.0, "six": 6.0, "inf": np.inf}
    constants = {name: np.array(value, dtype) for name, value in known.items()}
    expressions = {
        "relu": ("Relu", "x"),
        "clip": ("Clip", "x", "zero", "six"),
        "max": ("Max", "zero", "x"),
        "min": ("Min", "x", "zero"),
        "max_minus": ("Max", "x", "minus"),
        "min_minus": ("Min", "minus", "x"),
        "shifted": ("Add", "relu", "shift"),
        "relu_again": ("Relu", "shifted"),
        "times_zero": ("Mul", "x", "zero"),
        "times_minus": ("Mul", "minus", "x"),
        "zero_by": ("Div", "zero", "x"),
        "minus_by": ("Div", "minus", "x"),
        "leaky": ("LeakyRelu", "x", {"alpha": 0.0}),
        "sign": ("Sign", "x"),
    }
    if dtype == "float32":
        expressions["prelu"] = ("PRelu", "x", "inf")
        expressions["hard_sigmoid"] = ("HardSigmoid", "x", {"alpha": 1.0, "beta": 0.0})
    inputs = {"x": x, "shift": shift}
    zero, minus = constants["zero"], constants["minus"]
    with np.errstate(all="ignore"):
        relu = np.where(x > 0, x, np.where(x <= 0, zero, x))
        shifted = relu + shift
        want = {
            "relu": relu,
            "clip": np.where(x > 6, constants["six"], relu),
            "max": relu,
            "min": np.where(x < 0, x, np.where(x >= 0, zero, x)),
            "max_minus": np.where(x > 0, x, np.where(x <= 0, minus, x)),
            "min_minus": np.where(x < 0, x, np.where(x >= 0, minus, x)),
            "shifted": shifted,
            "relu_again": np.where(shifted > 0, shifted, np.where(shifted <= 0, zero, shifted)),
            "times_zero": x * zero,
            "times_minus": x * minus,
            "zero_by": zero / x,
            "minus_by": minus / x,
            "leaky": np.where(x < 0, x * zero, x),
            "sign": np.where(x > 0, 1, np.where(x < 0, -1, np.where(x == 0, zero, x))).astype(dtype),
            "prelu": np.where(x < 0, x * constants["inf"], x),
            "hard_sigmoid": np.where(x > 1, 1, relu).astype(dtype),
        }
    got = run(network(expressions, inputs, constants), inputs)
    assert_equal_numbers(got, {name: want[name] for name in expressions})
    of_two_zeros = {"relu", "clip", "max", "min", "max_minus", "min_minus", "hard_sigmoid"}
    for name in expressions:
        decided = (want[name] == 0) & ~((x == 0) & (name in of_two_zeros))
        np.testing.assert_array_equal(np.signbit(got[name][decided]), np.signbit(want[name][decided]), err_msg=name)


@every_target
def test_small_numbers_keep_their_digits(run: Callable) -> None:
    """What is a sum or difference with 1 by definition, and is small."""
    x = np.concatenate([-(10.0 ** -np.arange(31)), -np.arange(1, 80, 3.7), 10.0 ** -np.arange(31)]).astype("float32")
    exact = x.astype("float64")
    inside = np.where(abs(exact) < 1, exact, 0.5)
    inputs = {"x": x, "inside": inside.astype("float32")}
    expressions = {
        "atanh": ("Atanh", "inside"),
        "asinh": ("Asinh", "x"),
        "sinh": ("Sinh", "x"),
        "tanh": ("Tanh", "x"),
        "softplus": ("Softplus", "x"),
        "mish": ("Mish", "x"),
    }
    softplus = np.logaddexp(0, exact)
    want = {"atanh": np.arctanh(inside.astype("float32").astype("float64")), "asinh": np.arcsinh(exact)}
    want |= {"sinh": np.sinh(exact), "tanh": np.tanh(exact), "softplus": softplus, "mish": exact * np.tanh(softplus)}
    got = run(network(expressions, inputs), inputs)
    for name, expected in want.items():
        within = abs(expected) < np.finfo("float32").max
        np.testing.assert_allclose(got[name][within], expected[within], rtol=1e-6, atol=1e-37, err_msg=name)


def salted_rows(dtype: str) -> np.ndarray:
    """Rows with NaN, with infinities, of nothing else, and of the least and the largest number."""
    rows = np.random.default_rng(0).standard_normal((11, 7)).astype(dtype)
    limits = np.finfo(dtype)
    for row, value in ((1, -np.inf), (2, np.inf), (3, np.nan), (4, limits.min), (5, limits.max)):
        rows[row] = value
    rows[6, 3] = rows[7, 0] = rows[8, 6] = np.nan
    rows[9] = -np.inf
    rows[9, 4] = limits.min
    rows[10, ::2] = np.inf
    return rows


@every_target
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_extremes_of_rows(run: Callable, dtype: str) -> None:
    rows = salted_rows(dtype)
    images = np.random.default_rng(1).standard_normal((1, 3, 5, 5)).astype(dtype)
    images[0, 0], images[0, 1], images[0, 2, 2, 2] = -np.inf, np.finfo(dtype).min, np.nan
    inputs = {"rows": rows, "images": images, "updates": rows[[1, 3, 5]].copy()}
    constants = {"axis": np.array([1]), "top": np.array([3]), "at": np.array([[0], [1], [1]])}
    window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    expressions = {
        "greatest": ("ReduceMax", "rows", "axis"),
        "least": ("ReduceMin", "rows", "axis"),
        "greatest_of_all": ("ReduceMax", "rows"),
        "where_greatest": ("ArgMax", "rows", {"axis": 1}),
        "where_least": ("ArgMin", "rows", {"axis": 1}),
        "last_greatest": ("ArgMax", "rows", {"axis": 1, "select_last_index": 1}),
        "log_sum": ("ReduceLogSumExp", "rows", "axis"),
        "softmax": ("Softmax", "rows"),
        "hardmax": ("Hardmax", "rows", {"axis": -1}),
        "pooled": ("MaxPool", "images", window),
        "pooled_wholly": ("GlobalMaxPool", "images"),
        "scattered_max": ("ScatterND", "rows", "at", "updates", {"reduction": "max"}),
        "scattered_min": ("ScatterND", "rows", "at", "updates", {"reduction": "min"}),
    }
    model = network(expressions, inputs, constants)
    with np.errstate(all="ignore"):
        around = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(around, (3, 3), (2, 3))
        exact = rows.astype("float64")
        powers = np.exp(exact - exact.max(1, keepdims=True))
        first, last = rows.argmax(1), rows.shape[1] - 1 - rows[:, ::-1].argmax(1)
        touched = {0: [rows[1]], 1: [rows[3], rows[5]]}
        want = {
            "greatest": rows.max(1, keepdims=True),
            "least": rows.min(1, keepdims=True),
            "greatest_of_all": rows.max(keepdims=True),
            "where_greatest": first[:, None],
            "where_least": rows.argmin(1)[:, None],
            "last_greatest": last[:, None],
            "log_sum": (np.logaddexp.reduce(exact, 1, keepdims=True)).astype(dtype),
            "softmax": (powers / powers.sum(1, keepdims=True)).astype(dtype),
            "hardmax": (np.arange(rows.shape[1]) == first[:, None]).astype(dtype),
            "pooled": windows.max((-2, -1)),
            "pooled_wholly": images.max((2, 3), keepdims=True),
        }
        for name, extreme in (("scattered_max", np.maximum), ("scattered_min", np.minimum)):
            want[name] = rows.copy()
            for row, updates in touched.items():
                for update in updates:
                    want[name][row] = extreme(want[name][row], update)
    assert_equal_numbers(run(model, inputs), want, 2e-5 if dtype == "float32" else 2e-3)


@every_target
def test_sorting_puts_nan_above_all_numbers(run: Callable) -> None:
    rows = salted_rows("float32")
    nodes = [
        helper.make_node("TopK", ["rows", "k"], ["most", "of_most"]),
        helper.make_node("TopK", ["rows", "k"], ["fewest", "of_fewest"], largest=0),
    ]
    outputs = ["most", "of_most", "fewest", "of_fewest"]
    model = model_of(nodes, {"rows": ("float32", rows.shape)}, outputs, {"k": np.array([4])})
    up = np.argsort(rows, 1, kind="stable")
    down = rows.shape[1] - 1 - np.argsort(rows[:, ::-1], 1, kind="stable")[:, ::-1]
    want = {"of_most": down[:, :4], "of_fewest": up[:, :4]}
    want |= {"most": np.take_along_axis(rows, down[:, :4], 1), "fewest": np.take_along_axis(rows, up[:, :4], 1)}
    assert_equal_numbers(run(model, {"rows": rows}), want)


@every_target
def test_integers_neither_trap_nor_overflow(run: Callable) -> None:
    a = np.array([-(2**31), -7, -1, 0, 1, 7, 2**31 - 1], "int32")
    b = np.array([0, -1, 1, 3, -3, 31, 32, -40, 100], "int32")
    inputs = {"a": a[:, None].copy(), "b": b[None].copy()}
    inputs |= {"u": a.astype("uint8")[:, None].copy(), "s": np.abs(b).astype("uint8")[None].copy()}
    expressions = {
        "quotient": ("Div", "a", "b"),
        "floored": ("Mod", "a", "b"),
        "truncated": ("Mod", "a", "b", {"fmod": 1}),
        "left": ("BitShift", "u", "s", {"direction": "LEFT"}),
        "right": ("BitShift", "u", "s", {"direction": "RIGHT"}),
        "greatest": ("Max", "a", "b"),
        "sign": ("Sign", "a"),
    }
    model = network(expressions, inputs)
    wide, by = np.broadcast_arrays(a.astype("int64")[:, None], b.astype("int64")[None])
    some = np.where(by == 0, 1, by)
    quotient = np.where(by == 0, 0, np.trunc(wide / some).astype("int64"))
    left, right = np.broadcast_arrays(inputs["u"].astype("int64"), inputs["s"].astype("int64"))
    want = {
        "quotient": quotient.astype("int32"),
        "floored": np.where(by == 0, 0, wide % some).astype("int32"),
        "truncated": np.where(by == 0, 0, np.fmod(wide, some)).astype("int32"),
        "left": np.where(right < 8, left << np.minimum(right, 8), 0).astype("uint8"),
        "right": np.where(right < 8, left >> np.minimum(right, 8), 0).astype("uint8"),
        "greatest": np.maximum(inputs["a"], inputs["b"]),
        "sign": np.sign(inputs["a"]),
    }
    got = run(model, inputs)
    assert_equal_numbers(got, want)


def test_signed_shifts_follow_the_newest_operator_set() -> None:
    x, amounts = np.array([-8, -1, 0, 1, 8, 127, -128], "int8"), np.array([-1, 0, 1, 7, 8, 100], "int8")
    inputs = {"x": x[:, None].copy(), "amounts": amounts[None].copy()}
    nodes = [helper.make_node("BitShift", ["x", "amounts"], [way], direction=way.upper()) for way in ("left", "right")]
    given = {name: ("int8", array.shape) for name, array in inputs.items()}
    graph = model_of(nodes, given, ["left", "right"], opset=17)
    del graph.opset_import[:]
    graph.opset_import.append(helper.make_opsetid("", 28))
    inside = (inputs["amounts"] >= 0) & (inputs["amounts"] < 8)
    safe = np.where(inside, inputs["amounts"], 0).astype("int64")
    wide = inputs["x"].astype("int64")
    want = {
        "left": np.where(inside, wide << safe, 0).astype("int8"),
        "right": np.where(inside, wide >> safe, np.where(wide < 0, -1, 0)).astype("int8"),
    }
    assert_equal_numbers(on_host(graph, inputs), want)


def test_floored_remainders_of_the_newest_operator_set() -> None:
    x = special("float32")
    inputs = {"a": x[:, None].copy(), "b": x[None].copy()}
    model = network({"rest": ("Mod", "a", "b")}, inputs)
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", 28))
    with np.errstate(all="ignore"):
        want = {"rest": np.mod(inputs["a"], inputs["b"])}
    assert_equal_numbers(on_host(model, inputs), want)


def test_normalizations_keep_their_digits_far_from_zero() -> None:
    x = (1000 + np.random.default_rng(0).standard_normal((2, 4, 6, 6))).astype("float32")
    weights = np.linspace(0.5, 1.5, 4).astype("float32")
    row = np.ones(6, "float32")
    constants = {"scale": weights, "bias": weights[::-1].copy(), "row": row, "none": 0 * row}
    expressions = {
        "instance": ("InstanceNormalization", "x", "scale", "bias"),
        "group": ("GroupNormalization", "x", "scale", "bias", {"num_groups": 2}),
        "variance": ("MeanVarianceNormalization", "x"),
        "layer": ("LayerNormalization", "x", "row", "none"),
    }
    model = network(expressions, {"x": x})
    model = model_of(list(model.graph.node), {"x": ("float32", x.shape)}, list(expressions), constants, opset=21)

    def normal(values: np.ndarray, axes: tuple[int, ...], epsilon: float) -> np.ndarray:
        values = values.astype("float64")
        return (values - values.mean(axes, keepdims=True)) / np.sqrt(values.var(axes, keepdims=True) + epsilon)

    def scaled(values: np.ndarray) -> np.ndarray:
        return values * weights[:, None, None] + weights[::-1, None, None]

    want = {
        "instance": scaled(normal(x, (2, 3), 1e-5)),
        "group": scaled(normal(x.reshape(2, 2, -1), (2,), 1e-5).reshape(x.shape)),
        "variance": normal(x, (0, 2, 3), 0),
        "layer": normal(x, (3,), 1e-5),
    }
    got = on_host(model, {"x": x})
    for name, expected in want.items():
        np.testing.assert_allclose(got[name], expected, atol=5e-4, err_msg=name)


def test_variadic_operators_are_elementwise() -> None:
    inputs = {"a": np.ones((3, 1), "float32"), "b": np.ones((1, 4), "float32"), "c": np.ones((), "float32")}
    for operator in ("Max", "Min", "Sum", "Mean"):
        program = import_onnx(network({"y": (operator, "a", "b", "c")}, inputs))
        assert len(program.tes) == 1 and not program.tes[0].is_reduction
        assert evaluate(program, inputs)["y"].shape == (3, 4)


def test_celu_of_a_scalar_is_a_scalar() -> None:
    inputs = {"x": np.array(-2.0, "float32")}
    got = on_host(network({"y": ("Celu", "x", {"alpha": 0.5})}, inputs), inputs)["y"]
    assert got.shape == ()
    np.testing.assert_allclose(got, 0.5 * np.expm1(-4.0), rtol=1e-5)


@pytest.mark.parametrize("bounds", [(False, False), (True, False), (False, True)])
def test_an_absent_bound_is_the_last_finite_number(bounds):
    x = np.array([np.inf, -np.inf, 3e38, -1, np.nan, 0, 7], "float32")
    low, high = (np.float32(value) if there else None for value, there in zip((-2, 5), bounds, strict=True))
    names = ["x", "low" if bounds[0] else "", "high" if bounds[1] else ""]
    given = {name: value for name, value in (("low", low), ("high", high)) if value is not None}
    model = model_of([helper.make_node("Clip", names, ["y"])], {"x": (x.dtype, x.shape)}, ["y"], given, opset=18)
    most = np.finfo("float32").max
    want = np.minimum(np.maximum(x, -most if low is None else low), most if high is None else high)
    np.testing.assert_array_equal(souffle.compile(model, target="cpu")(x)["y"], want)


def test_quantizing_zeros_divides_by_one():
    x = np.zeros((2, 7), "float32")
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "point"])
    model = model_of([node], {"x": (x.dtype, x.shape)}, ["y", "scale", "point"], opset=18)
    got = souffle.compile(model, target="cpu")(x)
    assert got["scale"] == 1 and got["point"] == 0 and not got["y"].any()


def test_an_infinity_meets_no_zeros_between_the_taps():
    """Of a dilated transposed convolution, whose filter TVM fills with zeros."""
    x = np.array([[[1, np.inf, 2, 3, -1]]], "float32")
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], dilations=[2])
    weights = {"w": np.array([[[1, 2, -3]]], "float32")}
    got = souffle.compile(model_of([node], {"x": (x.dtype, x.shape)}, ["y"], weights, opset=18), target="cpu")(x)["y"]
    np.testing.assert_array_equal(got, [[[1, np.inf, 4, np.inf, 0, -np.inf, -8, -9, 3]]])


@pytest.mark.parametrize(("scale", "after"), [(0.6, 2), (0.5, 2), (0.3, 1), (1.5, 6)])
def test_corners_that_a_scale_does_not_reach_are_refused(scale, after):
    node = helper.make_node(
        "Resize", ["x", "", "scales"], ["y"], mode="linear", coordinate_transformation_mode="align_corners"
    )
    given = {"scales": np.array([1, 1, 1, scale], "float32")}
    model = model_of([node], {"x": ("float32", (1, 1, 1, 4))}, ["y"], given, opset=18)
    if scale == 0.6:
        with pytest.raises(souffle.SouffleError, match=r"makes 2.4 elements of 4, .* give sizes in place of scales"):
            import_onnx(model)
    else:
        assert compare(model).outputs[0].shape == (1, 1, 1, after)


def test_a_grid_of_one_point_at_two_corners_is_refused():
    node = helper.make_node("AffineGrid", ["theta", "size"], ["y"], align_corners=1)
    given = {"size": np.array([2, 1, 1, 5])}
    with pytest.raises(souffle.SouffleError, match="ONNX does not say where that point is; align_corners = 0"):
        import_onnx(model_of([node], {"theta": ("float32", (2, 2, 3))}, ["y"], given, opset=20))


@pytest.mark.parametrize(
    ("size", "corners"), [((2, 1, 3, 5), 0), ((1, 2, 4, 3), 1), ((2, 1, 2, 3, 4), 1), ((1, 1, 1, 2, 7), 0)]
)
def test_grids_of_doubles_are_double_precision(size: tuple[int, ...], corners: int) -> None:
    rank = len(size) - 2
    theta = np.random.default_rng(0).standard_normal((size[0], rank, rank + 1))
    axes = [np.linspace(-1, 1, n) if corners else (2 * np.arange(n) + 1) / n - 1 for n in size[2:]]
    points = np.stack([*np.meshgrid(*axes, indexing="ij")[::-1], np.ones(size[2:])], axis=-1)
    node = helper.make_node("AffineGrid", ["theta", "size"], ["y"], align_corners=corners)
    model = model_of([node], {"theta": ("float64", theta.shape)}, ["y"], {"size": np.array(size)}, opset=20)
    expected = np.einsum("...j,nij->n...i", points, theta)
    np.testing.assert_allclose(by_definition(model, {"theta": theta})["y"], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("count", [6, -1])
def test_no_more_than_there_are_can_be_the_largest(count):
    with pytest.raises(souffle.SouffleError, match="its axis 1 has 5 elements; give a K of 0 to 5"):
        import_onnx(node_model("TopK", [("float32", (2, 5)), np.array([count])], outputs=2))
