"""Independent stages side by side: which pairs networks have, what each way is predicted to take, and its adversaries.

``python -m benchmarks.side_by_side sets --out docs/results/side_by_side.json [--models nmt ...]`` lists, for each
network, the sets of independent stages that its kernels have between two barriers, with predicted times one after the
other and in the best way of each kind: in block space, by teams of a block, by parts of one; what bounds each stage;
and the predicted time of the network with and without what is taken.

``python -m benchmarks.side_by_side taken --out docs/results/side_by_side_taken.json`` compiles networks, and two
together, with nvcc and the certificate: what is taken, and what the kernels ask of a multiprocessor with and without.

``python -m benchmarks.side_by_side ways --out docs/results/side_by_side_ways.json`` predicts pairs of independent TEs
in one kernel: one after the other, joined by the horizontal transformation, in block space and in thread space.

``python -m benchmarks.side_by_side siege --out docs/results/side_by_side_siege.json [--programs 100] [--mutants 40]``
compiles random programs of independent branches with arrangements at random, whether or not they pay: the bits of the
same network one after the other, in shuffled orders and on grids of several sizes, and PROVEN; and mutants of who
computes what (:mod:`souffle.mutation.shares`), each of which is refuted if it changes a result in 20 shuffled runs.

Each result is kept as it is made: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tvm import te

import souffle
from benchmarks.record import kept_results, save_results
from benchmarks.teams import asked_for
from souffle import models
from souffle.cli.output import format_table
from souffle.codegen.assemble import CompiledKernels
from souffle.codegen.plan import Kernel
from souffle.cost.device import device_of_arch
from souffle.cost.kernel import KernelForecast
from souffle.kernel import kernel_plan, merged_program
from souffle.kernel.block_parts import PART_STEP, Divisions
from souffle.kernel.calls import CallPlan, EpochOrder
from souffle.kernel.kernel_plan import independent_stages
from souffle.kernel.side_by_side import Considered, last_epoch
from souffle.kernel.ways import arrangements
from souffle.mutation.mutants import Mutations
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.trial import Trials, described, inputs_of
from souffle.options import LEVELS
from souffle.partition import PartitionRequest, Subprogram
from souffle.pipeline import compile_cuda
from souffle.program import Tensor, TEProgram
from souffle.runtime.cpu_runner import CpuRunner
from souffle.runtime.explain import predicted_seconds
from souffle.schedule.gpu.device import device_for
from souffle.schedule.group import Group
from souffle.schedule.lower.shares import Share
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import Stage, flat_stages
from souffle.verify import REFUTED
from tests.testlib import Builder, inputs_for

__all__ = ["PROGRAMS", "at_random", "branches", "in_one_kernel", "main", "pairs_of_order", "row_of", "with_listed"]

_GRIDS = (64, 1, 2, 3, 5, 7)
_ARCH = "sm_86"
"""Of random programs: nobody knows what anything takes on it."""

_MODELS = ("resnext", "nmt", "bi-rnn", "crnn", "var-encoder", "dien", "mmoe", "bert", "swin", "efficientnet", "lstm")
_APART = ("reuse", "attention", "resident", "channels")
"""What joins the stages of small programs."""

_MOST_THREADS = 1024

_TAKEN = (
    ("nmt", "fp32"),
    ("resnext", "fp32"),
    ("resnext", "mixed"),
    ("bi-rnn", "mixed"),
    ("bert+resnext", "mixed"),
)
"""Networks in which something is taken, alone or two together, and their precision."""

_MUTATED = range(500, 508)
"""Seeds of the programs that are changed."""

_SPLITS = 16
"""Ways of a set that are kept: those that gain most."""

_MOST_REGISTERS = 255
"""Of a thread."""

_SETS = 6
"""Of each network, those that gain most."""


# Arrangements, whether or not they pay


def at_random(seed: int) -> Callable[..., CallPlan]:
    """What arranges all independent stages at random, in the place of prices; stages that may wait do so at random."""
    rng = random.Random(seed)

    def arranged(
        plan: CallPlan, forecast: KernelForecast, teams: int, planned: Callable[..., CallPlan], **parts: bool
    ) -> CallPlan:
        groups, delayed, divisions = [], {}, Divisions(plan.shape, teams, _ARCH)
        for order in plan.orders:
            epochs = dict(zip(order.units, order.epochs, strict=True))
            for unit in order.units:
                if unit in order.free and rng.random() < 0.5:
                    epochs[unit] = rng.randint(epochs[unit], last_epoch(unit, epochs))
                    delayed[unit] = epochs[unit]
            for epoch in range(max(epochs.values()) + 1):
                members = [unit for unit in order.units if unit in order.free and epochs[unit] == epoch]
                if len(members) > 1:
                    groups.append(
                        Group(tuple(zip(members, _drawn(rng, members, teams, divisions), strict=True)), order.runs)
                    )
        return planned(groups=groups, delayed=delayed) if groups else plan

    return arranged


def _drawn(rng: random.Random, members: Sequence[Stage], teams: int, divisions: Divisions) -> tuple[Share, ...]:
    tiles = [stage.schedule.tiles for stage in members]
    longest = rng.sample(range(len(members)), min(3, len(members)))
    parted = list(divisions.of(members, longest)) if rng.random() < 0.5 else []
    if parted:
        shares = rng.choice(parted)
        return rng.choice([shares, *divisions.near(members, shares)])
    found = list(arrangements(tiles, longest, teams))
    shares = list(rng.choice(found))
    if rng.random() < 0.3:
        # Any worker may have tile 0, also among those of some teams.
        shares[rng.randrange(len(shares))] = Share(shift=rng.randint(1, 300))
    return tuple(shares)


@contextmanager
def forced(seed: int, teams: int) -> Iterator[None]:
    """Kernels of blocks of so many teams, as many as have room, and with arrangements at random."""
    with (
        mock.patch.object(kernel_plan, "_teams", asked_for(teams)),
        mock.patch.object(kernel_plan, "side_by_side", at_random(seed)),
    ):
        yield


# Random programs


def branches(seed: int) -> TEProgram:
    """Independent branches of products, rows, columns and elements, of which some are joined."""
    rng, b = random.Random(seed), Builder()
    sources = [b.input(rng.randint(1, 150), rng.choice((16, 17, 40))) for _ in range(rng.randint(1, 3))]
    ends = []
    for number in range(rng.randint(2, 5)):
        x = rng.choice(sources)
        for _ in range(rng.randint(1, 3)):
            x = _step(rng, b, x, number)
        ends.append(x)
    joined = [b.reduce(x, len(x.shape) - 1) if len(x.shape) > 1 else x for x in ends]
    shapes = Counter(x.shape for x in joined)
    same = [x for x in joined if x.shape == max(shapes, key=lambda shape: shapes[shape])]
    total = same[0]
    for x in same[1:]:
        total = b.plus(total, x)
    return b.program(total, *(x for x in joined if x not in same), *ends[:1])


def _step(rng: random.Random, b: Builder, x: Tensor, seed: int) -> Tensor:
    kind = rng.choice(("product", "product", "elements", "columns", "rows"))
    if len(x.shape) != 2 or kind == "elements":
        return b.map(lambda v: te.round(v * 0.5) + 1.0, x)
    if kind == "product":
        width = rng.choice((16, 24, 33))
        w = np.random.default_rng(seed).integers(-2, 3, (x.shape[1], width)).astype(np.float32)
        return b.map(lambda v: te.round(v * 0.125), b.matmul(x, b.constant(w)))
    most = b.add(_most_of(0 if kind == "columns" else 1), x, name="most")
    down = kind == "columns"
    return b.add(
        lambda v, m: te.compute(v.shape, lambda i, j: v[i, j] - (m[j] if down else m[i])), x, most, name="less"
    )


def _most_of(axis: int) -> Callable[[te.Tensor], te.Tensor]:
    def most(x: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, x.shape[axis]), "k")
        return te.compute((x.shape[1 - axis],), lambda j: te.max(x[k, j] if axis == 0 else x[j, k], k))

    return most


def compiled(program: TEProgram, **options: object) -> CompiledKernels:
    """A network of one kernel: nobody knows what launches cost on the device."""
    given = {"level": "V4", "arch": _ARCH, "cubin": False, "verify": "values", "waits": "barriers"}
    return compile_cuda(program, **{**given, "disable": _APART, **options})


def one_program(seed: int) -> dict[str, Any]:
    """A random program, with arrangements at random and one after the other."""
    program, draw = branches(seed), random.Random(seed)
    with forced(seed, draw.choice((1, 2, 3, 4))):
        net = compiled(program)
    plain = compiled(program, verify="off", disable=(*_APART, "hfuse", "teams"))
    inputs, texts = inputs_of(net.plan, inputs_for(program)), "".join(module.text for module in net.plan.modules)
    runner, expected = CpuRunner(net.plan), CpuRunner(plain.plan).run(inputs)
    parts = [call.share.part for merged in net.merged for call in merged.shape.stage_calls if call.share.part]
    wrong = 0
    for number, grid in enumerate(_GRIDS):
        found = runner.reordered(seed=number, blocks=grid).run(inputs)
        wrong += any(one.tobytes() != other.tobytes() for one, other in zip(found, expected, strict=True))
    return {
        "part": "programs",
        "seed": seed,
        "verdict": net.plan.certificate.verdict,
        "other_bits": wrong,
        "block_space": "turned" in texts,
        "thread_space": "own_count" in texts,
        "parts": len(parts),
        "three_parts": any(part.count == 3 for part in parts),
        "whole_warps": any(part.function.threads % PART_STEP for part in parts),
    }


def mutants(seed: int, count: int) -> dict[str, Any]:
    """Changes of who computes what in a random program, each run in 20 shuffled orders."""
    program = branches(seed)
    with forced(seed, 1 + seed % 4):
        net = compiled(program)
    mutations, counts, missed = Mutations(net), Counter(), []
    with Sandbox() as sandbox:
        trials = Trials(mutations, inputs_of(net.plan, inputs_for(program)), sandbox)
        for mutation in mutations.sample(count, seed=seed, kinds=("share", "part")):
            trial = trials.run(mutation)
            if trial.counts:
                counts[f"{'changed' if trial.changed else 'same'}, {trial.verdict}"] += 1
                if trial.changed and trial.verdict != REFUTED:
                    missed.append(described(trial))
                    print(f"{seed}: {missed[-1]}", file=sys.stderr, flush=True)
    return {"part": "mutants", "seed": seed, "counts": dict(counts), "missed": missed}


# Independent stages of networks


def sets_of(model: str, arch: str, precision: str) -> dict[str, Any]:
    """The sets of independent stages of a network, what each way is predicted to take, and what is taken."""
    program = souffle.import_onnx(models.build(model, size="paper"))
    options = {"level": "V4", "precision": precision, "arch": arch, "verify": "off", "cubin": False}
    found: list[dict[str, Any]] = []

    def listed(subprogram: Subprogram, request: PartitionRequest, *arguments: Any, **options: Any) -> CallPlan:
        for one in independent_stages(subprogram, request, *arguments):
            block = request.forecast.together(flat_stages(subprogram.stages))
            found.append(_set_row(one, request.forecast, block))
        return kernel_plan.plan_kernel(subprogram, request, *arguments, **options)

    with mock.patch.object(merged_program, "plan_kernel", listed):
        plan = compile_cuda(program, **options).plan
    without = compile_cuda(program, **options, disable=("hfuse",)).plan
    found.sort(key=lambda row: row["runs"] * (min(us for us, _ in row["ways"].values()) - row["apart"]))
    taken = [d.subject for d in plan.decisions if d.stage == "hfuse" and d.accepted]
    return {
        "model": model, "arch": arch, "precision": precision, "sets": len(found), "best": found[:_SETS],
        "taken": taken, "us": _us(predicted_seconds(plan)), "us_without": _us(predicted_seconds(without)),
    }  # fmt: skip


def _set_row(one: Considered, forecast: KernelForecast, block: StageResources) -> dict[str, Any]:
    """What independent stages take in the best way of each kind, in µs."""
    ways: dict[str, tuple[float, str]] = {}
    for way in one.ways:
        shared = any(share.teams for share in way.shares)
        kind = "parts" if way.parted else "teams" if shared else "blocks"
        ways.setdefault(kind, (_us(one.apart - way.gain), " | ".join(map(str, way.shares))))
    launch = {"grid": one.block.resident, "teams": one.block.teams}
    most = one.block.resident * one.block.teams
    # 001, Figure 6: so many registers that as many blocks fit as the kernel has of them.
    threads = one.block.threads * one.block.teams * max(1, one.block.resident // forecast.device.sm_count)
    splits = {" | ".join(map(_threads, way.shares)): _us(one.apart - way.gain) for way in one.ways[:_SPLITS]}
    return {
        "stages": [stage.name for stage in one.stages], "tiles": [stage.schedule.tiles for stage in one.stages],
        "runs": one.runs, "block": str(one.block), "apart": _us(one.apart), "ways": ways, "splits": splits,
        "bound": [forecast.bound(stage, block, most, **launch) for stage in one.stages],
        "registers": block.registers, "r0": min(_MOST_REGISTERS, forecast.device.registers_per_sm // threads // 8 * 8),
    }  # fmt: skip


def _threads(share: Share) -> str:
    """Who computes a stage's tiles, in short."""
    return str(share.part.function.threads) if share.part else str(share)


def with_listed(listed: Callable[..., CallPlan], *arguments: object, **options: object) -> CallPlan:
    with mock.patch.object(kernel_plan, "side_by_side", listed):
        return kernel_plan.plan_kernel(*arguments, **options)


def pairs_of_order(order: EpochOrder) -> Iterator[tuple[Stage, Stage]]:
    """Free stages that could be in one epoch."""
    epochs = dict(zip(order.units, order.epochs, strict=True))
    for one, other in combinations([unit for unit in order.units if unit in order.free], 2):
        needed = {*one.outputs} & {*other.inputs}
        if not needed and epochs[one] <= last_epoch(other, epochs) and epochs[other] <= last_epoch(one, epochs):
            yield one, other


def row_of(
    pair: tuple[Stage, Stage], runs: int, plan: CallPlan, forecast: KernelForecast, teams: int
) -> dict[str, Any]:
    """What two stages take in each way, in µs."""
    block = forecast.together(flat_stages(plan.stages))
    most = forecast.resident(block) // teams * teams * forecast.device.sm_count
    tiles = [stage.schedule.tiles for stage in pair]
    blocks = max(1, min(sum(tiles), most // teams))
    waits = plan.shape.waits
    launch = {"grid": blocks if waits else 0, "teams": teams}
    apart = sum(forecast.seconds(stage, block, most, **launch) for stage in pair)
    ways = {}
    for shares in arrangements(tiles, (0, 1), teams):
        space = f"threads {shares[0].teams} | {shares[1].teams} of {teams} teams" if shares[0].teams else "blocks"
        members = tuple(zip(pair, shares, strict=True))
        ways[space] = _us(apart - forecast.gained_seconds(members, block, most, blocks, teams, waits=waits))
    return {
        "stages": [stage.name for stage in pair], "tiles": tiles, "runs": runs, "apart": _us(apart), "ways": ways,
        "bound": [forecast.bound(stage, block, most, **launch) for stage in pair],
    }  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)


def taken_of(network: str, arch: str, precision: str) -> dict[str, Any]:
    """What is taken in a network, or in several with ``+`` between, and what kernels ask for, with it and without."""
    names = network.split("+")
    programs = {name: souffle.import_onnx(models.build(name, size="paper")) for name in names}
    program = souffle.together(programs) if len(names) > 1 else programs[network]
    options = {"level": "V4", "precision": precision, "arch": arch}
    found: dict[str, Any] = {"network": network, "arch": arch, "precision": precision}
    for label, off in (("with", ()), ("without", ("hfuse",))):
        plan = compile_cuda(program, **options, disable=off).plan
        asked = [
            {
                "registers": kernel.resources.registers, "stack_bytes": kernel.resources.stack_bytes,
                "shared": kernel.dynamic_shared_bytes, "threads": kernel.threads,
                "blocks": _resident(kernel, arch), "waits": kernel.grid_syncs, "launches": count,
            }
            for kernel, count in ((k, sum(x.kernel == n for x in plan.launches)) for n, k in enumerate(plan.kernels))
        ]  # fmt: skip
        taken = [f"{d.subject}: {d.reason}" for d in plan.decisions if d.stage == "hfuse" and d.accepted]
        most = sorted(asked, key=lambda one: -one["threads"])[:_SETS]
        found[label] = {
            "us": _us(predicted_seconds(plan)), "verdict": plan.certificate.verdict, "kernels": len(plan.kernels),
            "taken": len(taken), "first": taken[:_SETS], "asked": most,
        }  # fmt: skip
    if len(names) > 1:
        alone = [compile_cuda(one, **options, verify="off", cubin=False).plan for one in programs.values()]
        found["alone_us"] = [_us(predicted_seconds(plan)) for plan in alone]
    return found


def _resident(kernel: Kernel, arch: str) -> int:
    fits = device_for(arch).resident_blocks(kernel.threads, kernel.dynamic_shared_bytes, kernel.resources.registers)
    return min(fits.values())


def _products(shape: tuple[int, int, int], count: int) -> Callable[[Builder], list[Tensor]]:
    rows, inner, width = shape

    def made(b: Builder) -> list[Tensor]:
        x = b.input(rows, inner)
        weights = [np.random.default_rng(n).standard_normal((inner, width)).astype(np.float32) for n in range(count)]
        return [b.matmul(x, b.constant(w)) for w in weights]

    return made


def _rows(rows: int, width: int) -> Callable[[Builder], list[Tensor]]:
    def made(b: Builder) -> list[Tensor]:
        x = b.input(rows, width)
        most = b.reduce(x, 1, "max")
        return [b.add(lambda v, m: te.compute(v.shape, lambda i, j: te.exp(v[i, j] - m[i])), x, most, name="less")]

    return made


def _elements(count: int) -> Callable[[Builder], list[Tensor]]:
    return lambda b: [b.map(lambda v, w: v * 2.0 + w, b.input(count), b.input(count))]


PROGRAMS: dict[str, tuple[Callable[[Builder], list[Tensor]], ...]] = {
    "two equal products, narrow": (_products((384, 768, 192), 2),),
    "two equal products, wide": (_products((384, 768, 768), 2),),
    "two products of other sizes": (_products((384, 768, 384), 1), _products((128, 3072, 768), 1)),
    "a product and long rows": (_products((384, 3072, 768), 1), _rows(2048, 2048)),
    "a product and a sum in memory": (_products((512, 2048, 1024), 1), _elements(1 << 24)),
    "a product and a short sum": (_products((512, 2048, 1024), 1), _elements(1 << 16)),
    "two sums in memory": (_elements(1 << 22), _elements(3 << 21)),
}
"""Independent TEs, none of which a loop or another TE makes a chain of."""

_JOINED = {
    "two equal products, narrow": _products((384, 768, 2 * 192), 1),
    "two equal products, wide": _products((384, 768, 2 * 768), 1),
}
"""What the horizontal transformation makes of those that are isomorphic, where something reads both."""


def in_one_kernel(
    label: str,
    arch: str,
    precision: str,
    told: Callable[[tuple[Stage, Stage], dict[str, Any], KernelForecast], dict[str, Any]] = lambda pair, row, _: row,
) -> dict[str, Any]:
    """What is told of the stages of one of :data:`PROGRAMS` in the kernel that they are last planned for.

    Parameters
    ----------
    label, arch, precision : str
    told : callable
        Of a pair, its row (:func:`row_of`) and the forecast; the row alone by default.
    """
    b = Builder()
    program = b.program(*(tensor for made in PROGRAMS[label] for tensor in made(b)))
    rows: list[dict[str, Any]] = []

    def listed(
        plan: CallPlan, forecast: KernelForecast, teams: int, planned: Callable[..., CallPlan], **parts: bool
    ) -> CallPlan:
        block = forecast.together(flat_stages(plan.stages))
        most = min(forecast.resident(block), _MOST_THREADS // block.threads)
        (order,) = plan.orders
        pairs = pairs_of_order(order)
        rows.extend(told(pair, row_of(pair, 1, plan, forecast, most), forecast) for pair in pairs)
        return plan

    apart = replace(LEVELS["V4"], horizontal=False)
    with mock.patch.dict(LEVELS, V4=apart), mock.patch.object(kernel_plan, "side_by_side", listed):
        compile_cuda(program, **_kernel_options(arch, precision))
    return rows[-1]


def _kernel_options(arch: str, precision: str) -> dict[str, Any]:
    options = {"level": "V4", "precision": precision, "arch": arch, "verify": "off", "cubin": False}
    return options | {"reductions": "one_phase"}


def ways_of(label: str, arch: str, precision: str) -> dict[str, Any]:
    """Predicted µs of two independent stages of one kernel in each way; those in threads with the best split."""
    row = in_one_kernel(label, arch, precision)
    joined = _alone(_JOINED[label], _kernel_options(arch, precision)) if label in _JOINED else None
    threads = {way: us for way, us in row["ways"].items() if way != "blocks"}
    best = min(threads, key=threads.get) if threads else None
    return {
        "program": label, "arch": arch, "precision": precision, "tiles": row["tiles"], "bound": row["bound"],
        "one after the other": row["apart"],
        "horizontal transformation": joined,
        "block space": row["ways"]["blocks"], "thread space": threads.get(best), "split": best,
    }  # fmt: skip


def _alone(made: Callable[[Builder], list[Tensor]], options: dict[str, Any]) -> float:
    """Predicted µs of one stage, without the launch of its kernel."""
    b = Builder()
    plan = compile_cuda(b.program(*made(b)), **options).plan
    return _us(predicted_seconds(plan) - len(plan.launches) * device_of_arch(options["arch"]).launch_seconds)


def _table(results: Sequence[dict[str, Any]]) -> str:
    rows = []
    for result in results:
        names = f"{result['model']} {result['precision']} {result['arch']}"
        rows.append((names, f"{result['sets']} sets", "", "", f"{result['us_without']} -> {result['us']}"))
        for row in result["best"]:
            ways = ", ".join(f"{kind}: {us} ({way})" for kind, (us, way) in row["ways"].items())
            rows.append(("", " | ".join(row["stages"]), " | ".join(row["bound"]), row["apart"], ways))
    return format_table(("network", "independent stages", "bound by", "apart, us", "side by side, us"), rows)


def main() -> int:
    """Run what is not kept yet, and print; 1 where bits are others or a change of a result is not refuted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sets", "taken", "ways", "siege"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(_MODELS))
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90"])
    parser.add_argument("--precision", nargs="+", default=["fp32", "mixed"])
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--mutants", type=int, default=40, help="of each of eight programs")
    arguments = parser.parse_args()
    results = kept_results(arguments.out)
    jobs: dict[tuple[Any, ...], Callable[[], dict[str, Any]]] = {}
    if arguments.what == "sets":
        ways = [(m, a, p) for m in arguments.models for p in arguments.precision for a in arguments.arch]
        jobs = {way: partial(sets_of, *way) for way in ways}
        known = {(r["model"], r["arch"], r["precision"]) for r in results}
    elif arguments.what == "taken":
        ways = [(network, arch, precision) for network, precision in _TAKEN for arch in arguments.arch]
        jobs = {way: partial(taken_of, *way) for way in ways}
        known = {(r["network"], r["arch"], r["precision"]) for r in results}
    elif arguments.what == "ways":
        ways = [(label, arch, p) for label in PROGRAMS for p in arguments.precision for arch in arguments.arch]
        jobs = {way: partial(ways_of, *way) for way in ways}
        known = {(r["program"], r["arch"], r["precision"]) for r in results}
    else:
        jobs = {("programs", seed): partial(one_program, seed) for seed in range(arguments.programs)}
        jobs |= {("mutants", seed): partial(mutants, seed, arguments.mutants) for seed in _MUTATED}
        known = {(r["part"], r["seed"]) for r in results}
    for key, job in jobs.items():
        if key not in known:
            results.append(job())
            save_results(str(arguments.out), "benchmarks.side_by_side", results)
            print(_table(results[-1:]) if arguments.what == "sets" else results[-1], flush=True)
    if arguments.what != "siege":
        return 0
    programs = [r for r in results if r["part"] == "programs"]
    print(Counter(r["verdict"] for r in programs), sum(r["other_bits"] for r in programs), "with other bits")
    print(sum((Counter(r["counts"]) for r in results if r["part"] == "mutants"), Counter()))
    return int(any(r.get("other_bits") or r.get("missed") for r in results))


if __name__ == "__main__":
    sys.exit(main())
