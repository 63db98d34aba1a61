"""What recurrent networks of many sizes wait for, which of their constants stay in registers, and why not the others.

::

    python -m benchmarks.recurrent [--kinds LSTM GRU ...] [--hidden 128 ...] [--layers 1 4] [--batches 1 4] [--steps 8]
        [--archs sm_90 sm_80] [--variants V3 V4 ...] --out FILE.json

Stacks of cells are compiled at V3, at V4 and at V4 without ``weights`` and ``ramps``, without a CUDA compiler; on
demand at V4 without ``interleaving``, too. Nothing is run. Every line is kept as it is made: the same command goes on
where it stopped. Bytes that stay are those of all constants that each step of a loop reads and finds in registers.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import souffle
from benchmarks.prices import microseconds
from benchmarks.record import kept_results, save_results
from benchmarks.results_page.views.recurrent import bytes_that_stay, why_not
from souffle.cli.output import format_table
from souffle.codegen.assemble import CompiledKernels
from souffle.kernel.kernel_shape import LoopCall
from souffle.pipeline import compile_cuda

__all__ = ["kept_bytes", "recurrent"]

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
KINDS = ("LSTM", "GRU", "RNN", "LSTM both ways")
VARIANTS: dict[str, dict[str, Any]] = {
    "V3": {"level": "V3"},
    "V4 without interleaving": {"level": "V4", "disable": ["interleaving"]},
    "V4 without weights": {"level": "V4", "disable": ["weights", "ramps"]},
    "V4": {"level": "V4"},
}

_OF_A_LOOP = re.compile(r"of \d+ bytes of constants that each of its \d+ steps reads")


def kept_bytes(compiled: CompiledKernels) -> tuple[int, int] | None:
    """Bytes of constants that each step of a loop reads: those that stay in registers, and all; ``None`` for no loop.

    A constant stays where every stage of the loop that reads it keeps it.
    """
    plan, shapes = compiled.plan, {merged.name: merged.shape for merged in compiled.merged}
    loops, stays = 0, {}
    for launch in plan.launches:
        for call in shapes[plan.kernels[launch.kernel].name].calls:
            if not isinstance(call, LoopCall):
                continue
            loops += 1
            for stage in call.calls:
                for number, place in enumerate(stage.arguments):
                    index = launch.buffers[place.parameter]
                    if plan.buffers[index].kind == "constant" and not place.stride:
                        kept = stage.kept is not None and number in stage.kept.reads
                        stays[loops, index] = stays.get((loops, index), True) and kept
    if not loops:
        return None
    sizes = {key: plan.buffers[key[1]].nbytes for key in stays}
    return sum(sizes[key] for key in stays if stays[key]), sum(sizes.values())


def _residence(compiled: CompiledKernels) -> dict[str, Any]:
    """What stays, of how much, and each reason why something does not, with how often it is given."""
    found = kept_bytes(compiled)
    if found is None:
        return {"loop": False}
    # Of a loop, how much stays is told too.
    decided = [d for d in compiled.plan.decisions if d.stage == "weights" and not d.accepted]
    why = Counter(d.reason for d in decided if not _OF_A_LOOP.match(d.reason))
    return {"loop": True, "kept_bytes": found[0], "loop_constant_bytes": found[1], "refused": dict(why)}


def _table(results: Sequence[dict[str, Any]]) -> str:
    """A line for each network: predicted µs of each variant, with its barriers, and what stays at V4."""
    variants = [name for name in VARIANTS if any(row["variant"] == name for row in results)]
    lines: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in results:
        lines.setdefault((row["network"], row["arch"]), {})[row["variant"]] = row
    table = []
    for (network, arch), rows in lines.items():
        times = [f"{rows[v]['us']:,.1f} ({rows[v]['syncs']})" if v in rows else "" for v in variants]
        whole = rows.get("V4", {})
        stays = (bytes_that_stay(whole), why_not(whole)) if "loop" in whole else ("", "")
        table.append([network, arch, *times, *stays])
    return format_table(["network", "arch", *variants, "stay / read, KiB", "why not"], table)


def recurrent(
    kind: str, *sizes: int, steps: int, batch: int = 1, padded: bool = False, **attributes: object
) -> onnx.ModelProto:
    """Layers of one kind of cell.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    *sizes : int
        Of the input, then of the state of each layer.
    steps, batch : int
    padded : bool
        Whether sequences are of lengths that an input says, as frameworks export packed ones.
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
        inputs = [last, f"w{layer}", f"r{layer}", f"b{layer}", *(["lengths"] if padded else [])]
        nodes.append(helper.make_node(operator, inputs, [f"y{layer}"], hidden_size=hidden, **way, **attributes))
        nodes.append(helper.make_node("Transpose", [f"y{layer}"], [f"t{layer}"], perm=[0, 2, 1, 3]))
        constants.append(numpy_helper.from_array(np.array([steps, batch, directions * hidden], np.int64), f"s{layer}"))
        nodes.append(helper.make_node("Reshape", [f"t{layer}", f"s{layer}"], [f"z{layer}"]))
        last = f"z{layer}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [steps, batch, sizes[0]])
    lengths = helper.make_tensor_value_info("lengths", TensorProto.INT32, [batch])
    y = helper.make_tensor_value_info(last, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "cells", [x, *([lengths] if padded else [])], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def main() -> int:
    """Compile what is not kept yet, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    for name, default in (("hidden", (128, 300, 512)), ("layers", (1, 4)), ("batches", (1, 4))):
        parser.add_argument(f"--{name}", nargs="+", type=int, default=default)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--padded", action="store_true", help="an input says how long each sequence is")
    parser.add_argument("--archs", nargs="+", default=("sm_90",))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=("V3", "V4 without weights", "V4"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = kept_results(arguments.out)
    known = {(r["network"], r["arch"], r["variant"]) for r in results}
    sizes = product(arguments.kinds, arguments.hidden, arguments.layers, arguments.batches)
    for kind, hidden, layers, batch in sizes:
        padded = ", padded" if arguments.padded else ""
        name = f"{kind}, {layers} x {hidden}, batch {batch}, {arguments.steps} steps{padded}"
        program = None
        for arch, variant in product(arguments.archs, arguments.variants):
            if (name, arch, variant) in known:
                continue
            widths = [hidden] * (layers + 1)
            model = recurrent(kind, *widths, steps=arguments.steps, batch=batch, padded=arguments.padded)
            program = program or souffle.import_onnx(model)
            start = time.process_time()
            how = {"arch": arch, "cubin": False, "verify": "off", **VARIANTS[variant]}
            compiled = compile_cuda(program, **how)
            plan = compiled.plan
            seconds = round(time.process_time() - start, 1)
            constants = sum(array.nbytes for array in plan.constants.values())
            asked = {"constant_bytes": constants, "bytes_read": sum(one.bytes_read for one in plan.launches)}
            asked |= _residence(compiled)
            made = {"network": name, "arch": arch, "variant": variant, **microseconds(plan), **asked}
            results.append({**made, "compile_s": seconds})
            save_results(str(arguments.out), "benchmarks.recurrent", results)
            print(name, arch, variant, made["us"], flush=True)
    print(_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
