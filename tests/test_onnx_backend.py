"""Souffle behind ONNX's backend interface: ONNX's own tests run through it, and what they do not ask for."""

from __future__ import annotations

import unittest

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.backend.test import BackendTest
from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt

from souffle import onnx_backend
from souffle.errors import InputError, ModelError, OptionError, Refusal
from souffle.onnx_backend import SouffleRep, prepare, run_model, run_node, supports_device
from tests.frontend.support import collecting, model_of, node_model
from tests.thorough import sized

F, I64 = "float32", "int64"

# Cheap ones of many kinds, and the number of inputs that are given as constants.
PASSING = """
abs acos add_bcast and3d argmax_keepdims_random asinh averagepool_1d_default batchnorm_example basic_conv_with_padding
bitshift_left_uint8 bitwise_not_2d cast_FLOAT_to_DOUBLE ceil_example clip_default_inbounds concat_1d_axis_0 cos
depthtospace_example div_example elu_example equal erf exp flatten_axis1 floor_example gather_0 gemm_default_no_bias
globalmaxpool_precomputed greater_equal hardsigmoid_example identity isnan leakyrelu_example less log_example
lrn_default matmul_2d max_float16 maxpool_1d_default min_int32 mod_mixed_sign_int64 mul_example neg_example not_2d or2d
pow_example prelu_example reciprocal_example relu round selu_example shape sigmoid_example sign sin softmax_axis_1
softsign_example spacetodepth_example sqrt_example sub_example sum_example tanh_example thresholdedrelu_example
transpose_default where_example xor2d
"""
WITH_CONSTANTS = """
constant_pad cumsum_1d expand_dim_changed onehot_without_axis range_int32_type_negative_delta
reduce_sum_keepdims_example reshape_zero_dim slice squeeze split_variable_parts_1d_opset18 tile top_k unsqueeze_axis_0
"""
REFUSED = "strnormalizer_nostopwords_nochangecase identity_sequence string_split_basic"

pytestmark = pytest.mark.xdist_group("onnx_cases")


@pytest.fixture(scope="module")
def suite() -> type[unittest.TestCase]:
    with collecting():
        return BackendTest(onnx_backend, __name__).test_cases["OnnxBackendNodeModelTest"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[SouffleRep]:
    """What has run: ONNX's runner takes a refusal as a test that passes."""
    found: list[SouffleRep] = []
    run = SouffleRep.run
    monkeypatch.setattr(SouffleRep, "run", lambda self, *given, **more: found.append(self) or run(self, *given, **more))
    return found


@pytest.mark.parametrize("part", range(sized(2, 4)))
def test_cases_of_onnx_pass(suite, ran, part):
    names = PASSING.split()[part::4]
    for name in names:
        suite(f"test_{name}_cpu").debug()
    assert len(ran) == len(names) and not any(rep.constants for rep in ran)


def test_cases_of_onnx_pass_with_parameters_as_constants(suite, ran):
    names = WITH_CONSTANTS.split()
    for name in names:
        suite(f"test_{name}_cpu").debug()
    assert len(ran) == len(names) and all(rep.constants for rep in ran)


def test_cases_of_onnx_pass_as_cuda_text(suite, ran):
    for name in ("softmax_axis_1", "tile"):
        suite(f"test_{name}_cuda").debug()
    assert [rep.program.name for rep in ran] == ["test_softmax_axis_1", "test_tile"]


def test_onnx_runner_skips_what_is_refused(suite, ran):
    for name in REFUSED.split():
        suite(f"test_{name}_cpu").debug()
    assert not ran


def sum_model() -> onnx.ModelProto:
    return node_model("ReduceSum", [(F, (2, 3)), (I64, (1,))], opset=18, keepdims=0)


def data_dependent_model() -> onnx.ModelProto:
    nodes = [helper.make_node("NonZero", ["x"], ["y"]), helper.make_node("EyeLike", ["y"], ["z"])]
    return model_of(nodes, {"x": (F, (3,))}, ["z"])


X = np.arange(6, dtype=F).reshape(2, 3)


def test_a_network_is_compiled_for_the_values_that_it_depends_on():
    rep = prepare(sum_model())
    assert (rep.inputs, rep.constants, rep.program) == (("x0", "x1"), ("x1",), None)
    for axis in (0, 1, 0):
        (result,) = rep.run([X, np.array([axis])])
        np.testing.assert_array_equal(result, X.sum(axis=axis))
        program = rep.program
    by_name = rep.run({"x1": np.array([0]), "x0": X})
    np.testing.assert_array_equal(by_name["y0"], X.sum(axis=0))
    assert rep.program is program and program.input_names == ("x0",)


def test_values_are_asked_for_one_after_the_other():
    """A branch that needs another input is known when the condition is."""
    infos = [helper.make_tensor_value_info(n, e, s) for n, e, s in (("c", 9, []), ("x", 1, [2, 3]), ("axes", 7, [1]))]
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(operator, inputs, ["r"])], name, [], [helper.make_empty_tensor_value_info("r")]
        )
        for name, operator, inputs in (("then", "ReduceSum", ["x", "axes"]), ("else", "Abs", ["x"]))
    }
    node = helper.make_node("If", ["c"], ["y"], **branches)
    graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    for condition in (False, True):
        (result,) = run_model(model, [np.array(condition), -X, np.array([1])])
        np.testing.assert_array_equal(result, -X.sum(axis=1, keepdims=True) if condition else X)


def test_parameters_that_are_computed_from_an_input_name_that_input():
    nodes = [
        helper.make_node("Mul", ["a", "b"], ["axes"]),
        helper.make_node("ReduceSum", ["x", "axes"], ["y"]),
    ]
    infos = [helper.make_tensor_value_info(n, e, s) for n, e, s in (("x", 1, [2, 3]), ("a", 7, [1]), ("b", 7, [1]))]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_empty_tensor_value_info("y")])
    graph.initializer.append(numpy_helper.from_array(np.array([1]), "b"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    rep = prepare(model)
    assert (rep.inputs, rep.constants) == (("x", "a"), ("a",))
    np.testing.assert_array_equal(rep.run([X, np.array([1])])[0], X.sum(axis=1, keepdims=True))


def test_one_node():
    node = helper.make_node("TopK", ["x", "k"], ["values", "indices"], axis=-1)
    result = run_node(node, [X, np.array([2])])
    np.testing.assert_array_equal(result[0], X[:, :0:-1])
    node = helper.make_node("Softmax", ["x"], ["y"])
    old, new = (run_node(node, [X[None]], opset_version=version)[0] for version in (11, 13))
    assert np.allclose(old.sum(), 1) and np.allclose(new.sum(axis=-1), 1)
    with pytest.raises(InputError, match="2 inputs were given, and the node has 1: x"):
        run_node(node, [X, X])


def test_what_is_wrong_is_no_refusal():
    with pytest.raises(InputError, match="1 inputs were given, and the model has 2: 'x0', 'x1'"):
        prepare(sum_model()).run(X)
    with pytest.raises(InputError, match="not given its inputs 'x1'"):
        prepare(sum_model()).run({"x0": X})
    with pytest.raises(OptionError, match='"CPU", "CUDA" and "CUDA:N"'):
        prepare(sum_model(), "TPU")
    with pytest.raises(ModelError, match="no graph"):
        prepare(onnx.ModelProto())
    with pytest.raises(BackendIsNotSupposedToImplementIt, match="data decides the extent") as refused:
        prepare(data_dependent_model())
    assert refused.value.__cause__.refusal is Refusal.DATA


def test_compatible_is_what_can_be_imported():
    chosen = data_dependent_model()
    found = [onnx_backend.is_compatible(model) for model in (sum_model(), chosen, node_model("Abs", [(F, (3,))]))]
    assert found == [True, False, True]
    assert [supports_device(device) for device in ("CPU", "CUDA", "CUDA:1", "TPU", "CUDA:x")] == [True] * 3 + [
        False
    ] * 2
    assert not onnx_backend.is_compatible(sum_model(), "TPU")
