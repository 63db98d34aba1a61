"""Seconds of a network's first compilation, and of the second one, which reads what the first has kept.

Each is in a process of its own, with a cache of its own for both; plans are compared, and so is what they compute::

    python -m benchmarks.compiled_before --models bert efficientnet --out docs/results/compiled_before.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx

import souffle
from benchmarks.record import save_results
from souffle import models
from souffle.cli.output import format_table
from souffle.runtime.plan_json import plan_to_json


def compiled(path: Path, target: str, level: str, precision: str) -> dict[str, Any]:
    """Compile a file in this process: seconds from the path to the network, and a digest of all that it is."""
    options = {"target": target, "level": level, "precision": precision, "device": "cpu"}
    if target == "cuda":
        options["arch"] = "sm_90"
    compile_model = souffle.compile  # which imports the compiler
    start = time.perf_counter()
    plan = compile_model(path, **options).plan
    seconds = time.perf_counter() - start
    digest = hashlib.sha256(json.dumps(plan_to_json(plan)).encode() + plan.tensor_ir)
    for module in plan.modules:
        digest.update(module.text.encode() + module.cubin)
    for name in sorted(plan.constants):
        digest.update(plan.constants[name].tobytes())
    constants = sum(array.nbytes for array in plan.constants.values())
    return {"seconds": round(seconds, 3), "constant_bytes": constants, "digest": digest.hexdigest()}


def both(name: str, size: str, target: str, level: str, precision: str) -> dict[str, Any]:
    """The first compilation of a network and the second one."""
    found = []
    with tempfile.TemporaryDirectory(prefix="souffle-compiled-before-") as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(models.build(name, size), path)
        environment = os.environ | {"SOUFFLE_CACHE": str(Path(folder) / "cache"), "SOUFFLE_CACHE_GB": "50"}
        command = [sys.executable, "-m", "benchmarks.compiled_before", "--one", str(path), target, level, precision]
        for _ in range(2):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            found.append(json.loads(done.stdout))
    first, second = found
    return {
        "model": name,
        "size": size,
        "target": target,
        "level": level,
        "precision": precision,
        "constant_bytes": first["constant_bytes"],
        "first_s": first["seconds"],
        "second_s": second["seconds"],
        "equal": first["digest"] == second["digest"],
    }


def main() -> int:
    """Compile what is asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bert"])
    parser.add_argument("--size", default="paper")
    parser.add_argument("--targets", nargs="+", default=["cuda", "cpu"])
    parser.add_argument("--level", default="V4")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--out", help="where to write the results as JSON")
    parser.add_argument("--one", nargs=4, metavar=("FILE", "TARGET", "LEVEL", "PRECISION"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(compiled(Path(arguments.one[0]), *arguments.one[1:])))
        return 0
    results = []
    for name in arguments.models:
        for target in arguments.targets:
            results.append(both(name, arguments.size, target, arguments.level, arguments.precision))
            if arguments.out:
                save_results(arguments.out, "benchmarks.compiled_before", results)
    columns = ["model", "target", "level", "precision", "constant_bytes", "first_s", "second_s", "equal"]
    print(format_table(columns, [[row[column] for column in columns] for row in results]))
    return 0 if all(row["equal"] for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
