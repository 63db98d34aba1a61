"""One network with one optimization more, or one less: what is compiled, and what is told of it (004, Tables 4 and 5).

The rows of an ablation are :func:`variants`; :func:`measured_row` makes one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

import souffle
from souffle.codegen.plan import Plan
from souffle.evaluation.stage_times import stage_times
from souffle.options import LEVELS, ON_CHIP, SOUFFLE
from souffle.program import TEProgram
from souffle.runtime import Network
from souffle.runtime.comparison import compare
from souffle.runtime.explain import launch_counts, predicted_seconds, shared_bytes, spilled_bytes

__all__ = ["Expected", "Variant", "measured_row", "plan_figures", "variants"]


@dataclass(frozen=True)
class Variant:
    """One row of an ablation.

    Attributes
    ----------
    level : str
    disable : tuple of str
        What of the level is left out.
    fusion : str
        Who decides which TEs a block computes together.
    more : tuple of pairs
        Names and values of further options of :func:`souffle.compile`.
    """

    level: str
    disable: tuple[str, ...] = ()
    fusion: str = SOUFFLE
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """As a table has it: ``"V4 without teams, stitching-dp, waits=flags"``."""
        without = f" without {', '.join(self.disable)}" if self.disable else ""
        others = [] if self.fusion == SOUFFLE else [self.fusion]
        return ", ".join([self.level + without, *others, *(f"{name}={value}" for name, value in self.more)])

    @property
    def options(self) -> dict[str, Any]:
        """Those of :func:`souffle.compile` that rows differ in."""
        return {"level": self.level, "disable": list(self.disable), "fusion": self.fusion, **dict(self.more)}


def variants(
    *,
    disable: Sequence[str] = (),
    each: bool = False,
    planners: Sequence[str] = (),
    fusion: str = SOUFFLE,
    choices: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> tuple[Variant, ...]:
    """The rows of an ablation in their order: the levels, V4 without one thing each, V0 and V4 by other planners, V4
    with one option each that is not as usual.

    Parameters
    ----------
    disable : sequence of str
        Left out wherever V4 is.
    each : bool
        Also V4 without each of :data:`souffle.options.ON_CHIP`.
    planners : sequence of str
        Other planners; at V0 each of their patterns is a kernel, at V4 these are merged.
    fusion : str
        The planner of the levels.
    choices : mapping of str to sequence
        Further options, and the values of each that are not the usual one.
    """
    out = tuple(disable)
    rows = [Variant(name, out if level.reuse else (), fusion) for name, level in LEVELS.items()]
    first, last = rows[0].level, rows[-1].level
    if each:
        rows += [Variant(last, (*out, name), fusion) for name in ON_CHIP if name not in out]
    for planner in planners:
        rows += [Variant(first, (), planner), Variant(last, out, planner)]
    for option, values in choices.items():
        rows += [Variant(last, out, fusion, ((option, value),)) for value in values]
    return tuple(dict.fromkeys(rows))


@dataclass(frozen=True)
class Expected:
    """Inputs, and what a network is to compute of them.

    Attributes
    ----------
    inputs, outputs : mapping of str to array
    """

    inputs: Mapping[str, np.ndarray] = field(repr=False)
    outputs: Mapping[str, np.ndarray] = field(repr=False)


def measured_row(
    program: TEProgram,
    variant: Variant,
    options: Mapping[str, Any],
    *,
    expected: Callable[[Network], Expected] | None,
    gpu: bool,
    progress: Callable[[str], None],
    hook: Callable[[str, object], object] = lambda stage, result: result,
) -> dict[str, Any]:
    """Compile a program in one way and tell all that can be told of it here.

    Parameters
    ----------
    program : TEProgram
    variant : Variant
    options : mapping
        Further options of :func:`souffle.compile`.
    expected : callable, optional
        Gives inputs for the network, and the outputs that it is compared with; None to run nothing.
    gpu : bool
        Run it on the GPU and take its time; without, its CUDA text runs on the CPU.
    progress : callable
        Told in a few words what is being done.
    hook : callable, optional
        See :func:`souffle.compile`.

    Returns
    -------
    dict
        As JSON has it. ``error``, ``ok`` and ``latency_us`` are None where nothing was run or timed; what is counted
        of kernels is that of one run of the network, and registers, shared memory and stack are the most of any kernel.
    """
    start, cpu = time.perf_counter(), time.process_time()
    network = souffle.compile(
        program,
        target="cuda",
        **{**options, **variant.options},
        device="cuda" if gpu else "cpu",
        progress=progress,
        hook=hook,
    )
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    plan = network.plan
    row: dict[str, Any] = {
        "label": variant.label,
        "level": variant.level,
        "disable": list(plan.options.disable),
        "fusion": variant.fusion,
        **plan_figures(plan),
        "compile_s": round(seconds, 2),
        "compile_cpu_s": round(cpu_seconds, 2),
        **stage_times(plan),
        "error": None,
        "ok": None,
        "latency_us": None,
    }
    if expected is not None:
        progress("running")
        wanted = expected(network)
        outputs = {name: np.asarray(value) for name, value in network(wanted.inputs).items()}
        result = compare(outputs, wanted.outputs, plan.options.precision)
        row |= {"error": float(result.error), "ok": bool(result.ok)}
        if gpu:
            progress("timing")
            row["latency_us"] = network.time(wanted.inputs, mode="graph")["median_us"]
    return row


def plan_figures(plan: Plan) -> dict[str, Any]:
    """What is counted of a plan, and what its kernels ask for."""
    counts = launch_counts(plan)
    launched = [(kernel, count) for kernel, count in zip(plan.kernels, counts, strict=True) if count]
    kernels = [kernel for kernel, _ in launched]
    resources = [kernel.resources for kernel in kernels if kernel.resources is not None]
    compiled = bool(kernels) and len(resources) == len(kernels)
    predicted = predicted_seconds(plan)
    certificate = plan.certificate
    return {
        "arch": plan.options.arch,
        "precision": plan.options.precision,
        "launches": len(plan.launches),
        "kernels": len(plan.kernels),
        "stages": sum(count * len(kernel.stages) for kernel, count in launched),
        "grid_syncs": sum(count * kernel.grid_syncs for kernel, count in launched),
        "block_syncs": sum(
            count * wait.runs for kernel, count in launched for wait in kernel.barriers if wait.scope == "block"
        ),
        "flag_arrivals": sum(count * kernel.arrivals for kernel, count in launched),
        "bytes_read": sum(launch.bytes_read for launch in plan.launches),
        "bytes_written": sum(launch.bytes_written for launch in plan.launches),
        "constant_bytes": sum(buffer.nbytes for buffer in plan.buffers if buffer.kind == "constant"),
        "workspace_bytes": plan.workspace_bytes,
        "registers": max((r.registers for r in resources), default=None),
        "spill_bytes": max((spilled_bytes(k) or 0 for k in kernels), default=0) if compiled else None,
        "stack_bytes": max((r.stack_bytes or 0 for r in resources), default=None) if compiled else None,
        "shared_bytes": max(map(shared_bytes, kernels), default=0),
        "code_bytes": sum(r.code_bytes or 0 for r in resources) if compiled else None,
        "text_bytes": sum(len(module.text.encode()) for module in plan.modules),
        "predicted_us": None if predicted is None else predicted * 1e6,
        "predicted_on": plan.predicted_on or None,
        "certificate": None if certificate is None else certificate.verdict,
    }
