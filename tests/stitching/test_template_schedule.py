"""What templates compute, on the CPU device: fixed, checked, shuffled, and proven."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from tvm import te

import souffle
from benchmarks.template_campaign import Case, cases, scheduled, schedules_of, wrong
from souffle.program import TEProgram
from souffle.runtime import Network
from souffle.stitching import Template, TemplateError, by_templates, op_of, stage_by

pytestmark = pytest.mark.sampled(4)

OPTIONS = {"target": "cuda", "arch": "sm_90", "device": "cpu", "cubin": False, "level": "V0"}

CASES = {(case.name, case.shape): case for case in cases()}

SAMPLED = [
    ("max over 1", (7, 33), True, "values"),
    ("sum over 0", (33, 7), False, "values"),
    ("sum over 0,1", (7, 13), True, "memory"),
    ("max over 1", (3, 7, 13), True, "memory"),
    ("tanh", (13,), True, "values"),
    ("batched gemm", (3, 7, 5), False, "memory"),
]


@pytest.mark.parametrize(("name", "shape", "read", "verify"), SAMPLED)
def test_sampled_templates_are_right(name: str, shape: tuple[int, ...], read: bool, verify: str) -> None:
    """``python -m benchmarks.template_campaign`` runs more of them."""
    case: Case = CASES[name, shape]
    drawn = random.Random(0).sample(list(schedules_of(case, 128, shared=read)), 4)
    fit = [schedule for schedule in drawn if not scheduled(case, schedule, 128, read=read)]
    assert len(fit) >= 3
    assert wrong(case, fit, 128, read=read, verify=verify) == []


def softmax(rows: int, columns: int, copies: int) -> TEProgram:
    """The same softmax several times over, with names of their own."""
    x = te.placeholder((rows, columns), name="x")

    def one(n: int) -> te.Tensor:
        k, r = te.reduce_axis((0, columns), "k"), te.reduce_axis((0, columns), "r")
        most = te.compute((rows,), lambda i: te.max(x[i, k], axis=k), name=f"m{n}")
        power = te.compute((rows, columns), lambda i, j: te.exp(x[i, j] - most[i]), name=f"e{n}")
        total = te.compute((rows,), lambda i: te.sum(power[i, r], axis=r), name=f"s{n}")
        return te.compute((rows, columns), lambda i, j: power[i, j] / total[i], name=f"d{n}")

    return souffle.from_te([x], [one(n) for n in range(copies)], name="softmax")


SOFTMAX = {
    "block, with schedules of their own": ("m[GRID,CTA]S; e[GRID,CTA]S; s[GRID,WARP]S; d[GRID,CTA];", 1792),
    "warp": ("m[WARP,CTA]; s[WARP,CTA]; d[WARP,CTA];", 0),
    "warps that have no work": ("m[GRID_4-WARP_2,CTA]; s[GRID_4-WARP_2,CTA]; d[GRID_4-WARP_2,CTA];", 0),
    "thread": ("m[CTA,THREAD]; s[CTA,THREAD]; d[CTA,THREAD];", 0),
    "block and warp": ("m[WARP,CTA]; e[WARP,CTA]S; s[WARP,CTA]; d[WARP,CTA];", 1024),
    "block and thread": ("m[GRID_4-CTA_2,THREAD]S; s[GRID_4-CTA_2,THREAD]; d[GRID_4-CTA_2,THREAD];", 128),
    "rows of a block among threads": ("m[CTA,CTA]S; s[WARP,CTA]S; d[CTA,CTA];", 512),
}


def numbered(template: str, n: int) -> str:
    return "".join(f"{c}{n}" if c in "mesd" else c for c in template)


def test_compositions_of_a_softmax() -> None:
    program = softmax(7, 33, len(SOFTMAX))
    templates = [numbered(template, n) for n, (template, _) in enumerate(SOFTMAX.values())]
    net = souffle.compile(program, hook=by_templates(*templates), **OPTIONS)
    assert net.certificate.verdict == "PROVEN" and len(net.kernels) == len(SOFTMAX)
    shared = {kernel.name.split("_")[-1]: kernel.dynamic_shared_bytes for kernel in net.plan.kernels}
    assert shared == {f"d{n}": nbytes for n, (_, nbytes) in enumerate(SOFTMAX.values())}
    x = np.random.default_rng(0).standard_normal((7, 33)).astype(np.float32)
    x[2, 5], x[4, 7] = np.nan, -np.inf
    power = np.exp(x - x.max(1, keepdims=True))
    right = power / power.sum(1, keepdims=True)
    shuffled = Network(net.plan, device="cpu", order="shuffled", seed=1, blocks=3)
    for one in (net, net.on("cpu", checked=True), shuffled):
        for value in one({"x": x}).values():
            np.testing.assert_allclose(np.asarray(value), right, rtol=1e-5, atol=1e-7)


def test_fewer_blocks_take_turns() -> None:
    program = softmax(7, 33, 1)
    template = Template("m0[GRID_4-WARP_2,CTA]S; s0[GRID_4-WARP_2,CTA]S; d0[GRID_4-WARP_2,CTA]")
    whole, three = (stage_by(program.tes, program, template, cta_size=64, cta_num=n) for n in (None, 3))
    assert (whole.schedule.tiles, three.schedule.tiles, three.schedule.threads) == (4, 3, 64)
    net = souffle.compile(program, hook=by_templates(template, cta_size=64, cta_num=3), **OPTIONS)
    x = np.random.default_rng(1).standard_normal((7, 33)).astype(np.float32)
    expected = program.run({"x": x})["d0"]
    np.testing.assert_allclose(net.on("cpu", checked=True)({"x": x})["d0"], expected, rtol=1e-5)
    with pytest.raises(TemplateError, match="for 1 to 4 blocks"):
        stage_by(program.tes, program, template, cta_size=64, cta_num=5)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("d0[GRID,CTA];", "m0 has no schedule; a reduction needs one"),
        ("m0[GRID,CTA]S; s0[GRID,CTA]S;", "the pattern's last TE needs one"),
        ("m0[GRID,CTA]S; s0[GRID,CTA]S; d0[GRID,CTA]S;", "read from global memory: no S"),
        ("m0[GRID,CTA]; s0[GRID,CTA]S; d0[GRID,CTA];", "share no registers; S would"),
        ("m0[GRID,CTA]S; s0[GRID,CTA]; d0[GRID,CTA];", "combines s0 across warps"),
        ("m0[GRID,CTA]S; s0[WARP,CTA]; d0[GRID,CTA];", "no WARP whose lanes could keep it"),
        ("m0[CTA,THREAD]S; s0[WARP_2-CTA_4,CTA]; d0[WARP,CTA];", "gives lanes elements of s0 of their own"),
        ("m0[GRID,CTA]S; s0[GRID,CTA]S; d0[CTA,CTA];", "needs 7: it would come from elsewhere"),
        ("m0[GRID_4-CTA_2,CTA]S; s0[GRID,CTA]S; d0[GRID,CTA];", "computes 2 of dimension 0 of m0 there"),
        ("m0[GRID_4-WARP_2,CTA]S; s0[GRID_4-WARP_2,CTA]; d0[GRID_4-WARP_2,CTA];", "would read m0 where nothing is"),
        ("m0[GRID,CTA_3-THREAD_11]S; q[GRID,CTA];", "q is none of the pattern's TEs"),
        ("[GRID,CTA]", "names no TE"),
    ],
)
def test_what_cannot_be_had_is_refused(template: str, says: str) -> None:
    program = softmax(7, 33, 1)
    with pytest.raises(TemplateError, match=says):
        stage_by(program.tes, program, template)


def test_results_of_the_middle_are_stored() -> None:
    """What others need beside the last TE's: in shared memory and as a copy, or computed where it is stored."""
    program = softmax(7, 33, 1)
    outputs = tuple(item.output for item in program.tes)
    program = replace(program, outputs=outputs, output_names=tuple(tensor.name for tensor in outputs))
    with pytest.raises(TemplateError, match="e0 has no schedule; what is needed outside"):
        stage_by(program.tes, program, "m0[GRID,CTA]S; s0[GRID,CTA]S; d0[GRID,CTA];")
    with pytest.raises(TemplateError, match="s0 is read in the pattern, which gives it, too; S would keep it"):
        stage_by(program.tes, program, "m0[WARP,CTA]S; e0[WARP,CTA]; s0[WARP,CTA]; d0[WARP,CTA];")
    x = np.random.default_rng(3).standard_normal((7, 33)).astype(np.float32)
    expected = program.run({"x": x})
    for template in (
        "m0[GRID,CTA]S; e0[GRID,CTA]; s0[GRID,WARP]S; d0[GRID,CTA];",
        "m0[GRID_4-WARP_2,CTA]S; e0[GRID_4-WARP_2,CTA]S; s0[GRID_4-CTA_2,CTA]S; d0[GRID_4-WARP_2,CTA]",
    ):
        net = souffle.compile(program, hook=by_templates(template), verify="values", **OPTIONS)
        assert net.certificate.verdict == "PROVEN" and len(net.kernels) == 1
        for one in (
            net,
            net.on("cpu", checked=True),
            Network(net.plan, device="cpu", order="shuffled", seed=1, blocks=3),
        ):
            for name, value in one({"x": x}).items():
                np.testing.assert_allclose(np.asarray(value), expected[name], rtol=1e-5, atol=1e-7)


def test_dimensions_of_a_reduction_are_those_of_what_it_reads() -> None:
    x = te.placeholder((3, 5, 7), name="x")
    k = te.reduce_axis((0, 5), "k")
    columns = te.compute((3, 7), lambda i, j: te.sum(x[i, k, j], axis=k), name="columns")
    op = op_of(souffle.from_te([x], [columns], name="one").tes[0])
    assert (op.extents, op.reduced, op.axes) == ((3, 5, 7), (False, True, False), (0, 2, 1))
