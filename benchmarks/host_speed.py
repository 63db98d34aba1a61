"""``target="cpu"`` beside ONNX Runtime: ``python -m benchmarks.host_speed [--files FOLDER] [--out FILE.json]``.

The paper's six models and, with ``--files``, ONNX files such as those of ``benchmarks.host_networks``; with one thread
and with all cores, each row in a process of its own, as ``souffle bench`` measures: outputs compared first, then runs
in turn. Goes on where the file stops. ``--calls`` times instead what a call of a network with nearly nothing to compute
costs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import souffle
from benchmarks.record import kept_results, save_results
from souffle import models
from souffle.benchmark.measure import machine_name, measure
from souffle.benchmark.peer import Setting
from souffle.benchmark.registry import peer_named
from souffle.benchmark.report import BenchmarkReport
from souffle.benchmark.threads import on_cores
from souffle.cli.output import format_table
from souffle.parallel import physical_cores
from souffle.reference import onnxruntime_outputs
from souffle.runtime.comparison import random_inputs

_LARGE = ("bert", "resnext", "swin", "vit")
"""Runs of these take a good part of a second: fewer of them are made."""
_RUNS, _FEW_RUNS = 40, 5
_KEY = ("model", "batch", "threads")


def _rows(files: Path | None, batches: list[int], threads: list[int]) -> Iterator[dict[str, Any]]:
    for count in threads:
        for name, batch in product(models.NAMES, batches):
            yield {"model": name, "batch": batch, "threads": count, "file": None}
        for path in sorted(files.glob("*_b*.onnx")) if files is not None else ():
            name, _, batch = path.stem.rpartition("_b")
            yield {"model": name, "batch": int(batch), "threads": count, "file": str(path)}


def _measured(row: dict[str, Any], against: list[str]) -> dict[str, Any]:
    """One row, in this process."""
    model = row["file"] or models.build(row["model"], "paper", batch=row["batch"])
    large = row["model"].startswith(_LARGE)
    precision = "mixed" if row["model"].endswith("fp16") else "fp32"
    with on_cores(row["threads"]):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with tempfile.TemporaryDirectory() as cache:
            begin = time.perf_counter()
            network = souffle.compile(model, target="cpu", cache_dir=cache)
            compiled = time.perf_counter() - begin
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            begin = time.perf_counter()
            souffle.compile(model, target="cpu", cache_dir=cache)
            again = time.perf_counter() - begin
        with tempfile.TemporaryDirectory() as folder:
            network.save(Path(folder) / "network.souffle")
            size = (Path(folder) / "network.souffle").stat().st_size
        values = random_inputs(network.signature.inputs, 0)
        proto = onnx.load(model) if isinstance(model, str) else model
        report = BenchmarkReport(
            row["model"], machine_name("cpu"), Setting("cpu", row["threads"], precision), "V4", "ONNX Runtime", 0, 0
        )
        report.runs, report.warmup = (_FEW_RUNS, 1) if large else (_RUNS, 3)
        measure(
            proto,
            network,
            [peer_named(name) for name in against],
            report,
            inputs=values,
            expected=onnxruntime_outputs(proto, values),
            seconds=300.0,
            prepared=compiled,
        )
    ours = next(each for each in report.rows if each.name == "souffle")
    return {
        "compile_seconds": round(compiled, 1),
        "second_compile_seconds": round(again, 2),
        "file_mb": round(size / 1e6, 1),
        "peak_mb": round((peak - before) / 1e3),
        "ok": bool(ours.passed),
        "error": ours.error,
        "ours_us": ours.times["warm"].median_us,
        "ours_best_us": ours.times["warm"].best_us,
        "peers": {
            each.name: {
                "version": each.version,
                "us": each.times["warm"].median_us,
                "best_us": each.times["warm"].best_us,
                "ratio": 1 / each.ratios["warm"].median,
                "ratio_of_best": ours.times["warm"].best_us / each.times["warm"].best_us,
                "prepare_seconds": round(each.prepare_seconds or 0.0, 2),
            }
            for each in report.rows
            if each.name != "souffle" and "warm" in each.times
        },
        "not_timed": {each.name: each.reason for each in report.rows if "warm" not in each.times},
        "machine": report.machine,
    }


def _calls() -> list[dict[str, Any]]:
    """Microseconds of a call of an empty network and of a product of 16 x 16."""

    def model(node: onnx.NodeProto, shape: list[int], *constants: onnx.TensorProto) -> onnx.ModelProto:
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
        graph = helper.make_graph([node], "small", ends[:1], ends[1:], list(constants))
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    weights = np.random.default_rng(0).random((16, 16)).astype(np.float32)
    networks = {
        "empty": model(helper.make_node("Identity", ["x"], ["y"]), [4]),
        "product": model(helper.make_node("MatMul", ["x", "w"], ["y"]), [1, 16], numpy_helper.from_array(weights, "w")),
    }
    results = []
    for name, proto in networks.items():
        network = souffle.compile(proto, target="cpu")
        x, y = (np.ones(spec.shape, np.float32) for spec in (network.inputs[0], network.outputs[0]))
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        binding.bind_cpu_input("x", x)
        binding.bind_output("y", "cpu")
        bound = network.bind([x], {"y": y})
        ways: dict[str, Callable[[], Any]] = {
            "call": lambda network=network, x=x: network(x),
            "bound": bound,
            "onnxruntime": lambda session=session, x=x: session.run(None, {"x": x}),
            "onnxruntime_binding": lambda session=session, binding=binding: session.run_with_iobinding(binding),
        }
        np.testing.assert_allclose(network(x)["y"], session.run(None, {"x": x})[0], rtol=1e-5)
        best = dict.fromkeys(ways, math.inf)
        for _ in range(50):
            for way, run in ways.items():
                begin = time.perf_counter()
                for _ in range(200):
                    run()
                best[way] = min(best[way], (time.perf_counter() - begin) / 200 * 1e6)
        results.append({"network": name, **{way: round(found, 2) for way, found in best.items()}})
    return results


def _child(row: dict[str, Any], against: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.host_speed", "--row", json.dumps(row), "--against", *against]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"ok": False, "failed": done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]}
    return json.loads(done.stdout.splitlines()[-1])


def _table(results: list[dict[str, Any]]) -> str:
    peers = list(dict.fromkeys(name for one in results for name in one.get("peers", {})))
    columns = [*_KEY, "error", "ours ms", *(f"{name} ms" for name in peers), *(f"of {name}" for name in peers)]
    lines = []
    for one in results:
        if "failed" in one:
            lines.append([*(one[key] for key in _KEY), *one["failed"], *[""] * (len(columns) - 4)])
            continue
        found = [one["peers"].get(name) for name in peers]
        lines.append(
            [
                *(one[key] for key in _KEY),
                f"{one['error']:.1e}",
                f"{one['ours_us'] / 1e3:.3f}",
                *("" if each is None else f"{each['us'] / 1e3:.3f}" for each in found),
                *("" if each is None else f"{each['ratio']:.2f}" for each in found),
            ]
        )
    text = format_table(columns, lines)
    for name in peers:
        ratios = [one["peers"][name]["ratio"] for one in results if name in one.get("peers", {})]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        text += f"\n{name}: {len(ratios)} rows, geometric mean {mean:.2f} of its time, at most {max(ratios):.2f}"
    return text


def main() -> int:
    """Measure what is asked for and print a table; the exit status is 1 if an output differs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="of NAME_bBATCH.onnx")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="of the paper's models")
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, len(physical_cores())}))
    parser.add_argument("--against", nargs="+", default=["ort"], metavar="PEER", help="of souffle bench")
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--out", help="where to write the results as JSON")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(_measured(json.loads(arguments.row), arguments.against)))
        return 0
    about = {"onnxruntime": onnxruntime.__version__, "processors": os.cpu_count()}
    if arguments.calls:
        results = _calls()
        print(format_table(list(results[0]), [list(one.values()) for one in results]))
        if arguments.out:
            save_results(arguments.out, "benchmarks.host_speed", results, **about)
        return 0
    results = kept_results(arguments.out)
    known = {tuple(one[key] for key in _KEY) for one in results if "failed" not in one}
    results = [one for one in results if "failed" not in one]
    for row in _rows(arguments.files, arguments.batches, arguments.threads):
        if tuple(row[key] for key in _KEY) in known or (arguments.models and row["model"] not in arguments.models):
            continue
        print(f"{row['model']}, batch {row['batch']}, {row['threads']} threads ...", file=sys.stderr, flush=True)
        results.append({**{key: row[key] for key in _KEY}, **_child(row, arguments.against)})
        if arguments.out:
            save_results(arguments.out, "benchmarks.host_speed", results, **about)
    print(_table(results))
    return 0 if all(one["ok"] for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
