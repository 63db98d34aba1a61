"""``souffle check``: every level's CUDA text on the CPU, and on the GPU where there is one, against ONNX Runtime."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator

import numpy as np

import souffle
from souffle.cli.compare import compare, onnxruntime_outputs, random_inputs
from souffle.cli.compiled import named_versions
from souffle.cli.compiler_options import compiler_options
from souffle.cli.model_options import import_options
from souffle.cli.output import Progress, format_table, write_json
from souffle.emulator import CheckError, Finding
from souffle.frontend.model_options import ModelOptions
from souffle.runtime import Network
from souffle.runtime.detect import gpu_arch
from souffle.runtime.host_network import HostNetwork
from souffle.versions import programs_of

__all__ = ["check"]


def check(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command; the exit status is 1 if any output differs too much."""
    gpu = gpu_arch()
    results: _Results = ([], [], [])
    try:
        _run_levels(arguments, progress, gpu, results)
    except KeyboardInterrupt:
        if results[1]:
            _report(arguments, progress, gpu, results)
        raise
    return 0 if _report(arguments, progress, gpu, results) else 1


_Results = tuple[list[tuple], list[dict], list[tuple[str, Finding]]]
"""Rows of the table, the same for JSON, and what checked runs found at each level."""


def _networks(
    arguments: argparse.Namespace, given: ModelOptions, progress: Progress, gpu: str | None
) -> Iterator[tuple[str, str, Network | HostNetwork, float | None]]:
    """Version, level, network for the CPU device, and seconds to compile: of the file, or of each level and version."""
    if arguments.file is not None:
        for said, network in named_versions(souffle.load(arguments.file, device="cpu", threads=arguments.threads)):
            yield said, network.plan.options.level, network, None
        return
    for said, program in programs_of(arguments.model, given):
        for level in arguments.levels:
            progress.prefix = f"{said}{', ' if said else ''}{level}: "
            start = time.perf_counter()
            network = souffle.compile(
                program,
                level=level,
                target="cuda",
                **compiler_options(arguments),
                cubin=gpu is not None,
                device="cpu",
                progress=progress,
            )
            yield said, level, network, time.perf_counter() - start


def _ways(
    network: Network | HostNetwork, arguments: argparse.Namespace, gpu: str | None
) -> list[tuple[str, Network | HostNetwork]]:
    """The devices on which it is to run."""
    if not isinstance(network, Network):
        return [("host", network)]
    runs = [("CPU", network)]
    runs += [(f"CPU shuffled {s}", network.on("cpu", order="shuffled", seed=s)) for s in range(arguments.shuffled)]
    if gpu is not None and all(module.cubin for module in network.plan.modules):
        runs.append(("GPU", network.on("cuda")))
    if arguments.checked:
        runs.append(("CPU checked", network.on("cpu", checked=True)))
    return runs


def _run_levels(arguments: argparse.Namespace, progress: Progress, gpu: str | None, results: _Results) -> None:
    rows, records, findings = results
    given = ModelOptions(**import_options(arguments))
    reference: tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]] | None = None
    for said, level, network, seconds in _networks(arguments, given, progress, gpu):
        if reference is None or reference[0] != said:
            inputs = random_inputs(network.signature.inputs, arguments.seed)
            reference = (said, inputs, onnxruntime_outputs(arguments.model, inputs, given.constants))
        _, inputs, expected = reference
        for device, runnable in _ways(network, arguments, gpu):
            progress(f"running on {device}")
            try:
                outputs = {name: np.asarray(value) for name, value in runnable(inputs).items()}
                result = compare(outputs, expected, network.plan.options.precision)
            except CheckError as error:
                findings.extend((level, finding) for finding in error.findings)
                result = None
            plan = network.plan
            syncs = sum(plan.kernels[launch.kernel].grid_syncs for launch in plan.launches)
            records.append(
                {
                    **({"version": said} if said else {}),
                    "level": level,
                    "device": device,
                    "launches": len(plan.launches),
                    "kernels": len(plan.kernels),
                    "grid_syncs": syncs,
                    "tensor_cores": any("mma_sync" in module.text for module in plan.modules),
                    "error": result.error if result else None,
                    "ok": result is not None and result.ok,
                    "compile_s": None if seconds is None else round(seconds, 3),
                }
            )
            last = records[-1]
            rows.append(
                (
                    *((said,) if said else ()),
                    level,
                    device,
                    last["launches"],
                    last["kernels"],
                    syncs,
                    f"{result.error:.1e}" if result else "-",
                    "FINDINGS" if result is None else "ok" if result.ok else "MISMATCH",
                )
            )


def _report(arguments: argparse.Namespace, progress: Progress, gpu: str | None, results: _Results) -> bool:
    """Print what has run, and say whether all of it is right."""
    rows, records, findings = results
    progress.done()
    passed = all(record["ok"] for record in records)
    found = {"findings": [{"level": level} | dataclasses.asdict(finding) for level, finding in findings]}
    if arguments.json:
        write_json({"model": arguments.model, "precision": arguments.precision, "ok": passed, "runs": records} | found)
    else:
        precision = f", {arguments.precision}" if arguments.file is None else ""
        print(f"{arguments.file or arguments.model}{precision}, against ONNX Runtime")
        columns = ("level", "device", "launches", "kernels", "grid syncs", "largest error", "result")
        print(format_table((*(("version",) if len(rows[0]) > len(columns) else ()), *columns), rows))
        for level, finding in findings:
            print(f"{level}: {finding}")
        if gpu is None:
            print("No GPU is usable here: the emitted CUDA text ran on the CPU device only.")
    return passed
