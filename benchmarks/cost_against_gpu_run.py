"""The process of ``benchmarks.cost_against_gpu`` that uses the GPU: measures it, checks every schedule, then times all.

Needs Souffle's runtime only: NumPy and cuda-bindings. What it has found is in the file of ``--json`` at any time,
``{"now": name, "device": ..., "checks": {...}, "times": {...}}``, so that the caller knows which schedule a fault or a
hang belongs to, and can start another process that leaves it out (``--skip``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_figures import compare
from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.calibrate import measure_device
from souffle.errors import SouffleError
from souffle.runtime.cuda import Cuda, PreparedLaunch

__all__ = ["main", "reference"]

_GRAPH_SECONDS = 2e-4
"""What a graph of one schedule's launches should take: long against the resolution of events."""
_MOST_LAUNCHES = 50
_COLD_TURNS = 2
"""Launches with an empty cache in a round."""


# what NumPy says


def _padded(x: np.ndarray, axes: Sequence[int], k: int, stride: int) -> np.ndarray:
    before = (k - 1) // 2 if stride == 1 else (k - stride + 1) // 2
    return np.pad(x, [(before, k - 1 - before) if axis in axes else (0, 0) for axis in range(x.ndim)])


def _windows(x: np.ndarray, axes: Sequence[int], k: int, stride: int) -> np.ndarray:
    """Windows of k x k, their two axes last."""
    found = np.lib.stride_tricks.sliding_window_view(x, (k, k), axis=tuple(axes))
    return found[tuple(slice(None, None, stride if axis in axes else None) for axis in range(x.ndim))]


def _convolution(x: np.ndarray, kernel: np.ndarray, *, spec: str, axes: list[int], k: int, stride: int) -> np.ndarray:
    return np.einsum(spec, _windows(_padded(x, axes, k, stride), axes, k, stride), kernel, optimize=True)


def _softmax(x: np.ndarray) -> np.ndarray:
    power = np.exp(x - x.max(-1, keepdims=True))
    return power / power.sum(-1, keepdims=True)


def _layer_norm(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + shift


_REFERENCES: dict[str, Callable[..., np.ndarray]] = {
    "contract": lambda a, b, *, spec: np.einsum(spec, a, b, optimize=True),
    "convolution": _convolution,
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "sum": lambda x, *, axes: x.sum(tuple(axes)),
    "mean": lambda x, *, axes: x.mean(tuple(axes)),
    "max_pool": lambda x, *, k, stride: _windows(x, (1, 2), k, stride).max((-2, -1)),
}


def reference(about: Mapping[str, Any], inputs: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """What a case computes, in float32 and rounded to `dtype` at the end.

    Parameters
    ----------
    about : mapping
        ``{"op": ...}`` and the parameters of that operation.
    inputs : sequence of array
    dtype : str
    """
    more = {name: value for name, value in about.items() if name != "op"}
    return np.asarray(_REFERENCES[about["op"]](*(x.astype(np.float32) for x in inputs), **more)).astype(dtype)


def _inputs(name: str, case: Mapping[str, Any]) -> list[np.ndarray]:
    """Normal values, the same on every host."""
    generator = np.random.default_rng([ord(letter) for letter in name])
    return [generator.standard_normal(shape, np.float32).astype(dtype) for shape, dtype in case["inputs"]]


# the GPU


@dataclass(frozen=True, eq=False)
class _Case:
    """A case on the GPU: its tensors, and its output as the host reads it."""

    name: str
    about: Mapping[str, Any]
    pointers: tuple[int, ...]
    output: np.ndarray
    expected: np.ndarray


class _Gpu:
    """The device with all cases on it."""

    def __init__(self, options: argparse.Namespace, manifest: Mapping[str, Any]) -> None:
        self.manifest, self.folder, self.small = manifest, options.input, options.rehearse
        self.images = {
            entry["file"]: (self.folder / entry["file"]).read_bytes()
            for case in manifest["cases"].values()
            for entry in case["schedules"].values()
        }
        self.measure = (self.folder / manifest["measure"]).read_bytes()
        self.cuda = Cuda(0, self._rehearsal(options.execute) if options.rehearse else None)
        self.cuda.require_arch(manifest["arch"])
        self.cuda.make_current()
        self.stream = self.cuda.stream()
        self.first, self.last = self.cuda.event(timing=True), self.cuda.event(timing=True)
        self.modules = {file: self.cuda.load_module(image) for file, image in self.images.items()}
        self.flush = self._flush()

    def _rehearsal(self, execute: bool) -> RehearsalDriver:
        texts = {image: (self.folder / file).with_suffix(".cu").read_text() for file, image in self.images.items()}
        texts[self.measure] = measure_device.SOURCE.read_text()
        arch = self.manifest["arch"][3:].rstrip("af")
        try:
            types = importlib.import_module("cuda.bindings.driver")
        except ImportError:
            types = None
        return RehearsalDriver(texts, types=types, capability=(int(arch[:-1]), int(arch[-1])), execute=execute)

    def _flush(self) -> PreparedLaunch:
        """A read of more than the L2 cache holds: what was in it is gone, and nothing waits to be written."""
        cuda = self.cuda
        grid, threads = 2 * cuda.multiprocessors, 64 if self.small else 1024
        turn = grid * threads * 64
        rounds = -(-2 * cuda.attribute("L2_CACHE_SIZE") // turn)
        data, clocks, out = (cuda.alloc(nbytes) for nbytes in (rounds * turn, 16 * grid, 4 * grid * threads))
        cuda.fill(data, 0, rounds * turn, self.stream)
        function = cuda.function(cuda.load_module(self.measure), "measure_read")
        return cuda.prepare(
            "measure_read", function, grid=grid, threads=threads, pointers=[clocks, out, data], integers=[rounds, 1]
        )

    def case(self, name: str) -> _Case:
        """Put a case's inputs on the device."""
        cuda, case = self.cuda, self.manifest["cases"][name]
        inputs = _inputs(name, case)
        ((shape, dtype),) = case["outputs"]
        output = np.empty(shape, dtype)
        pointers = [cuda.alloc(array.nbytes) for array in (*inputs, output)]
        for address, array in zip(pointers, inputs, strict=False):
            cuda.to_device(address, array, self.stream)
        cuda.synchronize(self.stream)
        return _Case(name, case, tuple(pointers), output, reference(case["reference"], inputs, dtype))

    def prepared(self, case: _Case, name: str) -> PreparedLaunch:
        """A schedule's launch."""
        entry = case.about["schedules"][name]
        shared = entry["resources"]["dynamic_shared_bytes"]
        function = self.cuda.function(self.modules[entry["file"]], name, shared)
        return self.cuda.prepare(
            name, function, grid=entry["tiles"], threads=entry["resources"]["threads"], pointers=case.pointers,
            integers=[entry["tiles"]], dynamic_shared_bytes=shared,
        )  # fmt: skip

    def output(self, case: _Case, launch: PreparedLaunch) -> np.ndarray:
        """What a schedule computes; whatever was in the output before is overwritten first."""
        cuda = self.cuda
        cuda.fill(case.pointers[-1], 0xFF, case.output.nbytes, self.stream)
        cuda.launch(launch, self.stream)
        found = np.empty_like(case.output)
        cuda.to_host(found, case.pointers[-1], self.stream)
        cuda.synchronize(self.stream)
        return found

    def seconds(self, queue: Callable[[], None]) -> float:
        """Device time of something queued."""
        cuda = self.cuda
        cuda.record(self.first, self.stream)
        queue()
        cuda.record(self.last, self.stream)
        cuda.synchronize(self.stream)
        return cuda.microseconds(self.first, self.last) * 1e-6


class _Answer:
    """The file that the caller reads, whole at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {"now": None, "device": None, "checks": {}, "times": {}, "rounds": 0}
        if path.exists():
            self.content |= json.loads(path.read_text()) | {"now": None}

    def write(self) -> None:
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(self.content))
        part.replace(self.path)

    def begin(self, name: str) -> None:
        """Say what comes."""
        self.content["now"] = name
        self.write()


def _check(gpu: _Gpu, answer: _Answer, skip: set[str], execute: bool) -> dict[str, tuple[_Case, PreparedLaunch]]:
    """Compare every schedule's output with the default's, and the default's with NumPy's; those that are right."""
    right: dict[str, tuple[_Case, PreparedLaunch]] = {}
    checks = answer.content["checks"]
    for case_name, about in gpu.manifest["cases"].items():
        case, expected = gpu.case(case_name), None
        precision = "fp32" if case.expected.dtype == np.float32 else "mixed"
        for name, entry in about["schedules"].items():
            if name in skip:
                continue
            answer.begin(name)
            launch = gpu.prepared(case, name)
            found = gpu.output(case, launch)
            # Before the default is known, as where it has crashed, a schedule is compared with NumPy alone.
            against = case.expected if expected is None else expected
            # Sums of other orders differ by roundings of their largest terms, whose size the result need not show.
            scale = max(1.0, float(np.abs(case.expected.astype(np.float64)).max()))
            result = compare(found / found.dtype.type(scale), against / against.dtype.type(scale), precision)
            if not execute:
                result = {"ok": True, "executed": False}
            checks[name] = result
            if entry["default"] and result["ok"]:
                expected = found
            if result["ok"]:
                right[name] = (case, launch)
    answer.begin("")
    return right


def _time(
    gpu: _Gpu, answer: _Answer, right: Mapping[str, tuple[_Case, PreparedLaunch]], rounds: int, end: float
) -> None:
    """All schedules of all cases in random order, round by round, until the rounds are done or the time is over."""
    cuda, times = gpu.cuda, answer.content["times"]
    graphs: dict[str, tuple[Any, int]] = {}
    for name, (_, launch) in right.items():
        answer.content["now"] = name
        once = min(gpu.seconds(lambda launch=launch: cuda.launch(launch, gpu.stream)) for _ in range(3))
        count = 2 if gpu.small else max(5, min(_MOST_LAUNCHES, round(_GRAPH_SECONDS / max(once, 1e-6))))
        cuda.begin_capture(gpu.stream)
        for _ in range(count):
            cuda.launch(launch, gpu.stream)
        graphs[name] = cuda.end_capture(gpu.stream), count
    for number in range(rounds):
        order = list(right)
        random.Random(number).shuffle(order)
        for name in order:
            if time.monotonic() > end:
                return
            answer.content["now"] = name
            launch, (graph, count) = right[name][1], graphs[name]
            found = times.setdefault(name, {"warm_us": [], "cold_us": [], "launches": count})
            cuda.launch(launch, gpu.stream)
            warm = gpu.seconds(lambda graph=graph: cuda.launch_graph(graph, gpu.stream)) / count
            cold = []
            for _ in range(_COLD_TURNS):
                cuda.launch(gpu.flush, gpu.stream)
                cold.append(gpu.seconds(lambda launch=launch: cuda.launch(launch, gpu.stream)))
            found["warm_us"].append(round(warm * 1e6, 4))
            found["cold_us"].append(round(statistics.median(cold) * 1e6, 4))
        answer.content["rounds"] = number + 1
        answer.begin("")


def main(argv: list[str] | None = None) -> int:
    """Do all of it; exit status 1 after an error, such as a fault of the GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_against_gpu_run", description=__doc__)
    parser.add_argument("--in", dest="input", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--no-execute", dest="execute", action="store_false")
    options = parser.parse_args(argv)
    end = time.monotonic() + options.seconds
    answer = _Answer(options.json)
    manifest = json.loads((options.input / "manifest.json").read_text())
    try:
        answer.begin("start")
        gpu = _Gpu(options, manifest)
        if answer.content["device"] is None and "device" not in options.skip and options.execute:
            answer.begin("device")
            small = {"repeats": 1, "small": True} if options.rehearse else {}
            measured = measure_device.measure(gpu.cuda, gpu.measure, **small)
            answer.content["device"] = measure_device.description(measured)
        right = _check(gpu, answer, set(options.skip), options.execute)
        _time(gpu, answer, right, options.rounds, end)
    except SouffleError as error:
        answer.content["error"] = str(error)[:1500]
        answer.write()
        sys.stderr.write(f"{answer.content['now']}: {error}\n")
        return 1
    answer.begin("")
    answer.content["now"] = None
    answer.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
