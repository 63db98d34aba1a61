"""How a sum of products is shared among the warps of blocks whose products are wmma's fragments of 16 x 16 x 16."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.rule import GpuRequest, Knob, Values

__all__ = ["FRAGMENT", "PADDING", "SIDE", "WmmaTiling", "choose_tiling", "knobs_of"]

SIDE = 16
"""Rows, columns and products of one fragment."""

FRAGMENT = SIDE * SIDE
"""Elements of one."""

_MAX_TOTALS = 8
"""Fragments of totals of a warp: 8 registers of each thread for one, and the operands' beside them."""

_FRAGMENTS = (1, 2, 4)
"""Fragments of a warp along rows, or along columns."""

PADDING = 8
"""fp16 between rows of shared memory; rows of a power of two would put a fragment's column into one bank."""


@dataclass(frozen=True)
class WmmaTiling:
    """Warps along rows and columns, fragments of each along rows and columns, and the step along the inner axis."""

    warps: tuple[int, int]
    fragments: tuple[int, int]
    step: int

    @property
    def tile(self) -> tuple[int, int, int]:
        """Extents of a block's tile: batch, rows, columns."""
        return (1, *(w * f * SIDE for w, f in zip(self.warps, self.fragments, strict=True)))

    @property
    def values(self) -> Values:
        """As the knobs of the sketch say it."""
        return {
            "warps_along_rows": self.warps[0],
            "fragments_down": self.fragments[0],
            "fragments_across": self.fragments[1],
            "step": self.step,
        }

    @classmethod
    def of(cls, values: Values, threads: int) -> WmmaTiling:
        """The tiling of these values."""
        down = values["warps_along_rows"]
        fragments = (values["fragments_down"], values["fragments_across"])
        return cls((down, threads // 32 // down), fragments, values["step"])

    @property
    def strip(self) -> tuple[int, int]:
        """Rows and columns of the strip of totals that is written at a time."""
        return self.warps[0] * SIDE, self.tile[2]

    @property
    def strip_pitch(self) -> int:
        """fp32 from one row of the strip to the next: as many bytes between rows as tiles have."""
        return self.strip[1] + PADDING // 2

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, at most."""
        _, rows, columns = self.tile
        operands = max((rows + columns) * (self.step + PADDING), (rows + columns + 2 * PADDING) * self.step)
        return 2 * operands + 4 * self.strip[0] * self.strip_pitch

    @property
    def fits_registers(self) -> bool:
        """Whether a thread has room for its part of the totals."""
        return prod(self.fragments) <= _MAX_TOTALS

    def counts(self, extents: tuple[int, int, int, int]) -> tuple[int, int, int]:
        """Tiles along batch, rows, columns."""
        return tuple(ceil(extent / size) for extent, size in zip(extents, self.tile, strict=False))


def knobs_of(problem: Contraction, request: GpuRequest) -> tuple[Knob, ...]:
    """What is open."""
    warps = request.threads // 32
    return (
        Knob("warps_along_rows", tuple(d for d in range(1, warps + 1) if warps % d == 0)),
        Knob("fragments_down", _FRAGMENTS),
        Knob("fragments_across", _FRAGMENTS),
        Knob("step", (16,) if problem.extents[3] <= 16 else (16, 32)),
    )


def choose_tiling(problem: Contraction, request: GpuRequest) -> tuple[float, WmmaTiling] | None:
    """The tiling of least estimated time, and that time in clocks; ``None`` if none fits shared memory."""
    best: tuple[float, WmmaTiling] | None = None
    warps = request.threads // 32
    along_rows, down, across, steps = (knob.values for knob in knobs_of(problem, request))
    for rows in along_rows:
        for fragments in ((i, j) for i in down for j in across if i * j <= _MAX_TOTALS):
            for step in reversed(steps):
                tiling = WmmaTiling((rows, warps // rows), fragments, step)
                if tiling.shared_bytes > request.max_shared_bytes:
                    continue
                cost = _cost(problem, tiling, request)
                if best is None or cost < best[0]:
                    best = (cost, tiling)
                break
    return best


def _cost(problem: Contraction, tiling: WmmaTiling, request: GpuRequest) -> float:
    """Estimated cycles of a multiprocessor for the tiles that it runs.

    A fragment product takes 8 cycles of the multiprocessor's four tensor cores (half of what the newest could do, which
    wmma does not reach), a fragment's load from shared memory 4 (512 bytes, 128 a cycle), an element fetched 4
    instructions and an element written 20, of 128 a cycle. A step costs two barriers.
    """
    _, rows, columns = tiling.tile
    down, across = tiling.fragments
    warps = tiling.warps[0] * tiling.warps[1]
    steps = ceil(problem.extents[3] / tiling.step)
    products = warps * tiling.step / SIDE * (8.0 * down * across + 4.0 * (down + across))
    fetched = (rows + columns) * tiling.step * 4 / 128
    block = steps * (products + fetched + 100.0) + rows * columns * 20 / 128 + 500.0
    return ceil(prod(tiling.counts(problem.extents)) / request.sm_count) * block
