"""``souffle check``: every level's CUDA text on the CPU, and on the GPU where there is one, against ONNX Runtime."""

from __future__ import annotations

import argparse
import dataclasses
import time

import numpy as np

import souffle
from souffle.cli.compare import compare, onnxruntime_outputs, random_inputs
from souffle.cli.compiler_options import compiler_options
from souffle.cli.output import Progress, format_table, write_json
from souffle.emulator import CheckError, Finding
from souffle.options import INTEGERS
from souffle.runtime.detect import gpu_arch

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


def _run_levels(arguments: argparse.Namespace, progress: Progress, gpu: str | None, results: _Results) -> None:
    rows, records, findings = results
    program = souffle.import_onnx(arguments.model, batch=arguments.batch, integers=INTEGERS not in arguments.disable)
    reference = inputs = None
    for level in arguments.levels:
        progress.prefix = f"{level}: "
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
        compiled = time.perf_counter() - start
        if reference is None:
            inputs = random_inputs(network.signature.inputs, arguments.seed)
            reference = onnxruntime_outputs(arguments.model, inputs)
        runs = [("CPU", network)]
        runs += [(f"CPU shuffled {s}", network.on("cpu", order="shuffled", seed=s)) for s in range(arguments.shuffled)]
        if gpu is not None:
            runs.append(("GPU", network.on("cuda")))
        if arguments.checked:
            runs.append(("CPU checked", network.on("cpu", checked=True)))
        for device, runnable in runs:
            progress(f"running on {device}")
            try:
                outputs = {name: np.asarray(value) for name, value in runnable(inputs).items()}
                result = compare(outputs, reference, arguments.precision)
            except CheckError as error:
                findings.extend((level, finding) for finding in error.findings)
                result = None
            plan = network.plan
            syncs = sum(plan.kernels[launch.kernel].grid_syncs for launch in plan.launches)
            records.append(
                {
                    "level": level,
                    "device": device,
                    "launches": len(plan.launches),
                    "kernels": len(plan.kernels),
                    "grid_syncs": syncs,
                    "tensor_cores": any("mma_sync" in module.text for module in plan.modules),
                    "error": result.error if result else None,
                    "ok": result is not None and result.ok,
                    "compile_s": round(compiled, 3),
                }
            )
            last = records[-1]
            rows.append(
                (
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
        print(f"{arguments.model}, {arguments.precision}, against ONNX Runtime")
        print(format_table(("level", "device", "launches", "kernels", "grid syncs", "largest error", "result"), rows))
        for level, finding in findings:
            print(f"{level}: {finding}")
        if gpu is None:
            print("No GPU is usable here: the emitted CUDA text ran on the CPU device only.")
    return passed
