"""Mutants of networks: does the certificate refute each that changes a result, does the CPU device see races?

``python -m benchmarks.mutation --models bert lstm --levels V3 V4 --mutants 360 --seed 0 --json out.jsonl``. Mutants are
spread evenly over the networks, the tiny models and any ONNX files. One line of JSON is written for each; lines that
are there are not done again. Workers compile the networks and try the mutants, ``--workers N`` processes or wherever
``--on`` says. ``--thorough`` changes any number and any statement, too, and ``--open`` runs only those that are not
refuted, and these also with every access looked at. ``--report A.jsonl B.jsonl`` prints what several campaigns found
together.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import onnx

from benchmarks.campaign import (
    More,
    NamedCase,
    Record,
    RecordFile,
    Workers,
    add_worker_options,
    death_of,
    read_records,
    run_cases,
    where,
)
from souffle import models
from souffle.cli.interruption import interruptible, run_process, status_of
from souffle.cli.mutate import trial_table
from souffle.cli.output import Progress
from souffle.mutation.mutants import Mutation
from souffle.mutation.trial import Trial, described, misses
from souffle.workers import Job
from souffle.workers.cases import Asking
from souffle.workers.harness import key_of

__all__ = ["WORK", "main"]

WORK = "benchmarks.mutation.work"
"""The module of what workers do."""

_Key = tuple[str, str, str, str, str, int]


def _key(record: Mapping[str, Any]) -> _Key:
    """By network and mutation; what is of a network as a whole comes first."""
    mutation = record.get("mutation") or {}
    words = (mutation.get(name) or "" for name in ("kind", "action", "kernel", "stage"))
    return (record["network"], *words, mutation.get("number", -1))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign; 1 where a mutant that changes the result is not refuted, or one could not be tried."""
    arguments = _parser().parse_args(argv)
    if arguments.report:
        found = {_key(record): record for path in arguments.report for record in read_records(path)}
        return _report(found.values())
    progress = Progress()
    return interruptible(lambda: status_of(lambda: _run(arguments, progress), progress), progress)


def _parser() -> argparse.ArgumentParser:
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
    add_worker_options(parser)
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="for one mutant")
    parser.add_argument("--thorough", action="store_true", help="change any number and any statement, too")
    parser.add_argument("--open", action="store_true", help="do not run those that are refuted")
    parser.add_argument("--report", nargs="+", type=Path, metavar="FILE.jsonl", help="print what is there, try nothing")
    return parser


def _run(arguments: argparse.Namespace, progress: Progress) -> int:
    sources = [*arguments.models, *arguments.files]
    content = {source: _content(source) for source in sources}
    with RecordFile(arguments.json, _key) as file:
        # A network that could not be compiled is tried again.
        file.forget(lambda record: "mutation" not in record)
        campaign = _Campaign(arguments, {source: key_of(data) for source, data in content.items()}, file, progress)
        try:
            run_cases(
                campaign.networks(),
                file,
                Workers(where(arguments), shared=list(dict.fromkeys(content.values()))),
                progress,
                noun="mutants",
                total=0,
                failed=lambda record: "failed" in record or _trial(record).missed,
            )
        finally:
            progress.done()
            status = _report([file.records[key] for key in campaign.wanted if key in file.records])
    return status


def _content(source: str | Path) -> bytes:
    model = onnx.load(source) if isinstance(source, Path) else models.build(source)
    return model.SerializeToString(deterministic=True)


@dataclass
class _Campaign:
    """The networks, and the mutants that are wanted of them, as they become known."""

    arguments: argparse.Namespace
    keys: Mapping[str | Path, str]
    file: RecordFile
    progress: Progress

    def __post_init__(self) -> None:
        self._wanted: dict[str, list[_Key]] = {}

    @property
    def wanted(self) -> list[_Key]:
        """In the order of the networks and of their samples."""
        return [key for keys in self._wanted.values() for key in keys]

    def networks(self) -> Iterator[NamedCase]:
        """A case for each, which finds its mutants."""
        arguments = self.arguments
        sources = [*arguments.models, *arguments.files]
        networks = list(product(sources, arguments.levels, arguments.precisions, arguments.grid_barriers))
        for number, (source, level, precision, barrier) in enumerate(networks):
            label = f"{getattr(source, 'stem', source)} {level} {precision} {barrier}"
            share = arguments.mutants * (number + 1) // len(networks) - arguments.mutants * number // len(networks)
            options = {"arch": arguments.arch, "precision": precision, "grid_barrier": barrier}
            options |= {"level": "V4", "partition": "persistent"} if level == "persistent" else {"level": level}
            network = {"model": self.keys[source], "options": options, "seed": arguments.seed}
            network["thorough"] = arguments.thorough
            # Where each network gives few, each begins with other kinds.
            sample = {"count": share, "seed": arguments.seed + number, "kinds": arguments.kinds}
            if share:
                self._wanted.setdefault(label, [])
                yield label, self._ask_network(label, network, sample)

    def _ask_network(self, label: str, network: Mapping[str, Any], sample: Mapping[str, Any]) -> Asking[Record | More]:
        job = self._job("sampled", {"network": network, **sample}, label, network)
        (answer,) = yield [(job, None)]
        death = death_of(job, answer)
        if death is not None:
            record = {"network": label, "failed": death.kind, "detail": death.reason}
            self._wanted[label].append(_key(record))
            return record
        possible, mutations = answer.value["possible"], answer.value["mutations"]
        wanted = {_key({"network": label, "mutation": mutation}): mutation for mutation in mutations}
        self._wanted[label] += wanted
        todo = [mutation for key, mutation in wanted.items() if key not in self.file.records]
        if todo:
            self.progress.note(f"{label}: {possible} mutations, {len(todo)} to try")
        return More([(label, self._ask_mutant(label, network, mutation)) for mutation in todo])

    def _ask_mutant(self, label: str, network: Mapping[str, Any], mutation: Mapping[str, Any]) -> Asking[Record]:
        payload = {"network": network, "mutation": mutation, "refuted": not self.arguments.open}
        job = self._job("tried", payload, f"{Mutation(**mutation).identity} of {label}", network)
        (answer,) = yield [(job, None)]
        death = death_of(job, answer)
        if death is not None:
            return {"network": label, "mutation": mutation, "failed": death.kind, "detail": death.reason}
        return {"network": label, **answer.value}

    def _job(self, function: str, payload: dict[str, Any], label: str, network: Mapping[str, Any]) -> Job:
        limits = {"seconds": self.arguments.timeout, "memory_mb": self.arguments.memory_mb}
        return Job(f"{WORK}:{function}", payload, label, (network["model"],), **limits)


def _trial(record: Mapping[str, Any]) -> Trial:
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
    del fields["network"]
    return Trial(Mutation(**fields.pop("mutation")), **fields)


def _report(records: Iterable[Mapping[str, Any]]) -> int:
    records = list(records)
    failed = [record for record in records if "failed" in record]
    trials = [(record["network"], _trial(record)) for record in records if "failed" not in record]
    print(trial_table(trial for _, trial in trials))
    wrong = misses(trial for _, trial in trials)
    for label, trial in trials:
        if trial in wrong:
            print(f"\n{label}: {described(trial)}")
    for record in failed:
        what = Mutation(**record["mutation"]).identity if "mutation" in record else "as a whole"
        print(f"\n{record['network']}, {what}: {record['failed']}: {record['detail']}")
    print(f"\nmisses: {len(wrong)}; trials took {sum(trial.seconds for _, trial in trials):.0f} s")
    return int(bool(failed) or any(trial.missed for _, trial in trials))


if __name__ == "__main__":
    run_process(main)
