"""ONNX's own conformance suite of its operators, against Souffle.

``python -m benchmarks.onnx_suite [--target cpu] [--level V4] [--only PATTERN] [--out FILE.json]``. With
``--target cuda`` the emitted CUDA text runs on the CPU device. One process runs the cases: one that dies or takes too
long is noted, and another goes on. With ``--out`` the same command goes on where it stopped. Outcomes:

- passed: every output of every data set is right, by ONNX's own comparison and the case's own tolerance;
- refused: a SouffleError;
- wrong: an output has another value, shape or type;
- exception: an error that is no SouffleError;
- crash: the process died;
- timeout.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

import souffle

__all__ = ["OUTCOMES", "CaseResult", "SuiteWorker", "main", "run_case", "suite_cases"]

OUTCOMES = ("passed", "refused", "wrong", "exception", "crash", "timeout")
_BAD = ("wrong", "exception", "crash", "timeout")
_KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")
_WIDE = ("complex64", "complex128", "object")


@dataclass(frozen=True)
class CaseResult:
    """What became of a case; `message` says why it did not pass."""

    name: str
    outcome: str
    message: str = ""
    seconds: float = 0.0


def suite_cases(kinds: Sequence[str]) -> dict[str, TestCase]:
    """The cases by name, without ``test_``; kinds other than ``node`` are stored models of old operator sets."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        cases = collect_testcases(None) if "node" in kinds else []
        for kind in kinds:
            if kind != "node":
                cases = [*cases, *load_model_tests(kind=kind)]
    return {case.name.removeprefix("test_"): case for case in cases}


def _model_and_data(case: TestCase) -> tuple[onnx.ModelProto, list[tuple[list[Any], list[Any]]]]:
    """The model of a case, and its data sets."""
    if case.model is not None:
        return case.model, [tuple([_array(value) for value in part] for part in given) for given in case.data_sets]
    folder = Path(case.model_dir)
    model = onnx.load(folder / "model.onnx")
    sets = []
    for data in sorted(folder.glob("test_data_set_*")):
        files = [sorted(data.glob(f"{kind}_*.pb"), key=lambda p: int(p.stem[len(kind) + 1 :])) for kind in _ENDS]
        sets.append(tuple([numpy_helper.to_array(onnx.load_tensor(file)) for file in part] for part in files))
    return model, sets


_ENDS = ("input", "output")


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def run_case(case: TestCase, options: Mapping[str, Any]) -> CaseResult:
    """Compile the model of a case and run all its data sets.

    Parameters
    ----------
    case : TestCase
    options : mapping
        Those of :func:`souffle.compile`.
    """
    name = case.name.removeprefix("test_")
    start = time.monotonic()
    model, data_sets = _model_and_data(case)
    constant = {tensor.name for tensor in model.graph.initializer}
    names = [info.name for info in model.graph.input]
    try:
        network = souffle.compile(model, **options)
        for inputs, expected in data_sets:
            feeds = {key: value for key, value in zip(names, inputs, strict=False) if key not in constant}
            given = network({key: np.asarray(value) for key, value in feeds.items()})
            problem = _difference(case, [given[info.name] for info in model.graph.output], expected)
            if problem:
                return CaseResult(name, "wrong", problem, time.monotonic() - start)
    except souffle.SouffleError as error:
        return CaseResult(name, "refused", f"{type(error).__name__}: {error}", time.monotonic() - start)
    except Exception as error:  # whatever else comes out of the compiler is what is looked for
        place = traceback.extract_tb(error.__traceback__)[-1]
        words = f"{type(error).__name__}: {str(error).strip()[-400:]} ({Path(place.filename).name}:{place.lineno})"
        return CaseResult(name, "exception", words, time.monotonic() - start)
    return CaseResult(name, "passed", "", time.monotonic() - start)


def _difference(case: TestCase, given: Sequence[np.ndarray], expected: Sequence[Any]) -> str:
    """What is wrong with outputs; empty where they are right."""
    if len(given) != len(expected):
        return f"{len(given)} outputs, expected {len(expected)}"
    for position, (array, wanted) in enumerate(zip(given, expected, strict=True)):
        wanted = np.asarray(wanted)
        label = f"output {position}: {array.dtype}{list(array.shape)}"
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            return f"{label}, expected {wanted.dtype}{list(wanted.shape)}"
        if str(array.dtype) not in np.sctypeDict and str(array.dtype) != "bfloat16":
            # NumPy compares the small types of ml_dtypes only as wider ones; no two of their values are that near.
            array, wanted = array.astype("float32"), wanted.astype("float32")
        try:
            Runner.assert_similar_outputs([wanted], [array], case.rtol, case.atol)
        except AssertionError as error:
            return f"{label}: {_size_of(array, wanted)}; {' '.join(str(error).split())[:300]}"
    return ""


def _size_of(given: np.ndarray, wanted: np.ndarray) -> str:
    if str(given.dtype) in _WIDE:
        return f"{int((given != wanted).sum())} of {given.size} differ"
    a, b = given.astype("float64"), wanted.astype("float64")
    with np.errstate(all="ignore"):
        off = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        error = np.abs(a - b)[off & np.isfinite(a) & np.isfinite(b)]
    largest = f"largest error {error.max():.3g} of {np.abs(b[np.isfinite(b)]).max():.3g}" if error.size else ""
    return f"{int(off.sum())} of {given.size} differ, {int((np.isfinite(a) != np.isfinite(b)).sum())} NaN; {largest}"


def _serve(connection, kinds: Sequence[str], options: Mapping[str, Any], log: str) -> None:
    """The worker: cases by name in, results out. What libraries print goes to the file `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    cases = suite_cases(kinds)
    connection.send(list(cases))
    while True:
        name = connection.recv()
        os.ftruncate(descriptor, 0)
        connection.send(asdict(run_case(cases[name], options)))


class SuiteWorker:
    """A process that runs cases, and is replaced where one kills it or takes too long."""

    def __init__(self, kinds: Sequence[str], options: Mapping[str, Any], limit: float) -> None:
        self._kinds, self._options, self._limit = tuple(kinds), dict(options), limit
        self._log = Path(tempfile.mkdtemp(prefix="souffle-suite-")) / "worker.log"
        self._log.touch()
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._connection, far = self._context.Pipe()
        arguments = (far, self._kinds, self._options, str(self._log))
        self._process = self._context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        far.close()
        self.names: tuple[str, ...] = tuple(self._connection.recv())
        self._before: list[str] = []

    def run(self, name: str) -> CaseResult:
        """The result of a case; one after which the process dies is a crash, by itself or with those before it."""
        start = time.monotonic()
        self._connection.send(name)
        try:
            if self._connection.poll(self._limit):
                result = CaseResult(**self._connection.recv())
                self._before.append(name)
                return result
            outcome, words = "timeout", f"more than {self._limit:g} s"
        except (EOFError, ConnectionResetError):
            self._process.join()
            tail = " ".join(self._log.read_text(errors="replace").split())[-300:]
            after = f"; after {', '.join(self._before[-3:])}" if self._before else ""
            outcome, words = "crash", f"exit code {self._process.exitcode}{after}; {tail}"
        self.close()
        self._start()
        return CaseResult(name, outcome, words, time.monotonic() - start)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _read(path: Path | None, setting: Mapping[str, Any]) -> dict[str, CaseResult]:
    if path is None or not path.exists():
        return {}
    stored = json.loads(path.read_text())
    if stored["setting"] != setting:
        raise SystemExit(f"{path} holds results of {stored['setting']}, and not of {setting}; give another --out")
    return {entry["name"]: CaseResult(**entry) for entry in stored["results"]}


def _write(path: Path | None, setting: Mapping[str, Any], results: Mapping[str, CaseResult]) -> None:
    if path is None:
        return
    partial = path.with_suffix(".partial")
    counts = Counter(result.outcome for result in results.values())
    record = {"setting": setting, "counts": counts, "results": [asdict(result) for result in results.values()]}
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)


def summary(results: Sequence[CaseResult], *, refusals: bool) -> str:
    """A table of the outcomes, and all cases that are wrong or worse."""
    counts = Counter(result.outcome for result in results)
    lines = [f"{outcome:10}{counts[outcome]:6}" for outcome in OUTCOMES] + [f"{'all':10}{len(results):6}"]
    for outcome in (*_BAD, *(("refused",) if refusals else ())):
        lines += [f"{outcome}: {r.name}: {r.message}" for r in results if r.outcome == outcome]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; 1 where a case is wrong, an exception, a crash or out of time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--level", default="V4")
    parser.add_argument("--kinds", nargs="+", default=["node"], choices=_KINDS)
    parser.add_argument("--only", default="", help="a regular expression that the names hold")
    parser.add_argument("--every", type=int, default=1, help="only every n-th of the cases")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a case")
    parser.add_argument("--refusals", action="store_true", help="list what is refused, too")
    parser.add_argument("--again", nargs="*", default=[], choices=OUTCOMES, help="outcomes in --out to run again")
    parser.add_argument("--out", type=Path, help="JSON; goes on where it stopped")
    arguments = parser.parse_args(argv)
    options: dict[str, Any] = {"target": arguments.target, "level": arguments.level}
    if arguments.target == "cuda":
        options |= {"device": "cpu", "cubin": False}
    known = {n: r for n, r in _read(arguments.out, options).items() if r.outcome not in arguments.again}
    worker = SuiteWorker(arguments.kinds, options, arguments.limit)
    wanted = [name for name in worker.names if re.search(arguments.only, name)][:: arguments.every]
    written = time.monotonic()
    for number, name in enumerate(wanted):
        if name in known:
            continue
        known[name] = worker.run(name)
        if sys.stderr.isatty():
            print(f"\r{number + 1}/{len(wanted)} {name[:60]:60}", end="", file=sys.stderr, flush=True)
        if known[name].outcome in _BAD:
            print(f"{known[name].outcome}: {name}: {known[name].message[:200]}", file=sys.stderr, flush=True)
        if time.monotonic() - written > 2:
            _write(arguments.out, options, known)
            written = time.monotonic()
    worker.close()
    _write(arguments.out, options, known)
    done = [known[name] for name in wanted]
    print(summary(done, refusals=arguments.refusals))
    return int(any(result.outcome in _BAD for result in done))


if __name__ == "__main__":
    sys.exit(main())
