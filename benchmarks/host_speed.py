"""The paper's models with ``target="cpu"`` beside ONNX Runtime, in one run, after their outputs were compared.

``python -m benchmarks.host_speed [--models bert ...] [--repeats 5] [--out FILE.json]``
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import onnxruntime

import souffle
from benchmarks.record import save_results
from souffle import models
from souffle.cli.compare import compare
from souffle.cli.output import format_table


def measure(name: str, repeats: int) -> dict:
    """Compile, compare and time one model."""
    model = models.build(name, "paper")
    inputs = models.random_inputs(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    reference = dict(zip(names, session.run(names, inputs), strict=True))
    start = time.perf_counter()
    network = souffle.compile(model, target="cpu")
    compiled = time.perf_counter() - start
    result = compare(network(inputs), reference, "fp32")
    ours, theirs = [], []
    for _ in range(repeats):  # alternating, since the machine may be noisy
        ours.append(_seconds(lambda: network(inputs)))
        theirs.append(_seconds(lambda: session.run(names, inputs)))
    return {
        "model": name,
        "ok": result.ok,
        "error": result.error,
        "compile_s": round(compiled, 2),
        "ours_ms": round(min(ours) * 1e3, 3),
        "onnxruntime_ms": round(min(theirs) * 1e3, 3),
        "ratio": round(min(ours) / min(theirs), 2),
    }


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> int:
    """Measure all models asked for and print a table; the exit status is 1 if an output differs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(models.NAMES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    results = []
    for name in arguments.models:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results.append(measure(name, arguments.repeats))
    if arguments.out:
        save_results(arguments.out, "benchmarks.host_speed", results, onnxruntime=onnxruntime.__version__)
    columns = ["model", "ok", "error", "compile_s", "ours_ms", "onnxruntime_ms", "ratio"]
    print(format_table(columns, [[f"{r[c]:.1e}" if c == "error" else r[c] for c in columns] for r in results]))
    return 0 if all(r["ok"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
