"""Machine code of stages: what the cost model counts, against what nvcc makes of each alone.

``python -m benchmarks.code_size [--models bert efficientnet] [--level V3] [--arch sm_90] [--precision mixed] [--out
FILE.json]`` takes the distinct stages of networks of paper size. The two counts share no code.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import souffle
from benchmarks.record import save_results
from souffle import models
from souffle.cli.output import format_table
from souffle.cost import work_of
from souffle.pipeline import compile_cuda
from souffle.schedule.stage import Stage, flat_stages


def sizes(model: str, level: str, arch: str, precision: str) -> list[dict]:
    """Counted and measured bytes of each distinct stage of a network."""
    kept: dict[str, object] = {}

    def hook(name: str, result: object) -> object:
        kept[name] = result
        return result

    program = souffle.import_onnx(models.build(model, "paper"))
    compile_cuda(program, level=level, arch=arch, precision=precision, verify="off", tuning_log="auto", hook=hook)
    distinct: dict[tuple, Stage] = {}
    for subprogram in kept["partition"].subprograms:
        for stage in flat_stages(subprogram.stages):
            distinct.setdefault(stage.functions, stage)
    return [
        {
            "model": model,
            "stage": stage.label,
            "rule": functions[0].schedule.rule,
            "counted": round(sum(work_of(function).code_bytes for function in functions)),
            "machine": stage.resources.code_bytes,
        }
        for functions, stage in distinct.items()
        if stage.resources.code_bytes
    ]


def summary(rows: list[dict]) -> list[dict]:
    """By network and rule: stages, the sums' ratio, and the median and extremes of the stages' own."""
    found = []
    for key in dict.fromkeys((row["model"], rule) for row in rows for rule in ("all", row["rule"])):
        own = [row for row in rows if row["model"] == key[0] and key[1] in ("all", row["rule"])]
        ratios = [row["counted"] / row["machine"] for row in own]
        found.append(
            {
                "model": key[0],
                "rule": key[1],
                "stages": len(own),
                "machine": sum(row["machine"] for row in own),
                "of_sums": round(sum(row["counted"] for row in own) / sum(row["machine"] for row in own), 2),
                "median": round(statistics.median(ratios), 2),
                "least": round(min(ratios), 2),
                "most": round(max(ratios), 2),
            }
        )
    return found


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bert", "efficientnet"])
    parser.add_argument("--level", default="V3")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--precision", default="mixed")
    parser.add_argument("--out", help="where to write the results as JSON")
    given = parser.parse_args()
    rows = [row for model in given.models for row in sizes(model, given.level, given.arch, given.precision)]
    table = summary(rows)
    print(format_table(list(table[0]), [list(row.values()) for row in table]))
    if given.out:
        save_results(given.out, "benchmarks.code_size", rows, summary=table, level=given.level, arch=given.arch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
