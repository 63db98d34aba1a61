"""Every operator against ONNX Runtime."""

from __future__ import annotations

import math

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from souffle.errors import UnsupportedOperatorError
from souffle.frontend import import_onnx
from souffle.program import TE
from souffle.program.evaluate import evaluate
from tests.frontend.support import assert_same, compare, node_model, random_inputs

pytestmark = pytest.mark.sampled(2)

F, I64, I32, BOOL = "float32", "int64", "int32", "bool"


def ints(*values):
    return np.array(values, dtype="int64")


def floats(*values):
    return np.array(values, dtype="float32")


def scalar(value, dtype="float32"):
    return np.array(value, dtype=dtype)


def weights(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


POSITIVE = np.abs(weights(7, 5)) + 0.5

UNARY = (
    *("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "HardSwish", "Neg", "Relu", "Round"),
    *("Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Tanh"),
)

CASES = {
    # elementwise
    **{f"unary-{op}": (op, [(F, (3, 5))], {}) for op in UNARY},
    "elu": ("Elu", [(F, (3, 5))], {"alpha": 0.7}),
    "selu": ("Selu", [(F, (3, 5))], {}),
    "celu": ("Celu", [(F, (3, 5))], {"alpha": 0.7}),
    "mish": ("Mish", [(F, (3, 5))], {"opset": 18}),
    "gelu": ("Gelu", [(F, (3, 5))], {"opset": 20}),
    "gelu-tanh": ("Gelu", [(F, (3, 5))], {"opset": 20, "approximate": "tanh"}),
    "leaky": ("LeakyRelu", [(F, (3, 5))], {"alpha": 0.2}),
    "hard-sigmoid": ("HardSigmoid", [(F, (3, 5))], {"alpha": 0.3}),
    "thresholded": ("ThresholdedRelu", [(F, (3, 5))], {"alpha": 0.3}),
    "shrink": ("Shrink", [(F, (3, 5))], {"lambd": 0.3, "bias": 0.1}),
    "prelu": ("PRelu", [(F, (2, 3, 5)), weights(3, 1)], {}),
    "clip": ("Clip", [(F, (3, 5)), scalar(-0.5), scalar(0.5)], {}),
    "clip-low": ("Clip", [(F, (3, 5)), scalar(-0.5)], {}),
    "clip-old": ("Clip", [(F, (3, 5))], {"min": -0.5, "max": 0.2, "opset": 7}),
    "top-k-old": ("TopK", [(F, (3, 9))], {"k": 2, "outputs": 2, "opset": 9}),
    "resize-old": ("Resize", [(F, (1, 2, 3, 4)), floats(1, 1, 2, 2)], {"opset": 10, "mode": "linear"}),
    "resize-empty-roi": ("Resize", [(F, (1, 2, 3, 4)), floats(), floats(1, 1, 2, 3)], {"opset": 11}),
    "hardmax-old": ("Hardmax", [(F, (3, 4, 5))], {"opset": 11}),
    "hardmax-old-axis": ("Hardmax", [(F, (3, 4, 5))], {"opset": 11, "axis": 0}),
    "add-broadcast": ("Add", [(F, (3, 1, 5)), (F, (4, 1))], {}),
    "div-scalar": ("Div", [(F, (3, 5)), scalar(11.3)], {}),
    "pow-two": ("Pow", [(F, (3, 5)), scalar(2.0)], {}),
    "pow-three-int": ("Pow", [(F, (3, 5)), scalar(3, "int64")], {}),
    "pow-half": ("Pow", [POSITIVE, (F, (7, 5))], {}),
    "mod": ("Mod", [(I64, (3, 5)), scalar(3, "int64")], {}),
    "mod-float": ("Mod", [(F, (3, 5)), scalar(0.7)], {"fmod": 1}),
    "max-three": ("Max", [(F, (3, 5)), (F, (5,)), scalar(0.1)], {}),
    "mean-two": ("Mean", [(F, (3, 5)), (F, (5,))], {}),
    "less": ("Less", [(F, (3, 5)), (F, (5,))], {}),
    "and": ("And", [(BOOL, (3, 5)), (BOOL, (5,))], {}),
    "not": ("Not", [(BOOL, (3, 5))], {}),
    "equal-bool": ("Equal", [(BOOL, (3, 5)), (BOOL, (5,))], {}),
    "where": ("Where", [(BOOL, (3, 1)), (F, (3, 5)), scalar(-1.0)], {}),
    "isnan": ("IsNaN", [(F, (3, 5))], {}),
    "isinf-one-side": ("IsInf", [(F, (3, 5))], {"detect_negative": 0}),
    "cast-int": ("Cast", [(F, (3, 5))], {"to": 7}),
    "cast-half": ("Cast", [(F, (3, 5))], {"to": 10}),
    "cast-bool": ("Cast", [(I32, (3, 5))], {"to": 9}),
    "cast-back": ("Cast", [(BOOL, (3, 5))], {"to": 1}),
    # matrices
    "matmul": ("MatMul", [(F, (7, 5)), weights(5, 11)], {}),
    "matmul-batched": ("MatMul", [(F, (2, 1, 7, 5)), (F, (3, 5, 4))], {}),
    "matmul-vector": ("MatMul", [(F, (7, 5)), (F, (5,))], {}),
    "gemm": ("Gemm", [(F, (5, 7)), weights(3, 5), weights(3)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    "einsum": ("Einsum", [(F, (2, 3, 5)), (F, (2, 5, 4))], {"equation": "bij,bjk->bki"}),
    # convolutions and pools
    "conv": ("Conv", [(F, (2, 3, 9, 11)), weights(4, 3, 3, 3), weights(4)], {"pads": [1, 0, 2, 1], "strides": [2, 1]}),
    "conv-same": ("Conv", [(F, (1, 3, 9, 8)), weights(4, 3, 3, 4)], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "conv-group": ("Conv", [(F, (1, 6, 7, 7)), weights(4, 3, 3, 3)], {"group": 2, "dilations": [2, 1]}),
    "conv-depthwise": ("Conv", [(F, (1, 6, 7, 7)), weights(6, 1, 3, 3)], {"group": 6, "pads": [1, 1, 1, 1]}),
    "conv-1d": ("Conv", [(F, (2, 3, 13)), weights(5, 3, 3)], {"pads": [1, 1]}),
    "conv-3d": ("Conv", [(F, (1, 2, 5, 6, 7)), weights(3, 2, 2, 3, 3)], {}),
    "deconv": ("ConvTranspose", [(F, (1, 3, 5, 6)), weights(3, 4, 3, 3)], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "deconv-shape": (
        "ConvTranspose",
        [(F, (1, 3, 5, 6)), weights(3, 4, 3, 3), weights(4)],
        {"strides": [2, 2], "output_shape": [10, 12], "auto_pad": "SAME_UPPER"},
    ),
    "deconv-padding": (
        "ConvTranspose",
        [(F, (1, 4, 5, 6)), weights(4, 2, 3, 3)],
        {"strides": [2, 2], "output_padding": [1, 1], "group": 2},
    ),
    "deconv-dilated": (
        "ConvTranspose",
        [(F, (2, 4, 5, 6)), weights(4, 3, 3, 2), weights(6)],
        {"strides": [2, 1], "dilations": [2, 3], "pads": [1, 0, 2, 1], "output_padding": [1, 0], "group": 2},
    ),
    "deconv-1d": ("ConvTranspose", [(F, (1, 3, 5)), weights(3, 2, 4)], {"strides": [2]}),
    "max-pool": ("MaxPool", [(F, (1, 2, 9, 9))], {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}),
    "max-pool-ceil": ("MaxPool", [(F, (1, 2, 8, 8))], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    "average-pool": ("AveragePool", [(F, (1, 2, 9, 9))], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
    "average-pool-count": (
        "AveragePool",
        [(F, (1, 2, 9, 9))],
        {"kernel_shape": [3, 3], "pads": [1] * 4, "count_include_pad": 1},
    ),
    "global-average": ("GlobalAveragePool", [(F, (2, 3, 5, 7))], {}),
    "global-max": ("GlobalMaxPool", [(F, (2, 3, 5, 7))], {}),
    "lp-pool": ("LpPool", [(F, (1, 2, 6, 6))], {"kernel_shape": [2, 2], "p": 2}),
    "lp-pool-ceil": (
        "LpPool",
        [(F, (1, 2, 6, 7))],
        {"kernel_shape": [3, 3], "strides": [2, 2], "p": 3, "ceil_mode": 1, "pads": [1, 0, 0, 1], "opset": 18},
    ),
    "lp-pool-same": (
        "LpPool",
        [(F, (1, 2, 7))],
        {"kernel_shape": [3], "strides": [2], "p": 3, "auto_pad": "SAME_LOWER", "opset": 18},
    ),
    "max-pool-same-lower": (
        "MaxPool",
        [(F, (3, 2, 4, 5))],
        {"kernel_shape": [3, 2], "strides": [3, 2], "auto_pad": "SAME_LOWER"},
    ),
    "max-pool-same-upper": (
        "MaxPool",
        [(F, (3, 2, 4, 5))],
        {"kernel_shape": [3, 2], "strides": [3, 2], "auto_pad": "SAME_UPPER", "ceil_mode": 1},
    ),
    "depth-to-space": ("DepthToSpace", [(F, (1, 8, 3, 5))], {"blocksize": 2, "mode": "CRD"}),
    "space-to-depth": ("SpaceToDepth", [(F, (1, 2, 4, 6))], {"blocksize": 2}),
    # normalizations
    "softmax": ("Softmax", [(F, (3, 5, 7))], {"axis": 1}),
    "softmax-old": ("Softmax", [(F, (3, 5, 7))], {"axis": 1, "opset": 11}),
    "log-softmax": ("LogSoftmax", [(F, (3, 5))], {}),
    "hardmax": ("Hardmax", [(F, (3, 5))], {"axis": 0}),
    "layer-norm": ("LayerNormalization", [(F, (3, 5, 7)), weights(7), weights(7)], {}),
    "layer-norm-two-axes": ("LayerNormalization", [(F, (3, 5, 7)), weights(5, 7)], {"axis": 1}),
    "layer-norm-statistics": ("LayerNormalization", [(F, (3, 5, 7)), weights(7), weights(7)], {"outputs": 3}),
    "batch-norm": ("BatchNormalization", [(F, (2, 5, 3, 3)), weights(5), weights(5), weights(5), POSITIVE[0]], {}),
    "instance-norm": ("InstanceNormalization", [(F, (2, 3, 5, 5)), weights(3), weights(3)], {}),
    "group-norm": ("GroupNormalization", [(F, (2, 6, 3, 3)), weights(6), weights(6)], {"num_groups": 2, "opset": 21}),
    "lp-norm": ("LpNormalization", [(F, (3, 5))], {"p": 1, "axis": 0}),
    "mvn": ("MeanVarianceNormalization", [(F, (2, 3, 4, 5))], {}),
    "lrn": ("LRN", [(F, (2, 5, 3, 3))], {"size": 3}),
    # reductions
    "reduce-sum": ("ReduceSum", [(F, (3, 5, 7)), ints(0, -1)], {"keepdims": 0}),
    "reduce-mean": ("ReduceMean", [(F, (3, 5, 7))], {"axes": [1]}),
    "reduce-all": ("ReduceMax", [(F, (3, 5))], {"keepdims": 0}),
    "reduce-min-18": ("ReduceMin", [(F, (3, 5)), ints(1)], {"opset": 18}),
    "reduce-l2": ("ReduceL2", [(F, (3, 5))], {"axes": [1]}),
    "reduce-lse": ("ReduceLogSumExp", [(F, (3, 5))], {"axes": [0]}),
    "reduce-prod": ("ReduceProd", [(F, (3, 5))], {"axes": [0]}),
    "argmax": ("ArgMax", [(F, (3, 5, 7))], {"axis": 1}),
    "argmax-ties": ("ArgMax", [(I32, (3, 9))], {"axis": 1, "keepdims": 0, "select_last_index": 1}),
    "argmin": ("ArgMin", [(I32, (3, 9))], {"axis": -1}),
    "top-k": ("TopK", [(F, (3, 9)), ints(4)], {"outputs": 2}),
    "top-k-smallest": ("TopK", [(F, (3, 9, 2)), ints(2)], {"axis": 1, "largest": 0, "outputs": 2}),
    "cumsum": ("CumSum", [(F, (3, 9)), scalar(1, "int64")], {}),
    "cumsum-reverse": ("CumSum", [(F, (3, 9)), scalar(0, "int64")], {"reverse": 1, "exclusive": 1}),
    # shapes
    "transpose": ("Transpose", [(F, (3, 5, 7))], {"perm": [2, 0, 1]}),
    "reshape": ("Reshape", [(F, (4, 6)), ints(0, 2, -1)], {}),
    "flatten": ("Flatten", [(F, (2, 3, 4))], {"axis": 2}),
    "squeeze": ("Squeeze", [(F, (1, 3, 1)), ints(0)], {}),
    "unsqueeze-old": ("Unsqueeze", [(F, (3, 5))], {"axes": [0, 3], "opset": 11}),
    "concat": ("Concat", [(F, (3, 2)), (F, (3, 5)), weights(3, 1)], {"axis": 1}),
    "split": ("Split", [(F, (7, 3)), ints(2, 4, 1)], {"outputs": 3}),
    "split-even": ("Split", [(F, (6, 3))], {"outputs": 3, "opset": 11}),
    "slice": ("Slice", [(F, (9, 7)), ints(-1, 1), ints(-100, 6), ints(0, 1), ints(-2, 3)], {}),
    "slice-old": ("Slice", [(F, (9, 7))], {"starts": [1], "ends": [-1], "axes": [1], "opset": 9}),
    "pad": ("Pad", [(F, (3, 5)), ints(1, 0, 2, 1), scalar(2.5)], {}),
    "pad-crop": ("Pad", [(F, (5, 5)), ints(-1, 2, 1, -2)], {}),
    "pad-reflect": ("Pad", [(F, (5, 4)), ints(2, 1, 1, 3)], {"mode": "reflect"}),
    "pad-edge": ("Pad", [(F, (5, 4)), ints(2, 1, 1, 3)], {"mode": "edge"}),
    "pad-old": ("Pad", [(F, (5, 4))], {"pads": [0, 1, 1, 0], "value": 0.5, "opset": 9}),
    "pad-axes": ("Pad", [(F, (3, 5, 2)), ints(1, 2), None, ints(-2)], {"opset": 18}),
    "tile": ("Tile", [(F, (2, 3)), ints(2, 3)], {}),
    "expand": ("Expand", [(F, (3, 1)), ints(2, 1, 5)], {}),
    "gather": ("Gather", [(F, (7, 5)), (I64, (2, 3))], {}),
    "gather-negative": ("Gather", [(F, (3, 7)), ints(-1, 0, 3)], {"axis": 1}),
    "gather-scalar": ("Gather", [(F, (3, 7)), scalar(-2, "int64")], {"axis": 1}),
    "gather-elements": ("GatherElements", [(F, (4, 5)), (I64, (4, 2))], {"axis": 1}),
    "gather-nd": ("GatherND", [(F, (4, 4, 3)), (I64, (5, 2))], {}),
    "gather-nd-batch": ("GatherND", [(F, (2, 4, 3)), (I64, (2, 5, 1))], {"batch_dims": 1}),
    "scatter-elements": ("ScatterElements", [(F, (3, 5)), np.array([[0, 2, 1], [1, 0, 2]]), (F, (2, 3))], {}),
    "scatter-add": ("ScatterElements", [(F, (4, 5)), (I64, (4, 3)), (F, (4, 3))], {"axis": 1, "reduction": "add"}),
    "scatter-nd": ("ScatterND", [(F, (6, 3)), np.array([[1], [4]]), (F, (2, 3))], {}),
    "scatter-nd-add": ("ScatterND", [(F, (4, 4)), (I64, (5, 2)), (F, (5,))], {"reduction": "add"}),
    **{
        f"scatter-nd-rows-{how}": ("ScatterND", [(F, (7, 5)), (I64, (2, 2, 1)), (F, (2, 2, 5))], {"reduction": how})
        for how in ("add", "mul", "max", "min")
    },
    "scatter-nd-rows-of-two": ("ScatterND", [(F, (3, 4, 5)), (I64, (3, 2)), (F, (3, 5))], {"reduction": "add"}),
    "one-hot": ("OneHot", [(I64, (3, 2)), scalar(5, "int64"), floats(0.5, 2.0)], {"axis": 1}),
    "trilu": ("Trilu", [(F, (5, 4)), scalar(1, "int64")], {"upper": 0}),
    "reverse-sequence": ("ReverseSequence", [(F, (5, 3, 2)), ints(5, 2, 1)], {}),
    "reverse-sequence-of-one": ("ReverseSequence", [(F, (1, 3, 2)), ints(1, 0, 1)], {}),
    "compress": ("Compress", [(F, (4, 3)), np.array([True, False, True])], {"axis": 0}),
    **{
        f"reduce-no-axis-{operator}": (operator, [(F, (3, 5))], {"noop_with_empty_axes": 1, "opset": 18})
        for operator in ("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp")
    },
    "mean-of-integers": ("ReduceMean", [("int32", (3, 5)), ints(1)], {"opset": 18}),
    "eye-like": ("EyeLike", [(F, (3, 5))], {"k": 1}),
    "identity": ("Identity", [(F, (3, 5))], {}),
    "dropout": ("Dropout", [(F, (3, 5))], {}),
    # resizing
    "resize-nearest": ("Resize", [(F, (1, 2, 3, 4)), None, floats(1, 1, 2, 3)], {}),
    "resize-nearest-floor": (
        "Resize",
        [(F, (1, 2, 5, 4)), None, None, ints(1, 2, 7, 3)],
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    ),
    **{
        f"resize-positions-{before}-{after}": (
            "Resize",
            [(F, before), None, None, ints(*after)],
            {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "ceil"},
        )
        for before, after in (((4, 1), (5, 6)), ((4, 32, 1), (5, 6, 6)), ((7, 13), (11, 3)))
    },
    "resize-tie": (
        "Resize",
        [(F, (7, 14)), None, None, ints(2, 4)],
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "round_prefer_ceil"},
    ),
    "resize-linear": ("Resize", [(F, (1, 2, 5, 4)), None, None, ints(1, 2, 9, 7)], {"mode": "linear"}),
    "resize-corners": (
        "Resize",
        [(F, (1, 2, 5, 4)), None, None, ints(1, 2, 9, 7)],
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
    ),
    "resize-scale": ("Resize", [(F, (1, 2, 5, 7)), None, floats(1, 1, 0.6, 1.3)], {"mode": "linear"}),
    "resize-cubic": ("Resize", [(F, (1, 2, 5, 7)), None, floats(1, 1, 2, 2)], {"mode": "cubic"}),
    "resize-cubic-outside": (
        "Resize",
        [(F, (1, 2, 5, 7)), None, None, ints(1, 2, 8, 9)],
        {"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5},
    ),
    "resize-antialias": (
        "Resize",
        [(F, (1, 2, 9, 8)), None, None, ints(1, 2, 4, 3)],
        {"mode": "linear", "antialias": 1, "exclude_outside": 1, "opset": 18},
    ),
    "resize-1d": ("Resize", [(F, (1, 2, 5)), None, floats(1, 1, 2)], {"mode": "linear"}),
    "upsample": ("Upsample", [(F, (1, 2, 3, 4)), floats(1, 1, 2, 2)], {"opset": 9}),
    "grid-sample": ("GridSample", [(F, (1, 2, 4, 5)), weights(1, 3, 3, 2) * 0.4], {}),
    # quantization
    "quantize": ("QuantizeLinear", [(F, (3, 5)), scalar(0.1), scalar(3, "uint8")], {}),
    "dequantize": ("DequantizeLinear", [("int8", (3, 5)), weights(3), np.zeros(3, "int8")], {"axis": 0}),
    "conv-integer": ("ConvInteger", [("uint8", (1, 2, 5, 5)), np.ones((3, 2, 3, 3), "uint8"), scalar(1, "uint8")], {}),
    "qlinear-matmul": (
        "QLinearMatMul",
        [
            ("uint8", (3, 5)),
            scalar(0.1),
            scalar(2, "uint8"),
            np.arange(20, dtype="uint8").reshape(5, 4),
            scalar(0.2),
            scalar(1, "uint8"),
            scalar(0.3),
            scalar(7, "uint8"),
        ],
        {},
    ),
    # types
    "half": ("MatMul", [("float16", (3, 5)), ("float16", (5, 4))], {"rtol": 5e-3}),
    "double": ("Softmax", [("float64", (3, 5))], {}),
    "int64": ("Add", [(I64, (3, 5)), ints(5)], {}),
    "scalar": ("Mul", [(F, ()), (F, ())], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_operator(case):
    operator, inputs, options = CASES[case]
    options = dict(options)
    rtol = options.pop("rtol", 1e-4)
    program = compare(node_model(operator, inputs, **options), rtol=rtol)
    assert all(isinstance(te_, TE) for te_ in program.tes)


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_rows_are_scattered_as_rows(reduction):
    rows, width, count = 50, 20, 4
    given = [(F, (rows, width)), (I64, (count, 1)), (F, (count, width))]
    program = import_onnx(node_model("ScatterND", given, reduction=reduction, opset=18))
    evaluated = [math.prod(int(axis.dom.extent) for axis in (*te_.op.axis, *te_.op.reduce_axis)) for te_ in program.tes]
    # Which update goes where is asked once for a row, not for each of its elements.
    assert max(evaluated) == rows * width
    # TVM would take seconds to simplify that two indices are equal, each brought into the axis.
    assert not [line for line in str(program).splitlines() if "hits[" in line and "min(" in line]


BY_DEFINITION = {
    "swish": ("Swish", [(F, (3, 5))], {"opset": 24}),
    "rms": ("RMSNormalization", [(F, (3, 5)), weights(5)], {"opset": 23}),
    "rotary": ("RotaryEmbedding", [(F, (1, 2, 3, 8)), weights(1, 3, 4), weights(1, 3, 4, seed=2)], {"opset": 23}),
    "attention": ("Attention", [(F, (1, 2, 3, 8)), (F, (1, 2, 5, 8)), (F, (1, 2, 5, 8))], {"opset": 23}),
    "attention-causal": (
        "Attention",
        [(F, (2, 4, 24)), (F, (2, 4, 24)), (F, (2, 4, 24))],
        {"opset": 23, "q_num_heads": 3, "kv_num_heads": 3, "is_causal": 1},
    ),
}


@pytest.mark.parametrize("case", BY_DEFINITION)
def test_newer_operator(case):
    """Against ONNX's reference implementation, since the runtime may not have them yet."""
    operator, inputs, options = BY_DEFINITION[case]
    model = node_model(operator, inputs, **options)
    program = import_onnx(model)
    given = random_inputs(program)
    want = ReferenceEvaluator(model).run(None, given)
    assert_same(evaluate(program, given), dict(zip(program.output_names, want, strict=True)))


def test_a_crop_of_a_region_that_is_an_input_is_refused():
    inputs = [(F, (1, 1, 4, 4)), (F, (8,)), None, ints(1, 1, 3, 3)]
    options = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "opset": 13}
    with pytest.raises(UnsupportedOperatorError, match=r"Resize of node 'the_Resize'.*its input 'roi' is computed"):
        import_onnx(node_model("Resize", inputs, **options))
