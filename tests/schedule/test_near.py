"""Records of near stages: which stages are near, in which order, and what a recipe becomes for another one."""

from __future__ import annotations

import random
from math import prod
from pathlib import Path

import pytest
from tvm import te, tirx

from souffle.decision import Refused
from souffle.schedule.follow import followed
from souffle.schedule.gpu import GpuRequest, GpuSchedule, sketch_of
from souffle.schedule.log import RecordOrigin, TuningLog
from souffle.schedule.lower import cuda_target
from souffle.schedule.near import distance, fitted, fitted_knobs, fitted_trace, outline, structure_of
from souffle.schedule.recipe import NATIVE_RULE, Recipe
from souffle.tuning.sketches import spaces_of
from souffle.tuning.space import sampled
from souffle.tuning.store import LogWriter, NewRecord

ARCH = "sm_90"
REQUEST = GpuRequest(ARCH)
TARGET = cuda_target(ARCH)


def product(rows: int, inner: int = 64, columns: int = 128, *, dtype: str = "float32", relu: bool = False, scale=None):
    a, b = te.placeholder((rows, inner), dtype, name="a"), te.placeholder((inner, columns), dtype, name="b")
    k = te.reduce_axis((0, inner), name="k")
    c = te.compute((rows, columns), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    if relu:
        c = te.compute((rows, columns), lambda i, j: te.max(c[i, j], tirx.const(0, dtype)), name="d")
    if scale is not None:
        c = te.compute((rows, columns), lambda i, j: c[i, j] * tirx.const(scale, dtype), name="d")
    return te.create_prim_func([a, b, c]).with_attr("global_symbol", "stage")


def record(knobs: dict[str, int], seconds: float, own: float = 1.0, rule: str = "contraction") -> NewRecord:
    origin = RecordOrigin("predicted", "H200-SXM5-141GB", "0.27.0.post1", "0.1.0", "2026-01-01", own_seconds=own)
    return NewRecord(Recipe(rule, knobs), (seconds,), origin)


def test_near_stages_are_of_one_structure_and_come_by_their_distance(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, ARCH, TARGET)
    here = product(100)
    stages = {
        "as it is": here,
        "half": product(50),
        "10 more": product(110),
        "all else": product(7, 3, 5),
        "rectified": product(90, relu=True),
        "fp16": product(90, dtype="float16"),
        "scaled": product(90, scale=2.0),
    }
    for number, (name, func) in enumerate(stages.items()):
        useless, failed = record({"n": 9}, 3.0), NewRecord(Recipe("contraction", {"n": 8}), (), record({}, 1.0).origin)
        second, best = record({"n": 10 * number + 1}, 2e-6), record({"n": 10 * number}, 1e-6)
        writer.append(func, [useless, failed, second, best], name)
    log = TuningLog(tmp_path / ARCH, ARCH)
    assert [workload.name for workload in log.table.near(here)] == ["10 more", "half", "all else"]
    assert [one.knobs["n"] for one in log.near(here, 9)] == [20, 10, 30, 21, 11, 31]
    assert [one.knobs["n"] for one in log.near(here, 4)] == [20, 10, 30, 21]
    assert [one.knobs["n"] for one in log.near(product(99, scale=3.0), 9)] == [60, 61]
    assert log.near(product(99, dtype="float64"), 9) == log.near(here, 0) == []
    (tmp_path / ARCH / "workloads.jsonl").unlink()
    assert TuningLog(tmp_path / ARCH, ARCH).near(here, 9) == []


def test_distance_counts_factors_whatever_their_direction() -> None:
    one, other = (((8, 1), "float32"), ((), "int64")), (((4, 3), "float32"), ((), "int64"))
    assert distance(one, other) == distance(other, one) == pytest.approx(1.791759, abs=1e-6)  # log(2 * 3)
    assert distance(one, one) == 0.0 and outline(one) == outline(other)
    assert distance((((0,), "float32"),), (((1,), "float32"),)) == 0.0


def test_structure_knows_operations_and_axes_but_no_extents() -> None:
    assert structure_of(product(33, 1, 7)) == structure_of(product(64))
    kinds = [product(64), product(64, relu=True), product(64, scale=2.0), product(64, dtype="float16")]
    asked = product(64).with_attr("souffle.multiplies", "tf32")
    assert len({structure_of(func) for func in (*kinds[:3], asked)}) == 4


@pytest.mark.parametrize("shape", [(33, 48, 40), (512, 512, 512), (1, 1, 1), (7, 13, 11)])
def test_a_recipe_of_a_rule_makes_a_schedule_of_another_shape(shape) -> None:
    """But where the values that are offered do not go together, as 2 stages of a sum of one step."""
    for rule in ("contraction", "reduction"):
        there = sketch_of(rule, product(1024, 768, 768), REQUEST)
        recipe = Recipe(rule, dict(there.choose()))
        func = product(*shape)
        near = fitted(recipe, func, REQUEST)
        if isinstance(near, Refused):
            assert rule == "contraction" and min(shape) < 32 and "block c: " in near.reason
            continue
        assert isinstance(followed(near, func, REQUEST), GpuSchedule)
        again = fitted(near, func, REQUEST)
        assert isinstance(again, Recipe) and again.key == near.key


def test_a_rule_that_does_not_apply_and_knobs_that_are_gone_are_refused() -> None:
    func = product(33)
    assert isinstance(fitted(Recipe("mma_contraction", {"step": 32}), func, REQUEST), Refused)
    assert "has other knobs now" in fitted(Recipe("contraction", {"step": 8}), func, REQUEST).reason
    assert "no rule" in fitted(Recipe("contractions", {}), func, REQUEST).reason


def test_knobs_take_the_nearest_value_that_is_offered() -> None:
    recipe = Recipe("r", {"tile": 48, "stages": 3, "switch": 1, "gone": 5})
    assert fitted_knobs(recipe, {"tile": (8, 32, 64, 512), "stages": (1, 2, 3), "switch": (0,)}).knobs == {
        "tile": 64,
        "stages": 3,
        "switch": 0,
    }
    assert fitted_knobs(recipe, {"tile": (64,), "new": (1,)}) is None
    assert fitted_knobs(recipe, {"tile": ()}) is None
    assert fitted_knobs(Recipe("r", {"switch": 0}), {"switch": (1, 2)}).knobs == {"switch": 1}


def test_tiles_of_a_trace_stay_inside_and_the_grid_takes_what_is_left() -> None:
    """MetaSchedule's sketches of both shapes have the same steps; what fits a shape fits its multiples."""
    small, large, prime = product(64, 48, 96), product(128, 96, 288), product(61, 48, 96)
    sketches = {func: [s for s in spaces_of(func, REQUEST, TARGET, seed=1) if s.tiles] for func in (small, large)}
    space = sketches[small][0]
    others = [other.trace for other in sketches[large]]
    for seed in range(20):
        recipe = sampled(space, REQUEST.threads, random.Random(seed))
        near = fitted(recipe, large, REQUEST, others)
        assert isinstance(near, Recipe) and near.rule == NATIVE_RULE and near.choices[0] == recipe.choices[0]
        ours, theirs = dict(near.trace[1]), dict(recipe.choices[1])
        extents = {axis.step: axis.extent for nest in sketches[large][0].tiles for axis in nest}
        assert extents
        for step, value in ours.items():
            if step in extents:
                assert prod(value) == extents[step] and value[1:] == theirs[step][1:]
            else:
                assert value == theirs[step]
        assert fitted_trace(near, space.trace).key == recipe.key
    of_prime = [other.trace for other in spaces_of(prime, REQUEST, TARGET, seed=1) if other.trace is not None]
    fits = [fitted(sampled(space, REQUEST.threads, random.Random(seed)), prime, REQUEST, of_prime) for seed in range(9)]
    assert all(isinstance(one, Refused) for one in fits)
    assert fitted_trace(recipe, [others[0][0][:-1], others[0][1]]) is None
