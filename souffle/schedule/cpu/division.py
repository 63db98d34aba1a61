"""Into how many runs the tiles of a product's rows are divided, so that all cores end together.

The tasks of a parallel loop differ: the last panel of a matrix has fewer columns, and so has the last block of panels.
"""

from __future__ import annotations

from souffle.schedule.cpu.contraction_form import CpuContraction
from souffle.schedule.cpu.contraction_tiling import CpuTiling, task_cycles

__all__ = ["runs_of_tiles"]

_TASKS_PER_CORE, _RUNS = 3, 4
"""Runs are tried up to so many tasks for each core, but up to so many in any case."""
_MANY_TASKS_PER_CORE = 32
"""Of so many the last ones make no difference."""
_MIN_TILES = 4
"""Of a run whose tasks pack their panels each by itself."""
_PARTS_OF_THREAD = 2
"""Into which the pool of threads divides what a thread begins with; the others take what is left of it."""
_NO_WORSE = 1.02
"""Fewer runs are taken where they take so little longer: they need not be what a processor does exactly."""


def runs_of_tiles(form: CpuContraction, tiling: CpuTiling, together: int, cores: int) -> int:
    """Into how many runs of tiles, the last of which may be shorter, rows are divided.

    Parameters
    ----------
    form : CpuContraction
    tiling : CpuTiling
    together : int
        Panels of a block.
    cores : int
    """
    tiles = form.height // tiling.rows
    width = tiling.width * together
    columns = [min(width, form.width - start) for start in range(0, form.width, width)]
    blocks = form.batches * len(columns)
    if cores == 1 or blocks >= _MANY_TASKS_PER_CORE * cores:
        return 1
    least = _MIN_TILES if form.panels is None else 1
    most = max(_RUNS, -(-_TASKS_PER_CORE * cores // blocks))
    options = [c for c in range(1, min(most, tiles // least) + 1) if -(-tiles // c) * (c - 1) < tiles] or [1]
    times = {runs: _makespan(_tasks(form, tiling, columns, runs), cores) for runs in options}
    best = min(times.values())
    return next(runs for runs, time in times.items() if time <= best * _NO_WORSE)


def _tasks(form: CpuContraction, tiling: CpuTiling, columns: list[int], runs: int) -> list[float]:
    """Cycles of each task, in their order."""
    each = -(-(form.height // tiling.rows) // runs) * tiling.rows
    rows = [each] * (runs - 1) + [form.height - each * (runs - 1)]
    if form.panels is None:
        # A thread packs all panels for few rows; those that lie ready are each read by few threads.
        return [task_cycles(form, tiling, height, width) for height in rows for width in columns] * form.batches
    return [task_cycles(form, tiling, height, width) for width in columns for height in rows] * form.batches


def _makespan(tasks: list[float], cores: int) -> float:
    """When the last core ends, as the pool gives them out: parts of equal counts, first its own, then the others'."""
    size = -(-len(tasks) // (cores * _PARTS_OF_THREAD))
    parts = [sum(tasks[start : start + size]) for start in range(0, len(tasks), size)]
    left = [parts[core * _PARTS_OF_THREAD :][:_PARTS_OF_THREAD] for core in range(cores)]
    ends = [0.0] * cores
    while any(left):
        core = min(range(cores), key=ends.__getitem__)
        share = next(left[(core + step) % cores] for step in range(cores) if left[(core + step) % cores])
        ends[core] += share.pop(0)
    return max(ends)
