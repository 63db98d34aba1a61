"""Where kernels begin and end, under the paper's rule and under the persistent one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from souffle.analysis import analyze
from souffle.decision import Decision
from souffle.errors import OptionError
from souffle.options import Options
from souffle.partition import ONE_KERNEL_PER_STAGE, PLANNERS, PartitionRequest, Planner, Subprogram, planner_for
from souffle.partition.planner import breadth_first
from souffle.pipeline import check_names, compile_cuda
from souffle.program import Tensor, TEProgram
from souffle.schedule.gpu.device import ASSUMED_REGISTERS, DEVICES, GpuDevice, device_for
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import Stage, draft_stage
from tests.testlib import Builder

TINY = GpuDevice("sm_90", "tiny", 4, 100 * 1024, 64 * 1024, 1024, 8)
WAVE = TINY.blocks_per_wave(256, 0, ASSUMED_REGISTERS)
SOUFFLE, PERSISTENT = planner_for("souffle"), planner_for("persistent")


@dataclass(frozen=True)
class Tiles:
    """What the partition needs to know of a schedule."""

    tiles: int
    threads: int = 256


def chain(kinds: str) -> TEProgram:
    """One TE a letter: a compute-intensive product, a memory-intensive relu, a sort that is no TE."""
    b = Builder()
    x = b.input(4, 6)
    for kind in kinds:
        if kind == "p":
            x = b.matmul(x, b.constant(np.ones((6, 6), np.float32)))
        else:
            x = b.relu(x) if kind == "r" else b.extern_sort(x)
    return b.program(x)


def request(
    kinds: str,
    tiles: list[int],
    shared: dict[int, int] | None = None,
    registers: dict[int, int] | None = None,
    device: GpuDevice = TINY,
) -> PartitionRequest:
    """Stages of one TE each, with these tiles; bytes and registers by position, registers assumed where not given."""
    program = chain(kinds)

    def resources(number: int) -> StageResources:
        used = StageResources.assumed((shared or {}).get(number, 0), 256)
        count = (registers or {}).get(number)
        return used if count is None else replace(used, registers=count, measured=True)

    stages = tuple(
        Stage(draft_stage([te_], program), Tiles(count), resources=resources(number))
        for number, (te_, count) in enumerate(zip(program.tes, tiles, strict=True))
    )
    return PartitionRequest(stages, device, analyze(program))


def sizes(subprograms: tuple[Subprogram, ...]) -> list[int]:
    return [len(s.stages) for s in subprograms]


def cuts(decisions: tuple[Decision, ...]) -> list[Decision]:
    return [d for d in decisions if d.accepted and d.subject.startswith("cut before")]


def test_below_v3_every_stage_is_a_kernel() -> None:
    parts, decisions = planned(ONE_KERNEL_PER_STAGE, request("ppp", [1, 2, 3]))
    assert sizes(parts) == [1, 1, 1] and not decisions
    assert parts[1].name == "matmul1"


def test_stages_of_one_wave_share_a_kernel() -> None:
    parts, (decision,) = planned(SOUFFLE, request("ppp", [1, WAVE, 2]))
    assert sizes(parts) == [3] and parts[0].name == "matmul2"
    assert decision.subject == "no cut" and f"{WAVE} of matmul1, fit in one wave of {WAVE}" in decision.reason


def test_a_first_stage_of_more_blocks_than_a_wave_is_said_to_take_turns() -> None:
    parts, decisions = planned(SOUFFLE, request("pr", [WAVE + 1, 2]))
    assert sizes(parts) == [2]
    (decision,) = (d for d in decisions if d.subject == "no cut")
    assert decision.reason.startswith("tiles take turns") and f"{WAVE + 1} blocks of matmul0 exceed" in decision.reason


def test_a_stage_of_more_blocks_than_a_wave_is_cut_off_with_the_figures() -> None:
    parts, decisions = planned(SOUFFLE, request("ppp", [1, WAVE + 1, 2]))
    assert sizes(parts) == [1, 1, 1]
    before, after = decisions
    assert before.stage == "partition" and before.subject == "cut before matmul1 (Matmul matmul1)"
    assert f"{WAVE + 1} blocks of matmul1 exceed the {WAVE} of one wave (4 SMs × {WAVE // 4} resident" in before.reason
    assert f"bound by registers: {ASSUMED_REGISTERS} registers of matmul0 (assumed)" in before.reason
    assert "cut before matmul2" in after.subject


def test_measured_registers_make_a_wave_smaller_or_larger_and_are_said_to_be_measured() -> None:
    (few, many) = (dict.fromkeys(range(2), count) for count in (32, 200))
    assert TINY.blocks_per_wave(256, 0, 32) == 16 and TINY.blocks_per_wave(256, 0, 200) == 4
    parts, (decision,) = planned(SOUFFLE, request("pp", [1, 16], registers=few))
    assert sizes(parts) == [2] and "32 registers of matmul0 (measured)" in decision.reason
    parts, (decision,) = planned(SOUFFLE, request("pp", [1, 5], registers=many))
    assert sizes(parts) == [1, 1]
    assert "5 blocks of matmul1 exceed the 4 of one wave" in decision.reason and "(measured)" in decision.reason
    parts, (decision,) = planned(SOUFFLE, request("pp", [5, 1], registers={0: 32, 1: 200}))
    assert sizes(parts) == [1, 1] and "200 registers of matmul1 (measured)" in decision.reason


def test_shared_memory_makes_a_wave_smaller() -> None:
    pool = 60 * 1024
    assert TINY.blocks_per_wave(256, pool, ASSUMED_REGISTERS) == 4
    parts, (decision,) = planned(SOUFFLE, request("pp", [5, 1], shared={1: pool}))
    assert sizes(parts) == [1, 1]
    assert "bound by shared memory" in decision.reason
    assert f"{pool} bytes of shared memory of matmul1" in decision.reason
    assert sizes(planned(SOUFFLE, request("pp", [4, 1], shared={1: pool}))[0]) == [2]


@pytest.mark.parametrize("kinds", ["rrr", "prr", "rpr", "rrp"])
def test_memory_intensive_stages_are_never_cut_off(kinds: str) -> None:
    tiles = [1 if kind == "p" else 100 * WAVE for kind in kinds]
    parts, decisions = planned(SOUFFLE, request(kinds, tiles))
    assert sizes(parts) == [3] and not cuts(decisions)
    refused = [d for d in decisions if not d.accepted]
    assert len(refused) == kinds[1:].count("r")
    assert all(f"a wave of {WAVE} blocks loops over its {100 * WAVE} tiles" in d.reason for d in refused)


def test_a_memory_intensive_stage_takes_its_part_of_the_wave() -> None:
    """It joins, and the next compute-intensive stage finds the wave that it has left."""
    pool = {1: 60 * 1024}
    parts, decisions = planned(SOUFFLE, request("pr", [WAVE, 1], shared=pool))
    assert sizes(parts) == [2]
    refused, _ = decisions
    assert not refused.accepted and f"{WAVE} tiles of matmul0 take turns on 4 blocks" in refused.reason
    parts, decisions = planned(SOUFFLE, request("prp", [1, 1, 5], shared=pool))
    assert sizes(parts) == [2, 1]
    (cut,) = cuts(decisions)
    assert "cut before matmul2" in cut.subject and f"{60 * 1024} bytes of shared memory of relu1" in cut.reason
    assert sizes(planned(SOUFFLE, request("prp", [1, 1, 5]))[0]) == [3]


def test_the_first_stage_after_a_cut_counts_alone() -> None:
    parts, _ = planned(SOUFFLE, request("pppp", [5, 1, 5, 5], shared={1: 60 * 1024}))
    assert sizes(parts) == [1, 1, 2]


def test_persistent_tiles_are_not_cut() -> None:
    parts, (decision, refused) = planned(PERSISTENT, request("prp", [1, 100 * WAVE, 200 * WAVE]))
    assert sizes(parts) == [3] and not refused.accepted
    assert decision.subject == "no cut" and f"waves of {WAVE} blocks" in decision.reason
    assert "(assumed)" in decision.reason


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_an_operator_that_is_no_te_is_a_kernel_of_its_own(planner: Planner) -> None:
    parts, decisions = planned(planner, request("psrp", [1, 1, 1, 1]))
    assert sizes(parts) == [1, 1, 2]
    assert len(cuts(decisions)) == 2 and all("no TE" in d.reason for d in cuts(decisions))
    assert "cut before sort1" in decisions[0].subject
    assert "cut before relu2" in decisions[1].subject


def planned(planner: Planner, given: PartitionRequest) -> tuple[tuple[Subprogram, ...], tuple[Decision, ...]]:
    """The kernels, and why they are so."""
    partition = planner.plan(given)
    return partition.subprograms, partition.decisions


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_every_stage_is_kept_in_order(planner: Planner) -> None:
    given = request("prprsp", [1, 40, 3, 90, 2, 2], shared={2: 9000, 5: 50_000})
    parts, _ = planned(planner, given)
    assert tuple(s for part in parts for s in part.stages) == given.stages
    assert planned(planner, PartitionRequest((), TINY, given.analysis)) == ((), ())


def test_stages_are_taken_breadth_first() -> None:
    b = Builder()
    x = b.input(4, 6)
    sides: list[Tensor] = []
    for _ in range(2):
        sides.append(b.tanh(b.relu(x)))
    program = b.program(b.plus(*sides))
    stages = [Stage(draft_stage([t], program), Tiles(1)) for t in program.tes]
    ordered = breadth_first(stages)
    assert [stages.index(s) for s in ordered] == [0, 2, 1, 3, 4]


def test_planners_are_found_by_name() -> None:
    assert all(planner_for(name) is planner and planner.name == name for name, planner in PLANNERS.items())
    names = ", ".join(PLANNERS)
    for refused in (lambda: planner_for("greedy"), lambda: check_names(Options(partition="greedy"))):
        with pytest.raises(OptionError, match=f"partition='greedy' is not valid; choose one of {names}, or name your"):
            refused()


def test_a_wave_is_bounded_by_threads_registers_memory_and_blocks() -> None:
    h200 = device_for("sm_90")
    assert h200.blocks_per_wave(256, 0, 128) == 2 * 132
    assert h200.blocks_per_wave(256, 0, 32) == 8 * 132
    assert h200.blocks_per_wave(32, 0, 16) == 32 * 132
    assert h200.blocks_per_wave(256, 200 * 1024, 128) == 132
    limits = h200.resident_blocks(256, 50 * 1024, 64)
    assert limits == {"registers": 4, "shared memory": 4, "threads": 8, "block slots": 32}
    assert all(d.blocks_per_wave(1024, d.shared_per_block, 64) >= d.sm_count for d in DEVICES.values())


def test_registers_are_given_to_whole_warps_in_eighths_a_thread() -> None:
    """A thread of 73 registers gets 80: there is room for 25 such warps, of which 24 make four equal parts."""
    h200 = device_for("sm_90")
    assert h200.resident_blocks(256, 0, 73)["registers"] == 3
    assert h200.resident_blocks(256, 0, 80)["registers"] == 3 and h200.resident_blocks(256, 0, 81)["registers"] == 2
    assert h200.resident_blocks(32, 0, 73)["registers"] == 24


def test_a_kernel_is_held_to_the_blocks_that_its_plan_counts_on() -> None:
    """Merged, stages may take more registers than alone: the compiler is told how many blocks must be resident."""
    given = request("ppp", [1, 2 * TINY.sm_count + 1, 3], registers=dict.fromkeys(range(3), 64))
    (part,), _ = planned(SOUFFLE, given)
    assert part.blocks_per_sm == 3
    (part,), _ = planned(PERSISTENT, given)
    assert part.blocks_per_sm == 1
    alone, *_ = planned(SOUFFLE, request("p", [100 * TINY.sm_count]))[0]
    assert alone.blocks_per_sm == 1


def test_a_planner_may_stand_outside_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halves.py").write_text(HALVES)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = request("pppp", [1, 1, 1, 1])
    for name in ("halves:Halves", "halves:planner"):
        assert sizes(planned(planner_for(name), given)[0]) == [2, 2]
    plan = compile_cuda(chain("pp"), level="V3", partition="halves:planner", cubin=False).plan
    assert len(plan.kernels) == 1 and len(plan.launches) == 2  # two equal halves
    assert ("partition", "halves", True, "as its author likes it") in plan.decisions


HALVES = """
from souffle.decision import Decision
from souffle.partition import Partition, Subprogram


class Halves:
    name = "halves"
    measures = False

    def plan(self, request):
        middle = len(request.stages) // 2
        parts = (request.stages[:middle], request.stages[middle:])
        decision = Decision("partition", "halves", True, "as its author likes it")
        return Partition(tuple(Subprogram(part) for part in parts if part), (decision,))


planner = Halves()
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:planner", "cannot be had: No module named 'no_such_module'"),
        ("json:planner", "cannot be had: module 'json' has no attribute 'planner'"),
        ("json:dumps", r"is no planner: it lacks name, measures, plan; see docs/extending\.md"),
        (":planner", "cannot be had: Empty module name"),
    ],
)
def test_what_is_no_planner_says_so(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        planner_for(name)
