"""The loops on tensor cores in a network's machine code: their instructions by kind, and what spills in them.

``python -m benchmarks.product_loops bert [--precision mixed] [--level V3 V4] [--arch sm_90] [--out FILE.json]``
compiles models of paper size with nvcc and runs nothing. A kernel's registers are those of all of its stages; what
ptxas has no room for stands in these loops as loads from local memory and stores to it, once for each step of a
product, where the cost model takes each word for stored and loaded once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import souffle
from benchmarks.record import save_results
from benchmarks.sass import loops_of, self_test
from souffle import models
from souffle.cli.output import format_table
from souffle.pipeline import compile_cuda

_PRODUCTS = ("HMMA.16816", "HMMA")
_BESIDE = ("LDSM", "LDL", "STL")


def rows_of(model: str, level: str, precision: str, arch: str) -> Iterator[dict[str, Any]]:
    """Each loop with products of each kernel, in the order of the code."""
    program = souffle.import_onnx(models.build(model, size="paper"))
    plan = compile_cuda(program, level=level, precision=precision, arch=arch, verify="off").plan
    resources = {kernel.name: kernel.resources for kernel in plan.kernels}
    for module in plan.modules:
        for kernel, codes in loops_of(module.cubin, arch).items():
            for code in codes:
                products = sum(code.kinds[kind] for kind in _PRODUCTS)
                if not code.depth or not products:
                    continue
                yield {
                    "model": model,
                    "level": level,
                    "kernel": kernel,
                    "registers": resources[kernel].registers,
                    "instructions": code.instructions,
                    "products": products,
                    **{kind: code.kinds[kind] for kind in _BESIDE},
                }


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=models.NAMES)
    parser.add_argument("--level", nargs="+", default=["V3", "V4"])
    parser.add_argument("--precision", default="mixed")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    problem = self_test(arguments.arch)
    if problem:
        print(f"instructions cannot be counted: {problem}", file=sys.stderr)
        return 1
    rows = [
        row
        for model in arguments.models
        for level in arguments.level
        for row in rows_of(model, level, arguments.precision, arguments.arch)
    ]
    print(format_table(list(rows[0]), [list(row.values()) for row in rows]) if rows else "no loop on tensor cores")
    if arguments.out:
        save_results(arguments.out, "benchmarks.product_loops", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
