"""Operators whose results are as long as data makes them, and those that read such results, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper

import souffle
from souffle.errors import Refusal, UnsupportedOperatorError
from souffle.frontend import import_onnx
from souffle.frontend.custom import LONGEST_AXIS
from souffle.program import ProgramError, TEProgram
from souffle.program.evaluate import evaluate
from tests.frontend.support import model_of, node_model, reference

pytestmark = pytest.mark.sampled(4)

F, I64, B = "float32", "int64", "bool"
node = helper.make_node


def agrees(model: onnx.ModelProto, feeds: list[dict[str, np.ndarray]]) -> TEProgram:
    """The program of a model, which gives what ONNX Runtime gives: shapes, types and, but for rounding, values."""
    program = import_onnx(model)
    network = souffle.compile(program, target="cpu")
    for feed in feeds:
        found, wanted = network(feed), reference(model, feed)
        assert list(found) == list(wanted)
        for name, expected in wanted.items():
            assert (found[name].shape, found[name].dtype) == (expected.shape, expected.dtype), name
            np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
    return program


def sparse(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = F) -> Iterator[np.ndarray]:
    """Arrays of which none, some and all elements are not zero."""
    for part in (0.0, 0.4, 1.0):
        numbers = rng.integers(1, 5, shape) * np.sign(rng.random(shape) - 0.3)
        yield np.array(numbers * (rng.random(shape) < part), dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 5), F), ((7,), B), ((1,), F), ((2, 3, 2), "int32"), ((13,), "uint8"), ((), F)]
)
def test_non_zero(shape, dtype):
    rng = np.random.default_rng(len(shape))
    feeds = [{"x0": array} for array in sparse(rng, shape, dtype)]
    if dtype == F:
        feeds.append({"x0": np.full(shape, np.nan, F)})
    program = agrees(node_model("NonZero", [(dtype, shape)]), feeds)
    assert program.counts == {"y0": ((1, "y0#1"),)} and program.output_names == ("y0", "y0#1")


@pytest.mark.parametrize(("axis", "length"), [(None, 15), (None, 1), (0, 3), (0, 2), (1, 3), (-1, 5)])
def test_compress(axis, length):
    rng = np.random.default_rng(length)
    feeds = [{"x0": rng.random((3, 5)).astype(F), "x1": rng.random(length) < part} for part in (0.0, 0.3, 0.7, 1.0)]
    agrees(node_model("Compress", [(F, (3, 5)), (B, (length,))], **({} if axis is None else {"axis": axis})), feeds)


@pytest.mark.parametrize("in_order", [0, 1])
@pytest.mark.parametrize(("axis", "shape"), [(None, (4, 3)), (0, (7, 2)), (1, (1, 5)), (0, (1, 1)), (-1, (2, 2, 3))])
def test_unique(axis, shape, in_order):
    rng = np.random.default_rng(in_order)
    feeds = [{"x0": rng.integers(-most, most, shape).astype(F)} for most in (1, 2, 3, 100)]
    options = {} if axis is None else {"axis": axis}
    agrees(node_model("Unique", [(F, shape)], outputs=4, sorted=in_order, **options), feeds)


def test_unique_takes_nan_for_equal_to_itself_and_for_the_largest():
    program = import_onnx(node_model("Unique", [(F, (6,))], outputs=4))
    found = evaluate(program, {"x0": np.array([np.nan, 2, -np.inf, np.nan, -0.0, 0.0], F)})
    np.testing.assert_array_equal(found["y0"], np.array([-np.inf, 0, 2, np.nan], F))
    np.testing.assert_array_equal(found["y1"], [2, 4, 1, 0])
    np.testing.assert_array_equal(found["y2"], [3, 2, 0, 3, 1, 1])
    np.testing.assert_array_equal(found["y3"], [1, 2, 1, 2])


SUPPRESSIONS = [
    # batch, classes, boxes, most of a class, threshold of overlaps, of scores, centred, parameters are inputs
    (2, 3, 7, 4, 0.3, 0.2, 0, True),
    (1, 2, 13, 100, 0.5, None, 1, False),
    (1, 1, 1, 1, 0.5, 0.5, 0, False),
    (2, 1, 5, 2, 0.0, 0.1, 1, False),
]


@pytest.mark.parametrize(
    ("batch", "classes", "boxes", "most", "overlap", "threshold", "centred", "computed"), SUPPRESSIONS
)
def test_suppression(batch, classes, boxes, most, overlap, threshold, centred, computed):
    parameters = {"x2": np.array([most]), "x3": np.array([overlap], F)}
    parameters |= {} if threshold is None else {"x4": np.array([threshold], F)}
    given = [(str(v.dtype), v.shape) if computed else v for v in parameters.values()]
    shapes = [(F, (batch, boxes, 4)), (F, (batch, classes, boxes))]
    model = node_model("NonMaxSuppression", [*shapes, *given], center_point_box=centred)
    rng, feeds = np.random.default_rng(boxes), []
    for kind in ("any", "ties", "none", "nan", "flat"):
        corners, scores = rng.random((batch, boxes, 4)).astype(F), rng.random((batch, classes, boxes)).astype(F)
        if kind == "ties":
            scores = np.round(scores * 2) / 2
        elif kind == "none":
            scores[:] = -1
        elif kind == "nan" and threshold is not None:
            # Without a threshold ONNX Runtime sorts them anywhere.
            scores[..., 0] = np.nan
        elif kind == "flat":
            corners[:, ::2, 2] = corners[:, ::2, 0]
        feeds.append({"x0": corners, "x1": scores, **(parameters if computed else {})})
    agrees(model, feeds)


def test_none_is_selected_where_no_more_are_wanted():
    found = evaluate(
        import_onnx(node_model("NonMaxSuppression", [(F, (1, 3, 4)), (F, (1, 1, 3))])),
        {"x0": np.zeros((1, 3, 4), F), "x1": np.ones((1, 1, 3), F)},
    )
    assert found["y0"].shape == (0, 3) and found["y0"].dtype == I64


# What reads them. `r` is some rows of x, float32[<=5, 4]; `z` where x is not zero, int64[2, <=20].

CONSTANTS = {
    "w": np.arange(12, dtype=F).reshape(4, 3),
    "row": np.arange(4, dtype=F),
    "one": np.array([1]),
    "zero": np.array([0]),
    "two": np.array([2]),
    "far": np.array([2**62]),
    "last": np.array([-1]),
    "first": np.array(0),
    "split": np.array([1, 3]),
    "flat": np.array([-1]),
    "pairs": np.array([-1, 2]),
    "kept": np.array([0, 2, 2]),
    "tiles": np.array([1, 3]),
    "depth": np.array(5),
    "values": np.array([0, 1], F),
    "wide": np.array([1, 3, 1, 4]),
    "most": np.array(1, F),
    "whole": np.array([0, 1]),
    "seven": np.array(7),
}
READERS = {
    "elements": [node("Mul", ["r", "row"], ["a"]), node("Add", ["a", "r"], ["y"])],
    "where": [node("Greater", ["r", "most"], ["a"]), node("Where", ["a", "r", "row"], ["y"])],
    "definition": [node("Softsign", ["r"], ["y"])],
    "cast": [node("Cast", ["r"], ["a"], to=7), node("Clip", ["r", "most"], ["y"])],
    "integers": [node("Div", ["seven", "z"], ["a"]), node("Mod", ["a", "z"], ["y"])],
    "transpose": [node("Transpose", ["z"], ["y"])],
    "squeeze": [node("Unsqueeze", ["r", "whole"], ["a"]), node("Squeeze", ["a", "zero"], ["y"])],
    "reshape": [node("Reshape", ["r", "flat"], ["y"]), node("Reshape", ["r", "kept"], ["y2"])],
    "reshape back": [node("Reshape", ["r", "flat"], ["a"]), node("Relu", ["a"], ["y"])],
    "reshape pairs": [node("Reshape", ["r", "pairs"], ["y"])],
    "flatten": [node("Unsqueeze", ["r", "one"], ["a"]), node("Flatten", ["a"], ["y"], axis=2)],
    "gather": [node("Transpose", ["z"], ["t"]), node("GatherND", ["x", "t"], ["y"])],
    "rows": [node("Gather", ["z", "first"], ["a"], axis=0), node("Gather", ["x", "a"], ["y"], axis=0)],
    "columns": [node("Gather", ["r", "two"], ["y"], axis=1)],
    "elements of rows": [node("ArgMax", ["r"], ["a"], axis=1), node("GatherElements", ["r", "a"], ["y"], axis=1)],
    "slice": [node("Slice", ["r", "one", "two", "one"], ["y"]), node("Slice", ["r", "one", "far", "zero"], ["y2"])],
    "slice the end": [node("Slice", ["r", "zero", "last", "zero"], ["y"])],
    "concat": [node("Concat", ["r", "r"], ["y"], axis=1)],
    "split": [node("Split", ["r", "split"], ["a", "b"], axis=1), node("Mul", ["a", "b"], ["y"])],
    "shape": [node("Shape", ["r"], ["a"]), node("Gather", ["a", "first"], ["y"]), node("Size", ["z"], ["y2"])],
    "product": [node("MatMul", ["r", "w"], ["y"])],
    "products": [node("Transpose", ["r"], ["t"]), node("Gemm", ["t", "w"], ["y"], transA=1)],
    "outer": [node("Transpose", ["r"], ["t"]), node("MatMul", ["r", "t"], ["y"])],
    "softmax": [node("Softmax", ["r"], ["y"], axis=1)],
    "normalized": [node("LayerNormalization", ["r", "row"], ["y"])],
    "sums": [node("ReduceSum", ["r", "zero"], ["y"]), node("ReduceSum", ["r", "one"], ["y2"], keepdims=0)],
    "sum of all": [node("ReduceSum", ["r"], ["y"], keepdims=0)],
    "other sums": [node("ReduceL2", ["r"], ["y"], axes=[0]), node("ReduceSumSquare", ["r"], ["y2"], axes=[0, 1])],
    "product of all": [node("ReduceProd", ["r"], ["y"], axes=[0])],
    "mean": [node("ReduceMean", ["r"], ["y"], axes=[1]), node("Add", ["y", "most"], ["y2"])],
    "cumulated": [node("CumSum", ["r", "first"], ["y"])],
    "tiles": [node("Tile", ["r", "tiles"], ["y"])],
    "one hot": [node("Cast", ["z"], ["a"], to=7), node("OneHot", ["a", "depth", "values"], ["y"])],
    "expanded": [node("Unsqueeze", ["r", "zero"], ["a"]), node("Expand", ["a", "wide"], ["y"])],
    "again": [node("NonZero", ["r"], ["y"])],
    "selected again": [node("ReduceSum", ["r", "one"], ["a"], keepdims=0), node("Greater", ["a", "most"], ["b"]),
                       node("Compress", ["r", "b"], ["y"], axis=0)],
    "both axes": [node("Compress", ["r", "d"], ["y"], axis=1), node("Neg", ["y"], ["y2"])],
    "same condition": [node("Compress", ["x", "c"], ["r2"], axis=0), node("Sub", ["r", "r2"], ["y"])],
    "unique": [node("Gather", ["z", "first"], ["a"], axis=0), node("Unique", ["a"], ["y", "y2", "y3", "y4"])],
    "unique rows": [node("Unique", ["r"], ["y", "y2", "y3", "y4"], axis=0)],
    "some rows of a loop": [node("Identity", ["r"], ["y"])],
}  # fmt: skip


def reading(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    """A model of nodes that read `r` and `z`; its outputs are all that begin with y."""
    made = [node("Compress", ["x", "c"], ["r"], "rows", axis=0), node("NonZero", ["x"], ["z"], "where")]
    outputs = [name for one in nodes for name in one.output if name.startswith("y")]
    inputs = {"x": (F, (5, 4)), "c": (B, (5,)), "d": (B, (4,))}
    read = {name for one in (*made, *nodes) for name in one.input}
    constants = {name: array for name, array in CONSTANTS.items() if name in read}
    return model_of([*made, *nodes], {k: v for k, v in inputs.items() if k in read}, outputs, constants, opset=17)


def side_by_side(cases: list[str]) -> onnx.ModelProto:
    """One model of several cases, each with names of its own."""
    common = {"x", "c", "d", "r", "z", *CONSTANTS}
    nodes = []
    for number, case in enumerate(cases):
        for one in READERS[case]:
            copy = onnx.NodeProto()
            copy.CopyFrom(one)
            copy.name = f"{case} {one.op_type} {len(nodes)}"
            copy.input[:] = [name if name in common else f"{name}.{number}" for name in one.input]
            copy.output[:] = [f"{name}.{number}" for name in one.output]
            nodes.append(copy)
    return reading(nodes)


@pytest.mark.parametrize("part", range(3))
def test_what_reads_them(part):
    model, rng = side_by_side(list(READERS)[part::3]), np.random.default_rng(1)
    feeds = []
    for x, share in zip(sparse(rng, (5, 4)), (0.5, 1.0, 0.0), strict=True):
        # Of indices that are zero ONNX Runtime makes divisors, too.
        x[0], x[:, 0] = 0, 0
        feeds.append({"x": x, "c": rng.random(5) < share, "d": rng.random(4) < 0.5})
    names = {info.name for info in model.graph.input}
    agrees(model, [{name: value for name, value in feed.items() if name in names} for feed in feeds])


def test_extremes_of_what_is_there():
    nodes = [
        node("ReduceMax", ["r"], ["y"], axes=[0]),
        node("ReduceMin", ["r"], ["y2"], axes=[0], keepdims=0),
        node("ArgMax", ["r"], ["y3"], axis=0),
        node("ArgMin", ["r"], ["y4"], axis=0, keepdims=0),
        node("ReduceMean", ["r"], ["y5"], axes=[0]),
        node("ReduceMean", ["r"], ["y6"], keepdims=0),
    ]
    model, x = reading(nodes), np.linspace(-3, -1, 20, dtype=F).reshape(5, 4)
    x[1] = -np.inf
    conditions = ([1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1])
    program = agrees(model, [{"x": x, "c": np.array(c, bool)} for c in conditions])
    # ONNX: of nothing the largest is the least number, and the other way round.
    found = evaluate(program, {"x": x, "c": np.zeros(5, bool)})
    assert np.all(found["y"] == -np.inf) and np.all(found["y2"] == np.inf) and np.all(np.isnan(found["y5"]))


REFUSED = {
    "not known": ([node("EyeLike", ["r"], ["y"])], "EyeLike is not known to read such a value"),
    "a convolution": ([node("Unsqueeze", ["r", "whole"], ["a"]), node("Conv", ["a", "k"], ["y"])], "Conv is not known"),
    "joined": ([node("Concat", ["r", "x"], ["y"], axis=0)], "puts values one behind the other"),
    "joined beside": ([node("Concat", ["r", "x"], ["y"], axis=1)], "may have different extents"),
    "a fixed extent": ([node("Add", ["r", "x"], ["y"])], "along axis 0 it meets a fixed extent of 5"),
    "two extents": (
        [node("Slice", ["r", "zero", "two", "zero"], ["a"]), node("Compress", ["x", "d2"], ["b"], axis=0),
         node("Slice", ["b", "zero", "two", "zero"], ["b2"]), node("Add", ["a", "b2"], ["y"])],
        "two extents that data decides meet along axis 0",
    ),
    "an element": ([node("Gather", ["r", "zero"], ["y"], axis=0)], "an index may be behind the end"),
    "from the end": ([node("Slice", ["r", "last", "far", "zero"], ["y"])], "from its end"),
    "dropped": ([node("Squeeze", ["s", "zero"], ["y"])], "drops this axis"),
    "one axis of two": ([node("Reshape", ["z", "flat"], ["y"])], "does not keep what is there in front"),
    "its room": ([node("Reshape", ["r", "room"], ["y"])], "does not tell the axis by -1 or 0"),
    "a contraction": ([node("MatMul", ["w", "r"], ["y"])], "it sums along this axis"),
    "a normalized axis": ([node("Softmax", ["r"], ["y"], axis=0)], "what is behind the end"),
    "the largest": ([node("TopK", ["r", "one"], ["y", "i"], axis=0)], "what is behind the end"),
    "scattered": ([node("Transpose", ["z"], ["t"]), node("GatherND", ["x", "t"], ["u"]),
                   node("ScatterND", ["x", "t", "u"], ["y"])], "ScatterND is not known"),
    "backwards": ([node("CumSum", ["r", "first"], ["y"], reverse=1)], "what is behind the end"),
    "the last of equals": ([node("ArgMax", ["r"], ["y"], axis=0, select_last_index=1)], "may be behind the end"),
    "a mean of integers": ([node("Cast", ["r"], ["a"], to=6), node("ReduceMean", ["a"], ["y"], axes=[0])], "integers"),
    "in a row": ([node("Compress", ["r", "c2"], ["y"])], "all elements in a row"),
    "a sequence": ([node("SequenceConstruct", ["r"], ["q"]), node("SequenceAt", ["q", "first"], ["y"])], "."),
    "a shape": ([node("Shape", ["r"], ["n"]), node("ConstantOfShape", ["n"], ["y"])], "computed at run time"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not(case):
    nodes, words = REFUSED[case]
    made = [
        node("Compress", ["x", "c"], ["r"], "rows", axis=0),
        node("NonZero", ["x"], ["z"], "where"),
        node("Compress", ["v", "e"], ["s"], "some", axis=0),
    ]
    constants = {**CONSTANTS, "k": np.ones((1, 1, 1, 1), F), "room": np.array([5, 4])}
    inputs = {"x": (F, (5, 4)), "v": (F, (1, 3)), "c": (B, (5,)), "e": (B, (1,)), "c2": (B, (20,)), "d2": (B, (5,))}
    with pytest.raises(UnsupportedOperatorError, match=words) as refused:
        import_onnx(model_of([*made, *nodes], inputs, ["y"], constants))
    assert case in ("a sequence", "a shape") or refused.value.refusal is Refusal.DATA
    named = {"dropped": "some", "one axis of two": "where", "scattered": "where"}.get(case, "rows")
    assert case in ("a sequence", "a shape") or f"of node '{named}'" in str(refused.value)


def test_branches_and_loops_do_not_lose_the_count():
    branch = helper.make_graph([node("Neg", ["r"], ["b"])], "branch", [], [helper.make_empty_tensor_value_info("b")])
    same = helper.make_graph([node("Abs", ["r"], ["b2"])], "same", [], [helper.make_empty_tensor_value_info("b2")])
    made = [node("Compress", ["x", "c"], ["r"], "rows", axis=0)]
    chosen = [*made, node("If", ["q"], ["y"], "choice", then_branch=branch, else_branch=same)]
    inputs = {"x": (F, (5, 4)), "c": (B, (5,)), "q": (B, ())}
    with pytest.raises(UnsupportedOperatorError, match="where its shape must be known"):
        import_onnx(model_of(chosen, inputs, ["y"]))
    taken = model_of(chosen, inputs, ["y"], {})
    rng = np.random.default_rng(3)
    feed = {"x": rng.random((5, 4)).astype(F), "c": np.array([1, 0, 1, 1, 0], bool)}
    found = evaluate(import_onnx(taken, constants={"q": np.array(True)}), feed)["y"]
    np.testing.assert_array_equal(found, -feed["x"][feed["c"]])
    # What a loop collects of its steps is laid along a new axis.
    ends = [helper.make_tensor_value_info("i", 7, ()), helper.make_tensor_value_info("go", 9, ())]
    body = helper.make_graph(
        [node("Neg", ["r"], ["step"]), node("Identity", ["go"], ["go2"])],
        "body", ends, [helper.make_tensor_value_info("go2", 9, ()), helper.make_empty_tensor_value_info("step")],
    )  # fmt: skip
    looped = [*made, node("Loop", ["n", "q"], ["y"], "steps", body=body)]
    constants = {"n": np.array(2), "q": np.array(True)}
    with pytest.raises(UnsupportedOperatorError, match="where its shape must be known"):
        import_onnx(model_of(looped, {"x": (F, (5, 4)), "c": (B, (5,))}, ["y"], constants))


def test_what_is_too_long_is_refused():
    for operator, inputs in (("NonZero", 1), ("Unique", 1), ("Compress", 2)):
        given = [(F, (LONGEST_AXIS + 1,)), (B, (LONGEST_AXIS + 1,))][:inputs]
        with pytest.raises(UnsupportedOperatorError, match=f"an axis of {LONGEST_AXIS + 1} elements"):
            import_onnx(node_model(operator, given))
    shapes = [(F, (1, 5000, 4)), (F, (1, 1, 5000))]
    with pytest.raises(UnsupportedOperatorError, match=r"it may select 5000 boxes .* max_output_boxes_per_class"):
        import_onnx(node_model("NonMaxSuppression", [*shapes, np.array([2**60])]))


def test_a_program_says_what_is_counted():
    program = import_onnx(reading([node("Neg", ["r"], ["y"]), node("Transpose", ["r"], ["y2"])]))
    assert program.counts == {"y": ((0, "y#0"),), "y2": ((1, "y#0"),)}
    assert "# axis 0 is as long as y#0 says" in str(program)
    both = souffle.together({"a": program, "b": program})
    assert both.counts["b.y2"] == ((1, "b.y#0"),)
    x = np.arange(20, dtype=F).reshape(5, 4)
    feed = {"a.x": x, "a.c": np.eye(5)[1] > 0, "b.x": x, "b.c": np.ones(5, bool)}
    found = both.run(feed)
    assert list(found) == ["a.y", "a.y2", "b.y", "b.y2"]
    np.testing.assert_array_equal(found["a.y"], -x[1:2])
    np.testing.assert_array_equal(found["b.y2"], x.T)


def test_a_count_is_an_output_of_the_program():
    program = import_onnx(reading([node("Neg", ["r"], ["y"])]))
    for counts in ({"y": ((2, "y#0"),)}, {"y": ((0, "y"),)}, {"nobody": ((0, "y#0"),)}, {"y": ((0, "x"),)}):
        with pytest.raises(ProgramError, match="cannot be as long as"):
            replace(program, counts=counts).check()
