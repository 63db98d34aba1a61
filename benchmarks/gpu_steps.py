"""The steps that ``benchmarks.gpu_host`` runs on a GPU host, each a process of its own.

Needs Souffle's runtime only: NumPy and cuda-bindings, nvcc for the ``micro`` step; PyTorch where it is there.

A process does the cases of ``--tasks`` in order. After each it writes what it has found to the file of ``--json``,
``{"done": {name: result}, "now": name}``, so that the caller knows which case a crash or a hang belongs to. A fault on
the GPU ends the process, since no later call would work in it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import grid_barriers, shared_memory, stage_clocks
from benchmarks.gpu_figures import BATCH, SPIN_SECONDS, compare, over_rounds, read_clocks
from benchmarks.peers import add_arguments, peers
from benchmarks.rehearsal_driver import RehearsalDriver
from benchmarks.weights import read_weights
from souffle.calibrate import measure_device
from souffle.codegen.nvcc import find_nvcc
from souffle.codegen.plan import CudaModule, Plan
from souffle.errors import DeviceError, SouffleError
from souffle.runtime import DeviceArray, Network, describe, load
from souffle.runtime.cuda import Cuda

__all__ = ["compare", "main"]

_MULTIPROCESSORS, _PLAYED = 132, 2
"""Of an H100 or H200, played where no kernel runs; where kernels run, on the CPU, so few that stages loop and blocks
share a multiprocessor."""


@dataclass(frozen=True)
class _Task:
    """One case: a saved network, its inputs and expected outputs, its weights, the model that has their draws, and its
    kernels with clocks."""

    name: str
    artifact: str
    io: str
    weights: str | None = None
    graph: str | None = None
    clocks: str | None = None


# networks


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _optional(name: str) -> Any:
    """A module, or None where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _rehearsed(plan: Plan) -> Plan:
    """A plan that was compiled without nvcc, with something in the place of machine code."""
    return replace(
        plan,
        modules=tuple(
            CudaModule(module.text, module.cubin or hashlib.sha256(module.text.encode()).digest())
            for module in plan.modules
        ),
    )


def _network(plan: Plan, options: argparse.Namespace, **more: Any) -> Network:
    if not options.rehearse:
        return Network(plan, device="cuda", **more)
    plan = _rehearsed(plan)
    texts = {module.cubin: module.text for module in plan.modules}
    return Network(plan, device="cuda", driver=_driver(plan, texts, options), **more)


def _driver(plan: Plan, texts: dict[bytes, str], options: argparse.Namespace) -> RehearsalDriver:
    """The played driver, for a plan's kernels."""
    arch = plan.options.arch[3:].rstrip("af")
    return RehearsalDriver(
        texts,
        types=_optional("cuda.bindings.driver"),
        capability=(int(arch[:-1]), int(arch[-1])),
        execute=options.execute,
        multiprocessors=_PLAYED if options.execute else _MULTIPROCESSORS,
        resources={
            kernel.name: (kernel.resources.registers, kernel.resources.static_shared_bytes)
            for kernel in plan.kernels
            if kernel.resources
        },
        deferred=options.deferred,
        fault=options.fault,
    )


def _with_weights(plan: Plan, task: _Task) -> tuple[Plan, str]:
    """A plan with its true constants where they can be had, and what its constants are."""
    if describe(task.artifact).constants == "stored":
        return plan, "stored"
    if task.weights is None or task.graph is None:
        return plan, "synthetic"
    weights = read_weights(Path(task.weights), Path(task.graph))
    return replace(plan, constants={**plan.constants, **weights}), "drawn"


def _values(path: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Inputs and expected outputs by the model's names."""
    with np.load(path, allow_pickle=False) as file:
        groups: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] = ({}, {})
        for key in file.files:
            kind, _, name = key.partition("/")
            groups[kind == "output"][name] = file[key]
    return groups


def _host(value: Any) -> np.ndarray:
    return value.numpy() if isinstance(value, DeviceArray) else np.asarray(value)


def _difference(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Which output's bits are not the same, in words; empty where all are."""
    for name in first:
        one, other = _host(first[name]), _host(second[name])
        if one.tobytes() != other.tobytes():
            bits = [np.frombuffer(array.tobytes(), np.uint8).reshape(one.size, -1) for array in (one, other)]
            where = np.flatnonzero(np.any(bits[0] != bits[1], axis=1))
            at = tuple(int(i) for i in np.unravel_index(where[0], one.shape))
            found = f"{len(where)} of {one.size} elements of output {name} differ"
            return f"{found}, the first at {at}: {other[at]} for {one[at]}"
    return ""


def _digest(outputs: dict[str, Any]) -> str:
    """Of all bits of all outputs, to compare with another case's."""
    digest = hashlib.sha256()
    for name in sorted(outputs):
        digest.update(name.encode() + b"\0" + _host(outputs[name]).tobytes())
    return digest.hexdigest()


def _kernels(network: Network) -> dict[str, Any]:
    """What the device made of the kernels; one by one only those with grid syncs, of which there are few."""
    kernels = network.kernels
    return {
        "kernels": len(kernels),
        "launches": sum(kernel.launches for kernel in kernels),
        "registers": max((kernel.registers or 0 for kernel in kernels), default=0),
        "shared_bytes": max((kernel.shared_bytes for kernel in kernels), default=0),
        "spill_bytes": max((kernel.spill_bytes or 0 for kernel in kernels), default=0),
        "merged": [
            {"name": kernel.name, "grid": kernel.grid[0], "block": kernel.block[0], "syncs": kernel.grid_syncs,
             "registers": kernel.registers, "shared_bytes": kernel.shared_bytes, "launches": kernel.launches}
            for kernel in kernels if kernel.grid_syncs
        ][:40],
    }  # fmt: skip


# steps: each yields a result for one case after the other; ``begin`` is told which case comes


_Begin = Callable[[str], None]
_Results = Iterator[tuple[str, dict[str, Any]]]


def _device(tasks: list[_Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    begin("device")
    cuda = Cuda(0, RehearsalDriver({}, types=_optional("cuda.bindings.driver")) if options.rehearse else None)
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


def _micro(tasks: list[_Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    begin("micro")
    if options.rehearse:
        image = b"rehearsal"
        texts = {image: measure_device.SOURCE.read_text()}
        cuda = Cuda(0, RehearsalDriver(texts, types=_optional("cuda.bindings.driver")))
    else:
        cuda = Cuda(0)
        image = measure_device.machine_code(cuda.arch)
    repeats = 1 if options.rehearse else options.repeats
    measured = measure_device.measure(cuda, image, repeats=repeats, small=options.rehearse)
    yield "micro", {"ok": True, "description": measure_device.description(measured)}


def _barriers(tasks: list[_Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    begin("barriers")
    found = grid_barriers.found_in(options.input, rehearse=options.rehearse, repeats=1 if options.rehearse else 5)
    yield "barriers", {"ok": found.ok, "rows": found.rows}


def _shared(tasks: list[_Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    begin("shared")
    found = shared_memory.found_in(options.input, rehearse=options.rehearse)
    wrong = [row for row in found.rows if not shared_memory.is_right(row)]
    yield "shared", {"ok": found.ok, "rows": found.rows} | ({"error": f"wrong: {wrong}"} if wrong else {})


def _through_torch(torch: Any, network: Network, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = {name: torch.from_numpy(value.copy()).cuda() for name, value in inputs.items()}
    outputs = {name: torch.from_dlpack(value) for name, value in network(tensors).items()}
    return {name: value.cpu().numpy() for name, value in outputs.items()}


def _beside_a_capture(torch: Any, network: Network, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs of a call while PyTorch records a CUDA graph, into which an earlier call's outputs are given back.

    Raises
    ------
    RuntimeError
        If PyTorch's graph became invalid, or holds something else than it was to record.
    """
    tensors = {name: torch.from_numpy(value.copy()).cuda() for name, value in inputs.items()}
    lent = [torch.from_dlpack(value) for value in network(tensors).values()]
    x = torch.ones(1 << 16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x + 1
        lent.clear()
        found = {name: _host(value) for name, value in network(inputs).items()}
    x.fill_(2)
    graph.replay()
    torch.cuda.synchronize()
    if not bool((y == 3).all()):
        raise RuntimeError("the graph that PyTorch recorded meanwhile gives another result")
    return found


def _repeated(
    run: Callable[[], dict[str, Any]], first: dict[str, Any], repeats: int, seconds: float
) -> tuple[int, int, str]:
    """Runs, how many gave the same bits as the first, and how the first that did not differs."""
    runs, same, error, end = 0, 0, "", time.monotonic() + seconds
    while runs < repeats and (runs == 0 or time.monotonic() < end):
        difference = _difference(first, run())
        runs, same = runs + 1, same + (not difference)
        error = error or (f"run {runs}: {difference}" if difference else "")
    return runs, same, error


def _checked(task: _Task, options: argparse.Namespace, torch: Any) -> dict[str, Any]:
    """Whether one network is right: against ONNX Runtime, and bit by bit, run after run, in each way to run it."""
    plan, constants = _with_weights(load(task.artifact), task)
    inputs, expected = _values(task.io)
    network = _network(plan, options, poison=True)
    first = network(inputs)
    result: dict[str, Any] = {"constants": constants, "precision": plan.options.precision, "outputs": {}}
    if constants != "synthetic" and options.execute:
        precision = plan.options.precision
        result["outputs"] = {name: compare(first[name], value, precision) for name, value in expected.items()}
    errors = []
    for name, entry in result["outputs"].items():
        if not entry["ok"]:
            wrong = entry.get("error") or f"{entry.get('of_tolerance', 0):.3g} times the tolerance"
            wrong = f"{entry['wrong_elements']} elements" if "wrong_elements" in entry else wrong
            errors.append(f"output {name} is wrong: {wrong}")
    repeats, seconds = max(1, options.repeats - 1), options.seconds / 2
    runs, same, error = _repeated(lambda: network(inputs), first, repeats, seconds)
    result["identical_runs"], result["runs"], result["digest"] = same + 1, runs + 1, _digest(first)
    errors += [f"launched again, {error}"] if error else []
    graph = network.capture()
    runs, same, error = _repeated(lambda: graph(inputs), first, repeats, seconds)
    result["identical_graph_runs"], result["graph_runs"] = same, runs
    errors += [f"as a CUDA graph, {error}"] if error else []
    ways = {"dlpack_identical": (_through_torch, "through PyTorch's tensors"),
            "capture_identical": (_beside_a_capture, "while PyTorch records a graph")}  # fmt: skip
    for key, (way, words) in ways.items():
        result[key] = None
        if torch is not None and torch.cuda.is_available() and inputs:
            try:
                _, same, error = _repeated(lambda way=way: way(torch, network, inputs), first, 1, seconds)
            except RuntimeError as problem:  # of PyTorch
                same, error = 0, str(problem)
            result[key] = bool(same)
            errors += [f"{words}, {error}"] if error else []
    result |= _kernels(network) | {"ok": not errors}
    return result | ({"error": "; ".join(errors)[:1500]} if errors else {})


def _check(tasks: list[_Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    torch = None if options.rehearse else _optional("torch")
    for task in tasks:
        begin(task.name)
        yield task.name, _checked(task, options, torch)
        gc.collect()


def _once(tasks: list[_Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    for task in tasks:
        begin(task.name)
        _network(load(task.artifact), options)(_values(task.io)[0])
        yield task.name, {"ok": True}


def _latency(tasks: list[_Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    networks: list[Network] = []
    inputs, _ = _values(tasks[0].io)
    repeats: list[int] = []
    for task in tasks:
        begin(task.name)
        networks.append(_network(load(task.artifact), options))
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


def _stages(tasks: list[_Task], options: argparse.Namespace, begin: _Begin) -> _Results:
    for task in tasks:
        begin(task.name)
        plan, inputs = load(task.artifact), _values(task.io)[0]
        twin = stage_clocks.read_twin(Path(task.clocks))
        if options.rehearse:
            texts = [stage_clocks.clocked(module.text)[0] for module in plan.modules]
            cuda = Cuda(0, _driver(plan, dict(zip(twin.cubins, texts, strict=True)), options))
        else:
            cuda = Cuda(0)
        # A GPU that had nothing to do runs at a fraction of its clock.
        spin = 0.0 if options.rehearse else SPIN_SECONDS
        found = stage_clocks.measure(plan, twin, inputs, cuda, runs=options.repeats, spin=spin)
        clocks = None if options.rehearse else read_clocks()
        yield task.name, {"ok": True, "clocks": clocks, "predicted": stage_clocks.predictions(plan), **found}


_STEPS: dict[str, Callable[[list[_Task], argparse.Namespace, _Begin], _Results]] = {
    "device": _device,
    "barriers": _barriers,
    "shared": _shared,
    "micro": _micro,
    "check": _check,
    "once": _once,
    "latency": _latency,
    "stages": _stages,
    "peers": peers,
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
    add_arguments(parser)
    options = parser.parse_args(argv)
    tasks = [_Task(**entry) for entry in json.loads(options.tasks.read_text())] if options.tasks else []
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
