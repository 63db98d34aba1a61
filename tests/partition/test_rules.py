"""Where kernels begin and end, under the paper's rule and under the persistent one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from souffle.partition import Subprogram, one_kernel_per_stage, partition_persistent, partition_souffle
from souffle.schedule.gpu.device import DEVICES, GpuDevice, device_for
from souffle.schedule.stage import Stage, draft_stage
from tests.testlib import Builder

TINY = GpuDevice("sm_90", "tiny", 4, 100 * 1024, 64 * 1024, 1024, 8)
WAVE = TINY.blocks_per_wave(256, 0)


@dataclass(frozen=True)
class Tiles:
    """What the partition needs to know of a schedule."""

    tiles: int
    threads: int = 256


def stages(*tiles: int, sort_at: int | None = None) -> list[Stage]:
    b = Builder()
    x = b.input(4, 6)
    for number in range(len(tiles)):
        x = b.extern_sort(x) if number == sort_at else b.matmul(x, b.constant(np.ones((6, 6), np.float32)))
    program = b.program(x)
    return [Stage(draft_stage([t], program), Tiles(n)) for t, n in zip(program.tes, tiles, strict=True)]


def cut(rule, given: list[Stage], shared: list[int] | None = None):
    """What `rule` says of stages with these bytes of shared memory."""
    return rule(given, TINY, dict(zip(given, shared or [0] * len(given), strict=True)))


def sizes(subprograms: tuple[Subprogram, ...]) -> list[int]:
    return [len(s.stages) for s in subprograms]


def test_below_v3_every_stage_is_a_kernel() -> None:
    parts, decisions = one_kernel_per_stage(stages(1, 2, 3))
    assert sizes(parts) == [1, 1, 1] and not decisions
    assert parts[1].name == "matmul1"


def test_stages_of_one_wave_share_a_kernel() -> None:
    parts, decisions = cut(partition_souffle, stages(1, WAVE, 2))
    assert sizes(parts) == [3] and parts[0].name == "matmul2"
    (decision,) = decisions
    assert decision.subject == "no cut" and f"{WAVE}, fit in one wave of {WAVE}" in decision.reason


def test_a_stage_of_more_blocks_than_a_wave_is_cut_off_with_the_figures() -> None:
    parts, decisions = cut(partition_souffle, stages(1, WAVE + 1, 2))
    assert sizes(parts) == [1, 1, 1]
    before, after = decisions
    assert before.stage == "partition" and before.subject == "cut before matmul1 (Matmul matmul1)"
    assert f"{WAVE + 1} blocks exceed the {WAVE} of one wave (4 SMs × {WAVE // 4} resident blocks" in before.reason
    assert "matmul2" in after.subject


def test_shared_memory_makes_a_wave_smaller() -> None:
    pool = 60 * 1024
    assert TINY.blocks_per_wave(256, pool) == 4
    parts, (decision,) = cut(partition_souffle, stages(5, 1), [0, pool])
    assert sizes(parts) == [1, 1] and f"{pool} bytes of shared memory" in decision.reason
    assert sizes(cut(partition_souffle, stages(4, 1), [0, pool])[0]) == [2]


def test_persistent_tiles_are_not_cut() -> None:
    parts, (decision,) = cut(partition_persistent, stages(1, 100 * WAVE, 2))
    assert sizes(parts) == [3]
    assert decision.subject == "no cut" and f"waves of {WAVE} blocks" in decision.reason


@pytest.mark.parametrize("rule", [partition_souffle, partition_persistent])
def test_an_operator_that_is_no_te_is_a_kernel_of_its_own(rule) -> None:
    parts, decisions = cut(rule, stages(1, 1, 1, 1, sort_at=1))
    assert sizes(parts) == [1, 1, 2]
    assert all("no TE" in d.reason for d in decisions) and "cut before sort1" in decisions[0].subject


@pytest.mark.parametrize("rule", [partition_souffle, partition_persistent])
def test_every_stage_is_kept_in_order(rule) -> None:
    given = stages(1, 40, 3, 90, 2, 2, sort_at=4)
    parts, _ = cut(rule, given, [0, 0, 9000, 0, 0, 50_000])
    assert [s for part in parts for s in part.stages] == given


def test_a_wave_is_bounded_by_threads_registers_memory_and_blocks() -> None:
    h200 = device_for("sm_90")
    assert h200.blocks_per_wave(256, 0) == 2 * 132
    assert h200.blocks_per_wave(256, 0, registers=32) == 8 * 132
    assert h200.blocks_per_wave(32, 0, registers=16) == 32 * 132
    assert h200.blocks_per_wave(256, 200 * 1024) == 132
    assert all(device.blocks_per_wave(1024, device.shared_per_block) >= device.sm_count for device in DEVICES.values())
