"""Templates that are chosen: random patterns against NumPy, and the papers' two figures as one kernel each."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import te

import souffle
from benchmarks.pattern_campaign import draw, wrong
from souffle.cost import cost_device
from souffle.models import build
from souffle.models.inputs import random_inputs
from souffle.program import TEProgram
from souffle.runtime import Network
from souffle.schedule.lower import cuda_target, lower_stage
from souffle.schedule.stage import Stages
from souffle.stitching import Scheme, SharedRequest, Stitcher, TemplateError, plan_shared, stage_by
from souffle.stitching.template_choice import Stitched, stitched, stitched_stage
from tests.thorough import some

DEVICE = cost_device("A100-SXM4-40GB")
OPTIONS = {"target": "cuda", "arch": "sm_80", "device": "cpu", "cubin": False, "level": "V0", "verify": "values"}


def test_random_patterns() -> None:
    """``python -m benchmarks.pattern_campaign`` runs more: several results, groups of blocks, orders of threads."""
    seeds = some([17], [114, 132, 215, 1287])
    found, refused, made = wrong([draw(number, number) for number in seeds])
    assert found == [] and refused == [] and len(made) == len(seeds)


def one_kernel(program: TEProgram, data: dict[str, np.ndarray]) -> Stitched:
    """The program as one stage, proven and right."""
    made = stitched(program.tes, program, DEVICE)

    def hook(name: str, result: object) -> object:
        return Stages([made.stage]) if name == "schedule" else result

    net = souffle.compile(program, hook=hook, **OPTIONS)
    assert net.certificate.verdict == "PROVEN" and len(net.kernels) == 1 and net.plan.workspace_bytes == 0
    expected = program.run(data)
    for one in (net, net.on("cpu", checked=True), Network(net.plan, device="cpu", order="shuffled", seed=1, blocks=3)):
        for name, value in one(data).items():
            np.testing.assert_allclose(np.asarray(value), expected[name], rtol=1e-4, atol=1e-5)
    return made


def layer_norm(rows: int, columns: int) -> TEProgram:
    """With its statistics as outputs."""
    x = te.placeholder((rows, columns), name="x")
    k, r = te.reduce_axis((0, columns), "k"), te.reduce_axis((0, columns), "r")
    total = te.compute((rows,), lambda i: te.sum(x[i, k], axis=k), name="total")
    mean = te.compute((rows,), lambda i: total[i] / columns, name="mean")
    square = te.compute((rows, columns), lambda i, j: (x[i, j] - mean[i]) * (x[i, j] - mean[i]), name="square")
    spread = te.compute((rows,), lambda i: te.sum(square[i, r], axis=r), name="spread")
    scale = te.compute((rows,), lambda i: te.rsqrt(spread[i] / columns + 1e-5), name="scale")
    done = te.compute((rows, columns), lambda i, j: (x[i, j] - mean[i]) * scale[i], name="done")
    return souffle.from_te([x], [done, mean, scale], name="layer_norm")


@pytest.mark.parametrize("shape", [(13, 97), (1, 1)])
def test_layer_norm_and_its_statistics(shape: tuple[int, int]) -> None:
    program = layer_norm(*shape)
    made = one_kernel(program, {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)})
    schemes = {one.name: scheme for one, scheme in zip(program.tes, made.schemes, strict=True)}
    assert schemes["done"] is Scheme.PACKING and schemes["square"] is Scheme.THREAD
    assert made.shared.requested >= made.shared.allocated > 0
    assert len(made.stage.outputs) == 3 and made.scheduled <= 32
    assert str(made.template) in str(made.decisions[0]) and "done/packing" in str(made.decisions[1])


@pytest.mark.thorough("tests/stitching has it as one kernel in test_fusion.py, and its schemes in test_plan_figures.py")
def test_two_products_keep_what_is_between_them_in_a_block() -> None:
    """2019, Figure 1: two batched products, nine element-wise operations and two reductions, four of them results."""
    model = build("multi-interests", "tiny")
    program = souffle.import_onnx(model).expanded()
    made = one_kernel(program, random_inputs(model))
    schemes = {one.name: scheme for one, scheme in zip(program.tes, made.schemes, strict=True)}
    assert len(program.tes) == 13 and len(made.stage.outputs) == 4
    assert schemes["MatMul"] is schemes["MatMul_1"] is Scheme.BLOCK and schemes["Exp"] is not Scheme.PACKING


def test_equal_patterns_are_searched_once() -> None:
    x, y = te.placeholder((31, 33), name="x"), te.placeholder((31, 33), name="y")

    def rows(z: te.Tensor, name: str) -> tuple[te.Tensor, te.Tensor]:
        k = te.reduce_axis((0, 33), "k")
        total = te.compute((31,), lambda i: te.sum(z[i, k], axis=k), name=f"{name}_total")
        return total, te.compute((31, 33), lambda i, j: z[i, j] / total[i], name=name)

    program = souffle.from_te([x, y], [rows(x, "one")[1], rows(y, "other")[1]], name="rows")
    stitcher = Stitcher(DEVICE)
    one, other = (
        stitcher([item for item in program.tes if item.name.startswith(name)], program) for name in ("one", "other")
    )
    assert one.stage.functions is other.stage.functions
    assert str(other.template) == str(one.template).replace("one", "other") == other.stage.schedule.way


@pytest.mark.parametrize(
    ("in_place", "template", "requested", "allocated"),
    [
        (False, "a[GRID,CTA]S; b[GRID,CTA]S; c[GRID,CTA]S; d[GRID,CTA];", 3, 2),
        (False, "a[GRID,CTA]S; b[GRID,CTA]S; d[GRID,CTA];", 2, 2),
        (True, "a[GRID,CTA]S; b[GRID,CTA]S; d[GRID,CTA];", 2, 1),
    ],
)
def test_shared_memory_is_taken_in_turns(in_place: bool, template: str, requested: int, allocated: int) -> None:
    """As Algorithm 4 of 2019 has it: by results that are never needed together, and by one in the place of another."""
    x = te.placeholder((8, 1024), name="x")
    a = te.compute((8, 1024), lambda i, j: te.tanh(x[i, j]), name="a")
    b = te.compute((8, 1024), lambda i, j: te.tanh(a[i, j if in_place else 1023 - j]), name="b")
    c = te.compute((8, 1024), lambda i, j: te.tanh(b[i, 1023 - j]), name="c")
    d = te.compute((8, 1024), lambda i, j: te.tanh(c[i, 1023 - j]), name="d")
    program = souffle.from_te([x], [d], name="chain")
    (function,) = lower_stage("stage", stage_by(program.tes, program, template).schedule, cuda_target(DEVICE.arch))
    kept = [name for name in "abc" if f"{name}[" in template]
    requests = [
        SharedRequest(name, tuple(kept[n - 1 : n]), 4096, frozenset("a" if in_place and name == "b" else ""))
        for n, name in enumerate(kept)
    ]
    plan = plan_shared(requests, alignment=128)
    assert (plan.requested, plan.allocated) == (requested * 4096, allocated * 4096)
    assert function.shared_bytes == plan.allocated


def test_what_cannot_be_one_kernel_names_the_te() -> None:
    """A product that reads all of another one for each of its rows has all of it in one block's shared memory."""
    x = te.placeholder((300, 300), name="x")
    k, r = te.reduce_axis((0, 300), "k"), te.reduce_axis((0, 300), "r")
    first = te.compute((300, 300), lambda i, j: te.sum(x[i, k] * x[j, k], axis=k), name="first")
    second = te.compute((300, 300), lambda i, j: te.sum(first[r, i] * first[j, r], axis=r), name="second")
    program = souffle.from_te([x], [second], name="products")
    with pytest.raises(TemplateError, match=r"second and what it needs cannot be one kernel.*bytes of shared memory"):
        stitched_stage(program.tes, program, DEVICE)
