"""Bytes of global memory that a run of each paper model reads and writes, beside the paper's Table 5.

``python -m benchmarks.traffic_table [--models bert ...] [--level V3 V4] [--precision mixed fp32] [--out FILE.json]``.
Nothing runs: accesses are counted from the kernels' TensorIR (:mod:`benchmarks.traffic_counting`), all launches of a
run, loops as often as they turn. Each model is compiled in a process of its own. Millions of bytes, four countings:

asked
    What threads load and store. Caches serve most of it. ``souffle run --counts`` counts the same, less what g++ keeps
    in registers where a thread loads one element several times.
tile
    Each element once for each tile of each run of a stage: shared memory and L1 are perfect within a tile, and keep
    nothing from tile to tile.
stage
    Each element once for each run of a stage: L2 is perfect within a stage, and keeps nothing from stage to stage.
launch
    Each element once for each launch, and nothing that the launch itself has written: L2 keeps all of a kernel's data.

The paper's figure is what Nsight Compute measured as "loaded" from global memory; it does not say between which levels.
Between the multiprocessors and L2 passes about *tile*, less what L1 keeps from tile to tile. Between L2 and DRAM passes
at least *launch*, if nothing is left in L2 from before, as in a profiler that flushes caches, and more where a kernel's
data are more than L2 holds. Figures of the paper that are less than the model's constants cannot be of cold caches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import souffle
from benchmarks.record import save_results
from souffle import models
from souffle.cli.output import format_table
from souffle.codegen.assemble import CompiledKernels
from souffle.evaluation.published import published
from souffle.evaluation.traffic_counting import Moved, ShapeTraffic, count_functions, count_shape
from souffle.pipeline import LEVELS, compile_cuda

__all__ = ["COUNTINGS", "PAPER", "main", "measure", "network_traffic"]

COUNTINGS = {"asked": "asked", "tile": "once_per_tile", "stage": "once_per_stage", "launch": "once_per_launch"}
"""Names of the countings, and the attributes of :class:`ShapeTraffic` that hold them."""

PAPER = {row["network"]: tuple(row["cells"][-3:]) for row in published("table5")["rows"]}
"""Millions of bytes of TensorRT, Apollo and Souffle in the paper's Table 5."""

_MILLION = 10**6


def network_traffic(compiled: CompiledKernels) -> dict[str, Moved]:
    """What all launches of a run move, for each of :data:`COUNTINGS`.

    Parameters
    ----------
    compiled : CompiledKernels
        From :func:`souffle.pipeline.compile_cuda`.
    """
    known = count_functions(function for kernel in compiled.merged for function in kernel.shape.wholes)
    shapes: dict[str, ShapeTraffic] = {k.name: count_shape(k.shape, known) for k in compiled.merged}
    total = dict.fromkeys(COUNTINGS, Moved())
    for launch in compiled.plan.launches:
        one = shapes[compiled.plan.kernels[launch.kernel].name]
        for counting, attribute in COUNTINGS.items():
            total[counting] += getattr(one, attribute)
    return total


def measure(name: str, size: str, level: str, precision: str, partition: str, arch: str) -> dict[str, Any]:
    """Compile one model in this process and count."""
    program = souffle.import_onnx(models.build(name, size))
    start = time.perf_counter()
    how = {"level": level, "precision": precision, "partition": partition, "arch": arch}
    compiled = compile_cuda(program, **how, cubin=False, verify="off")
    between = time.perf_counter()
    traffic = network_traffic(compiled)
    plan = compiled.plan
    constants = [buffer for buffer in plan.buffers if buffer.kind == "constant"]
    result: dict[str, Any] = {"model": name, "size": size, **how, "launches": len(plan.launches)}
    result |= {counting: {"read": moved.read, "written": moved.written} for counting, moved in traffic.items()}
    return result | {
        "constant_bytes": sum(buffer.nbytes for buffer in constants),
        "workspace_bytes": plan.workspace_bytes,
        "plan_bytes_read": sum(launch.bytes_read for launch in plan.launches),
        "plan_bytes_written": sum(launch.bytes_written for launch in plan.launches),
        "compile_s": round(between - start, 1),
        "count_s": round(time.perf_counter() - between, 1),
    }


def _millions(count: float) -> str:
    return f"{count / _MILLION:.1f}" if count >= _MILLION else f"{count / _MILLION:.3f}"


def _row(result: dict[str, Any]) -> list[object]:
    row = [result["model"], result["level"], result["precision"], result["launches"]]
    row += [f"{_millions(result[c]['read'])} / {_millions(result[c]['written'])}" for c in COUNTINGS]
    theirs = PAPER.get(result["model"], ()) if result["size"] == "paper" else ()
    beside = (p if isinstance(p, str) else f"{p:g}" for p in theirs)
    return [*row, _millions(result["constant_bytes"]), " / ".join(beside)]


def main(argv: list[str] | None = None) -> int:
    """Count all models asked for and print a table; the exit status is 1 if one failed or ran out of time."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traffic_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=list(models.NAMES))
    parser.add_argument("--size", default="paper", choices=models.MODEL_SIZES)
    parser.add_argument("--level", nargs="+", default=["V3", "V4"], choices=list(LEVELS))
    parser.add_argument("--precision", nargs="+", default=["mixed", "fp32"])
    parser.add_argument("--partition", default="souffle")
    parser.add_argument("--arch", default="sm_80", help="the paper's GPU is an A100")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one compilation")
    parser.add_argument("--out", "--json", help="where to write the results as JSON")
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return 0
    cases = [
        [name, arguments.size, level, precision, arguments.partition, arguments.arch]
        for name in arguments.models
        for precision in arguments.precision
        for level in arguments.level
    ]
    results: list[dict[str, Any]] = []
    failed: list[str] = []
    for case in cases:
        print(f"{' '.join(case)} ...", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.traffic_table", "--one", *case]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=arguments.timeout)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed.append(f"{' '.join(case)}: {type(error).__name__}")
            continue
        results.append(json.loads(done.stdout))
        if arguments.out:
            save_results(arguments.out, "benchmarks.traffic_table", results, failed=failed, paper=PAPER)
    columns = ["model", "level", "precision", "launches", *(f"{c} read / written" for c in COUNTINGS), "constants"]
    print("Millions of bytes of a run. asked: by threads; tile: each element once for each tile of a stage; stage:")
    print("once for each stage; launch: once for each launch, and nothing that it wrote itself. Paper: Table 5.")
    print(format_table([*columns, "paper: TensorRT / Apollo / Souffle"], [_row(result) for result in results]))
    for failure in failed:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
