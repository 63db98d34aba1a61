"""Choosing how many units a tile of a chain owns, and how the threads of a block share each of its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from souffle.decision import Refused
from souffle.program.products import IEEE
from souffle.schedule.gpu.emit.mma_fragments import WORDS
from souffle.schedule.gpu.forms.memory_access import lanes_along, memory_step
from souffle.schedule.gpu.forms.owned_chain import OwnedChain, evaluations_of, multiplies_halves
from souffle.schedule.gpu.rule import MULTIPLIES, GpuRequest
from souffle.schedule.gpu.tiling.contraction_cost import fp32_lanes
from souffle.schedule.gpu.tiling.direct_cost import choose_serial_tiling, least_serial_clocks
from souffle.schedule.gpu.tiling.direct_tiling import DirectTiling, shared_bytes
from souffle.schedule.gpu.tiling.mma_figures import tensor_fma
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling
from souffle.schedule.gpu.tiling.owned_products import ProductTiling, choose_product, choose_shared_product
from souffle.schedule.gpu.tiling.owned_steps import Mapped, OwnedStep, OwnedTile, StepGroup, cut_tile, kept_bytes
from souffle.schedule.gpu.tiling.tensor_cores import multiplies_fragments

__all__ = ["OwnedTiling", "choose_width", "least_clocks", "mapped_lanes", "tiling_of_width", "widths"]

_BARRIER = 40.0
_STORE = 8.0
"""Clocks of a barrier, and instructions of a store with its address."""

_LATENCY = 500.0

_L2_BYTES = 64.0
"""That a multiprocessor reads in a clock, at most."""

_MOST_WIDTHS = 3
"""Widths that the rule's own choice considers: about as many tiles as there are multiprocessors."""

_MOST_REPEATED = 1 << 18
"""Evaluations that every tile repeats, beyond which they take longer than several grid syncs."""

_MOST_ROUNDS = 64
"""Tiles of a step that one block computes one after another."""

_RESIDENT = 2
"""Blocks that share a multiprocessor: a tile asks for no more shared memory than that leaves, if it can."""

_BUSY = 0.6
"""Of a tile's time its units are busy, about; the rest another one's arithmetic can fill."""


@dataclass(frozen=True, eq=False)
class OwnedTiling:
    """The numbers of a chain.

    Attributes
    ----------
    tile : OwnedTile
    steps : tuple of DirectTiling, ContractionTiling, MmaTiling or int
        How each step is shared by the threads; of a mapped one the elements of an access.
    clocks : float
        Estimated, of the whole grid.
    spread : int
        Blocks that share a tile, each with a part of its last step.
    """

    tile: OwnedTile
    steps: tuple[DirectTiling | ProductTiling | int, ...]
    clocks: float
    spread: int = 1

    @property
    def tiles(self) -> int:
        """Blocks of the grid."""
        return self.tile.tiles * self.spread

    @property
    def on_tensor_cores(self) -> bool:
        """Whether any step is."""
        return any(isinstance(numbers, MmaTiling) for numbers in self.steps)


def widths(chain: OwnedChain) -> tuple[int, ...]:
    """How many units a tile may own: what divides them, so that no tile is cut off."""
    return tuple(width for width in range(1, chain.units + 1) if chain.units % width == 0)


def least_clocks(chain: OwnedChain, request: GpuRequest) -> float:
    """What no tiling takes less than: its arithmetic, and what every multiprocessor reads."""
    lanes = fp32_lanes(request)
    # Where tensor cores may compute it, they alone do, but for what they take several products for.
    fragments = tensor_fma(request) if multiplies_fragments(request) else lanes
    words = WORDS.get(str(chain.func.attrs.get(MULTIPLIES, IEEE)))
    plain = lanes if words is None else max(lanes, fragments / words.relative_work)
    arithmetic = 0.0
    for block in filter(lambda block: block.reduction, chain.blocks):
        share = request.sm_count if block in chain.owners else 1
        arithmetic += evaluations_of(block) / share / (fragments if multiplies_halves(block) else plain)
    return max(arithmetic, chain.common_bytes / _L2_BYTES)


def choose_width(chain: OwnedChain, request: GpuRequest) -> OwnedTiling | Refused:
    """The tiling of least estimated time among widths that occupy the device; or why none is possible."""
    if chain.repeated > _MOST_REPEATED:
        return chain.refused(f"each tile would repeat {chain.repeated} evaluations, more than {_MOST_REPEATED}")
    least = kept_bytes(chain, 1)
    if least > request.max_shared_bytes:
        return chain.refused(
            f"1 of {chain.units} units keeps {least} bytes on chip, a block may have {request.max_shared_bytes}"
        )
    wanted = math.log(request.sm_count)
    near = sorted(widths(chain), key=lambda width: (abs(math.log(chain.units / width) - wanted), width))
    near = near[:_MOST_WIDTHS]
    if chain.spreads and chain.units not in near:
        near.append(chain.units)
    best: OwnedTiling | Refused = chain.refused("no width fits")
    for shared in (request.max_shared_bytes // _RESIDENT, request.max_shared_bytes):
        for width in near:
            bound = best.clocks if isinstance(best, OwnedTiling) else math.inf
            tried = tiling_of_width(chain, width, replace(request, max_shared_bytes=shared), bound)
            if isinstance(tried, Refused):
                best = tried if isinstance(best, Refused) else best
            elif isinstance(best, Refused) or tried.clocks < best.clocks:
                best = tried
        if isinstance(best, OwnedTiling):
            break
    return best


def tiling_of_width(
    chain: OwnedChain, width: int, request: GpuRequest, bound: float = math.inf
) -> OwnedTiling | Refused:
    """How a tile of `width` units is shared by the threads in less than `bound` clocks, or why it cannot be."""
    taken = kept_bytes(chain, width)
    if taken > request.max_shared_bytes:
        return chain.refused(
            f"{width} of {chain.units} units keep {taken} bytes on chip, a block may have {request.max_shared_bytes}"
        )
    tile = cut_tile(chain, width)
    if isinstance(tile, Refused):
        return tile
    chosen: list[DirectTiling | ProductTiling | int] = []
    clocks = 0.0
    together = max(1.0, _BUSY * math.ceil(tile.tiles / request.sm_count))
    for step in tile.steps:
        if clocks * together >= bound:
            return chain.refused(f"tiles of {width} units would take longer than others")
        left = request.max_shared_bytes - taken
        own = replace(request, max_shared_bytes=left)
        if step is tile.steps[-1] and chain.spreads:
            spread = _spread(step, own, tile.tiles)
            if spread is not None:
                numbers, blocks, last = spread
                shared = max(1.0, _BUSY * math.ceil(tile.tiles * blocks / request.sm_count))
                return OwnedTiling(tile, (*chosen, numbers), clocks * shared + last, blocks)
        timed = _step_within(step, request, own)
        if isinstance(timed, Refused):
            return chain.refused(f"block {step.name}: {timed.reason}")
        if timed is None:
            return chain.refused(
                f"block {step.name} has no tiling for {request.threads} threads and {left} bytes of shared memory"
            )
        clocks += timed[0] + (_BARRIER if step.waits else 0.0)
        chosen.append(timed[1])
        taken += timed[2]
    return OwnedTiling(tile, tuple(chosen), clocks * together)


def _spread(step: OwnedStep, request: GpuRequest, tiles: int) -> tuple[ProductTiling, int, float] | None:
    """The last step shared by the multiprocessors that its tile has: numbers, blocks and clocks; ``None`` if by one."""
    multiprocessors = request.sm_count // tiles
    if multiprocessors < 2 or step.product is None:
        return None
    timed = choose_shared_product(step.product, replace(request, sm_count=multiprocessors))
    if timed is None:
        return None
    clocks, numbers, blocks = timed
    return (numbers, blocks, clocks) if blocks > 1 else None


_Timed = tuple[float, DirectTiling | ProductTiling | int, int]
"""Clocks, numbers and shared memory of a step."""


def _step_within(step: OwnedStep, request: GpuRequest, own: GpuRequest) -> _Timed | Refused | None:
    """What a step takes with the shared memory of `own`: as with all of it, where that is enough."""
    if step.group is None:
        return _mapped(step, request)
    for asked in (request, own):
        timed = _group(step.group, asked)
        if not isinstance(timed, tuple) or timed[2] <= own.max_shared_bytes:
            break
    return timed


def _mapped(step: OwnedStep, request: GpuRequest) -> _Timed:
    """What a step takes that reduces nothing."""
    lanes = mapped_lanes(step.mapped)
    elements = math.prod(axis.extent for axis in step.mapped.axes)
    rounds = math.ceil(elements / (lanes * request.threads))
    # Reads of what is in shared memory do not wait for global memory.
    return rounds * _STORE * request.threads / 32 / 4 + (0.0 if step.waits else _LATENCY), lanes, 0


@lru_cache(maxsize=2048)
def _group(group: StepGroup, request: GpuRequest) -> _Timed | Refused | None:
    """What a step takes that reduces something, or why it has no form; ``None`` if no tiling fits.

    As a chain grows, and in layers that are equal, most are met again.
    """
    if group.refusal is not None:
        return Refused(group.refusal)
    found: list[_Timed] = []
    if group.product is not None:
        timed = choose_product(group.product, request)
        if timed is not None:
            if timed[0] < least_serial_clocks(math.prod(group.product.extents)):
                return timed
            found.append(timed)
    if group.sum is not None:
        timed = choose_serial_tiling(group.sum, request)
        if timed is not None and timed[1].tiles(group.sum, request.threads) <= _MOST_ROUNDS:
            found.append((*timed, shared_bytes(group.sum, timed[1], request.threads)))
    # As a sum where both take the same time.
    return min(reversed(found), key=lambda one: one[0], default=None)


def mapped_lanes(mapped: Mapped) -> int:
    """Elements of one access of a step that reduces nothing."""
    if not mapped.axes:
        return 1
    axis, store = mapped.axes[-1], mapped.store
    target = store.buffer[store.indices]
    dtype = str(store.buffer.dtype)
    if memory_step(target, axis) != 1:
        return 1
    return min(lanes_along(target, axis, dtype), lanes_along(store.value, axis, dtype))
