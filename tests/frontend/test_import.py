"""What import_onnx promises beside right values: names, origins, groups, constants, and how it refuses bad models."""

from __future__ import annotations

import keyword
import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from souffle.errors import InputError, ModelError, OptionError, UnsupportedOperatorError
from souffle.frontend import import_onnx
from souffle.program import TE
from souffle.program.evaluate import evaluate
from souffle.tvm_compat import loads
from tests.frontend.support import assert_same, compare, model_of, node_model, random_inputs, reference


def weights(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def node(operator, inputs, outputs, name="", **attributes):
    return helper.make_node(operator, inputs, outputs, name=name, **attributes)


def perceptron(rows=3):
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "/layer.0/MatMul"),
        node("Add", ["a", "b"], ["c"], "/layer.0/Add"),
        node("Relu", ["c"], ["d"], "/layer.0/max"),
        node("MatMul", ["d", "v"], ["y"], "/layer.1/MatMul"),
    ]
    constants = {"w": weights(5, 7), "b": weights(7), "v": weights(7, 2)}
    return model_of(nodes, {"x": ("float32", (rows, 5))}, ["y"], constants)


def test_names_origins_and_groups():
    program = compare(perceptron())
    first, add, relu, second = program.tes
    assert [te_.origin.nodes for te_ in program.tes] == [
        ("/layer.0/MatMul",),
        ("/layer.0/Add",),
        ("/layer.0/max",),
        ("/layer.1/MatMul",),
    ]
    assert first.origin.group == add.origin.group == relu.origin.group != second.origin.group
    names = [tensor.name for tensor in program.tensors()] + [te_.name for te_ in program.tes]
    assert all(re.fullmatch(r"[A-Za-z_]\w*", name) and not keyword.iskeyword(name) for name in names)
    assert program.input_names == ("x",) and program.output_names == ("y",)


def test_softmax_is_one_group_of_several_tes():
    program = import_onnx(node_model("Softmax", [("float32", (3, 5))]))
    assert len(program.tes) == 4
    assert len({te_.origin.group for te_ in program.tes}) == 1
    assert len({te_.name for te_ in program.tes}) == 4


def test_equal_and_missing_node_names_become_unique():
    nodes = [node("Relu", ["x"], ["a"], "same"), node("Exp", ["a"], ["b"], "same"), node("Neg", ["b"], ["y"])]
    program = import_onnx(model_of(nodes, {"x": ("float32", (3,))}, ["y"]))
    origins = [te_.origin.nodes[0] for te_ in program.tes]
    assert len(set(origins)) == 3 and all(origins)


def test_constants_are_the_models_own_and_shared():
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["a", "w"], ["y"])]
    program = compare(model_of(nodes, {"x": ("float32", (3, 40))}, ["y"], {"w": weights(40, 40)}))
    assert len(program.constants) == 1


def test_scalar_constants_are_immediates():
    program = compare(node_model("Div", [("float32", (3,)), np.array(11.3, "float32")]))
    assert not program.constants and len(loads(program.tes[0].body)) == 1


def test_indices_are_32_bits():
    program = import_onnx(node_model("Reshape", [("float32", (4, 6)), np.array([3, 8])]))
    (te_,) = program.tes
    assert {str(axis.var.ty.dtype) for axis in te_.axes} == {"int32"}


def test_reshapes_that_undo_each_other_vanish():
    nodes = [
        node("Reshape", ["x", "s"], ["a"]),
        node("Reshape", ["a", "t"], ["b"]),
        node("Relu", ["b"], ["y"]),
    ]
    constants = {"s": np.array([10]), "t": np.array([2, 5])}
    program = compare(model_of(nodes, {"x": ("float32", (2, 5))}, ["y"], constants))
    assert len(program.tes) == 1


def test_shape_arithmetic_and_constant_subgraphs_are_folded():
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axis"], ["n1"]),
        node("Concat", ["n1", "rest"], ["target"], axis=0),
        node("Reshape", ["x", "target"], ["a"]),
        node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        node("Exp", ["wt"], ["we"]),
        node("MatMul", ["a", "we"], ["y"]),
    ]
    constants = {"zero": np.array(0), "axis": np.array([0]), "rest": np.array([-1]), "w": weights(3, 10)}
    program = compare(model_of(nodes, {"x": ("float32", (4, 2, 5))}, ["y"], constants))
    assert [te_.origin.operators[0] for te_ in program.tes] == ["Reshape", "MatMul"]


def test_outputs_are_always_results_of_distinct_tes():
    nodes = [node("Identity", ["x"], ["same"]), node("Relu", ["x"], ["a"]), node("Identity", ["a"], ["b"])]
    model = model_of(
        nodes, {"x": ("float32", (3,)), "unused": ("int64", (2,))}, ["same", "a", "b", "k"], {"k": weights(2)}
    )
    program = compare(model)
    assert program.input_names == ("x", "unused") and len(set(program.outputs)) == 4
    assert all(tensor in program.producers for tensor in program.outputs)


def test_split_and_several_outputs():
    nodes = [
        node("Split", ["x", "s"], ["a", "b"], axis=1),
        node("Mul", ["a", "b"], ["c"]),
        node("TopK", ["c", "k"], ["v", "i"]),
    ]
    compare(model_of(nodes, {"x": ("float32", (3, 8))}, ["c", "v", "i"], {"s": np.array([4, 4]), "k": np.array([2])}))


# control flow, sequences, functions


def subgraph(nodes, inputs, outputs):
    return helper.make_graph(
        nodes,
        "body",
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in inputs],
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in outputs],
    )


@pytest.mark.parametrize("known", [True, False])
def test_if(known):
    branches = {
        f"{name}_branch": subgraph([node(op, ["x"], ["r"])], [], [("r", TensorProto.FLOAT, [3])])
        for name, op in (("then", "Exp"), ("else", "Neg"))
    }
    nodes = [node("If", ["c"], ["y"], **branches)]
    inputs = {"x": ("float32", (3,))} | ({} if known else {"c": ("bool", ())})
    program = compare(model_of(nodes, inputs, ["y"], {"c": np.array(False)} if known else {}))
    assert len(program.tes) == (1 if known else 3)


def test_loop_and_scan():
    body = subgraph(
        [node("Add", ["s", "x"], ["s2"]), node("Identity", ["c"], ["c2"]), node("Neg", ["s2"], ["z"])],
        [("i", TensorProto.INT64, []), ("c", TensorProto.BOOL, []), ("s", TensorProto.FLOAT, [3])],
        [("c2", TensorProto.BOOL, []), ("s2", TensorProto.FLOAT, [3]), ("z", TensorProto.FLOAT, [3])],
    )
    loop = node("Loop", ["n", "", "x"], ["final", "all"], body=body)
    compare(model_of([loop], {"x": ("float32", (3,))}, ["final", "all"], {"n": np.array(4)}))
    body = subgraph(
        [node("Add", ["s", "t"], ["s2"]), node("Mul", ["s2", "t"], ["z"])],
        [("s", TensorProto.FLOAT, [3]), ("t", TensorProto.FLOAT, [3])],
        [("s2", TensorProto.FLOAT, [3]), ("z", TensorProto.FLOAT, [3])],
    )
    scan = node("Scan", ["x", "seq"], ["final", "all"], body=body, num_scan_inputs=1, scan_input_directions=[1])
    compare(model_of([scan], {"x": ("float32", (3,)), "seq": ("float32", (4, 3))}, ["final", "all"]))


def test_sequences():
    nodes = [
        node("SplitToSequence", ["x", "two"], ["s"], axis=1),
        node("SequenceAt", ["s", "one"], ["a"]),
        node("SequenceErase", ["s", "one"], ["t"]),
        node("ConcatFromSequence", ["t"], ["b"], axis=0),
    ]
    constants = {"two": np.array(2), "one": np.array(1)}
    compare(model_of(nodes, {"x": ("float32", (3, 6))}, ["a", "b"], constants))


def test_functions_of_the_model_are_inlined():
    function = helper.make_function(
        "mine",
        "Twice",
        ["a"],
        ["r"],
        [node("LeakyRelu", ["a"], ["m"], "leak"), node("Add", ["m", "m"], ["r"], "add")],
        [helper.make_opsetid("", 17)],
        attributes=["alpha"],
    )
    reference_to = function.node[0].attribute.add()
    reference_to.name, reference_to.ref_attr_name, reference_to.type = "alpha", "alpha", onnx.AttributeProto.FLOAT
    nodes = [node("Twice", ["x"], ["y"], "outer", domain="mine", alpha=0.3)]
    model = model_of(nodes, {"x": ("float32", (3, 5))}, ["y"], functions=[function], domains=["mine"])
    program = compare(model)
    assert [te_.origin.nodes[0] for te_ in program.tes] == ["outer/leak", "outer/add"]


# files, dimensions, and what is refused


def test_paths_bytes_and_external_data(tmp_path):
    model = node_model("MatMul", [("float32", (3, 40)), weights(40, 40)])
    texts = [str(import_onnx(m)) for m in (model, model.SerializeToString())]
    onnx.save(model, tmp_path / "a.onnx")
    texts.append(str(import_onnx(tmp_path / "a.onnx")))
    onnx.save(
        model,
        tmp_path / "b.onnx",
        save_as_external_data=True,
        location="b.data",
        size_threshold=0,
        convert_attribute=True,
    )
    assert (tmp_path / "b.data").exists()
    program = import_onnx(str(tmp_path / "b.onnx"))
    assert len({*texts, str(program)}) == 1
    model = onnx.load(tmp_path / "a.onnx")
    given = random_inputs(program)
    assert_same(evaluate(program, given), reference(model, given))
    (tmp_path / "b.data").unlink()
    with pytest.raises(ModelError, match=r"b\.onnx.*'x1'"):
        import_onnx(tmp_path / "b.onnx")


def test_a_missing_file_and_a_foreign_one(tmp_path):
    with pytest.raises(ModelError, match=r"nothing\.onnx: no such file"):
        import_onnx(tmp_path / "nothing.onnx")
    (tmp_path / "text.onnx").write_text("this is no model")
    with pytest.raises(ModelError, match=r"text\.onnx"):
        import_onnx(tmp_path / "text.onnx")
    with pytest.raises(ModelError, match="ONNX"):
        import_onnx(b"")


def test_an_invalid_graph():
    model = perceptron()
    model.graph.node[1].input[0] = "nowhere"
    with pytest.raises(ModelError, match="nowhere"):
        import_onnx(model)


def test_open_dimensions():
    model = perceptron("n")
    with pytest.raises(ModelError, match=r"dimension 0 \(n\) of input 'x'.*batch="):
        import_onnx(model)
    with pytest.raises(OptionError, match="batch is 0"):
        import_onnx(model, batch=0)
    program = import_onnx(model, batch=6)
    assert program.inputs[0].shape == (6, 5) and program.outputs[0].shape == (6, 2)
    with pytest.raises(ModelError, match=r"dimension 1 \(length\) of input 'x0'"):
        import_onnx(node_model("Relu", [("float32", (3, "length"))]), batch=2)


def test_the_batch_is_fixed_wherever_its_name_stands():
    nodes = [node("MatMul", ["x", "z"], ["y"])]
    program = import_onnx(model_of(nodes, {"x": ("float32", ("n", 5)), "z": ("float32", (5, "n"))}, ["y"]), batch=4)
    assert program.outputs[0].shape == (4, 4)


@pytest.mark.parametrize(
    ("operator", "inputs", "options"),
    [
        ("Det", [("float32", (65, 65))], {}),
        ("Custom", [("float32", (3, 5))], {"domain": "mine"}),
    ],
)
def test_unsupported_operators_are_named(operator, inputs, options):
    with pytest.raises(UnsupportedOperatorError, match=f"{operator}.*the_{operator}"):
        import_onnx(node_model(operator, inputs, **options))


def test_wrong_inputs_to_evaluate():
    program = import_onnx(perceptron())
    good = np.zeros((3, 5), "float32")
    with pytest.raises(InputError, match=r"'x' is float64 of shape \[3, 5\], expected float32 of shape \[3, 5\]"):
        evaluate(program, {"x": good.astype("float64")})
    with pytest.raises(InputError, match=r"'x'.*\[3, 5\]"):
        evaluate(program, {"x": good[:2]})
    with pytest.raises(InputError, match=r"no input 'z'"):
        evaluate(program, {"x": good, "z": good})
    with pytest.raises(InputError, match=r"'x' is missing"):
        evaluate(program, {})
    assert evaluate(program, [good])["y"].shape == (3, 2)


def test_printed_program():
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "mm"),
        node("Slice", ["a", "s", "e", "s"], ["b"], "cut"),
        node("Relu", ["b"], ["y"], "relu"),
    ]
    constants = {"w": weights(5, 7), "s": np.array([1]), "e": np.array([4])}
    program = import_onnx(model_of(nodes, {"x": ("float32", (3, 5))}, ["y"], constants))
    assert str(program) == "\n".join(
        [
            "program test",
            "input  x: float32[3, 5]",
            "const  w: float32[5, 7]",
            "mm[i, j] = sum(x[i, rk] * w[rk, j]), 0 ≤ i < 3, 0 ≤ j < 7, rk < 5   # MatMul mm",
            "cut[i, j] = mm[i, j + 1], 0 ≤ i < 3, 0 ≤ j < 3   # Slice cut",
            "relu[i, j] = max(cut[i, j], 0), 0 ≤ i < 3, 0 ≤ j < 3   # Relu relu",
            "output relu   # y",
        ]
    )


def test_no_te_reads_only_constants():
    nodes = [
        node("BatchNormalization", ["x", "g", "b", "m", "v"], ["a"]),
        node("ScatterND", ["a", "i", "u"], ["y"]),
    ]
    constants = {
        **{name: weights(4, seed=k) for k, name in enumerate("gbm")},
        "v": np.ones(4, "float32"),
        "i": np.array([[1]]),
        "u": weights(1, 4, 3),
    }
    program = compare(model_of(nodes, {"x": ("float32", (2, 4, 3))}, ["y"], constants))
    for te_ in program.tes:
        assert isinstance(te_, TE)
        assert any(tensor not in program.constants for tensor in te_.inputs)


def test_a_model_given_as_proto_is_not_changed():
    model = perceptron("n")
    before = model.SerializeToString(deterministic=True)
    import_onnx(model, batch=2)
    assert model.SerializeToString(deterministic=True) == before
    assert numpy_helper.to_array(model.graph.initializer[0]).shape == (5, 7)
