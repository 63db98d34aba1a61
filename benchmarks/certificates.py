"""The certificate of every kernel: verdict, what was proven in numbers, and the processor's seconds that it took.

``python -m benchmarks.certificates [--size paper] [--models bert ...] [--levels V3 V4] [--precisions fp32 mixed]
[--arch sm_80] [--values] [--out FILE.json]``. The exit status is 1 if any network is refuted. With ``--values`` stages
are compared with their definitions too (``docs/verification.md``).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import product

import souffle
from benchmarks.record import save_results
from souffle import models
from souffle.certificate import REFUTED
from souffle.cli.output import format_table
from souffle.errors import CertificateError
from souffle.pipeline import compile_cuda
from souffle.verify.certified_step import certified


def prove(name: str, size: str, level: str, precision: str, arch: str, verify: str) -> dict:
    """Compile a model, prove it, and take the processor's seconds of both."""
    program = souffle.import_onnx(models.build(name, size))
    options = {"level": level, "precision": precision, "arch": arch, "verify": "off"}
    start = time.process_time()
    compiled = compile_cuda(program, **options, cubin=False)
    made = time.process_time()
    try:
        certificate = certified(compiled, verify).plan.certificate
    except CertificateError as error:
        certificate = error.certificate
    done = time.process_time()
    facts: dict[str, int] = {}
    for section in certificate.kernels:
        for fact, count in section.facts:
            facts[fact] = facts.get(fact, 0) + count
    return {
        "model": name,
        "size": size,
        "level": level,
        "precision": precision,
        "verdict": certificate.verdict,
        "proven": sum(section.verdict == "PROVEN" for section in certificate.kernels),
        "kernels": len(certificate.kernels),
        "unknown": list(certificate.unknown),
        "counterexamples": [str(one) for one in certificate.counterexamples],
        "facts": facts,
        "compile_seconds": made - start,
        "proof_seconds": done - made,
    }


def main() -> int:
    """Prove all networks asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(models.NAMES))
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--levels", nargs="+", default=["V3", "V4"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "mixed"])
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--values", action="store_true", help="compare stages with their definitions too")
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    verify = "values" if arguments.values else "memory"
    rows = []
    for name, level, precision in product(arguments.models, arguments.levels, arguments.precisions):
        row = prove(name, arguments.size, level, precision, arguments.arch, verify)
        rows.append(row)
        if arguments.out:
            save_results(arguments.out, "benchmarks.certificates", rows, arch=arguments.arch, verify=verify)
        print(json.dumps({k: row[k] for k in ("model", "level", "precision", "verdict")}), file=sys.stderr, flush=True)
        for line in (*row["counterexamples"], *(f"undecided: {why}" for why in row["unknown"])):
            print(f"  {line}", file=sys.stderr)
    table = [
        (
            row["model"],
            row["level"],
            row["precision"],
            row["verdict"],
            f"{row['proven']} of {row['kernels']}",
            row["facts"]["grid barriers"],
            row["facts"]["pairs of accesses compared"],
            f"{row['compile_seconds']:.1f}",
            f"{row['proof_seconds']:.1f}",
        )
        for row in rows
    ]
    network = ("model", "level", "precision")
    proof = ("verdict", "kernels proven", "grid barriers", "pairs", "compile s", "proof s")
    print(format_table((*network, *proof), table))
    return int(any(row["verdict"] == REFUTED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
