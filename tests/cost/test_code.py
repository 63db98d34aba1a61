"""Machine code that is fetched: which runs fetch it, what it costs, and how much of it there is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from souffle.codegen.cuda import emit_cuda
from souffle.codegen.machine_code import code_bytes
from souffle.codegen.nvcc import compile_cubin, find_nvcc
from souffle.cost import KernelForecast, Work, cost_device, predict_work, work_of
from souffle.cost.code import fetching_runs, fits
from souffle.kernel.kernel_shape import kernel_of_stage
from souffle.schedule.lower import cuda_target
from souffle.schedule.resources import StageResources
from tests.cost.stages import affine, lowered, product
from tests.cost.test_kernel import chain, forecast

A100, H200 = cost_device("A100-SXM4-40GB"), cost_device("H200-SXM5-141GB")
BLOCK = StageResources(32, 0, 0, 256, 0, True)


def _played(executed: list[str], code: dict[str, int], cache: int) -> list[bool]:
    """Whether each fetches, by a cache that holds bytes one by one and throws away the one not used for longest."""
    held: list[tuple[str, int]] = []
    found = []
    for piece in executed:
        lines = [(piece, line) for line in range(code[piece])]
        found.append(any(line not in held for line in lines))
        held = [line for line in held if line not in lines] + lines
        # What goes, goes as a whole: a piece is executed from its beginning.
        while len(held) > cache:
            gone = held[0][0]
            held = [line for line in held if line[0] != gone]
    return found


@pytest.mark.parametrize("seed", range(30))
def test_runs_that_fetch_are_those_of_a_cache_that_is_played(seed: int) -> None:
    dice = random.Random(seed)
    cache = dice.randint(1, 12)
    code = {name: dice.randint(1, 6) for name in "abcdef"}
    units = [(dice.choices("abcdef", k=dice.randint(1, 4)), dice.choice((1, 1, 2, 5))) for _ in range(8)]
    found = fetching_runs(units, code, cache)
    played = _played([piece for pieces, runs in units for _ in range(runs) for piece in pieces], code, cache)
    for (pieces, runs), counts in zip(units, found, strict=True):
        own, played = played[: runs * len(pieces)], played[runs * len(pieces) :]
        assert counts == [sum(own[place :: len(pieces)]) for place in range(len(pieces))]


def test_code_that_fits_is_fetched_once_and_code_that_does_not_in_every_step() -> None:
    code = {"a": 60.0, "b": 40.0, "c": 1.0}
    assert fetching_runs([("ab", 12)], code, 100.0) == [[1, 1]]
    assert fetching_runs([("abc", 12)], code, 100.0) == [[12, 12, 12]]
    assert fetching_runs([("a", 1), ("a", 1), ("c", 1)], code, 100.0) == [[1], [0], [1]]
    assert fetching_runs([("a", 3)], code, 59.0) == [[3]]
    assert fits({"a": 60.0, "b": 40.0}, 100.0) and not fits(code, 100.0) and fits({}, 1.0)


@pytest.mark.parametrize("device", [A100, H200])
@pytest.mark.parametrize("tiles", [1, 107, 1000])
def test_fetched_code_costs_more_the_more_there_is(device, tiles: int) -> None:
    waiting = Work(fp32=640.0, global_waits=4.0)
    terms = [predict_work(waiting, tiles, BLOCK, device, 0.0, fetched_code=size) for size in (0, 1024, 4096, 65536)]
    assert terms[0].code == 0 and terms[0] == predict_work(waiting, tiles, BLOCK, device, 0.0)
    late = [one.code for one in terms]
    assert late == sorted(late) and late[1] > 0
    for one in terms:
        assert one.multiprocessors == pytest.approx(terms[0].multiprocessors + one.code)
        # No more than if nothing were issued meanwhile, no less than if 8 warps issued all of it.
    clocks = 65536 / device.code_bytes_per_clock
    assert (clocks - 65536 / 16 * 2) / device.clock_hz == pytest.approx(late[-1])


def test_fetching_is_hidden_behind_units_that_are_busy_for_longer() -> None:
    busy = Work(fp32=64.0 * 50_000)
    assert predict_work(busy, 108 * 8, BLOCK, A100, 0.0, fetched_code=2048.0).code == 0
    wide = replace(BLOCK, threads=1024)
    assert predict_work(Work(), 1, wide, A100, 0.0, fetched_code=2048.0).code == 0, "32 warps issue for longer"


def test_a_network_that_fits_in_the_cache_fetches_nothing() -> None:
    model, stages = forecast(chain(256))
    block = model.together(stages)
    assert not model.fetches(stages) and not model.fetches(())
    small = KernelForecast(replace(H200, code_cache_bytes=1), stages, ())
    assert small.fetches(stages)
    warm = small.times(stages, block, 64, 1, fewer=False)
    cold = small.times(stages, block, 64, 1, fewer=False, fetches=True)
    assert warm.code == 0 and cold.code > 0
    assert cold.seconds == pytest.approx(warm.seconds + cold.code)
    # As one kernel or as several: the code is as much.
    alone = [small.times([s], block, 64, 0, fewer=False, fetches=True).code for s in stages]
    assert sum(alone) == pytest.approx(cold.code)


def test_measured_code_counts_in_place_of_what_is_estimated() -> None:
    _, stages = forecast(chain(256))
    known = tuple(replace(s, resources=replace(s.resources, code_bytes=64 << 10)) for s in stages)
    model = KernelForecast(H200, known, ())
    assert not model.fetches(known[:1]) and not model.fetches(known)
    more = tuple(replace(s, resources=replace(s.resources, code_bytes=(64 << 10) + 1)) for s in stages)
    assert KernelForecast(H200, more, ()).fetches(more)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_code_is_counted_within_a_factor_of_what_nvcc_makes(arch: str) -> None:
    if find_nvcc() is None:
        pytest.skip("needs nvcc")
    functions = [lowered(affine(1 << 20))[1], lowered(product(256, 256, 256, "float32"), sm_count=4)[1]]
    functions.append(lowered(product(256, 256, 256, "float16"), sm_count=4)[1])
    kernels = [
        (f"k{n}", kernel_of_stage([f], [(str(p.ty.dtype), 0) for p in f.schedule.func.params], f"part{n}_"))
        for n, f in enumerate(functions)
    ]
    sizes = code_bytes(compile_cubin(emit_cuda(kernels, cuda_target(arch))[0], arch)[0])
    counted = [work_of(function).code_bytes for function in functions]
    machine = [sizes[f"k{n}"] for n in range(len(functions))]
    assert all(0.4 <= one / other <= 2.5 for one, other in zip(counted, machine, strict=True)), (counted, machine)
    assert 0.6 <= sum(counted) / sum(machine) <= 1.7, (counted, machine)
