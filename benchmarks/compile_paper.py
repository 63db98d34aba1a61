"""Compile the paper's models to cubins with no GPU: time, peak memory, kernels, syncs, registers.

``python -m benchmarks.compile_paper [--arch sm_80 sm_90] [--level V3] [--out FILE.json]``. Each model is compiled in a
process of its own, without the cache of cubins, so that its time and memory are its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

import souffle
from benchmarks.record import save_results
from souffle import models
from souffle.cli.output import format_table


def measure(name: str, arch: str, level: str, precision: str, partition: str) -> dict:
    """Compile one model in this process."""
    model = models.build(name, "paper")
    start = time.perf_counter()
    program = souffle.import_onnx(model)
    imported = time.perf_counter()
    os.environ["SOUFFLE_CACHE"] = "off"
    network = souffle.compile(
        program, level=level, target="cuda", arch=arch, precision=precision, partition=partition, device="cpu"
    )
    end = time.perf_counter()
    plan = network.plan
    peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "model": name,
        "arch": arch,
        "level": level,
        "precision": precision,
        "partition": partition,
        "tes": len(program.tes),
        "launches": len(plan.launches),
        "kernels": len(plan.kernels),
        "grid_syncs": sum(plan.kernels[launch.kernel].grid_syncs for launch in plan.launches),
        "stages": sum(len(plan.kernels[launch.kernel].stages) for launch in plan.launches),
        "distinct_stages": len({stage for kernel in plan.kernels for stage in kernel.stages}),
        "bytes_read": sum(launch.bytes_read for launch in plan.launches),
        "bytes_written": sum(launch.bytes_written for launch in plan.launches),
        "registers": max(k.registers for k in network.kernels),
        "spill_bytes": max(k.spill_bytes for k in network.kernels),
        "stack_bytes": max(k.stack_bytes for k in network.kernels),
        "shared_bytes": max(k.shared_bytes for k in network.kernels),
        "cubin_bytes": sum(len(module.cubin) for module in plan.modules),
        "import_s": round(imported - start, 2),
        "compile_s": round(end - start, 2),
        "peak_mb": peak // 1024,
    }


def main() -> int:
    """Measure all models asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(models.NAMES))
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90"])
    parser.add_argument("--level", nargs="+", default=["V3"])
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--partition", default="souffle")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one model")
    parser.add_argument("--out", help="where to write the results as JSON")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "ARCH", "LEVEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one, arguments.precision, arguments.partition)))
        return 0
    results = []
    for name in arguments.models:
        for arch in arguments.arch:
            for level in arguments.level:
                print(f"{name} {arch} {level} ...", file=sys.stderr, flush=True)
                command = [sys.executable, "-m", "benchmarks.compile_paper", "--one", name, arch, level]
                command += ["--precision", arguments.precision, "--partition", arguments.partition]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=arguments.timeout)
                results.append(json.loads(done.stdout))
    if arguments.out:
        save_results(arguments.out, "benchmarks.compile_paper", results)
    columns = ["model", "arch", "level", "tes", "stages", "distinct_stages", "launches", "kernels", "grid_syncs"]
    columns += ["registers", "spill_bytes", "stack_bytes", "compile_s", "peak_mb"]
    print(format_table(columns, [[row[c] for c in columns] for row in results]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
