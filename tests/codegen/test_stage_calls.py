"""How stages stand in a kernel's text: each of several with a thread's number that says nothing but its range."""

from __future__ import annotations

import re

import numpy as np
import pytest

import souffle
from souffle.codegen.stage_calls import OWN_FUNCTION, TURNS_FUNCTION
from souffle.pipeline import compile_cuda
from tests.testlib import Builder, run_on_cpu_device

OWN = re.compile(rf"^  (\w+) = {OWN_FUNCTION}<(\d+)>\(\1\);$", re.MULTILINE)
DEFINITION = re.compile(r"^static __device__ \w+ void (stage\w+)\([^;{]*\) \{$", re.MULTILINE)


def products(count: int, rows: int = 8) -> souffle.TEProgram:
    """Each of another width, so that none is another's step."""
    b, rng = Builder(), np.random.default_rng(0)
    x, width = b.input(rows, 16), 16
    for number in range(count):
        x = b.matmul(x, b.constant(rng.standard_normal((width, 24 + 8 * number)).astype(np.float32)))
        width = 24 + 8 * number
    return b.program(x)


def text_of(program: souffle.TEProgram, **options: object) -> str:
    return compile_cuda(program, level="V3", arch="sm_90", cubin=False, **options).plan.modules[0].text


def test_a_kernel_of_one_stage_is_left_alone() -> None:
    assert OWN_FUNCTION not in text_of(products(1))


def test_each_stage_of_several_has_a_number_of_its_own() -> None:
    text = text_of(products(3, rows=4096))
    assert len(DEFINITION.findall(text)) == 3
    for definition in DEFINITION.finditer(text):
        first = text[definition.end() :].splitlines()[1:3]
        assert [OWN.match(line)[1] for line in first] == ["tile", "tid"], definition[1]
    # How often a block turns is worked out before each stage, not kept.
    kernel = text[text.index('extern "C" __global__', text.rindex("\nstatic")) :]
    assert kernel.count(f"{TURNS_FUNCTION}(") == kernel.count("for (int it") > 0


@pytest.mark.parametrize("teams", [False, True])
def test_the_range_holds_all_threads(teams: bool) -> None:
    options = {} if teams else {"disable": ["teams"]}
    text = text_of(products(3, rows=4096), **options)
    threads = int(re.search(r"__launch_bounds__\((\d+)", text)[1])
    several = re.search(r"team_tid = \(\(\(int\)threadIdx\.x\) % (\d+)\)", text)
    most = {int(number) for name, number in OWN.findall(text) if name == "tid"}
    assert most == {(int(several[1]) if several else threads) - 1}


def test_what_it_computes_stays_the_same() -> None:
    program = products(5)
    plan = compile_cuda(program, level="V3", arch="sm_90", cubin=False).plan
    assert OWN_FUNCTION in plan.modules[0].text
    given = {"in0": np.random.default_rng(1).standard_normal((8, 16), np.float32)}
    plain = compile_cuda(program, level="V0", arch="sm_90", cubin=False).plan
    assert OWN_FUNCTION not in plain.modules[0].text
    (one,), (other,) = (run_on_cpu_device(each, given).values() for each in (plan, plain))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4 * np.max(abs(other)))
