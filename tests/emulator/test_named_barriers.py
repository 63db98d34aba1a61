"""Barriers of some of a block's threads on the CPU device: what they order, and wrong uses of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from souffle.emulator import BarrierError, CpuModule, Finding, compile_text

pytestmark = pytest.mark.sampled(2)

_TEXT = Path(__file__).parent / "cuda" / "named_barriers.cu"
_LINES = _TEXT.read_text(encoding="utf-8").splitlines()
SCHEDULES = [{}, {"order": "shuffled", "seed": 1}, {"order": "shuffled", "seed": 2}]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("named")


@pytest.fixture(scope="module")
def checked(cache: Path) -> CpuModule:
    return compile_text(_TEXT.read_text(encoding="utf-8"), cache_dir=cache, checked=True)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "checked"])
def either(request: pytest.FixtureRequest, cache: Path) -> CpuModule:
    return compile_text(_TEXT.read_text(encoding="utf-8"), cache_dir=cache, checked=request.param)


def _floats(n: int = 128) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


def _found(module: CpuModule, kernel: str, *args: object, grid: int = 1, **options) -> tuple[Finding, ...]:
    shape = {"grid": (grid, 1, 1), "block": (128, 1, 1)}
    return module.launch(kernel, args=list(args), raises=False, **shape, **options).findings


@pytest.mark.parametrize("options", SCHEDULES)
def test_only_those_that_take_part_wait(either: CpuModule, options: dict) -> None:
    out = np.zeros(128, np.float32)
    assert _found(either, "first_half", _floats(), out, 0, **options) == ()
    np.testing.assert_array_equal(out[:64], _floats(64)[::-1])


@pytest.mark.parametrize("options", SCHEDULES)
def test_it_orders_only_those_that_take_part(checked: CpuModule, options: dict) -> None:
    out = np.zeros(128, np.float32)
    assert _found(checked, "first_half", _floats(), out, 1, **options) == ()
    np.testing.assert_array_equal(out, [*_floats(64)[::-1], *_floats(64)[::-1]])
    found = [f for f in _found(checked, "first_half", _floats(), out, 2, **options) if f.kind != "uninitialized"]
    assert found and {(f.kind, f.space, f.within_block) for f in found} == {("race", "shared", True)}
    found = _found(checked, "first_half", _floats(), out, 3, **options)
    assert {f.space for f in found if f.kind == "race"} == {"shared", "global"}


@pytest.mark.parametrize("options", [{}, {"workers": 2}, *SCHEDULES[1:]])
def test_warps_of_a_block_race_through_global_memory(checked: CpuModule, options: dict) -> None:
    def found(keep: int) -> tuple[Finding, ...]:
        args = (_floats(512), np.zeros(512, np.float32), np.zeros(512, np.float32), keep)
        return _found(checked, "through_global", *args, grid=4, **options)

    assert found(3) == ()
    for keep in (0, 1, 2):
        races = found(keep)
        assert races and {(f.kind, f.space, f.buffer) for f in races} == {("race", "global", "argument 1")}
        assert all(f.within_block and f.other.startswith("warp ") for f in races)
        assert all("without a block barrier since warp" in str(f) for f in races)


@pytest.mark.parametrize("options", SCHEDULES)
def test_each_of_several_readers_is_remembered(checked: CpuModule, options: dict) -> None:
    args = _floats(4), np.zeros(128, np.float32)
    assert _found(checked, "read_by_all", *args, 1, **options) == ()
    assert _found(checked, "read_by_some", *args, **options) == ()
    races = _found(checked, "read_by_all", *args, 0, **options)
    # Who comes last, and how many, is a matter of the schedule; that the writer waits for two warps alone is not.
    assert races and all(race.kind == "race" and (race.write or race.thread[0] >= 64) for race in races)
    assert all(race.other in ("warp 2 of the block", "warp 3 of the block") for race in races if race.write)


def test_more_or_fewer_threads_than_it_waits_for(either: CpuModule) -> None:
    with pytest.raises(BarrierError, match=r"bar\.sync 1 \(32 of 64 arrived\)") as caught:
        _found(either, "too_many_come", _floats())
    assert {(w.state, w.threads) for w in caught.value.waits} == {("block barrier", 32), ("exited", 96)}
    with pytest.raises(BarrierError, match=r"bar\.sync 3 \(64 of 96 arrived\)") as caught:
        _found(either, "too_few_come", _floats())
    first, other = caught.value.waits
    assert (first.barrier, first.threads, first.first) == (3, 64, (0, 0, 0))
    assert (other.operation, other.threads, other.first) == ("__syncthreads", 64, (64, 0, 0))


def test_one_barrier_with_two_counts(either: CpuModule) -> None:
    with pytest.raises(BarrierError, match=r"barrier 1 expects 96 threads where earlier threads expect 64") as caught:
        _found(either, "two_counts", _floats())
    assert (caught.value.waits[0].barrier, caught.value.waits[0].threads) == (1, 32)


def test_half_a_warp_does_not_count_as_a_whole(either: CpuModule) -> None:
    with pytest.raises(BarrierError, match=r"barrier 2 under divergent control: 16 of the 32 threads of warp 1"):
        _found(either, "half_warps", _floats())


def test_lanes_of_a_warp_come_together(checked: CpuModule) -> None:
    finding = _found(checked, "lanes_apart", _floats())[0]
    lines = [i for i, line in enumerate(_LINES, 1) if line.strip() == "WAIT(1, 32);"]
    assert finding.kind == "divergent_barrier"
    assert {finding.place.line, finding.other_place.line} == set(lines)
