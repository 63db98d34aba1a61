"""Properties of the transformations over random TE programs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from souffle.analysis import analyze, share_elements
from souffle.pipeline import LEVELS, transform_program
from souffle.program import FusedTE, TEProgram, parts_of
from souffle.transform import horizontal, mixed_precision, vertical
from tests.testlib import Builder, assert_same_function, calls_made, random_program

SETTINGS = settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def programs(draw: st.DrawFn) -> TEProgram:
    return random_program(lambda options: draw(st.sampled_from(list(options))), draw(st.integers(1, 8)))


@pytest.mark.parametrize("transformation", [horizontal, vertical, mixed_precision])
@SETTINGS
@given(program=programs())
def test_each_transformation_keeps_every_bit(transformation, program: TEProgram) -> None:
    result, decisions = transformation(program)
    result.check()
    assert result is program or any(d.accepted for d in decisions)
    assert (result.input_names, result.output_names) == (program.input_names, program.output_names)
    assert_same_function(program, result)


@SETTINGS
@given(program=programs(), level=st.sampled_from(("V1", "V2")))
def test_all_of_a_level_keeps_every_bit(program: TEProgram, level: str) -> None:
    result, _ = transform_program(program, LEVELS[level], "fp32")
    assert len(result.tes) <= len(program.tes)
    assert_same_function(program, result)


@SETTINGS
@given(program=programs())
def test_fused_programs_hold_what_their_parts_do(program: TEProgram) -> None:
    result, _ = vertical(horizontal(program)[0])
    parts = result.expanded()
    parts.check()
    assert_same_function(program, parts)
    fused, apart = analyze(result), analyze(parts)
    for item in result.tes:
        work = fused.arithmetic(item)
        assert work.operations == sum(apart.arithmetic(part).operations for part in parts_of(item))
        if isinstance(item, FusedTE):
            assert share_elements(item.parts[len(item.prologue) :])
        for access in fused.accesses(item):
            assert 0 < access.elements <= min(access.times, access.tensor.size)


@SETTINGS
@given(program=programs())
def test_transformations_reach_a_fixed_point(program: TEProgram) -> None:
    result, _ = vertical(program)
    assert vertical(result)[0] is result


def test_work_grows_with_the_program_and_not_faster() -> None:
    def work(length: int) -> int:
        b = Builder()
        x = b.input(4, 6)
        for number in range(length):
            x = b.relu(x) if number % 3 else b.reshape(b.reduce(b.broadcast(x, 2), 0), 4, 6)
        program = b.program(x)
        return calls_made(lambda: transform_program(program, LEVELS["V2"], "fp32"))

    work(30)
    assert work(240) < 5 * work(60)
