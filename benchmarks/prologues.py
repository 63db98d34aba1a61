"""Copies that blocks start while they wait for each other: random programs, mutants, and many runs of one network.

``python -m benchmarks.prologues --out docs/results/prologues.json [--programs 100] [--mutants 60] [--runs 1000]``.
Chains of products and rows, loops of equal layers among them, are compiled with and without prologues
(``disable=["prologues"]``): both give the same bits, also in shuffled orders on grids of several sizes, and the one
with them is proven with values. Mutants (:mod:`souffle.mutation.prologues`) are run in 20 shuffled orders against the
bits of the network itself, and the certificate is asked, values included. One object is run in shuffled orders on grids
that change. Each result is kept as it is made: the same command goes on where it stopped.

``python -m benchmarks.prologues --predicted --out docs/results/prologues_predicted.json`` compiles the paper's networks
at V4 with and without them, and says how many stages have one and what is predicted.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tvm import te

from benchmarks.mechanism_trials import GRIDS, many_runs, same_bits, told, tried_mutants
from benchmarks.record import kept_results, save_results
from benchmarks.teams import forced
from souffle import import_onnx, models
from souffle.cli.output import format_table
from souffle.codegen.assemble import CompiledKernels
from souffle.mutation.trial import inputs_of
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.runtime.cpu_runner import CpuRunner
from souffle.verify import PROVEN
from tests.testlib import Builder, inputs_for

__all__ = ["layers", "main", "prologues_of", "random_layers"]

_APART = ("reuse", "attention", "normalization", "channels")
"""What joins the stages of small programs, between which there is then nothing to wait for."""

_FIELDS = {
    "level": "V4", "arch": "sm_90", "cubin": False, "verify": "values", "waits": "barriers", "disable": _APART,
}  # fmt: skip


def layers(rows: int, sizes: tuple[int, ...], seed: int = 0) -> TEProgram:
    """Products one behind the other, with a sum over each row between them; equal sizes are a loop."""
    b, draw = Builder(), np.random.default_rng(seed)
    x = b.input(rows, sizes[0])
    for inner, size in pairwise(sizes):
        weights = draw.integers(-2, 3, (inner, size)).astype(np.float32)
        x = b.map(lambda v: te.round(v * 0.125), b.matmul(x, b.constant(weights)))
        x = b.add(_less, x, b.add(_total, x, name="total"), name="less")
    return b.program(x)


def _total(x: te.Tensor) -> te.Tensor:
    k = te.reduce_axis((0, x.shape[1]), "k")
    return te.compute((x.shape[0],), lambda i: te.sum(x[i, k], k))


def _less(x: te.Tensor, found: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda i, j: te.round((x[i, j] - te.round(found[i] * 0.125)) * 0.25))


def random_layers(seed: int) -> TEProgram:
    """Layers of sizes that are drawn, primes among them, some of them all equal."""
    draw = random.Random(seed)
    rows = draw.choice((1, 17, 64, 113, 300))
    sizes = [draw.choice((64, 96, 104, 131, 256, 384)) for _ in range(draw.choice((3, 4)))]
    if draw.random() < 0.4:
        sizes = [draw.choice((64, 96, 128))] * draw.choice((4, 5, 6))
    return layers(rows, tuple(sizes), seed)


NETWORKS: dict[str, tuple[Callable[[], TEProgram], int, dict[str, Any]]] = {
    "three products on tensor cores": (partial(layers, 113, (192, 256, 104, 64)), 1, {"precision": "mixed"}),
    "five equal layers": (partial(layers, 64, (128,) * 6), 1, {"precision": "mixed"}),
    "products of fp32": (partial(layers, 300, (384, 512, 256)), 1, {}),
    "blocks of two teams": (partial(layers, 200, (128, 256, 256, 128)), 2, {"precision": "mixed"}),
    "the barrier of cooperative groups": (
        partial(layers, 64, (128, 192, 104)), 1, {"precision": "tf32x3", "grid_barrier": "cooperative"},
    ),
}  # fmt: skip
"""By name: the program, teams of a block, and what it is compiled with."""


def _compiled(program: TEProgram, teams: int = 1, **options: Any) -> CompiledKernels:
    with forced(teams):
        return compile_cuda(program, **{**_FIELDS, **options})


def prologues_of(net: CompiledKernels) -> int:
    """Stages of a network's kernels whose first copies are made while blocks wait."""
    return sum(call.prologue is not None for kernel in net.merged for call in kernel.shape.stage_calls)


def _program(seed: int) -> dict[str, Any]:
    """A random program with and without prologues."""
    draw, program = random.Random(seed), random_layers(seed)
    options = {
        "precision": draw.choice(("fp32", "mixed", "mixed", "tf32x3")),
        "arch": draw.choice(("sm_80", "sm_90")),
        "grid_barrier": draw.choice(("counter", "counter", "cooperative")),
    }
    if options["grid_barrier"] == "counter":
        options["watchdog_ms"] = draw.choice((None, None, 5e3))
    teams = draw.choice((1, 1, 2, 3))
    net = _compiled(program, teams, **options)
    off = (*_APART, "prologues")
    without = _compiled(program, teams, **{**options, "verify": "off", "disable": off})
    inputs = inputs_of(net.plan, inputs_for(program))
    expected, runner = CpuRunner(without.plan).run(inputs), CpuRunner(net.plan)
    wrong = sum(a.tobytes() != b.tobytes() for a, b in zip(runner.run(inputs), expected, strict=True))
    wrong += sum(not same_bits(runner, inputs, expected, turn) for turn in range(len(GRIDS)))
    verdict = net.plan.certificate.verdict
    return {"part": "programs", "seed": seed, "prologues": prologues_of(net), "verdict": verdict, "other_bits": wrong}


def _mutants(label: str, count: int) -> dict[str, Any]:
    program, teams, options = NETWORKS[label]
    made = program()
    net = _compiled(made, teams, **options)
    if not prologues_of(net) or net.plan.certificate.verdict != PROVEN:
        raise ValueError(f"{label}: {prologues_of(net)} prologues, {net.plan.certificate}")
    return tried_mutants(label, net, made, count, "prologue")


def _runs(label: str, count: int) -> dict[str, Any]:
    program, teams, options = NETWORKS[label]
    made = program()
    return many_runs(label, _compiled(made, teams, **options), made, count)


def _predicted(model: str, arch: str, precision: str) -> dict[str, Any]:
    """A network of the paper with and without prologues."""
    program = import_onnx(models.build(model, "paper"))
    row: dict[str, Any] = {"model": model, "arch": arch, "precision": precision}
    for label, off in (("with", ()), ("without", ("prologues",))):
        fields = {"level": "V4", "arch": arch, "precision": precision, "cubin": False, "verify": "off"}
        net = compile_cuda(program, **fields, tuning_log="auto", disable=off)
        launches = Counter(launch.kernel for launch in net.plan.launches)
        seconds = (launches[n] * k.predicted.seconds for n, k in enumerate(net.plan.kernels) if k.predicted)
        row[f"{label}_us"] = round(sum(seconds) * 1e6, 1)
        if not off:
            row["stages"] = sum(len(kernel.stages) for kernel in net.plan.kernels)
            row["prologues"] = prologues_of(net)
            runs = (n for kernel in net.merged for call, n in kernel.shape.runs if call.prologue)
            row["runs"] = sum(runs)
    return row


_MODELS = ("bert", "resnext", "swin", "efficientnet", "lstm", "mmoe")


def main() -> int:
    """Run what is not kept yet, and print; 1 where a change of a result is not refuted, or bits are others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--mutants", type=int, default=60, help="of each network")
    parser.add_argument("--runs", type=int, default=1000, help="of the second network")
    parser.add_argument("--predicted", action="store_true", help="the paper's networks in place of all that")
    parser.add_argument("--models", nargs="+", default=_MODELS)
    arguments = parser.parse_args()
    results = kept_results(arguments.out)
    jobs: dict[tuple[Any, ...], Callable[[], dict[str, Any]]]
    if arguments.predicted:
        known = {(r["model"], r["arch"], r["precision"]) for r in results}
        ways = [(m, a, p) for m in arguments.models for p in ("mixed", "fp32") for a in ("sm_90", "sm_80")]
        jobs = {way: partial(_predicted, *way) for way in ways}
    else:
        known = {(r["part"], r.get("network", r.get("seed"))) for r in results}
        loop = list(NETWORKS)[1]
        jobs = {
            **{("mutants", label): partial(_mutants, label, arguments.mutants) for label in NETWORKS},
            ("runs", loop): partial(_runs, loop, arguments.runs),
            **{("programs", seed): partial(_program, seed) for seed in range(arguments.programs)},
        }
    for key, job in jobs.items():
        if key not in known:
            results.append(job())
            save_results(str(arguments.out), "benchmarks.prologues", results)
    return _predictions(results) if arguments.predicted else told(results, "prologues", 1, "prologues")


def _predictions(results: list[dict[str, Any]]) -> int:
    columns = ["model", "arch", "precision", "stages", "prologues", "runs", "without_us", "with_us"]
    print(format_table(columns, [[r[column] for column in columns] for r in results]))
    return int(any(r["with_us"] > r["without_us"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
