"""``souffle bench`` of a saved network on a GPU host: its levels were compiled elsewhere, its peers compile there.

What is compared and timed, and how, is :mod:`souffle.benchmark.measure`; the report has the form that ``souffle bench
--out`` writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_artifacts import Task, network_of, values_of, with_weights
from benchmarks.gpu_figures import SPIN_SECONDS, read_clocks
from benchmarks.weights import read_graph
from souffle import __version__
from souffle.benchmark.measure import machine_name, measure
from souffle.benchmark.peer import Setting
from souffle.benchmark.registry import peer_named
from souffle.benchmark.report import BenchmarkReport
from souffle.parallel import physical_cores
from souffle.runtime import load

__all__ = ["benched"]

_REFERENCE = "ONNX Runtime, on the processor"


def benched(task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """A network beside peers.

    Parameters
    ----------
    task : Task
    options
        ``against``, ``repeats``, ``warmup``, ``seconds``, ``rehearse`` and ``execute`` of the step. When rehearsing,
        our own rows are of the played driver, and a kernel that is not executed is compared with nothing.

    Returns
    -------
    dict
        ``ok``, ``report`` (a :class:`~souffle.benchmark.report.BenchmarkReport` as a dict), and the GPU's clocks before
        anything, after half a second of work, and in the end.
    """
    if task.graph is None:
        return {"ok": False, "status": "missing", "error": "the artifacts have no file of the model: build them again"}
    plan, constants = with_weights(load(task.artifact), task)
    if constants == "synthetic":
        return {"ok": False, "status": "missing", "error": "its constants cannot be had here, so nothing is compared"}
    network = network_of(plan, options)
    inputs, expected = values_of(task.io)
    if not options.execute:
        expected = dict(network(inputs))
    clocks = [] if options.rehearse else [read_clocks()]
    # A GPU that had nothing to do runs at a fraction of its clock.
    end = time.monotonic() + (0.0 if options.rehearse else SPIN_SECONDS)
    while time.monotonic() < end:
        network.time(inputs, repeats=20, warmup=0, mode="graph")
    clocks += [] if options.rehearse else [read_clocks()]
    setting = Setting("cuda", len(physical_cores()), plan.options.precision)
    machine = "a played GPU" if options.rehearse else machine_name("cuda")
    level = plan.options.level
    report = BenchmarkReport(plan.name, machine, setting, level, _REFERENCE, options.repeats, options.warmup)
    measure(
        read_graph(Path(task.graph)),
        network,
        [peer_named(name) for name in options.against],
        report,
        inputs=inputs,
        expected=expected,
        seconds=options.seconds,
        version=__version__,
    )
    clocks += [] if options.rehearse else [read_clocks()]
    found = {"ok": not report.wrong, "report": dataclasses.asdict(report), "clocks_idle_spun_after": clocks}
    return found | ({"error": "our own outputs are wrong"} if report.wrong else {})
