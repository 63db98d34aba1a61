"""Products of halves on tensor cores, each in many tilings, for ``benchmarks.cost_against_gpu`` to run.

::

    python -m benchmarks.product_tilings --out BUILD [--products 384x768x3072 ...] [--near 24] [--others 40]
    python -m benchmarks.cost_against_gpu pack --in BUILD --to FOLDER           # then as that script says

The tilings are those that the rule estimates to be the quickest, and others within twice the least estimate; the rule's
own choice comes first. By default the products are BERT's, of the paper's size, and one of ResNeXt's.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path

import tvm

from benchmarks import cost_against_gpu_build as building
from benchmarks.cost_against_gpu_cases import Case
from benchmarks.cost_against_measured import product
from souffle.cost import CostDevice, cost_device
from souffle.schedule.gpu import StageForms
from souffle.schedule.gpu.forms.matrix_product import read_contraction
from souffle.schedule.gpu.rules.mma_contraction import MMA_CONTRACTION
from souffle.schedule.gpu.scheduler import gpu_request
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling, assumed_operands, estimated_tilings

__all__ = ["case_of", "main", "sampled"]

_PRODUCTS = ("384x768x3072", "384x3072x768", "384x2304x768", "384x768x768", "208x1024x1024")
_WITHIN = 2.0
"""Of the least estimate."""


def case_of(extents: str) -> Case:
    """Of rows, columns and products to sum, written as ``MxNxK``."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", extents)
    if match is None:
        raise SystemExit(f"{extents!r} is no product: write rows, columns and products to sum, such as 384x768x3072")
    rows, columns, inner = map(int, match.groups())
    build = product(1, rows, columns, inner, "float16").build
    return Case(f"product_{extents}", build, {"op": "contract", "spec": "bmk,bkn->bmn"})


def sampled(
    case: Case, device: CostDevice, target: tvm.target.Target, near: int, others: int, seed: int
) -> tuple[list[building.Candidate], dict[str, int]]:
    """Candidates of a product, the rule's own first, and why others were left out."""
    stage, request = building.stage_of(case, device, target), gpu_request(device)
    forms = StageForms(stage.draft.func)
    sketch, problem = MMA_CONTRACTION.sketch(forms, request), forms.read(read_contraction)
    estimated = estimated_tilings(problem, assumed_operands(problem, request), request)
    own = MmaTiling.of(sketch.choose(), request.threads)
    best = [tiling for _, tiling in estimated[:near]]
    rest = [tiling for clocks, tiling in estimated[near:] if clocks <= _WITHIN * estimated[0][0]]
    chosen = dict.fromkeys([own, *best, *random.Random(seed).sample(rest, min(others, len(rest)))])
    found: list[building.Candidate] = []
    left: dict[str, int] = {}
    digests: set[str] = set()
    for tiling in chosen:
        reason, made = building.made_schedule(stage, sketch, dict(tiling.values), request, target, digests)
        if made is None:
            left[reason] = left.get(reason, 0) + 1
        else:
            found.append(building.Candidate(case, stage, made[0], dict(tiling.values), made[1], tiling == own))
    return found, left


def main(argv: list[str] | None = None) -> int:
    """Build; exit status 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.product_tilings", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="H200-SXM5-141GB", help="a product, or a file of souffle measure-device")
    parser.add_argument("--products", nargs="+", default=list(_PRODUCTS), metavar="MxNxK")
    parser.add_argument("--near", type=int, default=24, help="of the least estimates")
    parser.add_argument("--others", type=int, default=40, help="at random, within twice the least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, help="where cubins are kept by their text")
    options = parser.parse_args(argv)
    device = cost_device(options.device)
    manifest = building.Manifest(options.out, device, options.cache, "benchmarks.product_tilings", seed=options.seed)
    for extents in options.products:
        case = case_of(extents)
        manifest.add(case, *sampled(case, device, manifest.target, options.near, options.others, options.seed))
    manifest.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
