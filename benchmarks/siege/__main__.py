"""Random kernels against the certificate, with the CPU device as oracle.

``python -m benchmarks.siege --count 200 --out build/siege.jsonl`` goes on where the file stops. False accepts lie
beside it, in ``FILE.failures/``, as TensorIR script; ``--minimize`` makes each as small as it gets, ``--case FILE``
judges and runs one again, and ``--report`` prints the table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from benchmarks.campaign import add_seed_options, append_record, read_records, seeds
from benchmarks.siege.case import read_case, write_case
from benchmarks.siege.forms import FORMS
from benchmarks.siege.judge import UNDEFINED, Judge
from benchmarks.siege.minimize import minimized
from benchmarks.siege.report import report
from benchmarks.siege.trial import BAD, Trial, made, run_batch
from souffle.mutation.sandbox import Sandbox
from souffle.verify import PROVEN

__all__ = ["main"]

_TIMEOUT = 60.0
_BATCH = 16
"""Cases whose texts are compiled together."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.siege", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_seed_options(parser, "case")
    parser.add_argument("--forms", nargs="+", default=[], choices=list(FORMS), metavar="F", help=", ".join(FORMS))
    parser.add_argument("--case", type=Path, nargs="+", help="judge and run these files instead of seeds")
    parser.add_argument("--show", type=int, metavar="SEED", help="print the TensorIR of a seed, and its mistakes")
    parser.add_argument("--minimize", action="store_true", help="make false accepts small as they are found")
    parser.add_argument("--report", action="store_true", help="print the table of FILE, and run nothing")
    return parser


def _read(path: Path | None) -> list[Trial]:
    trials = []
    for record in read_records(path):
        record.pop("kind", None)
        trials.append(Trial(**{k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}))
    return trials


def _told(trial: Trial) -> tuple[str, ...]:
    lines = (f"class: {trial.kind}", f"memory: {trial.memory} {trial.reason}", f"values: {trial.values}")
    return (*trial.what, *lines, f"CPU device: {trial.outcome} {trial.detail}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status is 1 where a case is proven and wrong."""
    arguments = _parser().parse_args(argv)
    if arguments.show is not None:
        return _show(arguments)
    trials = _read(arguments.out)
    if arguments.case:
        return _cases(arguments.case)
    if not arguments.report:
        trials += _run(arguments, {t.seed for t in trials})
    print(report(trials))
    return int(any(trial.kind in BAD for trial in trials))


def _run(arguments: argparse.Namespace, done: set[int]) -> Iterator[Trial]:
    began, number = time.monotonic(), 0
    todo = seeds(arguments.seeds, arguments.count, done)
    while batch := list(islice(todo, _BATCH)):
        if arguments.minutes and time.monotonic() - began > 60 * arguments.minutes:
            return
        for trial in run_batch(batch, _TIMEOUT, tuple(arguments.forms)):
            number += 1
            _record(arguments, trial)
            yield trial
        if sys.stderr.isatty():
            rate = number / (time.monotonic() - began)
            print(f"\r\x1b[K{number} cases, {rate:.2f} cases/s", end="", file=sys.stderr, flush=True)


def _record(arguments: argparse.Namespace, trial: Trial) -> None:
    if arguments.out:
        append_record(arguments.out, {**asdict(trial), "kind": trial.kind})
    if trial.kind in BAD:
        print(f"seed {trial.seed}: " + "\n    ".join((trial.kind, *_told(trial))), flush=True)
        if arguments.out:
            _keep(arguments, trial)


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
    sys.exit(main())
