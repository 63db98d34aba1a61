"""Into how many runs a product's rows are divided: each has rows, and threads that take parts in turn end sooner."""

from __future__ import annotations

import heapq
from types import SimpleNamespace

import pytest

from souffle.schedule.cpu import division
from souffle.schedule.cpu.contraction_tiling import CpuTiling


def played(tasks: list[float], cores: int) -> float:
    """When the last thread ends: each begins with its two parts, then takes what another has not begun."""
    size = -(-len(tasks) // (2 * cores))
    parts = [tasks[start : start + size] for start in range(0, len(tasks), size)]
    left = {core: parts[2 * core : 2 * core + 2] for core in range(cores)}
    threads = [(0.0, core) for core in range(cores)]
    ends = [0.0]
    while threads:
        now, core = heapq.heappop(threads)
        share = next((left[one % cores] for one in range(core, core + cores) if left[one % cores]), None)
        if share is not None:
            heapq.heappush(threads, (now + sum(share.pop(0)), core))
        ends.append(now)
    return max(ends)


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("height", "width", "together", "batches", "ahead"),
    [
        (1024, 196, 3, 1, False),
        (2048, 49, 1, 1, False),
        (7, 196, 1, 1, True),
        (10, 10, 1, 1, True),
        (384, 768, 1, 1, True),
        (128, 1000, 1, 9, True),
        (997, 131, 2, 1, False),
        (64, 64, 1, 500, True),
    ],
)
def test_no_run_is_empty_and_cores_end_sooner(monkeypatch, cores, height, width, together, batches, ahead) -> None:
    monkeypatch.setattr(division, "task_cycles", lambda form, tiling, rows, columns: (rows + 2.0) * -(-columns // 16))
    tiling = CpuTiling(10, 3, 16)
    form = SimpleNamespace(height=height, width=width, batches=batches, panels=object() if ahead else None)
    runs = division.runs_of_tiles(form, tiling, together, cores)
    tiles = height // tiling.rows
    each = -(-tiles // runs)
    assert runs == 1 or 0 < (runs - 1) * each < tiles

    def makespan(count: int) -> float:
        rows = -(-tiles // count) * tiling.rows
        heights = [rows] * (count - 1) + [height - rows * (count - 1)]
        blocks = [min(48 * together, width - start) for start in range(0, width, 48 * together)]
        tasks = [(block, one) for block in blocks for one in heights]
        if not ahead:
            tasks = [(block, one) for one in heights for block in blocks]
        return played([(one + 2.0) * -(-block // 16) for block, one in tasks] * batches, cores)

    found = makespan(runs)
    assert found <= makespan(1) * 1.02
    if cores == 2 and tiles >= 8:
        # Within a tenth of what two cores could do at best.
        whole = sum((height + 2.0) * -(-min(48 * together, width - s) // 16) for s in range(0, width, 48 * together))
        assert found <= 1.1 * whole * batches / 2
