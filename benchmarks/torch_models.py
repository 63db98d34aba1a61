"""Networks of PyTorch by ``torch.compile(backend="souffle")`` and ``souffle.from_torch``, beside eager and Inductor.

``python -m benchmarks.torch_models [--models resnet18 ...] [--cores 1] [--no-inductor] [--out FILE.json]``

On the CPU, with random weights of a seed. Outputs are compared with eager's first; then all ways run in turn, in one
process with the same cores, each round in another order. With one core the processor's time is what counts, which other
work on the machine hardly changes; wall-clock times stand beside it. Goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import souffle
from benchmarks.record import kept_results, save_results
from souffle.cli.output import format_table

try:
    import torchvision
    import transformers
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'souffle-dl[torch]' torchvision transformers") from error

TOLERANCE = 1e-4
"""Of the largest magnitude in eager's output: what another order of summation makes of fp32 through a network."""
_TOKENS = 128
_WAYS = ("eager", "inductor", "souffle", "from_torch", "bound")


def _of_torchvision(name: str) -> Callable[[], tuple[torch.nn.Module, torch.Tensor]]:
    return lambda: (torchvision.models.get_model(name, weights=None), torch.randn(1, 3, 224, 224))


def _gpt2() -> tuple[torch.nn.Module, torch.Tensor]:
    config = transformers.GPT2Config(use_cache=False)
    return transformers.GPT2LMHeadModel(config), torch.randint(0, config.vocab_size, (1, _TOKENS))


def _vit() -> tuple[torch.nn.Module, torch.Tensor]:
    module, x = _of_torchvision("vit_b_16")()
    # Before training the head is zero, and so would be all that is compared.
    torch.nn.init.normal_(module.heads.head.weight, std=0.02)
    return module, x


_NETWORKS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {
    "resnet18": _of_torchvision("resnet18"),
    "mobilenet_v3_large": _of_torchvision("mobilenet_v3_large"),
    "vit_b_16": _vit,
    "gpt2": _gpt2,
}


def _tensor(found: Any) -> np.ndarray:
    """The output that is compared: the only one, or the logits."""
    return np.asarray(found if isinstance(found, (torch.Tensor, np.ndarray)) else found["logits"])


def _timed(run: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """Seconds by the clock and of the processor, and what was computed."""
    start, began = time.perf_counter(), time.process_time()
    found = run()
    return (time.perf_counter() - start, time.process_time() - began), found


def _use(cores: int | None) -> None:
    """Keep to so many cores, as Souffle, PyTorch and Inductor then do."""
    if cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    torch.set_num_threads(len(os.sched_getaffinity(0)))


def measure(name: str, repeats: int, inductor: bool) -> dict[str, Any]:
    """Compile, compare and time one network."""
    torch.manual_seed(0)
    module, x = _NETWORKS[name]()
    module.eval()
    souffle.torch.reset()
    by_souffle = torch.compile(module, backend="souffle", options={"target": "cpu"})
    by_inductor = torch.compile(module)
    ways = [way for way in _WAYS if inductor or way != "inductor"]
    expected = _tensor(module(x))
    runs: dict[str, Callable[[], Any]] = {
        "eager": lambda: module(x),
        "inductor": lambda: by_inductor(x),
        "souffle": lambda: by_souffle(x),
    }
    seconds = {}
    for way in ("souffle", "inductor") if inductor else ("souffle",):
        seconds[way], _ = _timed(runs[way])
    seconds["from_torch"], network = _timed(lambda: souffle.from_torch(module, x, target="cpu"))
    array = x.numpy()
    bound = network.bind([array])
    (output,) = (spec.name for spec in network.outputs)
    runs["from_torch"] = lambda: network(array)[output]
    runs["bound"] = lambda: bound()[output]
    errors = {}
    for way in ways[1:]:
        found = _tensor(runs[way]())
        errors[way] = float(np.abs(found - expected).max() / np.abs(expected).max())
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(repeats):  # in turn, since the machine may be noisy
        shift = number % len(ways)
        for way in (*ways[shift:], *ways[:shift]):
            times[way].append(_timed(runs[way])[0])
    wall, cpu = ({way: [each[kind] for each in found] for way, found in times.items()} for kind in (0, 1))
    counted = cpu if len(os.sched_getaffinity(0)) == 1 else wall
    medians = {way: statistics.median(found) for way, found in counted.items()}
    return {
        "model": name,
        "ok": all(errors[way] <= TOLERANCE for way in ("souffle", "from_torch", "bound")),
        "errors": errors,
        "breaks": [str(found) for found in souffle.torch.breaks()],
        "launches": len(network.plan.launches),
        "cores": len(os.sched_getaffinity(0)),
        "compile_s": {way: [round(each, 1) for each in found] for way, found in seconds.items()},
        "wall_ms": {way: _quartiles(found) for way, found in wall.items()},
        "cpu_ms": {way: _quartiles(found) for way, found in cpu.items()},
        "of_eager": {way: round(medians[way] / medians["eager"], 2) for way in ways[1:]},
        "of_inductor": round(medians["souffle"] / medians["inductor"], 2) if inductor else None,
    }


def _quartiles(seconds: list[float]) -> list[float]:
    """The first, the median and the third, in milliseconds."""
    return [round(found * 1e3, 2) for found in statistics.quantiles(seconds, n=4)]


def main() -> int:
    """Measure all networks asked for and print a table; the exit status is 1 if an output differs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(_NETWORKS), choices=_NETWORKS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-inductor", action="store_true", help="leave Inductor out, which compiles for minutes")
    parser.add_argument("--cores", type=int, help="how many to keep to; all that there are without")
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    _use(arguments.cores)
    results = kept_results(arguments.out)
    for name in arguments.models:
        if any(row["model"] == name for row in results):
            continue
        with torch.no_grad():
            results.append(measure(name, arguments.repeats, not arguments.no_inductor))
        if arguments.out:
            save_results(
                arguments.out,
                "benchmarks.torch_models",
                results,
                torch=torch.__version__,
                tolerance=TOLERANCE,
            )
        print(results[-1], file=sys.stderr, flush=True)
    shown = "cpu_ms" if arguments.cores == 1 else "wall_ms"
    head = ["model", "error", "compile s", *(f"{way} ms" for way in _WAYS), "of eager", "of Inductor"]
    rows = [
        [
            row["model"],
            f"{max(row['errors'][way] for way in ('souffle', 'from_torch', 'bound')):.1e}",
            " / ".join(str(seconds[shown == "cpu_ms"]) for seconds in row["compile_s"].values()),
            *("{1} ({0}-{2})".format(*row[shown][way]) if way in row[shown] else "" for way in _WAYS),
            str(row["of_eager"]["souffle"]),
            str(row["of_inductor"] or ""),
        ]
        for row in results
    ]
    print(format_table(head, rows))
    return 0 if all(row["ok"] and not row["breaks"] for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
