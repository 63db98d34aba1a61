"""``souffle mutate``: what the certificate and the CPU device say of mutants of a model's kernels."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable

import souffle
from souffle.cli.compare import random_inputs
from souffle.cli.compiler_options import compiler_options
from souffle.cli.model_options import import_options
from souffle.cli.output import Progress, format_table, write_json
from souffle.mutation.mutants import Mutations
from souffle.mutation.sandbox import SHUFFLED_RUNS, Sandbox
from souffle.mutation.trial import COUNTS, Trial, Trials, described, inputs_of, misses, tally
from souffle.pipeline import compile_cuda
from souffle.runtime import Network

__all__ = ["mutate", "trial_table"]


def trial_table(trials: Iterable[Trial]) -> str:
    """Counts for each kind of mutation."""
    return format_table(("mutation", *COUNTS), [(kind, *counts) for kind, counts in tally(trials)])


def mutate(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command; the exit status is 1 if a mutant that changes a result is not refuted."""
    program = souffle.import_onnx(arguments.model, **import_options(arguments))
    options = {**compiler_options(arguments), "arch": arguments.arch or "sm_90"}
    compiled = compile_cuda(program, level=arguments.level, cubin=False, progress=progress, **options)
    mutations = Mutations(compiled)
    drawn = mutations.sample(arguments.mutants, arguments.seed)
    named = random_inputs(Network(compiled.plan, device="cpu").signature.inputs, arguments.seed)
    trials: list[Trial] = []
    try:
        with Sandbox() as sandbox:
            progress("running the network itself")
            attempts = Trials(mutations, inputs_of(compiled.plan, named), sandbox)
            for number, mutation in enumerate(drawn, 1):
                progress(f"mutant {number} of {len(drawn)}: {mutation.kind}")
                trials.append(attempts.run(mutation))
    except KeyboardInterrupt:
        if trials:
            _report(arguments, progress, trials, len(mutations))
        raise
    _report(arguments, progress, trials, len(mutations))
    return int(any(trial.missed for trial in trials))


def _report(arguments: argparse.Namespace, progress: Progress, trials: list[Trial], possible: int) -> None:
    progress.done()
    if arguments.json:
        write_json({"model": arguments.model, "mutants": [dataclasses.asdict(trial) for trial in trials]})
    else:
        print(f"{arguments.model}, {len(trials)} of {possible} mutants, {SHUFFLED_RUNS} shuffled runs of each")
        print(trial_table(trials))
        for trial in misses(trials):
            print(described(trial))
