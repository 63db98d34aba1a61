"""Schedules of many launch shapes, as users bring them: grids and blocks in x, y and z, and any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from tvm import s_tir, tirx

from souffle.schedule.gpu import GpuRequest, GpuSchedule, schedule_gpu
from souffle.schedule.stage import Stage

Reschedule = Callable[[tirx.PrimFunc], GpuSchedule]

ARCH = "sm_90"


def by_rule(threads: int, arch: str = ARCH) -> Reschedule:
    """The compiler's own rules, for blocks of so many threads."""

    def schedule(func: tirx.PrimFunc) -> GpuSchedule:
        return schedule_gpu(func, GpuRequest(arch, threads))[0]

    return schedule


def _made(sch: s_tir.Schedule, rule: str, grid: tuple[int, ...], block: tuple[int, ...]) -> GpuSchedule:
    return GpuSchedule(sch.mod["main"], rule, prod(grid), prod(block))


def _bound(sch: s_tir.Schedule, loops: list, part: str) -> tuple[int, ...]:
    """Bind loops, outermost first, to z, y and x, as many as there are."""
    for loop, d in zip(loops, "zyx"[-len(loops) :], strict=True):
        sch.bind(loop, f"{part}.{d}")
    return tuple(int(sch.get(loop).extent) for loop in loops)


def crosswise(x: int, *others: int) -> Reschedule:
    """One reduction of rows: `x` threads of a row reduce it together, and `others` are rows, outermost dimension first.

    Every spatial axis is split by one of `others`; what is left over of each is a dimension of the grid.
    """

    def schedule(func: tirx.PrimFunc) -> GpuSchedule:
        sch = s_tir.Schedule(func)
        (block,) = sch.get_child_blocks(sch.get_sblock("root"))
        *rows, k = sch.get_loops(block)
        _, lane = sch.split(k, [None, x])
        grid, inner = [], []
        for loop, extent in zip(rows, (*others, 1, 1, 1)[: len(rows)], strict=True):
            outer, part = sch.split(loop, [None, extent])
            grid.append(outer)
            inner.append(part)
        serial = sch.get_loops(block)[-2]
        sch.reorder(*grid, *inner, lane, serial)
        shape = _bound(sch, grid, "blockIdx")
        threads = _bound(sch, [*inner[: len(others)], lane], "threadIdx")
        return _made(sch, "crosswise", shape, threads)

    return schedule


def staged(rows: int, columns: int, depth: int, dynamic: bool = False) -> Reschedule:
    """A product whose operands pass through shared memory, with a thread for each element of a tile.

    Both dimensions are in the grid, ``blockIdx.y`` and ``blockIdx.x``; the tile is ``threadIdx.y`` by ``threadIdx.x``.
    """

    def schedule(func: tirx.PrimFunc) -> GpuSchedule:
        sch = s_tir.Schedule(func)
        (block,) = sch.get_child_blocks(sch.get_sblock("root"))
        i, j, k = sch.get_loops(block)
        scope = "shared.dyn" if dynamic else "shared"
        tiles = [sch.split(loop, [None, extent]) for loop, extent in ((i, rows), (j, columns), (k, depth))]
        (io, ii), (jo, ji), (ko, ki) = tiles
        sch.reorder(io, jo, ii, ji, ko, ki)
        into = [sch.cache_read(block, number, scope) for number in (0, 1)]
        own = sch.cache_write(block, 0, "local")
        sch.reverse_compute_at(own, ji)
        grid = _bound(sch, [io, jo], "blockIdx")
        threads = _bound(sch, [ii, ji], "threadIdx")
        for copy in into:
            sch.compute_at(copy, ko)
            # What is one element in a dimension has no loop there.
            loops = sch.get_loops(copy)[5:] or [sch.add_unit_loop(copy)]
            fused = sch.fuse(*loops)
            _, y, x = sch.split(fused, [None, rows, columns])
            sch.bind(y, "threadIdx.y")
            sch.bind(x, "threadIdx.x")
        sch.decompose_reduction(block, ko)
        return _made(sch, "staged", grid, threads)

    return schedule


def rescheduled(how: Mapping[int, Reschedule]) -> Callable[[str, object], object]:
    """A hook that gives some stages, by position, other schedules."""

    def hook(name: str, result: object) -> object:
        if name != "schedule":
            return result
        return tuple(
            replace(stage, schedule=how[number](stage.draft.func))
            if number in how and isinstance(stage, Stage)
            else stage
            for number, stage in enumerate(result)
        )

    return hook
