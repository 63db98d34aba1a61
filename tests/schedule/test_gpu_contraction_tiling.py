"""The choice of a tiling: many are estimated at once as each is alone, and no better one is passed over."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from tvm import te

from souffle.schedule.gpu import GpuRequest
from souffle.schedule.gpu.forms.matrix_product import Contraction, canonical_contraction
from souffle.schedule.gpu.tiling import contraction_tiling as tilings
from souffle.schedule.gpu.tiling.contraction_cost import estimate, sides_of
from souffle.tvm_compat import primfunc_from_tensors

pytestmark = pytest.mark.sampled(3)

SHAPES = [(1, 64, 64, 64), (1, 37, 130, 65), (3, 7, 1000, 5), (12, 197, 64, 197), (300, 4, 4, 4), (64, 16, 8, 9)]

TINY = (1, 4, 4, 4)
"""Threads of a block would have nothing to do."""


def problem(shape: tuple[int, int, int, int], dtype: str) -> Contraction:
    batch, rows, columns, inner = shape
    a, b = te.placeholder((batch, rows, inner), dtype, "a"), te.placeholder((batch, inner, columns), dtype, "b")
    k = te.reduce_axis((0, inner), "k")
    c = te.compute((batch, rows, columns), lambda z, i, j: te.sum(a[z, i, k] * b[z, k, j], k), "c")
    return canonical_contraction(primfunc_from_tensors([a, b, c], "stage"))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape", [*SHAPES, TINY], ids=str)
def test_the_choice_among_many_is_the_one_that_each_alone_gives(
    shape: tuple[int, int, int, int], dtype: str, arch: str
) -> None:
    given, request = problem(shape, dtype), GpuRequest(arch, sm_count=108)
    candidates = tilings._with_step(given, tilings._candidates(given, request), request)
    sides, apart = sides_of(given, request), []
    for place in np.flatnonzero(candidates.step):
        own = candidates.applied(lambda numbers, place=place: int(numbers[place]))
        assert tilings.tiling_refusal(given, own, request) is None
        assert tilings.ContractionTiling.of(own.values, request.threads) == own
        registers = max(int(tilings._registers(given, own, request.threads)), tilings.ASSUMED_REGISTERS)
        apart.append((float(estimate(given, own, sides, request, registers)), prod(own.counts(given.extents)), own))
    found = tilings.choose_tiling(given, request)
    if shape == TINY:
        assert found is None and not apart
        return
    least = min(one[0] for one in apart)
    alike = [one for one in apart if one[0] <= tilings._ALIKE * least]
    best = min(alike, key=lambda one: (one[1], one[0], one[2].stages))
    assert found == (best[0], best[2])
