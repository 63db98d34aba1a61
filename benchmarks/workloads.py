"""The workloads of FusionStitching's papers at Souffle's levels: launches, barriers, predicted times, largest error.

``python -m benchmarks.workloads --size tiny --out FILE.json [--models dien ...] [--levels V0 V3 V4] [--seconds 600]``.
Each network is compiled in a process of its own, for sm_90 and for sm_80, whose products the cost model predicts for,
and the CUDA text for sm_90 is compared with ONNX Runtime on the CPU device; ``--no-run`` leaves that out. Each row is
printed, and written, when it is there; the same command goes on where it stopped.
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
from souffle.errors import CertificateError

__all__ = ["measure", "measured"]

# The architecture that runs, which is proven, and the one that is only predicted.
RUN, PREDICTED = "sm_90", "sm_80"


def measure(name: str, size: str, level: str, run: bool) -> dict[str, Any]:
    """Compile one network and compare it with ONNX Runtime."""
    model = models.build(name, size)
    start = time.process_time()
    program = souffle.import_onnx(model)
    imported = time.process_time()
    how = {"target": "cuda", "level": level, "cubin": False, "device": "cpu"}
    try:
        network = souffle.compile(program, arch=RUN, **how)
    except CertificateError as error:
        reasons = [str(one) for one in error.certificate.counterexamples]
        return {"verdict": error.certificate.verdict, "reasons": reasons}
    compiled = time.process_time()
    plan, certificate = network.plan, network.certificate
    other = souffle.compile(program, arch=PREDICTED, verify="off", **how).plan
    row = {
        "nodes": len(model.graph.node),
        "tes": len(program.tes),
        "import_s": round(imported - start, 2),
        "compile_s": round(compiled - imported, 2),
        "launches": len(plan.launches),
        "barriers": sum(plan.kernels[launch.kernel].grid_syncs for launch in plan.launches),
        "us": {one.predicted_on: microseconds(one)["us"] for one in (other, plan)},
        "bytes_read": sum(launch.bytes_read for launch in plan.launches),
        "bytes_written": sum(launch.bytes_written for launch in plan.launches),
        "verdict": certificate.verdict,
        "reasons": list(certificate.unknown),
    }
    if run:
        inputs = models.random_inputs(model)
        outputs = {key: np.asarray(value) for key, value in network(inputs).items()}
        result = compare(outputs, onnxruntime_outputs(model, inputs), "fp32")
        row |= {"error": result.error, "ok": result.ok}
    return row


def measured(name: str, size: str, level: str, run: bool, seconds: float) -> dict[str, Any]:
    """The row of one network at one level, or why there is none."""
    arguments = ["--one", name, size, level, *([] if run else ["--no-run"])]
    return {"model": name, "size": size, "level": level} | made_alone("benchmarks.workloads", arguments, seconds)


HEADER = ("workload", "level", "TEs", "launches", "barriers", "A100 µs", "H200 µs", "compile s", "certificate", "error")


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    if "us" not in row:
        return [row["model"], row["level"], *["-"] * 6, row.get("verdict", "-"), row.get("failed", "-")]
    times = [
        next((f"{us:,.1f}" for on, us in row["us"].items() if on.startswith(gpu)), "-") for gpu in ("A100", "H200")
    ]
    error = "-" if row.get("error") is None else f"{row['error']:.1e}" + ("" if row["ok"] else " MISMATCH")
    counts = [str(row[key]) for key in ("tes", "launches", "barriers")]
    return [row["model"], row["level"], *counts, *times, f"{row['compile_s']:.1f}", row["verdict"], error]


def main() -> int:
    """Measure all that is asked for; the exit status is 1 if one fails, differs or is not proven."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(models.STITCHING_NAMES), choices=models.STITCHING_NAMES)
    parser.add_argument("--size", default="tiny", choices=models.MODEL_SIZES)
    parser.add_argument("--levels", nargs="+", default=["V0", "V3", "V4"])
    parser.add_argument("--seconds", type=float, default=600, help="CPU time for one network at one level")
    parser.add_argument("--no-run", action="store_true", help="compile, prove and predict only")
    parser.add_argument("--out", help="where to write the results as JSON; rows that it holds are not made again")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "SIZE", "LEVEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one, not arguments.no_run)))
        return 0
    rows = kept_results(arguments.out)
    made = {(row["model"], row["size"], row["level"]) for row in rows}
    for name in arguments.models:
        for level in arguments.levels:
            if (name, arguments.size, level) in made:
                continue
            row = measured(name, arguments.size, level, not arguments.no_run, arguments.seconds)
            rows.append(row)
            print("  ".join(cells(row)), flush=True)
            if arguments.out:
                save_results(arguments.out, "benchmarks.workloads", rows)
    print(format_table(HEADER, [cells(row) for row in rows]))
    bad = [r for r in rows if "failed" in r or r.get("ok") is False or r.get("verdict") != PROVEN]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
