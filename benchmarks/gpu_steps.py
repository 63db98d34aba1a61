"""The steps that ``benchmarks.gpu_host`` runs on a GPU host, each a process of its own that writes one JSON file.

Needs Souffle's runtime only: NumPy and cuda-bindings, nvcc for the ``micro`` step, and PyTorch where it is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.codegen.plan import CudaModule, Plan
from souffle.errors import CompilerNotFoundError, SouffleError
from souffle.runtime import DeviceArray, Network, describe, load
from souffle.runtime.cuda import Cuda, PreparedLaunch

try:
    import torch
except ImportError:
    torch = None

__all__ = ["compare", "main"]

_MICRO = Path(__file__).with_name("microbench.cu")
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
"""Against ONNX Runtime, in fp32."""
_MIXED = 2e-2
"""Of the output's largest magnitude, where some of the arithmetic is in fp16."""


def compare(found: np.ndarray, expected: np.ndarray, precision: str) -> dict[str, Any]:
    """Whether an output is within its precision's tolerance, and the largest error, absolute and over the tolerance."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return {"ok": False, "error": f"{found.dtype} {found.shape} and not {expected.dtype} {expected.shape}"}
    if expected.dtype.kind in "biu":
        wrong = int(np.count_nonzero(found != expected))
        return {"ok": wrong == 0, "wrong_elements": wrong}
    if not expected.size:
        return {"ok": True, "max_abs": 0.0, "of_tolerance": 0.0}
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    allowed = _ABSOLUTE + _RELATIVE * np.abs(expected)
    if precision != "fp32":
        allowed = np.full(expected.shape, max(_ABSOLUTE, _MIXED * np.abs(expected).max()))
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(found - expected))
    if not np.isfinite(difference).all():
        return {"ok": False, "error": f"{int((~np.isfinite(difference)).sum())} elements are not finite"}
    of_tolerance = float((difference / allowed).max())
    return {"ok": of_tolerance <= 1.0, "max_abs": float(difference.max()), "of_tolerance": of_tolerance}


def _rehearsed(plan: Plan) -> Plan:
    """A plan that was compiled without nvcc, with something in the place of machine code."""
    return replace(
        plan,
        modules=tuple(
            CudaModule(module.text, module.cubin or hashlib.sha256(module.text.encode()).digest())
            for module in plan.modules
        ),
    )


def _networks(paths: Iterable[str], rehearse: bool, execute: bool, **options: Any) -> list[Network]:
    plans = [load(path) for path in paths]
    if not rehearse:
        return [Network(plan, device="cuda", **options) for plan in plans]
    plans = [_rehearsed(plan) for plan in plans]
    texts = {module.cubin: module.text for plan in plans for module in plan.modules}
    major, minor = int(plans[0].arch[3:].rstrip("af")[:-1]), int(plans[0].arch.rstrip("af")[-1])
    driver = RehearsalDriver(texts, capability=(major, minor), execute=execute)
    return [Network(plan, device="cuda", driver=driver, **options) for plan in plans]


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


def _same_bits(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(_host(first[name]).tobytes() == _host(second[name]).tobytes() for name in first)


# steps


def _device(options: argparse.Namespace) -> dict[str, Any]:
    driver = RehearsalDriver({}) if options.rehearse else None
    cuda = Cuda(0, driver)
    version = None
    if nvcc := shutil.which("nvcc"):
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[
            -1
        ]
    smi = None
    if (found := shutil.which("nvidia-smi")) and not options.rehearse:
        query = [found, "--query-gpu=driver_version", "--format=csv,noheader"]
        smi = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "name": cuda.name,
        "arch": cuda.arch,
        "multiprocessors": cuda.multiprocessors,
        "max_shared_bytes": cuda.max_shared_bytes,
        "cuda_of_driver": cuda.driver_version,
        "driver": smi,
        "nvcc": version,
        "python": platform.python_version(),
        "torch": torch.__version__ if torch is not None else None,
    }


def _through_torch(network: Network, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = {name: torch.from_numpy(value.copy()).cuda() for name, value in inputs.items()}
    outputs = {name: torch.from_dlpack(value) for name, value in network(tensors).items()}
    return {name: value.cpu().numpy() for name, value in outputs.items()}


def _check(options: argparse.Namespace) -> dict[str, Any]:
    info = describe(options.artifact)
    inputs, expected = _values(options.io)
    (network,) = _networks([options.artifact], options.rehearse, options.execute, poison=True)
    first = network(inputs)
    result: dict[str, Any] = {"constants": info.constants, "precision": info.precision, "outputs": {}}
    comparable = info.constants == "stored" and options.execute
    if comparable:
        result["outputs"] = {name: compare(first[name], value, info.precision) for name, value in expected.items()}
    runs = sum(_same_bits(first, network(inputs)) for _ in range(options.repeats - 1))
    result["identical_runs"], result["runs"] = runs + 1, options.repeats
    result["graph_identical"] = _same_bits(first, network.capture()(inputs))
    result["dlpack_identical"] = None
    if torch is not None and torch.cuda.is_available() and inputs and not options.rehearse:
        result["dlpack_identical"] = _same_bits(first, _through_torch(network, inputs))
    result["kernels"] = [
        {"name": kernel.name, "grid": kernel.grid[0], "block": kernel.block[0], "grid_syncs": kernel.grid_syncs,
         "registers": kernel.registers, "shared_bytes": kernel.shared_bytes, "launches": kernel.launches}
        for kernel in network.kernels
    ]  # fmt: skip
    result["ok"] = (
        all(entry["ok"] for entry in result["outputs"].values())
        and runs + 1 == options.repeats
        and result["graph_identical"]
        and result["dlpack_identical"] is not False
    )
    return result


def _once(options: argparse.Namespace) -> dict[str, Any]:
    inputs, _ = _values(options.io)
    (network,) = _networks([options.artifact], options.rehearse, options.execute)
    network(inputs)
    return {"ok": True}


def _latency(options: argparse.Namespace) -> dict[str, Any]:
    cases = [case.partition("=") for case in options.case]
    networks = _networks([path for _, _, path in cases], options.rehearse, options.execute)
    inputs, _ = _values(options.io)
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        # Every other round goes backwards, so that a drift of the clock favours no level.
        order = list(zip(cases, networks, strict=True))[:: -1 if number % 2 else 1]
        for (level, _, _), network in order:
            for mode in ("launch", "graph"):
                found = network.time(inputs, repeats=options.repeats, warmup=options.warmup, mode=mode)
                samples.setdefault((level, mode), []).append(found)
    levels: dict[str, Any] = {}
    for (level, _, path), network in zip(cases, networks, strict=True):
        entry: dict[str, Any] = {
            "constants": describe(path).constants,
            "launches": len(network.plan.launches),
            "grid_syncs": sum(kernel.grid_syncs * kernel.launches for kernel in network.kernels),
        }
        for mode in ("launch", "graph"):
            rounds = samples[level, mode]
            entry[mode] = {
                "median_us": statistics.median(item["median_us"] for item in rounds),
                "min_us": min(item["min_us"] for item in rounds),
                "p90_us": statistics.median(item["p90_us"] for item in rounds),
                "round_medians_us": [item["median_us"] for item in rounds],
            }
        levels[level] = entry
    return {"ok": True, "levels": levels, "repeats": options.repeats, "rounds": options.rounds}


# costs of the machine itself


class _Clock:
    """Median device time of something that is queued on a stream."""

    def __init__(self, cuda: Cuda, repeats: int) -> None:
        self.cuda, self.stream = cuda, cuda.stream()
        self._repeats = repeats

    def microseconds(self, queue: Callable[[], None]) -> float:
        cuda, samples = self.cuda, []
        first, last = cuda.event(timing=True), cuda.event(timing=True)
        for index in range(self._repeats + 3):
            cuda.record(first, self.stream)
            queue()
            cuda.record(last, self.stream)
            cuda.synchronize(self.stream)
            if index >= 3:
                samples.append(cuda.microseconds(first, last))
        return statistics.median(samples)

    def launches(self, prepared: PreparedLaunch, count: int) -> Callable[[], None]:
        def queue() -> None:
            for _ in range(count):
                self.cuda.launch(prepared, self.stream)

        return queue

    def graph(self, prepared: PreparedLaunch, count: int) -> Callable[[], None]:
        self.cuda.begin_capture(self.stream)
        self.launches(prepared, count)()
        graph = self.cuda.end_capture(self.stream)
        return lambda: self.cuda.launch_graph(graph, self.stream)


def _machine_code(arch: str) -> bytes:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise CompilerNotFoundError("nvcc is not on PATH; the micro step compiles its kernels with it")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "micro.cubin"
        subprocess.run([nvcc, "-cubin", f"-arch={arch}", "-O3", "-o", str(cubin), str(_MICRO)], check=True)
        return cubin.read_bytes()


def _micro(options: argparse.Namespace) -> dict[str, Any]:
    text = _MICRO.read_text()
    small = options.rehearse
    cuda = Cuda(0, RehearsalDriver({b"rehearsal": text}) if small else None)
    module = cuda.load_module(b"rehearsal" if small else _machine_code(cuda.arch))
    clock = _Clock(cuda, 2 if small else options.repeats)
    done = cuda.alloc(256)
    count, nbytes = (2, 1 << 16) if small else (200, 1 << 30)

    sync = cuda.function(module, "micro_sync")
    grid_sync = []
    for threads in (256, 1024):
        resident = cuda.resident_blocks(sync, threads, 0)
        for grid in sorted({min(cuda.multiprocessors, resident), resident}):
            times = []
            for syncs in (count, 2 * count):
                prepared = cuda.prepare(
                    "micro_sync", sync, grid=grid, threads=threads, pointers=[done], integers=[syncs], cooperative=True
                )
                times.append(clock.microseconds(clock.launches(prepared, 1)))
            grid_sync.append(
                {"blocks": grid, "threads": threads, "us": (times[1] - times[0]) / count, "runs_us": times}
            )

    empty = cuda.prepare("micro_empty", cuda.function(module, "micro_empty"), grid=1, threads=32, pointers=[done])
    launch = [clock.microseconds(clock.launches(empty, number)) for number in (count, 2 * count)]
    node = [clock.microseconds(clock.graph(empty, number)) for number in (count, 2 * count)]
    alone = clock.microseconds(clock.launches(empty, 1))

    source, target = cuda.alloc(nbytes), cuda.alloc(nbytes)
    cuda.fill(source, 0x3C, nbytes, clock.stream)
    driver_copy = clock.microseconds(lambda: cuda.copy(target, source, nbytes, clock.stream))
    vectors = nbytes // 16
    grid = min(vectors // 256, cuda.multiprocessors * 8)
    copy = cuda.prepare(
        "micro_copy", cuda.function(module, "micro_copy"), grid=grid, threads=256, pointers=[target, source],
        integers=[vectors],
    )  # fmt: skip
    kernel_copy = clock.microseconds(clock.launches(copy, 1))
    copied = np.empty(min(nbytes, 1 << 20), np.uint8)
    cuda.to_host(copied, target, clock.stream)
    cuda.synchronize(clock.stream)
    return {
        "ok": bool((copied == 0x3C).all()),
        "grid_sync": grid_sync,
        "launch_us": (launch[1] - launch[0]) / count,
        "graph_node_us": (node[1] - node[0]) / count,
        "one_empty_launch_us": alone,
        "copy_bytes": nbytes,
        "driver_copy_gb_s": 2 * nbytes / driver_copy / 1e3,
        "kernel_copy_gb_s": 2 * nbytes / kernel_copy / 1e3,
    }


_STEPS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "device": _device,
    "micro": _micro,
    "check": _check,
    "once": _once,
    "latency": _latency,
}


def main(argv: list[str] | None = None) -> int:
    """Run one step; its result, or its error, goes to the file of ``--json``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_steps", description=__doc__)
    parser.add_argument("step", choices=_STEPS)
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--artifact")
    parser.add_argument("--io")
    parser.add_argument("--case", action="append", default=[], metavar="LEVEL=FILE")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rehearse", action="store_true", help="no GPU: record the driver's calls")
    parser.add_argument("--no-execute", dest="execute", action="store_false", help="when rehearsing, run no kernel")
    options = parser.parse_args(argv)
    try:
        result = _STEPS[options.step](options)
    except (SouffleError, OSError, subprocess.SubprocessError) as error:
        result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    options.json.write_text(json.dumps(result, indent=1))
    return 0 if result.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
