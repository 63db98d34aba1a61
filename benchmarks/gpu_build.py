"""Builds what one model takes to the host: networks of all levels and precisions, inputs and expected outputs, and
the model itself.

The model is built and imported once. What a level's network is goes beside it as ``FILE.json``. Where mixed precision
changes nothing in the model, there is no network, and that file says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import ModelProto, numpy_helper

import souffle
from benchmarks.weights import Pieces, redrawn, write_graph, write_weights
from souffle import models
from souffle.options import GRID_BARRIER_NAMES
from souffle.transform.precision import mixed_precision

__all__ = ["main"]


def _expected(model: bytes, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def _write_io(model: ModelProto, path: Path) -> None:
    inputs = models.random_inputs(model)
    values = {f"input/{name}": value for name, value in inputs.items()}
    expected = _expected(model.SerializeToString(), inputs)
    values |= {f"output/{name}": value for name, value in expected.items()}
    part = path.with_suffix(".part.npz")
    np.savez_compressed(part, **values)
    part.replace(path)


def main(argv: list[str] | None = None) -> int:
    """Compile each level once; write its files, and ``--io`` and ``--graph`` where they are not there yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_build", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--size", required=True)
    parser.add_argument("--arch", required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--save", action="append", default=[], metavar="LEVEL:PRECISION:CONSTANTS:BARRIER=FILE")
    parser.add_argument("--io", required=True, type=Path)
    parser.add_argument("--graph", required=True, type=Path)
    options = parser.parse_args(argv)
    model, draws = redrawn(models.build(options.model, options.size, steps=options.steps))
    if not options.io.exists():
        _write_io(model, options.io)
    if not options.graph.exists():
        write_graph(options.graph, model, draws)
    if not options.save:
        return 0
    program = souffle.import_onnx(model)
    vectors = (numpy_helper.to_array(item) for item in model.graph.initializer if len(item.dims) == 1)
    pieces = Pieces(draws, (vector for vector in vectors if vector.dtype == np.float32))
    levels: dict[tuple[str, str, str], list[tuple[str, Path]]] = {}
    for item in options.save:
        key, _, path = item.partition("=")
        level, precision, constants, barrier = key.split(":")
        levels.setdefault((level, precision, barrier), []).append((constants, Path(path)))
    mixed = any(precision == "mixed" for _, precision, _ in levels)
    unchanged = mixed and not any(decision.accepted for decision in mixed_precision(program)[1])
    for (level, precision, barrier), files in levels.items():
        if precision == "mixed" and unchanged:
            for _, path in files:
                path.with_suffix(".json").write_text(json.dumps({"as_fp32": True}))
            continue
        began = time.monotonic()
        net = souffle.compile(
            program,
            level=level,
            target="cuda",
            arch=options.arch,
            precision=precision,
            # Flags, blocks without teams, and stages one after the other, are ways beside the two barriers.
            grid_barrier=barrier if barrier in GRID_BARRIER_NAMES else "counter",
            waits="flags" if barrier == "flags" else "barriers",
            disable={"blocks": ["teams"], "apart": ["hfuse"], "unasked": ["weights"]}.get(barrier, []),
        )
        plan = net.plan
        about = {
            "build_seconds": round(time.monotonic() - began, 1),
            "launches": len(plan.launches),
            "kernels": len(plan.kernels),
            "grid_syncs": sum(plan.kernels[launch.kernel].grid_syncs for launch in plan.launches),
            "teams": max(kernel.teams for kernel in plan.kernels),
            "arrivals": sum(plan.kernels[launch.kernel].arrivals for launch in plan.launches),
            "constant_bytes": sum(buffer.nbytes for buffer in plan.buffers if buffer.kind == "constant"),
            "machine_code_bytes": sum(len(module.cubin) for module in plan.modules),
        }
        for constants, path in files:
            net.save(path, constants=constants)
            if constants == "synthetic":
                weights = path.with_suffix(".weights.npz")
                found, carried = write_weights(weights, plan.constants, pieces)
                about |= {"weights_rebuilt_bytes": found, "weights_carried_bytes": carried}
            path.with_suffix(".json").write_text(json.dumps(about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
