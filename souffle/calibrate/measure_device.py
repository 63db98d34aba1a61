"""Measures the GPU at hand into the description that the cost model reads (``souffle.cost.device.CostDevice``).

Rates come from kernels that keep one unit busy, latencies from chains in which each instruction needs the result of the
one before, both counted with the multiprocessors' own clock (Jia et al., Dissecting the NVIDIA Volta GPU Architecture
via Microbenchmarking, 2018). What the GPU has of everything, the driver says. What could not be measured is taken over
from a description that is shipped, and then is an estimate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from souffle.calibrate.device_bench import Bench
from souffle.calibrate.device_meters import GROUPS, Meter, Points, Reading
from souffle.codegen.nvcc import compile_cubin
from souffle.errors import DeviceError
from souffle.runtime.cuda import Cuda

__all__ = [
    "FIGURES",
    "SOURCE",
    "Measured",
    "Reading",
    "description",
    "machine_code",
    "measure",
    "product_name",
    "reference",
]

SOURCE = Path(__file__).with_suffix(".cu")
"""The kernels."""

_SHIPPED = Path(__file__).parents[1] / "cost" / "devices"
_ASKED = {
    "sm_count": "MULTIPROCESSOR_COUNT",
    "registers_per_sm": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "shared_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "shared_per_block": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "threads_per_sm": "MAX_THREADS_PER_MULTIPROCESSOR",
    "blocks_per_sm": "MAX_BLOCKS_PER_MULTIPROCESSOR",
}
"""What the driver knows."""
FIGURES = (
    *("sm_count", "clock_hz", "registers_per_sm", "shared_per_sm", "shared_per_block", "threads_per_sm"),
    *("blocks_per_sm", "l1_bytes", "l2_bytes", "memory_bytes_per_second", "l2_bytes_per_clock"),
    *("l2_bytes_per_clock_per_sm", "shared_bytes_per_clock_per_sm", "warp_instructions_per_clock_per_sm"),
    *("fp32_per_clock_per_sm", "int32_per_clock_per_sm", "special_per_clock_per_sm", "tensor_fma_per_clock_per_sm"),
    *("tensor_reach", "tf32_share", "shared_latency_clocks", "l1_latency_clocks", "l2_latency_clocks"),
    "memory_latency_clocks",
    *("code_cache_bytes", "code_bytes_per_clock", "arithmetic_latency_clocks", "barrier_clocks"),
    *("launch_seconds", "graph_node_seconds"),
    *("grid_sync_points", "flag_seconds", "crowded_multiprocessors"),
)
"""Those of ``souffle.cost.device.CostDevice``, which a machine without the compiler cannot import."""


@dataclass(frozen=True)
class Measured:
    """All that was found.

    Attributes
    ----------
    name, arch : str
        Of the device.
    figures : dict of str to Reading
        Those of a description.
    more : dict
        What the cost model does not use: rates of other mixtures, how grid syncs were measured, copies.
    """

    name: str
    arch: str
    figures: dict[str, Reading]
    more: dict[str, Any]


def machine_code(arch: str) -> bytes:
    """The kernels for an architecture.

    Raises
    ------
    CompilerNotFoundError
        If there is no nvcc.
    """
    return compile_cubin(SOURCE.read_text(), arch)[0]


def measure(
    cuda: Cuda,
    image: bytes,
    *,
    repeats: int = 15,
    small: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Measure a device; takes some seconds.

    Parameters
    ----------
    cuda : Cuda
    image : bytes
        Of :func:`machine_code`.
    repeats : int
        Pairs of runs of each kernel.
    small : bool
        Do little work: for a driver without a GPU, whose times mean nothing.
    progress : callable
        Told what is being measured.

    Raises
    ------
    DeviceError
        If a kernel fails or leaves a wrong result.
    """
    figures, more = _capacities(cuda), {}
    with cuda.current(), Bench(cuda, image, repeats) as bench:
        meter = Meter(bench, small)
        for text, group in GROUPS:
            progress(f"measuring {text}")
            group(meter, figures, more)
    return Measured(cuda.name, cuda.arch, figures, more)


def _capacities(cuda: Cuda) -> dict[str, Reading]:
    return {name: Reading(cuda.attribute(key), f"the driver's {key}") for name, key in _ASKED.items()}


def product_name(name: str) -> str:
    """A device's name as a product's: ``"NVIDIA H200"`` is ``"H200"``, and can name a file."""
    words = [word for word in re.split(r"[^A-Za-z0-9.]+", name) if word and word.upper() != "NVIDIA"]
    return "-".join(words) or "GPU"


def reference(name: str, arch: str) -> tuple[str, dict[str, dict[str, Any]], bool] | None:
    """The shipped description nearest to a device.

    Returns
    -------
    (str, dict, bool) or None
        Its product, its figures, and whether it is of this product; otherwise it is of the same architecture. None
        where no description is of either.
    """
    words = set(product_name(name).upper().split("-"))
    found = []
    for path in sorted(_SHIPPED.glob("*.json")):
        described = json.loads(path.read_text())
        parts = described["product"].upper().split("-")
        same = parts[0] in words and described["arch"] == arch
        if same or described["arch"] == arch:
            found.append((same, len(words & set(parts)), described["product"], described["figures"]))
    if not found:
        return None
    same, _, product, figures = max(found, key=lambda one: one[:2])
    return product, figures, same


def description(measured: Measured, **about: Any) -> dict[str, Any]:
    """The device file: what ``souffle.cost.cost_device`` reads.

    Parameters
    ----------
    measured : Measured
    about
        What else the file says, such as the date.

    Raises
    ------
    DeviceError
        If a figure could not be measured, and no description is shipped from which it could be taken over.
    """
    nearest = reference(measured.name, measured.arch)
    figures = {}
    for name in FIGURES:
        found = measured.figures.get(name, Reading(None, "no kernel measures it"))
        if name == "tensor_reach":
            continue
        if found.value is not None:
            kind = "specification" if name in _ASKED else "measurement"
            figures[name] = _figure(found.value, kind, found.source)
        elif nearest is None:
            raise DeviceError(
                f"{name} of {measured.name} could not be measured ({found.source}), and no {measured.arch} is "
                "described from which it could be taken over; try again when nothing else runs on the GPU"
            )
        else:
            source = f"taken over from {nearest[0]}, since it could not be measured here: {found.source}"
            figures[name] = _figure(nearest[1][name]["value"], "estimate", source)
    figures |= _tensor(figures["tensor_fma_per_clock_per_sm"], nearest)
    ordered = {name: figures[name] for name in FIGURES}
    return {
        "product": f"{product_name(measured.name)}-measured", "arch": measured.arch, "figures": ordered,
        "device": measured.name, **about, "more": measured.more,
    }  # fmt: skip


def _figure(value: float | Points, kind: str, source: str) -> dict[str, Any]:
    return {"value": value, "kind": kind, "source": source}


def _tensor(reached: dict[str, Any], nearest: tuple[str, dict[str, dict[str, Any]], bool] | None) -> dict[str, Any]:
    """Peak and reach, of which mma instructions show the product only; the peak is the architecture's specification."""
    rate, reach = "tensor_fma_per_clock_per_sm", "tensor_reach"
    if reached["kind"] != "measurement":
        return {rate: reached, reach: {**nearest[1][reach], "kind": "estimate"}}
    if nearest is None or nearest[1][rate]["value"] < reached["value"]:
        return {rate: reached, reach: _figure(1.0, "estimate", "the rate is already that which mma instructions reach")}
    peak = nearest[1][rate]
    part = _figure(
        reached["value"] / peak["value"], "measurement", f"{reached['value']:.0f} a clock: {reached['source']}"
    )
    return {rate: dict(peak), reach: part}
