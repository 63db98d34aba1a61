"""Everything about a GPU in one script, for a host that has a GPU but neither TVM nor a package registry.

Here, with the compiler::

    python -m benchmarks.gpu_host build --out ARTIFACTS
    python -m benchmarks.gpu_host pack --in ARTIFACTS --to FOLDER

On the host, where the artifacts are (Python 3.10 to 3.12, NumPy, Rich, cuda-bindings; nvcc, compute-sanitizer, onnx and
PyTorch where they are)::

    python -m benchmarks.gpu_host run --in artifacts --out RESULTS

goes through phases, what is worth most first (``--phases`` chooses), with a verdict on each. ``--rehearse`` goes
through the same without a GPU, up to the launches. Every step is a process bounded in time; what RESULTS/results.json
(or the file of ``--resume``) has already is not done again.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_pack import pack, pack_parser, read_index
from benchmarks.gpu_plan import ELSEWHERE, PHASES, SLOW_PEERS, chosen_cases, phases_of
from benchmarks.gpu_run import run_phases
from benchmarks.gpu_table import across_barriers, phase_table, table
from benchmarks.record import write_json
from souffle.benchmark.registry import PEERS
from souffle.options import PRECISIONS

__all__ = ["main"]

_log = logging.getLogger("gpu_host")
_USUAL = {"latency_repeats": 50, "rounds": 6, "repeats": 20}
_REHEARSED = {"latency_repeats": 1, "rounds": 1, "repeats": 2}


def _run(options: argparse.Namespace) -> int:
    for key, value in (_REHEARSED if options.rehearse else _USUAL).items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    index = read_index(options.input)
    cases = chosen_cases(index["cases"], options.models, options.precision)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    earlier = options.resume or path
    results: dict[str, Any] = json.loads(earlier.read_text()) if earlier.exists() else {"steps": {}}
    if results.get("rehearsal", options.rehearse) != options.rehearse:
        _log.error("%s is of a %s; give another --out", earlier, "rehearsal" if results["rehearsal"] else "real run")
        return 2
    results["rehearsal"] = options.rehearse
    results["command"] = " ".join(["python -m benchmarks.gpu_host", *sys.argv[1:]])
    results["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    # What was run with an earlier part of the artifacts is still in the table.
    results["cases"] = results.get("cases", {}) | cases
    results |= {"built": index.get("built"), "equal": index.get("equal", {}), "not_built": index.get("failed", {})}
    phases = phases_of(cases, options)
    run_phases(phases, cases, options, results, lambda: write_json(path, results))
    write_json(path, results)
    text = table(results) + "\n" + phase_table(results, phases_of(results["cases"], options))
    (options.out / "table.txt").write_text(text)
    sys.stdout.write(text)
    steps = [step for phase in phases for step in phase.steps]
    states = [(results["steps"].get(step.key(name), {}).get("status"), step) for step in steps for name in step.names]
    different = across_barriers(cases, results["steps"])[1]
    return 0 if all(state in step.accepted for state, step in states) and not different else 1


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_host run", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--in", dest="input", type=Path, default=Path("artifacts"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="results.json of an earlier run that was cut short")
    names = ", ".join(PHASES)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=[], metavar="NAME", help=f"of {names}; all")
    parser.add_argument("--models", nargs="*", default=[], help="only these, in this order")
    parser.add_argument("--precision", nargs="*", default=[], choices=PRECISIONS, help="only these, in this order")
    peers = [name for name in PEERS if name not in ELSEWHERE]
    quick = [name for name in peers if name not in SLOW_PEERS]
    parser.add_argument("--peers", nargs="*", default=quick, choices=peers, help="of souffle bench")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    parser.add_argument("--deferred", action="store_true", help="rehearse with work that runs as late as it can")
    parser.add_argument("--fault", metavar="KIND:N", help="rehearse a fault: too-large:N, sticky:N, hang:N, wrong:N")
    parser.add_argument("--retry", action="store_true", help="do again what failed")
    parser.add_argument("--repeats", type=int, help=f"runs that must agree bit by bit; {_USUAL['repeats']}")
    parser.add_argument("--latency-repeats", type=int, help=f"in a round; {_USUAL['latency_repeats']}")
    parser.add_argument("--rounds", type=int, help=f"of a latency; {_USUAL['rounds']}")
    parser.add_argument("--jobs", type=int, default=1, help="steps at a time where nothing is timed")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one process")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; see the module's text. Exit status 0 where every step went well."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    given = sys.argv[1:] if argv is None else argv
    command, rest = (given[0], given[1:]) if given else ("", [])
    if command == "build":
        # The compiler, which a GPU host does not have.
        building = importlib.import_module("benchmarks.gpu_build")
        return building.build(building.build_parser().parse_args(rest))
    if command == "pack":
        return pack(pack_parser().parse_args(rest))
    if command == "run":
        return _run(_run_parser().parse_args(rest))
    chooser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chooser.add_argument("command", choices=("build", "pack", "run"))
    chooser.parse_args(given)
    return 2


if __name__ == "__main__":
    sys.exit(main())
