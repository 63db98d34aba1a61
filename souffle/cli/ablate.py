"""``souffle ablate``: the table V0 to V4 of one optimization at a time (paper, Tables 4 and 5), and of V4 with each of
those left out that keep tensors on chip."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import souffle
from souffle.cli.compare import compare, onnxruntime_outputs, random_inputs
from souffle.cli.compiler_options import compiler_options
from souffle.cli.model_options import import_options
from souffle.cli.output import Progress, format_table, human_bytes, write_json
from souffle.options import LEVELS, ON_CHIP, SOUFFLE
from souffle.runtime.detect import gpu_arch
from souffle.runtime.explain import predicted_seconds

__all__ = ["ablate"]


def ablate(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command; the exit status is 1 if any output differs too much."""
    gpu = gpu_arch()
    records: list[dict] = []
    try:
        for model in arguments.models:
            for record in _model(model, arguments, progress, gpu):
                records.append(record)
    except KeyboardInterrupt:
        if records:
            _report(arguments, progress, records, gpu)
        raise
    _report(arguments, progress, records, gpu)
    return 0 if all(r["ok"] is not False for r in records) else 1


def _report(arguments: argparse.Namespace, progress: Progress, records: list[dict], gpu: str | None) -> None:
    progress.done()
    if arguments.json:
        write_json(records)
        return
    for model in dict.fromkeys(record["model"] for record in records):
        rows = [_row(r) for r in records if r["model"] == model]
        fusion = "" if arguments.fusion == SOUFFLE else f"fusion {arguments.fusion}, "
        print(f"\n{Path(model).stem}, {arguments.precision}, {fusion}partition {arguments.partition}")
        header = ["level", "launches", "kernels", "syncs", "read", "written", "registers", "shared B", "compile s"]
        print(format_table([*header, "predicted µs", "largest error", "latency µs"], rows))
    print()
    print("\n".join(f"{level.name}: {level.summary}" for level in LEVELS.values()))
    print("read, written: bytes of global memory, each tensor that a stage touches counted once for that stage.")
    if gpu is None:
        print("No GPU is usable here: errors are of the emitted CUDA text run on the CPU; there is no latency.")


def _model(model: str, arguments: argparse.Namespace, progress: Progress, gpu: str | None) -> Iterator[dict]:
    given = import_options(arguments)
    program = souffle.import_onnx(model, **given)
    reference = inputs = None
    for level, disabled in _variants(arguments):
        progress.prefix = f"{Path(model).stem} {_named(level, disabled)}: "
        start = time.perf_counter()
        network = souffle.compile(
            program,
            level=level,
            target="cuda",
            **compiler_options(arguments) | {"disable": disabled},
            cubin=not arguments.no_cubin,
            device="cuda" if gpu else "cpu",
            progress=progress,
        )
        seconds = time.perf_counter() - start
        plan = network.plan
        predicted = predicted_seconds(plan)
        record = {
            "model": model,
            "level": level,
            "disable": list(plan.options.disable),
            "launches": len(plan.launches),
            "kernels": len(plan.kernels),
            "grid_syncs": sum(plan.kernels[launch.kernel].grid_syncs for launch in plan.launches),
            "bytes_read": sum(launch.bytes_read for launch in plan.launches),
            "bytes_written": sum(launch.bytes_written for launch in plan.launches),
            "registers": max((k.registers for k in network.kernels if k.registers is not None), default=None),
            "shared_bytes": max(k.shared_bytes for k in network.kernels),
            "compile_s": round(seconds, 2),
            "predicted_us": None if predicted is None else predicted * 1e6,
            "error": None,
            "ok": None,
            "latency_us": None,
        }
        if not arguments.no_run:
            if reference is None:
                inputs = random_inputs(network.signature.inputs, arguments.seed)
                reference = onnxruntime_outputs(model, inputs, given["constants"])
            progress("running")
            outputs = {name: np.asarray(value) for name, value in network(inputs).items()}
            result = compare(outputs, reference, arguments.precision)
            record |= {"error": result.error, "ok": result.ok}
            if gpu is not None:
                record["latency_us"] = network.time(inputs, mode="graph")["median_us"]
        yield record


def _variants(arguments: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """The levels with what is left out of them, in the order of the table."""
    out = list(arguments.disable)
    variants = [(name, out if level.reuse else []) for name, level in LEVELS.items()]
    if arguments.each:
        last = variants[-1][0]
        variants += [(last, [*out, name]) for name in ON_CHIP if name not in out]
    return variants


def _named(level: str, disabled: Sequence[str]) -> str:
    return f"{level} without {', '.join(disabled)}" if disabled else level


def _row(record: dict) -> tuple:
    def shown(value, form: str = "") -> str:
        return "-" if value is None else format(value, form)

    error = shown(record["error"], ".1e") + (" MISMATCH" if record["ok"] is False else "")
    return (
        _named(record["level"], record["disable"]),
        record["launches"],
        record["kernels"],
        record["grid_syncs"],
        human_bytes(record["bytes_read"]),
        human_bytes(record["bytes_written"]),
        shown(record["registers"]),
        record["shared_bytes"],
        record["compile_s"],
        shown(record["predicted_us"], ".1f"),
        error,
        shown(record["latency_us"], ".1f"),
    )
