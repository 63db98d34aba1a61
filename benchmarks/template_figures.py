"""The two figures of the FusionStitching papers as one kernel of templates, beside Souffle's own rules.

``python -m benchmarks.template_figures [--size paper] [--product A100-SXM4-40GB] [--levels V0 V4] [--out FILE.json]``.
Layer normalization (2021, Figure 1) and the pattern of multi-interests (2019, Figure 1): kernels, predicted
microseconds with launches, shared memory, and seconds to find the template. All is predicted by one cost model; what
the kernels compute is compared at size tiny on the CPU device.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import souffle
from benchmarks.record import save_results
from souffle.cli.output import format_table
from souffle.cost import cost_device
from souffle.models import build
from souffle.models.inputs import random_inputs
from souffle.program import TEProgram
from souffle.runtime import Network
from souffle.schedule.stage import Stages
from souffle.stitching import Stitched, stitched

FIGURES = ("layer-norm", "multi-interests")


def by_template(name: str, size: str, product: str, **options: Any) -> tuple[Network, Stitched, float]:
    """A network as one stage, with the seconds in which its template was found."""
    found: list[Any] = []

    def hook(stage: str, result: object) -> object:
        if stage == "roll" and isinstance(result, TEProgram):
            found.append(result)
        if stage != "schedule":
            return result
        start = time.perf_counter()
        found.append(stitched(found[0].tes, found[0], cost_device(product)))
        found.append(time.perf_counter() - start)
        return Stages([found[1].stage])

    net = souffle.compile(build(name, size), level="V0", hook=hook, **options)
    return net, found[1], found[2]


def microseconds(net: Network) -> float:
    """Predicted, launches included."""
    return sum(kernel.predicted.seconds for kernel in net.plan.kernels) * 1e6


def checked(name: str, product: str, **options: Any) -> str:
    """What the certificate says at size tiny, and how far results are from Souffle's V4."""
    net, _, _ = by_template(name, "tiny", product, verify="values", **options)
    data = random_inputs(build(name, "tiny"))
    right = souffle.compile(build(name, "tiny"), level="V4", **options)(data)
    worst = 0.0
    for one in (net, Network(net.plan, device="cpu", order="shuffled", seed=1, blocks=3)):
        for key, value in one(data).items():
            worst = max(worst, float(np.abs(np.asarray(value) - np.asarray(right[key])).max()))
    return f"{net.certificate.verdict}, {worst:.0e} from V4"


def main() -> None:
    """Print and save the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="paper")
    parser.add_argument("--product", default="A100-SXM4-40GB")
    parser.add_argument("--levels", nargs="*", default=["V0", "V4"])
    parser.add_argument("--out")
    arguments = parser.parse_args()
    arch = cost_device(arguments.product).arch
    options = {"target": "cuda", "arch": arch, "device": "cpu", "cubin": False}
    rows = []
    for name in FIGURES:
        for level in arguments.levels:
            net = souffle.compile(build(name, arguments.size), level=level, **options)
            rows.append((name, level, len(net.kernels), f"{microseconds(net):.1f}", "", "", "", ""))
        net, made, seconds = by_template(name, arguments.size, arguments.product, **options)
        figures = (made.shared.requested, made.shared.allocated, made.allocated)
        shared = f"{figures[0]} / {figures[1]} / {figures[2]}"
        proof = checked(name, arguments.product, **options)
        rows.append(
            (
                name,
                "template",
                len(net.kernels),
                f"{microseconds(net):.1f}",
                shared,
                made.scheduled,
                f"{seconds:.0f}",
                proof,
            )
        )
        print(*made.decisions, sep="\n", flush=True)
    head = (
        "pattern",
        "by",
        "kernels",
        "predicted us",
        "shared bytes: requested / Algorithm 4 / allocated",
        "scheduled",
        "s",
        "tiny",
    )
    print(format_table(head, rows))
    if arguments.out:
        save_results(arguments.out, "benchmarks.template_figures", [dict(zip(head, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
