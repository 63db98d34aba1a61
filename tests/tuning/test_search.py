"""The search: what it writes, that it goes on where it stopped, and that all kinds of schedules compute the same."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import souffle
from souffle.cost import device_of_arch
from souffle.errors import OptionError
from souffle.options import Options
from souffle.pipeline import stages_of, stages_of_ways
from souffle.schedule.gpu import RULES, GpuRequest
from souffle.schedule.log import TuningLog
from souffle.schedule.lower import cuda_target
from souffle.schedule.recipe import NATIVE_RULE, Recipe
from souffle.schedule.stage import flat_stages
from souffle.tuning import (
    LogWriter,
    MeasuringBench,
    NewRecord,
    PredictingBench,
    recipes_nearby,
    search,
    session,
    tasks_of,
)
from souffle.tuning.bench import Figures
from souffle.tuning.learned import FEATURES
from souffle.tuning.space import Space, mutated, sampled
from souffle.tuning.stage_search import BATCH
from souffle.tuning.stage_work import look, packed_setting, packed_stage, sketches
from souffle.tuning.store import origin_now
from souffle.workers import Job, engine_for
from tests.placement.normalized_layers import layers
from tests.tuning.networks import APART, gemm

ARCH = "sm_90"
TARGET = cuda_target(ARCH)
DEVICE = device_of_arch(ARCH)
REQUEST = GpuRequest(ARCH)


class Counting(PredictingBench):
    """Predicts without a compiler, and remembers what it was asked."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__(DEVICE.product, nvcc=False)
        self.asked: list[str] = []
        self.stop_after = stop_after

    def figures(self, stage, candidates, own):
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += [candidate.recipe.key for candidate in candidates]
        return (yield from super().figures(stage, candidates, own))


@pytest.fixture(scope="module")
def tasks():
    return tasks_of([stages_of(gemm(), cubin=False, **APART)])


def run(tasks, folder: Path, trials: int, bench=None, on: str = "here", **options):
    with engine_for(on) as engine:
        return search(
            tasks,
            trials=trials,
            request=REQUEST,
            cost_device=DEVICE,
            bench=bench or Counting(),
            writer=LogWriter(folder, ARCH, TARGET),
            engine=engine,
            **options,
        )


def held(folder: Path) -> dict[str, bytes]:
    """The files of a log; only the day in them could differ, around midnight."""
    return {path.name: path.read_bytes() for path in (folder / ARCH).iterdir() if path.suffix == ".jsonl"}


def test_it_finds_what_the_rule_did_not_and_says_what_it_did(tasks, tmp_path) -> None:
    messages: list[str] = []
    report = run(tasks, tmp_path, 4, progress=messages.append)
    assert [task.name for task in report.tasks] == [task.name for task in tasks]
    for task in report.tasks:
        assert task.trials == task.new_trials <= 4
        assert task.own_seconds is not None and 0 < task.best_seconds <= task.own_seconds
    assert report.source == f"predicted with the cost model of {DEVICE.product}"
    records = TuningLog(tmp_path / ARCH, ARCH).records
    assert len(records) == report.new_trials
    assert all(record.origin.text and record.origin.tiles for record in records)
    last = messages[-1]
    assert all(part in last for part in ("1 worker", "candidates/s", "trial 4/4", "rule's own", "left"))


def test_equal_seeds_give_equal_records_and_nothing_is_tried_twice(tasks, tmp_path) -> None:
    one, other, third = Counting(), Counting(), Counting()
    run(tasks[:1], tmp_path / "one", 4, one, seed=5)
    run(tasks[:1], tmp_path / "other", 4, other, seed=5)
    run(tasks[:1], tmp_path / "third", 4, third, seed=6)
    assert held(tmp_path / "one") == held(tmp_path / "other")
    assert len(set(one.asked)) == len(one.asked) == 4
    assert one.asked != third.asked


def test_a_stopped_search_goes_on_and_workers_change_nothing(tasks, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(session, "BATCH", 4)
    whole, first, second = Counting(), Counting(stop_after=4), Counting()
    run(tasks, tmp_path / "whole", 8, whole)
    report = run(tasks[:1], tmp_path / "parts", 8, first)
    assert report.interrupted and report.tasks[0].trials == 4
    # The other task begins now, and two workers answer in whatever order.
    report = run(tasks[::-1], tmp_path / "parts", 8, second, on="local:2")
    assert not report.interrupted and {task.trials for task in report.tasks} == {8}
    assert sorted(first.asked + second.asked) == sorted(whole.asked)
    assert held(tmp_path / "parts") == held(tmp_path / "whole")
    again = Counting()
    assert run(tasks, tmp_path / "parts", 8, again).new_trials == 0
    assert not again.asked


@pytest.mark.parametrize("trials", [1, 11, 15, 16, 17, 24, 25, 40, 64, 1000])
def test_batches_of_a_search_are_alike(trials) -> None:
    sizes, left = [], trials
    while left:
        sizes.append(session._size(left))
        left -= sizes[-1]
    assert max(sizes) - min(sizes) <= 1 and (len(sizes) == 1 or min(sizes) > BATCH / 2) and max(sizes) <= 1.5 * BATCH


def test_what_cannot_be_used_is_written_down_and_never_chosen(tasks, tmp_path) -> None:
    class Broken(Counting):
        def figures(self, stage, candidates, own):
            yield from super().figures(stage, candidates, own)
            return [Figures(problem="it differs")] * len(candidates)

    report = run(tasks[:1], tmp_path, 4, Broken())
    assert report.tasks[0].best_seconds is None and report.tasks[0].trials == 4
    records = TuningLog(tmp_path / ARCH, ARCH).records
    assert all(record.failed and not record.useful for record in records) and len(records) == 4
    assert {record.origin.problem for record in records} == {"it differs"}


@pytest.mark.parametrize("figure", ["predicted", "measured"])
def test_the_rules_own_that_spills_and_is_faster_is_the_best(tasks, tmp_path, figure) -> None:
    """As compilation has it: a record that spills is not taken by its prediction, and the rule's own stays."""

    class Spilling(Counting):
        def figures(self, stage, candidates, own):
            yield from super().figures(stage, candidates, own)
            return [Figures((1e-6,), 8, 40) if one is own else Figures((2e-6,), 0, 40) for one in candidates]

    bench = Spilling()
    bench.figure = figure
    report = run(tasks[:1], tmp_path, 4, bench).tasks[0]
    assert (report.own_seconds, report.best_seconds, report.gain) == (1e-6, 1e-6, 1.0)
    assert report.best.startswith("the rule's own") == (figure == "predicted")
    assert tasks[0].stage.schedule.rule in report.best


def test_a_network_compiled_with_the_log_computes_the_same(tmp_path) -> None:
    program = gemm()
    run(tasks_of([stages_of(program, cubin=False, **APART)]), tmp_path, 4)
    options = {"device": "cpu", "cubin": False, "tuning_log": tmp_path, **APART}
    network = souffle.compile(program, target="cuda", arch=ARCH, **options)
    assert [d for d in network.plan.decisions if d[0] == "tuning"][-1][3].startswith("2 of 2")
    rng = np.random.default_rng(1)
    a, b, bias = (rng.standard_normal(s.shape).astype("float32") for s in network.signature.inputs)
    shifted, total = network(a, b, bias).values()
    np.testing.assert_allclose(shifted, a @ b + bias, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(total, (a @ b + bias).sum(axis=1), rtol=1e-4, atol=1e-3)


def test_every_sketch_gives_schedules_that_compute_the_same(tmp_path, tasks) -> None:
    """One candidate of each sketch, ours and MetaSchedule's, run as a log's only record."""
    program = gemm()
    rng = np.random.default_rng(1)
    kinds = set()
    draft = tasks[0].stage.draft
    shared = {"stage": packed_stage(draft), "setting": packed_setting(REQUEST, DEVICE)}
    payload = {"stage": "stage", "setting": "setting"}
    found = sketches({**payload, "seed": 1, "rule": tasks[0].stage.schedule.rule}, shared)
    assert Recipe.of_data(found["own"]).rule in RULES
    for number, data in enumerate(found["spaces"]):
        space, draws = Space.of_data(data), random.Random(number)
        recipes = (sampled(space, REQUEST.threads, draws) for _ in range(100))
        looks = ((look({**payload, "recipe": recipe.data(), "features": True}, shared), recipe) for recipe in recipes)
        value, recipe = next(((value, recipe) for value, recipe in looks if not value["problem"]), ({}, None))
        if recipe is None:
            continue
        assert space.offers(recipe) and space.offers(mutated(space, recipe, REQUEST.threads, draws))
        whole = Recipe.of_data(value["recipe"])
        assert whole.key == recipe.key and len(value["features"]) == len(FEATURES)
        folder = tmp_path / str(number)
        origin = origin_now("measured", DEVICE.product, text=value["text"])
        LogWriter(folder, ARCH, TARGET).append(draft.func, [NewRecord(whole, (1e-6,), origin)])
        options = {"device": "cpu", "cubin": False, "tuning_log": folder, **APART}
        network = souffle.compile(program, target="cuda", arch=ARCH, **options)
        assert any(d[2] and recipe.rule in d[3] for d in network.plan.decisions if d[0] == "tuning")
        a, b, bias = (rng.standard_normal(s.shape).astype("float32") for s in network.signature.inputs)
        shifted, total = network(a, b, bias).values()
        np.testing.assert_allclose(shifted, a @ b + bias, rtol=1e-4, atol=1e-4, err_msg=whole.summary)
        np.testing.assert_allclose(total, (a @ b + bias).sum(axis=1), rtol=1e-4, atol=1e-3)
        kinds.add((recipe.rule, bool(space.tiles)))
    assert {("contraction", False), ("reduction", False), (NATIVE_RULE, True)} <= kinds


@pytest.mark.thorough("which recipes are near is in tests/schedule/test_near.py")
def test_a_search_begins_with_what_is_known_of_near_stages(tasks, tmp_path) -> None:
    run(tasks, tmp_path, 6)
    log = TuningLog(tmp_path / ARCH, ARCH)
    larger = tasks_of([stages_of(gemm(128, 96, 192), cubin=False, **APART)])
    nearby = recipes_nearby([log], larger, DEVICE.product)
    # What is tuned at the same time does not count: it depends on who is ahead.
    assert not any(recipes_nearby([log], [*tasks, *larger], DEVICE.product)(task) for task in larger)
    for task in larger[:1]:
        near, alone, beginning = nearby(task), Counting(), Counting()
        assert near and near[0].rule in RULES
        run([task], tmp_path / "alone", 8, alone)
        run([task], tmp_path / "beginning", 8, beginning, near=nearby)
        assert alone.asked != beginning.asked
    report = run(larger, tmp_path, 8, near=nearby)
    assert all(task.best_seconds <= task.own_seconds for task in report.tasks)


def test_candidates_are_compared_and_measured_on_a_gpu(tasks, tmp_path) -> None:
    given = {"driver": "tests.tuning.played_gpu:driver"}
    with engine_for("here") as here:
        job = Job("souffle.tuning.measuring:device", given, "the GPU", resource="gpu")
        gpu = here.submit(job).result().value
    assert gpu["arch"] == ARCH
    bench = MeasuringBench(gpu["name"], "tests.tuning.played_gpu:measure", given)
    report = run(tasks[:1], tmp_path, 2, bench)
    assert report.source == f"measured on {gpu['name']}" and report.tasks[0].own_seconds > 0
    records = TuningLog(tmp_path / ARCH, ARCH).records
    assert len(records) == 2 and not any(record.failed for record in records)
    assert {(record.origin.figure, record.origin.device) for record in records} == {("measured", gpu["name"])}


def test_options_are_checked(tasks) -> None:
    with pytest.raises(OptionError, match="trials=0"):
        souffle.tune(gemm(), trials=0)
    with pytest.raises(OptionError, match=r"no GPU of sm_75 is described.*A100"):
        souffle.tune(gemm(), trials=1, arch="sm_75")
    with pytest.raises(OptionError, match="is sm_80, and the schedules are for sm_90"):
        souffle.tune(gemm(), trials=1, arch="sm_90", device="A100-SXM4-40GB")
    with pytest.raises(OptionError, match=r"measure='fast'.*rpc://HOST:PORT/KEY"):
        souffle.tune(gemm(), trials=1, arch="sm_90", measure="fast", on="here")
    networks = [stages_of(gemm(), cubin=False, **APART)]
    with pytest.raises(OptionError, match=r"no stage.*shifted"):
        tasks_of(networks, "nothing")
    with pytest.raises(OptionError, match="no regular expression"):
        tasks_of(networks, "(")


def test_stages_count_as_often_as_they_run() -> None:
    once = stages_of(gemm(), cubin=False, **APART)
    twice = tasks_of([once, stages_of(gemm(), cubin=False, **APART)])
    assert [task.weight for task in twice] == [2, 2]


def test_stages_are_searched_of_each_way_that_may_be_the_fastest() -> None:
    """Which way is the fastest is known when its stages have been searched, too."""
    options = Options(level="V4", precision="mixed", arch=ARCH, cubin=False, tuning_log=None)
    best, *others = stages_of_ways(souffle.import_onnx(layers(3)), options)
    assert others
    alone, all_of_them = tasks_of([best]), tasks_of([best], others=others)
    assert [task.stage.draft.digest for task in alone] == [t.stage.draft.digest for t in all_of_them[: len(alone)]]
    assert [task.weight for task in alone] == [task.weight for task in all_of_them[: len(alone)]]
    whole = stages_of(souffle.import_onnx(layers(3)), options)
    assert [stage.draft.digest for stage in flat_stages(whole[0])] == [s.draft.digest for s in flat_stages(best[0])]
    assert len(all_of_them) > len(alone)
