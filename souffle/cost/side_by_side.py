"""How long stages take whose tiles are on the device at the same time: latencies of one hidden by another (001, §II).

A multiprocessor has workers, each with a queue of tiles. A tile alone takes ``chain`` clocks, in which it keeps unit
``u`` busy for ``t(u)``. While tiles ``i`` run side by side,

    pressure(u) = sum over i of t_i(u) / chain_i
    each takes chain_i x max(1, max over u of pressure(u))

and as one ends its worker begins the next. For R equal tiles that is ``max(R x busy, chain)``, the wave of
:mod:`souffle.cost.predict`; for tiles of two stages that are bound by different units it is less than their sum. The
device takes as long as its slowest multiprocessor, and no less than all bytes do at the bandwidth of the L2 cache and
of device memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from souffle.cost.predict import TileClocks, estimated_registers
from souffle.schedule.lower import DeviceFunction
from souffle.schedule.lower.shares import Share
from souffle.schedule.resources import StageResources

__all__ = ["clocks_side_by_side", "in_rows", "multiprocessor_queues", "worker_of"]

Queue = tuple[int, ...]
"""Of a worker: how many tiles of each stage, one stage after the other."""


def multiprocessor_queues(had: Sequence[np.ndarray], multiprocessors: int, first: int = 0) -> list[tuple[Queue, ...]]:
    """The distinct multiprocessors of a launch: each has the queues of its workers.

    Parameters
    ----------
    had : sequence of array
        For each stage how many tiles each worker has, by (teams, blocks).
    multiprocessors : int
    first : int
        Of these so many get all their blocks before others get any, as a cooperative launch does it where there are
        several for each; by default blocks are spread evenly.
    """
    table = np.stack(had, axis=-1)
    _, blocks, stages = table.shape
    each, number = -(-blocks // multiprocessors), np.arange(blocks)
    together = min(first or multiprocessors, multiprocessors)
    # Blocks go round so many multiprocessors until these are full.
    place = number // (together * each) * together + number % together
    order = np.argsort(place, kind="stable")
    starts = np.flatnonzero(np.diff(place[order], prepend=-1))
    held = np.diff(starts, append=blocks)
    found: list[tuple[Queue, ...]] = []
    for count in np.unique(held):
        own = order[starts[held == count, None] + np.arange(count)]
        queues = table[:, own].transpose(1, 2, 0, 3).reshape(len(own), -1)
        for one in set(map(tuple, queues.tolist())):
            found.append(tuple(one[at : at + stages] for at in range(0, len(one), stages)))
    return sorted(found)


def clocks_side_by_side(tiles: Sequence[TileClocks], queues: Sequence[Queue]) -> float:
    """Clocks until the workers of a multiprocessor are done.

    Parameters
    ----------
    tiles : sequence of TileClocks
        Of each stage.
    queues : sequence of tuple of int
        Of each worker: how many tiles of each stage, which it computes in their order.
    """
    chains = np.array([own.chain for own in tiles])
    loads = np.array([[own.units[name] for name in tiles[0].units] for own in tiles]) / chains[:, None]
    # Equal workers stay equal.
    distinct, workers = np.unique(np.array(queues, np.int64).reshape(-1, len(tiles)), axis=0, return_counts=True)
    rest = [[[stage, count] for stage, count in enumerate(queue) if count] for queue in distinct.tolist()]
    left = np.array([chains[queue[0][0]] if queue else 0.0 for queue in rest], np.float64)
    now = 0.0
    while any(rest):
        running = [number for number, queue in enumerate(rest) if queue]
        stages = [rest[number][0][0] for number in running]
        slow = max(1.0, float((loads[stages] * workers[running, None]).sum(axis=0).max()))
        step = float(left[running].min())
        now += step * slow
        left[running] -= step
        for number in running:
            if left[number] <= 1e-9 * step:
                queue = rest[number]
                queue[0][1] -= 1
                if not queue[0][1]:
                    queue.pop(0)
                left[number] = chains[queue[0][0]] if queue else 0.0
    return now


def worker_of(
    function: DeviceFunction, share: Share, kernel: StageResources, most: int, teams: int, parts: int
) -> tuple[DeviceFunction, StageResources, int]:
    """What computes a stage's tiles: its function, what a worker has, and how many workers there are.

    Of parts it is as if they were equal, so that as many fit as there are. Registers beyond those of the kernel's
    threads are spilled.

    Parameters
    ----------
    function : DeviceFunction
        Of the stage, where a team computes it.
    share : Share
    kernel : StageResources
        Of a team.
    most : int
        Teams of the kernel.
    teams, parts : int
        Of each block.
    """
    if share.part is None:
        return function, kernel, most
    own = share.part.function
    threads, shared = kernel.threads * teams // parts, kernel.shared_bytes * teams // parts
    spilled = 4 * max(0, estimated_registers(own) - kernel.registers)
    return own, StageResources(kernel.registers, 0, shared, threads, spilled, True), most // teams * parts


def in_rows(had: Sequence[np.ndarray], in_parts: Sequence[bool]) -> list[np.ndarray]:
    """How many tiles each worker has of each stage, with a row for each worker of a block; each part has one."""
    order = [sum(in_parts[:number]) if part else 0 for number, part in enumerate(in_parts)]
    rows = max(first + len(own) for first, own in zip(order, had, strict=True))
    found = []
    for first, own in zip(order, had, strict=True):
        table = np.zeros((rows, own.shape[1]), np.int64)
        table[first : first + len(own)] = own
        found.append(table)
    return found
