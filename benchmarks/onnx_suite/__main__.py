"""ONNX's own conformance suite of its operators, against Souffle.

``python -m benchmarks.onnx_suite [--target cpu] [--level V4] [--only PATTERN] [--against ort] [--out FILE.json]``. With
``--target cuda`` the emitted CUDA text runs on the CPU device. Processes run the cases: one that dies or takes too long
is noted, and another goes on. With ``--out`` the same command goes on where it stopped. ``--record`` also writes what
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
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from benchmarks.onnx_suite.cases import KINDS
from benchmarks.onnx_suite.operators_page import record_part, record_run, write_page
from benchmarks.onnx_suite.outcomes import BAD, OUTCOMES, Job
from benchmarks.onnx_suite.results import SuiteResults, summary
from benchmarks.onnx_suite.serving import serve
from benchmarks.onnx_suite.worker import SuiteWorker


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; 1 where a case is wrong, an exception, a crash or out of time."""
    arguments = _parser().parse_args(argv)
    if arguments.record and arguments.sample:
        raise SystemExit("--record is for all cases, or all of some operators: leave --sample out")
    setting = {"device": "CUDA" if arguments.target == "cuda" else "CPU", "level": arguments.level}
    results = SuiteResults(arguments.out, setting, arguments.again)
    engines = {"souffle": (arguments.jobs, setting)} | ({"ort": (1, {})} if arguments.against else {})
    for engine, (jobs, options) in engines.items():
        job = Job(engine, tuple(arguments.kinds), options, arguments.limit)
        first = SuiteWorker(job, serve)
        subjects, absent = first.subjects, first.absent
        wanted = [name for name in subjects if re.search(arguments.only, name)]
        if arguments.sample:
            chosen = set(random.Random(arguments.seed).sample(wanted, min(arguments.sample, len(wanted))))
            wanted = [name for name in wanted if name in chosen]
        _run(job, first, wanted, results, jobs)
    done = {engine: {name: results.of[engine][name] for name in wanted} for engine in engines}
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--level", default="V4")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="of cases (default: all)")
    parser.add_argument("--only", default="", help="a regular expression that the names hold")
    parser.add_argument("--sample", type=int, help="only that many of the cases, by chance")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a case")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--against", choices=["ort"], help="also run the cases by ONNX Runtime")
    parser.add_argument("--refusals", action="store_true", help="list what is refused, too")
    parser.add_argument("--again", nargs="*", default=[], choices=OUTCOMES, help="outcomes in --out to run again")
    parser.add_argument("--out", type=Path, help="JSON; goes on where it stopped")
    parser.add_argument("--record", action="store_true", help="write onnx_suite.json and operators.md in docs")
    return parser


def _run(job: Job, first: SuiteWorker, wanted: Sequence[str], results: SuiteResults, jobs: int) -> None:
    """Run those cases that have no result yet."""
    found = results.of.setdefault(job.engine, {})
    waiting: SimpleQueue[str] = SimpleQueue()
    left = [name for name in wanted if name not in found]
    for name in left:
        waiting.put(name)
    written = [time.monotonic()]

    def work(number: int) -> None:
        worker = first if number == 0 else SuiteWorker(job, serve)
        try:
            while True:
                name = waiting.get_nowait()
                _tell(worker, name, found, len(wanted), job.engine)
                if number == 0 and time.monotonic() - written[0] > 2:
                    results.save()
                    written[0] = time.monotonic()
        except Empty:
            worker.close()

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, range(max(1, min(jobs, len(left))))))
    results.save()


def _tell(worker: SuiteWorker, name: str, found: dict[str, Any], count: int, engine: str) -> None:
    found[name] = worker.run(name)
    if sys.stderr.isatty():
        print(f"\r{engine} {len(found)}/{count} {name[:60]:60}", end="", file=sys.stderr, flush=True)
    if found[name].outcome in BAD and engine == "souffle":
        print(f"{found[name].outcome}: {name}: {found[name].message[:200]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
