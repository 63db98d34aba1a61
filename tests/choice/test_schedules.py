"""The schedules that are known for stages, tried in the kernels that these are in."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import souffle
from souffle.choice import KernelSchedules, Trial
from souffle.codegen.stage_meter import StageMeter
from souffle.cost.kernel import forecast_on
from souffle.decision import Refused
from souffle.options import ON_CHIP, Options, keep, quiet
from souffle.pipeline import stages_of
from souffle.program import TEProgram
from souffle.runtime.explain import predicted_seconds
from souffle.schedule.gpu import GpuRequest, sketch_of
from souffle.schedule.gpu.device import device_for
from souffle.schedule.log import open_log
from souffle.schedule.lower import cuda_target, lower_stage
from souffle.schedule.recipe import Recipe
from souffle.schedule.stage import Stage, Stages, Unit, flat_stages, map_stages
from souffle.schedule.tuned import KnownSchedule, known_schedules, text_of
from souffle.staging import stage_program
from souffle.tuning import LogWriter, NewRecord
from tests.schedule.test_log import origin
from tests.testlib import Builder, assert_on_every_grid, random_program
from tests.thorough import some

pytestmark = pytest.mark.sampled(2)

ARCH = "sm_90"
TARGET = cuda_target(ARCH)
HOW = {"target": "cuda", "arch": ARCH, "device": "cpu", "cubin": False}


def layers(sizes: Sequence[int], rows: int = 24) -> TEProgram:
    """Products one after the other, of so many columns each."""
    b = Builder()
    rng = np.random.default_rng(1)
    x = b.input(rows, sizes[0])
    for before, after in pairwise(sizes):
        weights = b.constant(rng.integers(-3, 4, (before, after)).astype(np.float32))
        x = b.relu(b.matmul(x, weights))
    return b.program(x)


def ways_of(func: object, most: int) -> dict[int, dict[str, int]]:
    """Values of the knobs of a product on CUDA cores, of few and of many tiles, by their tiles."""
    sketch = sketch_of("contraction", func, GpuRequest(ARCH))
    own = dict(sketch.choose())
    near = [{**own, knob.name: value} for knob in sketch.knobs for value in knob.values]
    made = {values_made.tiles: values for values in near if not isinstance(values_made := sketch.make(values), Refused)}
    several = sorted(made)
    return {tiles: made[tiles] for tiles in several[:: max(1, len(several) // most)][:most]}


@pytest.fixture(scope="module")
def start() -> Trial:
    """A network of three products, of which two are equal, as far as it is decided."""
    options = Options(level="V4", arch=ARCH, cubin=False, tuning_log=None, disable=ON_CHIP)
    staged = stage_program(layers([48, 40, 48, 40]), (), options, quiet, keep)
    assert len({stage.draft.digest for stage in flat_stages(staged.request.stages)}) == 2
    return Trial(staged.request, staged.partition, staged.seconds)


@pytest.fixture(scope="module")
def known(start: Trial) -> dict[str, list[KnownSchedule]]:
    found: dict[str, list[KnownSchedule]] = {}
    for stage in flat_stages(start.request.stages):
        if stage.draft.digest not in found:
            sketch = sketch_of("contraction", stage.draft.func, GpuRequest(ARCH))
            schedules = [sketch.make(values) for values in ways_of(stage.draft.func, 3).values()]
            lowered = [KnownSchedule(one, lower_stage("stage", one, TARGET), "as drawn") for one in schedules]
            found[stage.draft.digest] = [KnownSchedule(stage.schedule, stage.functions, "as it was"), *lowered]
            assert len(lowered) >= 2
    return found


class Played:
    """Prices of stages by their functions, and of what two kinds of stages cost each other."""

    def __init__(self, of: Mapping[object, float], pairs: Mapping[frozenset, float]) -> None:
        self.of, self.pairs = of, pairs

    def kernel(self, subprogram: object, request: object, forecast: object) -> SimpleNamespace:
        functions = [stage.functions[0].func for stage in flat_stages(subprogram.stages)]
        seconds = sum(self.of[one] for one in functions)
        seconds += sum(self.pairs.get(frozenset((a, b)), 0.0) for a in functions for b in functions if a is not b)
        return SimpleNamespace(seconds=seconds)

    def like(self, price: object, units: Sequence[Unit], request: object, forecast: object) -> float:
        return self.kernel(SimpleNamespace(stages=units), request, forecast).seconds

    def network(self, trial: Trial) -> float:
        return sum(self.kernel(sub, None, None).seconds for sub in trial.partition.subprograms)


class Meter(StageMeter):
    """One that is without a compiler, and says what it was asked about."""

    def __init__(self) -> None:
        super().__init__(ARCH, TARGET, measure=False)
        self.asked: list[Stage] = []

    def measured(self, units: Sequence[Unit]) -> tuple[Unit, ...]:
        self.asked += flat_stages(units)
        return super().measured(units)


def tried(start: Trial, known: Mapping[str, list[KnownSchedule]], prices: Played) -> tuple[Trial, KernelSchedules]:
    begin = Trial(start.request, start.partition, prices.network(start))
    predicted = partial(forecast_on, ARCH, start.request.analysis.program)
    schedules = KernelSchedules(lambda stage: known[stage.draft.digest], prices, predicted, Meter().measured)
    return schedules.best(begin), schedules


@pytest.mark.parametrize("seed", range(12))
def test_where_stages_do_not_matter_to_each_other_each_has_its_best(seed: int, start: Trial, known: dict) -> None:
    chance = random.Random(seed)
    of = {one.functions[0].func: chance.uniform(1, 9) for several in known.values() for one in several}
    found, schedules = tried(start, known, Played(of, {}))
    stages = flat_stages(start.request.stages)
    least = [min(of[one.functions[0].func] for one in known[stage.draft.digest]) for stage in stages]
    assert found.seconds == pytest.approx(sum(least))
    changed = {one.name for one, new in zip(stages, flat_stages(found.request.stages), strict=True)
               if new.functions[0].func is not one.functions[0].func}  # fmt: skip
    assert len(schedules.decisions) == len({s.draft.digest for s in stages if s.name in changed})


@pytest.mark.parametrize("seed", range(12))
def test_it_is_never_worse_and_what_it_says(seed: int, start: Trial, known: dict) -> None:
    """Where stages take more beside some schedules of others."""
    chance = random.Random(100 + seed)
    of = {one.functions[0].func: chance.uniform(1, 9) for several in known.values() for one in several}
    pairs = {frozenset((a, b)): chance.choice([0.0, 3.0]) for a in of for b in of if a is not b}
    prices = Played(of, pairs)
    found, _ = tried(start, known, prices)
    assert found.seconds <= prices.network(start)
    assert found.seconds == pytest.approx(prices.network(found))
    stages = flat_stages(found.request.stages)
    # Equal stages share functions, and no two functions have a name.
    assert len({stage.functions for stage in stages}) == len({stage.draft.digest for stage in stages})
    assert len({stage.label for stage in stages}) == len({stage.functions for stage in stages})
    assert all(stage.functions[0].schedule is stage.schedule for stage in stages)
    assert found.request.stages == tuple(unit for sub in found.partition.subprograms for unit in sub.stages)


def test_a_compiler_is_asked_about_what_pays_alone(start: Trial, known: dict) -> None:
    of = {one.functions[0].func: 2.0 + n for several in known.values() for n, one in enumerate(several)}
    begin = Trial(start.request, start.partition, Played(of, {}).network(start))
    predicted = partial(forecast_on, ARCH, start.request.analysis.program)
    meter = Meter()
    schedules = KernelSchedules(lambda stage: known[stage.draft.digest], Played(of, {}), predicted, meter.measured)
    assert schedules.best(begin) is begin and not schedules.decisions and not meter.asked
    other = next(several[2] for several in known.values())
    of[other.functions[0].func] = 0.5
    schedules.best(begin)
    assert {one.functions[0].func for one in meter.asked} == {other.functions[0].func}


def test_what_stays_on_chip_of_other_stages_is_taken_from_new_schedules_too(start: Trial, known: dict) -> None:
    """In a loop whose other stages keep their constants in registers or shared memory."""
    beside = [replace(s, resources=s.resources.keeping(24, 1 << 10)) for s in flat_stages(start.request.stages)]
    units = dict(zip(start.request.stages, beside, strict=True))
    subprograms = [replace(one, stages=tuple(map(units.get, one.stages))) for one in start.partition.subprograms]
    partition = replace(start.partition, subprograms=tuple(subprograms))
    constrained = Trial(replace(start.request, stages=tuple(beside)), partition, 0.0)
    of = {one.functions[0].func: 9.0 - n for several in known.values() for n, one in enumerate(several)}
    found, schedules = tried(constrained, known, Played(of, {}))
    assert len(schedules.decisions) == 2
    for new in flat_stages(found.request.stages):
        alone = StageMeter(ARCH, TARGET, measure=False).measured([new])[0].resources
        assert new.resources == alone.keeping(24, 1 << 10)
        assert new.resources.registers == alone.registers + 24
        assert new.resources.shared_bytes == new.functions[0].shared_bytes + (1 << 10)


def one_product() -> tuple[TEProgram, Stage]:
    program = layers([64, 512], rows=48)
    (stage,) = flat_stages(stages_of(program, level="V4", arch=ARCH, cubin=False, tuning_log=None)[0])
    return program, stage


def test_a_record_that_crowds_out_others_is_taken_where_there_are_none(tmp_path: Path) -> None:
    """All take 200 registers, which leaves one block on a multiprocessor: too few for others, but there is no other."""
    program, stage = one_product()
    sketch = sketch_of("contraction", stage.draft.func, GpuRequest(ARCH))
    slow, *others = ways_of(stage.draft.func, 4).values()
    writer = LogWriter(tmp_path, ARCH, TARGET)
    for values in (dict(sketch.choose()), *others):
        record = NewRecord(Recipe("contraction", values), (1e-6,), origin(registers=200))
        writer.append(stage.draft.func, [record])

    def brought(step: str, result: object) -> object:
        """A schedule of one block for all, which a user insists on."""
        if step != "schedule":
            return result
        return Stages(map_stages(result, lambda one: replace(one, schedule=sketch.make(slow))))

    own, tuned = (souffle.compile(program, tuning_log=log, hook=brought, **HOW) for log in (None, tmp_path))
    (refused,) = [one for one in tuned.plan.decisions if one[0] == "tuning" and one[1] != "summary"]
    assert "200 registers leave 1 block" in refused[3]
    (taken,) = [one for one in tuned.plan.decisions if one[0] == "choice" and one[1].startswith("schedule of")]
    assert "schedule from the log" in taken[3]
    assert predicted_seconds(tuned.plan) < predicted_seconds(own.plan)
    assert [stage.registers for kernel in tuned.plan.kernels for stage in kernel.predicted.stages] == [200]
    assert_on_every_grid(tuned.plan, program)


def test_what_was_measured_stays(tmp_path: Path) -> None:
    """A prediction says nothing new of it; and where no log has a stage, nothing is tried."""
    stage = one_product()[1]
    sketch = sketch_of("contraction", stage.draft.func, GpuRequest(ARCH))
    assert known_schedules(stage, stage, open_log(tmp_path, ARCH), device_for(ARCH)) == ()
    writer = LogWriter(tmp_path, ARCH, TARGET)
    several = [Recipe("contraction", values) for values in ways_of(stage.draft.func, 4).values()]
    writer.append(stage.draft.func, [NewRecord(several[0], (1e-6,), origin())])
    writer.append(stage.draft.func, [NewRecord(several[1], (1e-6,), origin(spill_bytes=8))])
    logs = open_log(tmp_path, ARCH)
    exchanged = sketch.make(several[2].knobs)
    brought = known_schedules(stage, replace(stage, schedule=exchanged), logs, device_for(ARCH))[0]
    assert brought.schedule is exchanged and all(f.schedule is exchanged for f in brought.functions)
    own, recorded = known_schedules(stage, stage, logs, device_for(ARCH))
    assert own.schedule is stage.schedule and recorded.schedule.tiles == sketch.make(several[0].knobs).tiles
    on_a_gpu = origin("measured", "NVIDIA H200", text=text_of(recorded.functions))
    writer.append(stage.draft.func, [NewRecord(several[0], (2e-6,), on_a_gpu)])
    logs = open_log(tmp_path, ARCH)
    assert known_schedules(stage, stage, logs, device_for(ARCH))
    taken = replace(stage, schedule=recorded.schedule, functions=recorded.functions)
    assert known_schedules(taken, stage, logs, device_for(ARCH)) == ()


def test_random_programs_with_random_records(tmp_path: Path) -> None:
    """They compute what they did, and some of the records are taken in their kernels."""
    taken = 0
    for seed in some((8, 14, 28), (9, 17, 19)):
        chance = random.Random(seed)
        program = random_program(lambda items, chance=chance: chance.choice(list(items)), chance.randint(5, 14))
        writer = LogWriter(tmp_path / str(seed), ARCH, TARGET)
        stages = stages_of(program, level="V4", arch=ARCH, cubin=False, tuning_log=None)[0]
        for stage in {stage.draft.digest: stage for stage in flat_stages(stages)}.values():
            sketch = sketch_of(stage.schedule.rule, stage.draft.func, GpuRequest(ARCH))
            drawn = [{knob.name: chance.choice(knob.values) for knob in sketch.knobs} for _ in range(4)]
            for values in drawn:
                where = origin(registers=chance.choice([0, 40, 128, 200, 255]))
                if not isinstance(sketch.make(values), Refused):
                    record = NewRecord(Recipe(stage.schedule.rule, values), (chance.choice([1e-7, 5e-6]),), where)
                    writer.append(stage.draft.func, [record])
        network = souffle.compile(program, tuning_log=tmp_path / str(seed), verify="off", **HOW)
        taken += sum(one[0] == "choice" and one[1].startswith("schedule of") for one in network.plan.decisions)
        assert_on_every_grid(network.plan, program)
    assert taken
