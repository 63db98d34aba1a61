"""Tiles that own channels through several operators: what is one, and that every width gives the plain function."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import te, tirx, topi

import souffle
from souffle.decision import Refused
from souffle.schedule.gpu.emit.async_copy import async_copy
from souffle.schedule.gpu.emit.staging import choose_fetch
from souffle.schedule.gpu.forms.owned_chain import OwnedChain, read_owned_chain
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import OWNS_TILES, GpuRequest, GpuSchedule
from souffle.schedule.gpu.rules.channel_owned import CHANNEL_OWNED
from souffle.schedule.gpu.tiling import direct_cost
from souffle.schedule.gpu.tiling.direct_tiling import DirectTiling, SumPlan
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling
from souffle.schedule.gpu.tiling.owned_steps import cut_tile
from souffle.schedule.gpu.tiling.owned_tiling import choose_width, widths
from souffle.tvm_compat import const_int, primfunc_from_tensors
from tests.schedule.knob_choices import Choices, built_choices
from tests.thorough import sized

SMALL = GpuRequest("sm_90", threads=64, sm_count=4)

TENSOR = GpuRequest("sm_80", threads=256, sm_count=2)
"""Few multiprocessors, so that tiles are wide enough for fragments."""


@dataclass(frozen=True, eq=False)
class Case:
    """A stage whose tiles are to own what they compute."""

    name: str
    inputs: tuple[te.Tensor, ...]
    outputs: tuple[te.Tensor, ...]
    request: GpuRequest = SMALL

    @property
    def func(self) -> tirx.PrimFunc:
        return primfunc_from_tensors([*self.inputs, *self.outputs], self.name).with_attr(OWNS_TILES, True)

    @property
    def chain(self) -> OwnedChain | Refused:
        return read_owned_chain(StageForms(self.func))


def data(name: str, *shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(shape, dtype, name=name)


def swish(x: te.Tensor, b: te.Tensor) -> te.Tensor:
    y = te.compute(x.shape, lambda n, c, *at: x(n, c, *at) + b[c], name="biased")
    return te.compute(x.shape, lambda *at: y[at] * tirx.sigmoid(y[at]), name="swish")


def pooled(x: te.Tensor) -> te.Tensor:
    height, width = const_int(x.shape[2]), const_int(x.shape[3])
    i, j = te.reduce_axis((0, height), name="i"), te.reduce_axis((0, width), name="j")
    total = te.compute(x.shape[:2], lambda n, c: te.sum(x[n, c, i, j], [i, j]), name="pooled")
    return te.compute(total.shape, lambda *at: total[at] / float(height * width), name="mean")


def bottleneck(
    name: str, batch: int, inner: int, channels: int, side: int, k: int, stride: int, pads: tuple[int, ...], **given
) -> Case:
    """Expansion, depthwise convolution and pooling, with the convolution an output as well."""
    dtype = given.pop("dtype", "float32")
    x, w = data("x", batch, inner, side, side, dtype=dtype), data("w", channels, inner, 1, 1, dtype=dtype)
    b, v, d = data("b", channels), data("v", channels, 1, k, k), data("d", channels)
    expanded = swish(topi.nn.conv2d_nchw(x, w, 1, 0, 1, "float32"), b)
    convolved = swish(topi.nn.depthwise_conv2d_nchw(expanded, v, stride, pads, given.pop("dilation", 1)), d)
    return Case(name, (x, w, b, v, d), (convolved, pooled(convolved)), **given)


def excitation(name: str, channels: int, reduced: int, side: int) -> Case:
    """Two products of which all need the first, and what the second one scales."""
    p, a, b = data("p", 1, channels), data("a", reduced, channels), data("b", channels, reduced)
    x = data("x", 1, channels, side, side)
    first = topi.nn.relu(topi.nn.dense(p, a))
    second = topi.sigmoid(topi.nn.dense(first, b))
    return Case(
        name,
        (p, a, b, x),
        (te.compute(x.shape, lambda n, c, i, j: x[n, c, i, j] * second[n, c], name="scaled"),),
    )


def groups(name: str, parts: int, grain: int, rows: int, columns: int) -> Case:
    """A product over groups of what is computed first: a tile owns a group of it."""
    x, w, v = data("x", columns, 5), data("w", parts * grain, 5), data("v", rows, parts * grain)
    first = topi.tanh(topi.nn.dense(w, x))
    r = te.reduce_axis((0, grain), name="r")
    second = te.compute(
        (parts, rows, columns),
        lambda p, i, j: te.sum(v[i, p * grain + r] * first[p * grain + r, j], [r]),
        name="parts",
    )
    return Case(name, (x, w, v), (second,))


def projection(name: str, channels: int, reduced: int, rows: int, columns: int) -> Case:
    """An excitation whose scaled channels are only read by a product: blocks share its rows and columns."""
    p, a, b = data("p", 1, channels), data("a", reduced, channels), data("b", channels, reduced)
    x, w = data("x", channels, columns), data("w", rows, channels)
    scale = topi.sigmoid(topi.nn.dense(topi.nn.relu(topi.nn.dense(p, a)), b))
    scaled = te.compute(x.shape, lambda c, i: x[c, i] * scale[0, c], name="scaled")
    c = te.reduce_axis((0, channels), name="c")
    product = te.compute((rows, columns), lambda i, j: te.sum(w[i, c] * scaled[c, j], [c]), name="product")
    return Case(name, (p, a, b, x, w), (product,), GpuRequest("sm_80", threads=64, sm_count=64))


def products(name: str) -> Case:
    """Two products in a row, of which the second one reads the first through shared memory."""
    x, w, v = data("x", 24, 16), data("w", 32, 16), data("v", 20, 32)
    return Case(name, (x, w, v), (topi.nn.dense(topi.tanh(topi.nn.dense(x, w)), v),))


def halved(x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda *at: tirx.Cast("float16", x(*at)), name="halved")


def halved_dense(x: te.Tensor, w: te.Tensor) -> te.Tensor:
    """In fp16 with a total in fp32."""
    return topi.nn.dense(x, w, out_dtype="float32")


def halved_products(name: str) -> Case:
    """Two products of fp16 in a row, of which the second one reads the first through shared memory."""
    shapes = {"x": (60, 130), "w": (128, 130), "v": (150, 128)}
    x, w, v = (data(one, *shape, dtype="float16") for one, shape in shapes.items())
    first = halved(topi.nn.relu(halved_dense(x, w)))
    return Case(name, (x, w, v), (halved_dense(first, v),), replace(TENSOR, max_shared_bytes=160 * 1024))


def halved_projection(name: str, channels: int, reduced: int, rows: int, columns: int) -> Case:
    """As :func:`projection`, of what is scaled and rounded to fp16 where it is read."""
    p, a, b = data("p", 1, channels), data("a", reduced, channels), data("b", channels, reduced)
    x, w = data("x", channels, columns, dtype="float16"), data("w", rows, channels, dtype="float16")
    scale = topi.sigmoid(topi.nn.dense(topi.nn.relu(topi.nn.dense(p, a)), b))
    scaled = te.compute(x.shape, lambda c, i: x[c, i] * tirx.Cast("float16", scale[0, c]), name="scaled")
    c = te.reduce_axis((0, channels), name="c")
    value = te.compute(
        (rows, columns),
        lambda i, j: te.sum(tirx.Cast("float32", w[i, c]) * tirx.Cast("float32", scaled[c, j]), [c]),
        name="product",
    )
    return Case(name, (p, a, b, x, w), (value,), replace(TENSOR, sm_count=64))


CASES = [
    bottleneck("plain", 1, 8, 12, 7, 3, 1, (1, 1, 1, 1)),
    bottleneck("strided", 1, 20, 6, 9, 5, 2, (2, 1, 0, 3)),
    bottleneck("dilated", 1, 3, 7, 8, 3, 1, (2, 2, 2, 2), dilation=2),
    bottleneck("batch", 3, 4, 5, 6, 1, 1, (0, 0, 0, 0)),
    bottleneck("narrow", 1, 32, 8, 8, 3, 1, (1, 1, 1, 1), dtype="float16"),
    bottleneck("halves", 1, 129, 24, 11, 3, 2, (1, 1, 0, 2), dtype="float16", request=TENSOR),
    bottleneck("halves_in_a_batch", 3, 97, 26, 5, 3, 1, (1, 1, 1, 1), dtype="float16", request=TENSOR),
    halved_products("halves_in_a_row"),
    halved_projection("halves_spread", 192, 5, 248, 241),
    bottleneck("warps", 1, 32, 8, 11, 7, 1, (3, 3, 3, 3), request=GpuRequest("sm_80", threads=256, sm_count=4)),
    excitation("excited", 20, 5, 6),
    groups("grouped", 4, 6, 8, 3),
    products("chained"),
    projection("spread", 24, 5, 40, 90),
]


def offered(case: Case) -> list[GpuSchedule | Refused]:
    """The rule's own choice, and other widths of every other case, or of all."""
    sketch = CHANNEL_OWNED.sketch(StageForms(case.func), case.request)
    assert not isinstance(sketch, Refused), sketch
    others = sketch.knobs[0].values[: sized(1 - CASES.index(case) % 2, 2)]
    return [sketch.chosen(), *(sketch.with_values({"width": width}) for width in others)]


@pytest.fixture(scope="module")
def built() -> Choices:
    return built_choices(CASES, offered)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_result(case: Case, built: Choices) -> None:
    chance = np.random.default_rng(5)
    inputs = [chance.uniform(-1, 1, tuple(map(const_int, t.shape))) for t in case.inputs]
    # Sums of products of eighths are exact, so that they are rounded to fp16 alike.
    inputs = [
        (np.round(x * 8) / 8 if str(t.dtype) == "float16" else x).astype(str(t.dtype))
        for x, t in zip(inputs, case.inputs, strict=True)
    ]
    outputs = [np.zeros(tuple(map(const_int, t.shape)), str(t.dtype)) for t in case.outputs]
    built.assert_equal(case.name, inputs, outputs, 2e-5)


def test_copies_do_not_start_in_shared_memory() -> None:
    tile = cut_tile(next(case for case in CASES if case.name == "chained").chain, 4)
    first, second = (step.product for step in tile.steps)
    reasons = []
    for problem in (first, second):
        fetches = [choose_fetch(problem, side, (1, 4, 8), 64, False, lambda crossing: 0) for side in ("left", "right")]
        answers = [async_copy(fetch, "sm_80") for fetch in fetches]
        reasons.append([answer.reason for answer in answers if isinstance(answer, Refused)])
    assert reasons == [[], ["the operand is on chip already"]]


def test_what_tiles_own() -> None:
    chain = CASES[0].chain
    assert chain.units == 12
    assert {owner.grain for owner in chain.owners.values()} == {1}
    # All but the zeros around the input, which belong to no channel of the result.
    assert [block.name for block in chain.blocks if block not in chain.owners] == ["pad_temp"]
    assert [group[-1].name for group in chain.groups] == ["swish", "swish_1", "mean"]
    assert chain.repeated == 0


def test_what_every_tile_repeats() -> None:
    chain = next(case for case in CASES if case.name == "excited").chain
    assert chain.units == 20
    assert chain.repeated == 5 * 20
    grouped = next(case for case in CASES if case.name == "grouped").chain
    assert (grouped.units, {owner.grain for owner in grouped.owners.values()}) == (4, {1, 6})


def test_tiling_of_one_block_is_the_cheapest_of_all() -> None:
    """Estimates come in the order of what they are not below, and most of them are never made."""
    chain = bottleneck("block", 1, 3, 6, 8, 3, 1, (1, 1, 1, 1)).chain
    plans = [step.sum for step in cut_tile(chain, 2).steps if step.sum is not None]
    assert len(plans) == 3
    for plan in plans:
        offered = {knob.name: knob.values for knob in direct_cost.knobs_of(plan, SMALL)}
        every = [direct_cost.tiling_of(plan, dict(zip(offered, v, strict=True))) for v in product(*offered.values())]
        fitting = [tiling for tiling in every if direct_cost.tiling_refusal(plan, tiling, SMALL) is None]
        clocks, chosen = direct_cost.choose_serial_tiling(plan, SMALL)

        def alone(tiling: DirectTiling, plan: SumPlan = plan) -> float:
            tiles = tiling.tiles(plan, SMALL.threads)
            return tiles * direct_cost.estimate(plan, tiling, replace(SMALL, sm_count=tiles))

        assert clocks == alone(chosen) == min(map(alone, fitting))
        assert clocks >= direct_cost.least_serial_clocks(plan.problem.size * plan.problem.length)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_step_takes_less_than_its_products_need(case: Case) -> None:
    """Where a product of a step takes less than that, the step is not tried as a sum."""
    chain = case.chain
    for width in widths(chain)[:2]:
        tile = cut_tile(chain, width)
        for step in tile.steps if not isinstance(tile, Refused) else ():
            timed = step.sum and direct_cost.choose_serial_tiling(step.sum, case.request)
            if timed:
                problem = step.sum.problem
                assert timed[0] >= direct_cost.least_serial_clocks(problem.size * problem.length)
                assert step.product is None or math.prod(step.product.extents) == problem.size * problem.length


@pytest.mark.parametrize(
    ("name", "steps"),
    [("halves", [0]), ("halves_in_a_batch", [0]), ("halves_in_a_row", [0, 1]), ("halves_spread", [2]), ("plain", [])],
)
def test_products_of_halves_are_computed_on_tensor_cores(name: str, steps: list[int]) -> None:
    case = next(case for case in CASES if case.name == name)
    tiling = choose_width(case.chain, case.request)
    assert [n for n, numbers in enumerate(tiling.steps) if isinstance(numbers, MmaTiling)] == steps
    sketch = CHANNEL_OWNED.sketch(StageForms(case.func), case.request)
    assert sketch.chosen().tensor_cores == bool(steps)
    assert sketch.least <= tiling.clocks
    before = CHANNEL_OWNED.sketch(StageForms(case.func), replace(case.request, arch="sm_75"))
    assert not before.chosen().tensor_cores


def test_blocks_share_the_last_step_where_tiles_are_few() -> None:
    case = next(case for case in CASES if case.name == "spread")
    tiling = choose_width(case.chain, case.request)
    assert tiling.spread > 1 and tiling.tiles == tiling.tile.tiles * tiling.spread
    # Not where an earlier step writes an output: two blocks would write it.
    product = case.outputs[0].op.input_tensors[1]
    both = Case("both", case.inputs, (product, *case.outputs), case.request).chain
    assert isinstance(both, Refused) or not both.spreads


def test_reads_across_are_named() -> None:
    x, w, v = data("x", 6, 5), data("w", 8, 5), data("v", 7, 8)
    first = topi.nn.dense(w, x)
    k = te.reduce_axis((0, 8), name="k")
    second = te.compute((7, 6), lambda i, j: te.sum(v[i, k] * first[k, j], [k]), name="second")
    k2 = te.reduce_axis((0, 7), name="k2")
    # By rows, then by columns: neither axis is the tiles' own, and both products are outputs.
    third = te.compute((5, 7), lambda i, j: te.sum(x[k2 % 6, i] * second[k2, j % 6], [k2]), name="third")
    refusal = Case("across", (x, w, v), (first, second, third)).chain
    assert isinstance(refusal, Refused)
    assert "is an output that is no part of the tiles" in refusal.reason


def test_what_does_not_fit_says_how_much_it_is() -> None:
    case = bottleneck("large", 1, 4, 8, 96, 3, 1, (1, 1, 1, 1))
    refusal = CHANNEL_OWNED.sketch(StageForms(case.func), SMALL).chosen()
    assert isinstance(refusal, Refused)
    assert f"1 of 8 units keeps {2 * 96 * 96 * 4} bytes on chip, a block may have {48 * 1024}" in refusal.reason


def test_only_where_it_is_asked_for() -> None:
    stage = StageForms(CASES[0].func.without_attr(OWNS_TILES))
    assert isinstance(CHANNEL_OWNED.sketch(stage, SMALL), Refused)


def squeeze_and_excite(side: int = 14, channels: int = 48) -> bytes:
    """Depthwise convolution, pooling, two products, scaling."""
    chance = np.random.default_rng(3)
    weights = {
        "wd": chance.standard_normal((channels, 1, 3, 3)) / 3,
        "w1": chance.standard_normal((4, channels, 1, 1)) / channels**0.5,
        "w2": chance.standard_normal((channels, 4, 1, 1)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "wd"], ["d"], group=channels, pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["d"], ["a"]),
        helper.make_node("GlobalAveragePool", ["a"], ["p"]),
        helper.make_node("Conv", ["p", "w1"], ["f"]),
        helper.make_node("Relu", ["f"], ["g"]),
        helper.make_node("Conv", ["g", "w2"], ["h"]),
        helper.make_node("Sigmoid", ["h"], ["s"]),
        helper.make_node("Mul", ["s", "a"], ["y"]),
    ]
    shape = [1, channels, side, side]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    constants = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "excitation", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def test_network_needs_one_barrier_and_is_proven() -> None:
    ort = pytest.importorskip("onnxruntime")
    model = squeeze_and_excite()
    x = np.random.default_rng(4).standard_normal((1, 48, 14, 14)).astype(np.float32)
    (expected,) = ort.InferenceSession(model).run(None, {"x": x})
    options = {"arch": "sm_80", "target": "cuda", "device": "cpu", "cubin": False, "waits": "barriers"}
    net = souffle.compile(model, **options, verify="values")
    apart = souffle.compile(model, **options, verify="off", disable=("channels",))
    assert net.plan.certificate.verdict == "PROVEN"
    np.testing.assert_allclose(net({"x": x})["y"], expected, rtol=1e-4, atol=1e-5)
    assert [d.accepted for d in net.plan.decisions if d.stage == "channels"].count(True) >= 2
    assert not any(d.stage == "channels" for d in apart.plan.decisions)
    syncs, syncs_apart = (sum(kernel.grid_syncs for kernel in n.plan.kernels) for n in (net, apart))
    assert syncs <= 1 < syncs_apart
