"""V4, and V4 with each thing that keeps tensors on chip left out: right, in any order, clean, proven, mutants refuted.

::

    python -m benchmarks.switches [--networks bert "causal decoder" ...] [--archs sm_80 sm_90] [--precisions fp32 mixed]
        [--mutants 6] --out FILE.json

Each network (:mod:`benchmarks.switch_networks`) is compiled with each switch of ``souffle.options.ON_CHIP`` off, for
the CPU device. What gives the same text as before is not run again. Of what is run: the outputs against ONNX Runtime in
a fixed order, the same bits in a shuffled order with another number of blocks, no finding with every access looked at,
the certificate with values, and random changes of it, of which none that changes a result may be left unrefuted. How
much of each mechanism it holds is told beside it. Every line is kept as it is made: the same command goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import souffle
from benchmarks.record import kept_results, save_results
from benchmarks.switch_networks import NETWORKS
from souffle import models
from souffle.certificate import PROVEN
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.cli.output import format_table
from souffle.codegen.assemble import CompiledKernels
from souffle.errors import CertificateError, DeviceError
from souffle.kernel.merged_program import MergedProgram
from souffle.mutation.mutants import Mutations
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.trial import Trials, described, inputs_of, misses
from souffle.options import ON_CHIP
from souffle.pipeline import compile_cuda
from souffle.program import ExternTE
from souffle.runtime.cpu_runner import CpuRunner
from souffle.schedule.stage import flat_stages
from souffle.verify.certified_step import certified

MECHANISMS = ("chains", "running", "hidden panels", "normalizations", "with copies", "channel chains", "resident")
"""What is counted: chains of products, those of them with a running maximum and sum, and those that leave panels out;
products that begin normalizations, and those that write copies of 16 bits; chains of channels; tensors that stay."""

Inputs = Mapping[str, np.ndarray]


def mechanisms(merged: MergedProgram) -> dict[str, int]:
    """How often the kernels hold each of :data:`MECHANISMS`; what a loop repeats counts once."""
    stages = flat_stages(unit for launch in merged.launches for unit in launch.stages)
    found = Counter(dict.fromkeys(MECHANISMS, 0))
    windows: set[object] = set()
    for stage in stages:
        chain = stage.schedule.rule == "chained_products"
        found["chains"] += chain
        found["running"] += chain and "running" in stage.schedule.way
        found["hidden panels"] += chain and "the mask hides" in stage.schedule.way
        found["channel chains"] += stage.schedule.rule == "channel_owned"
        placed = [te_ for te_ in stage.tes if not isinstance(te_, ExternTE) and te_.placement]
        moments = [te_ for te_ in placed if te_.placement.phase == "moments"]
        found["normalizations"] += bool(moments)
        found["with copies"] += any(tensor.dtype == "float16" for te_ in moments for tensor in te_.outputs)
        windows.update(tensor for tensor, _ in stage.windows)
    found["resident"] = len(windows)
    return dict(found)


def built(program: souffle.TEProgram, **options: Any) -> tuple[CompiledKernels, dict[str, int]]:
    """A network, not proven yet, and what it holds."""
    kept: dict[str, Any] = {}

    def keep(step: str, result: object) -> object:
        kept[step] = result
        return result

    compiled = compile_cuda(program, verify="off", cubin=False, hook=keep, **options)
    return compiled, mechanisms(kept["merge"])


def digest(compiled: CompiledKernels) -> str:
    """Equal for equal texts that are launched alike."""
    plan = compiled.plan
    parts = [module.text for module in plan.modules] + [str((one.kernel, one.buffers)) for one in plan.launches]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def runs(compiled: CompiledKernels, inputs: Inputs, reference: Inputs, precision: str, seed: int) -> dict[str, Any]:
    """What the CPU device says, in order, in a shuffled order, and with every access looked at."""
    plan = compiled.plan
    given = inputs_of(plan, inputs)
    names = [buffer.label for buffer in plan.buffers if buffer.kind == "output"]
    outputs = CpuRunner(plan).run(given)
    result = compare(dict(zip(names, outputs, strict=True)), reference, precision)
    again = CpuRunner(plan, order="shuffled", seed=seed, blocks=3).run(given)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(outputs, again, strict=True))
    try:
        CpuRunner(plan, checked=True).run(given)
        finding = ""
    except DeviceError as error:
        finding = str(error).strip()[:300]
    return {"error": result.error, "right": result.ok, "same bits shuffled": same, "finding": finding}


def changed(compiled: CompiledKernels, inputs: Inputs, count: int, seed: int) -> dict[str, Any]:
    """Random changes: how many are refuted, harmless, or change a result without being refuted."""
    mutations = Mutations(compiled, thorough=True)
    with Sandbox() as sandbox:
        trials = Trials(mutations, inputs_of(compiled.plan, inputs), sandbox)
        tried = [trials.run(one, refuted=False) for one in mutations.sample(count, seed)]
    tried = [trial for trial in tried if trial.counts]
    refuted = sum(trial.verdict == "REFUTED" for trial in tried)
    missed = [described(trial) for trial in misses(tried)]
    return {"mutants": len(tried), "refuted": refuted, "missed": missed}


def proof(compiled: CompiledKernels) -> dict[str, Any]:
    """The verdict with values, and why it is another than PROVEN."""
    try:
        certificate = certified(compiled, "values").plan.certificate
    except CertificateError as error:
        certificate = error.certificate
    reasons = [str(one) for one in certificate.counterexamples] + list(certificate.unknown)
    return {"verdict": certificate.verdict, "reasons": reasons[:3]}


def is_right(row: Mapping[str, Any]) -> bool:
    """Whether nothing is wrong with what was run."""
    if "as" in row:
        return True
    clean = row.get("right") and row["same bits shuffled"] and not row["finding"] and not row.get("missed")
    return bool(clean) and row["verdict"] == PROVEN


class Campaign:
    """All variants of the networks asked for, as far as the file lacks them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.rows = kept_results(arguments.out)

    def run(self) -> None:
        """Go on."""
        arguments = self.arguments
        done = {(r["network"], r["arch"], r["precision"], r["off"]) for r in self.rows}
        for name in arguments.networks:
            todo = [key for key in self._keys(name) if key not in done]
            if not todo:
                continue
            model = NETWORKS[name]()
            program, inputs = souffle.import_onnx(model), models.random_inputs(model)
            reference = onnxruntime_outputs(model, inputs)
            for key in todo:
                self._keep(key, self._one(model, program, key, inputs, reference))

    def _keys(self, name: str) -> Iterator[tuple[str, str, str, str]]:
        return product((name,), self.arguments.archs, self.arguments.precisions, ("", *ON_CHIP))

    def _one(
        self, model: onnx.ModelProto, program: souffle.TEProgram, key: Sequence[str], inputs: Inputs, reference: Inputs
    ) -> dict[str, Any]:
        _, arch, precision, off = key
        began = time.process_time()
        try:
            compiled, counts = built(program, arch=arch, precision=precision, disable=[off] if off else [])
            text = digest(compiled)
            plan = compiled.plan
            found = {"text": text, **counts, "launches": len(plan.launches)}
            found["barriers"] = sum(plan.kernels[launch.kernel].grid_syncs for launch in plan.launches)
            ran = [row for row in self.rows if row["network"] == key[0] and "as" not in row]
            same = next((row for row in ran if row.get("text") == text), None)
            if same is not None:
                return {**found, "as": f"{same['arch']} {same['precision']} {same['off'] or 'V4'}"}
            found |= proof(compiled)
            seed = len(self.rows)
            found |= runs(compiled, inputs, reference, precision, seed)
            if self.arguments.mutants and found["verdict"] == PROVEN:
                found |= changed(compiled, inputs, self.arguments.mutants, seed)
        # What else a compiler or a certificate may raise is what is looked for, too.
        except Exception as error:
            return {"verdict": type(error).__name__, "reasons": [traceback.format_exc()[-1500:]]}
        return {**found, "seconds": round(time.process_time() - began, 1)}

    def _keep(self, key: Sequence[str], found: Mapping[str, Any]) -> None:
        row = {**dict(zip(("network", "arch", "precision", "off"), key, strict=True)), **found}
        self.rows.append(row)
        save_results(str(self.arguments.out), "benchmarks.switches", self.rows)
        state = f"as {row['as']}" if "as" in row else "ok" if is_right(row) else "WRONG"
        print(*key, state, {name: row.get(name) for name in MECHANISMS if row.get(name)}, flush=True)


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each network: how many texts, what they hold at most, errors, and mutants."""
    lines = []
    for name in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == name]
        ran = [row for row in own if "as" not in row]
        most = [str(max(row.get(mechanism, 0) for row in own)) for mechanism in MECHANISMS]
        error = max((row["error"] for row in ran if "error" in row), default=float("nan"))
        mutants = [sum(row.get(what, 0) for row in ran) for what in ("mutants", "refuted")]
        missed = sum(len(row.get("missed", ())) for row in ran)
        wrong = sum(not is_right(row) for row in ran)
        texts = f"{len(ran)} of {len(own)}"
        lines.append([name, texts, *most, f"{error:.1e}", f"{mutants[1]} of {mutants[0]}", str(missed), str(wrong)])
    return lines


def main() -> int:
    """Run what is not kept yet, and print; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--archs", nargs="+", default=("sm_80", "sm_90"))
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "mixed"), default=("fp32", "mixed"))
    parser.add_argument("--mutants", type=int, default=6, help="random changes of each distinct text")
    parser.add_argument("--out", type=Path, required=True)
    campaign = Campaign(parser.parse_args())
    campaign.run()
    columns = ["network", "distinct texts", *MECHANISMS, "largest error", "refuted", "missed", "wrong"]
    print(format_table(columns, table(campaign.rows)))
    return int(not all(is_right(row) for row in campaign.rows))


if __name__ == "__main__":
    sys.exit(main())
