"""Reductions that start in the tiles of the contraction they read: ragged tiles, every way to read, equal bits.

And which of them the cost model lets start there: those that gain by it, by more than it may err.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import souffle
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.decision import Refused
from souffle.pipeline import compile_cuda
from souffle.placement.in_tiles import Start, propagate, start_by_cost
from souffle.placement.two_phase import Split, two_phase
from souffle.program import TE, Loop, TEProgram, parts_of
from souffle.schedule.stage import flat_stages
from souffle.transform import roll, vertical
from souffle.verify import PROVEN, certify, printed
from tests.placement.trials_on_a100 import REQUEST, trials_of
from tests.testlib import Builder, assert_same_function, run_on_cpu_device

pytestmark = pytest.mark.sampled(6)


class Graph:
    """A small ONNX model, built node by node."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.constants: list[onnx.TensorProto] = []

    def input(self, *shape: int) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self.rng.standard_normal(shape).astype(np.float32))

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def node(self, kind: str, *inputs: str, **attributes: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def reduce(self, kind: str, x: str, *axes: int, keepdims: int = 0) -> str:
        if kind == "ReduceSum":
            return self.node(kind, x, self.constant(np.array(axes, np.int64)), keepdims=keepdims)
        return self.node(kind, x, axes=list(axes), keepdims=keepdims)

    def model(self, *outputs: str) -> onnx.ModelProto:
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "g", self.inputs, ends, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def product(rows: int = 100, inner: int = 24, columns: int = 72, batch: tuple[int, ...] = ()) -> tuple[Graph, str]:
    g = Graph()
    x = g.input(*batch, rows, inner)
    return g, g.node("Add", g.node("MatMul", x, g.weight(*batch, inner, columns)), g.weight(columns))


def convolved(images: int, channels: int, height: int, width: int, out: int = 16, side: int = 1) -> tuple[Graph, str]:
    g = Graph()
    x = g.input(images, channels, height, width)
    pads = [side // 2] * 4
    y = g.node("Conv", x, g.weight(out, channels, side, side), g.weight(out), kernel_shape=[side, side], pads=pads)
    return g, g.node("Relu", y)


def forced(
    model: onnx.ModelProto, size: int | None, level: str = "V3", precision: str = "fp32", disable: Sequence[str] = ()
):
    """Kernels in which every reduction that reads a contraction starts in its tiles, and what became of it."""
    seen: dict[str, object] = {}

    def hook(stage: str, result: object) -> object:
        if stage == "narrow":
            result, seen["decisions"] = propagate(result, lambda *_: Start(size, "asked for"))
        seen[stage] = result
        return result

    options = {"level": level, "precision": precision, "reductions": "one_phase", "cubin": False, "arch": "sm_80"}
    return compile_cuda(souffle.import_onnx(model), hook=hook, disable=disable, **options), seen


def assert_starts_in_tiles(model: onnx.ModelProto, size: int | None, count: int = 1, **options: object) -> None:
    """The reductions are in stages of contractions; results are right, the same bits in any order, and proven."""
    kernels, seen = forced(model, size, **options)
    plan, certificate = kernels.plan, certify(kernels)
    assert certificate.verdict == PROVEN, printed(certificate)
    assert [d.accepted for d in seen["decisions"]] == [True] * count
    inside = [
        part
        for item in seen["two_phase"].tes
        for part in parts_of(item)
        if part.is_reduction and part.placement is not None
    ]
    assert len(inside) == count
    stages = flat_stages(seen["schedule"])
    for part in inside:
        (stage,) = [stage for stage in stages if part in stage.tes]
        assert stage.schedule.rule == "contraction"
        assert any(te.is_reduction and te.name == part.placement.contraction for te in stage.tes)
    rng = np.random.default_rng(1)
    inputs = {
        one.name: rng.standard_normal([d.dim_value for d in one.type.tensor_type.shape.dim]).astype(np.float32)
        for one in model.graph.input
    }
    found = run_on_cpu_device(plan, inputs)
    result = compare(found, onnxruntime_outputs(model, inputs), options.get("precision", "fp32"))
    assert result.ok, f"largest error {result.error:.2e} of the output's magnitude"
    for seed in (3, 4):
        again = run_on_cpu_device(plan, inputs, order="shuffled", seed=seed, blocks=3)
        for output, value in found.items():
            np.testing.assert_array_equal(again[output], value)


KINDS = ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceMean")


@pytest.mark.parametrize("size", [8, 16, 32, 64, None])
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_and_columns_of_a_product(axis: int, size: int | None) -> None:
    """100 rows and 72 columns: the last tile is ragged, unless it has 8."""
    g, y = product()
    assert_starts_in_tiles(g.model(y, g.reduce("ReduceSum", y, axis)), size)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_reductions(kind: str) -> None:
    """Zeros beyond the end would change every one but the sum."""
    g, y = product(rows=37, inner=6, columns=29)
    shrunk = g.node("Add", g.node("Mul", g.node("Tanh", y), g.constant(np.float32(0.1))), g.constant(np.float32(-1)))
    assert_starts_in_tiles(g.model(shrunk, g.reduce(kind, shrunk, 0)), 16)
    assert_starts_in_tiles(g.model(shrunk, g.reduce(kind, shrunk, 1)), 8)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("size", [16, None])
def test_batched_products(axis: int, size: int | None) -> None:
    g, y = product(rows=50, inner=12, columns=36, batch=(3,))
    assert_starts_in_tiles(g.model(y, g.reduce("ReduceMax", y, axis, keepdims=1)), size)


@pytest.mark.parametrize(
    ("images", "height", "width", "side", "size"),
    [(1, 7, 7, 1, None), (1, 7, 7, 3, 32), (2, 9, 7, 1, 16), (3, 5, 6, 1, None), (1, 14, 14, 1, 64), (2, 8, 8, 3, 32)],
)
def test_means_over_images(images: int, height: int, width: int, side: int, size: int | None) -> None:
    """H x W as one axis, of which a tile has a part that is no box; several images are kept apart."""
    g, y = convolved(images, 12, height, width, side=side)
    squeezed = g.reduce("ReduceMean", y, 2, 3, keepdims=1)
    assert_starts_in_tiles(g.model(g.node("Sigmoid", squeezed)), size)


@pytest.mark.parametrize("size", [32, None])
def test_squeeze_and_excite(size: int | None) -> None:
    """What is reduced is read again, after all tiles are done."""
    g, y = convolved(1, 12, 9, 9)
    squeezed = g.node("GlobalAveragePool", y)
    gate = g.node("Sigmoid", g.node("Conv", squeezed, g.weight(16, 16, 1, 1), kernel_shape=[1, 1]))
    assert_starts_in_tiles(g.model(g.node("Mul", y, gate)), size)


def test_several_reductions_of_one_product() -> None:
    g, y = product(rows=70, columns=40)
    over_rows = [g.reduce(kind, y, 0) for kind in ("ReduceSum", "ReduceMax")]
    assert_starts_in_tiles(g.model(*over_rows, g.reduce("ReduceMin", y, 1), g.node("Relu", y)), 32, count=3)


def test_what_stands_before_the_reduction() -> None:
    """Another tensor and arithmetic between the product and the reduction."""
    g, y = product(rows=45, columns=33)
    other = g.input(45, 33)
    squares = g.node("Mul", g.node("Sub", y, other), g.node("Sub", y, other))
    assert_starts_in_tiles(g.model(y, g.reduce("ReduceSum", squares, 1)), 16)


@pytest.mark.parametrize("size", [32, None])
def test_with_reuse_between_operators(size: int | None) -> None:
    g, y = convolved(1, 12, 7, 7, side=3)
    gate = g.node("Sigmoid", g.node("GlobalAveragePool", y))
    model = g.model(g.node("Conv", g.node("Mul", y, gate), g.weight(8, 16, 1, 1)))
    # Tiles that own channels would take all of it.
    assert_starts_in_tiles(model, size, level="V4", disable=["channels"])


def test_a_transposed_result() -> None:
    g, y = product(rows=45, columns=33)
    turned = g.node("Transpose", y, perm=[1, 0])
    assert_starts_in_tiles(g.model(turned, g.reduce("ReduceMax", turned, 1)), 16)


def test_chunks_in_another_order_than_tiles_have_stay_apart() -> None:
    """W x H of an image of H x W: no part of a tile is a chunk. A tile that holds all has it in whatever order."""
    g, y = convolved(1, 12, 9, 7)
    model = g.model(g.reduce("ReduceSum", g.node("Transpose", y, perm=[0, 1, 3, 2]), 2, 3))
    _, seen = forced(model, 16)
    assert all(len([te for te in stage.tes if te.is_reduction]) == 1 for stage in flat_stages(seen["schedule"]))
    assert_starts_in_tiles(model, None)


def test_nothing_but_the_reduction_is_stored() -> None:
    """A tensor that the reduction alone reads stays on chip."""
    g, y = product(rows=64, columns=64)
    model = g.model(g.reduce("ReduceMax", y, 1))
    kernels, seen = forced(model, None)
    (stage,) = flat_stages(seen["schedule"])
    assert [tensor.shape for tensor in stage.outputs] == [(64,)]
    assert kernels.plan.kernels[0].grid_syncs == 0
    assert_starts_in_tiles(model, None)


@pytest.mark.parametrize("axes", [(0, 2), (1, 2)])
def test_rows_and_columns_together_stay_apart(axes: tuple[int, int]) -> None:
    """What no tile can hold the parts of is a stage of its own, and right all the same."""
    g, y = product(rows=20, columns=24, batch=(2,))
    model = g.model(y, g.reduce("ReduceSum", y, *axes))
    kernels, seen = forced(model, 16)
    rng = np.random.default_rng(1)
    inputs = {"x0": rng.standard_normal((2, 20, 24)).astype(np.float32)}
    assert all(len([te for te in stage.tes if te.is_reduction]) == 1 for stage in flat_stages(seen["schedule"]))
    assert compare(run_on_cpu_device(kernels.plan, inputs), onnxruntime_outputs(model, inputs), "fp32").ok


def test_nothing_starts_in_tiles_where_it_is_refused() -> None:
    g, y = product()
    program, _ = vertical(souffle.import_onnx(g.model(y, g.reduce("ReduceSum", y, 0))))
    same, (decision,) = propagate(program, lambda *_: Refused("not asked for"))
    assert same is program and not decision.accepted and decision.reason == "not asked for"


def test_the_cost_model_decides() -> None:
    """A long reduction over rows is worth it; the option turns it off."""
    g, y = product(rows=1000, inner=64, columns=200)
    model = g.model(y, g.reduce("ReduceMax", y, 0))
    for how, wanted in (("ordered", True), ("one_phase", False)):
        plan = compile_cuda(souffle.import_onnx(model), level="V3", arch="sm_80", reductions=how, cubin=False).plan
        found = [d for d in plan.decisions if d[0] == "propagate"]
        assert any(d[2] for d in found) == wanted
        if wanted:
            assert "apart" in found[0][3] and "tiles of" in found[0][3]


def asked(program: TEProgram, *, described: bool = True) -> tuple[list[Start | Refused], TEProgram]:
    """What the cost model answers for a program, and what the program becomes."""
    trials = trials_of(program, described=described)
    answers: list[Start | Refused] = []

    def record(*items) -> Start | Refused:
        answers.append(start_by_cost(*items, trials, REQUEST))
        return answers[-1]

    return answers, propagate(program, record)[0]


def product_and(axis: int, rows: int, inner: int, columns: int, *, kept: bool = True) -> TEProgram:
    b = Builder()
    weights = np.random.default_rng(0).standard_normal((inner, columns)).astype(np.float32)
    y = b.relu(b.bias(b.matmul(b.input(rows, inner), b.constant(weights)), b.constant(np.ones(columns, np.float32))))
    total = b.reduce(y, axis, "max")
    return vertical(b.program(*((y, total) if kept else (total,))))[0]


def test_a_long_reduction_starts_in_tiles_of_its_producer() -> None:
    (answer,), result = asked(program := product_and(0, 1000, 64, 200))
    assert isinstance(answer, Start) and answer.size
    before, more, after = map(float, re.match(r"([\d.]+) \+ ([\d.]+) µs apart; ([\d.]+) µs", answer.reason).groups())
    assert after < before + more
    assert_same_function(program, result)


def test_what_is_not_needed_besides_is_not_stored() -> None:
    """A short one that a tile holds needs no second phase, so that a grid sync falls away."""
    (answer,), result = asked(program := product_and(1, 1000, 64, 32, kept=False))
    assert isinstance(answer, Start) and answer.size is None
    assert len(result.tes) == len(program.tes)


@pytest.mark.parametrize(
    ("program", "described", "reason"),
    [
        (product_and(0, 333, 60, 77), True, "are not less by the factor"),
        (product_and(0, 32, 16384, 64), True, "a sum in two phases"),
        (product_and(0, 2, 64, 200), True, "the rule reduction computes its producer"),
        (product_and(0, 1000, 64, 200), False, "no product of this architecture"),
    ],
    ids=["no gain", "split producer", "no tiles", "no device"],
)
def test_what_stays_apart(program: TEProgram, described: bool, reason: str) -> None:
    (answer,), result = asked(program, described=described)
    assert isinstance(answer, Refused) and reason in answer.reason
    assert result is program


def test_reductions_of_one_operator_stay_together() -> None:
    """One stage computes both, on chip: taking the first away would leave the second to read everything again."""
    b = Builder()
    y = b.matmul(b.input(1000, 64), b.constant(np.ones((64, 32), np.float32)))
    softmax = b.grouped("softmax")
    program = b.program(softmax.reduce(y, 1, "max"), softmax.reduce(softmax.tanh(y), 1))
    answers, result = asked(program)
    assert answers and all(isinstance(answer, Refused) and "on the same rows" in answer.reason for answer in answers)
    assert result is program


def test_operators_that_read_an_element_more_than_once_are_not_asked_about() -> None:
    b = Builder()
    y = b.matmul(b.input(64, 32), b.constant(np.ones((32, 64), np.float32)))
    answers, _ = asked(b.program(b.matmul(y, b.constant(np.ones((64, 16), np.float32)))))
    assert not answers


def layers(count: int) -> TEProgram:
    """Products, to each of which the largest of its row is added."""
    b, rng = Builder(), np.random.default_rng(0)
    x = b.input(40, 24)
    for _ in range(count):
        y = b.matmul(x, b.constant(rng.standard_normal((24, 24)).astype(np.float32)))
        x = b.plus(y, b.broadcast(b.reduce(y, 1, "max"), 24))
    return b.program(x)


def placed_parts(items: tuple) -> list[TE]:
    return [part for item in items for part in parts_of(item) if isinstance(part, TE) and part.placement is not None]


@pytest.mark.parametrize("size", [8, None])
def test_a_placement_lasts(size: int | None) -> None:
    """In a loop of equal layers, where that is taken apart into TEs, in its listing, and under vertical again."""
    result, decisions = propagate(layers(5), lambda *_: Start(size, "asked for"))
    assert [decision.accepted for decision in decisions] == [True] * 5
    assert placed_parts(vertical(result)[0].tes) and len(placed_parts(result.tes)) == 5
    rolled = roll(result)[0]
    (loop,) = (item for item in rolled.tes if isinstance(item, Loop))
    (inside,) = placed_parts(loop.body)
    (contraction,) = (
        part for item in loop.body for part in parts_of(item) if part.name == inside.placement.contraction
    )
    assert loop.steps == 5 and set(contraction.outputs) & set(inside.inputs)
    (expanded,) = (item for item in rolled.expanded().tes if isinstance(item, Loop))
    assert [part.placement for part in placed_parts(expanded.body)] == [inside.placement]
    assert f"in the tiles of {contraction.name}" in str(rolled)
    assert "in the tiles of" not in str(roll(layers(5))[0])


def test_steps_that_are_placed_otherwise_part_a_loop() -> None:
    """What one of them is told must not be what all do."""
    result, _ = propagate(layers(6), lambda *_: Start(None, "asked for"))
    third = placed_parts(result.tes)[2]
    items = [replace(item, placement=None) if item is third else item for item in result.tes]
    (loop,) = (item for item in roll(result.with_tes(items))[0].tes if isinstance(item, Loop))
    assert loop.steps == 3 and len(placed_parts(loop.body)) == 1


def test_the_placed_part_of_an_operator_is_no_longer_of_its_group() -> None:
    """Its parts would meet in one block again."""
    result, _ = propagate(layers(1), lambda *_: Start(8, "asked for"))
    (inside,) = placed_parts(result.tes)
    (rest,) = (item for item in result.tes if set(inside.outputs) & set(item.inputs))
    assert rest.is_reduction and rest.placement is None and rest.origin.group != inside.origin.group
    assert all(decision.subject != inside.name for decision in two_phase(result, lambda te_: Split(2, "all"))[1])
