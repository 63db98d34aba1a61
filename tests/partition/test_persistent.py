"""The persistent planner cuts where predicted times say that it pays, and nowhere else."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from souffle.partition import PartitionRequest, Subprogram, planner_for
from souffle.partition.planner import depths
from souffle.partition.priced import PricedRun, Segment
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import LoopStage, Stage, flat_stages, map_stages
from tests.kernel.test_loops import asked, layers
from tests.kernel.test_merge import kernel_of
from tests.partition.test_planners import TINY, planned, request, sizes

PERSISTENT = planner_for("persistent")
US = 1e-6
LEAN, HUNGRY = 32, 200
"""Registers that leave four blocks of a TINY multiprocessor resident, as many as its threads do, and one."""


@dataclass
class Played:
    """A forecast by rule: `rule(position, resident blocks, shared bytes)` gives microseconds."""

    stages: tuple[Stage, ...]
    rule: Callable[[int, int, int], float]
    product: str = "played"
    error: float = 1.25
    launch_seconds: float = 2.0 * US
    sync: Callable[[np.ndarray], np.ndarray] = lambda blocks: np.full(np.shape(blocks), 1.0 * US)
    asked: list[int] = field(default_factory=list)

    def grid_sync_seconds(self, blocks: int | np.ndarray) -> float | np.ndarray:
        return self.sync(blocks)

    def seconds(self, stage: Stage, kernel: StageResources) -> float:
        number = self.stages.index(stage)
        self.asked.append(number)
        blocks = min(TINY.resident_blocks(kernel.threads, kernel.shared_bytes, kernel.registers).values())
        return self.rule(number, blocks, kernel.shared_bytes) * US


def weighed(
    registers: list[int],
    rule: Callable[[int, int, int], float],
    shared: dict[int, int] | None = None,
    kinds: str | None = None,
    tiles: list[int] | None = None,
    **options,
) -> PartitionRequest:
    """A chain of products with these registers."""
    given = request(kinds or "p" * len(registers), tiles or [8] * len(registers), shared, dict(enumerate(registers)))
    return replace(given, forecast=Played(given.stages, rule, **options))


def throttled(slow: float, fast: float) -> Callable[[int, int, int], float]:
    """Every stage takes `slow` with one resident block, else `fast`."""
    return lambda number, blocks, shared: slow if blocks == 1 else fast


def test_equal_costs_cut_nothing() -> None:
    parts, (kept, refused) = planned(PERSISTENT, weighed([LEAN, HUNGRY, LEAN], lambda *_: 50.0))
    assert sizes(parts) == [3]
    # Three stages, two barriers, a launch.
    assert kept.accepted and kept.subject == "no cut" and "predicted 154.0 µs on played as one kernel" in kept.reason
    assert not refused.accepted and refused.subject == "cut before matmul1"
    assert "it would give 155.0 µs in place of 154.0 µs, since stages would take 0.0 µs less" in refused.reason
    assert "a launch costs 2.0 µs, a grid sync 1.0 µs" in refused.reason and "factor" not in refused.reason


def test_a_wide_stage_is_freed_of_a_neighbour_s_registers() -> None:
    given = weighed([HUNGRY, LEAN, LEAN], throttled(41.2, 25.0))
    parts, decisions = planned(PERSISTENT, given)
    assert sizes(parts) == [1, 2]
    cut, total, refused, held = decisions
    assert cut.accepted and cut.subject == "cut before matmul1 (Matmul matmul1)"
    assert (
        f"{HUNGRY} registers of matmul0 leave 1 resident block on a multiprocessor in place of 4; matmul1 (8 tiles) "
        "would take 41.2 µs instead of 25.0 µs, all stages 32.4 µs more; a launch costs 2.0 µs, a grid sync 1.0 µs"
    ) == cut.reason
    assert total.subject == "2 kernels"
    assert "predicted 96.2 µs on played in place of 127.6 µs as one kernel" in total.reason
    assert not refused.accepted and refused.subject == "cut before matmul2"
    assert "in place of 96.2 µs" in refused.reason
    assert held.subject == "2 resident blocks for the kernel of matmul2" and parts[1].blocks_per_sm == 2
    assert held.reason == "its stages leave room for 4, but are predicted to take no longer with 2"


def test_the_throttling_stage_may_stand_anywhere() -> None:
    for position in range(4):
        registers = [LEAN] * 4
        registers[position] = HUNGRY
        parts, _ = planned(PERSISTENT, weighed(registers, throttled(400.0, 100.0)))
        assert sizes(parts) == [n for n in (position, 1, 3 - position) if n]


def test_shared_memory_throttles_too() -> None:
    given = weighed([LEAN, LEAN], throttled(100.0, 20.0), shared={1: 60 * 1024})
    parts, (cut, *_) = planned(PERSISTENT, given)
    assert sizes(parts) == [1, 1]
    assert f"{60 * 1024} bytes of shared memory of matmul1 leave 1 resident block" in cut.reason


def test_shared_memory_takes_from_the_cache_without_taking_blocks() -> None:
    pool = 20 * 1024
    given = weighed([LEAN, LEAN], lambda number, blocks, shared: 90.0 if shared > number * pool else 30.0, {1: pool})
    parts, (cut, *_) = planned(PERSISTENT, given)
    assert sizes(parts) == [1, 1]
    assert f"{pool} bytes of shared memory of matmul1 leave less of the L1 cache to each of 4 resident" in cut.reason


def test_a_gain_within_the_model_s_error_is_not_believed() -> None:
    """A quarter slower is what the model may be wrong by; that a cut would pay is then said, and it is not made."""
    parts, (_, refused) = planned(PERSISTENT, weighed([HUNGRY, LEAN], throttled(1000.0, 801.0)))
    assert sizes(parts) == [2]
    assert "stages would take 199.0 µs less" in refused.reason
    assert "a cut has to gain more than the factor 1.25 by which half of all predictions are off" in refused.reason
    parts, _ = planned(PERSISTENT, weighed([HUNGRY, LEAN], throttled(1000.0, 790.0)))
    assert sizes(parts) == [1, 1]
    parts, _ = planned(PERSISTENT, weighed([HUNGRY, LEAN], throttled(1000.0, 801.0), error=1.0))
    assert sizes(parts) == [1, 1]


def test_a_gain_below_a_launch_is_none() -> None:
    for slow, expected in ((3.0, [2]), (5.0, [1, 1])):
        parts, _ = planned(
            PERSISTENT, weighed([HUNGRY, LEAN], throttled(slow, 1.0), error=1.0, sync=lambda blocks: 0.0 * blocks)
        )
        assert sizes(parts) == expected


def test_a_barrier_that_costs_more_than_a_launch_is_worth_a_cut() -> None:
    parts, _ = planned(PERSISTENT, weighed([LEAN] * 3, lambda *_: 1.0, sync=lambda blocks: 0.0 * blocks + 3.0 * US))
    assert sizes(parts) == [1, 1, 1]


def test_a_barrier_of_many_blocks_costs_what_many_blocks_cost() -> None:
    """As many blocks wait as are resident, four on each of four multiprocessors, and no more than there are tiles."""
    each_block = {"sync": lambda blocks: blocks * 0.1 * US}
    for tiles, expected in (([40, 40, 40], 5.0 + 2 * 1.6), ([3, 5, 2], 5.0 + 2 * 0.5), ([1, 1, 1], 5.0 + 2 * 0.1)):
        given = weighed([LEAN] * 3, lambda *_: 1.0, tiles=tiles, **each_block)
        run = PricedRun(given.stages, given, given.forecast)
        assert run.seconds([run.whole]) == pytest.approx(expected * US)
    # The wide stage goes for the barriers that it makes dear: 19 of 1.6 or 18 of 0.1 and a launch.
    parts, _ = planned(PERSISTENT, weighed([LEAN] * 20, lambda *_: 1.0, tiles=[40] + [1] * 19, **each_block))
    assert sizes(parts) == [1, 19]


def cost(run: PricedRun, ends: tuple[int, ...], given: PartitionRequest) -> float:
    """What the module of prices says that a segmentation costs, added up stage by stage."""
    played = given.forecast
    depth = depths(run.units)
    total, first = 0.0, 0
    for end in (*ends, len(run.units)):
        used = [stage.resources for stage in run.units[first:end]]
        kernel = StageResources(max(u.registers for u in used), 0, max(u.shared_bytes for u in used), 256, 0, True)
        blocks = min(TINY.resident_blocks(256, kernel.shared_bytes, kernel.registers).values()) * TINY.sm_count
        blocks = min(blocks, max(unit.schedule.tiles for unit in run.units[first:end]))
        total += played.launch_seconds + (depth[end - 1] - depth[first]) * played.sync(blocks) / played.error
        for stage in run.units[first:end]:
            alone = played.seconds(stage, stage.resources)
            total += max(0.0, played.seconds(stage, kernel) / played.error - alone)
        first = end
    return total


@pytest.mark.parametrize("seed", range(25))
def test_no_other_segmentation_is_better(seed: int) -> None:
    """Times rise and fall with occupancy as they please: the best of all 2^(n-1) segmentations is found."""
    rng = random.Random(seed)
    count = rng.randint(2, 8)
    table = [{blocks: rng.uniform(1, 12) for blocks in range(1, 9)} for _ in range(count)]
    shared = {i: rng.choice((0, 4096, 20_000, 40_000)) for i in range(count)}
    registers = [rng.choice((24, 64, 96, 160, 220)) for _ in range(count)]
    waits = np.array([0.0, *(rng.uniform(0.2, 6.0) * US for _ in range(32))])
    given = weighed(
        registers,
        lambda n, blocks, pool: table[n][blocks] + pool / 2e4,
        shared,
        tiles=[rng.randint(1, 40) for _ in range(count)],
        error=1.1,
        sync=waits.__getitem__,
    )
    run = PricedRun(given.stages, given, given.forecast)
    ends = tuple(segment.first for segment in run.best()[1:])
    every = itertools.chain.from_iterable(itertools.combinations(range(1, count), n) for n in range(count))
    least = min(cost(run, other, given) for other in every)
    assert cost(run, ends, given) == pytest.approx(least, abs=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_the_refused_cut_is_the_best_one(seed: int) -> None:
    rng = random.Random(seed)
    table = [[rng.uniform(1, 50) for _ in range(9)] for _ in range(6)]
    waits = np.array([0.0, *(rng.uniform(0.2, 6.0) * US for _ in range(32))])
    registers, tiles = [rng.choice((24, 96, 220)) for _ in range(6)], [rng.randint(1, 40) for _ in range(6)]
    given = weighed(registers, lambda n, blocks, _: table[n][blocks], tiles=tiles, sync=waits.__getitem__)
    run = PricedRun(given.stages, given, given.forecast)
    found = run.best_split([run.whole])
    least = min(run.seconds([Segment(0, at - 1), Segment(at, 5)]) for at in range(1, 6))
    assert found is not None and run.seconds(found) == pytest.approx(least)


def test_a_thousand_stages_cost_a_prediction_each_for_each_kind_of_kernel() -> None:
    rng = random.Random(0)
    registers = [rng.choice((24, 64, 96, 160, 220)) for _ in range(1000)]
    program = request("r" * 1000, [1] * 1000, registers=dict(enumerate(registers)))
    numbers = {stage: n for n, stage in enumerate(program.stages)}

    class Counting(Played):
        def seconds(self, stage: Stage, kernel: StageResources) -> float:
            self.asked.append(numbers[stage])
            return (1 + kernel.registers / 100) * US

    played = Counting(program.stages, lambda *_: 0.0)
    run = PricedRun(program.stages, replace(program, forecast=played), played)
    segments = run.best()
    assert sum(len(segment.numbers) for segment in segments) == 1000
    assert len(played.asked) <= 1000 * len(set(registers))


def test_a_kernel_is_held_to_the_fewest_blocks_that_are_predicted_to_be_as_fast() -> None:
    def blocks(rule: Callable[[int, int, int], float]) -> Subprogram:
        (part,), _ = planned(PERSISTENT, weighed([LEAN, LEAN], rule))
        return part

    assert blocks(lambda *_: 5.0).blocks_per_sm == 1
    assert blocks(lambda _, blocks, __: 10.0 / blocks).blocks_per_sm == 4
    assert blocks(lambda _, blocks, __: 10.0 / min(blocks, 2)).blocks_per_sm == 2
    (part,), decisions = planned(PERSISTENT, weighed([LEAN], lambda *_: 5.0))
    assert part.blocks_per_sm == 1 and not any("resident block" in d.subject for d in decisions)


def test_without_predictions_or_measured_registers_nothing_is_cut() -> None:
    given = weighed([HUNGRY, LEAN], throttled(400.0, 1.0))
    guessed = tuple(replace(s, resources=replace(s.resources, measured=False)) for s in given.stages)
    for other, reason in (
        (replace(given, forecast=None), f"no device file describes {TINY.arch}"),
        (replace(given, stages=guessed), "assumed"),
    ):
        parts, (kept, refused) = planned(PERSISTENT, other)
        assert sizes(parts) == [2] and parts[0].blocks_per_sm == 1
        assert kept.subject == "no cut" and "stages loop over their tiles in waves of" in kept.reason
        assert not refused.accepted and reason in refused.reason


def test_operators_that_are_no_tes_bound_the_runs_that_are_weighed() -> None:
    given = weighed([LEAN, HUNGRY, LEAN, LEAN, HUNGRY], throttled(400.0, 100.0), kinds="ppspp")
    parts, decisions = planned(PERSISTENT, given)
    assert sizes(parts) == [1, 1, 1, 1, 1]
    assert tuple(s for part in parts for s in flat_stages(part.stages)) == given.stages
    assert sum("no TE" in d.reason for d in decisions) == 2
    assert sum(bool(re.search("registers of .* leave 1 resident", d.reason)) for d in decisions) == 2


def test_a_loop_is_priced_step_by_step_with_its_barriers_and_stays_whole() -> None:
    # Products of several tiles, each of which reads all of the one before.
    program = layers(5, width=300)
    given = asked(program)
    lean = StageResources(LEAN, 0, 0, 256, 0, True)
    stages = map_stages(given.stages, lambda stage: replace(stage, resources=lean))
    played = Played(flat_stages(stages), lambda *_: 7.0)
    given = replace(given, stages=stages, device=TINY, forecast=played)
    runs = sum(unit.loop.steps * len(unit.stages) if isinstance(unit, LoopStage) else 1 for unit in given.stages)
    (kernel,) = kernel_of(program).plan.kernels
    run = PricedRun(given.stages, given, played)
    assert runs > len(given.stages) and kernel.grid_syncs > 5
    assert run.seconds([run.whole]) == pytest.approx((7.0 * runs + 2.0 + 1.0 * kernel.grid_syncs) * US)
    parts, _ = planned(PERSISTENT, given)
    assert [unit for part in parts for unit in part.stages] == list(given.stages)
