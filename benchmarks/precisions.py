"""What the paper's networks are predicted to take in each precision, level by level, with the rules' own schedules.

``python -m benchmarks.precisions [--models bert ...] [--archs sm_80 sm_90] [--levels V0 ...] [--precisions fp32 ...]
[--out FILE.json]``

Paper size, no tuning log, nothing is run and no CUDA compiler asked, so registers are estimated. A file that is there
is gone on with.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import souffle
from benchmarks.prices import microseconds
from benchmarks.record import kept_results, save_results
from souffle import models
from souffle.cli.output import format_table
from souffle.options import LEVELS, PRECISIONS
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram


def predicted(program: TEProgram, model: str, arch: str, precision: str, level: str) -> dict[str, Any]:
    """One network."""
    plan = compile_cuda(program, level=level, arch=arch, precision=precision, cubin=False, verify="off").plan
    return {"model": model, "arch": arch, "precision": precision, "level": level, **microseconds(plan)}


def main() -> int:
    """Compile all that the file lacks, and print a table of each architecture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(models.NAMES))
    parser.add_argument("--archs", nargs="+", default=("sm_80", "sm_90"))
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    results = kept_results(arguments.out)
    done = {tuple(one[key] for key in ("model", "arch", "precision", "level")) for one in results}
    for model in arguments.models:
        program = souffle.import_onnx(models.build(model, "paper"))
        for arch in arguments.archs:
            for precision in arguments.precisions:
                for level in arguments.levels:
                    if (model, arch, precision, level) in done:
                        continue
                    results.append(predicted(program, model, arch, precision, level))
                    print(*results[-1].values(), file=sys.stderr, flush=True)
                    if arguments.out:
                        save_results(arguments.out, "benchmarks.precisions", results)
    _print(results)
    return 0


def _print(results: list[dict[str, Any]]) -> None:
    """A row for each network, architecture and precision."""
    levels = [level for level in LEVELS if any(one["level"] == level for one in results)]
    rows: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for one in results:
        rows.setdefault((one["model"], one["arch"], one["precision"]), {})[one["level"]] = one
    table = [
        (*key, *(found[level]["us"] if level in found else "" for level in levels), _last(found, levels))
        for key, found in rows.items()
    ]
    print(format_table(("model", "arch", "precision", *(f"{level} µs" for level in levels), "launches, syncs"), table))


def _last(found: dict[str, dict[str, Any]], levels: list[str]) -> str:
    """Launches and barriers of the highest level that there is."""
    one = next(found[level] for level in reversed(levels) if level in found)
    return f"{one['launches']}, {one['syncs']}"


if __name__ == "__main__":
    raise SystemExit(main())
