"""Quantized networks against ONNX Runtime, which quantized them: kernels, instructions on 8-bit integers, differences.

``python -m benchmarks.quantized [--networks resnet50 ...] [--targets cpu cuda] [--level V4] [--disable integers]
[--whole] [--speed 1 2] [--out FILE.json]``. On the CPU the networks have their whole size; CUDA text runs on the CPU
device, which bears a smaller image or fewer tokens (``--whole`` compiles and proves the whole size without a run). A
quantum is the scale with which the network's output was quantized; of an output that was not, the scale that quantizing
it to 8 bits would take. ``ONNX Runtime by itself`` is how far it is from itself without its graph optimizations, and at
most from itself at inputs each number of which is the next one up or down: what a number in floating point, rounded in
another way, comes to where the next layer quantizes it. ``--speed`` times calls of the CPU target with so many threads
beside ONNX Runtime's, in turn.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

import souffle
from benchmarks.quantized_networks import NETWORKS, QuantizedNetwork, random_image
from benchmarks.record import save_results
from souffle.benchmark.host_way import HostWay, settle
from souffle.benchmark.peer import Setting
from souffle.benchmark.registry import peer_named
from souffle.benchmark.rounds import figures_of, ratio_of, run_in_turn
from souffle.benchmark.threads import on_cores
from souffle.cli.output import format_table

__all__ = ["differences", "instructions", "measured", "nearby_quanta", "quantum_of", "runtime_outputs", "timed"]

_PRODUCT = re.compile(r"\bsouffle_add_byte_product_\w+\(|\bsouffle_add_dot_\w+\(")
_ROUNDS = 30
_NEARBY = 8
"""Inputs that are tried around one."""
_MACHINE = ("vpdpbusd", "vpdpwssd", "vpmaddwd")


def instructions(plan: Any) -> dict[str, int]:
    """How often the text of a network calls each instruction on 8-bit integers; of machine code, if it can be read."""
    if str(plan.options.arch).startswith("llvm"):
        return _in_machine_code(plan)
    counts: Counter[str] = Counter()
    for module in plan.modules:
        calls = Counter(match.rstrip("(") for match in _PRODUCT.findall(module.text))
        # One of each is the function itself.
        counts += Counter({name: count - 1 for name, count in calls.items()})
    kinds = {"mma.m16n8k32": "souffle_add_byte_product", "dp4a": "souffle_add_dot"}
    return {kind: sum(n for name, n in counts.items() if name.startswith(own)) for kind, own in kinds.items()}


def _in_machine_code(plan: Any) -> dict[str, int]:
    if shutil.which("objdump") is None:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(plan.modules[0].cubin)
        file.flush()
        text = subprocess.run(["objdump", "-d", file.name], capture_output=True, text=True, check=True).stdout
    return {name: len(re.findall(rf"\b{name}\b", text)) for name in _MACHINE}


def quantum_of(model: onnx.ModelProto, output: str, value: np.ndarray) -> float:
    """The scale of an output of the network, or that which 8 bits would take."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    maker = next((node for node in model.graph.node if output in node.output), None)
    if maker is not None and maker.op_type == "DequantizeLinear" and maker.input[1] in constants:
        return float(constants[maker.input[1]].max())
    return float(max(value.max(), 0) - min(value.min(), 0)) / 255


def differences(
    model: onnx.ModelProto, found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]
) -> tuple[float, int, int]:
    """The largest difference in quanta, how many elements differ by a thousandth of one and more, and of how many."""
    largest, differing, count = 0.0, 0, 0
    for name, value in wanted.items():
        apart = np.abs(np.asarray(found[name], np.float64) - value) / quantum_of(model, name, value)
        largest = max(largest, float(apart.max()))
        differing += int((apart > 1e-3).sum())
        count += value.size
    return largest, differing, count


def runtime_outputs(
    model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], *, plain: bool = False
) -> dict[str, np.ndarray]:
    """By ONNX Runtime; `plain` without its graph optimizations."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if plain:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, dict(inputs)), strict=True))


def nearby_quanta(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> float:
    """How far ONNX Runtime's outputs move, at most, in quanta, where each number goes to the next one up or down."""
    rng, farthest = np.random.default_rng(0), 0.0
    for _ in range(_NEARBY):
        moved = {
            name: np.nextafter(value, rng.choice([-np.inf, np.inf], value.shape).astype(value.dtype))
            if value.dtype.kind == "f"
            else value
            for name, value in inputs.items()
        }
        farthest = max(farthest, differences(model, runtime_outputs(model, moved), wanted)[0])
    return farthest


def measured(
    network: QuantizedNetwork, target: str, *, level: str = "V4", disable: Sequence[str] = (), whole: bool = False
) -> dict[str, Any]:
    """One network compiled for one target, run, and compared.

    Parameters
    ----------
    network : QuantizedNetwork
    target : str
        ``"cpu"`` or ``"cuda"``.
    level : str
    disable : sequence of str
    whole : bool
        CUDA text of the whole size, which is not run.
    """
    on_host = target == "cpu"
    full = on_host or whole
    model = network.whole() if full else network.small()
    options: dict[str, Any] = {} if on_host else {"arch": "sm_90", "cubin": False, "device": "cpu"}
    start = time.perf_counter()
    net = souffle.compile(model, target=target, level=level, disable=disable, **options)
    compiled = time.perf_counter() - start
    plan = net.plan
    result: dict[str, Any] = {
        "network": network.name,
        "form": network.form,
        "target": target,
        "size": network.sizes[0 if full else 1],
        "level": level,
        "disable": list(disable),
        "kernels": len(plan.kernels),
        "launches": len(plan.launches),
        "compile_seconds": round(compiled, 1),
    }
    result["instructions"] = instructions(plan)
    if not on_host:
        result["certificate"] = plan.certificate.verdict
    if on_host or not whole:
        inputs = random_image(model, 7)
        start = time.perf_counter()
        found = net(inputs)
        result["run_seconds"] = round(time.perf_counter() - start, 2)
        wanted = runtime_outputs(model, inputs)
        quanta, differing, count = differences(model, found, wanted)
        own, own_differing, _ = differences(model, runtime_outputs(model, inputs, plain=True), wanted)
        result |= {"largest_quanta": quanta, "differing": differing, "elements": count}
        result |= {"onnxruntime_quanta": own, "onnxruntime_differing": own_differing}
        result["onnxruntime_nearby_quanta"] = nearby_quanta(model, inputs, wanted)
    return result


def timed(network: QuantizedNetwork, threads: int) -> dict[str, Any]:
    """Calls of one whole network beside ONNX Runtime's, in turn, on as many cores as threads."""
    model = network.whole()
    inputs = random_image(model, 7)
    with on_cores(threads):
        net = souffle.compile(model, target="cpu")
        setting = Setting("cpu", threads, "fp32")
        ways = [HostWay(lambda: net(inputs), dict), *peer_named("ort").prepare(model, inputs, setting)]
        largest, *_ = differences(model, ways[0].outputs(), ways[1].outputs())
        ours: list[float] = []
        theirs: list[float] = []
        run_in_turn(ways, runs=_ROUNDS, warmup=3, cold=False, samples=[ours, theirs], rest=settle)
    return {
        "network": network.name,
        "form": network.form,
        "threads": threads,
        "largest_quanta": largest,
        "packed": sum(buffer.kind == "constant" and "in panels" in buffer.name for buffer in net.plan.buffers),
        "ours_us": figures_of(ours).median_us,
        "ours_best_us": min(ours),
        "ort_us": figures_of(theirs).median_us,
        "ort_best_us": min(theirs),
        "ratio": 1 / ratio_of(theirs, ours).median,
    }


def _row(result: Mapping[str, Any]) -> list[str]:
    own = result.get("instructions", {})
    compared = "largest_quanta" in result
    return [
        result["network"],
        result["target"],
        result["size"],
        str(result["kernels"]),
        str(result["launches"]),
        ", ".join(f"{n} {kind}" for kind, n in own.items() if n),
        result.get("certificate", ""),
        f"{result['largest_quanta']:.2g}" if compared else "",
        f"{result['differing']} of {result['elements']}" if compared else "",
        f"{result['onnxruntime_quanta']:.2g}, {result['onnxruntime_nearby_quanta']:.2g}" if compared else "",
        f"{result['compile_seconds']}",
        f"{result.get('run_seconds', '')}",
    ]


def main() -> None:
    """Print the table, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--targets", nargs="+", choices=("cpu", "cuda"), default=["cpu", "cuda"])
    parser.add_argument("--level", default="V4")
    parser.add_argument("--disable", action="append", default=[])
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--speed", type=int, nargs="+", metavar="THREADS")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    results = []
    if arguments.speed:
        for threads, name in itertools.product(arguments.speed, arguments.networks):
            results.append(timed(NETWORKS[name], threads))
            print(results[-1], flush=True)
            if arguments.out:
                save_results(arguments.out, "benchmarks.quantized", results)
        return
    for name in arguments.networks:
        for target in arguments.targets:
            result = measured(
                NETWORKS[name], target, level=arguments.level, disable=arguments.disable, whole=arguments.whole
            )
            results.append(result)
            print(*_row(result), sep="  ", flush=True)
            if arguments.out:
                save_results(arguments.out, "benchmarks.quantized", results)
    header = ["network", "target", "size", "kernels", "launches", "on 8-bit integers", "certificate", "largest quanta"]
    header += ["differing", "ONNX Runtime by itself", "compile s", "run s"]
    print(format_table(header, [_row(r) for r in results]))


if __name__ == "__main__":
    main()
