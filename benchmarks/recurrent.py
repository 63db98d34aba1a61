"""What recurrent networks of many sizes wait for, and what computing cells with their gates is predicted to gain.

::

    python -m benchmarks.recurrent [--kinds LSTM GRU ...] [--hidden 128 ...] [--layers 1 4] [--batches 1 4] [--steps 16]
        [--archs sm_90 sm_80] --out FILE.json

Stacks of cells are compiled at V3, at V4 and at V4 without ``interleaving``, without a CUDA compiler. Nothing is run.
Every line is kept as it is made: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import souffle
from benchmarks.prices import microseconds
from benchmarks.record import kept_results, save_results
from souffle.cli.output import format_table

__all__ = ["recurrent"]

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
KINDS = ("LSTM", "GRU", "RNN", "LSTM both ways")
VARIANTS: dict[str, dict[str, Any]] = {
    "V3": {"level": "V3"},
    "V4 without interleaving": {"level": "V4", "disable": ["interleaving"]},
    "V4": {"level": "V4"},
}


def recurrent(kind: str, *sizes: int, steps: int, batch: int = 1, **attributes: object) -> onnx.ModelProto:
    """Layers of one kind of cell.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    *sizes : int
        Of the input, then of the state of each layer.
    steps, batch : int
    **attributes
        Of each node.
    """
    operator, directions = (kind.split()[0], 2) if " " in kind else (kind, 1)
    rng = np.random.default_rng(len(sizes) * 100 + sizes[-1])
    nodes, constants, last = [], [], "x"
    for layer, (before, hidden) in enumerate(pairwise(sizes)):
        width = before if layer == 0 else before * directions
        gates = GATES[operator] * hidden
        shapes = {"w": (gates, width), "r": (gates, hidden), "b": (2 * gates,)}
        for name, shape in shapes.items():
            value = (rng.standard_normal((directions, *shape)) / np.sqrt(hidden)).astype(np.float32)
            constants.append(numpy_helper.from_array(value, f"{name}{layer}"))
        way = {} if directions == 1 else {"direction": "bidirectional"}
        inputs = [last, f"w{layer}", f"r{layer}", f"b{layer}"]
        nodes.append(helper.make_node(operator, inputs, [f"y{layer}"], hidden_size=hidden, **way, **attributes))
        nodes.append(helper.make_node("Transpose", [f"y{layer}"], [f"t{layer}"], perm=[0, 2, 1, 3]))
        constants.append(numpy_helper.from_array(np.array([steps, batch, directions * hidden], np.int64), f"s{layer}"))
        nodes.append(helper.make_node("Reshape", [f"t{layer}", f"s{layer}"], [f"z{layer}"]))
        last = f"z{layer}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [steps, batch, sizes[0]])
    y = helper.make_tensor_value_info(last, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "cells", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def main() -> int:
    """Compile what is not kept yet, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    for name, default in (("hidden", (128, 300, 512)), ("layers", (1, 4)), ("batches", (1, 4))):
        parser.add_argument(f"--{name}", nargs="+", type=int, default=default)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--archs", nargs="+", default=("sm_90",))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = kept_results(arguments.out)
    known = {(r["network"], r["arch"], r["variant"]) for r in results}
    sizes = product(arguments.kinds, arguments.hidden, arguments.layers, arguments.batches)
    for kind, hidden, layers, batch in sizes:
        name = f"{kind}, {layers} x {hidden}, batch {batch}, {arguments.steps} steps"
        program = None
        for arch, variant in product(arguments.archs, VARIANTS):
            if (name, arch, variant) in known:
                continue
            model = recurrent(kind, *[hidden] * (layers + 1), steps=arguments.steps, batch=batch)
            program = program or souffle.import_onnx(model)
            start = time.process_time()
            how = {"arch": arch, "cubin": False, "verify": "off", **VARIANTS[variant]}
            plan = souffle.compile(program, target="cuda", device="cpu", **how).plan
            seconds = round(time.process_time() - start, 1)
            constants = sum(array.nbytes for array in plan.constants.values())
            asked = {"constant_bytes": constants, "bytes_read": sum(one.bytes_read for one in plan.launches)}
            made = {"network": name, "arch": arch, "variant": variant, **microseconds(plan), **asked}
            results.append({**made, "compile_s": seconds})
            save_results(str(arguments.out), "benchmarks.recurrent", results)
            print(name, arch, variant, made["us"], flush=True)
    columns = ["network", "arch", "level", "launches", "barriers", "read MiB", "constants MiB", "predicted µs"]
    table = [
        [r["network"], r["arch"], r["variant"], r["launches"], r["syncs"], f"{r['bytes_read'] / 2**20:.1f}",
         f"{r['constant_bytes'] / 2**20:.1f}", f"{r['us']:,.1f}", r["compile_s"]]
        for r in results
    ]  # fmt: skip
    print(format_table([*columns, "compile s"], table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
