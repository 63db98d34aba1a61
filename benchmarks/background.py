"""Seconds to the first answer and to the change-over of a network compiled in the background, beside plain compiling.

``python -m benchmarks.background bert --size paper``. Each way runs in a process of its own, with an empty cache, one
after another, and again in the other order: ratios of one run say something on a machine with other work, seconds less.
``thread`` is what the background is not: the same, with the compiler in a thread of the process that calls. Without a
GPU the CUDA networks of ``--device cuda`` are compiled and not called, and nothing is compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time

import souffle
from souffle import models
from souffle.errors import NoGpuError

_WAYS = {"plain": False, "background": True, "LLVM first": "cpu"}
_THREAD = "thread"


def _in_a_thread(options: argparse.Namespace) -> dict[str, object]:
    """Calls of LLVM code, while this process compiles."""
    model = models.build(options.model, options.size)
    inputs = models.random_inputs(model)
    net = souffle.compile(model, target="cpu", level="V0")
    net(inputs)
    names = ("level", "target", "arch", "precision", "device", "cubin", "verify")
    chosen = {name: getattr(options, name) for name in names}
    with tempfile.TemporaryDirectory() as cache:
        thread = threading.Thread(target=souffle.compile, args=(model,), kwargs={**chosen, "cache_dir": cache})
        began = time.monotonic()
        thread.start()
        calls: list[float] = []
        while thread.is_alive():
            start = time.monotonic()
            net(inputs)
            calls.append(time.monotonic() - start)
        seconds = time.monotonic() - began
    return {"way": _THREAD, "changed": seconds, "calls until then": len(calls), "slowest call": max(calls)}


def _seconds(way: str, options: argparse.Namespace) -> dict[str, object]:
    """One compilation in this process."""
    if way == _THREAD:
        return _in_a_thread(options)
    model = models.build(options.model, options.size)
    inputs = models.random_inputs(model)
    with tempfile.TemporaryDirectory() as cache:
        began = time.monotonic()
        net = souffle.compile(
            model,
            level=options.level,
            target=options.target,
            arch=options.arch,
            precision=options.precision,
            device=options.device,
            cubin=options.cubin,
            verify=options.verify,
            cache_dir=cache,
            background=_WAYS[way],
        )
        found: dict[str, object] = {"way": way, "returned": time.monotonic() - began}
        calls: list[float] = []
        while not calls or not (found["way"] == "plain" or net.ready or net.error is not None):
            start = time.monotonic()
            try:
                net(inputs)
                calls.append(time.monotonic() - start)
            except NoGpuError:
                calls.append(0.0)
                if way != "plain":
                    net.wait()
            found.setdefault("first answer", time.monotonic() - began)
        found["changed"] = time.monotonic() - began
        found["calls until then"] = len(calls)
        found["slowest call"] = max(calls[1:], default=None)
        if way != "plain":
            found["error"] = None if net.error is None else str(net.error)[:200]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="bert")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--level", default="V4")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--verify", default="memory")
    parser.add_argument("--cubin", action="store_true", help="run nvcc")
    parser.add_argument("--ways", nargs="+", default=list(_WAYS), choices=[*_WAYS, _THREAD])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_seconds(options.one, options)))
        return
    for number in range(options.rounds):
        ways = options.ways if number % 2 == 0 else options.ways[::-1]
        for way in ways:
            command = [sys.executable, "-m", "benchmarks.background", *sys.argv[1:], "--one", way]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            print(done.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
