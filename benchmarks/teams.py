"""Blocks of several teams, whether or not it pays: random programs, mutants, and many runs of one network.

``python -m benchmarks.teams --out docs/results/teams.json [--programs 200] [--mutants 60] [--runs 1000]``. Programs of
products, rows and columns are compiled with and without teams: both give the same numbers, the one with teams the same
bits in shuffled orders on grids of several sizes, and it is proven. Mutants (:mod:`souffle.mutation.teams`) are run in
20 shuffled orders against the bits of the network itself, and the certificate is asked, values included. One object is
run in shuffled orders on grids that change. Each result is kept as it is made: the same command goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tvm import te

import souffle
from benchmarks.mechanism_trials import GRIDS, many_runs, same_bits, told, tried_mutants
from benchmarks.record import kept_results, save_results
from benchmarks.recurrent import recurrent
from souffle.choice import stationary
from souffle.codegen.assemble import CompiledKernels
from souffle.kernel import kernel_plan
from souffle.kernel.calls import CallPlan
from souffle.mutation.trial import inputs_of
from souffle.partition import PartitionRequest
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.runtime.cpu_runner import CpuRunner
from souffle.verify import PROVEN
from tests.kernel.residents import residual
from tests.testlib import Builder, inputs_for

__all__ = ["asked_for", "forced", "main", "random_chain"]

_MOST_THREADS = 1024
_APART = ("reuse", "attention")
"""What joins the stages of small programs, between which there is then nothing to wait for."""


def asked_for(teams: int) -> Callable[..., tuple[int, str]]:
    """What answers in the place of prices that a kernel's blocks are of so many teams, or as many as have room."""

    def answer(plain: CallPlan, barriers: CallPlan, request: PartitionRequest) -> tuple[int, str]:
        return min(teams, _MOST_THREADS // plain.shape.threads), "as asked for"

    return answer


@contextmanager
def forced(teams: int) -> Iterator[None]:
    """Kernels that wait have blocks of so many teams, or as many as have room; constants stay wherever they can."""

    with (
        mock.patch.object(kernel_plan, "_teams", asked_for(teams)),
        mock.patch.object(stationary, "pays", lambda made, before: True),
    ):
        yield


def random_chain(seed: int) -> TEProgram:
    """Products, sums of rows, maxima of columns and transposed tensors, whose numbers every order keeps exact."""
    draw, b = random.Random(seed), Builder()
    shape = [draw.choice((37, 64, 130, 211)), draw.choice((29, 64, 96, 131))]
    x = b.input(*shape)
    for _ in range(draw.choice((3, 4, 5))):
        kind = draw.choice(("product", "product", "rows", "columns", "transpose"))
        if kind == "product":
            size = draw.choice((31, 64, 100))
            values = np.random.default_rng(seed).integers(-2, 3, (shape[1], size))
            x = b.map(lambda v: te.round(v * 0.125), b.matmul(x, b.constant(values.astype(np.float32))))
            shape[1] = size
        elif kind == "transpose":
            x = b.add(_turned, x, name="turned")
            shape.reverse()
        else:
            found = b.add(partial(_reduced, axis=int(kind == "rows")), x, name=kind)
            x = b.add(partial(_less, axis=int(kind == "rows")), x, found, name="less")
    return b.program(x)


def _turned(x: te.Tensor) -> te.Tensor:
    return te.compute((x.shape[1], x.shape[0]), lambda i, j: x[j, i] + 1.0)


def _reduced(x: te.Tensor, axis: int) -> te.Tensor:
    k = te.reduce_axis((0, x.shape[axis]), "k")
    if axis:
        return te.compute((x.shape[0],), lambda i: te.sum(x[i, k], k))
    return te.compute((x.shape[1],), lambda j: te.max(x[k, j], k))


def _less(x: te.Tensor, found: te.Tensor, axis: int) -> te.Tensor:
    return te.compute(x.shape, lambda i, j: te.round((x[i, j] - found[i if axis else j]) * 0.25))


NETWORKS: dict[str, tuple[int, Callable[[], TEProgram], dict[str, Any]]] = {
    "a chain of products and columns, 2": (2, partial(random_chain, 21), {"disable": _APART}),
    "a chain of products and columns, 4": (4, partial(random_chain, 30), {"disable": _APART}),
    "a tensor that stays in shared memory, 2": (2, residual, {"arch": "sm_86"}),
    "LSTM whose weights stay, 2": (
        2, lambda: souffle.import_onnx(recurrent("LSTM", 31, 37, 37, steps=8, batch=4)), {},
    ),
    "RNN whose weights stay, 3": (3, lambda: souffle.import_onnx(recurrent("RNN", 64, 72, 72, steps=8)), {}),
}  # fmt: skip
"""By name, which ends in the number of teams: the program, and what it is compiled with."""


def _compiled(program: TEProgram, teams: int, **options: Any) -> CompiledKernels:
    how = {"level": "V4", "arch": "sm_90", "cubin": False, "verify": "values", "waits": "barriers", **options}
    with forced(teams):
        return compile_cuda(program, **how)


def _program(seed: int) -> dict[str, Any]:
    """A random program with and without teams."""
    draw, program = random.Random(seed), random_chain(seed)
    options = {"disable": _APART, "precision": draw.choice(("fp32", "mixed")), "watchdog_ms": draw.choice((None, 5e3))}
    net = _compiled(program, draw.choice((2, 3, 4, 7)), **options)
    without = _compiled(program, 1, **{**options, "verify": "off"})
    inputs = inputs_of(net.plan, inputs_for(program))
    runner = CpuRunner(net.plan)
    found, expected = runner.run(inputs), CpuRunner(without.plan).run(inputs)
    # Where its stages are others, so may be the sign of a zero that a maximum finds.
    wrong = sum(not np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    wrong += sum(not same_bits(runner, inputs, found, turn) for turn in range(len(GRIDS)))
    teams = max(kernel.teams for kernel in net.plan.kernels)
    verdict = net.plan.certificate.verdict
    return {"part": "programs", "seed": seed, "teams": teams, "verdict": verdict, "other_bits": wrong}


def _mutants(label: str, count: int) -> dict[str, Any]:
    teams, program, options = NETWORKS[label]
    made = program()
    net = _compiled(made, teams, **options)
    if max(kernel.teams for kernel in net.plan.kernels) != teams or net.plan.certificate.verdict != PROVEN:
        raise ValueError(f"{label}: not proven with {teams} teams")
    return tried_mutants(label, net, made, count, "team")


def _runs(label: str, count: int) -> dict[str, Any]:
    teams, program, options = NETWORKS[label]
    made = program()
    return many_runs(label, _compiled(made, teams, **options), made, count)


def main() -> int:
    """Run what is not kept yet, and print; 1 where a change of a result is not refuted, or bits are others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--mutants", type=int, default=60, help="of each network")
    parser.add_argument("--runs", type=int, default=1000, help="of the first network")
    arguments = parser.parse_args()
    results = kept_results(arguments.out)
    known = {(r["part"], r.get("network", r.get("seed"))) for r in results}
    first = next(iter(NETWORKS))
    jobs: dict[tuple[str, Any], Callable[[], dict[str, Any]]] = {
        **{("mutants", label): partial(_mutants, label, arguments.mutants) for label in NETWORKS},
        ("runs", first): partial(_runs, first, arguments.runs),
        **{("programs", seed): partial(_program, seed) for seed in range(arguments.programs)},
    }
    for key, job in jobs.items():
        if key not in known:
            results.append(job())
            save_results(str(arguments.out), "benchmarks.teams", results)
    return told(results, "teams", 2, "kernels that wait, in teams")


if __name__ == "__main__":
    sys.exit(main())
