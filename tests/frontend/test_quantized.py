"""Operators on quantized tensors, and those of ONNX Runtime's own domain, against ONNX Runtime: integers are equal."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import helper

from souffle.errors import UnsupportedOperatorError
from souffle.frontend import import_onnx
from souffle.program.evaluate import evaluate
from souffle.tvm_compat import reduce_node
from tests.frontend.support import assert_same, model_of, node_model, random_inputs, reference

pytestmark = pytest.mark.sampled(4)

CONTRIB = "com.microsoft"
RNG = np.random.default_rng(0)


def scalar(value, dtype="float32"):
    return np.array(value, dtype)


def numbers(dtype, *shape):
    if np.dtype(dtype).kind == "f":
        return RNG.standard_normal(shape).astype(dtype)
    kind = np.iinfo(dtype)
    return RNG.integers(kind.min, kind.max + 1, shape).astype(dtype)


def floats(*shape):
    return numbers("float32", *shape)


SCALES = RNG.uniform(0.001, 0.02, 4).astype("float32")
BYTES = ("int8", "uint8")


def quantized_cases():
    for a, b in itertools.product(BYTES, repeat=2):
        image, filters, pairs = numbers(a, 2, 6, 7, 5), numbers(b, 4, 6, 3, 3), f"{a}-{b}"
        left, right = numbers(a, 2, 5, 7), numbers(b, 7, 4)
        yield f"matmul-integer-{pairs}", "MatMulInteger", [left, (right,), scalar(3, a), (numbers(b, 4),)], {}
        yield f"matmul-of-two-{pairs}", "MatMulInteger", [left, numbers(b, 2, 7, 3), scalar(3, a), scalar(5, b)], {}
        window = {"pads": [1, 2, 0, 1], "strides": [2, 1]}
        yield f"conv-integer-{pairs}", "ConvInteger", [image, (filters,), scalar(9, a), (scalar(100, b),)], window
        if (a, b) == ("int8", "uint8"):
            continue  # ONNX Runtime has no kernel of these for it
        bias = (RNG.integers(-1000, 1000, 4).astype("int32"),)
        x, w = (image, (scalar(0.03),), (scalar(7, a),)), ((filters,), (SCALES,), (numbers(b, 4),))
        y = ((scalar(0.21),), (scalar(11, a),))
        yield f"q-conv-{pairs}", "QLinearConv", [*x, *w, *y, bias], {"pads": [1, 1, 1, 1]}
        x = (left[0], (scalar(0.03),), (scalar(7, a),))
        yield f"q-matmul-{pairs}", "QLinearMatMul", [*x, (right,), (SCALES,), (numbers(b, 4),), *y], {}
        zero = (np.zeros(4, b),)
        yield (
            f"q-gemm-{pairs}",
            "QGemm",
            [*x, (right.T.copy(),), (SCALES,), zero, bias, *y],
            {"transB": 1, "alpha": 0.7},
        )
    for t in BYTES[1:]:
        x, y = (numbers(t, 3, 5), (scalar(0.03),), (scalar(4, t),)), ((scalar(0.08),), (scalar(3, t),))
        other = (numbers(t, 5), (scalar(0.05),), (scalar(9, t),))
        image = (numbers(t, 2, 3, 7, 7), (scalar(0.03),), (scalar(4, t),))
        yield f"q-add-{t}", "QLinearAdd", [*x, *other, *y], {}
        yield f"q-mul-{t}", "QLinearMul", [*x, *other, *y], {}
        yield f"q-sigmoid-{t}", "QLinearSigmoid", [*x, *y], {}
        yield f"q-leaky-{t}", "QLinearLeakyRelu", [*x, *y], {"alpha": 0.1}
        yield f"q-softmax-{t}", "QLinearSoftmax", [*image, (scalar(1 / 256),), y[1]], {"axis": 2, "opset": 12}
        pooled = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}
        yield f"q-pool-{t}", "QLinearAveragePool", [*image, *y], pooled
        yield f"q-pool-last-{t}", "QLinearAveragePool", [*image, *y], {"kernel_shape": [2, 3], "channels_last": 1}
        yield f"q-global-{t}", "QLinearGlobalAveragePool", [*image, *y], {}
        yield f"q-concat-{t}", "QLinearConcat", [*y, *x, numbers(t, 2, 5), *y], {"axis": 0}
        yield f"max-last-{t}", "NhwcMaxPool", [image[0]], pooled
    x, w = floats(3, 5, 7), (numbers("int8", 7, 4),)
    yield "dynamic-matmul", "DynamicQuantizeMatMul", [x, w, (SCALES,), None, (floats(4),)], {}
    yield "integer-to-float", "MatMulIntegerToFloat", [numbers("uint8", 5, 7), w, scalar(0.3), (SCALES,)], {}


def contrib_cases():
    yield (
        "fused-matmul",
        "FusedMatMul",
        [floats(7, 2, 5), floats(2, 7, 4)],
        {"transBatchA": 1, "transA": 1, "alpha": 0.5},
    )
    gemm = {"transB": 1, "alpha": 0.6, "activation": "LeakyRelu", "activation_alpha": 0.1}
    yield "fused-gemm", "FusedGemm", [floats(5, 7), floats(4, 7), floats(4)], gemm
    conv = {"activation": "Clip", "activation_params": [0.0, 0.6], "pads": [1, 1, 1, 1]}
    yield "fused-conv", "FusedConv", [floats(2, 3, 6, 7), floats(4, 3, 3, 3), floats(4)], conv
    x, gain = floats(2, 6, 8), floats(8)
    yield "skip-norm", "SkipLayerNormalization", [x, floats(1, 6, 8), gain, floats(8), floats(8)], {}
    yield "skip-simple", "SkipSimplifiedLayerNormalization", [x, x, gain], {"epsilon": 1e-3}
    for name in ("Gelu", "QuickGelu", "FastGelu"):
        yield name, name, [np.append(floats(9), [np.inf, np.nan, -1e30]).astype("float32")], {}
    yield "half", "FastGelu", [floats(3, 5).astype("float16"), floats(5).astype("float16")], {}
    yield "bias-gelu", "BiasGelu", [floats(3, 5), floats(5)], {}
    seen = np.array([[1, 1, 1, 1, 0, 0], [1] * 6], "int32")
    ids, kinds = RNG.integers(0, 9, (2, 6)).astype("int32"), RNG.integers(0, 2, (2, 6)).astype("int32")
    tables = [floats(9, 8), floats(12, 8), floats(2, 8), gain, floats(8)]
    yield "embed", "EmbedLayerNormalization", [ids, kinds, *tables, seen], {"outputs": 2}
    projected = [x, floats(8, 24), floats(24)]
    for name, mask in {
        "rows": seen,
        "ends": np.array([4, 6, 1, 0], "int32"),
    }.items():
        yield f"attention-{name}", "Attention", [*projected, mask], {"num_heads": 2}
    past = {"num_heads": 2, "unidirectional": 1, "outputs": 2}
    yield "attention-past", "Attention", [*projected, None, floats(2, 2, 2, 3, 4)], past
    quantized = [numbers("uint8", 2, 6, 8), (numbers("int8", 8, 24),), floats(24), scalar(0.02), scalar(0.01)]
    yield "q-attention", "QAttention", [*quantized, seen, scalar(120, "uint8"), scalar(0, "int8")], {"num_heads": 2}
    heads = [floats(2, 6, 8), floats(2, 2, 6, 4), floats(2, 2, 6, 4), floats(24), seen]
    yield "multi-head", "MultiHeadAttention", heads, {"num_heads": 2, "scale": 0.2}
    more = [x, x, x, None, None, floats(1, 2, 6, 9), floats(2, 2, 3, 4), floats(2, 2, 3, 4)]
    yield "multi-head-past", "MultiHeadAttention", more, {"num_heads": 2, "outputs": 3}
    places = np.tile(np.arange(6), (2, 1))
    for pairs in (0, 1):
        rotary = {"interleaved": pairs, "num_heads": 2, "rotary_embedding_dim": 4}
        yield f"rotary-{pairs}", "RotaryEmbedding", [floats(2, 6, 16), places, floats(12, 2), floats(12, 2)], rotary
    for bits in (4, 8):
        packed = (numbers("uint8", 6, 3, 2 * bits),)
        points = (numbers("uint8", 6 * -(-3 * bits // 8)),)
        blocks = {"K": 40, "N": 6, "bits": bits, "block_size": 16}
        yield f"bits-{bits}", "MatMulNBits", [floats(3, 40), packed, (np.abs(floats(18)),), points], blocks


def of(operator, inputs, options):
    """A model of one node, with what to give it; tuples of one array are constants."""
    options = dict(options)
    outputs, opset = options.pop("outputs", 1), options.pop("opset", None)
    known = [value[0] if isinstance(value, tuple) else value for value in inputs]
    spec = [
        kept if given is None or isinstance(given, tuple) else (str(given.dtype), given.shape)
        for given, kept in zip(inputs, known, strict=True)
    ]
    domain = "" if operator in ("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul") else CONTRIB
    model = node_model(operator, spec, outputs=outputs, domain=domain, **options)
    if opset is not None:
        model.graph.node[0].attribute.append(helper.make_attribute("opset", opset))
    feeds = {f"x{k}": v for k, v in enumerate(inputs) if v is not None and not isinstance(v, tuple)}
    return model, feeds


def named(cases):
    return [pytest.param(*case, id=name) for name, *case in cases]


@pytest.mark.parametrize(("operator", "inputs", "options"), named(quantized_cases()))
def test_operators_on_quantized_tensors(operator, inputs, options):
    model, feeds = of(operator, inputs, options)
    got, want = evaluate(import_onnx(model), feeds), reference(model, feeds)
    for name, value in want.items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5)
            continue
        assert got[name].dtype == value.dtype
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize(("operator", "inputs", "options"), named(contrib_cases()))
def test_operators_of_the_optimizer(operator, inputs, options):
    model, feeds = of(operator, inputs, options)
    half = any(value.dtype == np.float16 for value in feeds.values())
    assert_same(evaluate(import_onnx(model), feeds), reference(model, feeds), 2e-3 if half else 1e-4)


def test_a_sum_of_no_products_is_zero():
    model, feeds = of("MatMulInteger", [numbers("uint8", 3, 0), numbers("int8", 0, 4)], {})
    np.testing.assert_array_equal(evaluate(import_onnx(model), feeds)["y0"], np.zeros((3, 4), "int32"))


def test_an_operator_that_onnx_runtime_writes_in_the_domain_of_onnx():
    model = node_model("SimplifiedLayerNormalization", [("float32", (2, 3, 8)), floats(3, 8)], axis=1)
    feeds = {"x0": floats(2, 3, 8)}
    assert_same(evaluate(import_onnx(model), feeds), reference(model, feeds))


@pytest.mark.parametrize(
    ("operator", "inputs", "options", "reason"),
    [
        ("MatMulNBits", [floats(3, 32), numbers("uint8", 6, 1, 12), floats(6)], {"bits": 3}, "weights have 3 bits"),
        ("FusedConv", [floats(1, 2, 5, 5), floats(3, 2, 3, 3)], {"activation": "Foo"}, "activation Foo is not known"),
        ("MultiHeadAttention", [floats(2, 5, 8)], {"num_heads": 2}, "input 'key' is absent"),
        ("ConvInteger", [numbers("uint8", 1, 3, 5, 5), numbers("uint8", 3, 2, 3, 3)], {}, "weights are for 2 channels"),
        ("DynamicQuantizeLSTM", [floats(2, 1, 4)], {}, "quantizes the state of every step"),
    ],
)
def test_refusals(operator, inputs, options, reason):
    options = {"K": 32, "N": 6, "block_size": 32, **options} if operator == "MatMulNBits" else options
    with pytest.raises(UnsupportedOperatorError, match=reason):
        import_onnx(of(operator, inputs, options)[0])


def around(nodes, constants, *, zero=3):
    """A model in which ``x`` is quantized, ``xr`` stands for it, and ``y`` is quantized to ``yq``."""
    dtype = "uint8"
    both = {"s": scalar(0.0437), "z": scalar(zero, dtype), "sy": scalar(0.193), "zy": scalar(0, dtype)}
    before = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])]
    before.append(helper.make_node("DequantizeLinear", ["q", "s", "z"], ["xr"]))
    after = helper.make_node("QuantizeLinear", ["y", "sy", "zy"], ["yq"])
    known = {**both, **constants}
    return model_of([*before, *nodes, after], {"x": ("float32", (2, 4, 6, 6))}, ["yq"], known)


def weights(name, array, axis=None):
    scale = np.full(array.shape[axis], 0.01, "float32") if axis is not None else scalar(0.01)
    zero = np.zeros(scale.shape, "int8")
    node = helper.make_node("DequantizeLinear", [f"{name}_q", f"{name}_s", f"{name}_z"], [name], axis=axis or 0)
    return node, {f"{name}_q": array, f"{name}_s": scale, f"{name}_z": zero}


def dequantized_cases():
    conv, known = weights("w", numbers("int8", 5, 4, 3, 3), 0)
    bias = {"b": floats(5)}
    node = helper.make_node("Conv", ["xr", "w"], ["c"], pads=[1, 1, 1, 1])
    yield "conv-relu", [conv, node, helper.make_node("Relu", ["c"], ["y"])], known, 1
    with_bias = helper.make_node("Conv", ["xr", "w", "b"], ["y"])
    yield "conv-bias", [conv, with_bias], {**known, **bias}, 1
    product, known = weights("w", numbers("int8", 6, 5), 1)
    flipped = [helper.make_node("Transpose", ["xr"], ["t"], perm=[0, 2, 1, 3])]
    yield "moved-matmul", [product, *flipped, helper.make_node("MatMul", ["t", "w"], ["y"])], known, 1
    gemm, known = weights("w", numbers("int8", 5, 144), 0)
    flat = helper.make_node("Flatten", ["xr"], ["f"])
    last = helper.make_node("Gemm", ["f", "w", "b"], ["y"], transB=1, alpha=0.5)
    yield "gemm", [gemm, flat, last], {**known, **bias}, 1
    yield "sum", [helper.make_node("Add", ["xr", "xr"], ["y"])], {}, 0
    yield "pool", [helper.make_node("AveragePool", ["xr"], ["y"], kernel_shape=[2, 2])], {}, 0
    yield "global", [helper.make_node("GlobalAveragePool", ["xr"], ["y"])], {}, 1


def integer_sums(program):
    """How many sums of the program are of integers."""
    return sum(te.outputs[0].dtype == "int32" and reduce_node(te.op.body[0]) is not None for te in program.tes)


@pytest.mark.parametrize(
    ("nodes", "constants", "sums"), [pytest.param(*case, id=name) for name, *case in dequantized_cases()]
)
def test_what_was_quantized_is_multiplied_on_integers(nodes, constants, sums):
    model = around(nodes, constants)
    program = import_onnx(model)
    feeds = random_inputs(program)
    got, want = evaluate(program, feeds)["yq"], reference(model, feeds)["yq"]
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1 and (got != want).mean() < 0.01
    assert want.max() > want.min()
    plain = import_onnx(model, integers=False)
    assert (integer_sums(program), integer_sums(plain)) == (sums, 0)
    np.testing.assert_allclose(evaluate(plain, feeds)["yq"].astype(int), want.astype(int), atol=1)


def test_integers_that_are_only_moved_stay_as_they_are():
    nodes = [helper.make_node("MaxPool", ["xr"], ["m"], kernel_shape=[2, 2], strides=[2, 2])]
    nodes.append(helper.make_node("Concat", ["m", "m"], ["c"], axis=1))
    nodes.append(helper.make_node("QuantizeLinear", ["c", "s", "z"], ["cq"]))
    nodes.append(helper.make_node("Cast", ["cq"], ["y"], to=onnx.TensorProto.FLOAT))
    model = around(nodes, {}, zero=7)
    program = import_onnx(model)
    feeds = random_inputs(program)
    np.testing.assert_array_equal(evaluate(program, feeds)["yq"], reference(model, feeds)["yq"])
    dtypes = [te.outputs[0].dtype for te in program.tes]
    # Quantized once; nothing is in floating point again before the cast.
    first = dtypes.index("uint8")
    assert "float32" not in dtypes[first : len(dtypes) - 1 - dtypes[::-1].index("float32")]


@pytest.mark.parametrize("zeros", [(0, 0, 0, 0, 0), (3, 0, -7, 1, 100), None], ids=["zero", "several", "none"])
@pytest.mark.parametrize("dtype", BYTES)
def test_what_has_a_scale_for_each_channel_is_quantized_by_one(zeros, dtype):
    """Also where the channels' scales and zero points are all those of the other."""
    values = numbers("int8", 5, 7)
    for scales in (np.linspace(0.01, 0.09, 5), np.full(5, 0.05)):
        known = {"s": scales.astype("float32"), "so": scalar(0.05), "zo": scalar(0, dtype)}
        known |= {} if zeros is None else {"z": np.array(zeros, "int8")}
        names = ["x", "s", *([] if zeros is None else ["z"])]
        nodes = [helper.make_node("DequantizeLinear", names, ["f"], axis=0)]
        nodes.append(helper.make_node("QuantizeLinear", ["f", "so", "zo"], ["y"]))
        model = model_of(nodes, {"x": ("int8", (5, 7))}, ["y"], known)
        got, want = evaluate(import_onnx(model), {"x": values})["y"], reference(model, {"x": values})["y"]
        np.testing.assert_array_equal(got, want)
