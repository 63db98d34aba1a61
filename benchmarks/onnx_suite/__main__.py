"""ONNX's own conformance suite of its operators, against Souffle.

``python -m benchmarks.onnx_suite [--target cpu] [--level V4] [--only PATTERN] [--against ort] [--out FILE.jsonl]``.
With ``--target cuda`` the emitted CUDA text runs on the CPU device. Workers run the cases, ``--jobs N`` processes or
wherever ``--on`` says: one that dies or takes too long is noted, and another goes on. With ``--out`` the same command
goes on where it stopped. ``--record`` also writes what
became of each operator to docs/results/onnx_suite.json, and docs/operators.md from it; with ``--only``, of those
operators all of whose cases were run. ``--sample N --seed S`` takes N cases by chance. Outcomes:

- passed: every output of every data set is right, by ONNX's own comparison and the case's own tolerance;
- constants: it passed with the values of inputs as constants, of those that the compiler said it needs: axes, sizes,
  conditions, and other things on which a program depends;
- refused: the model cannot be imported, for one of the reasons of souffle.errors.Refusal;
- inexact: the outputs are right by an evaluation in double precision, and the expected ones are not, by the same
  tolerance;
- wrong: an output has another value, shape or type;
- exception: another error;
- crash: the process died;
- timeout.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onnx.backend.test.case.test_case import TestCase

from benchmarks.campaign import NamedCase, Record, Workers, add_worker_options, death_of, run_cases, where
from benchmarks.onnx_suite.cases import KINDS, case_data, model_and_data, subject_of, suite_cases
from benchmarks.onnx_suite.operators_page import record_part, record_run, write_page
from benchmarks.onnx_suite.outcomes import BAD, OUTCOMES, CaseResult
from benchmarks.onnx_suite.results import result_file, results_in, summary
from souffle.cli.interruption import interruptible, run_process, status_of
from souffle.cli.output import Progress
from souffle.workers import Job
from souffle.workers.cases import Asking

__all__ = ["WORK", "main"]

WORK = "benchmarks.onnx_suite.work"
"""The module of what workers do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; 1 where a case is wrong, an exception, a crash or out of time."""
    arguments = _parser().parse_args(argv)
    if arguments.record and arguments.sample:
        raise SystemExit("--record is for all cases, or all of some operators: leave --sample out")
    progress = Progress()
    return interruptible(lambda: status_of(lambda: _run(arguments, progress), progress), progress)


def _run(arguments: argparse.Namespace, progress: Progress) -> int:
    setting = {"device": "CUDA" if arguments.target == "cuda" else "CPU", "level": arguments.level}
    engines = {"souffle": setting} | ({"ort": {}} if arguments.against else {})
    with result_file(arguments.out, setting, arguments.again) as file:
        progress("making the cases")
        cases, absent = suite_cases(arguments.kinds)
        wanted = _wanted(arguments, cases)
        left = [(engine, name) for engine in engines for name in wanted if (engine, name) not in file.records]
        subjects = {name: subject_of(name, cases, model_and_data(case)[0]) for name, case in cases.items()}
        try:
            run_cases(
                _asking(left, cases, engines, arguments, progress),
                file,
                Workers(where(arguments)),
                progress,
                noun="cases",
                total=len(left),
                failed=lambda record: record["engine"] == "souffle" and record["outcome"] in BAD,
            )
        finally:
            progress.done()
            done = results_in(file.records, engines, wanted)
            print(summary(done, subjects, refusals=arguments.refusals))
    if absent:
        print(f"{absent} cases are left out: the onnx package that is installed names them and does not hold them.")
    if arguments.record and (arguments.only or set(arguments.kinds) != set(KINDS)):
        print(f"recorded: {', '.join(record_part(arguments.target, done, subjects)) or 'no operator'}")
        write_page()
    elif arguments.record:
        record_run(arguments.target, setting, done, subjects)
        write_page()
    return int(any(result.outcome in BAD for result in done["souffle"].values()))


def _wanted(arguments: argparse.Namespace, names: Collection[str]) -> list[str]:
    wanted = [name for name in names if re.search(arguments.only, name)]
    if arguments.sample:
        chosen = set(random.Random(arguments.seed).sample(wanted, min(arguments.sample, len(wanted))))
        wanted = [name for name in wanted if name in chosen]
    return wanted


def _asking(
    left: Sequence[tuple[str, str]],
    cases: Mapping[str, TestCase],
    engines: Mapping[str, Mapping[str, Any]],
    arguments: argparse.Namespace,
    progress: Progress,
) -> Iterator[NamedCase]:
    """The cases that have no result yet."""
    for engine, name in left:
        payload = {"case": case_data(cases[name]), "engine": engine, "options": dict(engines[engine])}
        limits = {"seconds": arguments.limit, "memory_mb": arguments.memory_mb}
        yield name, _ask(engine, name, Job(f"{WORK}:run", payload, f"{name} by {engine}", **limits), progress)


def _ask(engine: str, name: str, job: Job, progress: Progress) -> Asking[Record]:
    (answer,) = yield [(job, _lacks_outcome)]
    death = death_of(job, answer)
    found = answer.value if death is None else asdict(CaseResult(name, death.kind, death.reason))
    if engine == "souffle" and found["outcome"] in BAD:
        said = f"; {death.said[-300:]}" if death is not None and death.said else ""
        progress.note(f"{found['outcome']}: {name}: {found['message'][:200]}{said}")
    return {"engine": engine, **found}


def _lacks_outcome(value: Any) -> str:
    whole = isinstance(value, Mapping) and value.get("outcome") in OUTCOMES
    return "" if whole else f"its worker gave {str(value)[:80]!r} for an outcome"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--level", default="V4")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="of cases (default: all)")
    parser.add_argument("--only", default="", help="a regular expression that the names hold")
    parser.add_argument("--sample", type=int, help="only that many of the cases, by chance")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a case")
    add_worker_options(parser, "--jobs")
    parser.add_argument("--against", choices=["ort"], help="also run the cases by ONNX Runtime")
    parser.add_argument("--refusals", action="store_true", help="list what is refused, too")
    parser.add_argument("--again", nargs="*", default=[], choices=OUTCOMES, help="outcomes in --out to run again")
    parser.add_argument("--out", type=Path, help="a line of JSON for each case; goes on where it stopped")
    parser.add_argument("--record", action="store_true", help="write onnx_suite.json and operators.md in docs")
    return parser


if __name__ == "__main__":
    run_process(main)
