"""Random kernels against the certificate, with the CPU device as oracle.

``python -m benchmarks.siege --count 200 --out build/siege.jsonl`` goes on where the file stops, in ``--workers 2``
processes or wherever ``--on`` says. False accepts lie beside it, in ``FILE.failures/``, as TensorIR script;
``--minimize`` makes each as small as it gets, ``--case FILE`` judges and runs one again, and ``--report`` prints the
table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.campaign import (
    Death,
    NamedCase,
    Record,
    RecordFile,
    Workers,
    add_seed_options,
    add_worker_options,
    count_of,
    death_of,
    read_records,
    run_cases,
    seeds,
    where,
)
from benchmarks.siege.case import read_case, write_case
from benchmarks.siege.forms import FORMS
from benchmarks.siege.judge import UNDEFINED, Judge
from benchmarks.siege.minimize import minimized
from benchmarks.siege.report import report
from benchmarks.siege.trial import BAD, Trial, made
from souffle.cli.interruption import interruptible, run_process, status_of
from souffle.cli.output import Progress
from souffle.mutation.sandbox import Sandbox
from souffle.verify import PROVEN
from souffle.workers import Job
from souffle.workers.cases import Asking

__all__ = ["WORK", "main"]

WORK = "benchmarks.siege.work"
"""The module of what workers do."""

_TIMEOUT = 60.0
_BATCH = 16
"""Cases whose texts are compiled together."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.siege", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_seed_options(parser, "case")
    add_worker_options(parser)
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help=f"for {_BATCH} cases together")
    parser.add_argument("--forms", nargs="+", default=[], choices=list(FORMS), metavar="F", help=", ".join(FORMS))
    parser.add_argument("--case", type=Path, nargs="+", help="judge and run these files instead of seeds")
    parser.add_argument("--show", type=int, metavar="SEED", help="print the TensorIR of a seed, and its mistakes")
    parser.add_argument("--minimize", action="store_true", help="make false accepts small as they are found")
    parser.add_argument("--report", action="store_true", help="print the table of FILE, and run nothing")
    return parser


def _trial(record: Mapping[str, Any]) -> Trial:
    return Trial(**{k: tuple(v) if isinstance(v, list) else v for k, v in record.items() if k != "kind"})


def _told(trial: Trial) -> tuple[str, ...]:
    lines = (f"class: {trial.kind}", f"memory: {trial.memory} {trial.reason}", f"values: {trial.values}")
    return (*trial.what, *lines, f"CPU device: {trial.outcome} {trial.detail}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status is 1 where a case is proven and wrong."""
    arguments = _parser().parse_args(argv)
    if arguments.show is not None:
        return _show(arguments)
    if arguments.case:
        return _cases(arguments.case)
    if arguments.report:
        return _report(read_records(arguments.out))
    progress = Progress()
    return interruptible(lambda: status_of(lambda: _run(arguments, progress), progress), progress)


def _report(records: Sequence[Record]) -> int:
    trials = [_trial(record) for record in records]
    print(report(trials))
    return int(any(trial.kind in BAD for trial in trials))


def _run(arguments: argparse.Namespace, progress: Progress) -> int:
    with RecordFile(arguments.out, lambda record: record["seed"]) as file:
        try:
            run_cases(
                _batches(arguments, progress, set(file.records)),
                file,
                Workers(where(arguments)),
                progress,
                noun="cases",
                total=count_of(arguments.seeds, arguments.count, file.records),
                minutes=arguments.minutes,
                failed=lambda record: record["kind"] in BAD,
            )
        finally:
            progress.done()
            status = _report([file.records[seed] for seed in sorted(file.records)])
    return status


def _batches(arguments: argparse.Namespace, progress: Progress, done: set[int]) -> Iterator[NamedCase]:
    todo = seeds(arguments.seeds, arguments.count, done)
    while batch := list(islice(todo, _BATCH)):
        yield f"seeds {batch[0]} to {batch[-1]}", _ask(batch, arguments, progress)


def _ask(batch: Sequence[int], arguments: argparse.Namespace, progress: Progress) -> Asking[list[Record]]:
    """All together, or where that ends their worker one by one, so that it is known which did."""

    def job(own: Sequence[int]) -> Job:
        payload = {"seeds": list(own), "forms": arguments.forms, "timeout": _TIMEOUT}
        label = " to ".join(map(str, dict.fromkeys((own[0], own[-1]))))
        return Job(f"{WORK}:tried_batch", payload, f"case {label}", (), arguments.timeout, arguments.memory_mb)

    together = job(batch)
    (answer,) = yield [(together, None)]
    if death_of(together, answer) is None:
        found = answer.value
    else:
        jobs = [job([seed]) for seed in batch]
        answers = yield [(one, None) for one in jobs]
        deaths = [death_of(one, answer) for one, answer in zip(jobs, answers, strict=True)]
        found = [
            answer.value[0] if death is None else asdict(_lost(seed, death))
            for seed, answer, death in zip(batch, answers, deaths, strict=True)
        ]
    trials = [_trial(record) for record in found]
    for trial in trials:
        if trial.kind in BAD:
            progress.note(f"seed {trial.seed}: " + "\n    ".join((trial.kind, *_told(trial))))
            # What has ended its worker is not made here.
            if arguments.out and trial.note:
                _keep(arguments, trial)
    return [{**asdict(trial), "kind": trial.kind} for trial in trials]


def _lost(seed: int, death: Death) -> Trial:
    reason = f"{death.kind}: {death.reason}"
    return Trial(seed, "", False, (), (), "ERROR", (), reason, "", "", "", "", 0.0)


def _keep(arguments: argparse.Namespace, trial: Trial) -> None:
    case, spoiled, _ = made(trial.seed, tuple(arguments.forms))
    case = spoiled or case
    folder = arguments.out.with_name(arguments.out.name + ".failures")
    write_case(case, folder / f"{trial.seed}.py", *_told(trial))
    if arguments.minimize and trial.kind == "false accept":
        with Sandbox(_TIMEOUT) as sandbox:
            judge = Judge(sandbox)
            small = minimized(case, judge)
            write_case(small, folder / f"{trial.seed}.min.py", *_told(trial), f"then: {judge.outcome(small).detail}")


def _show(arguments: argparse.Namespace) -> int:
    case, spoiled, found = made(arguments.show, tuple(arguments.forms))
    print(case.note)
    for _, words in found:
        print(f"mistake: {words}")
    for func in (*(spoiled or case).functions.values(), *(spoiled or case).kernels.values()):
        print("\n".join(line for line in func.script().splitlines() if "func_attr" not in line))
    return 0


def _cases(paths: Sequence[Path]) -> int:
    wrong = False
    with Sandbox(_TIMEOUT) as sandbox:
        judge = Judge(sandbox)
        for path in paths:
            case = read_case(path)
            judgement, outcome = judge.judgement(case), judge.outcome(case)
            wrong = wrong or (judgement.memory == PROVEN and outcome.kind == UNDEFINED)
            print(f"{path.name}: {judgement.memory} {judgement.reason}")
            print(f"    values: {judgement.values} {judgement.values_reason}")
            print(f"    CPU device: {outcome.kind} {outcome.detail}")
    return int(wrong)


if __name__ == "__main__":
    run_process(main)
