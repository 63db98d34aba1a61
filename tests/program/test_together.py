"""Several programs as one: the same numbers as each alone, shared kernels, and what is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tvm import te

import souffle
from souffle.options import LEVELS
from souffle.pipeline import transform_program
from souffle.program import ProgramError, TEProgram
from souffle.program.evaluate import evaluate
from souffle.verify import PROVEN
from tests.testlib import Builder, inputs_for, random_program, run_on_cpu_device
from tests.thorough import some


def network(rows: int, width: int, seed: int = 0) -> TEProgram:
    """A product and sums of its rows."""
    b, rng = Builder(), np.random.default_rng(seed)
    x = b.input(rows, width)
    y = b.relu(b.matmul(x, b.constant(rng.integers(-2, 3, (width, 24)).astype(np.float32))))
    return b.program(b.reduce(y, 1), y)


@pytest.mark.parametrize("level", some(["V0", "V4"], ["V1", "V3"]))
def test_both_compute_what_each_does_alone(level: str) -> None:
    parts = {"left": network(33, 17), "right.one": network(70, 40, seed=1), "again": network(33, 17)}
    whole = souffle.together(parts)
    assert whole.input_names == ("left.in0", "right.one.in0", "again.in0")
    net = souffle.compile(whole, level=level, target="cuda", device="cpu", arch="sm_90", cubin=False)
    assert net.certificate.verdict == PROVEN
    inputs = {name: inputs_for(program, seed) for seed, (name, program) in enumerate(parts.items())}
    given = {f"{name}.{key}": value for name, own in inputs.items() for key, value in own.items()}
    found = run_on_cpu_device(net.plan, given, order="shuffled", seed=1)
    for name, program in parts.items():
        for key, value in evaluate(program, inputs[name]).items():
            np.testing.assert_array_equal(found[f"{name}.{key}"], value)


def waiting(rows: int, width: int) -> TEProgram:
    """Products of whose columns each waits for all blocks."""
    b = Builder()
    x = b.input(rows, width)
    for _ in range(3):
        most = b.reduce(x, 0, "max")
        x = b.add(lambda v, m: te.compute(v.shape, lambda i, j: v[i, j] - m[j]), x, most, name="less")
        x = b.matmul(x, b.constant(np.ones((width, width), np.float32)))
    return b.program(x)


def test_networks_share_barriers() -> None:
    parts = {"a": waiting(300, 40), "b": waiting(130, 64)}
    options = {"level": "V3", "target": "cuda", "device": "cpu", "arch": "sm_90", "cubin": False}
    alone = [souffle.compile(program, **options).plan for program in parts.values()]
    both = souffle.compile(souffle.together(parts), **options).plan
    waits = [sum(kernel.grid_syncs for kernel in plan.kernels) for plan in (*alone, both)]
    assert len(both.launches) == 1 and min(waits) > 1 and waits[2] == max(waits[:2]), waits


@pytest.mark.parametrize("seed", range(3))
def test_random_programs(seed: int) -> None:
    parts = {f"p{number}": random_program(random.Random(10 * seed + number).choice, 6) for number in range(3)}
    whole = souffle.together(parts)
    inputs = {name: inputs_for(program) for name, program in parts.items()}
    found = evaluate(whole, {f"{name}.{key}": value for name, own in inputs.items() for key, value in own.items()})
    for name, program in parts.items():
        for key, value in evaluate(program, inputs[name]).items():
            np.testing.assert_array_equal(found[f"{name}.{key}"], value)


def test_what_is_refused() -> None:
    one = network(8, 8)
    with pytest.raises(ProgramError, match="of no programs"):
        souffle.together({})
    with pytest.raises(ProgramError, match=r"'a' is a str and no TEProgram; .* souffle.import_onnx"):
        souffle.together({"a": "model.onnx"})
    with pytest.raises(ProgramError, match="not different identifiers"):
        souffle.together({"a.b": one, "a_b": one})
    with pytest.raises(ProgramError, match="give the program as it was imported"):
        souffle.together({"a": transform_program(one, LEVELS["V4"], "fp32")[0]})
    with pytest.raises(ProgramError, match="products are to be computed"):
        souffle.together({"a": one, "b": transform_program(network(8, 8), LEVELS["V0"], "tf32")[0]})
