"""How the threads of one block share a small sum of products: some of them a part of each sum, so that all are busy.

A tile of few rows leaves threads without work. Those that lie along the batch elsewhere have a part of the sum each
then, as if the parts were a batch; their totals are added through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod

import numpy as np

from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.forms.memory_access import bits_of
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.tiling.contraction_tiling import (
    ContractionTiling,
    contraction_shared_bytes,
    estimated_clocks,
    possible_tilings,
)

__all__ = ["SlicedTiling", "choose_sliced_tiling"]

_SLICES = (1, 2, 4, 8, 16)

_EVERY_TILE_ALONE = 1 << 20
"""Multiprocessors of which each has one tile at most."""

_WARP, _ISSUE, _BARRIER, _RESULT = 32, 4.0, 30.0, 8.0
"""As in the estimate of a tiling."""


@dataclass(frozen=True)
class SlicedTiling:
    """A tiling with a part of each sum for the threads along its batch.

    Attributes
    ----------
    tiling : ContractionTiling
        Of which `step` is that of one part.
    slices : int
        With 1, sums are whole.
    """

    tiling: ContractionTiling
    slices: int


@dataclass(frozen=True, eq=False)
class _AsBatch(Contraction):
    """A sum of products whose parts are a batch."""

    slices: int = 1

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """Parts, rows, columns, and the length of a part."""
        _, rows, columns, inner = super().extents
        return self.slices, rows, columns, -(-inner // self.slices)


def choose_sliced_tiling(problem: Contraction, request: GpuRequest) -> tuple[float, SlicedTiling, int] | None:
    """The tiling for one block that computes all tiles one after another: clocks, numbers, bytes of shared memory."""
    batch, _, _, inner = problem.extents
    alone = replace(request, sm_count=_EVERY_TILE_ALONE)
    best: tuple[float, SlicedTiling, int] | None = None
    for slices in _SLICES:
        if slices > 1 and (batch > 1 or not problem.product_sum or problem.folds or slices * 4 > inner):
            continue
        seen = problem if slices == 1 else _as_batch(problem, slices)
        many = possible_tilings(seen, alone, alone)
        if many is None:
            continue
        sums = _sums_bytes(problem, many, slices)
        taken = contraction_shared_bytes(seen, many) + sums
        fit = np.flatnonzero(((many.across[0] == slices) | (slices == 1)) & (taken <= request.max_shared_bytes))
        if not fit.size:
            continue
        tiles = prod(many.counts(seen.extents))
        clocks = tiles * (estimated_clocks(seen, many, alone) + _joining(many, slices, request))
        place = fit[np.argmin(clocks[fit])]
        if best is None or clocks[place] < best[0]:
            one = many.applied(lambda numbers, place=place: int(numbers[place]))
            best = (float(clocks[place]), SlicedTiling(one, slices), int(taken[place]))
    return best


def _as_batch(problem: Contraction, slices: int) -> Contraction:
    return _AsBatch(*(getattr(problem, field.name) for field in fields(problem)), slices)


def _sums_bytes(problem: Contraction, many: ContractionTiling, slices: int) -> np.ndarray:
    """Shared memory for the parts of sums."""
    _, rows, columns = many.tile
    return rows * columns * (slices * bits_of(problem.dtype) // 8 if slices > 1 else 0)


def _joining(many: ContractionTiling, slices: int, request: GpuRequest) -> np.ndarray:
    """Clocks for adding the parts of sums, less what is written by fewer threads elsewhere."""
    _, rows, columns = many.tile
    if slices == 1:
        return np.zeros_like(rows, float)
    saved = request.threads / _WARP * prod(many.each) * _RESULT / _ISSUE * (1 - 1 / slices)
    return 2.0 * slices * rows * columns / _WARP + 2 * _BARRIER - saved
