"""Independent stages side by side: the same bits whoever computes which tile, proven; priced as tiles share units."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest

import souffle
from benchmarks.side_by_side import branches, compiled, forced, one_program
from souffle import models
from souffle.cost.kernel import KernelForecast
from souffle.cost.predict import TileClocks
from souffle.cost.side_by_side import clocks_side_by_side, multiprocessor_queues
from souffle.kernel import kernel_plan
from souffle.kernel.calls import CallPlan
from souffle.kernel.ways import arrangements
from souffle.mutation.mutants import Mutations
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.trial import Trials, described, inputs_of, misses
from souffle.options import LEVELS, Options
from souffle.pipeline import compile_cuda
from souffle.schedule.lower.shares import ALL_WORKERS, Share
from souffle.schedule.stage import flat_stages
from souffle.verify import PROVEN, REFUTED
from souffle.verify.saved import verify_plan
from tests.kernel.residents import gated_beside_a_product
from tests.testlib import inputs_for
from tests.thorough import sized, some

pytestmark = pytest.mark.sampled(2)

_SEEDS = some((0, 14), (3, 5, 9))


@pytest.mark.parametrize("seed", _SEEDS)
def test_random_arrangements_give_the_same_bits(seed: int) -> None:
    """``benchmarks.side_by_side siege`` has a hundred, and more mutants."""
    found = one_program(seed)
    assert found["verdict"] == PROVEN and found["other_bits"] == 0, found


def test_each_change_that_matters_is_refuted() -> None:
    program = branches(503)
    with forced(503, 2):
        net = compiled(program, verify="off")
    mutations = Mutations(net)
    with Sandbox() as sandbox:
        trials = Trials(mutations, inputs_of(net.plan, inputs_for(program)), sandbox)
        found = [trials.run(mutation) for mutation in mutations.sample(sized(5, 12), seed=1, kinds=("share",))]
    assert not misses(found), "\n".join(map(described, misses(found)))
    refuted = [trial for trial in found if trial.verdict == REFUTED]
    assert len(refuted) >= sized(3, 6) and sum(trial.changed for trial in found) >= sized(1, 4)


@pytest.mark.parametrize("seed", [8, 9])
def test_what_needs_shared_memory_does_not_wait_until_something_stays_there(seed: int) -> None:
    """The rows that stay lie behind what stages need between those that make and read them, not behind the product."""
    program = gated_beside_a_product()
    with forced(seed, 1):
        net = compiled(program, disable=["channels", "attention"])
    assert any(d.stage == "resident" and d.accepted for d in net.plan.decisions)
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate


def test_a_saved_network_is_proven_again(tmp_path) -> None:
    program = branches(5)
    with forced(5, 2):
        net = souffle.compile(program, target="cuda", device="cpu", arch="sm_86", cubin=False, waits="barriers")
    net.save(tmp_path / "net.souffle")
    loaded = souffle.load(tmp_path / "net.souffle", device="cpu")
    assert verify_plan(loaded.plan).verdict == PROVEN
    inputs = inputs_for(program)
    for name, value in net(inputs).items():
        np.testing.assert_array_equal(loaded(inputs)[name], value)


@pytest.mark.thorough("tests/kernel/test_block_parts.py has it in small")
def test_what_is_predicted_to_pay_is_taken_at_v4() -> None:
    program = souffle.import_onnx(models.build("nmt", size="paper"))
    options = {"arch": "sm_90", "cubin": False, "verify": "memory"}
    net, without = (compile_cuda(program, level="V4", disable=off, **options).plan for off in ((), ("hfuse",)))
    taken = [d for d in net.decisions if d.stage == "hfuse" and d.accepted]
    assert taken and not [d for d in without.decisions if d.stage == "hfuse"]
    assert any("gru_gates_Gemm" in d.subject and "tile 0 on worker" in d.subject for d in taken), taken
    assert all("µs side by side" in d.reason for d in taken)
    (kernel,), (plain,) = net.kernels, without.kernels
    assert kernel.predicted.seconds < 0.95 * plain.predicted.seconds and kernel.grid_syncs == plain.grid_syncs
    assert net.certificate.verdict == PROVEN
    sharing = [Options(level=level).waiting.side_by_side for level in LEVELS]
    assert sharing == [False] * (len(LEVELS) - 1) + [True]


def test_each_tile_has_one_worker() -> None:
    rng = random.Random(0)
    for _ in range(300):
        teams, blocks, tiles = rng.randint(1, 6), rng.randint(1, 40), rng.randint(0, 300)
        first = rng.randrange(teams)
        share = Share(first, rng.randint(0, teams - first), rng.choice((0, rng.randint(1, 500))))
        share = share if share.teams else Share(shift=share.shift)
        expected = np.zeros((teams, blocks), np.int64)
        own = [(t, b) for t in range(share.team, share.team + (share.teams or teams)) for b in range(blocks)]
        for tile in range(tiles):
            expected[own[(tile + share.shift) % len(own)]] += 1
        np.testing.assert_array_equal(share.tiles_of(tiles, blocks, teams), expected, err_msg=f"{share} {tiles}")


def test_the_ways_to_arrange_two_or_three_stages() -> None:
    ways = list(arrangements((5, 7, 2), (0, 2), 4))
    assert ways[0] == (ALL_WORKERS, Share(shift=5), Share(shift=12))
    assert ways[1:] == [(Share(0, n), ALL_WORKERS, Share(n, 4 - n)) for n in (1, 2, 3)]
    three = [way for way in arrangements((5, 7, 2), (0, 1, 2), 4) if all(share.teams for share in way)]
    assert {tuple(share.teams for share in way) for way in three} == {(1, 1, 2), (1, 2, 1), (2, 1, 1)}
    assert len(list(arrangements((5, 7), (0, 1), 1))) == 1


# The price


def _tile(chain: float, **units: float) -> TileClocks:
    return TileClocks(
        {name: units.get(name, 0.0) for name in ("issue", "tensor", "l2_port")}, chain, 0, 0, 0, 0, 0, 0, 0
    )


def test_equal_tiles_take_a_wave_and_tiles_of_other_units_less_than_their_sum() -> None:
    product, rows = _tile(1000, tensor=700, issue=200), _tile(1200, l2_port=500, issue=100)
    for tile in (product, rows):
        for resident in (1, 2, 3, 4):
            wave = max(resident * tile.busy, tile.chain)
            assert clocks_side_by_side([tile], [(3,)] * resident) == pytest.approx(3 * wave)
    after = clocks_side_by_side([product, rows], [(2, 2), (2, 2)])
    assert after == pytest.approx(2 * max(1400, 1000) + 2 * max(1000, 1200))
    beside = clocks_side_by_side([product, rows], [(4, 0), (0, 4)])
    # Neither waits for the other's unit.
    assert beside == pytest.approx(max(4 * 1000, 4 * 1200)) and beside < after
    same = clocks_side_by_side([product, product], [(4, 0), (0, 4)])
    assert same == pytest.approx(4 * 1400)


def test_the_price_is_that_of_small_steps() -> None:
    """A simulation in steps of a clock, in which each tile does what its units leave it."""
    rng = random.Random(1)
    for _ in range(12):
        tiles = []
        for _ in range(rng.randint(1, 3)):
            chain = rng.randint(200, 600)
            tiles.append(_tile(chain, **{u: rng.randint(0, chain) for u in ("issue", "tensor", "l2_port")}))
        queues = [tuple(rng.randint(0, 3) for _ in tiles) for _ in range(rng.randint(1, 4))]
        expected = _in_steps(tiles, queues)
        assert clocks_side_by_side(tiles, queues) == pytest.approx(expected, abs=4 * sum(map(sum, queues)) + 2)


def _in_steps(tiles: list[TileClocks], queues: list[tuple[int, ...]]) -> int:
    rest = [[stage for stage, count in enumerate(queue) for _ in range(count)] for queue in queues]
    done, clocks = [0.0] * len(rest), 0
    while any(rest):
        running = [number for number, queue in enumerate(rest) if queue]
        wanted = [tiles[rest[number][0]] for number in running]
        full = max(sum(tile.units[u] / tile.chain for tile in wanted) for u in wanted[0].units)
        for number, tile in zip(running, wanted, strict=True):
            done[number] += 1 / max(1.0, full) / tile.chain
            if done[number] >= 1.0:
                rest[number].pop(0)
                done[number] = 0.0
        clocks += 1
    return clocks


def test_multiprocessors_have_the_queues_of_their_workers() -> None:
    had = [share.tiles_of(104, 132, 2) for share in (ALL_WORKERS, Share(shift=104))]
    assert sorted(multiprocessor_queues(had, 132)) == [((0, 1), (0, 0)), ((1, 0), (0, 0)), ((1, 0), (0, 1))]
    for blocks, multiprocessors, first in ((5, 2, 0), (264, 132, 0), (264, 132, 60), (7, 7, 3)):
        shares = [ALL_WORKERS, Share(shift=9)]
        queues = multiprocessor_queues([share.tiles_of(50, blocks, 1) for share in shares], multiprocessors, first)
        assert max(map(len, queues)) == -(-blocks // multiprocessors)
        assert all(one != other for one, other in combinations(queues, 2))
    # The first ten of twenty blocks: two on each of five multiprocessors, or one on each of ten.
    tiles = ALL_WORKERS.tiles_of(10, 20, 1)
    assert multiprocessor_queues([tiles], 10, 5) == [((0,), (0,)), ((1,), (1,))]
    assert multiprocessor_queues([tiles], 10) == [((1,), (0,))]


def test_a_stage_alone_takes_what_it_is_predicted_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The price of several is that of :mod:`souffle.cost.predict` for one, in any launch."""
    seen: list[tuple[CallPlan, KernelForecast]] = []

    def spied(plan: CallPlan, forecast: KernelForecast, teams: int, planned: object, **parts: bool) -> CallPlan:
        seen.append((plan, forecast))
        return plan

    monkeypatch.setattr(kernel_plan, "side_by_side", spied)
    program = souffle.import_onnx(models.build("mmoe", size="paper"))
    compile_cuda(program, level="V4", arch="sm_90", cubin=False, verify="off")
    plan, forecast = seen[-1]
    block = forecast.together(flat_stages(plan.stages))
    singles = [stage for stage in flat_stages(plan.stages) if len(stage.functions) == 1 and stage.kept is None]
    assert len(singles) >= 2
    for stage in singles:
        for teams, blocks, waits in ((1, 132, True), (2, 132, True), (1, 264, True), (1, 264, False), (1, 100, False)):
            most = teams * blocks
            if most > forecast.resident(block) * forecast.device.sm_count:
                continue
            launch = {"grid": blocks if waits else 0, "teams": teams}
            expected = forecast.seconds(stage, block, most, **launch)
            alone = forecast.side_by_side_seconds(((stage, ALL_WORKERS),), block, most, blocks, teams, waits)
            assert alone == pytest.approx(expected, rel=1e-9), (stage.name, stage.schedule.tiles, launch)
