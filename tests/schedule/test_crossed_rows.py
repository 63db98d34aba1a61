"""Units of a row that change places in shared memory: where they come to lie, and that wrong places are refuted.

What copies and ``ldmatrix`` do is counted here from the description of banks, sectors and lines alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import te, tirx

from souffle.errors import CertificateError
from souffle.schedule.gpu.emit.mma_pieces import FragmentPlace
from souffle.schedule.gpu.emit.staging import TileFetch
from souffle.schedule.gpu.forms.matrix_product import read_contraction
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling, tile_operands
from souffle.tvm_compat import primfunc_from_tensors
from tests.schedule.product_networks import compiled, product

pytestmark = pytest.mark.sampled(4)

UNIT, SECTOR, LINE = 16, 32, 128
"""Bytes: of a row of ``ldmatrix``, of what the L2 cache hands out, and of all banks of shared memory."""

SHAPES = [
    (warps, step)
    for warps in [(1, 1, 8), (1, 2, 4), (2, 4, 1)]
    for step in [16, 32, 64, 128]
    if step // 16 % warps[2] == 0
]


def fetches(warps: tuple[int, int, int], parts: tuple[int, int], step: int) -> list[TileFetch]:
    """Both operands' tiles of a product of halves, the left one of rows along the sum, the right one across it."""
    a, b = te.placeholder((96, 1024), "float16", "a"), te.placeholder((1024, 768), "float16", "b")
    k = te.reduce_axis((0, 1024), "k")
    total = te.compute((96, 768), lambda i, j: te.sum(a[i, k].astype("float32") * b[k, j].astype("float32"), k), "c")
    problem = StageForms(primfunc_from_tensors([a, b, total], "f")).read(read_contraction)
    operands = tile_operands(problem, MmaTiling(warps, parts, step, 2), GpuRequest("sm_90"))
    return [one.copy.fetch for one in operands.both]


def places(fetch: TileFetch) -> np.ndarray:
    """Bytes from the beginning of the tile, of the first element of each row's units."""
    rows, columns = fetch.tile[1:] if fetch.inner_last else fetch.tile[:0:-1]

    def place(row: int, unit: int) -> int:
        own, inner = (row, unit * 8) if fetch.inner_last else (unit * 8, row)
        return 2 * int(fetch.place(*(tirx.IntImm("int32", value) for value in (0, own, inner))))

    return np.array([[place(row, unit) for unit in range(columns // 8)] for row in range(rows)])


@pytest.mark.parametrize("across", [2, 4, 6, 8])
@pytest.mark.parametrize(("warps", "step"), SHAPES, ids=str)
def test_each_unit_has_a_place_that_copies_and_loads_like(step: int, across: int, warps: tuple[int, int, int]) -> None:
    for fetch in fetches(warps, (1, across), step):
        assert fetch.unit == 8 and fetch.padding == 0
        found = places(fetch)
        assert sorted(found.ravel()) == list(range(0, found.size * UNIT, UNIT)), "no place is taken twice, none is free"
        for first in range(0, len(found), 8):
            banks = found[first : first + 8] % LINE // UNIT
            assert all(len(set(column)) == 8 for column in banks.T), "eight rows of a matrix in different banks"
        pairs = found.reshape(len(found), -1, SECTOR // UNIT)
        assert (pairs.max(-1) // SECTOR == pairs.min(-1) // SECTOR).all(), "what one sector holds stays in one"
        lines = np.unique(found // LINE)
        assert len(lines) == -(-found.size * UNIT // LINE)


def _forgotten(right: Callable[..., tirx.PrimExpr]) -> Callable[..., tirx.PrimExpr]:
    def part(self: FragmentPlace, own: tirx.PrimExpr, inner: tirx.PrimExpr) -> tirx.PrimExpr:
        place = right(self, own, inner)
        if self.crossing is None:
            return place
        return (
            self.first
            + self.placed.pitch * (own if self.placed.inner_last else inner)
            + self.column
            + (inner if self.placed.inner_last else own)
        )

    return part


def _of_the_next_row(right: Callable[..., tirx.PrimExpr]) -> Callable[..., tirx.PrimExpr]:
    return lambda self, row: right(self, row + 1)


@pytest.mark.parametrize("mistake", ["forgotten in loads", "one row off in copies"])
def test_units_that_are_not_where_they_are_loaded_are_refuted(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = product(48, 64, 192)
    compiled(model, verify="values")
    if mistake == "forgotten in loads":
        monkeypatch.setattr(FragmentPlace, "part", _forgotten(FragmentPlace.part))
    else:
        right = TileFetch.read_of

        def read_of(self: TileFetch, *given: object) -> object:
            with pytest.MonkeyPatch.context() as other:
                other.setattr(TileFetch, "crossing", _of_the_next_row(TileFetch.crossing))
                return right(self, *given)

        monkeypatch.setattr(TileFetch, "read_of", read_of)
    with pytest.raises(CertificateError):
        compiled(model, verify="values")
