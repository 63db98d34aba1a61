"""The steps that ``benchmarks.gpu_host`` runs on a GPU host, each a process of its own.

Needs Souffle's runtime only: NumPy and cuda-bindings, nvcc for the ``micro`` step; PyTorch where it is there.

A process does the cases of ``--tasks`` in order. After each it writes what it has found to the file of ``--json``,
``{"done": {name: result}, "now": name}``, so that the caller knows which case a crash or a hang belongs to. A fault on
the GPU ends the process, since no later call would work in it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import grid_barriers, shared_memory, stage_clocks
from benchmarks.gpu_artifacts import Task, network_of, optional, played_driver, values_of
from benchmarks.gpu_checks import checked
from benchmarks.gpu_figures import BATCH, SPIN_SECONDS, over_rounds, read_clocks
from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.benchmark.profile import gpu_trace, twin_of
from souffle.calibrate import measure_device
from souffle.codegen.nvcc import compile_cubin, find_nvcc
from souffle.errors import DeviceError, SouffleError
from souffle.runtime import Network, load
from souffle.runtime.cuda import Cuda

__all__ = ["main"]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# steps: each yields a result for one case after the other; ``begin`` is told which case comes


_Begin = Callable[[str], None]
_Results = Iterator[tuple[str, dict[str, Any]]]


def _device(tasks: list[Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    begin("device")
    cuda = Cuda(0, RehearsalDriver({}, types=optional("cuda.bindings.driver")) if options.rehearse else None)
    version = None
    if nvcc := find_nvcc():
        version = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
        version = version.splitlines()[-1]
    yield (
        "device",
        {
            "ok": True,
            "name": cuda.name,
            "arch": cuda.arch,
            "multiprocessors": cuda.multiprocessors,
            "max_shared_bytes": cuda.max_shared_bytes,
            "cuda_of_driver": cuda.driver_version,
            "driver_and_clocks": None if options.rehearse else read_clocks(),
            "cuda_bindings": _version("cuda-bindings"),
            "nvcc": version,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "there": [name for name in ("onnx", "onnxruntime", "torch") if importlib.util.find_spec(name)],
        },
    )


def _micro(tasks: list[Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    begin("micro")
    if options.rehearse:
        image = b"rehearsal"
        texts = {image: measure_device.SOURCE.read_text()}
        cuda = Cuda(0, RehearsalDriver(texts, types=optional("cuda.bindings.driver")))
    else:
        cuda = Cuda(0)
        image = measure_device.machine_code(cuda.arch)
    repeats = 1 if options.rehearse else options.repeats
    measured = measure_device.measure(cuda, image, repeats=repeats, small=options.rehearse)
    yield "micro", {"ok": True, "description": measure_device.description(measured)}


def _barriers(tasks: list[Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    begin("barriers")
    found = grid_barriers.found_in(options.input, rehearse=options.rehearse, repeats=1 if options.rehearse else 5)
    yield "barriers", {"ok": found.ok, "rows": found.rows}


def _shared(tasks: list[Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    begin("shared")
    found = shared_memory.found_in(options.input, rehearse=options.rehearse)
    wrong = [row for row in found.rows if not shared_memory.is_right(row)]
    yield "shared", {"ok": found.ok, "rows": found.rows} | ({"error": f"wrong: {wrong}"} if wrong else {})


def _check(tasks: list[Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    torch = None if options.rehearse else optional("torch")
    for task in tasks:
        begin(task.name)
        yield task.name, checked(task, options, torch)
        gc.collect()


def _once(tasks: list[Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    for task in tasks:
        begin(task.name)
        network_of(load(task.artifact), options)(values_of(task.io)[0])
        yield task.name, {"ok": True}


def _latency(tasks: list[Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    networks: list[Network] = []
    inputs, _ = values_of(tasks[0].io)
    repeats: list[int] = []
    for task in tasks:
        begin(task.name)
        networks.append(network_of(load(task.artifact), options))
        once = networks[-1].time(inputs, repeats=1, warmup=1)["median_us"]
        # Both modes and all rounds of all levels share the time that this process has.
        share = options.seconds * 1e6 / (len(tasks) * 2 * options.rounds) / max(once, 1.0)
        repeats.append(max(3, min(options.repeats, int(share) - options.warmup)) if options.execute else 1)
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    cases = list(zip(tasks, networks, repeats, strict=True))
    clocks = [] if options.rehearse else [read_clocks()]
    # A GPU that had nothing to do runs at a fraction of its clock.
    end = time.monotonic() + (0.0 if options.rehearse else SPIN_SECONDS)
    while time.monotonic() < end:
        networks[0].time(inputs, repeats=20, warmup=0, mode="graph")
    clocks += [] if options.rehearse else [read_clocks()]
    for number in range(options.rounds):
        # Every other round goes backwards, so that a drift of the clock favours no level.
        for task, network, count in cases[:: -1 if number % 2 else 1]:
            begin(task.name)
            warmup = min(options.warmup, count)
            for mode in ("launch", "graph"):
                found = network.time(inputs, repeats=count, warmup=warmup, mode=mode)
                samples.setdefault((task.name, mode), []).append(found)
            # What starting a graph costs is hidden where the next waits already.
            found = network.time(inputs, repeats=max(1, count // BATCH), warmup=1, mode="graph", batch=BATCH)
            samples.setdefault((task.name, "graphs"), []).append(found)
    clocks += [] if options.rehearse else [read_clocks()]
    for task, network, count in cases:
        kernels = network.kernels
        entry: dict[str, Any] = {
            "ok": True,
            "launches": len(network.plan.launches),
            "grid_syncs": sum(kernel.grid_syncs * kernel.launches for kernel in kernels),
            "repeats": count,
            "rounds": options.rounds,
            "batch": BATCH,
            "clocks_idle_spun_after": clocks,
        }
        for mode in ("launch", "graph", "graphs"):
            entry[mode] = over_rounds(samples[task.name, mode])
        yield task.name, entry


def _stages(tasks: list[Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    for task in tasks:
        begin(task.name)
        plan, inputs = load(task.artifact), values_of(task.io)[0]
        twin = stage_clocks.read_twin(Path(task.clocks))
        if options.rehearse:
            texts = [stage_clocks.clocked(module.text)[0] for module in plan.modules]
            cuda = Cuda(0, played_driver(plan, dict(zip(twin.cubins, texts, strict=True)), options))
        else:
            cuda = Cuda(0)
        # A GPU that had nothing to do runs at a fraction of its clock.
        spin = 0.0 if options.rehearse else SPIN_SECONDS
        found = stage_clocks.measure(plan, twin, inputs, cuda, runs=options.repeats, spin=spin)
        clocks = None if options.rehearse else read_clocks()
        yield task.name, {"ok": True, "clocks": clocks, "predicted": stage_clocks.predictions(plan), **found}


def _profile(tasks: list[Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    """The trace of ``souffle bench --profile``: kernels with the device's clock, compiled here."""
    for task in tasks:
        begin(task.name)
        plan, inputs = load(task.artifact), values_of(task.io)[0]
        texts: dict[bytes, str] = {}

        def compiled(text: str, plan: Any = plan, texts: dict[bytes, str] = texts) -> bytes:
            if not options.rehearse:
                return compile_cubin(text, plan.options.arch)[0]
            image = f"module {len(texts)}".encode()
            texts[image] = text
            return image

        twin = twin_of(plan, compiled)
        driver = played_driver(plan, texts, options) if options.rehearse else None
        trace = gpu_trace(plan, twin, inputs, Cuda(0, driver))
        kernels = [one for one in trace.slices if one.track == "kernels"]
        stages: dict[str, float] = {}
        for one in trace.slices:
            if one.track == "block 0":
                stages[one.name] = stages.get(one.name, 0.0) + one.duration_us
        yield (
            task.name,
            {
                "ok": bool(kernels) and bool(stages),
                "kernels_us": [[one.name, round(one.begin_us, 2), round(one.duration_us, 2)] for one in kernels[:40]],
                "stages_of_block_0_us": {name: round(us, 2) for name, us in stages.items()},
                "slices": len(trace.slices),
            },
        )


def _bench(tasks: list[Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    """A network beside other compilers; needs the onnx package, for these take the model."""
    try:
        bench = importlib.import_module("benchmarks.gpu_bench")
    except ImportError as error:
        for task in tasks:
            begin(task.name)
            yield task.name, {"ok": False, "status": "missing", "error": f"{error.name} is not installed here"}
        return
    for task in tasks:
        begin(task.name)
        yield task.name, bench.benched(task, options)
        gc.collect()


_STEPS: dict[str, Callable[[list[Task], argparse.Namespace, _Begin], _Results]] = {
    "device": _device,
    "barriers": _barriers,
    "shared": _shared,
    "micro": _micro,
    "check": _check,
    "once": _once,
    "latency": _latency,
    "stages": _stages,
    "profile": _profile,
    "bench": _bench,
}


class _Answer:
    """The file that the caller reads, whole at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content: dict[str, Any] = {"done": {}, "now": None}
        self._began = time.monotonic()

    def begin(self, name: str) -> None:
        """Say which case comes."""
        self._content["now"] = name
        self._write()

    def done(self, name: str, result: dict[str, Any]) -> None:
        """Add a case's result."""
        now = time.monotonic()
        self._content["done"][name] = {"seconds": round(now - self._began, 2), **result}
        self._content["now"] = None
        self._began = now
        self._write()

    def failed(self, error: Exception) -> str | None:
        """Make an error the result of the case at hand; its name."""
        name = self._content["now"]
        if name is not None:
            self.done(name, {"ok": False, "error": f"{type(error).__name__}: {error}"[:1500]})
        return name

    def _write(self) -> None:
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(self._content))
        part.replace(self._path)


def main(argv: list[str] | None = None) -> int:
    """Run one step; exit status 0 where all cases went well."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_steps", description=__doc__)
    parser.add_argument("step", choices=_STEPS)
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--tasks", type=Path, help="JSON list of cases")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=30.0, help="about as long may a process measure, or repeat")
    parser.add_argument("--in", dest="input", type=Path, help="where the artifacts are")
    parser.add_argument("--rehearse", action="store_true", help="no GPU: record the driver's calls")
    parser.add_argument("--deferred", action="store_true", help="rehearse with work that runs as late as it can")
    parser.add_argument("--fault", metavar="KIND:N", default="", help="rehearse a fault of RehearsalDriver: hang:3")
    parser.add_argument("--no-execute", dest="execute", action="store_false", help="when rehearsing, run no kernel")
    parser.add_argument("--against", nargs="*", default=[], metavar="PEER", help="of souffle bench")
    options = parser.parse_args(argv)
    tasks = [Task(**entry) for entry in json.loads(options.tasks.read_text())] if options.tasks else []
    answer = _Answer(options.json)
    ok = True
    while True:
        try:
            for name, result in _STEPS[options.step](tasks, options, answer.begin):
                answer.done(name, result)
                ok = ok and result["ok"]
            return 0 if ok else 1
        except (SouffleError, OSError, ValueError, subprocess.SubprocessError) as error:
            failed = answer.failed(error)
            ok = False
            names = [task.name for task in tasks]
            if isinstance(error, DeviceError) or failed not in names:
                return 1
            # What came before is done, save for latencies, which are measured together.
            after = names.index(failed)
            tasks = tasks[after + 1 :] if options.step != "latency" else tasks[:after] + tasks[after + 1 :]
            if not tasks:
                return 1


if __name__ == "__main__":
    sys.exit(main())
