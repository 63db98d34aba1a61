"""``souffle check`` for all models: every level's CUDA text on the CPU (and the GPU where there is one), and the host
target, against ONNX Runtime.

``python -m benchmarks.check_all [--models bert se:M0 ...] [--size tiny] [--precision fp32 mixed] [--out FILE.json]``
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

import souffle
from benchmarks.record import save_results
from souffle import models
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.cli.main import main as souffle_command
from souffle.cli.output import format_table

LEVELS = ("V0", "V1", "V2", "V3", "V4")


def check(name: str, size: str, precision: str, shuffled: int, folder: Path) -> dict:
    """Check one model in one precision."""
    path = folder / f"{name.replace(':', '_')}.onnx"
    steps = {"steps": 8} if name.startswith("lstm") and size == "paper" else {}
    model = models.build(name, size, **steps)
    path.write_bytes(model.SerializeToString())
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        command = ["check", str(path), "--json", "--quiet", "--precision", precision, "--shuffled", str(shuffled)]
        souffle_command(command)
    runs = json.loads(text.getvalue())["runs"]
    inputs = models.random_inputs(model)
    reference = onnxruntime_outputs(model, inputs)
    host = compare(souffle.compile(model, target="cpu", precision=precision)(inputs), reference, precision)
    first = {run["level"]: run for run in reversed(runs)}
    return {
        "model": name,
        "size": size,
        "precision": precision,
        "ok": all(run["ok"] for run in runs) and host.ok,
        "launches": {level: first[level]["launches"] for level in LEVELS},
        "grid_syncs": {level: first[level]["grid_syncs"] for level in LEVELS},
        "error": {level: max(run["error"] for run in runs if run["level"] == level) for level in LEVELS},
        "host_error": host.error,
        "tensor_cores": any(run["tensor_cores"] for run in runs),
    }


def main() -> int:
    """Check all models asked for and print a table; the exit status is 1 if an output differs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*models.NAMES, *models.SE_NAMES])
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--precision", nargs="+", default=["fp32"])
    parser.add_argument("--shuffled", type=int, default=1, help="shuffled thread orders to run as well")
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            for precision in arguments.precision:
                print(f"{name} {precision} ...", file=sys.stderr, flush=True)
                results.append(check(name, arguments.size, precision, arguments.shuffled, Path(folder)))
    if arguments.out:
        save_results(arguments.out, "benchmarks.check_all", results)
    header = ["model", "precision", "launches V0..V4", "syncs V3", "V4", "largest error", "host error", "result"]
    rows = [
        (
            r["model"],
            r["precision"],
            " ".join(str(r["launches"][level]) for level in LEVELS),
            r["grid_syncs"]["V3"],
            r["grid_syncs"]["V4"],
            f"{max(r['error'].values()):.1e}",
            f"{r['host_error']:.1e}",
            "ok" if r["ok"] else "MISMATCH",
        )
        for r in results
    ]
    print(format_table(header, rows))
    return 0 if all(r["ok"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
