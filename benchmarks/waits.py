"""What stands between the stages of the paper's networks: barriers, flags, barriers of teams, or what takes less.

::

    python -m benchmarks.waits [--models bert ...] [--size paper] [--archs sm_90 sm_80] [--ways barriers auto ...]
        --out FILE.json

V4, shipped logs, without a CUDA compiler; nothing is run. Grid barriers, waits of tiles for tiles and block barriers
are those of one run, in loops those of all steps. Every line is kept as it is made: the same command goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from pathlib import Path

import souffle
from benchmarks.prices import microseconds
from benchmarks.record import kept_results, save_results
from souffle import models
from souffle.cli.output import format_table
from souffle.codegen.plan import Plan

__all__ = ["counted_waits", "main"]

WAYS = {
    "barriers": {"waits": "barriers", "disable": ["teams"]},
    "flags": {"waits": "flags", "disable": ["teams"]},
    "flags by price": {"waits": "auto", "disable": ["teams"]},
    "teams": {"waits": "barriers"},
    "auto": {"waits": "auto"},
}
"""What a network is compiled with."""

MODELS = ("bert", "resnext", "lstm", "efficientnet", "swin", "mmoe")


def counted_waits(plan: Plan) -> dict[str, int]:
    """How often blocks wait in one run of a network, by what they wait for; and the most teams that one has."""
    kernels = [plan.kernels[launch.kernel] for launch in plan.launches]
    waits = [wait for kernel in kernels for wait in kernel.flag_waits]
    return {
        "teams": max((kernel.teams for kernel in kernels if kernel.cooperative), default=1),
        "arrivals": sum(kernel.arrivals for kernel in kernels),
        "flag_waits": sum(runs for runs, _, _ in waits),
        "block_barriers": sum(b.runs for kernel in kernels for b in kernel.barriers if b.scope == "block"),
    }


def main() -> int:
    """Compile what is not kept yet, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--size", default="paper")
    parser.add_argument("--archs", nargs="+", default=("sm_90", "sm_80"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=tuple(WAYS))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = kept_results(arguments.out)
    known = {(r["model"], r["arch"], r["way"]) for r in results}
    for model, arch in product(arguments.models, arguments.archs):
        missing = [way for way in arguments.ways if (model, arch, way) not in known]
        program = souffle.import_onnx(models.build(model, arguments.size)) if missing else None
        for way in missing:
            start = time.process_time()
            how = {"arch": arch, "cubin": False, "verify": "off", "level": "V4", **WAYS[way]}
            plan = souffle.compile(program, target="cuda", device="cpu", **how).plan
            seconds = round(time.process_time() - start, 1)
            made = {"model": model, "arch": arch, "way": way, **microseconds(plan), **counted_waits(plan)}
            results.append({**made, "workspace_bytes": plan.workspace_bytes, "compile_s": seconds})
            save_results(str(arguments.out), "benchmarks.waits", results)
            print(model, arch, way, made["us"], flush=True)
    columns = ["model", "arch", "way", "teams", "grid barriers", "flag waits", "block barriers", "predicted µs"]
    table = [
        [r["model"], r["arch"], r["way"], r["teams"], r["syncs"], r["flag_waits"], r["block_barriers"],
         f"{r['us']:,.1f}", f"{r['workspace_bytes'] / 2**20:.1f}", r["compile_s"]]
        for r in results
    ]  # fmt: skip
    print(format_table([*columns, "workspace MiB", "compile s"], table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
