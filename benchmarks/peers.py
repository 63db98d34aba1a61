"""What others make of the same models on the same GPU, timed beside Souffle's levels: PyTorch, and its Inductor.

A step of ``benchmarks.gpu_steps``. Where PyTorch, onnx or the model's own file are not there, it says so, and nothing
fails. A peer has its weights and inputs on the GPU beforehand, counts in fp32 without TF32 as Souffle does, has cuDNN
try its algorithms, and its outputs are compared with ONNX Runtime's before it is timed. Beside mixed precision it has
all its weights and inputs in float16 (``module.half()``), as PyTorch's users have them. Its graph is captured in the
same way for each, so that graphs are compared with graphs: it is what ``mode="reduce-overhead"`` does with Inductor's
code, less the copies of inputs.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.gpu_figures import BATCH, SPIN_SECONDS, compare, over_rounds, read_clocks
from benchmarks.gpu_plan import peer_name
from benchmarks.weights import read_graph

__all__ = ["add_arguments", "peers"]

_MODES = {"eager": None, "inductor": "default", "autotuned": "max-autotune-no-cudagraphs"}
"""Of ``torch.compile``, by the peers' names."""
_PRECISIONS = ("fp32", "tf32", "mixed")
"""That PyTorch has, too, or something like it."""
_Run = Callable[[], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the step, as ``benchmarks.gpu_plan`` gives them."""
    parser.add_argument("--peer", choices=_MODES)
    parser.add_argument("--values", help="the file of inputs and expected outputs, in the artifacts' folder")
    parser.add_argument("--graph", help="the file of the model, there too")
    parser.add_argument("--precision")


def peers(tasks: object, options: argparse.Namespace, begin: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
    """Compare and time one peer on one model; without a GPU, when rehearsing, on the CPU and a single time."""
    name = peer_name(options.values, options.precision, options.peer)
    begin(name)
    lacking = _lacking(options)
    if lacking:
        yield name, {"ok": False, "status": "missing", "error": lacking}
        return
    model = read_graph(options.input / options.graph)
    with np.load(options.input / options.values, allow_pickle=False) as file:
        values = {key: file[key] for key in file.files}
    yield name, measure(model, values, options)


def _lacking(options: argparse.Namespace) -> str:
    """What is not there that the step needs, in words; empty where all is."""
    if options.precision not in _PRECISIONS:
        return f"peers are compared in {', '.join(_PRECISIONS)} alone, and not in {options.precision} precision"
    if not options.graph or not (options.input / options.graph).exists():
        return "the artifacts were built without the model's own file: build them again"
    for package in ("torch", "onnx"):
        try:
            module = importlib.import_module(package)
        except ImportError:
            return f"{package} is not installed here"
        if package == "torch" and not options.rehearse and not module.cuda.is_available():
            return "PyTorch finds no GPU here"
    return ""


def measure(model: Any, values: dict[str, np.ndarray], options: argparse.Namespace) -> dict[str, Any]:
    """Compare and time one peer.

    Parameters
    ----------
    model : onnx.ModelProto
    values
        ``input/NAME`` and ``output/NAME``.
    options
        ``peer``, ``rehearse``, ``repeats``, ``warmup``, ``rounds`` and ``seconds`` of the step.

    Returns
    -------
    dict
        ``ok``; ``outputs`` and ``graph_outputs`` as ``compare`` gives them; ``launch`` (calls), ``graph`` and
        ``graphs`` (in a row) in µs as in a latency of Souffle's; ``first_call_seconds``, which is Inductor's
        compilation, less what its cache had; what else is to be known about it.
    """
    # Only here: it takes seconds to import, and loads libraries that the other steps do without.
    torch = importlib.import_module("torch")
    to_torch = importlib.import_module("souffle.benchmark.torch_graph").to_torch
    captured = importlib.import_module("souffle.benchmark.torch_peer").captured
    device = "cpu" if options.rehearse else "cuda"
    rounded = options.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = rounded
    torch.backends.cudnn.benchmark = True
    module = to_torch(model, device)
    constants = {item.name for item in model.graph.initializer}
    names = [item.name for item in model.graph.input if item.name not in constants]
    inputs = [torch.from_numpy(values[f"input/{name}"]).to(device) for name in names]
    halves = options.precision == "mixed"
    if halves:
        module = module.half()
        inputs = [value.half() if value.is_floating_point() else value for value in inputs]
    if options.peer != "eager":
        # Inductor's code is for the host that it is made on: a rehearsal only shows that all is one graph.
        how = {"backend": "eager"} if options.rehearse else {"mode": _MODES[options.peer]}
        module = torch.compile(module, fullgraph=True, **how)
    result: dict[str, Any] = {"ok": True, "peer": options.peer, "torch": torch.__version__, "device": device,
                              "tf32": rounded, "compiled": _MODES[options.peer]}  # fmt: skip

    def call() -> Any:
        return module(*inputs)

    def compared(outputs: Any) -> dict[str, Any]:
        found = {
            item.name: (value.float() if halves else value).cpu().numpy()
            for item, value in zip(model.graph.output, outputs, strict=True)
        }
        return {name: compare(value, values[f"output/{name}"], options.precision) for name, value in found.items()}

    with torch.inference_mode():
        began = time.monotonic()
        result["outputs"] = compared(call())
        result["first_call_seconds"] = round(time.monotonic() - began, 2)
        runs = {"launch": (call, 1)}
        if not options.rehearse and _all_right(result["outputs"]):
            try:
                graph, outputs = captured(call)
            except RuntimeError as error:  # of PyTorch; calls are timed nevertheless
                result |= {"ok": False, "error": f"it cannot be captured as a CUDA graph: {error}"[:1500]}
            else:
                graph.replay()
                result["graph_outputs"] = compared(outputs)
                runs |= {"graph": (graph.replay, 1), "graphs": (graph.replay, BATCH)}
        for key in ("outputs", "graph_outputs"):
            if not _all_right(result.get(key, {})):
                return result | {"ok": False, "error": f"{key} are wrong: {result[key]}"[:1500]}
        return result | _timed(torch, runs, options)


def _all_right(outputs: dict[str, Any]) -> bool:
    return all(item["ok"] for item in outputs.values())


def _timed(torch: Any, runs: dict[str, tuple[_Run, int]], options: argparse.Namespace) -> dict[str, Any]:
    """Each way to run in turn, in rounds that go forwards and backwards."""
    sample = _on_the_cpu if options.rehearse else _by_events
    idle = None if options.rehearse else read_clocks()
    end = time.monotonic() + (0.0 if options.rehearse else SPIN_SECONDS)
    while time.monotonic() < end:
        sample(torch, runs["launch"][0], 20, 0, 1)
    spun = None if options.rehearse else read_clocks()
    samples: dict[str, list[dict[str, Any]]] = {way: [] for way in runs}
    once = max(1.0, statistics.median(sample(torch, runs["launch"][0], 3, 0, 1)))
    share = int(options.seconds * 1e6 / (len(runs) * options.rounds) / once) - options.warmup
    repeats = 1 if options.rehearse else max(3, min(options.repeats, share))
    for number in range(options.rounds):
        for way, (run, batch) in list(runs.items())[:: -1 if number % 2 else 1]:
            warmup = 1 if batch > 1 else min(options.warmup, repeats)
            found = sorted(sample(torch, run, max(1, repeats // batch), warmup, batch))
            figures = {"median_us": statistics.median(found), "min_us": found[0]}
            samples[way].append(figures | {"p90_us": found[min(len(found) - 1, int(0.9 * len(found)))]})
    after = None if options.rehearse else read_clocks()
    figures = {way: over_rounds(rounds) for way, rounds in samples.items()}
    about = {"repeats": repeats, "rounds": options.rounds, "batch": BATCH}
    return about | {"clocks_idle_spun_after": [idle, spun, after]} | figures


def _by_events(torch: Any, run: _Run, repeats: int, warmup: int, batch: int) -> list[float]:
    """Microseconds on the GPU of each run, the mean of ``batch`` in a row, between two CUDA events."""
    for _ in range(warmup * batch):
        run()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        for _ in range(batch):
            run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 / batch for start, end in pairs]


def _on_the_cpu(torch: Any, run: _Run, repeats: int, warmup: int, batch: int) -> list[float]:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e6)
    return times
