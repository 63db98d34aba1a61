"""The nine kernels of HFuse's evaluation: alone against references of their own, in pairs, and their benchmarks."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.hfuse import gpu, hash_references, pairs, references, workloads
from benchmarks.hfuse.gpu_tasks import METRICS, ncu_metrics, task_names
from benchmarks.hfuse.references import named
from souffle.emulator import CpuModule, compile_text
from souffle.hfuse import SPACES, Launch, check, even_split, fuse

pytestmark = pytest.mark.sampled(5)

ORDERS = (("fixed", 0), ("shuffled", 1), ("shuffled", 2), ("shuffled", 3))
BLOCKS = {"batchnorm": (64, 480), "hist": (32, 224), "im2col": (64, 416), "maxpool": (96, 512), "upsample": (32, 352)}

# Beside the smallest launch of each kernel: extents that are prime, and parameters that differ along x and y.
CASES: list[tuple[str, Launch]] = [
    *((kernel, workloads.launch_of(kernel, 1)) for kernel in workloads.DEEP_LEARNING),
    ("maxpool", workloads.maxpool(5, 23, 17, kernel=(3, 2), stride=(2, 3), pad=(1, 0), dilation=(3, 2))),
    ("maxpool", workloads.maxpool(3, 13, 31, kernel=(5, 4), stride=(1, 2), pad=(2, 2), dilation=(2, 3))),
    ("batchnorm", workloads.batchnorm(37, 5, 53)),
    ("batchnorm", workloads.batchnorm(3, 2, 7)),
    ("upsample", workloads.upsample(3, 11, 7, 29, 23, align_corners=True)),
    ("upsample", workloads.upsample(2, 13, 17, 31, 19, align_corners=False)),
    ("upsample", workloads.upsample(2, 5, 3, 1, 1, align_corners=True)),
    ("im2col", workloads.im2col(3, 19, 13, kernel=(2, 5), pad=(1, 3), stride=(3, 2), dilation=(2, 1))),
    ("hist", workloads.hist(9973, 37, -1.0, 1.5)),
    ("hist", workloads.hist(4999, 1009, -0.25, 2.0)),
]
SEARCHES: list[tuple[str, Launch]] = [
    *((kernel, workloads.launch_of(kernel, 1)) for kernel in workloads.HASHES),
    *((kernel, workloads.search(kernel, 1, 3, first_nonce=2**32 - 401)) for kernel in ("sha256", "blake256")),
    ("blake2b", workloads.search("blake2b", 1, 3, first_nonce=2**40 - 401)),
    ("ethash", workloads.ethash(1, 2, 31, first_nonce=2**40 - 401)),
]


@functools.cache
def module(kernel: str) -> CpuModule:
    return compile_text(workloads.source_of(kernel).read_text())


def expected_of(kernel: str, launch: Launch, threads: int, arrays: list[Any]) -> dict[str, np.ndarray]:
    """Of a deep-learning kernel."""
    if kernel == "batchnorm":
        return references.batchnorm_exact(named(launch, arrays), launch.block_of(threads))
    return references.REFERENCES[kernel](named(launch, arrays))


def run(device: CpuModule, launch: Launch, threads: int, arrays: list[Any], order: str, seed: int) -> dict[str, Any]:
    """The arguments by name after a launch."""
    copies = [value.copy() if isinstance(value, np.ndarray) else value for value in arrays]
    device.launch(
        launch.kernel,
        grid=launch.grid,
        block=launch.block_of(threads),
        args=copies,
        shared_bytes=launch.shared_bytes,
        order=order,
        seed=seed,
    )
    return named(launch, copies)


def runs(kernel: str, launch: Launch, threads: int, arrays: list[Any]) -> Iterator[dict[str, Any]]:
    """The arguments by name after a launch in each of the orders."""
    for order, seed in ORDERS:
        yield run(module(kernel), launch, threads, arrays, order, seed)


def assert_same(outcome: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    for name, value in expected.items():
        np.testing.assert_array_equal(outcome[name], value, err_msg=name, strict=True)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{kernel}-{i}" for i, (kernel, _) in enumerate(CASES)])
def test_a_deep_learning_kernel_gives_what_numpy_does(number: int) -> None:
    kernel, launch = CASES[number]
    arrays = launch.arrays(seed=number)
    for threads in BLOCKS[kernel]:
        expected = expected_of(kernel, launch, threads, arrays)
        assert set(expected) == {argument.name for argument in launch.arguments if argument.output}
        for outcome in runs(kernel, launch, threads, arrays):
            assert_same(outcome, expected)


@pytest.mark.parametrize("batch, channels, positions", [(37, 5, 53), (3, 2, 7), (64, 3, 211)])
def test_statistics_are_those_of_float64(batch: int, channels: int, positions: int) -> None:
    """An update of a mean or a sum rounds a few times, each by at most 2^-24 of numbers below 4 and 16.

    A thread makes as many updates as it has values, and ten merges follow: that many roundings of a mean, times six
    operations each, bound its error; those of the mean enter each square twice, times the distance of at most 4.
    """
    launch = workloads.batchnorm(batch, channels, positions)
    arrays = launch.arrays(seed=7)
    expected = references.batchnorm(named(launch, arrays))
    for threads in BLOCKS["batchnorm"]:
        width, height, _ = launch.block_of(threads)
        steps = -(-batch // height) * -(-positions // width) + 10
        of_mean = steps * 6 * 4 * 2.0**-24
        for outcome in runs("batchnorm", launch, threads, arrays):
            assert np.abs(outcome["means"] - expected["means"]).max() <= of_mean
            assert np.abs(outcome["variances"] - expected["variances"]).max() <= 2 * 4 * of_mean


def test_the_place_of_a_maximum_is_that_of_the_first_or_of_the_last_nan() -> None:
    launch = workloads.maxpool(4, 13, 11)
    arrays = launch.arrays(seed=3)
    arrays[0][:] = np.round(2 * arrays[0])
    generator = np.random.default_rng(4)
    arrays[0][generator.integers(0, arrays[0].size, 40)] = np.nan
    arrays[0][generator.integers(0, arrays[0].size, 40)] = -np.inf
    # Of a window of -inf alone the place is the first inside the image.
    arrays[0][-143:] = -np.inf
    expected = references.maxpool(named(launch, arrays))
    assert np.isnan(expected["output"]).any() and np.isneginf(expected["output"]).any()
    for outcome in runs("maxpool", launch, 64, arrays):
        assert_same(outcome, expected)


def test_values_on_the_bounds_of_a_histogram_and_outside() -> None:
    launch = workloads.hist(8, 4, -1.0, 1.0)
    arrays = launch.arrays(seed=0)
    arrays[0][:] = [-1.0, 1.0, np.nextafter(np.float32(1), np.float32(2)), -1.5, np.nan, np.inf, 0.0, -0.5]
    for outcome in runs("hist", launch, 32, arrays):
        np.testing.assert_array_equal(outcome["counts"], [1, 1, 1, 1])


@pytest.mark.parametrize(
    "number", range(len(SEARCHES)), ids=[f"{kernel}-{i}" for i, (kernel, _) in enumerate(SEARCHES)]
)
def test_a_search_gives_the_digests_and_the_best_nonce(number: int) -> None:
    kernel, launch = SEARCHES[number]
    arrays = launch.arrays(seed=number)
    given = named(launch, arrays)
    nonces = launch.grid[0] * launch.threads * given["tries"]
    assert given["kept"] == nonces
    expected = hash_references.searched(kernel, given, nonces)
    assert set(expected) == {argument.name for argument in launch.arguments if argument.output}
    for outcome in runs(kernel, launch, launch.threads, arrays):
        assert_same(outcome, expected)


def test_the_hashes_written_in_python_are_the_published_ones() -> None:
    zero = "0ce8d4ef4dd7cd8d62dfded9d4edb0a774ae6a41929a74da23109e8f11139c87"
    zeros = "d419bad32d504fb7d44d460c42c5593fe544fa4c135dec31e21bd9abdcc22d41"
    assert hash_references.blake256(bytes(1)).hex() == zero
    assert hash_references.blake256(bytes(72)).hex() == zeros
    empty = "c5d2460186f7233c927e7db2dcc703c0e500b653ca82273b7bfad8045d85a470"
    assert hash_references.keccak(b"", 32).hex() == empty
    for length in (0, 1, 40, 71, 72, 73, 96, 135, 136, 137):
        message = bytes(range(length))
        assert hash_references.keccak(message, 64, suffix=6) == hashlib.sha3_512(message).digest()
        assert hash_references.keccak(message, 32, suffix=6) == hashlib.sha3_256(message).digest()


def test_launches_grow_with_the_size_and_stay_within_32_bits() -> None:
    for kernel in workloads.KERNELS:
        sizes = (1, 2, workloads.GPU_SIZES[kernel])
        elements = [sum(argument.count for argument in workloads.launch_of(kernel, size).arguments) for size in sizes]
        assert elements == sorted(elements)
        assert max(argument.count for argument in workloads.launch_of(kernel, sizes[-1]).arguments) < 2**31
        assert Launch.from_json(workloads.launch_of(kernel, 3).to_json()) == workloads.launch_of(kernel, 3)


def test_loops_turn_in_each_partition_at_the_smallest_size() -> None:
    most = workloads.BLOCK - 128
    for kernel, items in (("hist", "values"), ("im2col", "columns"), ("maxpool", "output"), ("upsample", "output")):
        launch = workloads.launch_of(kernel, 1)
        counts = {argument.name: argument.count for argument in launch.arguments}
        given = named(launch, launch.arrays(0))
        each = {"im2col": 9, "upsample": given.get("planes", 1)}.get(kernel, 1)
        assert counts[items] // each > launch.grid[0] * most
    batchnorm = named(workloads.launch_of("batchnorm", 1), workloads.launch_of("batchnorm", 1).arrays(0))
    assert batchnorm["batch"] > 16 and batchnorm["positions"] > most // 16


def test_the_pairs_are_all_within_a_domain() -> None:
    for domain, count in ((workloads.DEEP_LEARNING, 10), (workloads.HASHES, 6)):
        pairs = [pair for pair in workloads.PAIRS if {pair.first, pair.second} <= set(domain)]
        assert len({frozenset((pair.first, pair.second)) for pair in pairs}) == len(pairs) == count
    assert all(pair.starred in (pair.first, pair.second) for pair in workloads.PAIRS)


@pytest.mark.parametrize("kernel", workloads.KERNELS)
def test_no_kernel_races_or_leaves_its_buffers(kernel: str) -> None:
    """Races are looked for where no atomics order what threads do; bounds and what is read unwritten everywhere."""
    launch = workloads.launch_of(kernel, 1)
    checked = compile_text(workloads.source_of(kernel).read_text(), checked=True)
    report = checked.launch(
        launch.kernel,
        grid=launch.grid,
        block=launch.block_of(launch.threads or BLOCKS[kernel][0]),
        args=launch.arrays(seed=5),
        shared_bytes=launch.shared_bytes,
        order="shuffled",
        seed=6,
    )
    assert not report.findings
    assert report.races_checked == (kernel in ("batchnorm", "im2col", "maxpool", "upsample"))


@pytest.mark.parametrize("kernel, barrier", [("batchnorm", 1), ("hist", 0), ("hist", 1)])
def test_a_barrier_that_is_left_out_shows_in_some_order(kernel: str, barrier: int) -> None:
    """The orders of threads are such that the checks of fused kernels have something to find."""
    launch, threads = workloads.launch_of(kernel, 1), BLOCKS[kernel][1]
    arrays = launch.arrays(seed=11)
    expected = expected_of(kernel, launch, threads, arrays)
    parts = workloads.source_of(kernel).read_text().split("__syncthreads();")
    assert len(parts) == 3
    joints = ["__syncthreads();", "__syncthreads();", ""]
    joints[barrier] = ""
    weakened = compile_text("".join(part + joint for part, joint in zip(parts, joints)))
    outcomes = [run(weakened, launch, threads, arrays, "shuffled", seed) for seed in range(5)]
    assert any(not np.array_equal(outcome[name], expected[name]) for outcome in outcomes for name in expected)


@pytest.mark.parametrize("name", workloads.GROUPS)
@pytest.mark.parametrize("space", SPACES)
def test_a_fused_pair_gives_the_bits_of_its_kernels(name: str, space: str) -> None:
    parts = workloads.parts_of(dict.fromkeys(workloads.GROUPS[name], 1))
    splits = even_split(parts, workloads.BLOCK)
    fused = fuse(parts, splits, space=space)
    waits = re.findall(r"bar\.sync (\d+), (\d+);", fused.text)
    if space == "thread":
        # Orders may not show that two parts have one barrier, where one of them always comes first.
        waiting = [n for n, kernel in enumerate(workloads.GROUPS[name]) if kernel in ("batchnorm", "hist")]
        assert waits == [(str(n + 1), str(splits[n])) for n in waiting]
    outcome = check(fused, orders=1, seed=17)
    assert outcome.buffers >= 4 and not outcome.differences


def test_the_benchmark_of_pairs_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pairs.json"
    command = ["--orders", "1", "--arch", "--out", str(out), "--only", "blake2b+sha256"]
    assert pairs.main(command) == 0
    kept = json.loads(out.read_text())["results"]
    assert [result["name"] for result in kept] == ["blake2b+sha256"] and len(kept[0]["checks"]) == len(SPACES)
    table = capsys.readouterr().out
    assert "| blake2b+sha256 | 1 | 1 | 1 | 1 | 6 | 0 |" in table

    def unexpected(*_: object) -> None:
        raise AssertionError("what is done was done again")

    monkeypatch.setattr(pairs, "measured", unexpected)
    assert pairs.main(command) == 0
    assert json.loads(out.read_text())["results"] == kept and capsys.readouterr().out == table
    with pytest.raises(AssertionError, match="done again"):
        pairs.main([*command, "--orders", "2"])


def test_the_gpu_benchmark_runs_without_a_gpu_up_to_its_launches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["rehearse", "--out", str(tmp_path), "--only", "blake256+ethash", "--ratios", "1", "2"]
    assert gpu.main(command) == 0
    record = json.loads((tmp_path / "results.json").read_text())
    assert list(record["results"]) == task_names(["blake256+ethash"], [1, 2])
    assert all(entry["status"] == "ok" for entry in record["results"].values())
    fused = record["results"]["figure7/blake256+ethash/1"]["result"]
    assert set(fused["fused"]) == {"hfuse", "vfuse"} and len(fused["trials"]) == 2
    assert record["results"]["check/blake256+ethash"]["result"] == {"kernels": 3, "different": []}
    assert "*blake256*+ethash" in capsys.readouterr().out
    # What is done is not done again.
    assert gpu.main(command) == 0
    assert json.loads((tmp_path / "results.json").read_text())["results"] == record["results"]


def test_a_task_that_takes_too_long_is_ended_and_the_others_are_done(tmp_path: Path) -> None:
    command = ["rehearse", "--out", str(tmp_path), "--only", "blake256+ethash", "--ratios", "1"]
    assert gpu.main([*command, "--task-seconds", "-1"]) == 1
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert "timeout" in {entry["status"] for entry in results.values()}
    assert gpu.main(command) == 0


def test_counters_are_read_from_what_nsight_compute_prints() -> None:
    names = ["ID", "Kernel Name", *METRICS.values()]
    rows = [names, ["", "", *["%"] * 4], ["0", "alone_histogram", "12.5", "1,500.0", "2,000.0", "74.25"]]
    printed = "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows) + "\n"
    expected = {"issue_slot_utilization": 12.5, "memory_stall": 75.0, "achieved_occupancy": 74.25}
    assert ncu_metrics(printed) == expected
    assert ncu_metrics(printed.replace("74.25", "n/a")) is None
    assert ncu_metrics("==ERROR== ERR_NVGPUCTRPERM") is None
