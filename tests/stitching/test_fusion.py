"""Networks compiled by fusion plans: what becomes of patterns, at every level, and that it is right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from tvm import te

import souffle
from souffle import models
from souffle.analysis import analyze
from souffle.certificate import PROVEN
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.cost import cost_device
from souffle.errors import OptionError
from souffle.runtime import Network
from souffle.schedule.gpu.device import device_for
from souffle.schedule.log import open_log
from souffle.schedule.tuned import tuned_stages
from souffle.stitching import FUSION_PLANNERS, FusionError, FusionPlan, FusionRequest, graph_of, plan_of
from souffle.stitching.patterned import patterned
from souffle.stitching.template_choice import stitched
from souffle.transform import roll
from tests.testlib import Builder, inputs_for
from tests.thorough import some
from tests.transform.test_roll import layers

OPTIONS = {"target": "cuda", "arch": "sm_80", "cubin": False, "device": "cpu", "verify": "values"}
RNG = np.random.default_rng(0)
A100 = cost_device("A100-SXM4-40GB")


def checked(name: str, **options: object) -> Network:
    """A network of a model that is proven, and gives what ONNX Runtime does in any order of threads."""
    model = models.build(name)
    network = souffle.compile(model, **OPTIONS, **options)
    assert network.certificate.verdict == PROVEN and not network.certificate.unknown
    inputs = models.random_inputs(model, seed=3)
    expected = onnxruntime_outputs(model, inputs)
    for runnable in (network, network.on("cpu", order="shuffled", seed=5, blocks=3)):
        result = compare({key: np.asarray(value) for key, value in runnable(inputs).items()}, expected, "fp32")
        assert result.ok, f"{name}, {options}: largest error {result.error:.2e}"
    return network


def barriers(network: Network) -> int:
    """Grid barriers of all launches."""
    return sum(network.plan.kernels[launch.kernel].grid_syncs for launch in network.plan.launches)


@pytest.mark.parametrize(
    ("planner", "kernels"), some([("stitching-dp", 1), ("xla-rules", 4)], [("stitching-ilp", 1), ("tvm", 4)])
)
def test_the_layer_norm_of_the_paper(planner: str, kernels: int) -> None:
    """000 Figure 1: one kernel, where XLA has four; nothing but its input and output is in global memory."""
    network = checked("layer-norm", level="V0", fusion=planner)
    assert len(network.plan.launches) == kernels and not barriers(network)
    program = souffle.import_onnx(models.build("layer-norm"))
    own = {launch.bytes_written for launch in network.plan.launches}
    assert (own == {program.outputs[0].nbytes}) == (kernels == 1)


def test_the_pattern_of_multi_interests_is_one_kernel() -> None:
    """003 Figure 1: two batched products with what is between them; that is in no byte of global memory."""
    network = checked("multi-interests", level="V0", fusion="stitching-ilp")
    program = souffle.import_onnx(models.build("multi-interests"))
    (launch,) = network.plan.launches
    assert not barriers(network) and launch.bytes_written == sum(tensor.nbytes for tensor in program.outputs)
    assert network.plan.workspace_bytes == 0


@pytest.mark.parametrize(
    ("name", "level", "planner"),
    some(
        [("bert", "V2", "xla-rules"), ("mmoe", "V4", "xla-rules")],
        [
            ("logistic-train", "V3", "stitching-ilp"),
            ("mmoe", "V1", "stitching-dp"),
            ("bert", "V3", "stitching-dp"),
            ("mmoe", "V4", "stitching-ilp"),
        ],
    ),
)
def test_planners_at_levels(name: str, level: str, planner: str) -> None:
    """Patterns are kernels; from V3 on they are merged, with barriers of the grid between them."""
    network = checked(name, level=level, fusion=planner)
    merged = level in ("V3", "V4")
    assert (len(network.plan.launches) == 1) == merged and (merged or not barriers(network))
    assert network.plan.options.fusion == planner and f"fusion {planner}, " in network.explain()


class Everything:
    """A planner of one's own: one pattern of all TEs."""

    name = "everything"

    def plan(self, request: FusionRequest) -> FusionPlan:
        return plan_of(request.graph, [range(len(request.graph.ops))], self.name)


class Again:
    """Computes every element-wise TE again in each reader: no TE is left that another one reads but the others."""

    name = "again"
    block_composition = False

    def plan(self, request: FusionRequest) -> FusionPlan:
        graph = request.graph
        light = [n for n, op in enumerate(graph.ops) if not op.reduced and graph.consumers[n]]
        again: dict[frozenset[int], Sequence[int]] = {}
        for number in range(len(graph.ops)):
            above: set[int] = set()
            waiting = [number]
            while waiting:
                new = [p for p in graph.producers[waiting.pop()] if p in light and p not in above]
                above.update(new)
                waiting += new
            again[frozenset([number])] = sorted(above)
        return plan_of(graph, [[n] for n in range(len(graph.ops))], self.name, recomputed=again)


def test_a_pattern_that_needs_the_whole_grid_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """No planner has a grid barrier: a kernel ends where one is needed, and the reason is shown."""
    monkeypatch.setitem(FUSION_PLANNERS, "everything", Everything())
    b = Builder()
    product = b.matmul(b.input(64, 96), b.constant(RNG.standard_normal((96, 128), np.float32)))
    shifted = b.relu(b.bias(product, b.reduce(product, 0)))
    rows = b.reduce(shifted, 1)
    scaled = b.add(lambda p, q: te.compute((64, 128), lambda i, j: p[i, j] * q[i]), shifted, rows)
    program = b.program(b.matmul(scaled, b.constant(RNG.standard_normal((128, 32), np.float32))))
    network = souffle.compile(program, **OPTIONS, level="V0", fusion="everything")
    assert network.certificate.verdict == PROVEN and len(network.plan.launches) == 2 and not barriers(network)
    (cut,) = [d for d in network.plan.decisions if d.stage == "fusion" and "whole grid" in d.reason]
    assert not cut.accepted and " in the kernel of " in cut.subject
    inputs = inputs_for(program, 1)
    for name, value in program.run(inputs).items():
        # Sums of 128 products in another order, some of which cancel: right to roundings of their largest terms.
        np.testing.assert_allclose(network(inputs)[name], value, rtol=1e-4, atol=1e-6 * np.abs(value).max())


def test_what_is_computed_again_is_a_te_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    program = souffle.import_onnx(models.build("layer-norm"))
    made = patterned(program, Again(), A100)
    inputs = {name: np.random.default_rng(1).standard_normal(t.shape, np.float32) for name, t in zip(
        program.input_names, program.inputs, strict=True)}  # fmt: skip
    for name, value in program.run(inputs).items():
        np.testing.assert_array_equal(made.program.run(inputs)[name], value)
    graph = graph_of(made.program)
    # What an element-wise TE gives, another one or a reduction in its own pattern reads.
    pattern = [made.pattern_of[op.item] for op in graph.ops]
    assert all(
        graph.ops[p].reduced or pattern[p] == pattern[n] for n in range(len(graph.ops)) for p in graph.producers[n]
    )
    monkeypatch.setitem(FUSION_PLANNERS, "again", Again())
    checked("layer-norm", level="V0", fusion="again")


def test_tvm_s_groups_are_the_kernels_of_v0() -> None:
    """``tvm`` makes a kernel of each of TVM's groups, V0's own rules of what a rule schedules: as many or more."""
    program = souffle.import_onnx(models.build("bert"))
    plan = FUSION_PLANNERS["tvm"].plan(FusionRequest(graph_of(program), A100))
    groups = {te.origin.group for te in program.tes}
    assert len(plan.patterns) == len(groups)
    for pattern in plan.patterns:
        (group,) = {te.origin.group for te in program.tes if te.name in pattern.tes}
        assert group in groups


@pytest.mark.parametrize("planner", ["stitching-ilp", "xla-rules"])
def test_loops_are_planned_in_their_bodies(planner: str) -> None:
    program, _ = roll(layers(5))
    plans = patterned(program, FUSION_PLANNERS[planner], A100).plans
    assert [sum(map(len, plan.patterns)) for plan in plans] == [3, 4]
    network = souffle.compile(program, **OPTIONS, level="V3", fusion=planner)
    assert network.certificate.verdict == PROVEN and not network.certificate.unknown
    inputs = inputs_for(program, 2)
    for name, value in program.run(inputs).items():
        np.testing.assert_allclose(network(inputs)[name], value, rtol=1e-5)


def test_bad_options() -> None:
    model = models.build("layer-norm")
    with pytest.raises(OptionError, match="fusion='greedy' is not valid; choose one of souffle, stitching-ilp, "):
        souffle.compile(model, fusion="greedy")
    with pytest.raises(OptionError, match="no GPU of sm_75 is described; arch='sm_80'"):
        souffle.compile(model, fusion="tvm", target="cuda", arch="sm_75")
    program = souffle.import_onnx(model)
    cyclic = [[0, len(program.tes) - 1]]
    with pytest.raises(FusionError, match="a cycle leads through"):
        plan_of(graph_of(program), cyclic, "mine")


class _Costs:
    """Prices: so much for what a template was lowered to, and the rest for anything else."""

    def __init__(self, template: Sequence[object], own: float, others: float) -> None:
        self.template, self.own, self.others = template, own, others

    def __call__(self, functions: Sequence[object], registers: int = 0) -> float:
        return self.own if tuple(functions) == tuple(self.template) else self.others

    def crowds(self, functions: Sequence[object]) -> bool:
        return False


def test_shared_memory_that_goes_on_to_a_smaller_type_is_proven() -> None:
    """What two views of the pool name has the smaller one's unit; a random network was refuted for it."""
    nodes = [
        helper.make_node("ArgMin", ["x"], ["where"], axis=0, keepdims=0),
        helper.make_node("GatherElements", ["where", "index"], ["taken"], axis=0),
    ]
    named = ("x", TensorProto.DOUBLE, (31, 4)), ("index", TensorProto.INT32, (4,)), ("taken", TensorProto.INT64, (4,))
    x, index, taken = (helper.make_tensor_value_info(*one) for one in named)
    graph = helper.make_graph(nodes, "argmin", [x, index], [taken])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    network = souffle.compile(model, **OPTIONS, level="V3", fusion="stitching-ilp")
    assert "((int*)t0_shared)" in network.plan.modules[0].text and len(network.plan.launches) == 1
    assert network.certificate.verdict == PROVEN
    given = {"x": RNG.standard_normal((31, 4)), "index": np.array([3, 0, -1, 1], np.int32)}
    np.testing.assert_array_equal(network(given)["taken"], onnxruntime_outputs(model, given)["taken"])


def test_a_record_replaces_a_template_only_where_it_takes_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search begins with a rule's schedule: the best that it finds may take more than a template's."""
    monkeypatch.setitem(FUSION_PLANNERS, "everything", Everything())
    b = Builder()
    x = b.input(4096, 30)
    power = b.add(lambda p, q: te.compute((4096, 30), lambda i, j: te.exp(p[i, j] - q[i])), x, b.reduce(x, 1))
    program = b.program(b.reduce(power, 1))
    souffle.tune(
        program,
        trials=1,
        arch="sm_80",
        log=tmp_path,
        level="V0",
        fusion="everything",
        disable=["channels"],
        device=A100.product,
    )
    stage = stitched(program.tes, program, A100, most=2).stage
    assert stage.schedule.rule == "template"
    for own, others, taken in ((1.0, 2.0, False), (2.0, 1.0, True)):
        price = _Costs(stage.functions, own, others)
        logs = open_log(tmp_path, "sm_80")
        (tuned,), decisions = tuned_stages([stage], analyze(program), logs, device_for("sm_80"), price=price)
        assert (tuned.schedule.rule != "template") == taken == decisions[0].accepted, decisions
    assert "is predicted to take" in decisions[0].reason or taken
