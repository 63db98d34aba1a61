"""Device files: complete, sourced, and in agreement with each other and with the scheduler's figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

import souffle.cost
from souffle.cost import CostDevice, cost_device, device_of_arch, figures_of, product_names
from souffle.cost.device import KINDS
from souffle.errors import OptionError
from souffle.schedule.gpu.device import DEVICES

PRODUCTS = ("A100-SXM4-40GB", "H100-SXM5-80GB", "H200-SXM5-141GB", "V100-PCIE-16GB")


def test_the_four_products_are_described() -> None:
    assert product_names() == PRODUCTS


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_figure_is_there_with_its_source(product: str) -> None:
    figures = figures_of(product)
    assert set(figures) == {field.name for field in fields(CostDevice)} - {"product", "arch"}
    for name, figure in figures.items():
        assert figure.kind in KINDS, name
        assert len(figure.source) > 10, name
        values = [each for _, each in figure.value] if isinstance(figure.value, tuple) else [figure.value]
        assert min(values) > 0, name
    assert cost_device(product).product == product


@pytest.mark.parametrize("product", PRODUCTS[:3])
def test_capacities_are_the_schedulers(product: str) -> None:
    found = cost_device(product).limits
    known = DEVICES[found.arch]
    capacities = ("shared_per_sm", "shared_per_block", "threads_per_sm", "blocks_per_sm", "registers_per_sm")
    for name in ("sm_count", *capacities):
        assert getattr(found, name) == getattr(known, name), name
    assert found.resident_blocks(256, 20_000, 100) == known.resident_blocks(256, 20_000, 100)


def test_volta_is_described_for_plans_alone() -> None:
    """No code is made for it, and what it has not been measured for is said to be an estimate."""
    assert cost_device("V100-PCIE-16GB").arch == "sm_70" not in DEVICES
    with pytest.raises(OptionError, match="arch 'sm_70' is not known"):
        device_of_arch("sm_70")
    estimates = {name for name, figure in figures_of("V100-PCIE-16GB").items() if figure.kind == "estimate"}
    assert {"launch_seconds", "graph_node_seconds", "grid_sync_points", "code_bytes_per_clock"} < estimates


# Dense fp16 on tensor cores, and fp32, in TFLOPS, of NVIDIA's data sheets, the H100's fp32 at 1.98 GHz.
@pytest.mark.parametrize(
    ("product", "tensor", "fp32"),
    [
        ("A100-SXM4-40GB", 312, 19.5),
        # The data sheet's rate of tensor cores is at 1.83 GHz, and that of others at 1.98, which is what runs.
        ("H100-SXM5-80GB", 989.4 * 1.98 / 1.83, 66.9),
        ("H200-SXM5-141GB", 989.4 * 1.98 / 1.83, None),
        ("V100-PCIE-16GB", 112, 14),
    ],
)
def test_rates_give_the_peaks_of_the_data_sheets(product: str, tensor: float, fp32: float | None) -> None:
    device = cost_device(product)
    clocks = 2e-12 * device.sm_count * device.clock_hz
    assert clocks * device.tensor_fma_per_clock_per_sm == pytest.approx(tensor, rel=0.01)
    if fp32 is not None:
        assert clocks * device.fp32_per_clock_per_sm == pytest.approx(fp32, rel=0.01)


@pytest.mark.parametrize("product", PRODUCTS)
def test_each_level_is_slower_and_farther_than_the_one_before(product: str) -> None:
    device = cost_device(product)
    on_chip = device.shared_bytes_per_clock_per_sm * device.sm_count * device.clock_hz
    l2 = device.l2_bytes_per_clock * device.clock_hz
    assert on_chip > l2 > device.memory_bytes_per_second
    assert device.shared_latency_clocks < device.l1_latency_clocks < device.l2_latency_clocks
    assert device.l2_latency_clocks < device.memory_latency_clocks


# Microseconds of te42kyfo/gpu-benches' repeated kernel of one load and one store, by blocks that wait for each other,
# as its bandwidths of 2024 give them.
PUBLISHED = {
    "A100-SXM4-40GB": {130: 1.40, 261: 1.50, 520: 2.36, 1047: 5.44},
    "H200-SXM5-141GB": {130: 1.27, 261: 1.55, 520: 1.84, 1047: 2.01},
}


@pytest.mark.parametrize("product", PUBLISHED)
def test_barriers_take_what_was_published(product: str) -> None:
    """Cooperative groups', of which those of a Hopper GPU are not those that are described: a counter takes less."""
    device = cost_device(product)
    load = device.l2_latency_clocks / device.clock_hz
    for blocks, microseconds in PUBLISHED[product].items():
        seconds = device.grid_sync_seconds(blocks) + load
        if device.arch == "sm_80":
            assert seconds == pytest.approx(microseconds * 1e-6, rel=0.005)
        else:
            assert 0.75 < seconds / (microseconds * 1e-6) < 1.15


def test_waits_for_flags_take_longer_by_the_blocks_that_are_waited_for() -> None:
    """As measured: flags of 32 blocks and of all, microseconds by blocks of the grid."""
    device = cost_device("H100-SXM5-80GB")
    for blocks, few, every in ((132, 1.32, 2.58), (264, 1.55, 4.69), (528, 2.08, 8.73)):
        assert device.flag_wait_seconds(32, blocks) == pytest.approx(few * 1e-6, rel=0.1)
        assert device.flag_wait_seconds(blocks, blocks) == pytest.approx(every * 1e-6, rel=0.1)
        assert device.flag_wait_seconds(10_000, blocks) == device.flag_wait_seconds(blocks, blocks)


@pytest.mark.parametrize("product", PRODUCTS)
def test_more_blocks_wait_longer(product: str) -> None:
    device = cost_device(product)
    blocks = np.arange(1, 4000)
    seconds = device.grid_sync_seconds(blocks)
    assert (np.diff(seconds) >= 0).all() and seconds[0] == device.grid_sync_points[0][1] > 0
    assert seconds[-1] > device.grid_sync_points[-1][1]
    assert [device.grid_sync_seconds(int(number)) for number in blocks[::500]] == list(seconds[::500])
    # Between two points as between two numbers on a line.
    (few, short), (many, long) = device.grid_sync_points[:2]
    assert device.grid_sync_seconds((few + many) // 2) == pytest.approx((short + long) / 2, rel=0.01)


def test_an_unknown_product_names_those_described() -> None:
    with pytest.raises(OptionError, match=", ".join(PRODUCTS)):
        cost_device("H300")
    with pytest.raises(OptionError, match=r"no GPU '\.\./device'"):
        figures_of("../device")


def test_a_file_describes_a_gpu_as_a_product_does(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    described = json.loads((Path(souffle.cost.__file__).parent / "devices" / "A100-SXM4-40GB.json").read_text())
    path.write_text(json.dumps(described | {"more": {"note": "kept"}}))
    assert cost_device(path) == cost_device(str(path)) == cost_device("A100-SXM4-40GB")
    described["figures"]["clock_hz"]["value"] = 1e9
    path.write_text(json.dumps(described))
    assert cost_device(path).clock_hz == 1e9


def _syncs(value: object) -> Callable[[dict], object]:
    return lambda described: described["figures"]["grid_sync_points"].update(value=value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["figures"].pop("clock_hz"), "figure clock_hz is missing"),
        (lambda d: d["figures"].update(clock={}), "figure clock is not known"),
        (lambda d: d["figures"]["clock_hz"].update(value=0), "figure clock_hz is 0 and not a positive"),
        (lambda d: d["figures"]["clock_hz"].update(value="fast"), "figure clock_hz is 'fast'"),
        (lambda d: d["figures"]["clock_hz"].update(value=float("nan")), "figure clock_hz is nan"),
        (lambda d: d["figures"]["clock_hz"].update(value=[[1, 2.0]]), r"figure clock_hz is \[\[1, 2.0\]\] and not a p"),
        (_syncs(1e-6), "figure grid_sync_points is 1e-06 and not pairs"),
        (_syncs([]), r"figure grid_sync_points is \[\] and not pairs"),
        (_syncs([[8, 1e-6], [8, 2e-6]]), "figure grid_sync_points is .* and not pairs of a rising whole number"),
        (_syncs([[8, 0]]), "figure grid_sync_points is .* and not pairs"),
        (_syncs([[8.5, 1e-6]]), "figure grid_sync_points is .* and not pairs"),
        (lambda d: d["figures"]["clock_hz"].update(kind="guess"), "figure clock_hz is not a value with its kind"),
        (lambda d: d.pop("arch"), "does not say its arch"),
        (lambda d: d.pop("figures"), "has no figures"),
    ],
)
def test_a_damaged_file_names_the_figure(tmp_path: Path, change: Callable[[dict], object], message: str) -> None:
    path = tmp_path / "mine.json"
    described = json.loads((Path(souffle.cost.__file__).parent / "devices" / "A100-SXM4-40GB.json").read_text())
    change(described)
    path.write_text(json.dumps(described))
    with pytest.raises(OptionError, match=f"mine.json is no device description: .*{message}"):
        cost_device(path)
    path.write_text("{")
    with pytest.raises(OptionError, match=r"mine.json is no device description"):
        cost_device(path)


def test_the_files_are_part_of_the_package() -> None:
    root = Path(souffle.cost.__file__).parents[2]
    _, _, data = (root / "pyproject.toml").read_text().partition("[tool.setuptools.package-data]")
    globs = [part for part in data.partition("\n]")[0].split('"') if "/" in part]
    for product in PRODUCTS:
        assert any(fnmatch(f"cost/devices/{product}.json", glob) for glob in globs)
    assert any(fnmatch("calibrate/measure_device.cu", glob) for glob in globs)
