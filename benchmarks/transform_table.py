"""What the analysis finds in the paper's models, and what the transformations make of them: counts and seconds.

``python -m benchmarks.transform_table [--models bert lstm ...] [--size paper] [--steps N] [--out FILE.json]``. Each
model is measured in a process of its own, so that what one has left in caches does not shorten the time of another.
The LSTM has all of its 100 time steps unless ``--steps`` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import souffle
from benchmarks.record import save_results
from souffle import models, transform
from souffle.analysis import Analysis, Relies
from souffle.cli.output import format_table
from souffle.program import ExternTE, Loop, TEProgram, parts_of

__all__ = ["analyzed", "measure", "transformed"]


class _Clock:
    """Seconds since it was made: of the clock, and of this process, which other programs do not lengthen."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def seconds(self) -> dict[str, float]:
        """Both, for a record."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return {"seconds": round(wall, 3), "cpu_seconds": round(cpu, 3)}


def analyzed(program: TEProgram) -> tuple[Analysis, dict]:
    """Work out every part of the analysis of a program.

    Returns
    -------
    analysis : Analysis
    found : dict
        TEs by kind, access maps by exactness, bytes of reuse, arithmetic operations, and the seconds that it took, of
        the clock and of this process.
    """
    clock = _Clock()
    analysis = souffle.analyze(program)
    kinds: Counter[Relies] = Counter()
    inexact: Counter[str] = Counter()
    exact = compute = operations = 0
    for te_ in program.tes:
        kinds[analysis.relies(te_)] += 1
        compute += analysis.is_compute_intensive(te_)
        operations += analysis.arithmetic(te_).operations
        for access in analysis.accesses(te_):
            exact += access.exact
            inexact.update(access.inexact_because)
    maps = sum(len(te_.inputs) for te_ in program.tes)
    found = {
        "tes": len(program.tes),
        "statements": sum(len(parts_of(te_)) for te_ in program.tes),
        "one": kinds[Relies.ONE],
        "many": kinds[Relies.MANY],
        "extern": sum(isinstance(te_, ExternTE) for te_ in program.tes),
        "compute_intensive": compute,
        "operations": operations,
        "access_maps": maps,
        "exact": exact,
        "over_approximated": maps - exact,
        "over_approximated_because": dict(sorted(inexact.items())),
        "spatial_bytes": sum(reuse.spatial_bytes for reuse in analysis.reuse.values()),
        "temporal_bytes": sum(reuse.temporal_bytes for reuse in analysis.reuse.values()),
        "tensors": len(analysis.live_ranges),
    }
    return analysis, found | clock.seconds()


def transformed(program: TEProgram, name: str) -> tuple[TEProgram, dict]:
    """Apply one transformation by its name; the TEs that are left, its steps taken and refused, and its seconds.

    TEs in the body of a loop count once.
    """
    transformation: Callable[[TEProgram], tuple[TEProgram, tuple]] = getattr(transform, name)
    clock = _Clock()
    result, decisions = transformation(program)
    seconds = clock.seconds()
    accepted = sum(decision.accepted for decision in decisions)
    loops = [item for item in result.tes if isinstance(item, Loop)]
    figures = {
        "tes": len(result.tes) - len(loops) + sum(len(loop.body) for loop in loops),
        "accepted": accepted,
        "refused": len(decisions) - accepted,
    }
    if loops:
        figures |= {"loops": len(loops), "steps": [loop.steps for loop in loops]}
    return result, figures | seconds


def measure(name: str, size: str, steps: int | None = None) -> dict:
    """Measure one model in this process."""
    model = models.build(name, size, **({"steps": steps} if steps is not None and name.startswith("lstm") else {}))
    start = time.perf_counter()
    program = souffle.import_onnx(model)
    imported = time.perf_counter()
    before = analyzed(program)[1]
    result: dict = {"model": name, "size": size, "import_s": round(imported - start, 3), "before": before}
    for step in ("horizontal", "vertical"):
        program, result[step] = transformed(program, step)
    result["after"] = after = analyzed(program)[1]
    result["operations_ratio"] = round(after["operations"] / max(1, before["operations"]), 6)
    if hasattr(transform, "roll"):
        result["roll"] = transformed(program, "roll")[1]
    result["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return result


def _row(result: dict) -> list:
    before, after = result["before"], result["after"]
    return [
        result["model"],
        before["tes"],
        result["horizontal"]["tes"],
        result["vertical"]["tes"],
        result.get("roll", {}).get("tes", "-"),
        f"{before['one']}/{before['many']}",
        f"{after['one']}/{after['many']}",
        f"{before['compute_intensive']} → {after['compute_intensive']}",
        f"{before['exact']}/{before['access_maps']}",
        f"{before['spatial_bytes'] / 2**20:.1f}",
        f"{before['temporal_bytes'] / 2**20:.1f}",
        f"{result['operations_ratio']:.4f}",
        " ".join(
            f"{seconds:.1f}"
            for seconds in (
                result["import_s"],
                before["seconds"],
                result["horizontal"]["seconds"],
                result["vertical"]["seconds"],
                *([result["roll"]["seconds"]] if "roll" in result else []),
            )
        ),
    ]


def main() -> int:
    """Measure all models asked for and print a table; the exit status is 1 if one failed or ran out of time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(models.NAMES))
    parser.add_argument("--size", default="paper", choices=models.MODEL_SIZES)
    parser.add_argument("--steps", type=int, help="time steps of the LSTM, where not those of its size")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one model")
    parser.add_argument("--out", help="where to write the results as JSON")
    parser.add_argument("--one", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.size, arguments.steps)))
        return 0
    results, failed = [], []
    for name in arguments.models:
        print(f"{name} {arguments.size} ...", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.transform_table", "--one", name, "--size", arguments.size]
        command += ["--steps", str(arguments.steps)] if arguments.steps is not None else []
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=arguments.timeout)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            failed.append({"model": name, "error": str(error)})
            print(error, file=sys.stderr, flush=True)
            continue
        results.append(json.loads(done.stdout))
        if arguments.out:
            save_results(arguments.out, "benchmarks.transform_table", results, failed=failed)
    columns = ["model", "TEs", "horizontal", "vertical", "rolled", "one/many", "after", "compute-intensive"]
    columns += ["exact maps", "spatial MiB", "temporal MiB", "operations"]
    columns += ["s: import analysis horizontal vertical roll"]
    print(format_table(columns, [_row(result) for result in results]))
    for result in results:
        for reason, count in result["before"]["over_approximated_because"].items():
            print(f"{result['model']}: {count} access maps are over-approximated: {reason}")
    if arguments.out:
        save_results(arguments.out, "benchmarks.transform_table", results, failed=failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
