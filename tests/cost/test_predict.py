"""The formula: exact on cases worked out by hand, monotone, deterministic."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from souffle.cost import CostDevice, Terms, Work, cost_device, estimated_registers, predict_stage, predict_work
from souffle.errors import OptionError
from souffle.schedule.resources import StageResources
from tests.cost.stages import affine, lowered, product

A100 = cost_device("A100-SXM4-40GB")
LIGHT = StageResources(32, 0, 0, 256, 0, True)
RATES = [field.name for field in fields(CostDevice) if field.name.endswith(("_per_sm", "_per_clock", "_per_second"))]
RATES = [name for name in RATES if not name.startswith(("registers", "shared_per", "threads", "blocks"))] + ["clock_hz"]
LATENCIES = [field.name for field in fields(CostDevice) if field.name.endswith(("_clocks", "_seconds"))]


def seconds(terms: Terms) -> float:
    return terms.start + max(terms.multiprocessors, terms.l2, terms.memory)


def predicted(work: Work, tiles: int, device: CostDevice = A100, resources: StageResources = LIGHT) -> float:
    return seconds(predict_work(work, tiles, resources, device, tensor_bytes=1e9))


def test_arithmetic_in_waves() -> None:
    # 8 blocks of 256 threads fill the 2048 of a multiprocessor; 108 of those: 864 tiles a wave, 64 FMA a clock.
    work = Work(fp32=64_000.0)
    one_wave = predict_work(work, 864, LIGHT, A100, 0)
    assert (one_wave.resident, one_wave.waves) == (8, 1)
    assert one_wave.multiprocessors == pytest.approx(8 * 1000 / 1.41e9)
    more = predict_work(work, 864 + 109, LIGHT, A100, 0)
    assert more.waves == 2
    assert more.multiprocessors == pytest.approx((8 + 2) * 1000 / 1.41e9)
    assert more.bound == "fp32"


def test_a_chain_of_one_block() -> None:
    work = Work(fp32=640.0, global_waits=10.0, prefetched_waits=0.0, shared_waits=4.0, barriers=3.0)
    terms = predict_work(work, 1, LIGHT, A100, 0)
    assert terms.multiprocessors == pytest.approx((10 * 466.3 + 4 * 29.0 + 3 * 30.0 + 10) / 1.41e9)
    assert terms.bound == "chain"


def test_loads_made_ahead_pass_behind_the_work() -> None:
    busy = Work(fp32=64 * 50_000.0, prefetched_waits=100.0)
    assert predict_work(busy, 1, LIGHT, A100, 0).multiprocessors == pytest.approx(50_000 / 1.41e9)
    idle = Work(fp32=64.0, prefetched_waits=100.0)
    assert predict_work(idle, 1, LIGHT, A100, 0).multiprocessors == pytest.approx(100 * 466.3 / 1.41e9)


def test_an_element_wise_stage_moves_its_bytes() -> None:
    _, function = lowered(affine(1 << 24))
    cold = predict_stage([function], A100)
    (terms,) = cold.terms
    assert terms.memory_bytes == 2 * 4 * (1 << 24)
    assert terms.memory == pytest.approx(2 * 4 * (1 << 24) / 1.49e12)
    assert cold.seconds == pytest.approx(2.3e-6 + terms.memory)
    assert terms.bound == "memory"
    _, small = lowered(affine(1 << 20))
    (warm,) = predict_stage([small], A100, warm=True, start="none").terms
    assert (warm.memory, warm.l2_bytes) == (0.0, 2 * 4 * (1 << 20))
    assert warm.l2 == pytest.approx(2 * 4 * (1 << 20) / 3830 / 1.41e9)


def test_a_matrix_product_is_bound_on_chip() -> None:
    _, function = lowered(product(1024, 1024, 1024, "float32"))
    (terms,) = predict_stage([function], A100).terms
    # Parts of sums, where a block has several, are added up besides.
    assert terms.fp32 == pytest.approx(1024**3 / (108 * 64 * 1.41e9), rel=0.01)
    assert terms.fp32 <= terms.multiprocessors <= 4 * terms.fp32


def test_what_tiles_have_in_common_is_fetched_once() -> None:
    apart = Work(requested_bytes=6400.0, distinct_bytes=6400.0)
    alike = replace(apart, common_bytes=4000.0)
    assert predict_work(alike, 108, LIGHT, A100, 0).l2_bytes == 108 * 6400
    assert predict_work(alike, 432, LIGHT, A100, 0).l2_bytes == pytest.approx(432 * 2400 + 108 * 4000)
    assert predict_work(apart, 432, LIGHT, A100, 0).l2_bytes == 432 * 6400


def test_starts_differ_and_wrong_ones_are_named() -> None:
    _, function = lowered(affine(1 << 12))
    launch, sync, none = (predict_stage([function], A100, start=how).seconds for how in ("launch", "sync", "none"))
    assert launch - none == pytest.approx(A100.launch_seconds)
    assert sync - none == pytest.approx(A100.grid_sync_seconds(2 * 108))
    node = predict_stage([function], A100, start="node").seconds
    assert node - none == pytest.approx(A100.graph_node_seconds) and node < launch
    with pytest.raises(OptionError, match="launch, node, sync, none"):
        predict_stage([function], A100, start="now")


@pytest.mark.parametrize(
    ("product", "blocks", "published"), [("A100-SXM4-40GB", 130, 1.395), ("A100-SXM4-40GB", 261, 1.498)]
)
def test_a_kernel_that_was_published_with_its_barrier(product: str, blocks: int, published: float) -> None:
    """``A[i] = B[i] * 0.25`` on doubles by blocks of 256 threads, again and again, a grid sync between two."""
    device = cost_device(product)
    nbytes = 256 * 8.0
    body = Work(
        warp_instructions=8 * 6, fp32=256, int32=256, shared_bytes=2 * nbytes, requested_bytes=nbytes,
        distinct_bytes=nbytes, written_bytes=nbytes, global_waits=1,
    )  # fmt: skip
    terms = predict_work(body, blocks, LIGHT, device, 2 * nbytes * blocks, device.grid_sync_seconds(blocks), warm=True)
    assert seconds(terms) * 1e6 == pytest.approx(published, rel=0.05)


# Terabytes a second that te42kyfo/gpu-benches' sums read again and again from the L2 cache, and from memory.
@pytest.mark.parametrize(
    ("product", "mebibytes", "published"),
    [("A100-SXM4-40GB", 20, 5.40), ("A100-SXM4-40GB", 1000, 1.49), ("H200-SXM5-141GB", 36, 9.6),
     ("H200-SXM5-141GB", 1000, 3.89)],
)  # fmt: skip
def test_reads_that_were_published(product: str, mebibytes: int, published: float) -> None:
    """Blocks of 1024 threads, each of which reads 64 doubles."""
    device, nbytes = cost_device(product), 1024 * 64 * 8.0
    body = Work(
        warp_instructions=32 * 64 * 3, fp32=1024 * 64, int32=1024 * 64, shared_bytes=nbytes, requested_bytes=nbytes,
        distinct_bytes=nbytes, global_waits=2,
    )  # fmt: skip
    tiles = mebibytes * (1 << 20) // int(nbytes) * 10
    # Ten times over what lies in the cache; what does not fit there comes from memory each time.
    resources = StageResources(32, 0, 0, 1024, 0, True)
    near = mebibytes * (1 << 20) <= device.l2_bytes
    terms = predict_work(body, tiles, resources, device, mebibytes * (1 << 20) * (1 if near else 10), warm=near)
    assert tiles * nbytes / seconds(terms) / 1e12 == pytest.approx(published, rel=0.08)


def test_spills_and_registers_cost_time() -> None:
    _, function = lowered(product(1024, 1024, 512, "float32"))
    lean = StageResources(96, 0, function.shared_bytes, 256, 0, True)
    spilling = replace(lean, spill_bytes=512)
    assert predict_stage([function], A100, spilling).seconds > predict_stage([function], A100, lean).seconds
    _, small = lowered(affine(1 << 22))
    crowded = predict_stage([small], A100, replace(LIGHT, registers=255), warm=True)
    assert crowded.seconds > predict_stage([small], A100, LIGHT, warm=True).seconds
    assert crowded.terms[0].resident == 1


def test_a_block_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OptionError, match="shared memory"):
        predict_work(Work(fp32=1.0), 1, replace(LIGHT, dynamic_shared_bytes=200 * 1024), A100, 0)


def test_assumed_registers_are_estimated_from_the_arrays() -> None:
    _, small = lowered(affine(1 << 20))
    _, large = lowered(product(1024, 1024, 1024, "float32"))
    assert 32 <= estimated_registers(small) < estimated_registers(large) <= 255
    assumed = StageResources.assumed(large.shared_bytes, 256)
    assert predict_stage([large], A100, assumed) == predict_stage([large], A100)


def test_the_same_twice() -> None:
    _, function = lowered(product(196, 1024, 512, "float32"))
    assert predict_stage([function], A100) == predict_stage([function], A100)


amounts = st.floats(0, 1e6, allow_nan=False)
works = st.builds(
    lambda distinct, again, **rest: Work(distinct_bytes=distinct, requested_bytes=distinct + again, **rest),
    amounts,
    amounts,
    **{f.name: amounts for f in fields(Work) if f.name not in ("distinct_bytes", "requested_bytes", "common_bytes")},
)
grids = st.integers(1, 20_000)


@settings(max_examples=60, deadline=None)
@given(works, grids, st.sampled_from([f.name for f in fields(Work) if f.name != "common_bytes"]), st.floats(1.0, 1e6))
def test_more_work_is_not_faster(work: Work, tiles: int, name: str, more: float) -> None:
    grown = replace(work, **{name: getattr(work, name) + more})
    if name == "distinct_bytes":
        grown = replace(grown, requested_bytes=work.requested_bytes + more)
    assert predicted(grown, tiles) >= predicted(work, tiles) * (1 - 1e-12)
    assert predicted(work, tiles + int(more)) >= predicted(work, tiles) * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(works, grids, st.sampled_from(RATES), st.floats(1.0, 8.0))
def test_higher_rates_are_not_slower(work: Work, tiles: int, name: str, factor: float) -> None:
    faster = replace(A100, **{name: getattr(A100, name) * factor})
    assert predicted(work, tiles, faster) <= predicted(work, tiles) * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(works, grids, st.sampled_from(LATENCIES), st.floats(1.0, 8.0))
def test_longer_latencies_are_not_faster(work: Work, tiles: int, name: str, factor: float) -> None:
    slower = replace(A100, **{name: getattr(A100, name) * factor})
    assert predicted(work, tiles, slower) >= predicted(work, tiles) * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(works, grids, st.integers(1, 200))
def test_more_multiprocessors_are_not_slower(work: Work, tiles: int, more: int) -> None:
    larger = replace(A100, sm_count=A100.sm_count + more)
    assert predicted(work, tiles, larger) <= predicted(work, tiles) * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(works, grids, st.integers(4, 4096))
def test_spills_are_not_free(work: Work, tiles: int, nbytes: int) -> None:
    spilling = replace(LIGHT, spill_bytes=nbytes)
    assert predicted(work, tiles, resources=spilling) >= predicted(work, tiles)
