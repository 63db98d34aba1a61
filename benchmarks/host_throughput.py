"""From 1 to 8 threads of Python that call one network: ``python -m benchmarks.host_throughput [--out FILE.json]``.

Calls a second of ``target="cpu"`` and of ONNX Runtime, each with as many threads for a call as ``--threads`` says
(``intra_op_num_threads``), one after another in turn; and whether all outputs are those of a call that is alone, bit by
bit. ``--tvm-pool`` also runs the same code in TVM's own pool of threads.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime

import souffle
from benchmarks.record import save_results
from souffle import models
from souffle.benchmark.measure import machine_name
from souffle.cli.output import format_table
from souffle.codegen.plan import Plan
from souffle.parallel import usable_cores
from souffle.runtime import host_network
from souffle.runtime.comparison import compare, random_inputs

Outputs = Mapping[str, np.ndarray]
Call = Callable[[], Outputs]


def _session(proto: onnx.ModelProto, threads: int, values: Mapping[str, np.ndarray]) -> Call:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda: dict(zip(names, session.run(names, values), strict=True))


def _in_pool_of_tvm(plan: Plan, threads: int, values: Mapping[str, np.ndarray]) -> Call:
    """The same machine code, as a file without a pool of its own runs."""
    network = host_network.HostNetwork(plan, threads=threads)
    own = host_network.share_pool
    host_network.share_pool = lambda path: False
    try:
        network.open()
    finally:
        host_network.share_pool = own
    return lambda: network(values)


def _calls_in(seconds: float, callers: int, call: Call, expected: Outputs) -> tuple[float, bool]:
    """Calls a second of so many threads, and whether each gave what was expected."""
    counts, equal = [0] * callers, [True] * callers
    start = threading.Barrier(callers + 1)
    end = [0.0]

    def work(number: int) -> None:
        outputs = call()  # whatever a thread sets up for its first call
        start.wait()
        while time.perf_counter() < end[0]:
            outputs = call()
            counts[number] += 1
            # Comparing takes the time of a small network: the last call's alone.
        equal[number] = all(np.array_equal(outputs[name], expected[name], equal_nan=True) for name in expected)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    begin = time.perf_counter()
    end[0] = begin + 3600.0
    start.wait()
    begin = time.perf_counter()
    end[0] = begin + seconds
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin), all(equal)


def _measured(name: str, size: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    proto = models.build(name, size)
    plan = souffle.compile(proto, target="cpu").plan
    network = host_network.HostNetwork(plan)
    values = random_inputs(network.signature.inputs, 0)
    rows = []
    for threads in arguments.threads:
        ours = host_network.HostNetwork(plan, threads=threads)
        ways: dict[str, Call] = {"souffle": lambda ours=ours: ours(values), "ort": _session(proto, threads, values)}
        if arguments.tvm_pool:
            ways["tvm_pool"] = _in_pool_of_tvm(plan, threads, values)
        expected = {way: call() for way, call in ways.items()}
        same = compare(expected["souffle"], expected["ort"], "fp32")
        for callers in arguments.callers:
            best = dict.fromkeys(ways, 0.0)
            equal = dict.fromkeys(ways, True)
            for _ in range(arguments.turns):
                for way, call in ways.items():
                    rate, right = _calls_in(arguments.seconds, callers, call, expected[way])
                    best[way], equal[way] = max(best[way], rate), equal[way] and right
                    time.sleep(0.05)  # threads that poll come to rest
            rows.append(
                {
                    "model": f"{name} ({size})",
                    "threads": threads,
                    "callers": callers,
                    "calls_per_second": {way: round(rate, 2) for way, rate in best.items()},
                    "of_ort": round(best["souffle"] / best["ort"], 3),
                    "equal_bits": equal["souffle"],
                    "error": float(same.error),
                    "ok": bool(same.ok and equal["souffle"]),
                }
            )
            print(*rows[-1].values(), file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """Measure what is asked for and print a table; the exit status is 1 if an output differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mmoe:paper", "efficientnet:paper"], metavar="NAME:SIZE")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="of one call")
    parser.add_argument("--callers", nargs="+", type=int, default=list(range(1, 9)), help="threads of Python")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one run")
    parser.add_argument("--turns", type=int, default=3, help="runs of each, of which the best counts")
    parser.add_argument("--tvm-pool", action="store_true")
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    results = []
    for model in arguments.models:
        name, _, size = model.partition(":")
        results += _measured(name, size or "paper", arguments)
    ways = list(results[0]["calls_per_second"])
    columns = ["model", "threads", "callers", *(f"{way}/s" for way in ways), "of ort", "equal bits"]
    rows = [
        [*(one[key] for key in columns[:3]), *one["calls_per_second"].values(), one["of_ort"], one["equal_bits"]]
        for one in results
    ]
    print(format_table(columns, rows))
    if arguments.out:
        about = {
            "onnxruntime": onnxruntime.__version__,
            "machine": machine_name("cpu"),
            "processors": os.cpu_count(),
            "usable_cores": usable_cores(),
        }
        save_results(arguments.out, "benchmarks.host_throughput", results, **about)
    return 0 if all(one["ok"] for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
