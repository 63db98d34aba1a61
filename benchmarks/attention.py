"""What attention of many forms becomes at V4, whether it is proven, and what it is predicted to gain.

::

    python -m benchmarks.attention [--archs sm_80 sm_90] [--out FILE.json]

Each form is compiled in mixed precision without a CUDA compiler, with ``verify="values"``, and again without
``"attention"``. Nothing is run; ``tests/test_attention.py`` runs small ones. Forms are written as exporters do, and as
ONNX's own operator.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import souffle
from benchmarks.attentions import AttentionCase, with_operator, written_out
from benchmarks.prices import microseconds
from benchmarks.record import save_results
from souffle.cli.output import format_table
from souffle.schedule.stage import Stages, flat_stages

CASES = (
    *(AttentionCase(length, length, 64, 12, 12) for length in (1, 17, 128, 384)),
    *(AttentionCase(length, length, 64, 2, 2) for length in (1000, 2048, 4096)),
    *(AttentionCase(128, 128, head, 4, 4) for head in (32, 128, 256)),
    AttentionCase(384, 384, 64, 12, 12, causal=True),
    AttentionCase(1000, 1000, 64, 2, 2, causal=True),
    AttentionCase(128, 128, 64, 4, 4, 3),
    AttentionCase(64, 200, 64, 4, 4),
    AttentionCase(1, 384, 64, 8, 2),
    AttentionCase(128, 128, 64, 8, 2, 2, causal=True),
)


def figures(case: AttentionCase, operator: bool, arch: str) -> dict[str, Any]:
    """What is told of one attention."""
    model = with_operator(case) if operator else written_out(case)
    kept: dict[str, Stages] = {}

    def keep(step: str, result: object) -> object:
        kept[step] = result
        return result

    how = {"target": "cuda", "device": "cpu", "precision": "mixed", "arch": arch, "cubin": False}
    network = souffle.compile(model, verify="values", hook=keep, **how)
    rules = [stage.schedule.rule for stage in flat_stages(kept["schedule"])]
    apart = souffle.compile(model, verify="off", disable=["attention"], **how)
    return {
        "form": "operator" if operator else "written out",
        "case": case.name,
        "arch": arch,
        "rules": rules,
        "verdict": network.plan.certificate.verdict,
        "us": microseconds(network.plan)["us"],
        "us_apart": microseconds(apart.plan)["us"],
    }


def main() -> int:
    """Compile all, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", nargs="+", default=("sm_80", "sm_90"))
    parser.add_argument("--out")
    arguments = parser.parse_args()
    results = []
    for arch in arguments.archs:
        for case in CASES:
            for operator in (False, True):
                results.append(figures(case, operator, arch))
                print(*results[-1].values(), flush=True)
    if arguments.out:
        save_results(arguments.out, "benchmarks.attention", results)
    columns = ["form", "attention", "arch", "stages", "verdict", "µs", "µs without"]
    table = [
        [r["form"], r["case"], r["arch"], ", ".join(r["rules"]), r["verdict"], r["us"], r["us_apart"]] for r in results
    ]
    print(format_table(columns, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
