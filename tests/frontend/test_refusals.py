"""Refusals of ONNX's own suite say what is refused, of which types and why, and nothing of the inside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.node import collect_testcases

import souffle
from souffle.errors import ModelError
from tests.frontend.support import collecting

INTERNALS = re.compile(
    r"relax|tirx|\btvm\b|topi|AssertionError|Traceback|object at 0x|struct_info|R\.|PrimFunc|ExternFunc|call_pure|"
    r"<class|NoneType|has no attribute|Error:|Check failed|\bVar\b|\.cc:|\.py\b"
)
# Of each kind of refusal one or two; the other cases of the suite say the same of other shapes.
pytestmark = pytest.mark.xdist_group("onnx_cases")

NAMES = """
acos_example reduce_sum_do_not_keepdims_example reduce_log_sum_desc_axes resize_upsample_scales_nearest
resize_upsample_sizes_nearest_floor_align_corners upsample_nearest castlike_FLOAT_to_FLOAT16 identity_sequence
identity_opt sequence_map_identity_1_sequence cast_UINT4_to_FLOAT cast_FLOAT8E5M2_to_FLOAT cast_FLOAT4E2M1_to_FLOAT16
equal_string string_concat strnormalizer_nostopwords_nochangecase adagrad adam momentum_multiple
ai_onnx_ml_label_encoder_string_int ai_onnx_ml_tree_ensemble_single_tree ai_onnx_ml_array_feature_extractor
flexattention flexattention_prob_mod nonmaxsuppression_suppress_by_IOU image_decoder_decode_jpeg_rgb reshape_one_dim
squeeze unsqueeze_axis_2 batchnorm_example_training_mode training_dropout blackmanwindow_expanded cumprod_1d cumsum_1d
tfidfvectorizer_tf_only_bigrams_skip0 constantofshape_int_zeros affine_grid_2d bernoulli center_crop_pad_crop
split_variable_parts_1d_opset13 col2im dft_opset19 dft loop11 loop13_seq slice unique_sorted_without_axis compress_0
basic_deform_conv_with_padding edge_pad tensorscatter top_k top_k_uint64 det_2d expand_dim_changed hammingwindow if_seq
maxpool_with_argmax_2d_precomputed_pads onehot_with_axis constant_pad split_to_sequence_nokeepdims tile
dequantizelinear_blocked quantizelinear_blocked_symmetric maxunpool_export_with_output_shape melweightmatrix
nonzero_example range_int32_type_negative_delta roialign_mode_max scan_sum stft string_concat_zero_dimensional
bitcast_bool_to_uint8 gru_batchwise
prelu_example slice_default_axes sce_mean optional_get_element_sequence sequence_insert_at_back
"""
SAMPLE = NAMES.split()


@cache
def cases() -> dict[str, onnx.ModelProto]:
    with collecting():
        return {case.name.removeprefix("test_"): case for case in collect_testcases(None)}


def with_constants(case) -> onnx.ModelProto:
    """The model of a case whose small integer, boolean and scalar inputs are initializers."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    values = case.data_sets[0][0] if case.data_sets else []
    for info, value in zip(case.model.graph.input, values, strict=False):
        if isinstance(value, np.ndarray) and (value.size <= 1 or (value.dtype.kind in "iub" and value.size <= 16)):
            model.graph.initializer.append(numpy_helper.from_array(value, info.name))
    return model


def refusal(model: onnx.ModelProto) -> str | None:
    try:
        souffle.import_onnx(model)
    except ModelError as error:
        return str(error)
    return None


def described(model: onnx.ModelProto, message: str) -> Iterator[str]:
    """What is missing in a message about a model of which some node is named."""
    if INTERNALS.search(message):
        yield f"internals: {INTERNALS.search(message).group()}"
    match = re.search(r"operator (\S+) of node '([^']+)' with (no inputs|inputs \()", message)
    if match is None and "read by no node" in message and ";" in message:
        return
    if match is None:
        yield "no operator, node and inputs"
        return
    nodes = {node.name or f"{node.op_type}_{k}": node for k, node in enumerate(model.graph.node)}
    node = nodes.get(match.group(2))
    if node is None or node.op_type != match.group(1).split("::")[-1]:
        yield f"{match.group(2)} is no node of the model"
        return
    graph = model.graph
    shown = message[match.end() :]
    for name in node.input:
        if any(info.name == name for info in graph.input):
            info = next(info for info in graph.input if info.name == name)
            if info.type.HasField("tensor_type"):
                extents = [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim]
                kind = TensorProto.DataType.Name(info.type.tensor_type.elem_type).lower()
                kind = {"float": "float32", "double": "float64"}.get(kind, kind)
                if f"{kind}[{', '.join(map(str, extents))}]" not in shown:
                    yield f"input {name} is not shown as {kind}{extents}"
    # A reason, and after it something to do.
    if ";" not in message:
        yield "no remedy"


@pytest.mark.parametrize("constants", [False, True], ids=["run_time", "constants"])
def test_refusals_of_the_suite(constants: bool, capfd: pytest.CaptureFixture[str]) -> None:
    wrong, refused = [], 0
    for name in SAMPLE:
        case = cases().get(name)
        if case is None:
            continue
        model = with_constants(case) if constants else case.model
        message = refusal(model)
        if message is not None:
            refused += 1
            wrong += [f"{name}: {what}\n    {message}" for what in described(model, message)]
    assert not wrong, "\n".join(wrong)
    assert refused > (20 if constants else 40)
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
