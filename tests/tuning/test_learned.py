"""Rankings that learn: what they learn, what they refuse, and what a log's measured records give."""

from __future__ import annotations

import json
import math
import random
import sys
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from tvm import te

import souffle
from souffle.cost import CostDevice, device_of_arch
from souffle.decision import Refused
from souffle.errors import OptionError
from souffle.pipeline import stages_of
from souffle.schedule.follow import followed
from souffle.schedule.gpu import RULES
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import gpu_request
from souffle.schedule.log import RECORDS
from souffle.schedule.lower import LoweringError, cuda_target, lower_stage, text_of
from souffle.schedule.recipe import Recipe
from souffle.tuning import LogWriter, NewRecord, tasks_of
from souffle.tuning.learned import FEATURES, Ranker, Sample, features_of, judge, learned_ranking, measured_samples
from souffle.tuning.learned.features import PREDICTED
from souffle.tuning.learned.judge import FEWEST_RECORDS, FEWEST_WORKLOADS, rank_figures
from souffle.tuning.sketches import spaces_of
from souffle.tuning.space import sampled
from souffle.tuning.store import origin_now
from souffle.workers import Check, Job, Outcome, engine_for

ARCH = "sm_90"
TARGET = cuda_target(ARCH)
DEVICE = device_of_arch(ARCH)
REQUEST = gpu_request(device_for(ARCH))
GPU = "NVIDIA H100 80GB HBM3"
CHAIN, REGISTERS, RESIDENT = (FEATURES.index(name) for name in ("chain_share", "registers", "resident"))


def factor(features: np.ndarray) -> np.ndarray:
    """By which a made-up cost model is wrong: it knows nothing of these three."""
    return np.exp(2.0 * features[:, CHAIN] + 0.8 * (features[:, REGISTERS] > 0.5) * features[:, RESIDENT])


def made(workloads: int, count: int, seed: int = 0, wrong=factor, noise: float = 0.02) -> list[Sample]:
    """Candidates with random features, whose seconds are the predicted ones times a factor and one of the workload."""
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(workloads):
        features = rng.random((count, len(FEATURES)))
        features[:, PREDICTED] = np.log(1e-5) + number + 0.5 * rng.standard_normal(count)
        own = np.exp(rng.standard_normal())  # what all candidates of a stage have in common says nothing of their order
        seconds = np.exp(features[:, PREDICTED] + noise * rng.standard_normal(count)) * wrong(features) * own
        samples += [
            Sample(f"stage{number}", f"candidate{place}", tuple(row.tolist()), float(time))
            for place, (row, time) in enumerate(zip(features, seconds, strict=True))
        ]
    return samples


def nothing(features: np.ndarray) -> np.ndarray:
    return np.ones(len(features))


def slower_half(features: np.ndarray) -> np.ndarray:
    features[:, RESIDENT] = features[:, PREDICTED] > np.median(features[:, PREDICTED])
    return np.exp(6 * features[:, RESIDENT] * features[:, CHAIN])


def test_a_known_function_is_learnt_whatever_the_order_of_the_log() -> None:
    samples = made(8, 24)
    judgement = judge(samples)
    assert judgement.use and "on 8 stages held out" in judgement.reason
    assert judgement.learned.correlation > 0.9 > 0.75 > judgement.predicted.correlation
    assert judgement.learned.recall > judgement.predicted.recall
    assert judgement.learned.slowdown < judgement.predicted.slowdown
    assert judgement.records == 192 and judgement.workloads == 8 and len(judgement.held_out) == 8
    assert judgement.curve[-1].records == round(192 * 4 / 5) and judgement.chance < 0.01
    learnt = [point.learned for point in judgement.curve]
    assert learnt[-1] > learnt[0] and judgement.needed in [point.records for point in judgement.curve]
    assert f"{judgement.needed} records" in judgement.reason

    unseen = made(1, 60, seed=7)
    features = np.array([one.features for one in unseen])
    seconds = np.array([one.seconds for one in unseen])
    ranker = Ranker.trained(samples)
    scores = ranker.scores(features)
    assert rank_figures(scores, seconds).correlation > 0.9
    assert rank_figures(scores, seconds).correlation > rank_figures(features[:, PREDICTED], seconds).correlation + 0.15

    # Measured twice more: the median counts. In another order, under another seed of hashes, all is the same.
    again = [replace(one, seconds=one.seconds * by) for one in samples[:40] for by in (0.5, 3.0)]
    shuffled = random.Random(3).sample(samples + again, len(samples) + len(again))
    assert judge(shuffled) == judgement
    np.testing.assert_array_equal(Ranker.trained(shuffled).scores(features), scores)
    np.testing.assert_array_equal(ranker.scores(features[::-1]), scores[::-1])
    np.testing.assert_array_equal([ranker.scores([row])[0] for row in features[:5]], scores[:5])
    other = judge(samples, seed=1)
    assert other.use and other.curve != judgement.curve


def test_too_few_records_are_not_judged_and_the_reason_says_what_it_takes() -> None:
    for samples, said in (
        ([], "no stages with"),
        (made(1, 500), "1 stage with"),
        (made(FEWEST_WORKLOADS - 1, 100), f"{FEWEST_WORKLOADS - 1} stages with"),
        (made(20, FEWEST_RECORDS - 1), "no stages with"),
        # All of a stage take the same time: nothing is to be ranked.
        ([replace(one, seconds=1e-5) for one in made(8, 30)], "no stages with"),
    ):
        judgement = judge(samples)
        assert not judgement.use and judgement.reason.startswith(said), judgement.reason
        assert f"it takes {FEWEST_WORKLOADS}" in judgement.reason and judgement.learned is None
    assert judge(made(FEWEST_WORKLOADS, FEWEST_RECORDS, seed=1)).learned is not None


def test_what_is_no_better_than_the_cost_model_is_not_used() -> None:
    # Its errors are chance: what is learnt of them only does harm.
    chance = judge(made(8, 24, wrong=nothing, noise=1.0))
    assert not chance.use and chance.learned.correlation < chance.predicted.correlation + 0.1
    # One stage of six speaks against what the others teach.
    against = [
        replace(one, seconds=one.seconds * math.exp((-2 if one.workload == "stage0" else 2) * one.features[CHAIN]))
        for one in made(6, 20, wrong=nothing)
    ]
    judgement = judge(against)
    assert judgement.learned.correlation > judgement.predicted.correlation
    assert not judgement.use and "may be chance" in judgement.reason
    # It is wrong of the slower half alone, so that what is learnt orders all better and the best ones worse.
    judgement = judge(made(8, 24, seed=1, wrong=slower_half, noise=1e-3))
    assert judgement.learned.correlation > judgement.predicted.correlation and judgement.chance < 0.01
    assert not judgement.use and "of the best candidates, that 100%" in judgement.reason


@pytest.mark.thorough("chance, and what others teach wrongly, are above")
def test_what_cannot_be_better_than_the_cost_model_is_not_used() -> None:
    # It is always right, but for a little.
    right = judge(made(8, 24, wrong=nothing, noise=1e-3))
    assert not right.use and right.predicted.correlation > 0.999
    # Each stage has errors of its own, which others teach wrongly.
    mixed = [
        replace(one, seconds=one.seconds * math.exp((-1) ** int(one.workload[5:]) * 2 * one.features[CHAIN]))
        for one in made(8, 24, wrong=nothing)
    ]
    assert not judge(mixed).use
    # All candidates look alike but for their predicted time.
    alike = [replace(one, features=(one.features[0], *(0.5 for _ in FEATURES[1:]))) for one in made(8, 24)]
    judgement = judge(alike)
    assert not judgement.use
    # Not even that differs: nothing is ranked, by either.
    same = judge([replace(one, features=(-11.0, *one.features[1:])) for one in alike])
    assert not same.use and same.learned == same.predicted and same.learned.correlation == 0
    assert "more records do not bring them nearer" in same.reason


@pytest.mark.thorough("it trains eight times")
def test_the_curve_says_how_many_records_would_do() -> None:
    """Hard to learn: with few records the cost model's rank is better, and each doubling brings them nearer."""

    def tangled(features: np.ndarray) -> np.ndarray:
        return np.exp(0.5 * np.sin(9 * features[:, CHAIN]) * np.sign(features[:, REGISTERS] - 0.5))

    few, many = judge(made(6, 16, wrong=tangled, noise=0.3)), judge(made(8, 120, wrong=tangled, noise=0.3))
    assert not few.use and many.use
    assert few.curve[-1].records < many.needed
    assert few.needed is None or few.needed > few.curve[-1].records


def test_what_is_no_number_harms_nothing() -> None:
    samples = made(6, 20)
    ranker = Ranker.trained(samples)
    broken = [
        replace(samples[0], seconds=time, candidate=f"time {place}")
        for place, time in enumerate((0.0, -1.0, math.nan, math.inf))
    ]
    broken.append(replace(samples[1], features=(math.nan, *samples[1].features[1:]), candidate="unpredicted"))
    assert judge(samples + broken) == judge(samples)
    rows = np.array([one.features for one in samples[:6]])
    np.testing.assert_array_equal(Ranker.trained(samples + broken).scores(rows), ranker.scores(rows))
    # A feature that is not known is missing, which trees have a way for.
    holes = [
        replace(one, features=tuple(math.nan if place == CHAIN and number % 3 == 0 else value
                                    for place, value in enumerate(one.features)))
        for number, one in enumerate(samples)
    ]  # fmt: skip
    assert judge(holes).use
    rows[0, PREDICTED], rows[1, CHAIN], rows[2, CHAIN], rows[3, PREDICTED] = math.nan, math.nan, -math.inf, math.inf
    scores = ranker.scores(rows)
    assert scores[0] == scores[3] == math.inf and np.isfinite(scores[[1, 2, 4, 5]]).all()
    assert ranker.scores([]).shape == (0,)
    for wrong in (rows[:, 1:], rows[0], rows[None]):
        with pytest.raises(OptionError, match="features"):
            ranker.scores(wrong)
    with pytest.raises(OptionError, match="3 features"):
        judge([replace(samples[0], features=(1.0, 2.0, 3.0))])
    with pytest.raises(OptionError, match="no stage has two"):
        Ranker.trained([one for one in samples if one.candidate == "candidate0"])


def test_a_ranking_is_kept_as_data(tmp_path) -> None:
    ranker, path = Ranker.trained(made(5, 20)), tmp_path / "ranking.json"
    rows = np.array([one.features for one in made(1, 20, seed=2)])
    ranker.save(path)
    np.testing.assert_array_equal(Ranker.load(path).scores(rows), ranker.scores(rows))
    content = json.loads(path.read_text())
    assert tuple(content["features"]) == FEATURES
    whole = path.read_text()
    damages = [
        "", "[]", "{}", whole[: len(whole) // 2],
        json.dumps({**content, "format": "another"}),
        json.dumps({**content, "features": content["features"][::-1]}),
        json.dumps({**content, "trees": {}}), json.dumps({**content, "trees": None}),
    ]  # fmt: skip
    for damaged in damages:
        path.write_text(damaged)
        with pytest.raises(OptionError, match="no ranking of candidates"):
            Ranker.load(path)
    path.write_bytes(b"\xff\x00")
    with pytest.raises(OptionError, match="no ranking of candidates"):
        Ranker.load(path)
    with pytest.raises(OptionError, match="no ranking of candidates"):
        Ranker.load(tmp_path / "none.json")


def test_without_xgboost_nothing_is_learnt_and_it_says_what_to_install(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    judgement = judge(made(8, 30))
    assert not judgement.use and "pip install" in judgement.reason and "xgboost" in judgement.reason
    with pytest.raises(OptionError, match="pip install"):
        Ranker.trained(made(8, 30))
    with pytest.raises(OptionError, match="pip install"):
        Ranker.load(tmp_path / "ranking.json")
    with engine_for("here") as engine:
        ranker, judgement = learned_ranking(LogWriter(tmp_path, ARCH, TARGET).read(), DEVICE, GPU, engine)
    assert ranker is None and "pip install" in judgement.reason


def gemm(rows: int, inner: int = 64, columns: int = 64) -> souffle.TEProgram:
    a, b = te.placeholder((rows, inner), name="a"), te.placeholder((inner, columns), name="b")
    k = te.reduce_axis((0, inner), name="k")
    return souffle.from_te([a, b], [te.compute((rows, columns), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k))])


def candidates(rows: int, count: int) -> tuple:
    """A stage and recipes of it that fit, with what they are lowered to."""
    (task,) = tasks_of([stages_of(gemm(rows), cubin=False, level="V3")])
    func, rng = task.stage.draft.func, random.Random(rows)
    spaces = [space for space in spaces_of(func, REQUEST, TARGET, seed=1) if space.rule in RULES]
    found: dict[str, tuple[Recipe, tuple]] = {}
    while len(found) < count:
        recipe = sampled(rng.choice(spaces), REQUEST.threads, rng)
        schedule = followed(recipe, func, REQUEST)
        if recipe.key in found or isinstance(schedule, Refused):
            continue
        try:
            found[recipe.key] = recipe, lower_stage("stage", schedule, TARGET)
        except LoweringError:
            continue
    return func, list(found.values())


def crowded_seconds(functions: tuple, device: CostDevice) -> float:
    """Of a GPU for the tests, on which tiles side by side hinder each other, which is not predicted."""
    features = features_of(functions, device)
    return math.exp(features[PREDICTED] + 0.4 * features[RESIDENT])


@pytest.fixture(scope="module")
def measured_log(tmp_path_factory):
    """A log of six stages, each with measured records, and some that teach nothing."""
    folder = tmp_path_factory.mktemp("log")
    writer = LogWriter(folder, ARCH, TARGET)
    told: dict[str, tuple] = {}
    for rows in (32, 48, 64, 80, 96, 112):
        func, found = candidates(rows, FEWEST_RECORDS)
        records = []
        for recipe, functions in found:
            seconds = crowded_seconds(functions, DEVICE)
            origin = origin_now("measured", GPU, text=text_of(functions))
            records.append(NewRecord(recipe, [seconds * 1.1, seconds * 0.9], origin))
            told[f"{rows} {recipe.key}"] = (seconds, features_of(functions, DEVICE))
        recipe = found[0][0]
        other = NewRecord(recipe, [1e-9], origin_now("measured", "NVIDIA A10", text=text_of(found[0][1])))
        predicted = NewRecord(recipe, [1e-9], origin_now("predicted", GPU))
        failed = NewRecord(recipe, [], origin_now("measured", GPU, problem="wrong"))
        stale = NewRecord(found[1][0], [1e-9], origin_now("measured", GPU, text="0123456789abcdef"))
        gone = NewRecord(Recipe("no_such_rule", {}), [1e-9], origin_now("measured", GPU))
        writer.append(func, [*records, other, predicted, failed, stale, gone], f"gemm{rows}")
    return folder, told


@pytest.mark.thorough("what a ranking learns and refuses is above; this lowers 300 candidates")
def test_a_log_teaches_what_was_measured_on_one_gpu(measured_log, tmp_path) -> None:
    folder, told = measured_log
    log = LogWriter(folder, ARCH, TARGET).read()
    # Lines in another order, looked at by workers that are other processes, teach the same.
    lines = (folder / ARCH / RECORDS).read_text().splitlines(keepends=True)
    (tmp_path / ARCH).mkdir()
    for path in (folder / ARCH).iterdir():
        (tmp_path / ARCH / path.name).write_bytes(path.read_bytes())
    (tmp_path / ARCH / RECORDS).write_text("".join(random.Random(1).sample(lines, len(lines))))
    with engine_for("local:1") as engine:
        shuffled = LogWriter(tmp_path, ARCH, TARGET).read()
        samples, left_out = measured_samples(shuffled, DEVICE, GPU, engine)
        some, without = measured_samples(shuffled, DEVICE, GPU, engine, most=15)
    with engine_for("here") as engine:
        ranker, judgement = learned_ranking(log, DEVICE, GPU, engine)
        assert measured_samples(log, DEVICE, GPU, engine, most=15) == (some, without)
        assert measured_samples(log, DEVICE, "NVIDIA H200", engine) == ((), {})
        none, unknown = learned_ranking(log, DEVICE, "NVIDIA H200", engine)
    assert left_out == {"its recipe gives another text now": 6, "its schedule does not fit any more": 6}
    assert len(samples) == len(told) and len({one.workload for one in samples}) == 6
    # Stages are told apart by digests here, and by their rows there.
    known = sorted((tuple(row.tolist()), key.split(" ", 1)[1], seconds) for key, (seconds, row) in told.items())
    found = sorted((one.features, one.candidate, one.seconds) for one in samples)
    assert [one[:2] for one in found] == [one[:2] for one in known]
    assert [one[2] for one in found] == pytest.approx([one[2] for one in known])
    assert judgement == judge(samples) and judgement.records == len(samples) and judgement.workloads == 6
    assert judgement.use, judgement.reason
    rows = [features for features, *_ in known]
    assert rank_figures(ranker.scores(rows), np.array([seconds for *_, seconds in known])).correlation > 0.9
    np.testing.assert_array_equal(ranker.scores(rows), Ranker.trained(samples).scores(rows))
    # Of each stage as many; a record more of some would be more than 15.
    assert set(some) < set(samples) and len(some) + without.total() == 6 * 2
    assert len({one.workload for one in some}) == 6
    assert none is None and not unknown.use and unknown.reason.startswith("no stages with")


class Liar:
    """An engine whose workers all give the same, which is looked at as an engine does."""

    def __init__(self, value: object) -> None:
        self.value = value

    def share(self, data: bytes) -> str:
        return "device"

    def submit(self, job: Job, check: Check | None = None) -> Future[Outcome]:
        done: Future[Outcome] = Future()
        problem = check(self.value)
        done.set_result(Outcome(failure=problem) if problem else Outcome(self.value))
        return done


def test_a_worker_that_gives_nonsense_costs_its_records(measured_log) -> None:
    log = LogWriter(measured_log[0], ARCH, TARGET).read()
    count = FEWEST_RECORDS + 2  # of a stage, in two jobs
    for value in ([[1.0] * len(FEATURES)] * (count + 1), [[1.0]] * count, ["fine", 3], None, {"problem": ""}):
        samples, left_out = measured_samples(log, DEVICE, GPU, Liar(value))
        assert samples == () and left_out.total() == 6 * count
        assert all("its worker gave" in reason for reason in left_out), left_out
