"""What V4 is predicted to gain over V3 on the paper's networks, and each thing that keeps tensors on chip alone.

::

    python -m benchmarks.on_chip [--models bert ...] [--archs sm_80 sm_90] [--precisions fp32 mixed] [--each] [--graph]
        [--cubin | --texts] --out FILE.json

Each network is compiled in paper size at V3 and at V4, with ``--each`` also at V4 without each thing, and with
``--graph`` at V4 for one CUDA graph. Without ``--cubin`` no CUDA compiler is run, and registers are estimated; with it,
stages are measured by it, and the most registers, spills and all machine code are told, too. ``--texts`` tells these of
the texts that are made without it, which are compiled as they are; lines that lack them are made again. Nothing is run.
Every line is kept as it is made: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import souffle
from benchmarks.prices import MODELS, microseconds
from benchmarks.record import kept_results, save_results
from souffle import models
from souffle.cli.output import format_table
from souffle.codegen.nvcc import compile_cubin
from souffle.codegen.plan import Resources
from souffle.options import ON_CHIP
from souffle.runtime import Network

Variant = dict[str, Any]


def variants(arguments: argparse.Namespace) -> list[Variant]:
    """What each network is compiled with."""
    found: list[Variant] = [{"level": "V3"}, {"level": "V4"}]
    found += [{"level": "V4", "disable": [name]} for name in ON_CHIP] if arguments.each else []
    found += [{"level": "V4", "graph": True}] if arguments.graph else []
    return found


def label(variant: Variant) -> str:
    """A variant in words."""
    without = f" without {', '.join(variant['disable'])}" if variant.get("disable") else ""
    return variant["level"] + without + (" as a graph" if variant.get("graph") else "")


def figures(network: Network, seconds: float) -> dict[str, Any]:
    """What is told of a compiled network."""
    plan = network.plan
    used = [kernel.resources for kernel in plan.kernels if kernel.resources is not None]
    return {
        **microseconds(plan),
        "bytes_read": sum(launch.bytes_read for launch in plan.launches),
        "bytes_written": sum(launch.bytes_written for launch in plan.launches),
        **asked(used),
        "compile_s": round(seconds, 1),
    }


def asked(used: Sequence[Resources]) -> dict[str, Any]:
    """What a compiler says of kernels: the most registers, and what all spill and have of machine code."""
    return {
        "registers": max((one.registers for one in used), default=None),
        "spilled_bytes": sum(one.spill_store_bytes + one.spill_load_bytes for one in used) if used else None,
        "code_bytes": sum(one.code_bytes or 0 for one in used) or None,
    }


def of_texts(network: Network, arch: str) -> dict[str, Any]:
    """:func:`asked` of the texts that were made, with what compiling them takes."""
    start = time.monotonic()
    used = [one for module in network.plan.modules for one in compile_cubin(module.text, arch)[1].values()]
    return {**asked(used), "nvcc_s": round(time.monotonic() - start, 1)}


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each network and variant, with the time against V3's."""
    base = {(r["model"], r["arch"], r["precision"]): r["us"] for r in results if r["variant"] == "V3"}
    table = []
    for r in results:
        before = base.get((r["model"], r["arch"], r["precision"]))
        change = "" if not before else f"{100 * (r['us'] / before - 1):+.1f} %"
        moved = [f"{r[name] / 2**20:.1f}" for name in ("bytes_read", "bytes_written")]
        names = [r["model"], r["precision"], r["arch"], r["variant"]]
        code = f"{r['code_bytes'] / 1024:.0f}" if r["code_bytes"] else "-"
        own = [r["registers"] or "-", r.get("spilled_bytes", "-"), code]
        table.append([*names, r["launches"], r["syncs"], *moved, *own, f"{r['us']:,.1f}", change, r["compile_s"]])
    return table


def main() -> int:
    """Compile what is not kept yet, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--archs", nargs="+", default=("sm_80", "sm_90"))
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "mixed"), default=("fp32", "mixed"))
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--graph", action="store_true")
    compiled = parser.add_mutually_exclusive_group()
    compiled.add_argument("--cubin", action="store_true")
    compiled.add_argument("--texts", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = kept_results(arguments.out)
    known = {(r["model"], r["arch"], r["precision"], r["variant"]): r for r in results}
    for model in arguments.models:
        program = None
        for arch in arguments.archs:
            for precision in arguments.precisions:
                for variant in variants(arguments):
                    key = (model, arch, precision, label(variant))
                    if key in known and not (arguments.texts and known[key]["registers"] is None):
                        continue
                    program = program or souffle.import_onnx(models.build(model, "paper"))
                    how = {"arch": arch, "precision": precision, "cubin": arguments.cubin, "verify": "off", **variant}
                    start = time.process_time()
                    network = souffle.compile(program, target="cuda", device="cpu", **how)
                    made = figures(network, time.process_time() - start)
                    made |= of_texts(network, arch) if arguments.texts else {}
                    names = dict(zip(("model", "arch", "precision", "variant"), key, strict=True))
                    if key in known:
                        results.remove(known[key])
                    results.append({**names, **made})
                    save_results(str(arguments.out), "benchmarks.on_chip", results)
                    print(*key, made["us"], flush=True)
    columns = ["model", "precision", "arch", "level", "launches", "barriers", "read MiB", "written MiB"]
    columns += ["registers", "spilled B", "code KiB", "predicted µs", "against V3", "compile s"]
    print(format_table(columns, rows(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
