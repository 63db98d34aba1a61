"""Values that are equal because ``exp(a + b) = exp(a) exp(b)``: what agrees, and what a mutation changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad

import souffle
from benchmarks.attentions import AttentionCase, as_te, written_out
from souffle.pipeline import stages_of
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Sketch
from souffle.schedule.gpu.rules.chained_products import CHAINED_PRODUCTS
from souffle.schedule.lower import cuda_target, lower_stage
from souffle.schedule.stage import flat_stages
from souffle.tvm_compat import choice_parts, substitute, variables
from souffle.verify.values import Agreement, Mismatch, StageFunction, StageText, values_agree, values_section
from souffle.verify.values.exponentials import PairedNumbers, Q, R

pytestmark = pytest.mark.sampled(6)

NUMBERS = PairedNumbers(3)
LOWEST, HIGHEST = NUMBERS.lowest, NUMBERS.highest
NAN = int(NUMBERS.add(LOWEST, HIGHEST))


def drawn(name: str, *shape: int) -> np.ndarray:
    return NUMBERS.element(name, np.arange(int(np.prod(shape)))).reshape(shape)


def exp(a: np.ndarray) -> np.ndarray:
    return NUMBERS.function_of("exp", [a])


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return not NUMBERS.differ(np.asarray(a), np.asarray(b)).any()


# The numbers


def test_the_primes_are_what_they_are_said_to_be() -> None:
    for prime in (Q, R):
        assert all(prime % divisor for divisor in range(2, int(prime**0.5) + 1))
    assert R == 2 * Q + 1


def test_exponentials_of_sums_are_products() -> None:
    a, b = drawn("a", 50), drawn("b", 50)
    assert same(exp(NUMBERS.add(a, b)), NUMBERS.multiply(exp(a), exp(b)))
    assert not same(exp(NUMBERS.subtract(a, b)), NUMBERS.multiply(exp(a), exp(b)))
    assert not same(exp(NUMBERS.multiply(a, b)), NUMBERS.multiply(exp(a), exp(b)))
    assert not same(exp(a), exp(b))
    # Only of exponentials, and not of what they are arguments of.
    inner = exp(NUMBERS.add(a, b)), NUMBERS.multiply(exp(a), exp(b))
    assert not same(*map(exp, inner))
    assert not same(*(NUMBERS.function_of("tanh", [x]) for x in (NUMBERS.add(a, b), NUMBERS.multiply(a, b))))


def test_both_parts_are_fields() -> None:
    a, b, c = drawn("a", 9), drawn("b", 9), drawn("c", 9)
    for left, right in (
        (NUMBERS.multiply(NUMBERS.add(a, b), c), NUMBERS.add(NUMBERS.multiply(a, c), NUMBERS.multiply(b, c))),
        (NUMBERS.add(NUMBERS.subtract(a, b), b), a),
        (
            NUMBERS.multiply(NUMBERS.multiply(a, NUMBERS.residue(6)), NUMBERS.inverse(NUMBERS.residue(3))),
            NUMBERS.add(a, a),
        ),
        (NUMBERS.power(a, 5), NUMBERS.product(np.stack([a] * 5))),
    ):
        assert left.tolist() == right.tolist()
    x, y = drawn("x", 3, 40), drawn("y", 40, 5)
    terms = NUMBERS.multiply(x.T[:, :, None], y[:, None, :])
    assert NUMBERS.matrix_product(x, y).tolist() == NUMBERS.sum_of(terms).tolist()


def test_inverses_are_of_nothing_but_literals() -> None:
    """So that a quotient depends on all that its divisor is made of."""
    a, b = drawn("a", 9), drawn("b", 9)
    assert not same(NUMBERS.divide(NUMBERS.multiply(a, b), b), a)
    shifted = NUMBERS.multiply(a, b), NUMBERS.multiply(NUMBERS.residue(2), b)
    assert not same(NUMBERS.divide(*shifted), NUMBERS.divide(a, np.broadcast_to(NUMBERS.residue(2), a.shape)))


def test_infinities() -> None:
    a = drawn("a", 4)
    low, high, nan = (np.full(4, one) for one in (LOWEST, HIGHEST, NAN))
    for found, expected in (
        (exp(low), 0 * a),
        (exp(high), high),
        (exp(nan), nan),
        (NUMBERS.add(a, low), low),
        (NUMBERS.subtract(a, low), high),
        (NUMBERS.subtract(low, low), nan),
        (NUMBERS.multiply(low, 0 * a), 0 * a),
        (NUMBERS.multiply(low, a), nan),
        (NUMBERS.multiply(low, NUMBERS.residue(1)), low),
        (NUMBERS.multiply(low, NUMBERS.residue(-1)), high),
        (NUMBERS.divide(0 * a, 0 * a), nan),
        (NUMBERS.divide(a, high), 0 * a),
        (NUMBERS.largest(a, low), a),
        (NUMBERS.largest(low, low), low),
        (NUMBERS.largest(a, nan), nan),
        (NUMBERS.sum_of(np.stack([a, low])), low),
        (NUMBERS.sum_of(np.stack([high, low])), nan),
        (NUMBERS.matrix_product(low[:, None], a[None]), np.full((4, 4), NAN)),
        (NUMBERS.matrix_product(low[:, None], 0 * a[None]), np.zeros((4, 4), np.int64)),
        (NUMBERS.matrix_product(nan[:, None], 0 * a[None]), np.full((4, 4), NAN)),
    ):
        assert found.tolist() == expected.tolist()
    assert NUMBERS.ranks(LOWEST) < NUMBERS.ranks(NUMBERS.smallest) < NUMBERS.ranks(0) < NUMBERS.ranks(HIGHEST)


# Stages


VALUES = {
    "warps_along_rows": 2,
    "mma_rows": 1,
    "mma_columns": 2,
    "chunks": 1,
    "running": 1,
    "step": 32,
    "second_warps_along_rows": 1,
    "second_warps_along_inner": 2,
    "second_step": 32,
    "stages": 2,
}


def lowered(stage: object, values: dict[str, int]) -> StageFunction:
    request = GpuRequest("sm_80", threads=128, sm_count=4, max_shared_bytes=163 * 1024)
    sketch = CHAINED_PRODUCTS.sketch(StageForms(stage), request)
    assert isinstance(sketch, Sketch), sketch
    schedule = sketch.with_values(values)
    assert isinstance(schedule, GpuSchedule), schedule
    (function,) = lower_stage("attention", schedule, cuda_target("sm_80"))
    return function.func, function.tiles, function.threads


@cache
def attention() -> tuple[tirx.PrimFunc, StageFunction]:
    """Attention with a mask, as it is defined, and with the running maximum and sum.

    The mask stays a tensor where nothing is placed on chip: its values may hide any element, and all panels of a row.
    """
    program = souffle.import_onnx(written_out(AttentionCase(40, 100, 32, 1, 1, causal=True)))
    how = {"level": "V4", "precision": "mixed", "reductions": "one_phase"}
    units, _ = stages_of(program, arch="sm_80", cubin=False, **how)
    (stage,) = flat_stages(units)
    return stage.draft.func, lowered(stage.draft.func, VALUES)


@cache
def causal() -> tuple[tirx.PrimFunc, StageFunction]:
    """Attention whose mask is a choice by index, as it is defined, and without panels that it hides."""
    units, _ = stages_of(as_te(AttentionCase(40, 100, 32, 1, 1, causal=True)), arch="sm_80", cubin=False, level="V4")
    (stage,) = flat_stages(units)
    return stage.draft.func, lowered(stage.draft.func, VALUES)


def hidden_panels(func: tirx.PrimFunc) -> list[tirx.IfThenElse]:
    """The conditions under which panels are computed."""
    found: list[tirx.IfThenElse] = []
    tvm_ffi.structural_walk(func.body, (tirx.IfThenElse, found.append))
    return [node for node in found if "panel" in str(node.condition) and "tid" not in str(node.condition)]


def test_panels_that_a_mask_hides_are_not_missed() -> None:
    definition, function = causal()
    assert len(hidden_panels(function[0])) == 1
    found = values_agree(definition, [function], tiles="all")
    assert isinstance(found, Agreement), str(found)


@pytest.mark.parametrize("wrong", ["a panel less", "only the first", "the other panels"])
def test_panels_that_are_left_out_wrongly_are_a_mismatch(wrong: str) -> None:
    definition, (func, tiles, threads) = causal()
    (old,) = hidden_panels(func)
    (panel,) = {v.name: v for v in variables(old.condition) if v.name == "panel"}.values()
    new = {
        "a panel less": lambda: substitute(old.condition, {panel: panel + 1}),
        "only the first": lambda: tirx.EQ(panel, 0),
        "the other panels": lambda: tirx.Not(old.condition),
    }[wrong]()
    changed = tirx.IfThenElse(new, old.then_case, None)
    body = tvm_ffi.structural_map(func.body, (tirx.IfThenElse, lambda node: changed if node.same_as(old) else node))
    found = values_agree(definition, [(func.with_body(body), tiles, threads)], tiles="all")
    assert isinstance(found, Mismatch), str(found)


def stores_of(name: str) -> list[tirx.BufferStore]:
    found: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(attention()[1][0].body, (tirx.BufferStore, found.append))
    return [store for store in found if store.buffer.name == name]


def test_a_running_softmax_agrees() -> None:
    definition, function = attention()
    found = values_agree(definition, [function])
    assert isinstance(found, Agreement), str(found)
    assert found.exponentials
    section = values_section([(StageText(("attention",), definition, (function,)), found)])
    assert ("equal by exp(a + b) = exp(a) exp(b)", 1) in section.facts


def test_what_is_equal_without_is_not_said_to_be_equal_by_it() -> None:
    definition, _ = attention()
    found = values_agree(definition, [lowered(definition, {**VALUES, "chunks": 0, "running": 0})])
    assert isinstance(found, Agreement)
    assert not found.exponentials


def part(name: str, number: int, kind: type) -> tirx.BufferStore:
    """A store of a buffer whose value is of a kind."""
    return [store for store in stores_of(name) if isinstance(store.value, kind)][number]


def literal(value: float) -> tirx.FloatImm:
    return tirx.const(value, "float32")


def least(value: tirx.Max) -> tirx.Min:
    return tirx.Min(value.a, value.b)


def swapped(value: Call) -> tirx.PrimExpr:
    return tvm_ffi.structural_map(value, (tirx.Sub, lambda less: less.b - less.a))


def other_arm(number: int) -> Callable[[tirx.PrimExpr], tirx.PrimExpr]:
    return lambda value: choice_parts(value)[number]


def one(value: tirx.PrimExpr) -> tirx.PrimExpr:
    return literal(1.0)


def nought(value: tirx.PrimExpr) -> tirx.PrimExpr:
    return literal(0.0)


def first(value: tirx.PrimExpr) -> tirx.PrimExpr:
    return value.a


def second(value: tirx.PrimExpr) -> tirx.PrimExpr:
    return value.b


def less_the_maximum(value: tirx.PrimExpr) -> tirx.PrimExpr:
    before, less = (stores_of(name)[0].buffer for name in ("before", "less"))
    return tvm_ffi.structural_map(
        value, (TensorLoad, lambda load: before[load.indices[0]] if load.source.same_as(less) else load)
    )


WRONG: dict[str, tuple[str, int, type, Callable]] = {
    "nothing is rescaled": ("factor", 0, Call, one),
    "it is rescaled the other way": ("factor", 0, Call, swapped),
    "the sum is not rescaled": ("row_1", 0, tirx.Mul, first),
    "the totals are not rescaled": ("second_totals", 0, tirx.Mul, first),
    "the totals are not divided": ("factor", 0, tirx.Div, one),
    "the maximum forgets the panels before": ("row_0", -1, tirx.Max, second),
    "the maximum is of the panels before": ("row_0", -1, tirx.Max, first),
    "the maximum is one warp's": ("row_0", -2, tirx.Max, first),
    "the maximum is one lane's": ("row_0", 1, tirx.Max, first),
    "the maximum is the least of lanes": ("row_0", 1, tirx.Max, least),
    "the maximum is that of the last element": ("row_0", 0, tirx.Max, second),
    "the maximum starts from 0": ("row_0", 0, tirx.FloatImm, nought),
    "what was before starts from 0": ("before", 0, tirx.FloatImm, nought),
    "a row without keys so far is NaN": ("less", 0, object, other_arm(2)),
    "all is less 0": ("less", 0, object, other_arm(1)),
    "all is less minus infinity where that is the maximum": ("totals", 0, Call, less_the_maximum),
}


def mutated(name: str) -> tirx.PrimFunc:
    buffer, number, kind, new = WRONG[name]
    old = part(buffer, number, kind)
    func = attention()[1][0]
    changed = tirx.BufferStore(old.buffer, new(old.value), old.indices)
    return func.with_body(
        tvm_ffi.structural_map(func.body, (tirx.BufferStore, lambda store: changed if store.same_as(old) else store))
    )


@pytest.mark.parametrize("name", WRONG)
def test_a_change_is_a_mismatch(name: str) -> None:
    definition, (_, tiles, threads) = attention()
    found = values_agree(definition, [(mutated(name), tiles, threads)])
    assert isinstance(found, Mismatch), str(found)
