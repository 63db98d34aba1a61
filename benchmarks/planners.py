"""Networks compiled by each fusion planner, beside Souffle: kernels, barriers, bytes, shared memory, predicted times.

::

    python -m benchmarks.planners [--models bert crnn ...] [--size paper] [--seconds LIMIT] [--out FILE.json]
    python -m benchmarks.planners --size tiny --run            # and compared with ONNX Runtime, fixed and shuffled

Every planner of patterns is compiled at V0, where a pattern is a kernel, and at V3, where Souffle's partition merges
them with barriers of the whole grid; Souffle's own rules at V0, V3 and V4. All are of one code generator and one cost
model. Plans alone are compared by ``benchmarks.stitching_plans``. Each row is made in a process of its own with a limit
of seconds, and kept when it is there: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np

import souffle
from benchmarks.alone import made_alone
from benchmarks.prices import microseconds
from benchmarks.record import kept_results, save_results
from souffle import models
from souffle.certificate import PROVEN
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.cli.output import format_table
from souffle.codegen.plan import Plan
from souffle.options import SOUFFLE
from souffle.stitching import FUSION_PLANNERS

ARCHS = ("sm_80", "sm_90")
"""Whose products the cost model predicts for; the first is planned for in the figures that need no device."""

WAYS = (
    *((level, planner) for planner in FUSION_PLANNERS for level in ("V0", "V3")),
    *((level, SOUFFLE) for level in ("V0", "V3", "V4")),
)


def measure(name: str, size: str, level: str, fusion: str, run: bool) -> dict[str, Any]:
    """Compile one network one way."""
    model = models.build(name, size)
    program = souffle.import_onnx(model)
    row: dict[str, Any] = {"us": {}, "verify": "values" if run else "off"}
    for arch in ARCHS:
        first = arch == ARCHS[0]
        started = time.process_time()
        options = {"level": level, "fusion": fusion, "arch": arch, "target": "cuda", "cubin": False, "device": "cpu"}
        network = souffle.compile(program, **options, verify=row["verify"] if first else "off")
        row["us"][network.plan.predicted_on] = microseconds(network.plan)["us"]
        if not first:
            continue
        row |= {"compile_s": round(time.process_time() - started, 1), **figures(network.plan)}
        if run:
            row |= compared(network, model)
    return row


def figures(plan: Plan) -> dict[str, Any]:
    """What is told of a plan."""
    patterns = [decision for decision in plan.decisions if decision.stage == "fusion"]
    return {
        "launches": len(plan.launches),
        "barriers": sum(plan.kernels[launch.kernel].grid_syncs for launch in plan.launches),
        "read": sum(launch.bytes_read for launch in plan.launches),
        "written": sum(launch.bytes_written for launch in plan.launches),
        "shared": max(plan.kernels[launch.kernel].dynamic_shared_bytes for launch in plan.launches),
        "patterns": sum(one.accepted and one.subject.startswith("pattern ") for one in patterns),
        "cut": sum(not one.accepted and " in the kernel of " in one.subject for one in patterns),
    }


def compared(network: souffle.Network, model: Any) -> dict[str, Any]:
    """Its outputs beside ONNX Runtime's, fixed and shuffled, and what was proven."""
    inputs = models.random_inputs(model)
    expected = onnxruntime_outputs(model, inputs)
    results = []
    for runnable in (network, network.on("cpu", order="shuffled", seed=11, blocks=3)):
        outputs = {key: np.asarray(value) for key, value in runnable(inputs).items()}
        results.append(compare(outputs, expected, "fp32"))
    certificate = network.certificate
    return {
        "error": max(result.error for result in results),
        "ok": all(result.ok for result in results),
        "verdict": certificate.verdict,
        "reasons": list(certificate.unknown),
    }


def measured(name: str, size: str, way: tuple[str, str], run: bool, seconds: float) -> dict[str, Any]:
    """A row, or why there is none."""
    arguments = ["--one", name, size, *way, *(["--run"] if run else [])]
    row = {"model": name, "size": size, "level": way[0], "fusion": way[1]}
    return row | made_alone("benchmarks.planners", arguments, seconds)


HEADER = (
    *("model", "level", "fusion", "patterns", "cut", "launches", "barriers", "read MB", "written MB", "shared B"),
    *("A100 µs", "H200 µs", "compile s", "certificate", "error"),
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    first = [row["model"], row["level"], row["fusion"]]
    if "failed" in row:
        return [*first, *["-"] * 11, row["failed"]]
    times = [
        next((f"{us:,.1f}" for on, us in row["us"].items() if on.startswith(gpu)), "-") for gpu in ("A100", "H200")
    ]
    patterns = [str(row["patterns"]), str(row["cut"])] if row["fusion"] != SOUFFLE else ["-", "-"]
    counts = [f"{row[key]:,}" for key in ("launches", "barriers")]
    moved = [f"{row[key] / 1e6:,.2f}" for key in ("read", "written")]
    proof = [row.get("verdict", "-"), "-"]
    if "error" in row:
        proof[1] = f"{row['error']:.1e}" + ("" if row["ok"] else " MISMATCH")
    return [*first, *patterns, *counts, *moved, f"{row['shared']:,}", *times, f"{row['compile_s']:.1f}", *proof]


def is_bad(row: dict[str, Any]) -> bool:
    """Whether a row failed, differs, or is not proven where that was asked."""
    return "failed" in row or row.get("ok") is False or row.get("verdict", PROVEN) != PROVEN


def main() -> int:
    """Measure all that is asked for; the exit status is 1 if one fails, differs or is not proven."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = (*models.NAMES, *models.STITCHING_NAMES)
    parser.add_argument("--models", nargs="+", default=every, choices=every, metavar="MODEL")
    parser.add_argument("--size", default="paper", choices=models.MODEL_SIZES)
    parser.add_argument("--fusion", nargs="+", default=(*FUSION_PLANNERS, SOUFFLE), help="only these")
    parser.add_argument("--levels", nargs="+", default=("V0", "V3", "V4"), help="only these")
    parser.add_argument("--seconds", type=float, default=900, help="of a processor, for one row")
    parser.add_argument("--run", action="store_true", help="prove values, and compare with ONNX Runtime")
    parser.add_argument("--out", help="where to write the results as JSON; rows that it holds are not made again")
    parser.add_argument("--one", nargs=4, metavar=("MODEL", "SIZE", "LEVEL", "FUSION"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one, arguments.run)))
        return 0
    rows = kept_results(arguments.out)
    made = {(row["model"], row["size"], row["level"], row["fusion"]) for row in rows}
    for name in arguments.models:
        for way in WAYS:
            if way[0] not in arguments.levels or way[1] not in arguments.fusion:
                continue
            if (name, arguments.size, *way) in made:
                continue
            row = measured(name, arguments.size, way, arguments.run, arguments.seconds)
            rows.append(row)
            print("  ".join(cells(row)), flush=True)
            if arguments.out:
                save_results(arguments.out, "benchmarks.planners", rows)
    print(format_table(HEADER, [cells(row) for row in rows]))
    return int(any(map(is_bad, rows)))


if __name__ == "__main__":
    sys.exit(main())
