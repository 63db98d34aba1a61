"""Builds what one model takes to the host: networks of all precisions and variants, inputs and expected outputs, and
the model itself. A process of ``benchmarks.gpu_build``.

The model is built and imported once. What a network is goes beside it as ``FILE.json``. Where mixed precision changes
nothing in the model, or a variant cannot be compiled, there is no network, and that file says so.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, numpy_helper

import souffle
from benchmarks import gpu_networks
from benchmarks.weights import Pieces, redrawn, write_graph, write_weights
from souffle import models
from souffle.codegen.plan import Plan
from souffle.errors import SouffleError
from souffle.evaluation.ablation import Variant, plan_figures
from souffle.frontend.model_options import ModelOptions
from souffle.options import ON_CHIP
from souffle.program import TEProgram
from souffle.reference import static_model
from souffle.runtime.plan_versions import PlanVersions
from souffle.transform.precision import mixed_precision

__all__ = ["main"]


def _expected(model: bytes, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def _write_io(model: ModelProto, dims: Mapping[str, Sequence[int]], path: Path) -> None:
    """Values by the model's names; of a network of several versions, behind the number of each."""
    values: dict[str, np.ndarray] = {}
    for number, chosen in enumerate(itertools.product(*dims.values())):
        before = f"{number}/" if dims else ""
        static = static_model(model, ModelOptions(dims=dict(zip(dims, chosen, strict=True)))) if dims else model
        inputs = models.random_inputs(static)
        values |= {f"input/{before}{name}": value for name, value in inputs.items()}
        expected = _expected(static.SerializeToString(), inputs)
        values |= {f"output/{before}{name}": value for name, value in expected.items()}
    part = path.with_suffix(".part.npz")
    np.savez_compressed(part, **values)
    part.replace(path)


def _fingerprint(plan: Plan) -> str:
    """Of all that decides how a network runs, so that variants that change nothing are known."""
    about: list[Any] = [plan.workspace_bytes, plan.options.grid_barrier, plan.options.arch]
    about += [module.text for module in plan.modules]
    # What is predicted, and for whom, is no part of it.
    about += [repr(replace(kernel, predicted=None)) for kernel in plan.kernels]
    about += [repr((launch.kernel, launch.buffers)) for launch in plan.launches]
    about += [repr(buffer) for buffer in plan.buffers]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def _about(plan: Plan | PlanVersions, seconds: float) -> dict[str, Any]:
    """What a case says of its network: its row of an ablation, and which it is; of several versions, of the first."""
    if isinstance(plan, PlanVersions):
        first, *_ = plan.plans.values()
        prints = "-".join(_fingerprint(one)[:8] for one in plan.plans.values())
        return {**_about(first, seconds), "fingerprint": prints, "versions": [list(key) for key in plan.plans]}
    return {
        **plan_figures(plan),
        "compile_s": round(seconds, 1),
        "grid_barrier": plan.options.grid_barrier,
        "teams": max(kernel.teams for kernel in plan.kernels),
        "counted": bool(plan.counts),
        "fingerprint": _fingerprint(plan),
    }


class _Model:
    """One model, imported once."""

    def __init__(
        self,
        model: ModelProto,
        dims: Mapping[str, Sequence[int]],
        draws: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self._model, self._options = model, options
        self._dims = {"dims": {name: list(values) for name, values in dims.items()}} if dims else {}
        self._program: TEProgram | None = None if dims else souffle.import_onnx(model)
        vectors = (numpy_helper.to_array(item) for item in model.graph.initializer if len(item.dims) == 1)
        self._pieces = Pieces(draws, (vector for vector in vectors if vector.dtype == np.float32))
        self._unchanged: bool | None = None

    def _is_fp32(self, precision: str) -> bool:
        """Whether mixed precision was asked for, and changes nothing."""
        if precision == "mixed" and self._unchanged is None and self._program is not None:
            self._unchanged = not any(decision.accepted for decision in mixed_precision(self._program)[1])
        return precision == "mixed" and bool(self._unchanged)

    def save(self, variant: Variant, precision: str, files: Mapping[str, Path], *, beside_fp32: bool) -> None:
        """Compile once; write a file for each way to take constants along, and what it is.

        What is the same in fp32 is left to that, where the folder has it or will have it.
        """
        as_fp32 = beside_fp32 and self._is_fp32(precision)
        about = {"as_fp32": True} if as_fp32 else self._saved(variant, precision, files)
        for path in files.values():
            path.with_suffix(".json").write_text(json.dumps(about))

    def _saved(self, variant: Variant, precision: str, files: Mapping[str, Path]) -> dict[str, Any]:
        began = time.monotonic()
        # What keeps nothing on chip, such as products on integers, may be decided as a model is imported.
        imported = set(variant.disable) <= set(ON_CHIP) and self._program is not None
        source = self._program if imported else self._model
        options = {"precision": precision, **self._options, **self._dims, **variant.options}
        try:
            net = souffle.compile(source, target="cuda", **options)
        except SouffleError as error:
            # What another planner lacks, or makes that does not fit, says nothing of the networks beside it.
            return {"failed": f"{type(error).__name__}: {error}"[:500]}
        about = _about(net.plan, time.monotonic() - began)
        for constants, path in files.items():
            net.save(path, constants=constants)
            if constants == "synthetic":
                found, carried = write_weights(path.with_suffix(".weights.npz"), net.plan.constants, self._pieces)
                about |= {"weights_rebuilt_bytes": found, "weights_carried_bytes": carried}
        return about


def main(argv: list[str] | None = None) -> int:
    """Compile all that is wanted once; write its files, and ``--io`` and ``--graph`` where they are not there yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_build_network", description=__doc__)
    parser.add_argument("model", choices=gpu_networks.NAMES, metavar="MODEL")
    parser.add_argument("--size", required=True)
    parser.add_argument("--arch", required=True)
    parser.add_argument("--no-cubin", dest="cubin", action="store_false")
    parser.add_argument("--steps", type=int)
    parser.add_argument(
        "--wanted", default="[]",
        help='JSON: [{"variant": fields of Variant, "precision": ..., "beside_fp32": ..., "files": {constants: file}}]',
    )  # fmt: skip
    parser.add_argument("--io", required=True, type=Path)
    parser.add_argument("--graph", required=True, type=Path)
    options = parser.parse_args(argv)
    model, draws = redrawn(gpu_networks.build_network(options.model, options.size, options.steps))
    dims = gpu_networks.VERSIONS.get(options.model, {})
    if not options.io.exists():
        _write_io(model, dims, options.io)
    if not options.graph.exists():
        write_graph(options.graph, model, draws)
    wanted = json.loads(options.wanted)
    if wanted:
        imported = _Model(model, dims, draws, {"arch": options.arch, "cubin": options.cubin})
        for one in wanted:
            fields = one["variant"]
            variant = Variant(
                fields["level"], tuple(fields["disable"]), fields["fusion"], tuple(map(tuple, fields["more"]))
            )
            files = {key: Path(path) for key, path in one["files"].items()}
            imported.save(variant, one["precision"], files, beside_fp32=one["beside_fp32"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
