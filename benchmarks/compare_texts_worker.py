"""What :mod:`benchmarks.compare_texts` runs within a checkout: it builds a model's file, or compiles one and says what
came of it.

It is given to the interpreter as text, with the checkout as the working folder, so that every import is the
checkout's own. It uses what stays when modules move: ``build`` of the models, ``souffle.import_onnx``,
``souffle.compile``, and the plan of the network. Results are lines of JSON; what anything else writes goes to the
standard error.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import onnx

import souffle


def check_origin() -> None:
    """Every module of Souffle must be the checkout's: an installed one, editable or not, would make two sides equal."""
    checkout = Path.cwd()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in ("souffle", "models") and file is not None:
            found = Path(os.path.abspath(file))
            if checkout not in found.parents:
                raise SystemExit(f"{name} comes from {found}, not from the checkout {checkout}")


def build(name: str, size: str, path: str) -> None:
    """Write a model's file."""
    # Where an installed Souffle has such a module, asking for it is no way to find out.
    registry = "souffle.models" if Path("souffle/models/__init__.py").exists() else "models"
    onnx.save(importlib.import_module(registry).build(name, size), path)
    check_origin()


def digest(array: np.ndarray) -> str:
    """Of its bytes, type and shape."""
    held = np.ascontiguousarray(array)
    about = hashlib.sha256(f"{held.dtype} {array.shape}".encode())
    about.update(held.reshape(-1).view(np.uint8))
    return about.hexdigest()


def layout_of(plan: Any) -> dict[str, Any]:
    """What of a plan decides how it runs, but for texts and names."""
    return {
        "workspace_bytes": plan.workspace_bytes,
        "grid_barrier": getattr(plan, "options", plan).grid_barrier,
        "kernels": [
            [kernel.module, kernel.tiles, kernel.threads, kernel.dynamic_shared_bytes, kernel.grid_syncs]
            for kernel in plan.kernels
        ],
        "launches": [[launch.kernel, *launch.buffers] for launch in plan.launches],
        "buffers": [
            {
                "kind": buffer.kind,
                "dtype": buffer.dtype,
                "shape": list(buffer.shape),
                "offset": buffer.offset,
                "label": buffer.label if buffer.kind in ("input", "output") else "",
                "values": digest(plan.constants[buffer.name]) if buffer.kind == "constant" else "",
            }
            for buffer in plan.buffers
        ],
    }


def predicted_microseconds(plan: Any) -> float | None:
    """Of one run; None where no device file describes the GPU."""
    predicted = [plan.kernels[launch.kernel].predicted for launch in plan.launches]
    return None if None in predicted else sum(one.seconds for one in predicted) * 1e6


def compile_all(path: str, configurations: list[dict[str, str]], out: TextIO) -> None:
    """Compile a model as each configuration says; it is imported once."""
    program = souffle.import_onnx(path)
    for configuration in configurations:
        began = time.process_time()
        how = {"target": "cuda", "device": "cpu", "cubin": False, "verify": "off"}
        try:
            plan = souffle.compile(program, **configuration, **how).plan
        except souffle.SouffleError as error:
            found: dict[str, Any] = {"failed": f"{type(error).__name__}: {error}"}
        else:
            found = {
                "seconds": round(time.process_time() - began, 2),
                "predicted_us": predicted_microseconds(plan),
                "modules": [module.text for module in plan.modules],
                "layout": layout_of(plan),
                "names": {
                    "kernels": [kernel.name for kernel in plan.kernels],
                    "buffers": [buffer.name for buffer in plan.buffers],
                },
            }
        check_origin()
        print(json.dumps({"configuration": configuration, **found}), file=out, flush=True)


def main(work: dict[str, Any]) -> None:
    """Do what is asked for."""
    check_origin()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if "build" in work:
        build(*work["build"], work["model"])
    else:
        compile_all(work["model"], work["configurations"], out)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
