"""Random ONNX networks on every target, against ONNX Runtime.

``python -m benchmarks.fuzz --count 500 --out build/fuzz.jsonl`` goes on where the file stops, in ``--workers 2``
processes or wherever ``--on`` says. Failures lie beside it, in ``FILE.failures/``, as text; ``--minimize`` makes each
as small as it gets, and ``--case FILE`` runs one again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.campaign import (
    NamedCase,
    Record,
    RecordFile,
    Workers,
    add_seed_options,
    add_worker_options,
    count_of,
    read_records,
    run_cases,
    seeds,
    where,
)
from benchmarks.fuzz.minimize import minimize_file
from benchmarks.fuzz.report import report
from benchmarks.fuzz.targets import FAILURES, FUSIONS, SWITCHES, TARGETS
from benchmarks.fuzz.trying import Limits, failures_of, try_case, try_seed
from souffle.cli.interruption import interruptible, run_process, status_of
from souffle.cli.output import Progress
from souffle.workers import engine_for
from souffle.workers.cases import Cases

__all__ = ["main"]

_NETWORKS = 400
"""For each worker, until another one takes its place."""

_TURNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "turns": tuple((name,) for name in TARGETS if name != "cpu"),
    "switches": tuple((name,) for name in SWITCHES),
    "planners": tuple(tuple(names) for _, names in groupby(FUSIONS, lambda name: FUSIONS[name]["level"])),
}
"""Of each name, what is run for one seed, for the next, and so on."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_seed_options(parser, "network")
    parser.add_argument(
        "--targets",
        nargs="+",
        default=["cpu", "turns"],
        choices=(*TARGETS, "all", *_TURNS, *SWITCHES, *FUSIONS),
        metavar="T",
        help=f"of {', '.join(TARGETS)}; all; turns: one CUDA target for each seed, in turn; switches: V4 in a "
        "precision without one thing that keeps tensors on chip, in turn; planners: all planners of patterns at a "
        "level, in turn (default: cpu turns)",
    )
    add_worker_options(parser)
    parser.add_argument("--timeout", type=float, default=90.0, metavar="S", help="for one network on one target")
    parser.add_argument("--checked", type=float, default=0.1, metavar="P", help="share run in checked mode, too")
    parser.add_argument("--without", nargs="+", default=[], metavar="OP", help="operators to leave out")
    parser.add_argument("--only", nargs="+", default=[], metavar="RECIPE", help="recipes to choose from")
    parser.add_argument("--nodes", type=int, metavar="N", help="at most about so many (default: 14)")
    parser.add_argument("--specials", type=float, metavar="P", help="share of networks with NaN and infinities")
    parser.add_argument("--large", type=float, metavar="P", help="share of networks with dimensions up to 1031")
    parser.add_argument("--wide", type=float, metavar="P", help="share of networks of many nodes beside each other")
    parser.add_argument("--zero-size", type=float, metavar="P", help="share of networks with dimensions of 0")
    parser.add_argument("--dtypes", nargs="+", metavar="T", help="floating point types, as often as named")
    parser.add_argument("--minimize", action="store_true", help="make the failures in FILE.failures/ small")
    parser.add_argument("--case", type=Path, nargs="+", help="run these files instead of seeds")
    parser.add_argument("--report", action="store_true", help="print the table of FILE, and run nothing")
    return parser


def _targets(names: list[str], seed: int) -> list[str]:
    chosen: list[str] = []
    for name in names:
        turns = _TURNS.get(name)
        chosen += list(TARGETS) if name == "all" else turns[seed % len(turns)] if turns else [name]
    return list(dict.fromkeys(chosen))


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status is 1 where anything failed."""
    arguments = _parser().parse_args(argv)
    progress = Progress()
    return interruptible(lambda: status_of(lambda: _run(arguments, progress), progress), progress)


def _run(arguments: argparse.Namespace, progress: Progress) -> int:
    if arguments.case:
        return _cases(arguments, progress)
    if arguments.minimize:
        return _minimize(arguments, progress)
    if arguments.report:
        return _told(read_records(arguments.out))
    with RecordFile(arguments.out, lambda record: record["seed"]) as file:
        try:
            run_cases(
                _networks(arguments, file.records),
                file,
                Workers(where(arguments), _NETWORKS),
                progress,
                noun="networks",
                total=count_of(arguments.seeds, arguments.count, file.records),
                minutes=arguments.minutes,
                failed=lambda record: _is_bad([record]),
            )
        finally:
            progress.done()
            status = _told([file.records[seed] for seed in sorted(file.records)])
    return status


def _told(records: list[Record]) -> int:
    print(report(records))
    return int(_is_bad(records))


def _is_bad(records: Iterable[Mapping[str, Any]]) -> bool:
    return any(outcome["kind"] in FAILURES for record in records for outcome in record["outcomes"].values())


def _networks(arguments: argparse.Namespace, done: Mapping[int, Record]) -> Iterator[NamedCase]:
    given = {name: getattr(arguments, name) for name in ("specials", "large", "wide", "zero_size")}
    given |= {"without": arguments.without or None, "only": arguments.only or None}
    given |= {"dtypes": arguments.dtypes, "most_nodes": arguments.nodes}
    settings = {name: value for name, value in given.items() if value is not None}
    limits = _limits(arguments)
    for seed in seeds(arguments.seeds, arguments.count, set(done)):
        yield f"seed {seed}", try_seed(seed, _targets(arguments.targets, seed), settings, limits)


def _limits(arguments: argparse.Namespace) -> Limits:
    failures = failures_of(arguments.out) if arguments.out and not arguments.case else None
    return Limits(arguments.timeout, arguments.memory_mb, arguments.checked, failures)


def _cases(arguments: argparse.Namespace, progress: Progress) -> int:
    def cases() -> Iterator[NamedCase]:
        for path in arguments.case:
            data = json.loads(path.read_text())
            kept = data.get("target")
            targets = [kept] if kept and arguments.targets == ["cpu", "turns"] else _targets(arguments.targets, 3)
            yield path.name, try_case(data, 0, targets, _limits(arguments), path.name)

    failed = False
    with engine_for(where(arguments)) as engine:
        for name, record in Cases(engine, cases(), lambda: progress.interrupted):
            for target, outcome in record["outcomes"].items():
                failed = failed or outcome["kind"] in FAILURES
                facts = " ".join(x for x in (outcome.get("verdict", ""), outcome["detail"]) if x)
                print(f"{name} {target}: {outcome['kind']} {facts}")
    return int(failed)


def _minimize(arguments: argparse.Namespace, progress: Progress) -> int:
    if arguments.out is None:
        print("--minimize needs the --out FILE whose failures it takes", file=sys.stderr)
        return 2
    paths = sorted(failures_of(arguments.out).glob("*.json"))
    limits = Limits(arguments.timeout, arguments.memory_mb, checked=1.0)
    with engine_for(where(arguments)) as engine:
        for path in paths:
            small = path.with_suffix(".min.json")
            if ".min" not in path.suffixes and not small.exists():
                progress(f"making {path.name} small")
                found = minimize_file(path, small, engine, limits)
                progress.done()
                print(f"{path.name}: {found}", flush=True)
    return 0


if __name__ == "__main__":
    run_process(main)
