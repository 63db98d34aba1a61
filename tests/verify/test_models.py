"""The certificate of compiled models, and of what is left of them when something that is needed is taken away."""

from __future__ import annotations

import dataclasses
import re
from functools import cache

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx

import souffle
from souffle import models
from souffle.codegen.assemble import CompiledKernels
from souffle.pipeline import compile_cuda
from souffle.runtime import Network
from souffle.verify import PROVEN, REFUTED, Certificate, certify, certify_plan, printed

BARRIER = "cooperative"
"""Whose waits are an operator of TVM's, in TensorIR and in text; the counter's are in ``test_grid_waits.py``."""
GRID_TEXT = re.compile(r"(?<!void )tvm_builtin_cuda_grid_sync\(\);")


@cache
def compiled(name: str, level: str, precision: str) -> CompiledKernels:
    program = souffle.import_onnx(models.build(name))
    return compile_cuda(program, level=level, arch="sm_90", precision=precision, cubin=False, grid_barrier=BARRIER)


def functions_of(kernels: CompiledKernels) -> dict[str, tirx.PrimFunc]:
    names = {kernel.name: kernel.stages for kernel in kernels.plan.kernels}
    return {n: f.func for k in kernels.merged for n, f in zip(names[k.name], k.shape.functions, strict=True)}


@pytest.mark.parametrize(("name", "level", "precision"), [("bert", "V3", "fp32"), ("mmoe", "V4", "mixed")])
def test_every_kernel_is_proven(name: str, level: str, precision: str) -> None:
    """Those of all models are proven in ``tests/test_models_all_levels.py``."""
    found = certify(compiled(name, level, precision))
    assert found.verdict == PROVEN, printed(found)
    assert len(found.kernels) == len(compiled(name, level, precision).merged)
    assert "PROVEN" in printed(found)


def is_call(node: tirx.Evaluate, name: str) -> bool:
    return isinstance(node.value, tvm.ir.Call) and getattr(node.value.op, "name", "") == name


def without(func: tirx.PrimFunc, name: str, number: int) -> tirx.PrimFunc | None:
    """`func` without its call of that number, counted from 0; ``None`` where it has fewer."""
    seen = -1

    def drop(node: tirx.Evaluate) -> tirx.Stmt:
        nonlocal seen
        seen += is_call(node, name)
        return tirx.Evaluate(tirx.IntImm("int32", 0)) if is_call(node, name) and seen == number else node

    body = tvm_ffi.structural_map(func.body, (tirx.Evaluate, drop))
    return func.with_body(body) if seen >= number else None


def with_kernel(kernels: CompiledKernels, func: tirx.PrimFunc) -> Certificate:
    return certify_plan(kernels.plan, {kernels.merged[0].name: func}, functions_of(kernels))


def test_a_grid_barrier_that_is_taken_away_is_missed_where_the_result_changes() -> None:
    """The certificate against the text itself, run with a block for each tile, in several orders."""
    kernels = compiled("bert", "V3", "fp32")
    inputs = models.random_inputs(models.build("bert"), seed=1)
    before = None
    refuted = 0
    # Every fifth: each run compiles a text.
    for number in range(0, kernels.plan.kernels[0].grid_syncs, 5):
        found = with_kernel(kernels, without(kernels.merged[0].func, "tirx.cuda.grid_sync", number))
        if before is None:
            before = Network(kernels.plan, device="cpu")(inputs)
        text = kernels.plan.modules[0].text
        places = list(GRID_TEXT.finditer(text))
        assert len(places) == kernels.plan.kernels[0].grid_syncs
        place = places[number]
        module = dataclasses.replace(kernels.plan.modules[0], text=text[: place.start()] + text[place.end() :])
        network = Network(dataclasses.replace(kernels.plan, modules=(module,)), device="cpu")
        blocks = kernels.plan.kernels[0].tiles
        runs = [network.on("cpu", order="shuffled", seed=seed, blocks=blocks)(inputs) for seed in range(4)]
        changed = any(not np.array_equal(run[key], before[key]) for run in runs for key in before)
        assert not changed or found.verdict == REFUTED, f"grid barrier {number} is needed, and proven not to be"
        refuted += found.verdict == REFUTED
        if found.verdict == REFUTED:
            assert {c.rule for c in found.counterexamples} & {"race between blocks", "race in a block"}
    assert refuted


def test_block_barriers_of_a_product_are_needed() -> None:
    kernels = compiled("lstm", "V3", "fp32")
    functions = functions_of(kernels)
    name = next(n for n in functions if "MatMul" in n)
    merged = {k.name: k.func for k in kernels.merged}
    verdicts = []
    while (less := without(functions[name], "tirx.tvm_storage_sync", len(verdicts))) is not None:
        verdicts.append(certify_plan(kernels.plan, merged, {**functions, name: less}).verdict)
    assert verdicts and set(verdicts) == {REFUTED}


def test_workspace_tensors_that_are_put_into_one_place() -> None:
    kernels = compiled("lstm", "V3", "fp32")
    merged = {k.name: k.func for k in kernels.merged}
    work = [i for i, b in enumerate(kernels.plan.buffers) if b.kind == "workspace"]
    assert len(work) > 1
    buffers = list(kernels.plan.buffers)
    for i in work:
        buffers[i] = dataclasses.replace(buffers[i], offset=0)
    plan = dataclasses.replace(kernels.plan, buffers=tuple(buffers))
    found = certify_plan(plan, merged, functions_of(kernels))
    assert found.verdict == REFUTED
    assert "stale or undefined read" in {c.rule for c in found.counterexamples}


def test_a_kernel_with_grid_barriers_is_launched_cooperatively() -> None:
    kernels = compiled("lstm", "V3", "fp32")
    alone = dataclasses.replace(kernels.plan.kernels[0], grid_syncs=0)
    plan = dataclasses.replace(kernels.plan, kernels=(alone, *kernels.plan.kernels[1:]))
    found = certify_plan(plan, {k.name: k.func for k in kernels.merged}, functions_of(kernels))
    assert "launch" in {c.rule for c in found.counterexamples}
