"""The cost model against the clocks of stages on a GPU, each a kernel of its own.

``python benchmarks/cost_against_stages.py RESULTS.json [--models bert ...] [--product H100-SXM5-80GB]``. The results
are those of ``benchmarks.gpu_host``, phase ``stages``. Each network in them is compiled here at V2, where a stage is a
launch: what its slowest block took is set beside what is predicted for all of its tiles, without the launch. The
schedules have to be those that were measured, so it is run with the sources that built the artifacts, by its path, with
those of the cost model that is asked about in their place; stages whose tiles are not as many as blocks were measured
are left out and counted. Nothing but ``souffle`` is imported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import souffle
from souffle import models
from souffle.cost.device import CostDevice, cost_device
from souffle.cost.predict import predict_stage
from souffle.pipeline import stages_of
from souffle.schedule.stage import LoopStage

Row = tuple[str, float, float, int]
"""Rule, clocks measured, clocks predicted, runs."""


def measured(step: dict[str, Any]) -> dict[str, tuple[float, int, int]]:
    """By a stage's name without its number: clocks of the slowest block in all runs, runs, blocks."""
    found: dict[str, tuple[float, int, int]] = {}
    for launch in step["launches"]:
        for label, runs, _, _, slowest in launch["segments"]:
            found[_unnumbered(label)] = (slowest, runs, launch["blocks"])
    return found


def _unnumbered(name: str) -> str:
    return name.split("_", 1)[-1]


def rows_of(model: str, step: dict[str, Any], device: CostDevice) -> Iterator[Row | None]:
    """Each distinct stage; None for one that is not as it was measured."""
    clocks = measured(step)
    program = souffle.import_onnx(models.build(model, size="paper"))
    units, _ = stages_of(program, level="V2", precision="fp32", arch=device.arch, cubin=False)
    seen = set()
    for unit in units:
        for stage in unit.stages if isinstance(unit, LoopStage) else (unit,):
            function = stage.functions[0]
            if function.name in seen:
                continue
            seen.add(function.name)
            known = clocks.get(_unnumbered(function.name))
            # The elements of element-wise stages are shared among fewer blocks than there are tiles.
            if known is None or (known[2] > function.tiles and stage.schedule.rule == "contraction"):
                yield None
                continue
            predicted = predict_stage(stage.functions, device, start="none", warm=True).seconds
            yield stage.schedule.rule, known[0], predicted * device.clock_hz * known[1], known[1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--models", nargs="+", default=["bert", "resnext", "swin", "efficientnet"])
    parser.add_argument("--product", default="H100-SXM5-80GB")
    arguments = parser.parse_args()
    device = cost_device(arguments.product)
    steps = json.loads(arguments.results.read_text())["fp32"]["steps"]
    rows: list[Row] = []
    other = 0
    for model in arguments.models:
        for row in rows_of(model, steps[f"stages {model}-paper-fp32-V2-synthetic"]["result"], device):
            if row is None:
                other += 1
            else:
                rows.append(row)
    write = sys.stdout.write
    heads = ("rule", "stages", "measured µs", "predicted")
    write("{:18} {:>6} {:>12} {:>10}".format(*heads) + "  measured / predicted: quartiles, extremes\n")
    for rule in sorted({rule for rule, *_ in rows}):
        own = [row for row in rows if row[0] == rule]
        ratios = sorted(clocks / predicted for _, clocks, predicted, _ in own)
        cuts = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        sums = [sum(row[place] for row in own) / device.clock_hz * 1e6 for place in (1, 2)]
        shown = " ".join(f"{cut:.2f}" for cut in cuts) + f", {ratios[0]:.2f} {ratios[-1]:.2f}"
        write(f"{rule:18} {len(own):6} {sums[0]:12.0f} {sums[1]:10.0f}  {shown}\n")
    write(f"{other} stages are not as they were measured\n")


if __name__ == "__main__":
    main()
