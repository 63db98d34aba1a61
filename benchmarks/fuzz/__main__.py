"""Random ONNX networks on every target, against ONNX Runtime.

``python -m benchmarks.fuzz --count 500 --out build/fuzz.jsonl`` goes on where the file stops. Failures lie beside it,
in ``FILE.failures/``, as text; ``--minimize`` makes each as small as it gets, and ``--case FILE`` runs one again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from itertools import groupby
from pathlib import Path

from benchmarks.campaign import add_seed_options, append_record, read_records, seeds
from benchmarks.fuzz.minimize import minimize_file
from benchmarks.fuzz.pool import Worker
from benchmarks.fuzz.report import report
from benchmarks.fuzz.targets import FAILURES, FUSIONS, SWITCHES, TARGETS

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
    parser.add_argument("--workers", type=int, default=1)
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


class _Run:
    """Workers that share the seeds and the file."""

    def __init__(self, arguments: argparse.Namespace, records: list[dict]) -> None:
        self.arguments, self.records = arguments, records
        self.seeds = seeds(arguments.seeds, arguments.count, {record["seed"] for record in records})
        self.began, self.before = time.monotonic(), len(records)
        self.end = self.began + 60 * arguments.minutes if arguments.minutes else float("inf")
        self.lock, self.stopped = threading.Lock(), False
        self.workers: list[Worker] = []
        settings = {"without": arguments.without, "only": arguments.only, "specials": arguments.specials}
        settings |= {"large": arguments.large, "wide": arguments.wide}
        settings |= {"zero_size": arguments.zero_size, "dtypes": arguments.dtypes, "most_nodes": arguments.nodes}
        self.request = {"settings": {k: v for k, v in settings.items() if v}, "checked": arguments.checked}
        for name in ("specials", "zero_size", "large", "wide"):
            if settings[name] is not None:
                self.request["settings"][name] = settings[name]
        if arguments.out:
            self.request["failures"] = str(_failures(arguments.out))

    def work(self, folder: Path) -> None:
        with Worker(folder) as worker:
            self.workers.append(worker)
            while not self.stopped and time.monotonic() < self.end:
                with self.lock:
                    seed = next(self.seeds, None)
                if seed is None:
                    return
                request = {**self.request, "seed": seed, "targets": _targets(self.arguments.targets, seed)}
                result = worker.run(request, self.arguments.timeout)
                # A network that was interrupted is not finished.
                if not self.stopped:
                    self.keep({"seed": seed, **result})

    def stop(self) -> None:
        """End all workers."""
        self.stopped = True
        for worker in self.workers:
            worker.cancel()

    def keep(self, record: dict) -> None:
        with self.lock:
            self.records.append(record)
            if self.arguments.out:
                append_record(self.arguments.out, record)
            count = len(self.records) - self.before
            kinds = [o["kind"] for r in self.records for o in r["outcomes"].values()]
            bad = ", ".join(f"{kinds.count(kind)} {kind}" for kind in FAILURES if kind in kinds) or "no failure"
            rate = count / max(time.monotonic() - self.began, 1e-9)
            line = f"{len(self.records)} networks, {len(kinds)} runs, {rate:.2f} networks/s, {bad}"
            if sys.stderr.isatty():
                print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _failures(out: Path) -> Path:
    return out.with_name(out.name + ".failures")


def main(argv: list[str] | None = None) -> int:
    """Run; the exit status is 1 where anything failed."""
    arguments = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="souffle-fuzz-") as folder:
        if arguments.case:
            return _cases(arguments, Path(folder))
        if arguments.minimize:
            return _minimize(arguments, Path(folder))
        run = _Run(arguments, read_records(arguments.out))
        if not arguments.report:
            threads = [
                threading.Thread(target=run.work, args=(Path(folder) / str(i),)) for i in range(arguments.workers)
            ]
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:
                run.stop()
                print("\nstopping; what is finished is kept", file=sys.stderr)
                for thread in threads:
                    thread.join()
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(report(run.records))
    return int(any(o["kind"] in FAILURES for r in run.records for o in r["outcomes"].values()))


def _cases(arguments: argparse.Namespace, folder: Path) -> int:
    failed = False
    with Worker(folder) as worker:
        for path in arguments.case:
            kept = json.loads(path.read_text()).get("target")
            targets = [kept] if kept and arguments.targets == ["cpu", "turns"] else _targets(arguments.targets, 3)
            request = {"case": str(path), "targets": targets, "checked": arguments.checked}
            result = worker.run(request, arguments.timeout)
            for target, outcome in result["outcomes"].items():
                failed = failed or outcome["kind"] in FAILURES
                facts = " ".join(x for x in (outcome.get("verdict", ""), outcome["detail"]) if x)
                print(f"{path.name} {target}: {outcome['kind']} {facts}")
    return int(failed)


def _minimize(arguments: argparse.Namespace, folder: Path) -> int:
    if arguments.out is None:
        print("--minimize needs the --out FILE whose failures it takes", file=sys.stderr)
        return 2
    paths = sorted(_failures(arguments.out).glob("*.json"))
    with Worker(folder) as worker:
        for path in paths:
            small = path.with_suffix(".min.json")
            done = ".min" in path.suffixes or path.name.startswith("running-") or small.exists()
            if done:
                continue
            print(f"{path.name}: {minimize_file(path, small, worker, arguments.timeout)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
