"""What the paper's networks are predicted to take, and what those take that were compiled when prices were others.

::

    python -m benchmarks.prices save --out DIR [--models bert ...] [--archs sm_80 sm_90] [--precisions fp32 mixed]
    python -m benchmarks.prices table --before DIR --after DIR [--out FILE.json]

``save`` compiles each network (V3, paper size, with nvcc, no weights kept) and keeps what a prediction needs, with the
prediction of its day. ``table`` predicts what both folders keep again, by the cost model that is present: the schedules
of before beside those of after, so that each gain compares like with like. Nothing is run.
"""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import souffle
from benchmarks.record import save_results
from souffle import models
from souffle.cli.output import format_table
from souffle.codegen.forecast import with_predictions
from souffle.codegen.plan import Plan
from souffle.cost import KernelForecast, device_of_arch
from souffle.partition import Subprogram
from souffle.pipeline import compile_cuda
from souffle.program import Tensor
from souffle.schedule.stage import flat_stages

MODELS = ("bert", "resnext", "lstm", "efficientnet", "swin", "mmoe")


@dataclass(frozen=True)
class Kept:
    """A compiled network as far as its prediction needs it.

    Attributes
    ----------
    plan : Plan
        Without weights, and with the prediction of its day.
    subprograms : tuple of Subprogram
    distant : frozenset of Tensor
        The network's inputs and weights.
    """

    plan: Plan
    subprograms: tuple[Subprogram, ...]
    distant: frozenset[Tensor]

    def predicted_now(self) -> Plan:
        """The plan with what the present cost model predicts of it."""
        units = [unit for subprogram in self.subprograms for unit in subprogram.stages]
        forecast = KernelForecast(device_of_arch(self.plan.options.arch), units, self.distant)
        return with_predictions(self.plan, self.subprograms, forecast)

    def rules(self) -> dict[str, str]:
        """The rule of each distinct stage, by its label, for those that are computed from TEs."""
        stages = (stage for subprogram in self.subprograms for stage in flat_stages(subprogram.stages))
        return {stage.name: "+".join(f.schedule.rule for f in stage.functions[:1]) for stage in stages}


def microseconds(plan: Plan) -> dict[str, float]:
    """What a run of a network is predicted to take: all, its launches and its barriers."""
    parts = [plan.kernels[launch.kernel].predicted for launch in plan.launches]
    return {
        "us": round(1e6 * sum(part.seconds for part in parts), 1),
        "launches": len(parts),
        "launch_us": round(1e6 * sum(part.launch_seconds for part in parts), 1),
        "syncs": sum(plan.kernels[launch.kernel].grid_syncs for launch in plan.launches),
        "sync_us": round(1e6 * sum(part.sync_seconds for part in parts), 1),
    }


def save(model: str, arch: str, precision: str, folder: Path) -> None:
    """Compile one network and keep it."""
    kept: dict[str, object] = {}

    def hook(name: str, result: object) -> object:
        kept[name] = result
        return result

    program = souffle.import_onnx(models.build(model, "paper"))
    compiled = compile_cuda(
        program, level="V3", arch=arch, precision=precision, verify="off", tuning_log="auto", hook=hook
    )
    subprograms = kept["partition"].subprograms
    analyzed = kept["analysis"].program
    distant = frozenset((*analyzed.inputs, *analyzed.constants))
    one = (replace(compiled.plan, constants={}), subprograms, distant)
    (folder / f"{model}-{arch}-{precision}.pkl").write_bytes(pickle.dumps(one))


def save_all(arguments: argparse.Namespace) -> None:
    """Each network in a process of its own."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    for model in arguments.models:
        for arch in arguments.archs:
            for precision in arguments.precisions:
                print(f"{model} {arch} {precision}", flush=True)
                command = [sys.executable, "-m", "benchmarks.prices", "one", model, arch, precision]
                subprocess.run([*command, "--out", str(arguments.out)], check=True)


def table(arguments: argparse.Namespace) -> None:
    """Predict both folders again, and print."""
    results, rows = [], []
    for path in sorted(arguments.before.glob("*.pkl")):
        model, arch, precision = path.stem.split("-")
        before = Kept(*pickle.loads(path.read_bytes()))
        found = {"then": microseconds(before.plan), "old_schedules": microseconds(before.predicted_now())}
        other = arguments.after / path.name
        if other.exists():
            after = Kept(*pickle.loads(other.read_bytes()))
            found["new_schedules"] = microseconds(after.predicted_now())
            old, new = before.rules(), after.rules()
            found["rules"] = {name: [old[name], new[name]] for name in old if name in new and old[name] != new[name]}
        results.append({"model": model, "arch": arch, "precision": precision, **found})
        rows.append(
            [model, precision, arch, *(_cell(found.get(key)) for key in ("then", "old_schedules", "new_schedules"))]
        )
    columns = ["model", "precision", "arch", "as predicted then", "old schedules, new prices", "new schedules"]
    print(format_table(columns, rows))
    if arguments.out:
        save_results(arguments.out, "benchmarks.prices", results)


def _cell(found: dict | None) -> str:
    return "" if found is None else f"{found['us']} ({found['launches']} launches, {found['syncs']} syncs)"


def main() -> int:
    """Save or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    saving = commands.add_parser("save")
    saving.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    saving.add_argument("--archs", nargs="+", default=("sm_80", "sm_90"))
    saving.add_argument("--precisions", nargs="+", choices=("fp32", "mixed"), default=("fp32", "mixed"))
    saving.add_argument("--out", type=Path, required=True)
    one = commands.add_parser("one")
    one.add_argument("case", nargs=3)
    one.add_argument("--out", type=Path, required=True)
    comparing = commands.add_parser("table")
    comparing.add_argument("--before", type=Path, required=True)
    comparing.add_argument("--after", type=Path, required=True)
    comparing.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    if arguments.command == "one":
        save(*arguments.case, arguments.out)
    elif arguments.command == "save":
        save_all(arguments)
    else:
        table(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
