"""Where the time of a network goes, kernel by kernel and stage by stage, as a trace.

On a GPU the kernels are compiled once more, with a line before each stage and wait that reads the device's clock: each
block is a track. The processor's code is timed launch by launch. The CPU device says nothing about time: there the
axis counts launches, and each has what it moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from souffle.benchmark.trace import Slice, Trace
from souffle.codegen.nvcc import compile_cubin
from souffle.codegen.plan import Plan
from souffle.runtime import Network
from souffle.runtime.cuda import Cuda
from souffle.runtime.stamped_run import stamped_run
from souffle.runtime.stamps import NANOSECONDS, Twin, stamped

__all__ = ["gpu_trace", "profile_of", "twin_of"]

_RUNS = 11
"""Of which the one is shown that took the median time."""
_WARMUP = 3


def profile_of(network: Any, inputs: Mapping[str, np.ndarray]) -> Trace:
    """The trace of one run, the median one of several.

    Parameters
    ----------
    network : Network or HostNetwork
        A network on a GPU is compiled again, with clocks, by nvcc.
    inputs : mapping of str to array

    Raises
    ------
    CompilerNotFoundError
        If there is no nvcc for a GPU's kernels, or no g++ for the CPU device.
    """
    if not isinstance(network, Network):
        return _host_trace(network, inputs)
    if network.device == "cpu":
        return _counts(network, inputs)
    cuda = Cuda(int(network.device.partition(":")[2] or 0))
    arch = network.plan.options.arch
    return gpu_trace(network.plan, twin_of(network.plan, lambda text: compile_cubin(text, arch)[0]), inputs, cuda)


def twin_of(plan: Plan, compiled: Callable[[str], bytes]) -> Twin:
    """The kernels of a plan with the device's clock, compiled by what is given."""
    texts, labels = [], {}
    for module in plan.modules:
        text, found = stamped(module.text, NANOSECONDS)
        texts.append(text)
        labels |= found
    return Twin(tuple(map(compiled, texts)), labels)


def gpu_trace(plan: Plan, twin: Twin, inputs: Mapping[str, np.ndarray], cuda: Cuda) -> Trace:
    """Of kernels with clocks: what each block did when."""
    with stamped_run(plan, twin, inputs, cuda) as running:
        for _ in range(_WARMUP):
            running.run()
        runs = sorted((running.run() for _ in range(_RUNS)), key=lambda run: run[0])
    _, stamps = runs[len(runs) // 2]
    start = min(int(one.min()) for one in stamps)
    slices = []
    for number, (launch, one) in enumerate(zip(plan.launches, stamps, strict=True)):
        kernel = plan.kernels[launch.kernel]
        ends = int(one.min()), int(one.max())
        about = {"launch": number, "blocks": one.shape[1], "threads": kernel.threads}
        slices.append(Slice(kernel.name, "kernels", (ends[0] - start) / 1e3, (ends[1] - ends[0]) / 1e3, about))
        labels = twin.labels[kernel.name]
        for block in range(one.shape[1]):
            times = one[:, block] - start
            slices += [
                Slice(label, f"block {block}", int(begin) / 1e3, int(end - begin) / 1e3, {"launch": number})
                for label, begin, end in zip(labels, times[:-1], times[1:], strict=True)
            ]
    return Trace(plan.name, "µs of the GPU's clock, of kernels that write it down", tuple(slices))


def _host_trace(network: Any, inputs: Mapping[str, np.ndarray]) -> Trace:
    given = dict(inputs)
    for _ in range(_WARMUP):
        network.launch_times(given)
    runs = sorted((network.launch_times(given) for _ in range(_RUNS)), key=lambda times: times[-1] - times[0])
    times = runs[len(runs) // 2]
    plan = network.plan
    slices = [
        Slice(
            plan.kernels[launch.kernel].name,
            "launches",
            (begin - times[0]) * 1e6,
            (end - begin) * 1e6,
            {"launch": number, "TEs": list(launch.tes)},
        )
        for number, (launch, begin, end) in enumerate(zip(plan.launches, times[:-1], times[1:], strict=True))
    ]
    return Trace(plan.name, "µs of the wall clock", tuple(slices))


def _counts(network: Network, inputs: Mapping[str, np.ndarray]) -> Trace:
    """Each launch takes one µs of the axis: what it moved is what there is to see."""
    checked = network.on("cpu", checked=True)
    checked(dict(inputs))
    slices: Sequence[Slice] = [
        Slice(
            report.kernel,
            "launches",
            float(number),
            1.0,
            {
                "launch": number,
                "bytes read": report.total.read,
                "bytes written": report.total.written,
                "shared bytes read": report.shared.read,
                "shared bytes written": report.shared.written,
                "block barriers": report.block_barriers,
                "grid barriers": report.grid_syncs,
                "atomics": report.total.atomics + report.shared.atomics,
            },
        )
        for number, report in enumerate(checked.counts)
    ]
    return Trace(network.plan.name, "launches, not time: counts of the CPU device", tuple(slices))
