"""Builds what ``benchmarks.cost_against_gpu`` takes to the host: many schedules of each TE as cubins, and predictions.

A TE's schedules are the rule's own choice and random values of its knobs; where those are few, other rules' too. Each
is lowered and compiled as a kernel of its own, so that ptxas says what it uses, and predicted with that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import s_tir

import souffle
from benchmarks.cost_against_gpu_cases import Case, cases
from souffle.analysis import analyze
from souffle.calibrate.measure_device import machine_code
from souffle.codegen.cuda import emit_cuda
from souffle.codegen.nvcc import compile_cubin
from souffle.cost import CostDevice, Work, cost_device, predict_work, work_of
from souffle.errors import OptionError
from souffle.kernel import KernelShape
from souffle.kernel.kernel_shape import kernel_of_stage
from souffle.pipeline import LEVELS, transform_program
from souffle.schedule.form_stages import JoinPolicy, form_stages
from souffle.schedule.gpu import RULES, GpuRequest, GpuSchedule, ScheduleError, Sketch, StageForms, check_schedule
from souffle.schedule.gpu.scheduler import GpuScheduler, gpu_request
from souffle.schedule.lower import DeviceFunction, LoweringError, cuda_target, lower_stage
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import Stage, flat_stages
from souffle.tvm_compat import structural_digest

__all__ = ["Candidate", "Manifest", "main", "made_schedule", "predictions", "sampled", "stage_of"]

_IN_A_FILE = 12
"""Kernels of one cubin: a call of nvcc costs seconds whatever it holds, and no file grows large."""
_TRIES = 12
"""Random values tried for each schedule that is wanted: not all go together."""
_SLOWEST = 40.0
"""Times the default's prediction: what is slower still would only use up the host's time."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A schedule of a case, lowered."""

    case: Case
    stage: Stage
    schedule: GpuSchedule
    values: dict[str, int]
    function: DeviceFunction
    default: bool

    @property
    def nbytes(self) -> int:
        """Of all tensors that it reads and writes."""
        return sum(tensor.nbytes for tensor in (*self.stage.inputs, *self.stage.outputs))


def stage_of(case: Case, device: CostDevice, target: tvm.target.Target) -> Stage:
    """The case as the one stage that it becomes in a network."""
    tensors = case.build()
    program, _ = transform_program(souffle.from_te(tensors[:-1], tensors[-1:]), LEVELS["V2"], "fp32")
    scheduler = GpuScheduler(device.limits)
    stages = flat_stages(
        form_stages(program, analyze(program.expanded()), scheduler, JoinPolicy(True, frozenset({"reuse"})))[0]
    )
    if len(stages) != 1:
        raise SystemExit(f"{case.name} becomes {len(stages)} stages; a case is one")
    return stages[0]


def _values(sketch: Sketch, chance: random.Random, wanted: int) -> Iterator[tuple[dict[str, int], bool]]:
    """The rule's own values, then random ones, none twice; and whether they are the rule's own."""
    try:
        own = sketch.choose()
    except s_tir.ScheduleError:
        own = None
    seen = set()
    for number in range(_TRIES * wanted):
        if number == 0:
            if not isinstance(own, Mapping):
                continue
            values = dict(own)
        else:
            values = {knob.name: chance.choice(knob.values) for knob in sketch.knobs}
        key = tuple(sorted(values.items()))
        if key not in seen:
            seen.add(key)
            yield values, number == 0


def sampled(
    case: Case, device: CostDevice, target: tvm.target.Target, count: int, seed: int
) -> tuple[list[Candidate], dict[str, int]]:
    """Schedules of a case that lower and fit the device, the default first; and why others were left out.

    Parameters
    ----------
    case : Case
    device : CostDevice
    target : Target
    count : int
        Most schedules.
    seed : int
        Of the random values.
    """
    stage = stage_of(case, device, target)
    request = gpu_request(device)
    chance = random.Random(f"{case.name} {seed}")
    found: list[Candidate] = []
    left: dict[str, int] = {}
    digests: set[str] = set()
    limit = math.inf
    forms = StageForms(stage.draft.func)
    for rule in RULES.values():
        sketch = rule.sketch(forms, request)
        if not isinstance(sketch, Sketch):
            continue
        for values, own in _values(sketch, chance, count):
            if len(found) == count:
                break
            reason, made = made_schedule(stage, sketch, values, request, target, digests)
            if made is not None:
                default = own and not any(one.default for one in found)
                candidate = Candidate(case, stage, made[0], values, made[1], default)
                reason, seconds = _estimate(candidate, device)
                if reason is None and seconds > limit:
                    reason = "much slower"
                if reason is None:
                    limit = _SLOWEST * seconds if default else limit
                    found.append(candidate)
            if reason is not None:
                left[reason] = left.get(reason, 0) + 1
    return sorted(found, key=lambda one: not one.default), left


def made_schedule(
    stage: Stage, sketch: Sketch, values: dict[str, int], request: GpuRequest, target: tvm.target.Target, seen: set[str]
) -> tuple[str | None, tuple[GpuSchedule, DeviceFunction] | None]:
    """A schedule with its function, or why there is none."""
    try:
        schedule = sketch.make(values)
        if not isinstance(schedule, GpuSchedule):
            return "refused", None
        check_schedule(schedule, request)
        digest = structural_digest(schedule.func)
        if digest in seen:
            return "equal", None
        seen.add(digest)
        functions = lower_stage("stage", schedule, target)
    except (s_tir.ScheduleError, ScheduleError):
        return "a step does not apply", None
    except LoweringError:
        return "not lowered", None
    return (None, (schedule, functions[0])) if len(functions) == 1 else ("several functions", None)


def _estimate(candidate: Candidate, device: CostDevice) -> tuple[str | None, float]:
    """Seconds without a compiler's word, or why the schedule cannot run."""
    used = StageResources.assumed(candidate.function.shared_bytes, candidate.function.threads)
    if used.shared_bytes > device.shared_per_block:
        return "too much shared memory", 0.0
    try:
        terms = predict_work(work_of(candidate.function), candidate.function.tiles, used, device, candidate.nbytes)
    except OptionError:
        return "does not fit", 0.0
    return None, max(terms.multiprocessors, terms.l2, terms.memory)


def predictions(entry: dict[str, Any], nbytes: int, device: CostDevice) -> dict[str, Any]:
    """What the cost model says of a schedule: microseconds with tensors in memory and in the L2 cache, and the bound.

    Parameters
    ----------
    entry : dict
        Of the schedule in the manifest: its work, tiles and resources.
    nbytes : int
        Of all its tensors.
    device : CostDevice
    """
    used = StageResources(**entry["resources"])
    found: dict[str, Any] = {}
    for mode in ("cold", "warm"):
        terms = predict_work(
            Work(**entry["work"]), entry["tiles"], used, device, nbytes, device.launch_seconds, warm=mode == "warm"
        )
        seconds = terms.start + max(terms.multiprocessors, terms.l2, terms.memory)
        found |= {f"{mode}_us": round(seconds * 1e6, 4), f"{mode}_bound": terms.bound}
    return found


def _kernel(name: str, candidate: Candidate) -> KernelShape:
    tensors = (*candidate.stage.inputs, *candidate.stage.outputs)
    return kernel_of_stage([candidate.function], [(t.dtype, t.nbytes) for t in tensors], f"{name}_tile")


def _compile(
    named: Sequence[tuple[str, Candidate]], target: tvm.target.Target, arch: str, cache: Path | None
) -> list[tuple[str, bytes, dict[str, Any]]]:
    """Text, machine code and resources of each file of kernels, in order."""
    parts = [named[start : start + _IN_A_FILE] for start in range(0, len(named), _IN_A_FILE)]
    texts = [emit_cuda([(name, _kernel(name, one)) for name, one in part], target)[0] for part in parts]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        made = list(pool.map(lambda text: compile_cubin(text, arch, cache_dir=cache), texts))
    return [(text, cubin, used) for text, (cubin, used) in zip(texts, made, strict=True)]


class Manifest:
    """A build as it grows: cubins in a folder, and what is known of them.

    Parameters
    ----------
    out : Path
    device : CostDevice
        For which schedules are predicted.
    cache : Path or None
        Where cubins are kept by their text.
    module : str
        That was called.
    about : object
        What else the manifest says: ``seed``, and ``small`` where tensors are.
    """

    def __init__(self, out: Path, device: CostDevice, cache: Path | None, module: str, **about: Any) -> None:
        self.out, self.device, self.cache, self.target = out, device, cache, cuda_target(device.arch)
        out.mkdir(parents=True, exist_ok=True)
        (out / "measure.cubin").write_bytes(machine_code(device.arch))
        self.content: dict[str, Any] = {
            "command": " ".join(["python -m", module, *sys.argv[1:]]),
            "device": device.product, "arch": device.arch, "small": False, **about, "measure": "measure.cubin",
            "cases": {},
        }  # fmt: skip

    def add(self, case: Case, found: Sequence[Candidate], left: Mapping[str, int]) -> None:
        """Compile a case's candidates, the rule's own first, and enter them.

        Raises
        ------
        SystemExit
            If the rule's own schedule is not among them.
        """
        began = time.monotonic()
        named = [(f"{case.name}_{number}", candidate) for number, candidate in enumerate(found)]
        entries: dict[str, Any] = {}
        for number, (text, cubin, used) in enumerate(_compile(named, self.target, self.device.arch, self.cache)):
            file = f"{case.name}-{number}.cubin"
            (self.out / file).write_bytes(cubin)
            (self.out / file).with_suffix(".cu").write_text(text)
            for name, candidate in named[number * _IN_A_FILE : (number + 1) * _IN_A_FILE]:
                entries[name] = _entry(candidate, file, used[name], self.device)
        if not found or not found[0].default:
            raise SystemExit(
                f"{case.name}: no rule's own schedule can be lowered and fits the device; left out: {left}"
            )
        stage = found[0].stage
        self.content["cases"][case.name] = {
            "inputs": [[list(t.shape), t.dtype] for t in stage.inputs],
            "outputs": [[list(t.shape), t.dtype] for t in stage.outputs],
            "reference": case.reference,
            "bytes": found[0].nbytes,
            "left_out": dict(left),
            "schedules": entries,
        }
        rules = sorted({entry["rule"] for entry in entries.values()})
        spills = sum(entry["resources"]["spill_bytes"] > 0 for entry in entries.values())
        sys.stderr.write(
            f"{case.name:26} {len(entries):3} schedules ({', '.join(rules)}), {spills} with spills, "
            f"left out {dict(left)}, {time.monotonic() - began:.1f} s to compile\n"
        )

    def write(self) -> None:
        """Say in a file what was built."""
        (self.out / "manifest.json").write_text(json.dumps(self.content, indent=1))
        total = sum(len(case["schedules"]) for case in self.content["cases"].values())
        nbytes = sum(path.stat().st_size for path in self.out.iterdir() if path.suffix in (".cubin", ".json"))
        sys.stderr.write(
            f"{total} schedules of {len(self.content['cases'])} TEs, {nbytes / 2**20:.1f} MiB that travel\n"
        )


def _build(options: argparse.Namespace) -> int:
    device = cost_device(options.device)
    module = "benchmarks.cost_against_gpu"
    manifest = Manifest(options.out, device, options.cache, module, small=options.small, seed=options.seed)
    for case in cases(options.small):
        if not options.cases or case.name in options.cases:
            manifest.add(case, *sampled(case, device, manifest.target, options.schedules, options.seed))
    manifest.write()
    return 0


def _entry(candidate: Candidate, file: str, used: Any, device: CostDevice) -> dict[str, Any]:
    function = candidate.function
    resources = StageResources(
        used.registers, used.static_shared_bytes, function.shared_bytes, function.threads, used.spill_store_bytes, True
    )
    entry = {
        "file": file,
        "rule": candidate.schedule.rule,
        "values": candidate.values,
        "default": candidate.default,
        "tiles": function.tiles,
        "resources": asdict(resources),
        "work": asdict(work_of(function)),
    }
    return entry | {"predicted": predictions(entry, candidate.nbytes, device)}


def _predict(options: argparse.Namespace) -> int:
    """Predict a build's schedules for another description of the device, such as one measured on the host."""
    device = cost_device(options.device)
    path = options.input / "manifest.json"
    manifest = json.loads(path.read_text())
    if device.arch != manifest["arch"]:
        raise SystemExit(f"{options.input} is built for {manifest['arch']} and {device.product} is {device.arch}")
    for case in manifest["cases"].values():
        for entry in case["schedules"].values():
            entry["predicted"] = predictions(entry, case["bytes"], device)
    manifest["device"] = device.product
    path.write_text(json.dumps(manifest, indent=1))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Build, or predict again."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_against_gpu", description=__doc__)
    commands = parser.add_subparsers(required=True)
    build = commands.add_parser("build")
    build.add_argument("--out", type=Path, required=True)
    build.add_argument("--device", default="H200-SXM5-141GB", help="a product, or a file of souffle measure-device")
    build.add_argument("--schedules", type=int, default=20, help="of each TE, at most")
    build.add_argument("--cases", nargs="*", default=[], help="only these")
    build.add_argument("--small", action="store_true", help="small tensors, for a rehearsal that runs the kernels")
    build.add_argument("--seed", type=int, default=0)
    build.add_argument("--cache", type=Path, help="where cubins are kept by their text")
    build.set_defaults(action=_build)
    again = commands.add_parser("predict")
    again.add_argument("--in", dest="input", type=Path, required=True)
    again.add_argument("--device", required=True, help="a product, or a file of souffle measure-device")
    again.set_defaults(action=_predict)
    options = parser.parse_args(argv)
    return options.action(options)


if __name__ == "__main__":
    sys.exit(main())
