"""What attention of many forms becomes at V4, whether it is proven, and what it is predicted to gain.

::

    python -m benchmarks.attention [--archs sm_80 sm_90] [--out FILE.json]

Each form is compiled without a CUDA compiler, with ``verify="values"``, and again without ``"attention"``; models in
mixed precision. Nothing is run; ``tests/test_attention.py`` runs small ones. A file that is there is gone on with.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import souffle
from benchmarks.attentions import MAKERS, AttentionCase
from benchmarks.prices import microseconds
from benchmarks.record import kept_results, save_results
from souffle.cli.output import format_table
from souffle.runtime.network import Network
from souffle.schedule.stage import Stages, flat_stages
from souffle.schedule.text import rule_text
from souffle.wording import counted

CASES = (
    *(AttentionCase(length, length, 64, 12, 12) for length in (1, 17, 128, 384)),
    AttentionCase(384, 384, 64, 12, 12, causal=True),
    *(AttentionCase(128, 128, head, 4, 4) for head in (32, 128, 256)),
    AttentionCase(128, 128, 64, 4, 4, 3),
    AttentionCase(64, 200, 64, 4, 4),
    AttentionCase(1, 384, 64, 8, 2),
    AttentionCase(128, 128, 64, 8, 2, 2, causal=True),
    AttentionCase(1000, 1000, 64, 2, 2),
    AttentionCase(1000, 1000, 64, 2, 2, causal=True),
    AttentionCase(2048, 2048, 64, 2, 2),
    AttentionCase(4096, 4096, 64, 2, 2),
    AttentionCase(4096, 4096, 64, 2, 2, causal=True),
)

FORMS = ("operator", "exported", "te")


def compiled(case: AttentionCase, form: str, arch: str, **options: Any) -> tuple[Network, list[str]]:
    """One attention as a network, and its stages in words."""
    kept: dict[str, Stages] = {}

    def keep(step: str, result: object) -> object:
        kept[step] = result
        return result

    precision = "fp32" if form == "te" else "mixed"
    how = {"target": "cuda", "device": "cpu", "precision": precision, "arch": arch, "cubin": False}
    network = souffle.compile(MAKERS[form](case), hook=keep, **how, **options)
    return network, [rule_text(stage.schedule) for stage in flat_stages(kept["schedule"])]


def outcome(case: AttentionCase, form: str, arch: str) -> str:
    """A line on what an attention becomes."""
    network, stages = compiled(case, form, arch, verify="off")
    found = microseconds(network.plan)
    counts = f"{counted(found['launches'], 'kernel')}, {counted(found['syncs'], 'barrier')}"
    return f"{arch} {form} {case.name}: {counts}: {'; '.join(stages)}"


def figures(case: AttentionCase, form: str, arch: str) -> dict[str, Any]:
    """What is told of one attention."""
    network, stages = compiled(case, form, arch, verify="values")
    apart, _ = compiled(case, form, arch, verify="off", disable=["attention"])
    return {
        "form": form,
        "case": case.name,
        "arch": arch,
        "stages": stages,
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
    results = kept_results(arguments.out)
    done = {(r["form"], r["case"], r["arch"]) for r in results}
    for arch in arguments.archs:
        for case in CASES:
            for form in FORMS:
                if (form, case.name, arch) in done:
                    continue
                results.append(figures(case, form, arch))
                print(*results[-1].values(), flush=True)
                if arguments.out:
                    save_results(arguments.out, "benchmarks.attention", results)
    columns = ["form", "attention", "arch", "stages", "verdict", "µs", "µs without"]
    table = [
        [r["form"], r["case"], r["arch"], "; ".join(r["stages"]), r["verdict"], r["us"], r["us_apart"]] for r in results
    ]
    print(format_table(columns, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
