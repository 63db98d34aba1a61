"""Builds what one case of ``benchmarks.gpu_host`` takes to the host: networks, inputs and expected outputs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

import models
import souffle

__all__ = ["main"]


def _expected(model: bytes, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def main(argv: list[str] | None = None) -> int:
    """Compile once; write every file of ``--save``, and ``--io`` where it is not there yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_build", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--size", required=True)
    parser.add_argument("--level", required=True)
    parser.add_argument("--arch", required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--save", action="append", required=True, metavar="CONSTANTS=FILE")
    parser.add_argument("--io", required=True, type=Path)
    options = parser.parse_args(argv)
    model = models.build(options.model, options.size, steps=options.steps)
    net = souffle.compile(model, level=options.level, target="cuda", arch=options.arch, precision=options.precision)
    for constants, _, path in (item.partition("=") for item in options.save):
        net.save(path, constants=constants)
    if not options.io.exists():
        inputs = models.random_inputs(model)
        values = {f"input/{name}": value for name, value in inputs.items()}
        expected = _expected(model.SerializeToString(), inputs)
        values |= {f"output/{name}": value for name, value in expected.items()}
        part = options.io.with_suffix(".part.npz")
        np.savez_compressed(part, **values)
        part.replace(options.io)
    plan = net.plan
    sys.stdout.write(
        json.dumps(
            {
                "launches": len(plan.launches),
                "kernels": len(plan.kernels),
                "constant_bytes": sum(buffer.nbytes for buffer in plan.buffers if buffer.kind == "constant"),
                "machine_code_bytes": sum(len(module.cubin) for module in plan.modules),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
