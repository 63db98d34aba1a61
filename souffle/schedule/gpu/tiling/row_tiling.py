"""Choosing how many threads work on a row and how many rows a tile holds."""

from __future__ import annotations

from tvm.sym import Analyzer

from souffle.decision import Refused
from souffle.schedule.gpu.forms.blocks import BlockAccess, BlockView, index_step, product
from souffle.schedule.gpu.forms.rows import Chain, Layout, Rows, private_bytes
from souffle.schedule.gpu.rule import GpuRequest
from souffle.tvm_compat import const_int

__all__ = ["MAX_PRIVATE_BYTES", "choose_layout", "layout_with", "row_threads"]

ELEMENTS_PER_THREAD = 4
"""Elements of a row that one thread takes before a further thread is worth a step of the cross-thread reduction."""

WARP = 32

ELEMENTS_PER_LANE = 16
"""As many, before a second warp is worth the barriers of a reduction across warps."""

NEAR_STEP = 2
"""Distance in memory, in elements, up to which neighbouring rows share cache lines (2 is a pooling of stride 2)."""

MIN_NEIGHBOURS = 8
"""Rows that neighbouring threads must at least hold where rows lie side by side: one memory sector of 32 bytes."""

MAX_PRIVATE_BYTES = 256
"""Bytes of intermediates that a thread may keep for itself; more would leave the registers."""

STATIC_SHARED_BYTES = 48 * 1024
"""Shared memory that can be declared in a kernel's text."""

SCRATCH_BYTES_PER_THREAD = 16
"""Set aside for cross-thread reductions, which keep up to two values of a thread in shared memory."""


def choose_layout(stage: Rows, request: GpuRequest, cross: bool = True) -> Layout | Refused:
    """A layout for the chains of `stage`, or the reason why there is none.

    Parameters
    ----------
    stage : Rows
        With at least one chain.
    request : GpuRequest
    cross : bool
        Whether threads may share a reduction; if not, a thread works on whole rows.
    """
    main = max(stage.chains, key=lambda chain: chain.work * chain.row_count)
    most = request.threads & -request.threads if cross else 1
    near = _rows_are_near(main)
    width = max(_width(main, index) for index in range(len(main.blocks)))
    inner = 1
    if not near:
        while inner < most and inner * (ELEMENTS_PER_THREAD if inner < WARP else ELEMENTS_PER_LANE) < width:
            inner *= 2
    fewest = MIN_NEIGHBOURS if near else 1
    while (
        _tiles(stage, request.threads // inner) < request.sm_count
        and inner < most
        and 2 * inner <= width
        and request.threads // inner > fewest
    ):
        inner *= 2
    limit = _limit(request)
    if all(chain.row_count == 1 for chain in stage.chains):
        inner = most
    while _too_large(stage, request.threads // inner, inner, limit) and inner < most:
        inner *= 2
    return layout_with(stage, request, inner)


def row_threads(request: GpuRequest) -> tuple[int, ...]:
    """How many threads may work on one row: powers of two that divide a block's."""
    return tuple(1 << bit for bit in range((request.threads & -request.threads).bit_length()))


def layout_with(stage: Rows, request: GpuRequest, inner: int) -> Layout | Refused:
    """The layout with so many threads on a row, or the reason why there is none."""
    main = max(stage.chains, key=lambda chain: chain.work * chain.row_count)
    limit, rows = _limit(request), request.threads // inner
    if _too_large(stage, rows, inner, limit):
        taken, free = private_bytes(stage, rows, inner > 1), limit if inner > 1 else MAX_PRIVATE_BYTES * rows
        return Refused(
            f"block {main.blocks[-1].name}: {rows} row(s) keep {taken} bytes of intermediates, {free} fit on chip"
        )
    return Layout(_tiles(stage, rows), rows, inner, _rows_are_near(main))


def _limit(request: GpuRequest) -> int:
    """Bytes of shared memory that intermediates may take."""
    return min(request.max_shared_bytes, STATIC_SHARED_BYTES) - SCRATCH_BYTES_PER_THREAD * request.threads


def _too_large(stage: Rows, rows: int, inner: int, limit: int) -> bool:
    taken = private_bytes(stage, rows, inner > 1)
    return taken > (limit if inner > 1 else MAX_PRIVATE_BYTES * rows)


def _tiles(stage: Rows, rows: int) -> int:
    return max(-(-chain.row_count // rows) for chain in stage.chains)


def _width(chain: Chain, index: int) -> int:
    """How many threads could work on one row of a block at once."""
    return max(chain.blocks[index].reduction_size, chain.columns(index))


def _rows_are_near(chain: Chain) -> bool:
    """Whether neighbouring rows lie closer together in memory than neighbouring elements of a row."""
    found = _anchor(chain)
    if found is None:
        return True
    index, view, access = found
    analyzer = Analyzer()
    places = chain.rows[index]
    if not places:
        return False
    row_step = index_step(access, view.node.iter_vars[places[-1]].var, analyzer)
    inside = [axis for place, axis in enumerate(view.node.iter_vars) if place not in places]
    steps = [index_step(access, axis.var, analyzer) for axis in inside if const_int(axis.dom.extent) > 1]
    step = min((abs(s) for s in steps if s), default=None)
    # Elements whose distance is not known, as behind a division, are as a rule neighbours in pieces.
    in_pieces = None in steps
    if not row_step:
        return step is None and not in_pieces
    if step is None:
        return not in_pieces or abs(row_step) <= NEAR_STEP
    return abs(row_step) <= NEAR_STEP or abs(row_step) <= step


def _anchor(chain: Chain) -> tuple[int, BlockView, BlockAccess] | None:
    """The read of the largest tensor from global memory, since its order in memory decides."""
    found = None
    for index, view in enumerate(chain.blocks):
        for access in view.reads:
            internal = any(other.writes_to(access.buffer) for other in chain.blocks)
            if not internal and (found is None or product(access.shape) > product(found[2].shape)):
                found = (index, view, access)
    return found
