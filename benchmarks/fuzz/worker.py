"""A process that generates and runs networks, told by lines of JSON: it may be killed by what it runs.

Reads ``{"seed": 7, "targets": ["cpu"], ...}`` or ``{"case": "file.json", ...}``, and answers with one line for each
thing that it begins and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.fuzz.case import operators_of, read_case, write_case
from benchmarks.fuzz.draft import Settings
from benchmarks.fuzz.generate import generate
from benchmarks.fuzz.oracle import ORACLE_ERRORS, expect
from benchmarks.fuzz.targets import FAILURES, precision_of, run_target

__all__ = ["main"]

_FP16 = 6e4
_TF32 = 3.4e38


def main() -> None:
    """Serve until the end of the input."""
    # What TVM and ONNX Runtime print goes elsewhere, so that lines stay whole.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**record: object) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    answer(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        with contextlib.suppress(BrokenPipeError):
            _serve(request, answer)


def _serve(request: dict, answer) -> None:
    answer(begin="generate")
    began = time.monotonic()
    if "case" in request:
        case, refused, seed = read_case(Path(request["case"])), 0, int(request.get("seed", 0))
    else:
        seed = int(request["seed"])
        given = request.get("settings", {})
        settings = Settings(**{k: _setting(k, v) for k, v in given.items()})
        made = generate(seed, settings)
        case, refused = made.case, made.refused
    facts = {"operators": operators_of(case.model), "refused": refused, "seconds": time.monotonic() - began}
    answer(end="generate", **facts)
    folder = Path(request["failures"]) if request.get("failures") else None
    if folder is not None:
        # A crash leaves no time to write: the last network always lies there.
        write_case(case, folder / f"running-{os.getpid()}.json")
    expectations = {}
    for target in request["targets"]:
        answer(begin=target)
        precision = precision_of(target)
        rounded = precision in ("mixed", "tf32")
        try:
            if rounded not in expectations:
                expectations[rounded] = expect(case, rounded=rounded)
        except ORACLE_ERRORS as error:
            answer(end=target, kind="unsure", detail=f"oracle: {error}")
            continue
        expected = expectations[rounded]
        if precision == "mixed" and expected.largest > _FP16:
            answer(end=target, kind="unstable", detail="beyond float16")
            continue
        if precision == "tf32x3" and (expected.infinite or expected.largest > _TF32):
            answer(end=target, kind="unstable", detail="an infinity, which may be a factor")
            continue
        checked = bool(np.random.default_rng(seed).random() < request.get("checked", 0.0))
        outcome = run_target(case, target, expected, seed, checked=checked)
        record = asdict(outcome)
        if expected.unsure and outcome.kind == "right":
            record["detail"] = "some elements not compared: the oracle is unsure"
        if folder is not None and outcome.kind in FAILURES:
            path = folder / f"{seed}-{target}.json"
            write_case(case, path, target=target, kind=outcome.kind, detail=outcome.detail)
            record["file"] = str(path)
        elif folder is not None and outcome.verdict == "UNKNOWN":
            facts = {"target": target, "kind": "UNKNOWN", "detail": "; ".join(outcome.undecided)}
            write_case(case, folder / f"{seed}-{target}.unknown.json", **facts)
        answer(end=target, **record)
    answer(done=True)


def _setting(name: str, value: object) -> object:
    return frozenset(value) if name in ("without", "only") else tuple(value) if name == "dtypes" else value


if __name__ == "__main__":
    main()
