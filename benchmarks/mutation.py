"""Mutants of networks: does the certificate refute each that changes a result, does the CPU device see races?

``python -m benchmarks.mutation --models bert lstm --levels V3 V4 --mutants 360 --seed 0 --json out.jsonl``. Mutants are
spread evenly over the networks, the tiny models and any ONNX files. One line of JSON is written for each; lines that
are there are not done again. ``--thorough`` changes any number and any statement, too, and ``--open`` runs only those
that are not refuted, and these also with every access looked at. A campaign may be in several processes, each with
networks and a file of its own; ``--report A.jsonl B.jsonl`` prints what they found together.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import onnx

import souffle
from benchmarks.campaign import append_record, read_records
from souffle import models
from souffle.cli.mutate import trial_table
from souffle.mutation.mutants import Mutation, Mutations
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.trial import Trial, Trials, described, inputs_of, misses
from souffle.pipeline import compile_cuda

__all__ = ["main"]


def _read(path: Path | None) -> dict[tuple[str, str], Trial]:
    """Trials by network and identity."""
    found = {}
    for data in read_records(path):
        network, mutation = data.pop("network"), Mutation(**data.pop("mutation"))
        data["rules"] = tuple(data["rules"])
        found[network, mutation.identity] = Trial(mutation, **data)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign; 1 where a mutant that changes the result is not refuted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(models.NAMES), choices=models.NAMES)
    parser.add_argument("--files", nargs="+", type=Path, default=[], metavar="FILE.onnx", help="other networks")
    parser.add_argument("--levels", nargs="+", default=["V3", "V4"], help="or persistent, for V4 with that partition")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "mixed"])
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--grid-barriers", nargs="+", default=["counter"], help="how blocks wait for each other")
    parser.add_argument("--mutants", type=int, default=360)
    parser.add_argument("--kinds", nargs="+", default=[], help="only these, such as 'grid barrier'")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and of the inputs")
    parser.add_argument("--json", type=Path, help="lines of JSON, appended to")
    parser.add_argument("--thorough", action="store_true", help="change any number and any statement, too")
    parser.add_argument("--open", action="store_true", help="do not run those that are refuted")
    parser.add_argument("--report", nargs="+", type=Path, metavar="FILE.jsonl", help="print what is there, try nothing")
    arguments = parser.parse_args(argv)
    if arguments.report:
        return _report({key: trial for path in arguments.report for key, trial in _read(path).items()})

    known = _read(arguments.json)
    sources = [*arguments.models, *arguments.files]
    networks = list(product(sources, arguments.levels, arguments.precisions, arguments.grid_barriers))
    trials: dict[tuple[str, str], Trial] = {}
    for number, (source, level, precision, barrier) in enumerate(networks):
        label = f"{getattr(source, 'stem', source)} {level} {precision} {barrier}"
        share = arguments.mutants * (number + 1) // len(networks) - arguments.mutants * number // len(networks)
        model = onnx.load(source) if isinstance(source, Path) else models.build(source)
        options = {"arch": arguments.arch, "precision": precision, "grid_barrier": barrier}
        options |= {"level": "V4", "partition": "persistent"} if level == "persistent" else {"level": level}
        compiled = compile_cuda(souffle.import_onnx(model), **options, cubin=False)
        mutations = Mutations(compiled, thorough=arguments.thorough)
        inputs = inputs_of(compiled.plan, models.random_inputs(model, seed=arguments.seed))
        # Where each network gives few, each begins with other kinds.
        wanted = mutations.sample(share, arguments.seed + number, arguments.kinds)
        todo = [m for m in wanted if (label, m.identity) not in known]
        trials |= {(label, m.identity): known[label, m.identity] for m in wanted if m not in todo}
        if not todo:
            continue
        with Sandbox() as sandbox:
            attempts = Trials(mutations, inputs, sandbox)
            for mutation in todo:
                trial = trials[label, mutation.identity] = attempts.run(mutation, refuted=not arguments.open)
                if arguments.json is not None:
                    append_record(arguments.json, {"network": label, **dataclasses.asdict(trial)})
        print(f"{label}: {len(mutations)} mutations, {len(todo)} tried", file=sys.stderr, flush=True)
    return _report(trials)


def _report(trials: Mapping[tuple[str, str], Trial]) -> int:
    print(trial_table(trials.values()))
    wrong = misses(trials.values())
    for (label, _), trial in trials.items():
        if trial in wrong:
            print(f"\n{label}: {described(trial)}")
    print(f"\nmisses: {len(wrong)}; trials took {sum(trial.seconds for trial in trials.values()):.0f} s")
    return int(any(trial.missed for trial in trials.values()))


if __name__ == "__main__":
    sys.exit(main())
