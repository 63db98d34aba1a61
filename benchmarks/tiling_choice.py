"""What factors of the estimate choose among tilings that a GPU ran, and how the cost model is wrong about two of them.

::

    python -m benchmarks.tiling_choice [--measured docs/results/gpu-h100-2026-11-27.json] [--device H100-SXM5-80GB]
        --out docs/results/tiling_choice.json

The tilings are those of ``benchmarks.product_tilings``, as the rule orders their copies, that leave room for a second
block on a multiprocessor. Of each product the one is taken that the rule would take if there were no others, by the
estimate of today and a factor for tilings that take a multiprocessor's last registers (``_FULL`` in
``souffle/schedule/gpu/tiling/mma_tiling.py``); the table says what that took on the GPU. The error is that of pairs:
how far the predicted ratio of two tilings of one product is from the measured one, in half of all pairs
(``RELATIVE_ERROR`` in ``souffle/cost/kernel.py``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, prod
from pathlib import Path
from unittest import mock

from benchmarks import cost_against_gpu_build as building
from benchmarks.product_tilings import case_of
from benchmarks.record import save_results
from souffle.cli.output import format_table
from souffle.cost import cost_device
from souffle.cost.predict import predict_work, resources_in_kernel
from souffle.cost.work import work_of
from souffle.placement.stage_trial import seconds_of
from souffle.schedule.gpu import StageForms
from souffle.schedule.gpu.device import ASSUMED_REGISTERS
from souffle.schedule.gpu.forms.matrix_product import Contraction, read_contraction
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.rules.mma_contraction import MMA_CONTRACTION
from souffle.schedule.gpu.scheduler import gpu_request
from souffle.schedule.gpu.tiling import mma_tiling
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling, Operands, assumed_operands, choose_tiling
from souffle.schedule.lower import cuda_target

FACTORS = (1.0, 1.02, 1.04, 1.06, 1.08, 1.1, 1.15, 1.2)
_ROW = ("product", "warps", "parts", "step", "stages", "order", "warm_us")


@dataclass(frozen=True, eq=False)
class Measured:
    """A product, with the tilings that were run: microseconds by the clock, and predicted."""

    name: str
    problem: Contraction
    operands: Operands
    request: GpuRequest
    microseconds: dict[MmaTiling, float]
    predicted: dict[MmaTiling, float]

    def chosen(self, factor: float) -> MmaTiling:
        """What the rule takes of them with a factor."""
        among = mock.patch.object(mma_tiling, "_tilings", lambda *_: iter(self.microseconds))
        with among, mock.patch.object(mma_tiling, "_FULL", factor):
            return choose_tiling(self.problem, self.operands, self.request)[1]

    def pair_errors(self) -> list[float]:
        """Of all pairs: how far the predicted ratio is from the measured one, as a factor."""
        wrong = [log(self.predicted[one] / found) for one, found in self.microseconds.items()]
        return [exp(abs(one - other)) for one, other in itertools.combinations(wrong, 2)]


def measured(path: Path, product: str) -> list[Measured]:
    """The products of a file of results, scheduled and predicted again."""
    device = cost_device(product)
    target, request = cuda_target(device.arch), gpu_request(device)
    rows = json.loads(path.read_text())["product_tilings"]["crossed"]
    found = []
    named = (dict(zip(_ROW, row, strict=False)) for row in rows)
    for name, own in itertools.groupby(named, lambda row: row["product"]):
        stage = building.stage_of(case_of(name), device, target)
        forms = StageForms(stage.draft.func)
        sketch, problem = MMA_CONTRACTION.sketch(forms, request), forms.read(read_contraction)
        operands = assumed_operands(problem, request)
        nbytes = sum(tensor.nbytes for tensor in (*stage.draft.inputs, *stage.draft.outputs))
        times: dict[MmaTiling, float] = {}
        predicted: dict[MmaTiling, float] = {}
        for row in own:
            tiling = MmaTiling(tuple(row["warps"]), tuple(row["parts"]), row["step"], row["stages"])
            if row["order"] != "own" or tiling.registers(operands, request.threads) > ASSUMED_REGISTERS:
                continue
            _, made = building.made_schedule(stage, sketch, dict(tiling.values), request, target, set())
            function = made[1]
            used = resources_in_kernel([function])
            terms = predict_work(work_of(function), function.tiles, used, device, nbytes, 0.0, warm=True)
            times[tiling], predicted[tiling] = row["warm_us"], 1e6 * seconds_of(terms)
        found.append(Measured(name, problem, operands, request, times, predicted))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print and keep both; exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=Path("docs/results/gpu-h100-2026-11-27.json"))
    parser.add_argument("--device", default="H100-SXM5-80GB", help="a product, or a file of souffle measure-device")
    parser.add_argument("--out", required=True)
    options = parser.parse_args(argv)
    products = measured(options.measured, options.device)
    results = []
    for factor in FACTORS:
        taken = {one.name: one.microseconds[one.chosen(factor)] for one in products}
        mean = prod(taken.values()) ** (1 / len(taken))
        results.append({"factor": factor, "us": taken, "mean_us": round(mean, 2)})
    best = {one.name: min(one.microseconds.values()) for one in products}
    errors = [error for one in products for error in one.pair_errors()]
    about = {
        "tilings": sum(len(one.microseconds) for one in products),
        "pairs": len(errors),
        "median_pair_error": round(statistics.median(errors), 3),
    }
    save_results(options.out, "benchmarks.tiling_choice", results, best=best, **about)
    names = [one.name for one in products]
    rows = [(r["factor"], *(r["us"][name] for name in names), r["mean_us"]) for r in results]
    print(format_table(("factor", *names, "mean"), [*rows, ("best", *(best[name] for name in names), "")]))
    print(f"{about['tilings']} tilings; half of {about['pairs']} pairs within {about['median_pair_error']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
