"""A campaign whose cases are quick, some of which end their process or never end: a test's, and the shortest there is.

It stands alone, so that processes of it begin soon.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.campaign import (
    More,
    NamedCase,
    Record,
    RecordFile,
    Workers,
    add_seed_options,
    add_worker_options,
    count_of,
    death_of,
    run_cases,
    seeds,
    where,
)
from souffle.cli.interruption import interruptible, run_process, status_of
from souffle.cli.output import Progress
from souffle.workers import Job
from souffle.workers.cases import Asking
from souffle.workers.harness import key_of

SHARED = b"what all jobs are given"
SECONDS = 0.7
"""For the case that never ends."""


def play(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> dict[str, Any]:
    seed, deadly = payload["seed"], payload["deadly"]
    time.sleep(payload["sleep"])
    if deadly and seed % 10 == 3:
        os.write(2, b"assertion failed at 0x7ffd%x\n" % os.getpid())
        os.abort()
    if deadly and seed % 10 == 7:
        time.sleep(60)
    if deadly and seed % 10 == 9:
        return {"nonsense": os.getpid()}
    if payload["interrupt"] == seed:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            pass  # as code does that calls back into Python
    given = len(shared[payload["key"]])
    return {"square": seed * seed, "given": given, "seconds": time.monotonic(), "pid": os.getpid()}


def is_answer(value: Any) -> str:
    return "" if "square" in value else "it gave nonsense"


def ask(seed: int, arguments: argparse.Namespace) -> Asking[Record]:
    payload = {name: getattr(arguments, name) for name in ("deadly", "sleep", "interrupt")}
    key = key_of(SHARED)
    payload |= {"seed": seed, "key": key}
    function = "tests.benchmarks.played_campaign:play"
    seconds = SECONDS if arguments.deadly and seed % 10 == 7 else None
    job = Job(function, payload, f"seed {seed}", (key,), seconds, arguments.memory_mb)
    (first,) = yield [(job, is_answer)]
    death = death_of(job, first)
    if death is not None:
        return {"seed": seed, "kind": death.kind, "detail": death.reason}
    # A second step, of several jobs, and one of none.
    answers = yield [(job, is_answer)] * 2
    assert [answer.value["square"] for answer in answers] == [seed * seed] * 2
    assert (yield []) == ()
    record = {"seed": seed, "kind": "right", **first.value}
    if not arguments.pids:
        del record["pid"]
    return record


def cases(arguments: argparse.Namespace, done: Mapping[int, Record]) -> Iterator[NamedCase]:
    found = seeds(arguments.seeds, arguments.count, set(done))
    if not arguments.more:
        return ((f"seed {seed}", ask(seed, arguments)) for seed in found)

    def half(which: int) -> Asking[More]:
        yield []
        return More([(f"seed {seed}", ask(seed, arguments)) for seed in found if seed % 2 == which])

    found = list(found)
    return ((f"half {which}", half(which)) for which in (1, 0))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    add_seed_options(parser, "case")
    add_worker_options(parser)
    parser.add_argument("--deadly", action="store_true")
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--pids", action="store_true")
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--interrupt", type=int)
    parser.add_argument("--each", type=int)
    arguments = parser.parse_args(argv)
    progress = Progress(quiet=argv is not None)
    return interruptible(lambda: status_of(lambda: run(arguments, progress), progress), progress)


def run(arguments: argparse.Namespace, progress: Progress) -> int:
    with RecordFile(Path(arguments.out), lambda record: record["seed"], {"played": "twice"}) as file:
        run_cases(
            cases(arguments, file.records),
            file,
            Workers(where(arguments), arguments.each, [SHARED]),
            progress,
            noun="cases",
            total=0 if arguments.more else count_of(arguments.seeds, arguments.count, file.records),
            minutes=arguments.minutes,
            failed=lambda record: record["kind"] != "right",
        )
    return 0


if __name__ == "__main__":
    run_process(main)
