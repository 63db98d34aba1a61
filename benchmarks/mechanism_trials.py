"""What campaigns on one mechanism of kernels have in common: mutants of it, runs on grids that change, what is told."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from souffle.cli.output import format_table
from souffle.codegen.assemble import CompiledKernels
from souffle.mutation.mutants import Mutations
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.trial import Trials, described, inputs_of
from souffle.program import TEProgram
from souffle.runtime.cpu_runner import CpuRunner
from souffle.verify import REFUTED
from tests.testlib import inputs_for

__all__ = ["GRIDS", "many_runs", "same_bits", "told", "tried_mutants"]

GRIDS = (64, 1, 2, 3, 5, 7, 13)


def same_bits(
    runner: CpuRunner, inputs: tuple[np.ndarray, ...], expected: Sequence[np.ndarray], seed: int
) -> bool:
    """Whether a run in a shuffled order, on one of the grids, gives these bits."""
    found = runner.reordered(seed=seed, blocks=GRIDS[seed % len(GRIDS)]).run(inputs)
    return all(one.tobytes() == other.tobytes() for one, other in zip(found, expected, strict=True))


def tried_mutants(label: str, net: CompiledKernels, program: TEProgram, count: int, kind: str) -> dict[str, Any]:
    """Mutants of a kind: whether they change a result, and what the certificate says of them."""
    mutations = Mutations(net)
    counts, missed = Counter(), []
    with Sandbox() as sandbox:
        trials = Trials(mutations, inputs_of(net.plan, inputs_for(program)), sandbox)
        for mutation in mutations.sample(count, seed=7, kinds=(kind,)):
            trial = trials.run(mutation)
            if not trial.counts:
                continue
            changed = "changed" if trial.changed else "same"
            counts[f"{changed}, {trial.verdict}"] += 1
            if trial.changed and trial.verdict != REFUTED:
                missed.append(described(trial))
                print(f"{label}: {missed[-1]}", file=sys.stderr, flush=True)
    return {"part": "mutants", "network": label, "counts": dict(counts), "missed": missed}


def many_runs(label: str, net: CompiledKernels, program: TEProgram, count: int) -> dict[str, Any]:
    """Runs of one object in shuffled orders, against the bits of its first."""
    runner, inputs = CpuRunner(net.plan), inputs_of(net.plan, inputs_for(program))
    expected = runner.run(inputs)
    wrong = sum(not same_bits(runner, inputs, expected, seed) for seed in range(count))
    return {"part": "runs", "network": label, "runs": count, "other_bits": wrong}


def told(results: Sequence[dict[str, Any]], having: str, least: int, what: str) -> int:
    """Print what was found; 1 where a change of a result is not refuted, or bits are others.

    Programs are counted that have `least` or more of `having`, which `what` says.
    """
    tried = [r for r in results if r["part"] == "mutants"]
    columns = sorted({key for r in tried for key in r["counts"]})
    rows = [[r["network"], *(r["counts"].get(column, 0) for column in columns)] for r in tried]
    print(format_table(["mutants of", *columns], rows))
    programs = [r for r in results if r["part"] == "programs"]
    chosen = [r for r in programs if r[having] >= least]
    verdicts = dict(Counter(r["verdict"] for r in chosen))
    print(f"{len(chosen)} of {len(programs)} random programs have {what}: {verdicts}")
    wrong = sum(r.get("other_bits", 0) for r in results)
    missed = sum(len(r["missed"]) for r in tried)
    print(f"runs of other bits: {wrong}; mutants that change the result and are not refuted: {missed}")
    return int(bool(wrong or missed))
