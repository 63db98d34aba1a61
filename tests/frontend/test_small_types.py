"""Small element types: held as bytes, converted as ONNX's tables say, moved, quantized, given and returned."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import souffle
from souffle.element_types import SMALL_TYPES
from souffle.errors import UnsupportedOperatorError
from tests.frontend.support import model_of, node_model

pytestmark = pytest.mark.sampled(4)

TARGETS = [{"target": "cpu", "level": "V0"}, {"target": "cuda", "device": "cpu", "cubin": False, "level": "V0"}]
EIGHT_BITS = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
FLOATS = [*EIGHT_BITS, "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"]
INTEGERS = ["int4", "uint4", "int2", "uint2"]
BITS = {"float6_e2m3fn": 6, "float6_e3m2fn": 6, "float4_e2m1fn": 4, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2}


def number(dtype: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def every(dtype: str) -> np.ndarray:
    return np.arange(1 << BITS.get(dtype, 8), dtype=np.uint8).view(dtype)


def compiled(model, options):
    network = souffle.compile(model, **options)
    if options["target"] == "cuda":
        assert network.certificate.verdict != "REFUTED"
    return network


def assert_equal(given: np.ndarray, wanted: np.ndarray) -> None:
    assert given.dtype == wanted.dtype
    numbers = given.astype("float64"), wanted.astype("float64")
    np.testing.assert_array_equal(*numbers)
    kept = ~np.isnan(numbers[1])
    np.testing.assert_array_equal(np.signbit(numbers[0][kept]), np.signbit(numbers[1][kept]))


def hard_numbers(dtype: str) -> np.ndarray:
    """Numbers of the small types, those half way between them and the next ones to these, and what is out of range."""
    rng = np.random.default_rng(0)
    found = [rng.standard_normal(200) * np.exp2(rng.integers(-20, 18, 200)), [np.inf, -np.inf, 0.0, -0.0, 1e30, 1e-30]]
    for kind in FLOATS:
        values = np.unique(every(kind).astype("float64"))
        values = values[np.isfinite(values)]
        middle = ((values[1:] + values[:-1]) / 2).astype(dtype)
        largest, last = values[-1], values[-1] - values[-2]
        found += [values, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)]
        found.append([largest + last * part for part in (0.49, 0.5, 0.51, 1.0)])
    return np.concatenate([np.asarray(part, dtype) for part in [*found, [np.nan]]])


def rounded(x: np.ndarray, kind: str, saturate: bool) -> np.ndarray:
    """By search among all numbers of a type, where NumPy's types round doubles by way of single precision."""
    with np.errstate(all="ignore"):
        largest = int(np.array(ml_dtypes.finfo(kind).max).view("uint8"))
        beyond = int(np.array(np.inf, "float32").astype(kind).view("uint8"))
    values = np.arange(largest + 1, dtype="uint8").view(kind).astype("float64")
    values = np.append(values, 2 * values[-1] - values[-2])
    magnitude = np.minimum(np.abs(x.astype("float64")), values[-1])
    code = np.searchsorted((values[1:] + values[:-1]) / 2, magnitude)
    tied = magnitude == (values + np.append(values[1:], np.inf))[code] / 2
    code += tied & (code % 2 == 1)
    code = np.minimum(code, largest) if saturate else np.where(code > largest, beyond, code)
    number_of = np.array(code, "uint8").view(kind).astype("float64")
    return np.where(np.isnan(x), np.nan, np.copysign(number_of, x)).astype("float32").astype(kind)


@pytest.mark.parametrize("options", TARGETS)
def test_numbers_are_rounded_to_the_nearest_even_and_saturate_or_not(options):
    forms = [("float32", kind, 1) for kind in FLOATS] + [("float32", kind, 0) for kind in EIGHT_BITS]
    forms += [("float64", "float8_e4m3fn", 1), ("float64", "float8_e5m2fnuz", 0)]
    nodes = [helper.make_node("Cast", [d], [f"{d}_{k}_{s}"], to=number(k), saturate=s) for d, k, s in forms]
    x = {dtype: hard_numbers(dtype) for dtype in ("float32", "float64")}
    model = model_of(nodes, {d: (d, a.shape) for d, a in x.items()}, [n.output[0] for n in nodes], opset=25)
    got = compiled(model, options)(x)
    for dtype, kind, saturate in forms:
        # Of what is no number nothing is said where there is no NaN.
        there = ~np.isnan(x[dtype]) | (kind in EIGHT_BITS)
        assert_equal(got[f"{dtype}_{kind}_{saturate}"][there], rounded(x[dtype], kind, bool(saturate))[there])


@pytest.mark.parametrize("options", TARGETS)
def test_every_element_of_every_type_becomes_what_it_stands_for(options):
    kinds = sorted(SMALL_TYPES)
    wide = {kind: ["float32", "float16", "bool"] + (["int8", "uint64"] if kind in INTEGERS else []) for kind in kinds}
    nodes = [helper.make_node("Cast", [k], [f"{k}_{t}"], to=number(t)) for k in kinds for t in wide[k]]
    nodes += [helper.make_node("Cast", [k], [f"{k}_e5m2"], to=number("float8_e5m2")) for k in INTEGERS]
    inputs = {kind: (kind, every(kind).shape) for kind in kinds}
    outputs = [f"{k}_{t}" for k in kinds for t in wide[k]] + [f"{k}_e5m2" for k in INTEGERS]
    got = compiled(model_of(nodes, inputs, outputs, opset=25), options)({kind: every(kind) for kind in kinds})
    for kind in kinds:
        exact = every(kind).astype("int32" if kind in INTEGERS else "float32")
        for target in wide[kind]:
            with np.errstate(all="ignore"):
                assert_equal(got[f"{kind}_{target}"], exact.astype(target))
        if kind in INTEGERS:
            assert_equal(got[f"{kind}_e5m2"], exact.astype("float32").astype("float8_e5m2"))


@pytest.mark.parametrize("options", TARGETS)
def test_powers_of_two_are_rounded_as_the_node_says(options):
    x = np.concatenate([hard_numbers("float32"), np.exp2(np.arange(-149.0, 128)).astype("float32")])
    x = np.concatenate([x, x * np.float32(1.5), np.nextafter(x, np.float32(np.inf))])
    forms = list(itertools.product(("up", "down", "nearest"), (0, 1)))
    nodes = [
        helper.make_node("Cast", ["x"], [f"{mode}_{s}"], to=TensorProto.FLOAT8E8M0, saturate=s, round_mode=mode)
        for mode, s in forms
    ]
    got = compiled(model_of(nodes, {"x": ("float32", x.shape)}, [f"{m}_{s}" for m, s in forms], opset=25), options)(x)
    significand, exponent = np.frexp(np.abs(x.astype("float64")))
    above = {"up": significand > 0.5, "down": False, "nearest": significand >= 0.75}
    for mode, saturate in forms:
        code = np.where(x == 0, -1, np.where(np.isinf(x), 255, exponent - 1 + above[mode] + 127))
        code = np.clip(code, 0, 254) if saturate else np.where((code < 0) | (code > 254), 255, code)
        code[np.isnan(x)] = 255
        np.testing.assert_array_equal(got[f"{mode}_{saturate}"].view("uint8"), code)


@pytest.mark.parametrize("options", TARGETS)
def test_integers_lose_their_upper_bits(options):
    x = {"int64": np.array([0, 7, 8, -8, -9, 200, 2**40 + 5, -(2**40) - 3]), "uint8": every("uint8")}
    x["float32"] = np.array([3.9, -1.9, 7.0, -8.0, np.nan], "float32")
    nodes = [helper.make_node("Cast", [d], [f"{d}_{k}"], to=number(k)) for d in x for k in INTEGERS]
    outputs = [f"{d}_{k}" for d in x for k in INTEGERS]
    model = model_of(nodes, {d: (d, a.shape) for d, a in x.items()}, outputs, opset=25)
    got = compiled(model, options)(x)
    for (dtype, array), kind in itertools.product(x.items(), INTEGERS):
        whole = np.nan_to_num(array).astype("int64")
        wanted = (whole & ((1 << BITS[kind]) - 1)).astype("uint8").view(kind)
        if dtype == "float32" and kind != "int4":
            # Out of range nothing is said of floating-point numbers.
            there = np.isin(whole, every(kind).astype("int64"))
            assert_equal(got[f"{dtype}_{kind}"][there], wanted[there])
        else:
            assert_equal(got[f"{dtype}_{kind}"], wanted)


@pytest.mark.parametrize("kind", ["int4", "float8_e4m3fn"])
def test_elements_are_moved_and_a_saved_network_has_its_types(kind, tmp_path):
    rng = np.random.default_rng(0)
    x, w = (rng.integers(0, 16, shape).astype(np.uint8).view(kind) for shape in ((4, 6), (3, 4)))
    integers = {"shape": [4, 3, 2], "rows": [2, 0], "starts": [1], "ends": [3], "pads": [0, 1, 1, 0], "rep": [2, 1]}
    steps = [
        ("Reshape", ["x", "shape"], "a", {}),
        ("Transpose", ["a"], "b", {"perm": [1, 0, 2]}),
        ("Gather", ["b", "rows"], "c", {}),
        ("Flatten", ["c"], "d", {}),
        ("Slice", ["d", "starts", "ends"], "e", {}),
        ("Pad", ["e", "pads"], "f", {}),
        ("Tile", ["w", "rep"], "g", {}),
        ("Concat", ["w", "g"], "h", {"axis": 0}),
        ("Where", ["mask", "w", "zero"], "i", {}),
        ("Identity", ["x"], "j", {}),
        ("ConstantOfShape", ["rows"], "k", {"value": helper.make_tensor("v", number(kind), [1], [1.0])}),
    ]
    nodes = [helper.make_node(op, given, [out], **attributes) for op, given, out, attributes in steps]
    constants = {name: np.array(value, dtype=np.int64) for name, value in integers.items()}
    constants |= {"w": w, "mask": np.eye(3, 4, dtype=bool), "zero": np.zeros((), kind)}
    model = model_of(nodes, {"x": (kind, x.shape)}, ["f", "h", "i", "j", "k"], constants, opset=25)
    network = souffle.compile(model, target="cpu", level="V0")
    network.save(tmp_path / "network.souffle")
    loaded = souffle.load(tmp_path / "network.souffle")
    assert {spec.dtype for spec in (*loaded.signature.inputs,)} == {kind}
    codes = x.view(np.uint8), w.view(np.uint8)
    moved = codes[0].reshape(4, 3, 2).transpose(1, 0, 2)[[2, 0]].reshape(2, 8)[1:2]
    wanted = {
        "f": np.pad(moved, ((0, 1), (1, 0))),
        "h": np.concatenate([codes[1], codes[1], codes[1]]),
        "i": np.where(np.eye(3, 4, dtype=bool), codes[1], 0),
        "j": codes[0],
        "k": np.ones((2, 0), kind).view(np.uint8),
    }
    for runs in (network, loaded):
        got = runs(x)
        for name, expected in wanted.items():
            assert got[name].dtype == kind
            np.testing.assert_array_equal(got[name].view(np.uint8), expected)
    assert "of " + kind in str(souffle.import_onnx(model))


def quantization(kind: str, granularity: str, dtype: str):
    """A model that quantizes and dequantizes, and its input."""
    rng = np.random.default_rng(1)
    shape = {"tensor": (), "axis": (3,), "blocked": (2, 2)}[granularity]
    scale = rng.uniform(0.5, 2, shape).astype(dtype)
    zero = np.zeros(shape, kind) if kind.startswith("float") else rng.integers(0, 2, shape).astype(kind)
    attributes = {"tensor": {}, "axis": {"axis": -1}, "blocked": {"axis": 1, "block_size": 2}}[granularity]
    names = ["x", "scale", "zero"], ["q", "scale", "zero"]
    nodes = [helper.make_node("QuantizeLinear", names[0], ["q"], **attributes)]
    nodes += [helper.make_node("DequantizeLinear", names[1], ["y"], **attributes)]
    inputs = {"x": (dtype, (2, 3))}
    model = model_of(nodes, inputs, ["q", "y"], {"scale": scale, "zero": zero}, opset=25)
    return model, (rng.standard_normal((2, 3)) * 6).astype(dtype)


@pytest.mark.parametrize("granularity", ["tensor", "axis", "blocked"])
@pytest.mark.parametrize(
    "kind", ["int8", "uint16", "int4", "uint2", "float8_e4m3fn", "float8_e5m2fnuz", "float4_e2m1fn"]
)
def test_quantization_is_that_of_the_reference(kind, granularity):
    dtype = "float16" if kind in ("int4", "float8_e4m3fn") else "float32"
    model, x = quantization(kind, granularity, dtype)
    got = souffle.compile(model, target="cpu", level="V0")(x)
    for name, wanted in zip(("q", "y"), ReferenceEvaluator(model).run(None, {"x": x}), strict=True):
        assert_equal(got[name], wanted)


def test_quantization_saturates_whatever_is_given():
    x = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 2.5, 3.5, -0.5], "float32")
    node = helper.make_node("QuantizeLinear", ["x", "scale"], ["q"], output_dtype=TensorProto.INT8)
    model = model_of([node], {"x": ("float32", x.shape)}, ["q"], {"scale": np.float32(1e-3)}, opset=25)
    for options in TARGETS:
        np.testing.assert_array_equal(
            compiled(model, options)(x)["q"], np.array([-128, 127, -128, 127, -128, 127, 127, -128], "int8")
        )


def test_a_scale_of_powers_of_two_needs_the_type_of_the_result():
    x = every("float4_e2m1fn").reshape(2, 8)
    scale = np.array([[0.5, 4.0], [2.0, 1.0]]).astype("float8_e8m0fnu")
    node = helper.make_node("DequantizeLinear", ["x", "scale"], ["y"], axis=1, block_size=4, output_dtype=1)
    inputs = {"x": (x.dtype, x.shape), "scale": (scale.dtype, scale.shape)}
    model = model_of([node], inputs, ["y"], opset=28)
    got = souffle.compile(model, target="cpu", level="V0")(x, scale)["y"]
    np.testing.assert_array_equal(got, x.astype("float32") * np.repeat(scale.astype("float32"), 4, axis=1))


def test_what_small_types_are_not_for_is_refused_in_words():
    refused = [
        (node_model("Concat", [("int4", (3,)), ("uint4", (3,))], opset=25, axis=0), "int4 and uint4, which are only"),
        (node_model("Relu", [("float8_e5m2", (3,))], opset=25), "Cast to float32"),
        (node_model("Pad", [("float8_e8m0fnu", (3,)), np.array([1, 1])], opset=25), "has no zero"),
        (node_model("Cast", [("float32", (3,))], opset=25, to=TensorProto.STRING), "makes text"),
        (node_model("BitCast", [("int4", (3,))], opset=26, to=TensorProto.INT8), "has 4 bits"),
        (node_model("QuantizeLinear", [("float32", (4, 6)), np.ones((4, 3), "float32")], opset=25), "no block_size"),
        (
            node_model("QuantizeLinear", [("float32", (4, 6)), np.ones((4, 3), "float32")], opset=25, block_size=4),
            r"must be \[4, 2\]",
        ),
    ]
    for model, words in refused:
        with pytest.raises(UnsupportedOperatorError, match=words):
            souffle.import_onnx(model)
