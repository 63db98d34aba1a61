"""What the mma rule's instructions take, against counts made by hand."""

from __future__ import annotations

import pytest

from souffle.cost import Work, work_of
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.rules.mma_contraction import MMA_CONTRACTION
from souffle.schedule.lower import DeviceFunction, lower_stage
from souffle.tvm_compat import primfunc_from_tensors
from tests.cost.stages import TARGET, product

VALUES = {"warps_along_rows": 2, "warps_along_inner": 1, "mma_rows": 2, "mma_columns": 2, "step": 32, "stages": 3}


def lowered(m: int, n: int, k: int, **values: int) -> DeviceFunction:
    """A product on tensor cores; without other values a tile is 64 x 64."""
    func = primfunc_from_tensors(product(m, n, k, "float16"), "stage")
    sketch = MMA_CONTRACTION.sketch(StageForms(func), GpuRequest("sm_80", max_shared_bytes=100 * 1024))
    (function,) = lower_stage("stage", sketch.with_values({**VALUES, **values}), TARGET)
    return function


def work(m: int, n: int, k: int, **values: int) -> Work:
    return work_of(lowered(m, n, k, **values))


def test_products_and_bytes() -> None:
    counted = work(128, 128, 256)
    assert counted.tensor_fma == 64 * 64 * 256
    # Operands come once, past the registers; the results leave in fp32.
    assert counted.requested_bytes == counted.distinct_bytes == (64 + 64) * 256 * 2
    assert counted.written_bytes == 64 * 64 * 4


def test_shared_memory_is_free_of_conflicts() -> None:
    counted = work(64, 64, 32)
    # In: copies, which take the path twice as long. Out: 2 x 4 warps read 32 rows and 16 columns of 32 products each.
    # Totals go in and out in fp32, and out to global memory through the same data path.
    copies, matrices, totals = 2 * 128 * 32 * 2, 8 * (32 + 16) * 32 * 2, 64 * 64 * 4
    assert counted.shared_bytes == pytest.approx(copies + matrices + 3 * totals, rel=0.15)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_more_stages_hide_more(stages: int) -> None:
    counted = work(64, 64, 32 * 12, stages=stages)
    # With three or more, parts are read ahead: a step's tiles are waited for in the step before.
    assert counted.prefetched_waits == pytest.approx(12 / (stages - 2 if stages > 2 else 1))
    # The first tile is waited for.
    assert counted.global_waits == 1
    # One a step, one before totals take the place of tiles, and one before they are read.
    strips = counted.barriers - 12 - 1
    assert 1 <= strips <= 3


def test_parts_that_are_read_ahead_are_not_waited_for() -> None:
    pairs = {"step": 32, "warps_along_inner": 2, "mma_columns": 4}
    ahead = [work(64, 64, 64 * 13, step=64, stages=4), work(64, 64, 32 * 12, stages=4, **pairs)]
    # Of two stages none is to spare, and an odd number of steps of one piece each are no pairs.
    others = [work(64, 64, 64 * 13, step=64, stages=2), work(64, 64, 32 * 13, stages=4, **pairs)]
    assert [counted.shared_waits for counted in ahead] == [1, 1]
    assert [counted.shared_waits for counted in others] == [1 + 13, 1 + 13]


def test_one_stage_hides_nothing() -> None:
    counted = work(64, 64, 32 * 12, stages=1)
    assert (counted.global_waits, counted.prefetched_waits) == (12, 0)


def test_what_lies_beyond_the_end_is_not_read() -> None:
    counted = lowered(80, 64, 64)
    assert counted.tiles == 2
    # The second tile has 16 rows of its own; both read all columns.
    rows = 80 * 64 * 2
    assert work_of(counted).requested_bytes * 2 == rows + 2 * 64 * 64 * 2


def test_warps_along_the_inner_axis_do_the_same_arithmetic() -> None:
    whole, parts = work(64, 64, 256), work(64, 64, 256, warps_along_inner=2, mma_columns=4)
    assert whole.tensor_fma == parts.tensor_fma
    # Each total is added once.
    assert parts.fp32 == whole.fp32 + 64 * 64
