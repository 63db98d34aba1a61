"""What a GPU can do in a second: the descriptions that the cost model reads, one JSON file for each product.

A file gives each figure with its source, and says whether it is a specification, a measurement or an estimate. No
figure is fitted to a kernel.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np

from souffle.errors import OptionError
from souffle.schedule.gpu.device import SHARING, GpuDevice, device_for

__all__ = ["KINDS", "CostDevice", "Figure", "cost_device", "device_of_arch", "figures_of", "product_names"]

Points = tuple[tuple[int, float], ...]
"""A figure that depends on a number: pairs of the number and the value, the number rising."""

KINDS = ("specification", "measurement", "estimate")
"""Where a figure may come from."""

_FOLDER = Path(__file__).with_name("devices")


@dataclass(frozen=True)
class Figure:
    """One figure of a device file.

    Attributes
    ----------
    value : float or Points
    kind : str
        One of :data:`KINDS`.
    source : str
        A document, or the reasoning of an estimate.
    """

    value: float | Points
    kind: str
    source: str


@dataclass(frozen=True)
class CostDevice:
    """A product's capacities, rates and latencies.

    Attributes
    ----------
    product, arch : str
        Such as ``"A100-SXM4-40GB"`` and ``"sm_80"``.
    sm_count, registers_per_sm, shared_per_sm, shared_per_block, threads_per_sm, blocks_per_sm : int
        As for :class:`souffle.schedule.gpu.device.GpuDevice`.
    clock_hz : float
        Of the multiprocessors.
    l1_bytes : int
        Shared memory and L1 cache of a multiprocessor together.
    l2_bytes : int
        That all multiprocessors can read again and again from the L2 cache: less than the cache where its halves keep
        copies of each other's lines.
    memory_bytes_per_second : float
        That reads of device memory achieve.
    l2_bytes_per_clock, l2_bytes_per_clock_per_sm : float
        All that the L2 cache delivers as measured, and what one multiprocessor can take.
    shared_bytes_per_clock_per_sm : float
        Of shared memory and the L1 cache, which share a data path.
    warp_instructions_per_clock_per_sm : float
        What the schedulers issue.
    fp32_per_clock_per_sm, int32_per_clock_per_sm, special_per_clock_per_sm : float
        Operations of single threads; a fused multiply-add is one.
    tensor_fma_per_clock_per_sm, tensor_reach : float
        Of fp16 with fp32 totals, and the part of it that mma instructions reach.
    tf32_share : float
        The part of the rate of fp16 that TF32 has.
    shared_latency_clocks, l1_latency_clocks, l2_latency_clocks, memory_latency_clocks : float
        From a load to its use.
    code_cache_bytes : int
        Of machine code that a multiprocessor can execute again and again without fetching it from the L2 cache.
    code_bytes_per_clock : float
        Of machine code that it executes from the L2 cache, one instruction after another.
    arithmetic_latency_clocks, barrier_clocks : float
        From an instruction to one that needs its result; of a block's barrier beyond the wait for its last warp.
    launch_seconds, graph_node_seconds : float
        Between two kernels that are launched back to back, and between two nodes of a CUDA graph.
    grid_sync_points : tuple of (int, float)
        Seconds of a barrier of a whole grid of so many blocks, which have nothing to wait for but each other.
    flag_seconds : float
        By which a wait for the flags of some blocks takes longer for each of these.
    crowded_multiprocessors : int
        Which get all of their blocks first where a cooperative launch has several for each: a stage of few tiles, which
        the first blocks compute, then has most of them on these.
    """

    product: str
    arch: str
    sm_count: int
    clock_hz: float
    registers_per_sm: int
    shared_per_sm: int
    shared_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    l1_bytes: int
    l2_bytes: int
    memory_bytes_per_second: float
    l2_bytes_per_clock: float
    l2_bytes_per_clock_per_sm: float
    shared_bytes_per_clock_per_sm: float
    warp_instructions_per_clock_per_sm: float
    fp32_per_clock_per_sm: float
    int32_per_clock_per_sm: float
    special_per_clock_per_sm: float
    tensor_fma_per_clock_per_sm: float
    tensor_reach: float
    tf32_share: float
    shared_latency_clocks: float
    l1_latency_clocks: float
    l2_latency_clocks: float
    memory_latency_clocks: float
    code_cache_bytes: int
    code_bytes_per_clock: float
    arithmetic_latency_clocks: float
    barrier_clocks: float
    launch_seconds: float
    graph_node_seconds: float
    grid_sync_points: Points
    flag_seconds: float
    crowded_multiprocessors: int

    def grid_sync_seconds(self, blocks: int | np.ndarray) -> float | np.ndarray:
        """What a grid of so many blocks waits for its barrier.

        On the lines between the points; as long as at the first point for fewer blocks, and beyond the last point
        rising as between the last two.

        Parameters
        ----------
        blocks : int or array of int
            That are resident, and arrive.
        """
        numbers, seconds = zip(*self.grid_sync_points, strict=True)
        found = np.interp(blocks, numbers, seconds)
        if len(numbers) > 1:
            slope = (seconds[-1] - seconds[-2]) / (numbers[-1] - numbers[-2])
            found = found + np.maximum(np.subtract(blocks, numbers[-1]), 0) * max(slope, 0.0)
        return found if isinstance(blocks, np.ndarray) else float(found)

    def flag_wait_seconds(self, others: int, blocks: int) -> float:
        """What a block of so many waits for the flags of some others, which are set at once.

        It is as long as a barrier of all, and longer for each that is looked at: what flags save is the wait for blocks
        that have more to do.
        """
        return self.grid_sync_seconds(blocks) + min(others, blocks) * self.flag_seconds

    @property
    def shared_sync_seconds(self) -> float:
        """Of a barrier in a kernel that is not known yet, with the blocks that stages leave each other."""
        return self.grid_sync_seconds(SHARING * self.sm_count)

    @property
    def limits(self) -> GpuDevice:
        """What the scheduler and the partition know of it."""
        return GpuDevice(
            self.arch,
            self.product,
            self.sm_count,
            self.shared_per_sm,
            self.shared_per_block,
            self.threads_per_sm,
            self.blocks_per_sm,
            self.registers_per_sm,
        )


def product_names() -> tuple[str, ...]:
    """The products that are described, in alphabetical order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def figures_of(product: str | Path) -> dict[str, Figure]:
    """Each figure of a product with its source; `product` and errors are those of :func:`cost_device`."""
    figures = _read(product)["figures"]
    return {name: Figure(**{**figure, "value": _value(figure["value"])}) for name, figure in figures.items()}


def cost_device(product: str | Path) -> CostDevice:
    """The description of a GPU.

    Parameters
    ----------
    product : str or Path
        A product, such as ``"H200-SXM5-141GB"``, or a file that ``souffle measure-device`` has written.

    Raises
    ------
    OptionError
        If it is neither, naming the products described; or if the file is not a whole description, naming the figure.
    """
    return _product(product) if product in product_names() else _device(_read(product))


@cache
def _product(product: str) -> CostDevice:
    return _device(_read(product))


def _device(described: dict) -> CostDevice:
    whole = {field.name for field in fields(CostDevice) if field.type == "int"}
    values = {
        name: int(figure["value"]) if name in whole else _value(figure["value"])
        for name, figure in described["figures"].items()
    }
    return CostDevice(product=described["product"], arch=described["arch"], **values)


def _value(value: float | list) -> float | Points:
    return tuple((int(number), float(each)) for number, each in value) if isinstance(value, list) else float(value)


def _read(product: str | Path) -> dict:
    names = product_names()
    if product in names:
        return json.loads((_FOLDER / f"{product}.json").read_text())
    path = Path(product)
    if path.suffix != ".json" or not path.is_file():
        raise OptionError(
            f"no GPU {str(product)!r} is described; described are {', '.join(names)}, and a .json file that souffle "
            "measure-device has written can be given"
        )
    try:
        described = json.loads(path.read_text())
    except ValueError as error:
        raise OptionError(f"{path} is no device description: {error}") from error
    problem = _problem(described)
    if problem is not None:
        raise OptionError(f"{path} is no device description: {problem}; souffle measure-device writes one")
    return described


def _problem(described: object) -> str | None:
    """What a description lacks."""
    if not isinstance(described, dict) or not isinstance(described.get("figures"), dict):
        return "it has no figures"
    for name in ("product", "arch"):
        if not isinstance(described.get(name), str):
            return f"it does not say its {name}"
    figures = described["figures"]
    names = {field.name for field in fields(CostDevice)} - {"product", "arch"}
    for name in sorted(names ^ figures.keys()):
        return f"figure {name} is {'missing' if name in names else 'not known'}"
    for name, figure in figures.items():
        if not isinstance(figure, dict) or set(figure) != {"value", "kind", "source"} or figure["kind"] not in KINDS:
            return f"figure {name} is not a value with its kind ({', '.join(KINDS)}) and source"
        value = figure["value"]
        if name in _BY_NUMBER:
            if not _are_points(value):
                return f"figure {name} is {value!r} and not pairs of a rising whole number and a positive number"
        elif not _is_positive(value):
            return f"figure {name} is {value!r} and not a positive number"
    return None


_BY_NUMBER = {field.name for field in fields(CostDevice) if field.type == "Points"}


def _is_positive(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < float("inf")


def _are_points(value: object) -> bool:
    if not isinstance(value, (list, tuple)) or not value:
        return False
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(_is_positive, pair)) for pair in value):
        return False
    numbers = [pair[0] for pair in value]
    return all(isinstance(number, int) for number in numbers) and numbers == sorted(set(numbers))


def device_of_arch(arch: str) -> CostDevice | None:
    """The description of the product that schedules for an architecture are made for, if there is one.

    Raises
    ------
    OptionError
        If the architecture is not known.
    """
    name = device_for(arch).name
    described = [cost_device(product) for product in product_names() if product.split("-")[0] == name]
    return next((device for device in described if device.arch == arch), None)
