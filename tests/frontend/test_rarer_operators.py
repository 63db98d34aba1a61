"""Operators of signals, training, trees and chance: ONNX's own cases, and forms that these do not have."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from souffle.errors import UnsupportedOperatorError
from souffle.frontend import import_onnx
from souffle.program.evaluate import evaluate
from tests.frontend.support import assert_same, node_model, reference
from tests.frontend.test_refusals import cases

F, D, H, I64 = "float32", "float64", "float16", "int64"
# Cases are collected once, by one worker.
pytestmark = [pytest.mark.xdist_group("onnx_cases"), pytest.mark.sampled(2)]

# By how their inputs are given: all at run time, or those that are said when a network is compiled as constants.
NAMES = """
adagrad adagrad_multiple adam adam_multiple momentum momentum_multiple nesterov_momentum
batchnorm_example_training_mode batchnorm_epsilon_training_mode
training_dropout training_dropout_default_mask training_dropout_zero_ratio
flexattention_gqa flexattention_score_mod flexattention_fp16
det_2d det_nd tensorscatter tensorscatter_circular bitcast_bool_to_uint8 scan_sum
maxpool_with_argmax_2d_precomputed_pads maxpool_with_argmax_2d_precomputed_strides roialign_mode_max
deform_conv_with_mask_bias
tfidfvectorizer_tf_batch_onlybigrams_skip5 tfidfvectorizer_tf_uniandbigrams_skip5
ai_onnx_ml_binarizer ai_onnx_ml_array_feature_extractor ai_onnx_ml_tree_ensemble_single_tree
ai_onnx_ml_tree_ensemble_set_membership
"""
CONSTANT_NAMES = """
dft_axis dft_opset19 stft stft_with_window col2im col2im_5d col2im_pads col2im_strides col2im_dilations
maxunpool_export_with_output_shape
"""


@pytest.mark.parametrize("name", [*NAMES.split(), *CONSTANT_NAMES.split()])
def test_case_of_onnx(name: str) -> None:
    case = cases()[name]
    (inputs, expected), model = case.data_sets[0], onnx.ModelProto()
    model.CopyFrom(case.model)
    given = dict(zip([info.name for info in model.graph.input], inputs, strict=True))
    if name in CONSTANT_NAMES.split():
        fixed = {key for key, value in given.items() if value.dtype == I64 and key not in ("x", "xI")}
        model.graph.initializer.extend(numpy_helper.from_array(given.pop(key), key) for key in fixed)
    found = evaluate(import_onnx(model), given)
    wanted = {info.name: np.asarray(value) for info, value in zip(model.graph.output, expected, strict=True)}
    assert_same(found, wanted, rtol=max(case.rtol, 1e-5))


def result(model: onnx.ModelProto, *inputs: np.ndarray) -> list[np.ndarray]:
    return list(
        evaluate(import_onnx(model), dict(zip([i.name for i in model.graph.input], inputs, strict=True))).values()
    )


def noise(*shape: int, dtype: str = F, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# Of a length with two steps, of one that is prime, cut and filled up, along each axis, of all parts.
TRANSFORMS = {
    "complex": ((3, 17, 2), 1, None, F),
    "cut": ((2, 5, 2), 1, 3, D),
    "filled": ((2, 5, 1), -2, 9, F),
    "first": ((6, 3, 2), 0, None, D),
    "half": ((2, 40, 1), 1, None, H),
    "steps": ((1, 600, 2), 1, None, F),
    "steps_filled": ((300, 2, 1), 0, 512, D),
    "single": ((2, 1, 2), 1, None, F),
}


@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_fourier_transform(name: str, inverse: int) -> None:
    shape, axis, length, dtype = TRANSFORMS[name]
    x = noise(*shape, dtype=dtype)
    wide = x.astype(D)
    signal = wide[..., 0] + (1j * wide[..., 1] if shape[-1] == 2 else 0)
    # The axis of the parts is none of the signal's.
    place = axis % len(shape)
    for onesided in (0, 1):
        size = length or (2 * (shape[axis] - 1) if inverse and onesided else shape[axis])
        if size < 1 or (onesided and not inverse and shape[-1] == 2):
            continue
        given = [(dtype, shape), None if length is None else np.array(length), np.array(axis)]
        model = node_model("DFT", given, opset=20, inverse=inverse, onesided=onesided)
        if inverse and onesided:
            want = np.fft.irfft(signal, size, place)[..., None]
        else:
            want = (np.fft.ifft if inverse else np.fft.fft)(signal, size, place)
            want = want.take(range(size // 2 + 1), place) if onesided else want
            want = np.stack([want.real, want.imag], -1)
        (got,) = result(model, x)
        assert (got.dtype, got.shape) == (x.dtype, want.shape)
        error = {H: 1e-3, F: 2e-6, D: 1e-14}[dtype]
        np.testing.assert_allclose(got, want, rtol=0, atol=error * np.abs(want).max())


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("version", [10, 16])
def test_regions_of_what_is_known_are_those_of_inputs(version: int, mode: str) -> None:
    """Constants are worked out beforehand, by another way."""
    rng = np.random.default_rng(version)
    given = {
        "x0": rng.standard_normal((2, 3, 9, 12)).astype(np.float32),
        "x1": np.array([[7, 0, 12, 1], [1.5, 2.25, 9, 7]], np.float32),
        "x2": np.array([1, 0]),
    }
    attributes = {"output_height": 2, "output_width": 3, "sampling_ratio": 2, "spatial_scale": 0.5, "mode": mode}
    kinds = [(str(array.dtype), array.shape) for array in given.values()]
    model = node_model("RoiAlign", kinds, opset=version, **attributes)
    found = evaluate(import_onnx(model), given)
    if mode == "avg":  # of the largest ONNX Runtime takes something else
        assert_same(found, reference(model, given))
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in given.items())
    del model.graph.input[:]
    assert_same(evaluate(import_onnx(model), {}), found)


def of_version(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """`model` with another version of its operators of ``ai.onnx.ml``."""
    for opset in model.opset_import:
        opset.version = version if opset.domain == "ai.onnx.ml" else opset.version
    return model


REFUSED = {
    "prime": ("DFT", [(F, (1, 2053, 1))], {"opset": 20}, "prime factor 2053"),
    "complex half": ("DFT", [(F, (1, 8, 2))], {"opset": 20, "onesided": 1}, "its input is complex"),
    "parts axis": ("DFT", [(F, (1, 8, 2)), None, np.array(-1)], {"opset": 20}, "its axis is -1"),
    "frames": ("STFT", [(F, (1, 8, 1)), np.array(2), None, np.array(9)], {}, "frames of 9 in steps of 2"),
    "not square": ("Det", [(F, (2, 3))], {}, "only a square matrix"),
    "blocks": ("Col2Im", [(F, (1, 4, 5)), np.array([3, 3]), np.array([2, 2])], {"opset": 18}, "do not make"),
    "points": (
        "RoiAlign",
        [(F, (1, 1, 4, 4)), (F, (2, 4)), (I64, (2,))],
        {"mode": "max"},
        "as many points as its size",
    ),
    "draws": ("RandomUniform", [], {"shape": [1 << 27]}, "it draws 134217728 numbers"),
    "text": (
        "LabelEncoder",
        [(I64, (2,))],
        {"domain": "ai.onnx.ml", "keys_int64s": [1], "values_strings": ["a"]},
        "text",
    ),
    "derivative": (
        "Gradient",
        [(F, (2,))],
        {"domain": "ai.onnx.preview.training", "xs": ["a"], "y": "b"},
        "derivative",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    operator, inputs, options, words = REFUSED[name]
    with pytest.raises(UnsupportedOperatorError, match=words):
        import_onnx(of_version(node_model(operator, inputs, **options), 2))


POOLS = {
    "line": ((2, 3, 9), F, {"kernel_shape": [3], "strides": [2], "pads": [1, 1], "ceil_mode": 1}),
    "columns": ((1, 2, 5, 7), D, {"kernel_shape": [2, 3], "storage_order": 1, "dilations": [2, 1]}),
    "same": ((1, 2, 5, 4), "int8", {"kernel_shape": [2, 3], "strides": [2, 3], "auto_pad": "SAME_LOWER"}),
    "space": ((1, 2, 3, 4, 5), F, {"kernel_shape": [2, 2, 2], "storage_order": 1, "strides": [1, 2, 2]}),
    "one": ((2, 3, 1), "uint8", {"kernel_shape": [1]}),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling_with_indices(name: str) -> None:
    shape, dtype, options = POOLS[name]
    model = node_model("MaxPool", [(dtype, shape)], outputs=2, opset=12, **options)
    # Few numbers, so that many are equal.
    x = np.random.default_rng(1).integers(0, 3, shape).astype(dtype)
    assert_same(evaluate(import_onnx(model), {"x0": x}), reference(model, {"x0": x}))


def test_unpooling_undoes_a_pooling() -> None:
    x = noise(2, 3, 8, 6)
    values, indices = result(node_model("MaxPool", [(F, x.shape)], outputs=2, kernel_shape=[2, 2], strides=[2, 2]), x)
    model = node_model("MaxUnpool", [(F, values.shape), (I64, values.shape)], kernel_shape=[2, 2], strides=[2, 2])
    (got,) = result(model, values, indices)
    assert np.array_equal(got, np.where(np.isin(x, values), x, 0))


def test_determinants() -> None:
    x = noise(4, 5, 5, dtype=D)
    x[1, :, 2] = x[1, :, 0]
    x[2, 0] = np.nan
    x[3, 0, 0] = 0
    (got,) = result(node_model("Det", [(D, x.shape)]), x)
    with np.errstate(invalid="ignore"):
        want = np.linalg.det(x)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("mode", "skips", "least", "most"), [("TFIDF", 0, 1, 2), ("IDF", 2, 1, 3), ("TF", 3, 2, 3)])
def test_n_grams(mode: str, skips: int, least: int, most: int) -> None:
    pool = [4, 0, 2, 0, 1, 1, 2, 2, 2, 3, 1, 1, 2, 0]
    options = {"ngram_counts": [0, 3, 11], "pool_int64s": pool, "ngram_indexes": [7, 0, 3, 2, 1, 6, 5, 4]}
    options |= {"weights": np.linspace(0.5, 2, 8).tolist(), "mode": mode, "max_skip_count": skips}
    model = node_model("TfIdfVectorizer", [("int32", (3, 11))], min_gram_length=least, max_gram_length=most, **options)
    x = np.random.default_rng(2).integers(0, 4, (3, 11)).astype("int32")
    assert_same(evaluate(import_onnx(model), {"x0": x}), reference(model, {"x0": x}))


FOREST = {
    "n_targets": 2,
    "target_treeids": [0, 0, 0, 0, 0, 0, 1, 1, 1, 1],
    "target_nodeids": [2, 2, 3, 3, 4, 4, 1, 1, 2, 2],
    "target_ids": [0, 1, 0, 1, 0, 1, 0, 1, 1, 0],
    "target_weights": [0.5, -1.0, 2.0, 0.25, 3.0, -2.0, 0.75, 1.5, -0.5, 4.0],
    "nodes_treeids": [0, 0, 0, 0, 0, 1, 1, 1],
    "nodes_nodeids": [0, 1, 2, 3, 4, 0, 1, 2],
    "nodes_featureids": [0, 2, 0, 0, 0, 1, 0, 0],
    "nodes_values": [0.1, -0.3, 0, 0, 0, 0.4, 0, 0],
    "nodes_modes": ["BRANCH_LEQ", "BRANCH_GT", "LEAF", "LEAF", "LEAF", "BRANCH_LT", "LEAF", "LEAF"],
    "nodes_truenodeids": [1, 2, 0, 0, 0, 1, 0, 0],
    "nodes_falsenodeids": [4, 3, 0, 0, 0, 2, 0, 0],
    "nodes_missing_value_tracks_true": [1, 0, 0, 0, 0, 0, 0, 0],
}
LEARNED = {
    "trees": ("TreeEnsembleRegressor", {**FOREST, "base_values": [1.0, 2.0]}),
    "trees-max": ("TreeEnsembleRegressor", {**FOREST, "aggregate_function": "MAX", "post_transform": "LOGISTIC"}),
    "scaler": ("Scaler", {"offset": [0.1, 0.2, 0.3], "scale": [2.0, 3.0, 4.0]}),
    **{f"norm-{norm}": ("Normalizer", {"norm": norm}) for norm in ("MAX", "L1", "L2")},
    "imputer": ("Imputer", {"imputed_value_floats": [7.0, 8.0, 9.0], "replaced_value_float": math.nan}),
    "linear": ("LinearRegressor", {"coefficients": [0.5, 1, 2, 3, 4, 5], "targets": 2, "intercepts": [1.0, 2.0]}),
    "labels": ("LabelEncoder", {"keys_floats": [1.0, 0.0, 2.0], "values_int64s": [5, 6, 7], "default_int64": -3}),
}


@pytest.mark.parametrize("name", LEARNED)
def test_operators_of_learned_models(name: str) -> None:
    operator, options = LEARNED[name]
    model = of_version(node_model(operator, [(F, (6, 3))], domain="ai.onnx.ml", **options), 2)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64 if name == "labels" else TensorProto.FLOAT
    x = noise(6, 3, seed=3)
    x[0] = 0
    if name in ("trees", "trees-max", "imputer"):
        x[1, 0] = x[2, 2] = np.nan
    if name == "labels":
        x[1] = 1
    assert_same(evaluate(import_onnx(model), {"x0": x}), reference(model, {"x0": x}))


def test_numbers_are_drawn_by_seed() -> None:
    draw = {"shape": [500, 3], "seed": 7.0}
    (normal,) = result(node_model("RandomNormal", [], mean=2.0, scale=0.5, **draw))
    (uniform,) = result(node_model("RandomUniform", [], low=-1.0, high=3.0, **draw))
    # What ONNX's reference draws.
    assert np.array_equal(
        normal, ReferenceEvaluator(node_model("RandomNormal", [], mean=2.0, scale=0.5, **draw)).run(None, {})[0]
    )
    assert np.array_equal(
        uniform, ReferenceEvaluator(node_model("RandomUniform", [], low=-1.0, high=3.0, **draw)).run(None, {})[0]
    )
    chance = np.linspace(0, 1, 2000, dtype=F)
    model = node_model("Bernoulli", [(F, (2000,))], opset=15, dtype=helper.np_dtype_to_tensor_dtype(np.dtype("int32")))
    (happened,) = result(model, chance)
    assert happened.dtype == "int32" and not happened[0] and happened[-1]
    assert set(happened.tolist()) == {0, 1} and abs(happened.mean() - 0.5) < 0.05
    assert np.array_equal(happened, result(model, chance)[0])
    weights = np.log(np.array([[0.2, 0.0, 0.5, 0.3], [0.0, 0.0, 0.0, 1.0]], F) + np.float32(1e-30))
    (drawn,) = result(node_model("Multinomial", [(F, (2, 4))], sample_size=4000, dtype=7), weights)
    assert drawn.dtype == I64 and (drawn[1] == 3).all()
    np.testing.assert_allclose(np.bincount(drawn[0], minlength=4) / 4000, [0.2, 0, 0.5, 0.3], atol=0.03)


def test_nodes_and_iterations_draw_numbers_of_their_own() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g () => (float[50] a, float[50] b, float[2, 50] c) {
        a = RandomUniform<shape=[50]>() b = RandomUniform<shape=[50]>()
        M = Constant<value_int=2>() k = Constant<value=bool {1}>()
        c = Loop(M, k)<body = b (int64 i, bool m) => (bool n, float[50] r) {
            n = Identity(m) r = RandomUniform<shape=[50], seed=3.0>() }> }"""
    found = evaluate(import_onnx(parser.parse_model(text)), {})
    rows = [found["a"], found["b"], *found["c"]]
    assert len({row.tobytes() for row in rows}) == 4


@pytest.mark.parametrize("dtype", [F, H])
def test_dropout_of_the_run_time(dtype: str) -> None:
    model = node_model("Dropout", [(dtype, (400,)), (F, ()), ("bool", ())], outputs=2, opset=13, seed=5)
    x = np.ones(400, dtype)
    for training in (False, True):
        kept, mask = result(model, x, np.array(0.25, F), np.array(training))
        assert kept.dtype == dtype and np.array_equal(
            kept, np.where(mask, np.float64(4 / 3) if training else 1, 0).astype(dtype)
        )
        assert abs(mask.mean() - (0.75 if training else 1)) < 0.06


SEQUENCES = """
    s = SplitToSequence<axis=0>(x)
    t = SequenceMap<body = b (float[1, 3] p, float[4, 3] q) => (float[1, 3] r) {
        m = ReduceMax<keepdims=1>(q) r = Sub(p, m)
    }>(s, x)
    u = If(c)<
        then_branch = y () => (seq(float[1, 3]) o) { o = Identity(t) },
        else_branch = n () => (seq(float[1, 3]) v) { v = Identity(s) }
    >
    i = Constant<value_int=-2>()
    w = SequenceErase(u, i)
    z = ConcatFromSequence<axis=0>(w)
"""


@pytest.mark.parametrize("condition", [False, True])
def test_sequences_of_known_length(condition: bool) -> None:
    head = '<ir_version: 10, opset_import: ["": 21]> g (float[4, 3] x, bool c) => (float[3, 3] z) {'
    model = parser.parse_model(f"{head}{SEQUENCES}}}")
    given = {"x": noise(4, 3), "c": np.array(condition)}
    want = ReferenceEvaluator(model).run(None, given)
    assert_same(evaluate(import_onnx(model), given), {"z": want[0]})
