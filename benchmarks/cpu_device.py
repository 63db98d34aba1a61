"""How long emitted CUDA text takes on the CPU: the tiny models, and one layer of the paper's BERT in fp32.

``python -m benchmarks.cpu_device [--level V4] [--out FILE.json]``. Each text is built with g++, then run as it is, and
with every access looked at (``checked``). The counts are those of the checked run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace

import numpy as np
from onnx import ModelProto

import souffle
from benchmarks.record import save_results
from souffle import models
from souffle.cli.output import format_table
from souffle.models.bert import SIZES, build_bert


def one(name: str, model: ModelProto, level: str) -> dict:
    """Times and counts of one model."""
    inputs = models.random_inputs(model)
    net = souffle.compile(model, level=level, target="cuda", device="cpu", cubin=False)
    row: dict = {"model": name, "level": level}
    outputs = {}
    for kind in ("plain", "checked"):
        # A folder of its own: texts are built anew.
        with tempfile.TemporaryDirectory() as folder:
            device = net.on("cpu", checked=kind == "checked", cache_dir=folder)
            start = time.perf_counter()
            device(inputs)
            first = time.perf_counter()
            outputs[kind] = device(inputs)
            row[f"{kind}_build_seconds"] = first - start - (time.perf_counter() - first)
            row[f"{kind}_run_seconds"] = time.perf_counter() - first
            if kind == "checked":
                row["megabytes_read"] = sum(report.total.read for report in device.counts) / 1e6
    for output, value in outputs["plain"].items():
        np.testing.assert_array_equal(value, outputs["checked"][output])
    return row


def main() -> int:
    """Time all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="V4")
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    built = [(name, models.build(name)) for name in models.NAMES]
    built.append(("bert, paper, 1 layer", build_bert(replace(SIZES["paper"], layers=1), 0)))
    rows = [one(name, model, arguments.level) for name, model in built]
    names = ("plain_build_seconds", "plain_run_seconds", "checked_build_seconds", "checked_run_seconds")
    table = [(row["model"], *(f"{row[name]:.2f}" for name in names), f"{row['megabytes_read']:.2f}") for row in rows]
    print(format_table(("model", "g++ s", "run s", "g++ s, checked", "run s, checked", "MB asked for"), table))
    if arguments.out:
        save_results(arguments.out, "benchmarks.cpu_device", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
