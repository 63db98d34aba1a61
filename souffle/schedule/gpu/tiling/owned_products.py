"""Which cores compute a sum of products that is a step of a chain, and in which tiles.

Tensor cores want operands of their types and fill fragments of 16 rows up, CUDA cores take any; what a block has left
of shared memory holds the tiles of either. Both are asked, and the one that is estimated to be sooner is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from souffle.decision import Refused
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.tiling import contraction_tiling, mma_tiling
from souffle.schedule.gpu.tiling.contraction_tiling import (
    ContractionTiling,
    contraction_shared_bytes,
    staging_refusal,
)
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling, Operands, assumed_operands, tile_operands, tiling_refusal
from souffle.schedule.gpu.tiling.tensor_cores import fragments_of

__all__ = ["ProductTiling", "choose_product", "choose_shared_product"]

ProductTiling = ContractionTiling | MmaTiling


def choose_product(problem: Contraction, request: GpuRequest) -> tuple[float, ProductTiling, int] | None:
    """The tiling for one block that computes all tiles one after another: clocks, numbers, bytes of shared memory."""
    found: list[tuple[float, ProductTiling, int]] = []
    if staging_refusal(problem, request) is None:
        serial = contraction_tiling.choose_serial_tiling(problem, request)
        if serial is not None:
            found.append((*serial, int(contraction_shared_bytes(problem, serial[1]))))
    timed = _on_tensor_cores(problem, request, mma_tiling.choose_serial_tiling)
    if timed is not None:
        clocks, tiling = timed
        taken = tiling.shared_bytes(tile_operands(problem, tiling, request))
        found.append((clocks, tiling, taken))
    return min(found, key=lambda one: one[0], default=None)


def choose_shared_product(problem: Contraction, request: GpuRequest) -> tuple[float, ProductTiling, int] | None:
    """The tiling for one block for each tile: clocks, numbers, blocks."""
    found: list[tuple[float, ProductTiling, int]] = []
    if staging_refusal(problem, request) is None:
        timed = contraction_tiling.choose_tiling(problem, request)
        if timed is not None:
            found.append((*timed, prod(timed[1].counts(problem.extents))))
    tensor = _on_tensor_cores(problem, request, mma_tiling.choose_tiling)
    if tensor is not None:
        found.append((*tensor, prod(tensor[1].counts(problem.extents))))
    return min(found, key=lambda one: one[0], default=None)


def _on_tensor_cores(
    problem: Contraction,
    request: GpuRequest,
    choose: Callable[[Contraction, Operands, GpuRequest], tuple[float, MmaTiling] | None],
) -> tuple[float, MmaTiling] | None:
    """The tiling of least estimated time, and that time in clocks; ``None`` if it is none for them.

    What is on chip beside it is what a chain is for, so that few rows or columns are no reason against it.
    """
    fragments = fragments_of(problem, request)
    if isinstance(fragments, Refused):
        return None
    timed = choose(problem, assumed_operands(problem, request, fragments), request)
    if timed is None:
        return None
    operands = tile_operands(problem, timed[1], request)
    return timed if tiling_refusal(problem, timed[1], operands, request) is None else None
