"""What a tiling of a sum of products takes, estimated in clocks, to choose between tilings and between rules.

The numbers of a tiling may be arrays: then they are many tilings, and what is computed of them is an array as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce
from math import prod
from typing import Protocol

import numpy as np

from souffle.index.operations import COMPARISONS
from souffle.schedule.gpu.emit.async_copy import AsyncCopy, async_copy
from souffle.schedule.gpu.emit.staging import choose_fetch
from souffle.schedule.gpu.emit.writeback import result_lanes
from souffle.schedule.gpu.forms.contraction_expressions import Axis, depends
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.forms.memory_access import bits_of, lanes_along
from souffle.schedule.gpu.rule import GpuRequest
from souffle.tvm_compat import collect

__all__ = [
    "UNROLLED",
    "Number",
    "OperandReads",
    "estimate",
    "fp32_lanes",
    "least_clocks",
    "result_lanes_of",
    "sides_of",
]

_WARP, _LINE, _WIDE = 32, 128, 4
_MEMORY_LATENCY, _SHARED_LATENCY, _BARRIER = 500.0, 30.0, 30.0
_ISSUE, _INT_WARPS, _L2_BYTES = 4.0, 2.0, 32.0
"""Clocks of a current GPU, and warps and bytes a clock of a multiprocessor, to the precision of an estimate."""

_DIVISION = 4.0
"""Instructions of a division by a constant."""

_COPY = 4.0
"""Instructions of an asynchronous copy beyond those of a read: the other address, its stage, whether it is zero."""

UNROLLED = 512
"""Multiply-adds of a thread in a row, between which shared memory's latency and its indices disappear; 64 totals, 8
deep."""

_RESULT = 8.0
"""Instructions that place and store a result, beside its arithmetic."""

_FEW_LANES = ("sm_75", "sm_80")
"""Architectures with 64 and not 128 fp32 lanes a multiprocessor (CUDA C++ Programming Guide, "Arithmetic
Instructions")."""


Number = int | np.ndarray
"""Of one tiling, or of many."""


class Tile(Protocol):
    """A tiling, or many, as the rule has it."""

    across: tuple[Number, Number, Number]
    each: tuple[Number, Number]
    step: Number
    together: Number
    stages: Number
    slices: Number
    deep: Number
    row_lanes: Number
    tile: tuple[Number, Number, Number]

    def counts(self, extents: tuple[int, int, int, int]) -> tuple[Number, Number, Number]:
        """Tiles along batch, rows, columns."""


@dataclass(frozen=True)
class OperandReads:
    """How an operand is brought.

    Attributes
    ----------
    lanes : int
        Elements of its widest read.
    index : float
        Instructions that work out where a read is.
    along_inner : bool
        Whether neighbouring threads read neighbours of the inner axis.
    copied : bool
        Whether asynchronous copies can bring it.
    itemsize : int
        Bytes of an element.
    """

    lanes: int
    index: float
    along_inner: bool
    copied: bool
    itemsize: int


@lru_cache(maxsize=64)
def sides_of(problem: Contraction, request: GpuRequest) -> tuple[OperandReads, OperandReads]:
    """Both operands', left and right."""
    found = []
    for side, operand, own in (("left", problem.left, problem.rows), ("right", problem.right, problem.columns)):
        tile = (1, 64, min(32, problem.extents[3]))
        fetch = choose_fetch(problem, side, tile, request.threads, False, lambda crossing: _WIDE if crossing else 0)
        group = problem.inner if fetch.along_inner else own
        lanes = lanes_along(operand.value, group[-1], operand.dtype) if group and fetch.lanes > 1 else 1
        divisions = sum(_divisions(operand.value, axes) for axes in (problem.batch, own, problem.inner))
        comparisons = sum(len(collect(operand.value, kind)) for kind in COMPARISONS)
        copied = isinstance(async_copy(fetch, request.arch), AsyncCopy)
        index = 6.0 + divisions + 2.0 * comparisons
        itemsize = max(1, bits_of(operand.dtype) // 8)
        found.append(OperandReads(lanes, index, fetch.along_inner, copied, itemsize))
    return tuple(found)


def _divisions(value: object, axes: tuple[Axis, ...]) -> float:
    """Instructions that take the linear index of a group apart."""
    cost = 0.0
    for axis in axes[1:]:
        single = 1.0 if axis.extent & (axis.extent - 1) == 0 else _DIVISION
        cost += single * (1 + depends(value, axis))
    return cost


@lru_cache(maxsize=64)
def result_lanes_of(problem: Contraction, most: int) -> int:
    """Neighbouring columns that one store takes."""
    return result_lanes(problem, most, apart=True)


def estimate(
    problem: Contraction, tiling: Tile, sides: tuple[OperandReads, OperandReads], request: GpuRequest, registers: Number
) -> float | np.ndarray:
    """Clocks of the whole grid.

    A multiprocessor is as fast as its busiest unit if it has several blocks, else as the latencies of one: each step
    waits for its operands, unless what is worked on meanwhile takes longer, and for what it reads of shared memory.

    Parameters
    ----------
    tiling : Tile
        Or many: the result is an array then.
    sides : tuple of OperandReads
        See :func:`sides_of`.
    registers : int or ndarray
        Of a thread.
    """
    extents, warps = problem.extents, request.threads / _WARP
    batch, rows, columns = tiling.tile
    each_row, each_column = tiling.each
    steps = np.ceil(extents[3] / tiling.deep)
    overlapped = np.greater(tiling.stages, 1)
    totals = each_row * each_column
    products = totals * tiling.step
    issued, shared, index, moved = 1.0 * products, 0.0, 0.0, 0.0
    # Threads of a warp that have a row in common read it together, and still each is given it.
    for count, lanes in ((each_row, tiling.row_lanes), (each_column, tiling.together)):
        issued = issued + tiling.step * count / lanes
        shared = shared + tiling.step * count
    for side, own in zip(sides, (rows, columns), strict=True):
        reads = batch * own * tiling.deep / request.threads / side.lanes
        moved = moved + batch * own * tiling.deep * side.itemsize
        copied = np.logical_and(overlapped, side.copied)
        index = index + reads * (side.index + np.where(copied, _COPY, 0.0))
        issued = issued + reads * np.where(copied, 1, 2)
        shared = shared + reads * np.where(copied, 1, 2) * max(1.0, side.lanes * 4 * _WARP / _LINE)
    busy = warps * _largest((issued + index) / _ISSUE, products / _fp32_warps(request), index / _INT_WARPS, shared)
    busy = np.maximum(busy, moved / _L2_BYTES)
    own = busy + np.ceil(products / UNROLLED) * _SHARED_LATENCY + np.where(overlapped, 1, 2) * _BARRIER
    chain = np.maximum(own, _MEMORY_LATENCY / np.maximum(1, tiling.stages - 1))
    stored = np.array([result_lanes_of(problem, max(most, 1)) for most in range(_WIDE + 1)])[tiling.together]
    stores = totals / stored
    # Columns of a thread that are stored one by one are apart from the next thread's.
    spread = np.where(stored == 1, tiling.together, 1)
    results = warps * (totals * _RESULT / _ISSUE + stores * spread) / tiling.slices
    # Parts of sums go to shared memory and come back.
    results = results + np.where(np.greater(tiling.slices, 1), warps * 2.0 * totals + 2 * _BARRIER, 0.0)
    tiles = prod(tiling.counts(extents))
    taken = tiling.stages * batch * tiling.deep * (rows + columns + 2 * _WIDE) * 4
    taken = np.maximum(taken, np.where(np.greater(tiling.slices, 1), tiling.slices * batch * rows * columns * 4, 0))
    resident = np.maximum(1, _least(8, 65536 // (registers * request.threads), 160 * 1024 // taken))
    whole, alone = steps * busy + results, steps * chain + results + _MEMORY_LATENCY
    full, rest = np.divmod(tiles, request.sm_count * resident)
    last = np.where(rest > 0, np.maximum(np.ceil(rest / request.sm_count) * whole, alone), 0.0)
    return full * np.maximum(resident * whole, alone) + last


def least_clocks(problem: Contraction, request: GpuRequest) -> float:
    """What no tiling's estimate is below: its products, and what a block waits for its first operands."""
    return max(_MEMORY_LATENCY, prod(problem.extents) / (request.sm_count * fp32_lanes(request)))


def fp32_lanes(request: GpuRequest) -> float:
    """Products of a clock of one multiprocessor."""
    return _fp32_warps(request) * _WARP


def _fp32_warps(request: GpuRequest) -> float:
    return _INT_WARPS if request.arch in _FEW_LANES else 2 * _INT_WARPS


def _largest(*values: float | np.ndarray) -> float | np.ndarray:
    return reduce(np.maximum, values)


def _least(*values: Number) -> Number:
    return reduce(np.minimum, values)
